//! Devices that can carry their own state (VFIO migration, version 2): told by `vmove check`, though they leave by unplug like all others.

use vmove_node::record::VmRecord;
use vmove_types::check::DeviceWay;
use vmove_types::device::NodeDeviceList;
use vmove_types::problem::chain;

use crate::node::Node;

/// Adds what is known of it to each device's way.
pub(crate) async fn add(node: &Node, vm: &VmRecord, ways: &mut [DeviceWay]) {
    if ways.is_empty() {
        return;
    }
    match node.config.devices.list().await {
        Ok(list) => add_from(&list, vm, ways),
        Err(error) => tracing::warn!(error = chain(&error), "what devices say of their state is not known"),
    }
}

fn add_from(list: &NodeDeviceList, vm: &VmRecord, ways: &mut [DeviceWay]) {
    for way in ways {
        let device = vm.devices.iter().find(|device| device.request.role == way.role);
        let here =
            device.and_then(|device| list.devices.iter().find(|here| here.address == device.request.address));
        let Some(state) = here.and_then(|here| here.own_state.clone()) else { continue };
        let instead = match (way.way.as_str(), state.stop_copy) {
            // The one case in which it would be of use.
            ("none", true) => "so this guest has to be moved by QEMU's own migration, or shut down",
            _ => "so the guest is asked to let it go, like any other",
        };
        way.message = format!("{}. {}; {instead}", way.message, state.words);
        way.own_state = Some(state);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use vmove_types::Backing;
    use vmove_types::device::VmDevice;

    use super::*;

    fn vm() -> VmRecord {
        let device = VmDevice {
            request: "net0=3b:00.1".parse().unwrap(),
            id: "net0".to_owned(),
            bus: "port0".to_owned(),
            properties: BTreeMap::new(),
        };
        VmRecord {
            name: "sim".to_owned(),
            pid: 1,
            pid_start: 1,
            qmp_socket: "/q".into(),
            vm_dir: "/v".into(),
            backing: Backing::Thp,
            command_line: Vec::new(),
            environment: Vec::new(),
            ram: Vec::new(),
            overlays: Vec::new(),
            devices: vec![device],
            adopted: false,
            libvirt: None,
            session: None,
        }
    }

    fn told(way: &str, own_state: &serde_json::Value) -> DeviceWay {
        let list = json!({ "parts": [], "devices": [{
            "address": "0000:3b:00.1", "kind": "nic", "model": "15b3:101e", "moves": "unplug", "own_state": own_state,
        }]});
        let list: NodeDeviceList = serde_json::from_value(list).unwrap();
        let mut ways = [DeviceWay {
            role: "net0".to_owned(),
            way: way.to_owned(),
            message: "Because".to_owned(),
            ..DeviceWay::default()
        }];
        add_from(&list, &vm(), &mut ways);
        let [way] = ways;
        way
    }

    #[test]
    fn what_qemu_could_do_with_a_devices_state_is_told_and_what_happens_instead() {
        let state = |stop_copy: bool| json!({ "stop_copy": stop_copy, "p2p": false, "pre_copy": false, "logs_writes": true, "words": "QEMU alone could" });
        let way = told("unplug", &state(true));
        assert_eq!(
            way.message,
            "Because. QEMU alone could; so the guest is asked to let it go, like any other"
        );
        assert!(way.own_state.is_some());
        assert!(told("none", &state(true)).message.contains("QEMU's own migration, or shut down"));
        assert_eq!(told("unplug", &serde_json::Value::Null).message, "Because");
    }
}
