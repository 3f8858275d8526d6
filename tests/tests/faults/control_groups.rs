//! Each VM in a control group of its own, below the one that was delegated to its daemon.
#![cfg(test)]

use std::process::Command;

use vmove_skip::need;
use vmove_tests::control_groups::Group;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::forks::{done, names};
use vmove_tests::guest::Guest;
use vmove_tests::places;
use vmove_tests::process::Guarded;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, Scene, memory_mib, ready, steady};

use crate::out_of_memory::run;
use crate::waits::until;

const LEAF: &str = "vmoved";

/// A daemon that is started in a group of its own. `inner`: where below it.
fn daemon_in(group: &Group, sandbox: &Sandbox, inner: &str) -> NodeOptions {
    let program = places::product("vmoved").and_then(|vmoved| group.program(sandbox, inner, &vmoved));
    NodeOptions { program: Some(program.expect("a program")), ..NodeOptions::default() }
}

#[test]
fn each_vm_has_a_control_group_that_goes_with_it() {
    need!(ready());
    // A controller that most hosts have in cgroup 2, and that is to count in each group.
    let group = need!(Group::new("vmove-groups", &["hugetlb"]));
    let sandbox = Sandbox::new().expect("a sandbox");
    // It moves to a leaf by itself; the next one is started there, as systemd does it by DelegateSubgroup=.
    let mut node = Node::start(&sandbox, "a", daemon_in(&group, &sandbox, "")).expect("a daemon");
    assert_eq!(group.inner(), [LEAF]);
    let (stays, goes) = (run(&node, "two words"), run(&node, "goes"));
    assert_eq!(group.inner(), ["vm-goes", "vm-two words", LEAF]);
    assert_eq!((group.processes("vm-two words"), group.processes("vm-goes")), (vec![stays], vec![goes]));
    assert_eq!(group.processes(""), Vec::<i32>::new(), "a process is in the inner group");
    assert!(group.processes(LEAF).contains(&node.pid().expect("it runs")));
    let shown = node.ask(&["show", "goes"]).expect("an answer");
    let dir = group.path().join("vm-goes");
    assert_eq!(shown["control_group"], dir.display().to_string(), "{shown}");
    assert!(dir.join("hugetlb.2MB.max").exists(), "the controller does not count there");
    node.crash();
    daemon_in(&group, &sandbox, LEAF);
    node.run().expect("the next life");
    assert!(group.processes(LEAF).contains(&node.pid().expect("it runs")));
    assert_eq!(group.processes("vm-two words"), [stays], "its QEMU was moved");
    for (name, left) in [("goes", &["vm-two words", LEAF][..]), ("two words", &[LEAF])] {
        node.ask(&["stop", "--force", name]).expect("it ends");
        until("its group is removed", || Ok(group.inner() == left)).expect("in time");
    }
    drop(node);
    drop(sandbox);
}

/// A guest that comes from elsewhere, and a child of a fork.
#[test]
fn guests_that_come_and_children_have_control_groups_too() {
    need!(ready());
    let group = need!(Group::new("vmove-of-guests", &[]));
    let sandbox = Sandbox::new().expect("a sandbox");
    let guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
    let b = Node::start(&sandbox, "b", daemon_in(&group, &sandbox, "")).expect("a daemon");
    let scene = Scene::to(sandbox, b, "thp", &guest).expect("a guest");
    scene.moves_now().expect("it moves");
    assert_eq!(group.processes(&format!("vm-{NAME}")), [scene.b.vm(NAME).expect("it is there").pid]);
    let answer = done(&scene.b, &["create", NAME, "--count", "1"]).expect("a child");
    let child = names(&answer).remove(0);
    assert_eq!(group.processes(&format!("vm-{child}")), [scene.b.vm(&child).expect("it is there").pid]);
    drop(scene);
}

/// The log says why, and VMs run as ever, where the daemon is.
fn without_groups(group: &Group, inner: &str, why: &str) {
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", daemon_in(group, &sandbox, inner)).expect("a daemon");
    let log = node.log();
    assert!(log.contains("VMs get no control groups") && log.contains(why), "no {why:?} in {log}");
    let pid = run(&node, "x");
    assert!(group.processes(inner).contains(&pid), "it is elsewhere");
    assert!(node.ask(&["show", "x"]).expect("an answer")["control_group"].is_null());
    node.ask(&["stop", "--force", "x"]).expect("it ends");
}

#[test]
fn a_daemon_that_can_make_no_control_groups_says_so_and_goes_on() {
    need!(ready());
    let group = need!(Group::new("vmove-none", &["hugetlb"]));
    // systemd could not start the next daemon there, beside groups that have controllers.
    without_groups(&group, "x.service", "DelegateSubgroup=vmoved");
    assert_eq!(group.inner(), ["x.service"]);
    // No controller can count below a group that has processes.
    let other = Command::new("sleep").arg("600").spawn().map(Guarded::from).expect("a process");
    group.set("cgroup.procs", &other.pid().to_string()).expect("it enters the group");
    without_groups(&group, "", "cgroup.subtree_control");
    assert_eq!(group.inner(), ["x.service"], "something is left");
    drop(other);
}
