//! What two daemons say to each other in a migration.

pub mod message;
#[cfg(test)]
mod tests;
