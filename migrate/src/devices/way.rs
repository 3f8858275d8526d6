//! How each device of a guest would be moved, as far as the source can tell.

use vmove_node::guest_devices::fit::{Owned, owned, why_not_leave};
use vmove_node::record::VmRecord;
use vmove_qmp::hotplug::HotplugError;
use vmove_qmp::inspect::VmFacts;
use vmove_types::check::{Blocker, BlockerCode, DeviceWay};
use vmove_types::device::{DeviceChoice, VmDevice};

use super::FAILOVER_PAIR;
use crate::node::Node;
use crate::proto::message::OwnedDevice;
use crate::vmm::DeviceMonitor;

/// Linux lets a device go within so many milliseconds, as a rule.
const UNPLUG_MS: u64 = 1000;
/// Guest memory that crosses in a millisecond, by a network of 10 Gbit/s. Unit: bytes.
const CROSSES_PER_MS: u64 = 1_250_000;
/// Guest memory that is pinned in a millisecond, where it is in 4 KiB pages. Unit: bytes.
const PINNED_PER_MS: u64 = 2_000_000;

/// What there is to say of a guest's devices, and what stands in the way.
pub(crate) struct Ways {
    pub ways: Vec<DeviceWay>,
    pub blockers: Vec<Blocker>,
}

/// Looks at the devices of a guest. Changes nothing.
pub(crate) async fn look(
    vm: &VmRecord,
    monitor: &dyn DeviceMonitor,
    facts: &VmFacts,
    choices: &[DeviceChoice],
) -> Result<Ways, HotplugError> {
    let mut found = Ways { ways: Vec::new(), blockers: Vec::new() };
    let memory: u64 = vm.ram.iter().map(|ram| ram.size).sum();
    for device in &vm.devices {
        let seat = monitor.seat(&device.id).await?;
        let role = &device.request.role;
        let blocker = why_not_leave(device, seat.as_ref(), &facts.status)
            .map(|message| Blocker::new(BlockerCode::Device, message).about(role));
        let choice = choices.iter().find(|choice| choice.0.role == *role);
        let mut way = DeviceWay {
            role: role.clone(),
            source: device.request.address.to_string(),
            destination: choice.map(|choice| choice.0.address.to_string()),
            ..DeviceWay::default()
        };
        describe(&mut way, device, blocker.as_ref(), seat.is_some(), memory);
        found.ways.push(way);
        found.blockers.extend(blocker);
    }
    Ok(found)
}

fn describe(way: &mut DeviceWay, device: &VmDevice, blocker: Option<&Blocker>, plugged: bool, memory: u64) {
    if let Some(blocker) = blocker {
        "none".clone_into(&mut way.way);
        way.message.clone_from(&blocker.message);
        return;
    }
    let outage = UNPLUG_MS + memory / CROSSES_PER_MS + memory / PINNED_PER_MS;
    way.outage_ms = Some(outage);
    let seconds = outage.div_ceil(1000);
    let how =
        if plugged { "the guest is asked to let it go" } else { "the guest does not have it plugged in now" };
    let about = format!(
        "{how}, its memory crosses, and the other device is plugged in: without it for about {seconds} s, if the guest lets it go within \
         a second and the network carries 10 Gbit/s; less with a head start, in which memory crosses while the guest has the device"
    );
    (way.way, way.message) = match device.properties.get(FAILOVER_PAIR) {
        Some(partner) => (
            "failover".to_owned(),
            format!("{about}; its network goes on over the partner {partner} meanwhile"),
        ),
        None => ("unplug".to_owned(), about),
    };
}

/// What a destination is told of a guest's devices.
pub(crate) async fn owned_devices(node: &Node, vm: &VmRecord) -> Vec<OwnedDevice> {
    let describe = |Owned { device, model }: Owned| OwnedDevice {
        device: DeviceChoice(device.request),
        id: device.id,
        bus: device.bus,
        properties: device.properties.into_iter().collect(),
        model,
    };
    owned(&*node.config.devices, vm).await.into_iter().map(describe).collect()
}
