//! Journals and records of forks that are damaged: nothing is done with their guests, everybody is told, and an operator has a way out.
#![cfg(test)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::light;
use vmove_tests::forks::{ForkPhase, Parent, done, journals, kill_in_fork, names, on, template_files, vfork};
use vmove_tests::guest::Guest;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, memory_mib, ready, vmove};

fn stage(sandbox: &Sandbox) -> (Node, Parent) {
    let node = Node::start(sandbox, "a", NodeOptions::default()).expect("a daemon");
    let guest = Guest::new(memory_mib(&light()), light()).expect("a QEMU");
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    (node, parent)
}

/// Kills the daemon while it forks the guest into two, damages the journal, and starts the daemon again. Gives the journal.
fn damaged_in(node: &mut Node, phase: ForkPhase) -> (PathBuf, String) {
    let found = kill_in_fork(node, 2, phase, Duration::ZERO);
    assert!(found != ForkPhase::None, "the fork was over already");
    let journal = journals(node).remove(0);
    let before = std::fs::read_to_string(&journal).expect("a journal");
    std::fs::write(&journal, format!("{before}{{damaged\n")).expect("it is damaged");
    node.run().expect("the next life");
    (journal, before)
}

fn id_of(journal: &Path) -> String {
    journal.file_stem().expect("a name").to_string_lossy().into_owned()
}

/// How `vmove list` tells of the guest.
fn waiting(node: &Node, vm: &str) -> String {
    let list = node.ask(&["list"]).expect("an answer");
    let vms = list["vms"].as_array().expect("VMs");
    let found = vms.iter().find(|one| one["name"] == vm).unwrap_or_else(|| panic!("no {vm} in {list}"));
    found["waiting"].as_str().unwrap_or_default().to_owned()
}

/// Nothing changes a VM of which it is not known whether its memory is private.
fn refused_by(node: &Node, vm: &str, file: &Path) {
    let file = file.display().to_string();
    for request in [
        &["create", vm, "--count", "1"][..],
        &["promote", vm],
        &["warm", vm, "--count", "1"],
        &["template", "save", vm, "t"],
    ] {
        let end = vfork(node, request).expect("an answer");
        let told = format!("{} {}", end.answer, end.said);
        assert!(end.code == 1 && end.answer["code"] == "busy" && told.contains(&file), "{request:?}: {told}");
    }
    let end = vmove(node, &["migrate", vm, "--to", "127.0.0.1:1"]).expect("an answer");
    assert!(end.answer["code"] == "busy" && end.error().contains(&file), "{}", end.answer);
}

#[test]
fn a_fork_whose_journal_is_damaged_is_listed_and_left_alone_until_it_is_given_up() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (mut node, parent) = stage(&sandbox);
    let (journal, _) = damaged_in(&mut node, ForkPhase::Stopping);
    let (id, unknown) = (id_of(&journal), format!("unknown, see {}", journal.display()));
    // Also in a life after that.
    for again in [false, true] {
        let list = done(&node, &["list"]).expect("an answer");
        assert_eq!(
            (&list["forks"][0]["id"], &list["forks"][0]["phase"]),
            (&json!(id), &json!(unknown)),
            "{list}"
        );
        assert_eq!(list["forks"][0]["parent"], NAME, "{list}");
        let (status, rest) = node.rest("GET", "/v1/forks", &Value::Null).expect("an answer");
        assert_eq!((status, &rest), (200, &list));
        assert_eq!(waiting(&node, NAME), format!("its fork: {unknown}"), "started again: {again}");
        refused_by(&node, NAME, &journal);
        assert!(journal.exists(), "the journal was dropped");
        node.crash();
        node.run().expect("the next life");
    }
    let shown = String::from_utf8(node.vfork(&["list"]).expect("an answer").stdout).expect("text");
    assert!(shown.contains(&unknown) && shown.contains(&format!("vfork recover {id}")), "{shown}");

    let recovered = done(&node, &["recover", &id]).expect("it is taken up");
    let kept = format!("{}.damaged", journal.display());
    assert!(recovered["note"].as_str().is_some_and(|note| note.contains(&kept)), "{recovered}");
    assert!(!journal.exists() && Path::new(&kept).exists());
    assert_eq!(done(&node, &["list"]).expect("an answer")["forks"], json!([]));
    assert_eq!(waiting(&node, NAME), "");
    parent.sound(&node, NAME).expect("the guest runs again");
    assert_eq!(node.vms().expect("a list"), [NAME]);
    assert!(template_files(&node).is_empty(), "{:?}", template_files(&node));
    let again = vfork(&node, &["recover", &id]).expect("an answer");
    assert_eq!((again.code, &again.answer["code"]), (1, &json!("nothing-to-recover")), "{}", again.answer);
    let answer = done(&node, &["create", NAME, "--count", "1", "--verify"]).expect("it can be forked again");
    parent.all_sound(&on(&node, &names(&answer), Some(NAME))).expect("sound");
}

#[test]
fn a_damaged_journal_of_a_fork_that_is_put_right_is_taken_up() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (mut node, parent) = stage(&sandbox);
    let (journal, before) = damaged_in(&mut node, ForkPhase::Frozen);
    std::fs::write(&journal, before).expect("it is put right");
    // It is not looked at before somebody says so.
    assert!(waiting(&node, NAME).contains("unknown, see"));
    done(&node, &["recover", &id_of(&journal)]).expect("it is taken up");
    assert!(!journal.exists() && !Path::new(&format!("{}.damaged", journal.display())).exists());
    let vms = node.vms().expect("a list");
    parent.all_sound(&on(&node, &vms, None)).expect("sound");
    assert!(template_files(&node).is_empty(), "{:?}", template_files(&node));
}

/// What a node has noted of its part in a fork of another node, and of a VM that was forked.
#[test]
fn damaged_records_of_forks_are_listed_and_left_alone() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (mut node, parent) = stage(&sandbox);
    let answer = done(&node, &["create", NAME, "--count", "1"]).expect("a child");
    let (child, fork) = (names(&answer).remove(0), answer["id"].as_str().expect("an id").to_owned());
    node.crash();
    let forks = node.folder().join("state/forks");
    let (hosted, member) =
        (forks.join(format!("hosted/{fork}.json")), forks.join(format!("members/{NAME}.json")));
    std::fs::create_dir_all(forks.join("hosted")).expect("a folder");
    std::fs::write(&hosted, "{damaged").expect("a record");
    let before = std::fs::read(&member).expect("a record");
    std::fs::write(&member, "{damaged").expect("a record");
    node.run().expect("the next life");
    let list = done(&node, &["list"]).expect("an answer");
    assert_eq!(list["forks"][0]["phase"], format!("unknown, see {}", hosted.display()), "{list}");
    for (vm, file) in [(child.as_str(), &hosted), (NAME, &member)] {
        assert_eq!(waiting(&node, vm), format!("its fork: unknown, see {}", file.display()));
        refused_by(&node, vm, file);
    }
    parent.all_sound(&on(&node, std::slice::from_ref(&child), Some(NAME))).expect("both run");
    // The fork's children are given up, since memory of theirs may be missing. Nothing else is.
    done(&node, &["recover", &fork]).expect("it is given up");
    assert!(!hosted.exists());
    assert_eq!(node.vm(&child).expect("it is listed").status, "ended");
    std::fs::write(&member, before).expect("it is put right");
    assert_eq!(waiting(&node, NAME), "");
    done(&node, &["promote", NAME]).expect("its memory can be found again");
    parent.sound(&node, NAME).expect("sound");
}
