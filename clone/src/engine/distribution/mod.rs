//! A template's memory, from the parent's node to the hosts of a fork: which parts of RAM blocks travel, in which order, by which
//! fabric.

mod fabric;
mod memory;
mod parts;
mod root;
mod send_order;

pub use fabric::{Connections, read_opening};
pub use memory::{ArrivingMemory, allocated};
#[cfg(feature = "fuzzing")]
pub use parts::lie_in;
pub use parts::part_at;
pub use root::{Hosts, Spreading, begin};
