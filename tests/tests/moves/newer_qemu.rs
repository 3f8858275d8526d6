//! A guest comes to a newer QEMU when it moves, and not back to an older one.
#![cfg(test)]

use std::path::{Path, PathBuf};

use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::forks::Parent;
use vmove_tests::guest::Guest;
use vmove_tests::places::Qemu;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, memory_mib, ready, steady, vmove};

/// From now on the command line's QEMU is this one, as after an upgrade of its package.
fn install(program: &Path, qemu: &Path) {
    let new = program.with_extension("new");
    std::os::unix::fs::symlink(qemu, &new).expect("a link");
    std::fs::rename(&new, program).expect("replaces the link");
}

fn runs_on(node: &Node) -> PathBuf {
    let pid = node.vm(NAME).expect("it is listed").pid;
    std::fs::read_link(format!("/proc/{pid}/exe")).expect("it runs")
}

#[test]
fn a_guest_comes_to_each_newer_qemu_and_not_back() {
    need!(ready());
    let oldest = need!(Qemu::V7_2.path());
    let middle = need!(Qemu::V10_0.path());
    let newest = need!(Qemu::Testing.path());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let program = sandbox.path().join("qemu-system-x86_64");
    install(&program, &oldest);
    let mut guest = Guest::new(memory_mib(&steady()), steady()).expect("a guest");
    guest.qemu.clone_from(&program);
    let parent = Parent::start(&a, NAME, "thp", guest).expect("the guest runs");
    assert_eq!(runs_on(&a), oldest);
    for (from, to, qemu, mode) in [(&a, &b, &middle, "hybrid"), (&b, &a, &newest, "postcopy")] {
        install(&program, qemu);
        let end = vmove(from, &["migrate", NAME, "--to", to.name(), "--mode", mode, "--verify"]);
        let end = end.expect("it ends");
        assert_eq!(end.code, 0, "{mode}: {} {}; {}", end.answer, end.said, to.log());
        assert_eq!(end.answer["verified"], true, "{mode}: {}", end.answer);
        assert_eq!(&runs_on(to), qemu);
        parent.sound(to, NAME).expect("the guest is sound");
    }
    install(&program, &middle);
    let end = vmove(&a, &["migrate", NAME, "--to", "b"]).expect("an answer");
    assert_eq!((end.code, &end.answer["guest"]), (3, &"source".into()), "{}", end.answer);
    let blocker = &end.answer["blockers"][0];
    assert_eq!(blocker["code"], "qemu-version", "{}", end.answer);
    let said = blocker["message"].as_str().unwrap_or_default();
    assert!(said.contains("device state of a newer QEMU cannot be loaded by an older one"), "{said}");
    parent.sound(&a, NAME).expect("the guest runs on");
}
