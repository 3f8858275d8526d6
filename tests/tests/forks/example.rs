//! `examples/fork_and_gather.rs`: a scheduler that forks a warm guest, has its children work, and gathers what they answer.
#![cfg(test)]

use std::process::Command;

use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::forks::Parent;
use vmove_tests::guest::Guest;
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, memory_mib, ready};

const JOB: [&str; 4] =
    ["-chardev", "socket,id=job,path={vmdir}/job.sock,server=on,wait=off", "-serial", "chardev:job"];

fn gather(node: &Node, vm: &str, count: &str) -> (Option<i32>, String) {
    let mut command = Command::new(places::product("examples/fork_and_gather").expect("the example"));
    let output = command.arg(node.control()).args([vm, count]).output().expect("it runs");
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn children_do_their_shares_and_the_results_are_gathered() {
    need!(ready());
    let config =
        Config { working_set_mib: 8, rate: Rate::PagesPerSecond(500), verify: 2_000, ..Config::default() };
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let mut guest = Guest::new(memory_mib(&config), config).expect("a QEMU");
    guest.extra = JOB.map(str::to_owned).to_vec();
    guest.kernel_options = "vmove.worker=1";
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    // The sum of the numbers up to 1000, whoever has added which of them.
    for count in ["1", "4"] {
        let (code, said) = gather(&node, NAME, count);
        assert!(code == Some(0) && said.contains("sum: 500500"), "{said}\n{}", node.log());
        assert_eq!(node.vms().expect("a list"), [NAME], "its children are gone");
    }
    parent.sound(&node, NAME).expect("the parent is sound");
    let (code, said) = gather(&node, "nobody", "2");
    assert!(code == Some(1) && said.contains("nobody"), "{said}");
}
