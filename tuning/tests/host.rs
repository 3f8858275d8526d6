//! Hosts, as their `/sys` tells them.
#![cfg(test)]

use std::path::Path;

use vmove_tuning::choose::{Wish, choose};
use vmove_tuning::cpus::Cpus;
use vmove_tuning::host::Host;
use vmove_tuning::pins::{PinError, Pins, TuningPolicy};

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
        write(root.path(), &format!("node/node{node}/hugepages/hugepages-2048kB/free_hugepages"), "7\n");
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
    assert_eq!(
        (first.memory, first.available),
        (8 << 30, 5 << 30),
        "page cache counts, shared memory does not"
    );
    assert_eq!(first.free_huge[&(2 << 20)], 7);
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

/// What is given away is written down, so that the next daemon gives it to nobody else.
#[test]
fn pins_outlive_the_daemon() {
    let (root, state) = (two_sockets(), tempfile::tempdir().expect("a folder"));
    let file = state.path().join("pins.json");
    let policy = TuningPolicy { pin: true, housekeeping_cpus: Some(Cpus::none()) };
    let open = || Pins::open(root.path(), policy.clone(), file.clone()).expect("readable");
    let pins = open();
    // This machine's processors count, not those of the tree.
    let own = pins.allowed().and(&"0-1".parse().expect("a set"));
    let one = Wish { numa: Vec::new(), cpus: 1, memory: 0, huge_page: None };
    pins.take("a", &one, 1).expect("one is free");
    let first = pins.of("a").expect("it has one");
    let next = open();
    assert_eq!(next.of("a"), Some(first));
    for vm in ["b", "c", "d", "e", "f", "g", "h", "i"].iter().take(own.len().saturating_sub(1)) {
        next.take(vm, &one, 1).expect("another one is free");
    }
    if own.len() == pins.allowed().len() {
        assert!(matches!(next.take("late", &one, 1), Err(PinError::NoPlace(_))));
        assert!(
            next.not_pinned("late").is_some_and(|why| why.contains("found 0")),
            "{:?}",
            next.not_pinned("late")
        );
    }
    assert!(next.end("a") && !next.end("a"));
    next.take("late", &one, 1).expect("that of a is free");
    assert_eq!(next.not_pinned("late"), None);
    std::fs::write(&file, "{").expect("written");
    Pins::open(root.path(), policy, file).expect_err("not a ledger");
}
