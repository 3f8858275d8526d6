//! Devices of the node in forks: the parent is without them while its memory is frozen or mapped anew, and each child gets its own.
//!
//! What a device writes goes past page tables: while one is plugged in, memory can be neither frozen nor given a new mapping (hazards 16 and 18).
//!
//! | Module | Owns |
//! |---|---|
//! | [`choice`] | which child gets which device, and with which addresses |
//! | [`away`] | a guest that lets its devices go and gets them back |
//! | [`of_children`] | children on this node: let in; their devices: taken, plugged in, given back |
//! | [`owed`] | what a killed daemon owes: one file for each fork |
//! | [`returning`] | guests that an earlier life of the daemon left without their devices |

mod away;
mod choice;
mod of_children;
mod owed;
mod returning;

use vmove_node::guest_devices::DeviceMonitor;
use vmove_node::guest_devices::attach::{Attached, attach_again};
use vmove_node::guest_devices::{Asked, script};
use vmove_node::record::VmRecord;
use vmove_qmp::cmdline::with_devices;
use vmove_qmp::confine::allow_locked_memory;
use vmove_qmp::hotplug::HotplugError;
use vmove_types::device::VmDevice;
use vmove_types::problem::chain;
use vmove_types::time::{Mono, ms};

pub use self::away::{Away, Returned};
pub use self::choice::{Dealt, deal};
pub use self::of_children::{Allowed, ChildDevices, HostDevices};

/// Plugs a device in that a guest was asked for, or is to get. `None` if it never let it go.
async fn plug_in(
    vm: &VmRecord,
    monitor: &dyn DeviceMonitor,
    device: &VmDevice,
    asked: &Asked,
) -> Result<Option<Attached>, HotplugError> {
    let let_lock_memory = |bytes| allow_locked_memory(vm.pid.unsigned_abs(), with_devices(bytes));
    attach_again(vm, monitor, device, asked, &let_lock_memory).await
}

/// How the script ended by which a guest resumes: how long it took, and why it did not end as it should.
async fn resume(monitor: &dyn DeviceMonitor, script: &str, limit_ms: u64) -> (f64, Option<String>) {
    let begun = Mono::now();
    let ran = script::run(monitor, script, std::time::Duration::from_millis(limit_ms)).await;
    (ms(Mono::now().since(begun)), ran.err().map(|error| chain(&error)))
}
