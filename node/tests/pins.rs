//! Hosts, as their `/sys` tells them, and what VMs have of them.
#![cfg(test)]

use std::collections::BTreeMap;
use std::path::Path;

use vmove_node::pins::{PinError, Pins, TuningPolicy};
use vmove_skip::need;
use vmove_tuning::choose::{Wish, choose};
use vmove_tuning::cpus::Cpus;
use vmove_tuning::host::Host;
use vmove_types::tuning::NumaShare;

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join("sys/devices/system").join(path);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
    std::fs::write(path, text).expect("written");
}

/// Two sockets of two cores with two threads; a third NUMA node has memory only.
fn two_sockets() -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a folder");
    for cpu in 0..8 {
        let first = cpu % 4;
        let siblings = format!("{first},{}\n", first + 4);
        write(root.path(), &format!("cpu/cpu{cpu}/topology/thread_siblings_list"), &siblings);
    }
    write(root.path(), "node/online", "0-2\n");
    for (node, cpus, total) in [(0, "0-1,4-5", 8_u64), (1, "2-3,6-7", 0), (2, "", 8)] {
        let kib = total << 20;
        let line = |key: &str, kib: u64| format!("Node {node} {key}: {kib} kB\n");
        let meminfo = line("MemTotal", kib)
            + &line("MemFree", kib / 2)
            + &line("FilePages", kib / 4)
            + &line("Shmem", kib / 8);
        write(root.path(), &format!("node/node{node}/meminfo"), &meminfo);
        write(root.path(), &format!("node/node{node}/cpulist"), &format!("{cpus}\n"));
        let pages = |file: &str| format!("node/node{node}/hugepages/hugepages-2048kB/{file}");
        write(root.path(), &pages("nr_hugepages"), "9\n");
        write(root.path(), &pages("free_hugepages"), "7\n");
    }
    write(root.path(), "node/node0/distance", "10 21 30\n");
    write(root.path(), "node/node1/distance", "21 10 15\n");
    write(root.path(), "node/node2/distance", "30 15 10\n");
    root
}

#[test]
fn cores_nodes_and_memory_are_read() {
    let root = two_sockets();
    let host = Host::read(root.path(), &"0-6".parse().expect("a set")).expect("a host");
    let cores: Vec<String> = host.cores.iter().map(Cpus::to_string).collect();
    assert_eq!(cores, ["0,4", "1,5", "2,6", "3"], "7 is not allowed");
    let first = &host.nodes[0];
    let reserved = 9 * (2 << 20);
    assert_eq!(first.memory, (8 << 30) - reserved);
    assert_eq!(first.available, 5 << 30, "page cache counts, shared memory does not");
    assert_eq!((first.huge[&(2 << 20)].all, first.huge[&(2 << 20)].free), (9, 7));
    assert_eq!(host.memory_near(1), Some(2), "node 1 has no memory, and node 2 is nearer than node 0");
    let wish = Wish { numa: Vec::new(), cpus: 4, memory: 1 << 30, huge_page: None };
    let place = choose(&host, &"1-6".parse().expect("a set"), &wish).expect("room");
    assert_eq!(place.cpus.len(), 4);
}

#[test]
fn a_host_that_cannot_be_read_says_which_file() {
    let root = two_sockets();
    std::fs::write(root.path().join("sys/devices/system/node/node1/cpulist"), "zero").expect("written");
    let error = Host::read(root.path(), &"0".parse().expect("a set")).expect_err("no list");
    assert!(error.to_string().ends_with("node/node1/cpulist"), "{error}");
}

/// Memory that a VM has not touched yet looks free to the kernel.
#[test]
fn memory_and_huge_pages_are_promised_once() {
    let (root, state) = (two_sockets(), tempfile::tempdir().expect("a folder"));
    let policy = TuningPolicy { pin: true, housekeeping_cpus: Some(first_processor()) };
    let pins = Pins::open(root.path(), policy, state.path().join("pins.json")).expect("none yet");
    let gib = |gib: u64| Wish { numa: vec![on_first()], cpus: 0, memory: gib << 30, huge_page: None };
    pins.take("a", &gib(5), 1, &BTreeMap::new()).expect("there are 5 GiB");
    let error = pins
        .take("b", &gib(3), 1, &BTreeMap::new())
        .expect_err("a has not touched its memory, but was promised it");
    assert!(error.to_string().contains("expected 3072 MiB on NUMA node 0, found 3054 MiB free"), "{error}");
    pins.take("b", &gib(2), 1, &BTreeMap::new()).expect("there are nearly 3");
    pins.end("b");
    let huge = |pages: u64| Wish { memory: pages << 21, huge_page: Some(2 << 20), ..gib(0) };
    pins.end("a");
    pins.take("a", &huge(4), 1, &BTreeMap::new()).expect("7 are free");
    let error = pins.take("b", &huge(6), 1, &BTreeMap::new()).expect_err("9 less 4 are 5");
    assert!(
        error.to_string().contains("expected 6 free huge pages of 2048 kB on NUMA node 0, found 5"),
        "{error}"
    );
    pins.take("b", &huge(5), 1, &BTreeMap::new()).expect("there are 5");
}

/// Memory of the first NUMA node.
fn on_first() -> NumaShare {
    NumaShare { node: 0, cpus: 0, memory_mib: 1 }
}

/// The first processor on which this process may run.
fn first_processor() -> Cpus {
    vmove_tuning::threads::of(None).expect("this thread").iter().take(1).collect()
}

/// What is given away is written down, so that the next daemon gives it to nobody else.
#[test]
fn pins_outlive_the_daemon() {
    let (root, state) = (two_sockets(), tempfile::tempdir().expect("a folder"));
    let file = state.path().join("pins.json");
    let policy = TuningPolicy { pin: true, housekeeping_cpus: Some(first_processor()) };
    let open = || Pins::open(root.path(), policy.clone(), file.clone()).expect("readable");
    // Of the processors of this machine, those that the tree has, too.
    let own = open().allowed().without(&first_processor()).and(&"0-7".parse().expect("a set"));
    need!(if own.is_empty() { Err("this machine has one processor") } else { Ok(()) });
    let one = Wish { numa: Vec::new(), cpus: 1, memory: 0, huge_page: None };
    open().take("a", &one, 1, &BTreeMap::new()).expect("one is free");
    let next = open();
    assert!(next.of("a").is_some_and(|pin| own.has(pin.cpus[0])));
    for vm in ["b", "c", "d", "e", "f", "g", "h"].iter().take(own.len() - 1) {
        next.take(vm, &one, 1, &BTreeMap::new()).expect("another one is free");
    }
    assert!(matches!(next.take("late", &one, 1, &BTreeMap::new()), Err(PinError::NoPlace(_))));
    assert!(
        next.not_pinned("late").is_some_and(|why| why.contains("found 0")),
        "{:?}",
        next.not_pinned("late")
    );
    assert!(next.end("a") && !next.end("a"));
    next.take("late", &one, 1, &BTreeMap::new()).expect("that of a is free");
    assert_eq!(next.not_pinned("late"), None);
    std::fs::write(&file, "{").expect("written");
    Pins::open(root.path(), policy, file.clone()).expect_err("not a ledger");
    let nowhere = TuningPolicy { pin: true, housekeeping_cpus: Some("4000".parse().expect("a set")) };
    let error = Pins::open(root.path(), nowhere, state.path().join("none")).expect_err("no such processor");
    assert!(error.to_string().contains("housekeeping-cpus in [tuning]: expected some of"), "{error}");
}
