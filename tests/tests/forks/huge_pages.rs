//! Huge pages that run out for the children of a guest: it is refused before anything is begun, or the guest goes on and nothing is left.
#![cfg(test)]

use std::path::PathBuf;

use vmove_skip::{need, skip};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::{light, until};
use vmove_tests::forks::{Parent, done, journals, names, on, template_files, vfork};
use vmove_tests::guest::Guest;
use vmove_tests::huge_pages::{Hog, waiting_qemu};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, memory_mib, ready};

#[test]
fn huge_pages_that_run_out_for_a_child_leave_the_parent_and_nothing_else() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut guest = Guest::new(memory_mib(&light()), light()).expect("a QEMU");
    let bytes = guest.bytes();
    if let Err(reason) = sandbox.reserve_huge_pages_alone(2 << 20, 3 * bytes + (16 << 20)) {
        return skip!("{reason:#}");
    }
    let (wrapper, waiting) = waiting_qemu(sandbox.path(), &guest.qemu);
    guest.qemu = wrapper;
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let parent = Parent::start(&node, NAME, "hugetlb-2m", guest).expect("the guest runs");

    // Not enough from the beginning: the guest does not notice.
    let hog = Hog::all_but(&sandbox, 2 * bytes - (2 << 20)).expect("they are taken");
    let before = parent.sound(&node, NAME).expect("it runs");
    let end = vfork(&node, &["create", NAME, "--count", "1"]).expect("an answer");
    assert_eq!((end.code, &end.answer["code"]), (3, &"no-room".into()), "{} {}", end.answer, end.said);
    for words in ["(1 + 1) x", "free huge pages", "vm.nr_hugepages"] {
        assert!(
            end.said.contains(words) || end.answer.to_string().contains(words),
            "{} {}",
            end.answer,
            end.said
        );
    }
    assert!(!waiting.exists() && journals(&node).is_empty(), "something was begun");
    drop(hog);

    // Gone when the child's QEMU starts. The guest has been frozen by then, and its own pages are kept for it.
    let end = std::thread::scope(|scope| {
        let forking = scope.spawn(|| vfork(&node, &["create", NAME, "--count", "1"]));
        until("the child's QEMU is about to start", || waiting.exists());
        let hog = Hog::all_but(&sandbox, 0).expect("they are taken");
        std::fs::remove_file(&waiting).expect("it goes on");
        let end = forking.join().expect("waited for").expect("an answer");
        drop(hog);
        end
    });
    let told = format!("{} {}", end.answer, end.said);
    assert_eq!(end.code, 1, "{told}");
    for words in ["huge pages", "vm.nr_hugepages"] {
        assert!(told.contains(words), "no {words:?} in: {told}");
    }
    assert_eq!(node.vms().expect("a list"), [NAME]);
    let after = parent.sound(&node, NAME).expect("the guest goes on");
    assert!(after.work > before.work);
    until("nothing is left of the fork", || journals(&node).is_empty() && template_files(&node).is_empty());
    let left: Vec<PathBuf> = vmove_tests::beacon::ram_files(&node.memory());
    assert_eq!(left, node.vm(NAME).expect("it is there").ram_files());

    // With enough of them it is forked. First the parent gets memory of its own, if it has none.
    let answer = std::thread::scope(|scope| {
        let forking = scope.spawn(|| done(&node, &["create", NAME, "--count", "1", "--verify"]));
        until("the child's QEMU is about to start, or there is none", || {
            waiting.exists() || forking.is_finished()
        });
        let _ = std::fs::remove_file(&waiting);
        forking.join().expect("waited for").expect("a child")
    });
    parent.all_sound(&on(&node, &names(&answer), Some(NAME))).expect("sound");
}
