//! What two daemons say to each other.

pub mod channel;
pub mod codec;
pub mod hello;
pub mod message;
