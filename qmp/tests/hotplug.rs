//! Devices that come and go: with real QEMUs and a firmware that lets them go, and with a server that plays QEMU.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

mod common;

use std::{path::PathBuf, time::Duration};

use common::{Bench, TIMEOUT, qemus};
use serde_json::{Map, Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};
use vmove_qmp::{
    Client, CommandLine, QemuProcess,
    hotplug::{self, Departure, HotplugError, PlugRefusal, UnplugLimits},
};

/// Ports of ACPI's PCI hot plug.
const Q35: u16 = 0x0cc0;
const PC: u16 = 0xae00;

/// Firmware that lets devices go for which ACPI asks, on the first eight buses.
fn letting_go(base: u16) -> Vec<u8> {
    let [select, down, eject] = [base + 0x10, base + 4, base + 8].map(u16::to_le_bytes);
    let mut code = vec![0x66, 0x31, 0xdb]; // xor ebx, ebx
    let next = code.len();
    code.extend([0xba, select[0], select[1]]); // mov dx, select
    code.extend([0x66, 0x89, 0xd8, 0x66, 0xef]); // mov eax, ebx; out dx, eax
    code.extend([0xba, down[0], down[1]]); // mov dx, down
    code.extend([0x66, 0xed, 0x66, 0x85, 0xc0]); // in eax, dx; test eax, eax
    code.extend([0x74, 0x05]); // jz over the next two
    code.extend([0xba, eject[0], eject[1], 0x66, 0xef]); // mov dx, eject; out dx, eax
    code.extend([0xf3, 0x90]); // pause: QEMU's own threads have a turn
    code.extend([0x43, 0x83, 0xe3, 0x07]); // inc bx; and bx, 7
    let back = i8::try_from(next).unwrap() - i8::try_from(code.len() + 2).unwrap();
    code.extend([0xeb, back.to_le_bytes()[0]]); // jmp next
    firmware(&code)
}

/// Firmware that does nothing for ever.
fn deaf() -> Vec<u8> {
    firmware(&[0xf3, 0x90, 0xeb, 0xfc])
}

fn firmware(code: &[u8]) -> Vec<u8> {
    let mut rom = vec![0xf4; 64 << 10];
    rom[..code.len()].copy_from_slice(code);
    rom[0xfff0..0xfff5].copy_from_slice(&[0xea, 0x00, 0x00, 0x00, 0xf0]);
    rom
}

/// A guest with this machine and firmware, and a network card `nic` in port `rp1` besides an empty port `rp2`.
async fn guest(bench: &mut Bench, rom: &[u8], machine: &[&str], devices: &[&str]) -> (QemuProcess, Client) {
    let layout = bench.layout("guest");
    let path = bench.base.join("hotplug.rom");
    std::fs::write(&path, rom).unwrap();
    let socket = format!("unix:{},server=on,wait=off", layout.qmp_socket.display());
    let mut argv: Vec<std::ffi::OsString> = vec![bench.qemu.clone().into()];
    argv.extend(["-accel", "tcg", "-m", "16M", "-display", "none", "-nodefaults"].map(Into::into));
    argv.extend(["-qmp".into(), socket.into(), "-bios".into(), path.into()]);
    argv.extend(machine.iter().chain(devices).map(Into::into));
    bench.spawn(&CommandLine::parse(argv).unwrap().to_argv(), &layout).await
}

const PORTS: [&str; 6] = [
    "-device",
    "pcie-root-port,id=rp1,chassis=1,slot=1",
    "-device",
    "pcie-root-port,id=rp2,chassis=2,slot=2",
    "-device",
    "e1000e,id=nic,bus=rp1,romfile=",
];

fn nic(bus: &str) -> Map<String, Value> {
    let all = json!({ "driver": "e1000e", "id": "nic", "bus": bus, "romfile": "" });
    all.as_object().unwrap().clone()
}

fn limits(timeout: Duration, request_interval: Duration) -> UnplugLimits {
    UnplugLimits {
        timeout,
        request_interval,
        poll_interval: Duration::from_millis(50),
        ..UnplugLimits::default()
    }
}

#[tokio::test]
async fn a_device_leaves_and_comes_back() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let (process, client) = guest(&mut bench, &letting_go(Q35), &["-machine", "q35"], &PORTS).await;
        let ports = hotplug::ports(&client, TIMEOUT).await.unwrap();
        let mut taken: Vec<_> =
            ports.iter().map(|port| (port.id.as_str(), port.hotplug, port.taken)).collect();
        taken.sort_unstable();
        assert_eq!(taken, [("rp1", true, true), ("rp2", true, false)]);
        for round in 0..5 {
            let seat = hotplug::find(&client, "nic", TIMEOUT).await.unwrap().unwrap();
            let expected = if round % 2 == 0 { "rp1" } else { "rp2" };
            assert_eq!(
                (seat.driver.as_str(), seat.bus.as_str(), seat.hotpluggable),
                ("e1000e", expected, true)
            );
            let gone = hotplug::unplug(&client, "nic", UnplugLimits::default()).await.unwrap();
            assert_eq!((gone.seen, gone.requests), (Departure::Event, 1), "{gone:?}");
            assert_eq!(hotplug::find(&client, "nic", TIMEOUT).await.unwrap(), None);
            let other = if round % 2 == 0 { "rp2" } else { "rp1" };
            let come = hotplug::plug(&client, &nic(other), TIMEOUT).await.unwrap();
            println!("unplugged in {:?}, plugged in {:?}", gone.took, come.took);
        }
        let error = hotplug::unplug(&client, "nobody", UnplugLimits::default()).await.unwrap_err();
        assert!(matches!(&error, HotplugError::NoSuchDevice { device } if device == "nobody"), "{error}");
        process.quit(Some(&client), TIMEOUT).await.unwrap();
    }
}

#[tokio::test]
async fn on_machine_pc_too() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let card = ["-device", "e1000,id=nic,romfile="];
        let (process, client) = guest(&mut bench, &letting_go(PC), &["-machine", "pc"], &card).await;
        let gone = hotplug::unplug(&client, "nic", UnplugLimits::default()).await.unwrap();
        assert_eq!(gone.seen, Departure::Event);
        process.quit(Some(&client), TIMEOUT).await.unwrap();
    }
}

#[tokio::test]
async fn a_guest_that_says_nothing_keeps_its_device_and_may_let_it_go_later() {
    for qemu in qemus() {
        // By ACPI, and by the port's own means, where a second request is refused while the first stands.
        let native = ["-machine", "q35", "-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off"];
        for machine in [&["-machine", "q35"][..], &native] {
            let mut bench = Bench::new(&qemu);
            let (process, client) = guest(&mut bench, &deaf(), machine, &PORTS).await;
            let (time, repeat) = (Duration::from_millis(1500), Duration::from_millis(300));
            let error = hotplug::unplug(&client, "nic", limits(time, repeat)).await.unwrap_err();
            let HotplugError::GuestKeeps { requests, .. } = error else { panic!("{error}") };
            assert!(requests >= 1, "{requests}");
            assert!(hotplug::find(&client, "nic", TIMEOUT).await.unwrap().is_some());
            // The request stands. With ACPI a reset fulfils it, and nobody has to ask again.
            if machine.len() > 2 {
                process.quit(Some(&client), TIMEOUT).await.unwrap();
                continue;
            }
            client.execute_raw("system_reset", Value::Null, TIMEOUT).await.unwrap();
            for _ in 0..100 {
                if hotplug::find(&client, "nic", TIMEOUT).await.unwrap().is_none() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert_eq!(hotplug::find(&client, "nic", TIMEOUT).await.unwrap(), None, "{machine:?}");
            process.quit(Some(&client), TIMEOUT).await.unwrap();
        }
    }
}

#[tokio::test]
async fn what_cannot_leave_or_come_is_told_with_the_reason() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let mut devices = PORTS.to_vec();
        devices.extend(["-device", "pcie-root-port,id=fixed,chassis=3,slot=3,hotplug=off"]);
        devices.extend([
            "-device",
            "e1000e,id=held,bus=fixed,romfile=",
            "-device",
            "e1000e,id=root,romfile=",
        ]);
        let (process, client) = guest(&mut bench, &letting_go(Q35), &["-machine", "q35"], &devices).await;
        for device in ["held", "root"] {
            assert!(
                !hotplug::find(&client, device, TIMEOUT).await.unwrap().unwrap().hotpluggable,
                "{device}"
            );
            let error = hotplug::unplug(&client, device, UnplugLimits::default()).await.unwrap_err();
            assert!(matches!(error, HotplugError::NotHotpluggable { .. }), "{error}");
        }
        let vfio = json!({ "driver": "vfio-pci", "host": "ffff:99:00.0", "id": "gpu", "bus": "rp2" });
        let mut taken = nic("rp1");
        taken.insert("id".into(), "second".into());
        let cases = [
            (taken, PlugRefusal::PortTaken),
            (nic("rp2"), PlugRefusal::IdTaken),
            (nic("nowhere"), PlugRefusal::NoSuchPort),
            (nic("fixed"), PlugRefusal::NoHotplug),
            (vfio.as_object().unwrap().clone(), PlugRefusal::NoSuchHostDevice),
        ];
        for (device, expected) in cases {
            let error = hotplug::plug(&client, &device, TIMEOUT).await.unwrap_err();
            println!("{error}");
            let HotplugError::NotPlugged { refusal, .. } = &error else { panic!("{error}") };
            assert_eq!(*refusal, expected, "{error}");
        }
        process.quit(Some(&client), TIMEOUT).await.unwrap();
    }
}

/// What the server that plays QEMU says of a command: its answer, and events after it.
type Script = fn(&Value, u32) -> (Value, Vec<Value>);

/// A client of a server that answers by `script`, which is told how many `device_del` came before.
async fn played(script: Script) -> Client {
    let (ours, theirs) = UnixStream::pair().unwrap();
    tokio::spawn(async move {
        let mut stream = BufReader::new(theirs);
        let greeting = json!({"QMP": {"version": {"qemu": {"micro": 0, "minor": 0, "major": 10}, "package": ""}, "capabilities": []}});
        let mut say = vec![greeting];
        let mut unplugs = 0;
        loop {
            for line in say.drain(..) {
                if stream.get_mut().write_all(format!("{line}\r\n").as_bytes()).await.is_err() {
                    return;
                }
            }
            let mut line = String::new();
            if stream.read_line(&mut line).await.unwrap_or(0) == 0 {
                return;
            }
            let command: Value = serde_json::from_str(&line).unwrap();
            let name = command["execute"].as_str().unwrap();
            let (mut reply, events) = if name == "qmp_capabilities" {
                (json!({"return": {}}), vec![])
            } else {
                script(&command, unplugs)
            };
            unplugs += u32::from(name == "device_del");
            reply["id"] = command["id"].clone();
            say.push(reply);
            say.extend(events);
        }
    });
    Client::over(ours, &PathBuf::from("test"), TIMEOUT).await.unwrap()
}

fn event(name: &str, device: &str) -> Value {
    let data = json!({ "device": device, "path": format!("/machine/peripheral/{device}") });
    json!({ "event": name, "data": data, "timestamp": { "seconds": 1, "microseconds": 1 } })
}

/// The tree, with the device or without.
fn tree(there: bool) -> Value {
    let nic = json!({ "name": "nic", "type": "child<vfio-pci>" });
    json!({ "return": if there { vec![nic] } else { vec![] } })
}

const QUICK: UnplugLimits = UnplugLimits {
    timeout: Duration::from_millis(600),
    request_interval: Duration::from_millis(100),
    poll_interval: Duration::from_millis(20),
    settle: Duration::from_millis(400),
};

#[tokio::test]
async fn a_guest_that_refuses_or_lets_go_is_told_at_once() {
    let client = played(|command, _| match command["execute"].as_str() {
        Some("device_del") => (json!({"return": {}}), vec![event("DEVICE_UNPLUG_GUEST_ERROR", "nic")]),
        _ => (tree(true), vec![]),
    })
    .await;
    let error = hotplug::unplug(&client, "nic", QUICK).await.unwrap_err();
    assert!(matches!(error, HotplugError::GuestRefused { .. }), "{error}");
    // And one that lets go at once is not waited for.
    let client = played(|command, _| match command["execute"].as_str() {
        Some("device_del") => (json!({"return": {}}), vec![event("DEVICE_DELETED", "nic")]),
        _ => (tree(true), vec![]),
    })
    .await;
    let gone = hotplug::unplug(&client, "nic", QUICK).await.unwrap();
    assert!(gone.requests == 1 && gone.took < QUICK.settle, "{gone:?}");
}

#[tokio::test]
async fn a_device_that_goes_without_an_event_is_seen_to_have_gone() {
    // It is away when the tree is looked at, and another one's event is none of ours.
    let client = played(|command, unplugs| match command["execute"].as_str() {
        Some("device_del") => (json!({"return": {}}), vec![event("DEVICE_DELETED", "other")]),
        _ => (tree(unplugs < 3), vec![]),
    })
    .await;
    let gone = hotplug::unplug(&client, "nic", QUICK).await.unwrap();
    assert_eq!((gone.seen, gone.requests), (Departure::Tree, 3));
    assert!(gone.took >= QUICK.settle, "it carries out what it was asked besides: {:?}", gone.took);
    // It is away when it is asked for again.
    let client = played(|command, unplugs| match (command["execute"].as_str(), unplugs) {
        (Some("device_del"), 0) => (json!({"return": {}}), vec![]),
        (Some("device_del"), _) => {
            (json!({"error": {"class": "DeviceNotFound", "desc": "Device 'nic' not found"}}), vec![])
        }
        _ => (tree(true), vec![]),
    })
    .await;
    let gone = hotplug::unplug(&client, "nic", QUICK).await.unwrap();
    assert_eq!((gone.seen, gone.requests), (Departure::Tree, 1));
}

#[tokio::test]
async fn a_request_that_stands_is_waited_for() {
    let client = played(|command, unplugs| match (command["execute"].as_str(), unplugs) {
        (Some("device_del"), 0..2) => {
            let desc = "Device nic is already in the process of unplug";
            (json!({"error": {"class": "GenericError", "desc": desc}}), vec![])
        }
        (Some("device_del"), _) => (json!({"return": {}}), vec![event("DEVICE_DELETED", "nic")]),
        _ => (tree(true), vec![]),
    })
    .await;
    let gone = hotplug::unplug(&client, "nic", QUICK).await.unwrap();
    assert_eq!((gone.seen, gone.requests), (Departure::Event, 1));
    assert!(gone.took >= QUICK.settle, "an earlier request may still be in it: {:?}", gone.took);
}

#[tokio::test]
async fn what_qemu_says_and_does_not_do_is_an_error() {
    let client = played(|_, _| (json!({"error": {"class": "GenericError", "desc": "no"}}), vec![])).await;
    let error = hotplug::unplug(&client, "nic", QUICK).await.unwrap_err();
    assert!(matches!(error, HotplugError::Qmp(_)), "{error}");
    // QEMU took the device and does not have it.
    let client = played(|_, _| (json!({"return": []}), vec![])).await;
    let error = hotplug::plug(&client, &nic("rp1"), TIMEOUT).await.unwrap_err();
    assert!(matches!(error, HotplugError::Vanished { .. }), "{error}");
}
