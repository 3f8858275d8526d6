//! Forks on one host and on others.
#![cfg(test)]

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::{self, Setup, fleet_with, host, plain};
use vmove_tests::forks::{Parent, done, names, on, vfork};
use vmove_tests::guest::Accel;
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::NAME;

/// Every child of an answer was compared with the template.
fn verified(answer: &Value) {
    for child in answer["children"].as_array().expect("children") {
        assert_eq!(child["verified"], true, "{child}");
    }
}

fn children_are_verified_and_sound(accel: Accel) {
    need!(payload::ready(accel));
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let guest = payload::guest(sandbox.path(), accel, &payload::light(), KvmPages::All).expect("an image");
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    let answer = done(&node, &["create", NAME, "--count", "3", "--verify"]).expect("three children");
    verified(&answer);
    let seen =
        payload::kvm_seen(&node.vm(NAME).and_then(|vm| parent.page(&vm)).expect("a beacon")).expect("words");
    for child in answer["children"].as_array().expect("children") {
        eprintln!("{accel:?}: {child}");
        let written = child["written_while_loading"].as_array().cloned().unwrap_or_default();
        let kinds: Vec<&str> = written.iter().filter_map(|write| write["what"].as_str()).collect();
        // KVM writes the wall clock as soon as it is told where it is, which is in the device state.
        assert_eq!(kinds.contains(&"kvm-wall-clock"), seen.has_clock, "{child}");
        assert!(seen.has_clock || kinds.is_empty(), "{child}");
    }
    parent.all_sound(&on(&node, &names(&answer), Some(NAME))).expect("their memory is right");
    // A child is a guest like another.
    let child = names(&answer)[0].clone();
    done(&node, &["promote", &child]).expect("it gets memory of its own");
    let answer = done(&node, &["create", &child, "--count", "1", "--verify"]).expect("a grandchild");
    verified(&answer);
    parent.all_sound(&on(&node, &names(&answer), Some(&child))).expect("their memory is right");
    assert_eq!(vfork(&node, &["tree", NAME]).expect("an answer").code, 0);
}

#[test]
fn children_under_kvm_are_verified_and_go_on_with_the_right_memory() {
    children_are_verified_and_sound(Accel::Kvm);
}

#[test]
fn children_of_the_same_guest_emulated_are_verified() {
    children_are_verified_and_sound(Accel::Tcg);
}

fn children_on_other_hosts(accel: Accel) {
    need!(fleet::ready());
    need!(payload::ready(accel));
    let setup = Setup { payload: Some(accel), config: Some(payload::light()), ..Setup::default() };
    let fleet = fleet_with(3, &setup, plain);
    let to = ["create", NAME, "--count", "2", "--node", "n2", "--node", "n3", "--way", "unicast"];
    fleet.networks.limit(1, 16).expect("tc limits");
    let answer = done(&fleet.nodes[0], &to).expect("children");
    for child in answer["children"].as_array().expect("children") {
        let at = host(&answer, child["node"].as_str().expect("a node"));
        let ms = |value: &Value| value.as_f64().expect("milliseconds");
        eprintln!("{accel:?}: ran after {}, whole after {}; {at}", child["running_ms"], at["template_ms"]);
        assert!(ms(&child["running_ms"]) < ms(&at["template_ms"]), "{child} {at}");
        assert!(at["faults"]["fetched"].as_u64() > Some(0), "{at}");
    }
    fleet.sound(&answer);
    fleet.networks.limit(1, 1000).expect("tc limits");
    let whole = [&to[..], &["--whole", "--verify"]].concat();
    let answer = done(&fleet.nodes[0], &whole).expect("children");
    verified(&answer);
    fleet.sound(&answer);
    fleet.clean();
}

#[test]
fn children_under_kvm_run_on_other_hosts_before_their_memory_is_there_or_verified() {
    children_on_other_hosts(Accel::Kvm);
}

#[test]
fn prepared_children_and_those_of_a_template_under_kvm_go_on_with_the_right_memory() {
    need!(payload::ready(Accel::Kvm));
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let guest =
        payload::guest(sandbox.path(), Accel::Kvm, &payload::light(), KvmPages::All).expect("an image");
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    done(&node, &["warm", NAME, "--count", "2"]).expect("two are prepared");
    let answer = done(&node, &["create", NAME, "--count", "2"]).expect("two children");
    for child in answer["children"].as_array().expect("children") {
        assert_eq!(child["warm"], true, "{child}");
    }
    parent.all_sound(&on(&node, &names(&answer), Some(NAME))).expect("their memory is right");
    done(&node, &["template", "save", NAME, "golden"]).expect("a template");
    let answer =
        done(&node, &["create", "--template", "golden", "--count", "1", "--verify"]).expect("a child");
    verified(&answer);
    parent.all_sound(&on(&node, &names(&answer), Some(NAME))).expect("their memory is right");
}
