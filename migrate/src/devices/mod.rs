//! Devices of the nodes that a guest owns: it lets them go before its memory is read, and gets others when all of its memory is there.
//!
//! What a device writes into guest memory is seen by no one: nothing that was read while one was plugged in counts. While one is plugged in, QEMU
//! pins all guest memory, which must be there by then: QEMU's main loop would wait for pages that are missing. How a device is plugged in, and leaves, is the same as for
//! forks: [`vmove_node::guest_devices`].
//!
//! | Module | Owns |
//! |---|---|
//! | [`attach`] | plugging a device in, by the node's QEMUs |
//! | [`own_state`] | what devices say that can carry their own state |
//! | [`arrival`] | which devices a guest gets at the destination; taken before it is touched, given back if it does not come |
//! | [`way`] | how each device would be moved, or why not |

pub(crate) mod arrival;
pub(crate) mod attach;
pub(crate) mod own_state;
pub(crate) mod way;

pub(crate) use vmove_node::guest_devices::{detach, missing, of_role, script, told};

/// Property by which a network device is the primary of a pair, and what it names.
pub(crate) const FAILOVER_PAIR: &str = "failover_pair_id";
