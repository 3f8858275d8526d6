//! What a node has of devices, told to people and programs: kind, owner, whether it can be given, and what becomes of it in a move.

use vmove_types::device::{DeviceOwner, DevicePart, NodeDevice, NodeDeviceList, OwnState};

use crate::ledger::{self, Step};
use crate::shared::SharedPart;
use crate::{Claim, Device, DeviceKind, NodeDevices, Sriov, Sys, bind, shared};

/// What becomes of a guest's device in a move.
const MOVES: &str = "the guest is asked to let it go, moves without it, and gets a device of the same model of the other node in the same role";
/// Of a device that carries its own state and logs what it writes.
const CARRIES: &str = "QEMU alone could move it with its state. vmove cannot: it copies guest memory itself, and what the device writes shows only \
                       in QEMU's own record of changed memory";
/// Of a device that only carries its own state.
const CARRIES_UNLOGGED: &str = "QEMU alone could move it with its state, if the IOMMU tells what it writes. vmove cannot: it copies guest memory \
                                itself, and what the device writes shows only in QEMU's own record of changed memory";

/// Everything of a node that VMs could have, with its claims.
#[must_use]
pub fn list(sys: &Sys, claims: &[Claim]) -> NodeDeviceList {
    let all = NodeDevices::read(sys);
    let given = |device: &&Device| device.kind != DeviceKind::Bridge;
    NodeDeviceList {
        devices: all.devices.values().filter(given).map(|device| one(sys, &all, device, claims)).collect(),
        parts: shared::read(sys).iter().map(part).collect(),
        notes: all.notes.clone(),
    }
}

fn one(sys: &Sys, all: &NodeDevices, device: &Device, claims: &[Claim]) -> NodeDevice {
    let claim = claims.iter().find(|claim| claim.request.address == device.address);
    let (physical_function, max_virtual_functions, virtual_functions) = match &device.sriov {
        Sriov::None => (None, None, Vec::new()),
        Sriov::Physical { total, functions } => (None, Some(*total), functions.clone()),
        Sriov::Virtual { pf, .. } => (Some(*pf), None, Vec::new()),
    };
    NodeDevice {
        address: device.address,
        kind: device.kind.word().to_owned(),
        model: format!("{:04x}:{:04x}", device.vendor, device.device),
        driver: device.driver.clone(),
        group: device.group,
        numa: device.numa,
        physical_function,
        max_virtual_functions,
        virtual_functions,
        netdevs: device.netdevs.clone(),
        rdma: device.rdma.clone(),
        owner: claim.map(|claim| DeviceOwner {
            vm: claim.vm.clone(),
            role: claim.request.role.clone(),
            held: claim.step == Step::Held,
            lease: None,
        }),
        refused: if claim.is_some() { None } else { refused(sys, all, device) },
        moves: MOVES.to_owned(),
        own_state: claim.and_then(|claim| claim.own_state).map(own_state),
    }
}

/// Why a device that no VM has cannot be given to one.
fn refused(sys: &Sys, all: &NodeDevices, device: &Device) -> Option<String> {
    if let Err(cause) = ledger::check(sys, all, device) {
        return Some(format!("{cause}; {}", cause.way_out()));
    }
    let (group, driver) = (device.group?, device.driver.as_deref()?);
    let open = bind::is_vfio(driver) && bind::is_open(sys, group);
    open.then(|| {
        format!("a program that vmove does not know has /dev/vfio/{group} open; end it, or take its QEMU in by 'vmove adopt'")
    })
}

fn own_state(of: crate::migration::OwnState) -> OwnState {
    let words = match (of.stop_copy, of.logs_writes) {
        (false, _) => "It cannot be moved with its state",
        (true, true) => CARRIES,
        (true, false) => CARRIES_UNLOGGED,
    };
    let crate::migration::OwnState { stop_copy, p2p, pre_copy, logs_writes } = of;
    OwnState { stop_copy, p2p, pre_copy, logs_writes, words: words.to_owned() }
}

fn part(part: &SharedPart) -> DevicePart {
    let refused = part.reason().to_owned();
    match part {
        SharedPart::Mediated { uuid, parent, model } => DevicePart {
            kind: "mediated".to_owned(),
            name: uuid.clone(),
            device: *parent,
            model: Some(model.clone()).filter(|model| !model.is_empty()),
            refused,
        },
        SharedPart::MigSlice { gpu, gpu_instance, compute_instance } => DevicePart {
            kind: "mig-slice".to_owned(),
            name: format!("gi{gpu_instance}/ci{compute_instance}"),
            device: *gpu,
            model: None,
            refused,
        },
    }
}
