//! Children that are prepared before the fork: QEMU is started, the parent's memory files are mapped, the device state is missing.

mod for_other_nodes;
mod on_other_nodes;
mod on_this_node;

pub use for_other_nodes::HostedSet;
pub use on_other_nodes::AwaySet;
