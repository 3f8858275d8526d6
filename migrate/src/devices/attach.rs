//! A guest gets a device that the node holds for it.

use vmove_node::guest_devices::DeviceMonitor;
use vmove_node::guest_devices::attach::{self, Attached};
use vmove_node::record::VmRecord;
use vmove_qmp::hotplug::HotplugError;
use vmove_types::device::VmDevice;

use crate::vmm::Vmm;

/// Plugs a device in that this node holds for the guest. If it is there already, this does nothing.
pub(crate) async fn attach(
    vmm: &dyn Vmm,
    vm: &VmRecord,
    monitor: &dyn DeviceMonitor,
    device: &VmDevice,
) -> Result<Attached, HotplugError> {
    attach::attach(vm, monitor, device, &|bytes| vmm.let_lock_memory(vm, bytes)).await
}
