//! Devices of the destination: those that were chosen for a guest are looked at, then taken for it before it is touched, and given back if it
//! does not come.

use std::time::Duration;

use vmove_node::devices::{Devices, DevicesError};
use vmove_node::guest_devices::fit::{is_like, why_not_given, why_not_in_place};
use vmove_node::record::VmRecord;
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::device::{DeviceChoice, DeviceRequest, NodeDevice, NodeDeviceList, VmDevice};
use vmove_types::problem::chain;

use crate::node::Node;
use crate::proto::message::{OwnedDevice, Prepare};

/// Nobody has them open: they were never plugged in, or QEMU has ended.
const CLOSED_TIMEOUT: Duration = Duration::from_secs(20);

/// The devices that the guest is to have here, with the addresses by which others know them.
pub(crate) fn chosen(prepare: &Prepare) -> Vec<VmDevice> {
    let choice = |owned: &OwnedDevice| prepare.spec.devices.iter().find(|c| c.0.role == owned.device.0.role);
    let device = |owned: &OwnedDevice| {
        let DeviceChoice(choice) = choice(owned)?;
        // What the guest has, unless something else was asked for.
        let identity = choice.identity.or(owned.device.0.identity);
        Some(VmDevice {
            request: DeviceRequest { identity, ..choice.clone() },
            id: owned.id.clone(),
            bus: owned.bus.clone(),
            properties: owned.properties.iter().cloned().collect(),
        })
    };
    prepare.devices.iter().filter_map(device).collect()
}

/// What stands in the way of these devices. Changes nothing.
pub(crate) async fn blockers(node: &Node, prepare: &Prepare) -> Vec<Blocker> {
    let owns = |role: &str| prepare.devices.iter().any(|owned| owned.device.0.role == role);
    let asked = prepare.spec.devices.iter().map(|choice| &choice.0);
    let mut found: Vec<Blocker> = asked
        .filter(|request| !owns(&request.role))
        .map(|request| blocker(&request.role, format!("{:?} owns no device {}", prepare.vm, request.role)))
        .collect();
    if prepare.devices.is_empty() {
        return found;
    }
    let list = match node.config.devices.list().await {
        Ok(list) => list,
        Err(error) => {
            found.push(Blocker::new(BlockerCode::Device, chain(&error)));
            return found;
        }
    };
    let name = &node.config.node;
    found.extend(
        prepare
            .devices
            .iter()
            .filter_map(|owned| judge(name, (&prepare.vm, &prepare.spec.devices), owned, &list)),
    );
    found
}

fn blocker(role: &str, message: String) -> Blocker {
    Blocker::new(BlockerCode::Device, message).about(role)
}

fn judge(
    node: &str,
    (vm, choices): (&str, &[DeviceChoice]),
    owned: &OwnedDevice,
    list: &NodeDeviceList,
) -> Option<Blocker> {
    let role = &owned.device.0.role;
    let Some(DeviceChoice(choice)) = choices.iter().find(|choice| choice.0.role == *role) else {
        let fits =
            |device: &&NodeDevice| is_like(device, &owned.model) && why_not_given(device, vm).is_none();
        let free: Vec<String> =
            list.devices.iter().filter(fits).map(|device| device.address.to_string()).take(8).collect();
        let free = if free.is_empty() {
            format!("{node} has none that is free")
        } else {
            format!("free on {node}: {}", free.join(", "))
        };
        let message = format!(
            "The guest owns a device {role} (model {}): name one of {node} in its place by --device {role}=ADDRESS; {free}",
            owned.model
        );
        return Some(blocker(role, message));
    };
    why_not_in_place(node, vm, role, choice.address, &owned.model, list).map(|why| blocker(role, why))
}

/// Takes all of them for the guest, or none.
pub(crate) async fn take(devices: &dyn Devices, vm: &VmRecord) -> Result<(), DevicesError> {
    for device in &vm.devices {
        if let Err(error) = devices.take(&vm.name, &device.request).await {
            give_back(devices, vm, None).await;
            return Err(error);
        }
    }
    Ok(())
}

/// Gives back what the node holds for a guest. What a `later` VM of its name has stays. Whether all are back: the others go back when the next
/// daemon starts.
pub(crate) async fn give_back(devices: &dyn Devices, vm: &VmRecord, later: Option<&VmRecord>) -> bool {
    let mut all = true;
    for device in &vm.devices {
        let role = &device.request.role;
        let is_ours =
            devices.of_vm(&vm.name).iter().any(|claim| claim.request.address == device.request.address);
        let is_later =
            later.is_some_and(|later| later.devices.iter().any(|its| its.request == device.request));
        if !is_ours || is_later {
            continue;
        }
        if let Err(error) = devices.give_back(&vm.name, role, CLOSED_TIMEOUT).await {
            all = false;
            tracing::warn!(
                vm = vm.name,
                role,
                error = chain(&error),
                "a device was not given back to its driver"
            );
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use vmove_types::device::DeviceOwner;

    use super::*;

    #[test]
    fn a_device_of_another_model_and_one_that_is_gone_are_named() {
        let device = |address: &str, model: &str, refused: Option<&str>| -> NodeDevice {
            serde_json::from_value(serde_json::json!({
                "address": address, "kind": "nic", "model": model, "moves": "unplug", "refused": refused,
            }))
            .unwrap()
        };
        let of_vm = |address: &str, vm: &str| {
            let owner =
                Some(DeviceOwner { vm: vm.to_owned(), role: "net0".to_owned(), held: true, lease: None });
            NodeDevice { owner, ..device(address, "8086:10ca", None) }
        };
        let list = NodeDeviceList {
            devices: vec![
                of_vm("0000:01:11.2", "other"),
                of_vm("0000:01:11.0", "g"),
                device("0000:01:10.0", "8086:10ca", None),
                device("0000:01:10.2", "8086:10ca", Some("its IOMMU group 4 also holds 0000:01:10.4")),
                device("0000:02:00.0", "10de:1234", None),
            ],
            ..NodeDeviceList::default()
        };
        let owned = OwnedDevice {
            device: "net0=0000:09:00.0".parse().unwrap(),
            id: "vmove-net0".to_owned(),
            bus: "p".to_owned(),
            properties: Vec::new(),
            model: "8086:10ca".to_owned(),
        };
        let judged = |choice: Option<&str>| {
            let choices: Vec<DeviceChoice> = choice.map(|text| text.parse().unwrap()).into_iter().collect();
            judge("b", ("g", &choices), &owned, &list).map(|blocker| blocker.message)
        };
        assert_eq!(judged(Some("net0=0000:01:10.0")), None);
        assert_eq!(judged(Some("net0=0000:01:11.0")), None, "what it has itself");
        for (choice, words) in [
            (None, "free on b: 0000:01:11.0, 0000:01:10.0"),
            (Some("net0=0000:01:11.2"), "VM \"other\" has it as net0"),
            (Some("net0=0000:01:10.6"), "b has no device 0000:01:10.6"),
            (Some("net0=0000:01:10.2"), "also holds"),
            (Some("net0=0000:02:00.0"), "is of model 10de:1234, the guest's is 8086:10ca"),
        ] {
            let message = judged(choice).unwrap();
            assert!(message.contains(words), "{message}");
        }
    }
}
