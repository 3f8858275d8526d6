//! Devices of the node that guests have plugged in: a guest lets one go, and gets one. Migrations and forks do both.
//!
//! What a device writes into guest memory is seen by no one, and while one is plugged in QEMU pins all guest memory: nothing that was read before
//! it has left counts, guest memory must not be mapped anew before, and all of it must be there when one comes.
//!
//! | Module | Owns |
//! |---|---|
//! | [`attach`](mod@attach) | plugging a device in, as often as it takes |
//! | [`detach`](mod@detach) | having the guest let it go |
//! | [`script`] | programs that are run in the guest before and after |
//! | [`fit`] | whether a guest could do without its devices, and whether another one can take the place of one |

pub mod attach;
pub mod detach;
pub mod fit;
mod monitor;
pub mod script;

use serde::{Deserialize, Serialize};
use vmove_types::device::VmDevice;
use vmove_types::progress::MissingDevice;
use vmove_types::time::Mono;

pub use self::monitor::{DeviceMonitor, InGuestError, Ran};
use crate::record::VmRecord;

/// What a guest was asked to do about its devices.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Detached {
    /// A script was run in it, or was about to be: another one is to be run when it has its devices again.
    pub quiesced: bool,
    /// Devices that it was asked for.
    pub asked: Vec<Asked>,
}

/// A device that a guest was asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    /// What it is to the guest.
    pub role: String,
    /// When.
    pub asked_at: Mono,
    /// When it was away.
    pub gone_at: Option<Mono>,
    /// The guest has said no.
    pub refused: bool,
}

/// What an operator does about a device that a guest lacks.
#[must_use]
pub fn missing(node: &str, vm: &str, role: &str, why: String) -> MissingDevice {
    MissingDevice {
        role: role.to_owned(),
        why,
        node: node.to_owned(),
        mend: format!("vmove devices attach {vm} {role}"),
    }
}

/// What is said of a guest that lacks devices.
#[must_use]
pub fn told(missing: &[MissingDevice]) -> String {
    let one = |missing: &MissingDevice| {
        let MissingDevice { role, why, node, mend } = missing;
        format!("the guest lacks its device {role}: {why}; `{mend}` on {node} gives it back")
    };
    missing.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// The device of a role.
#[must_use]
pub fn of_role<'a>(vm: &'a VmRecord, role: &str) -> Option<&'a VmDevice> {
    vm.devices.iter().find(|device| device.request.role == role)
}
