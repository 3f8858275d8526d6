//! Waiting for children of a fork, by somebody who reads what is said meanwhile.
#![cfg(test)]

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Stdio};

use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::forks::done;
use vmove_tests::guest::Guest;
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, memory_mib, ready, steady};

#[test]
fn who_waits_for_children_is_told_which_have_not_ended() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
    node.run_guest(NAME, "thp", &guest).expect("the guest runs");
    done(&node, &["create", NAME, "--count", "2"]).expect("two children");
    let mut join = Command::new(places::product("vfork").expect("vfork is built"));
    join.arg("--control").arg(node.control()).args(["join", NAME, "--timeout", "60s"]).stdin(Stdio::null());
    let mut join = join.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(join.stderr.take().expect("its messages")).lines();
    let mut next = || lines.next().expect("a line").expect("text");

    assert_eq!(next(), "vfork: waiting: 2 children of guest end: guest.1, guest.2 (1 s)");
    done(&node, &["kill", "guest.1"]).expect("it ends");
    assert!(next().starts_with("vfork: waiting: 1 child of guest ends: guest.2 ("));
    done(&node, &["kill", "guest.2"]).expect("it ends");
    assert!(join.wait().expect("it ends").success());
    let mut said = String::new();
    join.stdout.take().expect("its answer").read_to_string(&mut said).expect("text");
    assert_eq!(said, "All 2 children of \"guest\" have ended\n");
}
