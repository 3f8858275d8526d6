//! Guests with processors for themselves: at their start, after a move, beside others, in a fork, and when somebody moves their threads.
#![cfg(test)]

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;
use vmove_guest::config::Config;
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions, Vm};
use vmove_tests::fleet::until;
use vmove_tests::forks::{done, names};
use vmove_tests::guest::Guest;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{self, memory_mib, vmove};

/// These tests give the second processor to guests and keep the first.
const OPTIONS: &str = "[tuning]\nhousekeeping-cpus = \"0\"\n";

fn ready() -> Result<(), String> {
    scene::ready().map_err(|why| format!("{why:#}"))?;
    match std::thread::available_parallelism() {
        Ok(cpus) if cpus.get() >= 2 => Ok(()),
        _ => Err("this machine has one processor: none can be given away".to_owned()),
    }
}

fn nodes(sandbox: &Sandbox) -> (Node, Node) {
    let options = NodeOptions { config: OPTIONS.to_owned(), ..NodeOptions::default() };
    Node::pair(sandbox, &options).expect("two daemons")
}

fn small() -> Guest {
    let config = Config { working_set_mib: 16, cold_mib: 16, ..Config::default() };
    Guest::new(memory_mib(&config), config).expect("a QEMU")
}

/// Starts a guest with these options of `vmove run`.
fn run(node: &Node, name: &str, options: &[&str]) -> scene::End {
    let line = small().command_line("{vmdir}/serial.log").expect("its command line");
    let mut arguments = vec!["run", "--name", name];
    arguments.extend(options);
    arguments.push("--");
    arguments.extend(line.iter().map(String::as_str));
    vmove(node, &arguments).expect("an answer")
}

/// Processors on which each thread of a process may run, sorted.
fn threads(pid: i32) -> Vec<String> {
    let folder = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let status = folder.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok());
    let allowed = |status: String| {
        let line =
            status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
        line.trim().to_owned()
    };
    let mut threads: Vec<String> = status.map(allowed).collect();
    threads.sort();
    threads
}

/// Waits until all threads of a process are on these processors.
fn all_on(pid: i32, cpus: &str) {
    until(&format!("all threads are on {cpus}"), || threads(pid).iter().all(|thread| thread == cpus));
}

/// Waits until the one virtual processor of a VM is on the second processor, and all its other threads are on the first.
fn is_pinned(vm: &Vm) {
    until("its threads are where they belong", || {
        let threads = threads(vm.pid);
        let (last, others) = threads.split_last().expect("a thread");
        last == "1" && !others.is_empty() && others.iter().all(|thread| thread == "0")
    });
}

/// The policy of the memory that a QEMU maps of its RAM file, as the kernel tells it.
fn memory_policy(vm: &Vm) -> String {
    let maps = std::fs::read_to_string(format!("/proc/{}/numa_maps", vm.pid)).expect("a kernel with NUMA");
    let path = vm.ram[0].path.display().to_string();
    let line = maps.lines().find(|line| line.contains(&path)).expect("it maps its RAM file");
    line.split_whitespace().nth(1).unwrap_or_default().to_owned()
}

#[test]
fn a_pinned_guest_has_its_processor_wherever_it_goes_and_others_keep_off() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a folder");
    let (mut a, b) = nodes(&sandbox);
    let started = run(&a, "fast", &["--pin=0:1"]);
    assert_eq!(started.code, 0, "{}", started.said);
    assert_eq!(started.answer["pinned"]["cpus"], "1");
    assert_eq!(started.answer["pinned"]["one_each"], true);
    let fast = a.vm("fast").expect("it runs");
    is_pinned(&fast);
    assert_eq!(memory_policy(&fast), "bind:0");

    // Another start under its name takes nothing from it.
    assert_eq!(run(&a, "fast", &["--pin=0:1"]).answer["code"], "name-taken");
    assert_eq!(a.ask(&["show", "fast"]).expect("it runs")["pinned"]["cpus"], "1");

    // Nobody else gets it, or runs there: neither another guest nor the daemon.
    let refused = run(&a, "second", &["--pin"]);
    assert_eq!((refused.code, refused.answer["code"].as_str()), (3, Some("not-pinned")), "{}", refused.said);
    assert!(refused.error().contains("expected 1 processors that no other VM has"), "{}", refused.error());
    let second = run(&a, "second", &["--prefer-pin"]);
    assert_eq!(second.code, 0, "{}", second.said);
    assert!(
        second.answer["not_pinned"].as_str().is_some_and(|why| why.contains("found 0")),
        "{}",
        second.answer
    );
    all_on(a.vm("second").expect("it runs").pid, "0");
    all_on(a.pid().expect("the daemon runs"), "0");

    // A new daemon knows what the old one gave away.
    a.crash();
    a.run().expect("it starts again");
    assert_eq!(run(&a, "third", &["--pin=0:1"]).code, 3);

    // It goes, and is pinned there; what it had here is free.
    a.migrate("fast", "b", &["--mode", "hybrid", "--verify"]).expect("it moves");
    let moved = b.vm("fast").expect("it is there");
    is_pinned(&moved);
    assert_eq!(memory_policy(&moved), "bind:0");
    until("its processor is free", || run(&a, "third", &["--pin=0:1"]).code == 0);
    is_pinned(&a.vm("third").expect("it runs"));
    // With the last pinned guest gone, the others have the whole machine again.
    a.ask(&["stop", "third"]).expect("it ends");
    all_on(a.vm("second").expect("it runs").pid, "0-1");
}

#[test]
fn a_child_of_a_pinned_guest_is_pinned_where_there_is_room() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a folder");
    let (a, b) = nodes(&sandbox);
    assert_eq!(run(&a, "parent", &["--pin"]).code, 0);
    let here = names(&done(&a, &["create", "parent", "--count", "1"]).expect("a fork"));
    let child = a.ask(&["show", &here[0]]).expect("the child");
    assert!(child["not_pinned"].as_str().is_some_and(|why| why.contains("no other VM has")), "{child}");
    all_on(a.vm(&here[0]).expect("it runs").pid, "0");
    let there = names(&done(&a, &["create", "parent", "--count", "1", "--to", "b"]).expect("a fork"));
    let child = b.vm(&there[0]).expect("the child");
    is_pinned(&child);
    // What it writes is its own, and on its NUMA node.
    let maps = std::fs::read_to_string(format!("/proc/{}/numa_maps", child.pid)).expect("a kernel with NUMA");
    let heap = maps.lines().find(|line| line.contains(" heap ")).expect("it has a heap");
    assert!(heap.contains("prefer") && heap.contains(":0"), "{heap}");
}

#[test]
fn threads_that_somebody_moves_are_told_and_put_back() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a folder");
    let (a, _b) = nodes(&sandbox);
    assert_eq!(run(&a, "vm", &["--pin"]).code, 0);
    let vm = a.vm("vm").expect("it runs");
    is_pinned(&vm);
    let of = |report: &Value| -> (String, String) {
        let advice = report["advice"].as_array().expect("advice");
        let pinning =
            advice.iter().find(|one| one["topic"] == "pinning" && one["vm"] == "vm").expect("of the VM");
        (pinning["state"].as_str().unwrap_or_default().to_owned(), pinning["found"].to_string())
    };
    assert_eq!(of(&vmove(&a, &["tune", "vm"]).expect("advice").answer).0, "good");
    let moved = Command::new("taskset").args(["-a", "-p", "-c", "0", &vm.pid.to_string()]).output();
    assert!(moved.expect("util-linux").status.success());
    let told = vmove(&a, &["tune", "vm"]).expect("advice");
    assert_eq!(told.code, 3);
    let (state, found) = of(&told.answer);
    assert!(state == "can-apply" && found.contains("0 on 0"), "{state} {found}");
    let applied = vmove(&a, &["tune", "--apply", "vm"]).expect("advice");
    assert_eq!(of(&applied.answer).0, "applied", "{}", applied.answer);
    is_pinned(&vm);
    // The host's part names what it looked at, and changes nothing by itself.
    let all = vmove(&a, &["tune"]).expect("advice");
    let topics: BTreeSet<&str> = all.answer["advice"]
        .as_array()
        .expect("advice")
        .iter()
        .filter_map(|one| one["topic"].as_str())
        .collect();
    for topic in [
        "huge-pages",
        "numa-balancing",
        "governor",
        "sleep-states",
        "hyperthreads",
        "iommu",
        "interrupts",
        "swap",
    ] {
        assert!(topics.contains(topic), "{topic}: {topics:?}");
    }
    let unknown = vmove(&a, &["tune", "nobody"]).expect("an answer");
    assert_eq!(unknown.answer["code"], "unknown-vm");
}
