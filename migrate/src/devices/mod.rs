//! Devices of the nodes that a guest owns: it lets them go before its memory is read, and gets others when all of its memory is there.
//!
//! What a device writes into guest memory is seen by no one: nothing that was read while one was plugged in counts. While one is plugged in, QEMU
//! pins all guest memory, which must be there by then: QEMU's main loop would wait for pages that are missing.
//!
//! | Module | Owns |
//! |---|---|
//! | [`attach`] | plugging a device in, as often as it takes |
//! | [`detach`] | having the guest let it go |
//! | [`script`] | programs that are run in the guest before and after |
//! | [`own_state`] | what devices say that can carry their own state |
//! | [`arrival`] | which devices a guest gets at the destination; taken before it is touched, given back if it does not come |
//! | [`way`] | how each device would be moved, or why not |

pub(crate) mod arrival;
pub(crate) mod attach;
pub(crate) mod detach;
pub(crate) mod own_state;
pub(crate) mod script;
pub(crate) mod way;

use vmove_node::record::VmRecord;
use vmove_types::device::VmDevice;
use vmove_types::progress::MissingDevice;

/// What an operator does about a device that a guest lacks.
pub(crate) fn missing(node: &str, vm: &str, role: &str, why: String) -> MissingDevice {
    MissingDevice {
        role: role.to_owned(),
        why,
        node: node.to_owned(),
        mend: format!("vmove devices attach {vm} {role}"),
    }
}

/// What is said of a guest that lacks devices.
pub(crate) fn told(missing: &[MissingDevice]) -> String {
    let one = |missing: &MissingDevice| {
        let MissingDevice { role, why, node, mend } = missing;
        format!("the guest lacks its device {role}: {why}; `{mend}` on {node} gives it back")
    };
    missing.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// The device of a role.
pub(crate) fn of_role<'a>(vm: &'a VmRecord, role: &str) -> Option<&'a VmDevice> {
    vm.devices.iter().find(|device| device.request.role == role)
}

/// Property by which a network device is the primary of a pair, and what it names.
pub(crate) const FAILOVER_PAIR: &str = "failover_pair_id";
