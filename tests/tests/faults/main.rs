//! Faults while a guest moves: bad input, lost connections, killed daemons and QEMUs.
#![cfg(test)]

mod blows;
mod crashes;
mod errors;
mod lost_for_good;
mod remains;
mod space;
mod startup;
mod strangers;
mod truncated;
mod versions;
mod waits;
