//! Faults while a guest moves: bad input, lost connections, killed daemons and QEMUs.
#![cfg(test)]

mod blows;
mod control_groups;
mod crashes;
mod databases;
mod disks;
mod disks_after;
mod errors;
mod failing_disk;
mod groups;
mod huge_pages;
mod lost_for_good;
mod move_disk;
mod out_of_memory;
mod remains;
mod resuming;
mod space;
mod startup;
mod strangers;
mod truncated;
mod versions;
mod waits;
