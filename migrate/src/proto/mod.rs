//! What two daemons say to each other in a migration.

mod disks;
pub mod message;
#[cfg(test)]
mod tests;
