//! What trees of `/sys` tell of devices.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

mod common;

use std::path::Path;

use common::{IGB, MADE_UP, at};
use vmove_devices::shared::{self, SharedPart};
use vmove_devices::{Cause, DeviceKind, NodeDevices, Sriov, Sys, group, ledger, list};

#[test]
fn a_card_and_its_virtual_functions_are_found() {
    let root = vmove_skip::tree::expand(IGB, |_| false);
    let all = NodeDevices::read(&Sys::new(root.path()));
    assert_eq!(all.notes, Vec::<String>::new());
    let card = &all.devices[&at("0000:01:00.0")];
    let functions = ["0000:01:10.0", "0000:01:10.2", "0000:01:10.4"].map(at).to_vec();
    assert_eq!((card.vendor, card.device, card.driver.as_deref()), (0x8086, 0x10c9, Some("igb")));
    assert_eq!(
        (card.kind, &card.sriov),
        (DeviceKind::Nic, &Sriov::Physical { total: 7, functions: functions.clone() })
    );
    assert_eq!((card.netdevs.as_slice(), card.numa), (&["eth1".to_owned()][..], None));
    for (index, address) in (0..).zip(functions) {
        let function = &all.devices[&address];
        assert_eq!(function.sriov, Sriov::Virtual { pf: card.address, index });
        assert_eq!((function.kind, function.driver.as_deref()), (DeviceKind::Nic, Some("igbvf")));
        assert!(function.group.is_some() && group::check(&all, function).is_ok());
    }
    // The host's own network, which is a virtio device.
    let own = &all.devices[&at("0000:00:03.0")];
    assert_eq!(own.netdevs, ["eth0"]);
    let cause = ledger::check(&Sys::new(root.path()), &all, own).unwrap_err();
    assert!(matches!(cause, Cause::HostUses(_)), "{cause}");
    let bridges = all.devices.values().filter(|device| device.kind == DeviceKind::Bridge).count();
    assert!(bridges >= 2 && all.devices.len() > 10, "{bridges}");
    let json = serde_json::to_string(&all).unwrap();
    assert_eq!(serde_json::from_str::<NodeDevices>(&json).unwrap(), all);
}

#[test]
fn kinds_are_told_apart() {
    let root = vmove_skip::tree::expand(MADE_UP, |_| false);
    let all = NodeDevices::read(&Sys::new(root.path()));
    let kinds = [
        ("3b:00.0", DeviceKind::Gpu),
        ("3b:00.1", DeviceKind::Other),
        ("3c:00.0", DeviceKind::Gpu),
        ("17:00.0", DeviceKind::RdmaAdapter),
        ("17:00.2", DeviceKind::RdmaAdapter),
        ("18:00.1", DeviceKind::RdmaAdapter),
        ("81:00.0", DeviceKind::CoProcessor),
        ("82:00.0", DeviceKind::ProcessingAccelerator),
        ("03:00.0", DeviceKind::ConsoleGraphics),
        ("04:00.0", DeviceKind::Storage),
        ("05:00.0", DeviceKind::Nic),
    ];
    for (address, kind) in kinds {
        assert_eq!(all.devices[&at(address)].kind, kind, "{address}");
    }
    assert_eq!(all.notes.len(), 1, "{:?}", all.notes);
    assert!(all.notes[0].contains("strange"), "{:?}", all.notes);
}

#[test]
fn what_cannot_be_given_is_told_with_the_reason() {
    let root = vmove_skip::tree::expand(MADE_UP, |_| false);
    let sys = Sys::new(root.path());
    let all = NodeDevices::read(&sys);
    let cases = [
        ("3b:00.0", "also holds 0000:3b:00.1 (snd_hda_intel, of the same card)"),
        ("17:00.0", "virtual functions are in use"),
        ("03:00.0", "management controller"),
        ("04:00.0", "the host uses it: its disks, by driver nvme"),
        ("05:00.0", "network device eno1 is up"),
        ("06:00.0", "no IOMMU group"),
    ];
    for (address, words) in cases {
        let cause = ledger::check(&sys, &all, &all.devices[&at(address)]).unwrap_err();
        assert!(cause.to_string().contains(words), "{address}: {cause}");
    }
    for (address, group) in
        [("3c:00.0", 21), ("17:00.1", 23), ("17:00.2", 24), ("81:00.0", 27), ("82:00.0", 28)]
    {
        assert_eq!(ledger::check(&sys, &all, &all.devices[&at(address)]).unwrap(), group, "{address}");
    }
    let error = list::read(&sys, at("ff:00.0")).unwrap_err();
    assert!(matches!(error.cause, Cause::Absent), "{error}");
    assert_eq!(
        error.to_string(),
        "Device 0000:ff:00.0 could not be read: this node has no such PCI device; 'vmove devices' lists those that it has"
    );
    let class = root.path().join("sys/bus/pci/devices/0000:81:00.0/class");
    std::fs::write(class, "what").unwrap();
    let error = list::read(&sys, at("81:00.0")).unwrap_err();
    assert!(matches!(error.cause, Cause::Strange { .. }), "{error}");
    assert!(NodeDevices::read(&Sys::new(Path::new("/nowhere"))).devices.is_empty());
}

#[test]
fn parts_of_devices_are_told() {
    let root = vmove_skip::tree::expand(MADE_UP, |_| false);
    let parts = shared::read(&Sys::new(root.path()));
    let mediated = SharedPart::Mediated {
        uuid: "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001".to_owned(),
        parent: Some(at("3b:00.0")),
        model: "nvidia-222".to_owned(),
    };
    let slice =
        |gpu_instance| SharedPart::MigSlice { gpu: Some(at("3c:00.0")), gpu_instance, compute_instance: 0 };
    assert_eq!(parts, [mediated, slice(1), slice(2)]);
    assert!(parts.iter().all(|part| part.reason().contains("VM") || part.reason().contains("guest")));
}
