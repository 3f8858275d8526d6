//! Children that are prepared before the fork: QEMU started, memory laid over that of the parent, waiting for device state.

mod for_other_nodes;
mod on_other_nodes;
mod on_this_node;

pub use for_other_nodes::HostedSet;
pub use on_other_nodes::AwaySet;
