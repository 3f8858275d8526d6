//! A fork between two hosts without any daemon: two engines that speak over plain TCP, and a real QEMU with a guest of some bytes.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

mod mounts;
mod node;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use node::Node;
use node::devices::Shelf;
use vmove_clone::engine::ForkPolicy;
use vmove_node::devices::Devices;
use vmove_types::device::VmDevice;
use vmove_types::fork::ForkRequest;
use vmove_types::fork_report::ForkReport;
use vmove_types::problem::Code;
use vmove_types::vm::RunRequest;

/// Guest memory, in bytes.
const MEMORY: usize = 32 << 20;
/// Where the guest counts on, for ever.
const COUNTER: usize = 0x500;
/// What it has filled when it begins to count: segments from here on, in words that are their own addresses plus the segment.
const FILLED: std::ops::Range<usize> = 0x1_0000..0x9_0000;
/// The holes of a PC below 1 MiB: video memory and ROM, of which only QEMU has something.
const NO_RAM: std::ops::Range<usize> = 0xa_0000..0x10_0000;

/// The guest: fills eight segments of 64 KiB, then counts.
const PROGRAM: &[u8] = &[
    0xfa, // cli
    0xb8, 0x00, 0x10, // mov ax, 0x1000
    // next segment:
    0x8e, 0xd8, // mov ds, ax
    0x31, 0xdb, // xor bx, bx
    // next word:
    0x89, 0xd9, // mov cx, bx
    0x01, 0xc1, // add cx, ax
    0x89, 0x0f, // mov [bx], cx
    0x83, 0xc3, 0x02, // add bx, 2
    0x75, 0xf5, // jnz next word
    0x05, 0x00, 0x10, // add ax, 0x1000
    0x3d, 0x00, 0x90, // cmp ax, 0x9000
    0x75, 0xe9, // jne next segment
    0x31, 0xc0, // xor ax, ax
    0x8e, 0xd8, // mov ds, ax
    // for ever:
    0xff, 0x06, 0x00, 0x05, // inc word [0x500]
    0xeb, 0xfa, // jmp for ever
];

/// A ROM of 64 KiB that begins with the program. The processor begins 16 bytes before its end.
fn firmware(dir: &Path) -> String {
    let mut rom = vec![0; 1 << 16];
    rom[..PROGRAM.len()].copy_from_slice(PROGRAM);
    rom[0xfff0..0xfff3].copy_from_slice(&[0xe9, 0x0d, 0x00]); // jmp 0
    let path = dir.join("firmware");
    std::fs::write(&path, rom).unwrap();
    path.display().to_string()
}

fn guest(program: &str, dir: &Path) -> RunRequest {
    let line = format!(
        "{program} -nodefaults -no-user-config -display none -machine pc -cpu qemu64 -smp 1 -accel tcg -m 32M -bios {}",
        firmware(dir)
    );
    RunRequest {
        name: "web".to_owned(),
        memory: "thp".to_owned(),
        command_line: line.split(' ').map(str::to_owned).collect(),
        environment: std::collections::BTreeMap::default(),
        devices: Vec::new(),
        grant: None,
        pin: None,
    }
}

async fn counted(node: &Node, vm: &str) -> u16 {
    let memory = node.guest_memory(vm, MEMORY as u64).await;
    u16::from_le_bytes([memory[COUNTER], memory[COUNTER + 1]])
}

async fn counts(node: &Node, vm: &str) {
    let (before, deadline) = (counted(node, vm).await, Instant::now() + Duration::from_secs(20));
    while counted(node, vm).await == before {
        assert!(Instant::now() < deadline, "{vm} stands still");
    }
}

/// Memory without the page in which a guest counts, and what is no RAM.
fn still(mut memory: Vec<u8>) -> Vec<u8> {
    memory[..4096].fill(0);
    memory[NO_RAM].fill(0);
    memory
}

fn assert_same(one: &[u8], other: &[u8], what: &str) {
    let differs = one.iter().zip(other).position(|(one, other)| one != other);
    assert!(one.len() == other.len() && differs.is_none(), "{what} differs, first at {differs:x?}");
}

async fn fork(node: &Node, request: ForkRequest) -> ForkReport {
    let (count, id) = (request.count, request.id.clone());
    let report = node.engine.clone().create(request).await.unwrap_or_else(|e| panic!("{}", e.message()));
    assert_eq!(report.children.len(), count, "{report:?}");
    assert!(report.children.iter().all(|child| child.error.is_none()), "{report:?}");
    assert_eq!(id.as_ref().unwrap_or(&report.id), &report.id);
    report
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_child_on_the_second_host_has_the_memory_of_its_parent() {
    let program = vmove_skip::need!(vmove_skip::qemu());
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (
        Node::start("n1", dir.path(), ForkPolicy::default()).await,
        Node::start("n2", dir.path(), ForkPolicy::default()).await,
    );
    let there = second.address.to_string();
    first.registry.run(guest(&program, dir.path())).await.unwrap();
    counts(&first, "web").await;

    // Whole and compared: the child runs when its host has compared its memory with the checksum of the parent's host.
    let request = ForkRequest {
        vm: Some("web".to_owned()),
        count: 1,
        nodes: vec![there.clone()],
        verify: true,
        id: Some("whole".to_owned()),
        ..ForkRequest::default()
    };
    let report = fork(&first, request).await;
    assert_eq!((report.children[0].name.as_str(), report.children[0].node.as_str()), ("web.1", &*there));
    assert_eq!(report.children[0].verified, Some(true));
    let parent = still(first.guest_memory("web", MEMORY as u64).await);
    for at in FILLED.step_by(2) {
        let word = u16::try_from(((at & 0xffff) + ((at >> 4) & 0xf000)) & 0xffff).unwrap();
        assert_eq!(parent[at..at + 2], word.to_le_bytes(), "the guest has not filled its memory at {at:#x}");
    }
    assert_same(&parent, &still(second.guest_memory("web.1", MEMORY as u64).await), "web.1");
    counts(&second, "web.1").await;

    // Early and on both hosts: children run while the host fetches what they have not touched.
    let nodes = vec!["n1".to_owned(), there.clone()];
    let request = ForkRequest { vm: Some("web".to_owned()), count: 2, nodes, ..ForkRequest::default() };
    let report = fork(&first, request).await;
    let name = |node: &str| report.children.iter().find(|child| child.node == node).unwrap().name.clone();
    for (node, child) in [(&first, name("n1")), (&second, name(&there))] {
        assert_same(&parent, &still(node.guest_memory(&child, MEMORY as u64).await), &child);
        counts(node, &child).await;
    }

    // The parent's host has children ended wherever they are.
    for child in ["web.1".to_owned(), name("n1"), name(&there)] {
        first.engine.clone().kill(child.clone()).await.unwrap_or_else(|e| panic!("{child}: {}", e.message()));
    }
    assert_eq!((first.registry.count(), second.registry.count()), (1, 0));
    first.registry.stop("web", true).await.unwrap();
}

#[tokio::test]
async fn a_fork_of_what_is_not_here_is_refused_and_not_listed() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start("n1", dir.path(), ForkPolicy::default()).await;
    let of = |vm: Option<&str>, template: Option<&str>| ForkRequest {
        vm: vm.map(str::to_owned),
        template: template.map(str::to_owned),
        count: 1,
        ..ForkRequest::default()
    };
    for (request, code) in
        [(of(Some("a=b"), None), Code::UnknownVm), (of(None, Some("golden")), Code::UnknownTemplate)]
    {
        let error = node.engine.clone().create(request).await.unwrap_err();
        assert_eq!(error.code(), code, "{}", error.message());
    }
    assert!(node.engine.list().forks.is_empty(), "{:?}", node.engine.list());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_host_that_refuses_says_why_and_the_guest_runs_on() {
    let program = vmove_skip::need!(vmove_skip::qemu());
    let dir = tempfile::tempdir().unwrap();
    let no_children = ForkPolicy { max_children: 0, ..ForkPolicy::default() };
    let first = Node::start("n1", dir.path(), ForkPolicy::default()).await;
    let second = Node::start("n2", dir.path(), no_children).await;
    let third = Node::start("n3", dir.path(), ForkPolicy::default()).await;
    // Where no other node may have something written, wherever the clone lies.
    let log = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    let mut request = guest(&program, dir.path());
    request
        .command_line
        .extend(["-chardev".to_owned(), format!("null,id=n,logfile={}", log.path().display())]);
    first.registry.run(request).await.unwrap();
    for (node, why) in [
        (&second, "1 child was asked for, this node allows 0"),
        (&third, "(rule chardev.logfile): leave it out, or name the rule among options in [peers]"),
    ] {
        let request = ForkRequest {
            vm: Some("web".to_owned()),
            count: 1,
            nodes: vec![node.address.to_string()],
            ..ForkRequest::default()
        };
        let error = first.engine.clone().create(request).await.unwrap_err();
        assert_eq!(error.code(), Code::Forbidden, "{}", error.message());
        let said = error.message();
        assert!(said.contains(&node.address.to_string()) && said.contains(why), "{said}");
        assert_eq!(node.registry.count(), 0);
    }
    counts(&first, "web").await;
    first.registry.stop("web", true).await.unwrap();
}

/// A guest `web` that is to have a device, which is not plugged in: QEMU has no such device.
async fn guest_with_device(node: &Node, program: &str, dir: &Path) {
    node.registry.run(guest(program, dir)).await.unwrap();
    let request = "nic=77:00.0,mac=52:54:00:00:00:01,vlan=7".parse().unwrap();
    node.registry.devices().take("web", &request).await.unwrap();
    let device = VmDevice {
        request,
        id: "vmove-nic".to_owned(),
        bus: "pci.0".to_owned(),
        properties: std::collections::BTreeMap::new(),
    };
    let mut record = node.registry.vms().get("web").unwrap();
    record.devices.push(device);
    node.registry.vms().put(record).unwrap();
}

fn claims(node: &Node) -> Vec<String> {
    let mut all: Vec<String> = node
        .registry
        .devices()
        .claims()
        .into_iter()
        .map(|claim| format!("{} {}={}", claim.vm, claim.request.role, claim.request.address))
        .collect();
    all.sort();
    all
}

fn with_devices(devices: &[&str], nodes: Vec<String>) -> ForkRequest {
    ForkRequest {
        vm: Some("web".to_owned()),
        count: 2,
        nodes,
        devices: devices.iter().map(|text| text.parse().unwrap()).collect(),
        ..ForkRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn children_own_devices_of_their_hosts_and_give_them_back() {
    let program = vmove_skip::need!(vmove_skip::qemu());
    let dir = tempfile::tempdir().unwrap();
    let shelf = || -> Arc<dyn Devices> { Arc::new(Shelf::default()) };
    let (first, second) = (
        Node::start_with("n1", dir.path(), ForkPolicy::default(), shelf()).await,
        Node::start_with("n2", dir.path(), ForkPolicy::default(), shelf()).await,
    );
    guest_with_device(&first, &program, dir.path()).await;
    let parents = vec!["web nic=0000:77:00.0".to_owned()];

    // What cannot be had is refused before anything is done, and what was taken before is given back.
    for (devices, code, words) in [
        (&["nic=77:00.0"][..], Code::NotMovable, "VM \"web\" has it"),
        (&["gpu=77:00.1"], Code::NotMovable, "owns no device gpu"),
        (&["nic=77:00.1,mac=52:54:00:00:00:01"], Code::NotMovable, "of the parent's device nic"),
        (&["nic=77:00.1", "nic=77:00.7"], Code::DeviceUnavailable, "its driver refuses"),
    ] {
        let error = first.engine.clone().create(with_devices(devices, Vec::new())).await.unwrap_err();
        assert_eq!(error.code(), code, "{}", error.message());
        assert!(error.message().contains(words), "{}", error.message());
        assert_eq!(claims(&first), parents);
        assert_eq!(first.registry.count(), 1);
    }

    // One child here and one there, each with the device of its node at the same address.
    let nodes = vec!["n1".to_owned(), second.address.to_string()];
    let report = fork(&first, with_devices(&["nic=77:00.1", "2:nic=77:00.1"], nodes)).await;
    assert_eq!(claims(&first), [&parents[0], "web.1 nic=0000:77:00.1"]);
    assert_eq!(claims(&second), ["web.2 nic=0000:77:00.1"]);
    assert!(report.lacks_devices(), "QEMU has no such device: {report:?}");
    let mut macs = vec!["52:54:00:00:00:01".to_owned()];
    for (node, child) in [(&first, &report.children[0]), (&second, &report.children[1])] {
        let (told, record) = (&child.devices[0], node.registry.vms().get(&child.name).unwrap());
        let identity = record.devices[0].request.identity;
        assert_eq!((told.mac.clone(), identity.vlan), (identity.mac.map(|mac| mac.to_string()), Some(7)));
        assert_eq!(told.mend.as_deref(), Some(&*format!("vmove devices attach {} nic", child.name)));
        assert!(told.problem.as_ref().is_some_and(|why| why.contains("vmove-nic")), "{told:?}");
        macs.extend(told.mac.clone());
        counts(node, &child.name).await;
    }
    macs.sort();
    macs.dedup();
    assert_eq!(macs.len(), 3, "{macs:?}");

    // On the other host one cannot be taken: that host has no child, and keeps nothing.
    let nodes = vec![second.address.to_string()];
    let error =
        first.engine.clone().create(with_devices(&["nic=77:00.2", "nic=77:00.7"], nodes)).await.unwrap_err();
    assert_eq!(error.code(), Code::DeviceUnavailable, "{}", error.message());
    assert_eq!(claims(&second), ["web.2 nic=0000:77:00.1"]);

    for child in ["web.1", "web.2"] {
        first.engine.clone().kill(child.to_owned()).await.unwrap_or_else(|e| panic!("{}", e.message()));
    }
    assert_eq!((claims(&first), claims(&second)), (parents, Vec::new()));
    first.registry.stop("web", true).await.unwrap();
    assert!(claims(&first).is_empty());
}
