//! Whether a guest could do without its devices, and whether another device can take the place of one.

use serde::{Deserialize, Serialize};
use vmove_qmp::hotplug::Seat;
use vmove_qmp::inspect::{Blocker, BlockerKind};
use vmove_types::device::{NodeDevice, NodeDeviceList, PciAddress, VmDevice};
use vmove_types::problem::chain;

use crate::devices::Devices;
use crate::record::VmRecord;

/// A device that a guest owns, and of which model it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// As the guest has it.
    pub device: VmDevice,
    /// Numbers of vendor and model, as `vmove devices` shows them; empty if they are not known.
    #[serde(default)]
    pub model: String,
}

/// The devices of a guest with their models.
pub async fn owned(devices: &dyn Devices, vm: &VmRecord) -> Vec<Owned> {
    if vm.devices.is_empty() {
        return Vec::new();
    }
    let list = devices.list().await;
    let list =
        list.inspect_err(|error| tracing::warn!(error = chain(error), "models of devices are not known"));
    let list = list.unwrap_or_default();
    let model = |device: &VmDevice| {
        let here = list.devices.iter().find(|here| here.address == device.request.address);
        here.map(|here| here.model.clone()).unwrap_or_default()
    };
    vm.devices.iter().map(|device| Owned { device: device.clone(), model: model(device) }).collect()
}

/// Whether something is in the way only as long as the guest has these devices.
#[must_use]
pub fn leaves_with(blocker: &Blocker, owned: &[VmDevice]) -> bool {
    match blocker.kind {
        BlockerKind::OutsideWriter => owned.iter().any(|device| device.id == blocker.subject),
        // QEMU's own words about devices that cannot carry their state.
        BlockerKind::Qemu => !owned.is_empty() && blocker.message.to_ascii_lowercase().contains("vfio"),
        _ => false,
    }
}

/// Why a device could not leave its guest, whose run state is `status`; `None` if it can, or is not plugged in.
#[must_use]
pub fn why_not_leave(device: &VmDevice, seat: Option<&Seat>, status: &str) -> Option<String> {
    let (seat, role) = (seat?, &device.request.role);
    // Root ports are named by the operator, or by us; this is the name of the root complex itself.
    if !seat.hotpluggable || seat.bus.starts_with("pcie.") {
        return Some(format!(
            "Device {role} sits on {}, from where it cannot leave while the guest runs: start the guest with it on a port with hot plug \
             (`vmove run --device` does that)",
            seat.bus
        ));
    }
    (status != "running").then(|| {
        format!("Device {role} cannot leave: the guest is {status}, and only one that runs can let a device go; resume it first")
    })
}

/// Why a device cannot be given to a VM: of itself, or because another VM has it; `None` if it can. What an earlier try of this VM has left
/// is its own.
#[must_use]
pub fn why_not_given(device: &NodeDevice, vm: &str) -> Option<String> {
    let other = || device.owner.as_ref().filter(|owner| owner.vm != vm);
    device.refused.clone().or_else(|| {
        other().map(|owner| match &owner.lease {
            Some(lease) => format!(
                "lease {lease} holds it for VM {:?}, as {}; name another device, or release that lease first",
                owner.vm, owner.role
            ),
            None => {
                format!(
                    "VM {:?} has it as {}; name another device, or end that VM first",
                    owner.vm, owner.role
                )
            }
        })
    })
}

/// Why a device of `node`, which has these, cannot take the place of one of this model for a VM; `None` if it can.
#[must_use]
pub fn why_not_in_place(
    node: &str,
    vm: &str,
    role: &str,
    address: PciAddress,
    model: &str,
    list: &NodeDeviceList,
) -> Option<String> {
    let Some(device) = list.devices.iter().find(|device| device.address == address) else {
        return Some(format!(
            "{node} has no device {address}, which was named for {role}: `vmove devices` there lists all"
        ));
    };
    if let Some(why) = why_not_given(device, vm) {
        return Some(format!("Device {address} of {node}, named for {role}, cannot be given: {why}"));
    }
    (!is_like(device, model)).then(|| {
        format!(
            "Device {address} of {node}, named for {role}, is of model {}, the guest's is {model}: the guest's driver would not know it; name \
             one of the same model",
            device.model
        )
    })
}

/// Whether it can take the place of one of this model, as far as that is known.
#[must_use]
pub fn is_like(device: &NodeDevice, model: &str) -> bool {
    model.is_empty() || device.model == model
}
