//! What two daemons say to each other.

pub mod hello;
