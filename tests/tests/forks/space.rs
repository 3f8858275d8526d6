//! State folders that are full when a guest is forked: it goes on, and nothing is left of the fork.
#![cfg(test)]

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;

use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::{light, until};
use vmove_tests::forks::{Parent, done, journals, names, on, template_files, vfork};
use vmove_tests::guest::Guest;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, memory_mib, ready};

const PAGE: usize = 4096;
/// Of the state folder. A fork needs some dozens of KiB.
const STATE_BYTES: u64 = 2 << 20;
/// More pages than a fork writes down.
const ENOUGH: usize = 100;

/// Leaves room for so many pages in the state folder of `node`, until the file is removed.
fn room_for(node: &Node, pages: usize) -> PathBuf {
    let path = node.folder().join("state/filler");
    let mut file = File::create(&path).expect("a file");
    while file.write(&[1; PAGE]).is_ok_and(|bytes| bytes == PAGE) {}
    let taken = usize::try_from(file.metadata().expect("a file").len()).expect("a length") / PAGE;
    file.set_len(((taken - pages) * PAGE) as u64).expect("it is cut");
    path
}

/// Whatever the first thing is that cannot be written: each line of the fork's journal, what is noted of the guest and of its child, their
/// records. The guest has so long a command line that each of them takes more than a page.
#[test]
fn a_guest_goes_on_whatever_of_its_fork_cannot_be_written_down() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    sandbox.mount_small("a/state", STATE_BYTES).expect("a small folder");
    let mut guest = Guest::new(memory_mib(&light()), light()).expect("a QEMU");
    let long = format!("name=opt/org.vmove.test/long,string={}", "x".repeat(5000));
    guest.extra.extend(["-fw_cfg".to_owned(), long]);
    let mut node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    let mut refused = 0;
    for pages in 0.. {
        assert!(pages < ENOUGH, "it is never forked");
        let filler = room_for(&node, pages);
        let end = vfork(&node, &["create", NAME, "--count", "1"]).expect("an answer");
        let told = format!("room for {pages} pages: {} {} {}", end.code, end.answer, end.said.trim());
        std::fs::remove_file(filler).expect("there is room");
        let children = if end.code == 0 { names(&end.answer) } else { Vec::new() };
        parent
            .all_sound(&on(&node, &children, Some(NAME)))
            .unwrap_or_else(|error| panic!("{told}: {error:#}"));
        if end.code == 0 {
            done(&node, &["kill", &children[0]]).expect("it ends");
            break;
        }
        eprintln!("{told}");
        refused += 1;
        assert!(end.code == 1 && told.contains("No space left on device"), "{told}");
        assert_eq!(node.vms().expect("a list"), [NAME], "{told}");
        until(&format!("nothing is left: {told}"), || {
            journals(&node).is_empty() && template_files(&node).is_empty()
        });
    }
    // The journal's lines, and what is noted of the guest and of the child.
    assert!(refused > 5, "only {refused} were refused");
    node.crash();
    node.run().expect("the next life");
    assert_eq!(done(&node, &["list"]).expect("an answer")["forks"], serde_json::json!([]));
    let answer = done(&node, &["create", NAME, "--count", "1", "--verify"]).expect("it can be forked");
    parent.all_sound(&on(&node, &names(&answer), Some(NAME))).expect("sound");
}
