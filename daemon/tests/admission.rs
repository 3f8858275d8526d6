//! What a node admits: guests for which there is memory, from nodes that may bring them, with QEMUs and options that they may use.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

mod common;

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Command;

use common::{Node, Pki, wait};
use serde_json::Value;
use vmove_skip::{need, qemu};

/// A node whose pages go over tcp, however near the other one is.
fn far() -> Node {
    Node::start_with(&["--insecure", "--fabric", "tcp"])
}

/// An idle guest of 96 MiB.
#[track_caller]
fn run(node: &Node, name: &str, qemu: &str) -> Value {
    node.ask(&["run", "--name", name, "--", qemu, "-nodefaults", "-display", "none", "-m", "96M"])
}

/// Content, so that a move takes a while.
fn fill(vm: &Value) {
    let file = std::fs::File::options().write(true).open(vm["ram"][0]["path"].as_str().unwrap()).unwrap();
    file.write_all_at(&vec![7; 24 << 20], 48 << 20).unwrap();
}

/// Lets a node's guests have so much memory and no more.
fn bound_memory(node: &Node, qemu: &str, size: &str) {
    // Its folder for guest memory is mounted for its first guest.
    run(node, "first", qemu);
    node.ask(&["stop", "first"]);
    let folder = node.state().join("memory/thp");
    let mounted =
        Command::new("mount").arg("-o").arg(format!("remount,size={size}")).arg(&folder).status().unwrap();
    assert!(mounted.success());
}

#[test]
fn two_moves_that_fit_alone_but_not_together_are_not_both_admitted() {
    let qemu = need!(qemu());
    let (a, b) = (far(), far());
    // Each needs 161 MiB.
    bound_memory(&b, &qemu, "240M");
    fill(&run(&a, "one", &qemu));
    run(&a, "two", &qemu);
    let to = b.listen.to_string();
    a.vmove(&["check", "two", "--to", &to]).expect(0);
    let slowly = ["migrate", "one", "--to", &to, "--mode", "precopy", "--bandwidth", "1MiB", "--detach"];
    let id = a.ask(&slowly)["id"].as_str().unwrap().to_owned();
    wait("the first is on its way", || a.ask(&["status"]).to_string().contains("\"rounds\""));

    for command in ["check", "migrate"] {
        let refused = a.vmove(&[command, "two", "--to", &to]).expect(3);
        let said = refused.out + &refused.err;
        assert!(said.contains("two needs 161 MiB of available memory (96 MiB of guest RAM"), "{said}");
        let reserved = format!("MiB reserved for migration {id} of \"one\" from tester");
        assert!(said.contains("MiB free, less ") && said.contains(&reserved), "{said}");
    }
    // Nor does the node start one of its own in that memory.
    let own =
        b.problem(&["run", "--name", "own", "--", &qemu, "-nodefaults", "-display", "none", "-m", "160M"], 1);
    assert_eq!(own["code"], "no-memory");
    assert!(own["error"].as_str().unwrap().contains(&format!("reserved for migration {id}")), "{own}");

    // What the first does not take, the second can have.
    a.ask(&["cancel", &id]);
    wait("its memory is free", || a.vmove(&["check", "two", "--to", &to]).code == Some(0));
    a.vmove(&["migrate", "two", "--to", &to]).expect(0);
    assert_eq!(b.ask(&["show", "two"])["status"], "running");
}

/// A node with this text in its configuration, whose pages go over tcp.
fn configured(folder: &tempfile::TempDir, name: &str, text: &str, flags: &[String]) -> Node {
    let file = folder.path().join(name);
    std::fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    let flags = flags.iter().map(String::as_str);
    Node::start_with(&["--fabric", "tcp", "--config", file].into_iter().chain(flags).collect::<Vec<_>>())
}

/// (code, subject) of what stands in the way of a move.
#[track_caller]
fn blockers(node: &Node, vm: &str, to: &Node) -> Vec<(String, String)> {
    let mut command = node.command(&["--json", "check", vm, "--to", &to.listen.to_string()]);
    let answer = common::Ended::of(&mut command).expect(3).json();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = answer["blockers"].as_array().unwrap();
    all.iter().map(|one| (text(&one["code"]), text(&one["subject"]))).collect()
}

#[test]
fn a_node_takes_guests_only_from_those_that_it_accepts() {
    let qemu = need!(qemu());
    let (pki, folder) = (Pki::new(), tempfile::tempdir().unwrap());
    let accepts = r#"peers.accept-from = ["*.rack1.example", "by-its-common-name"]"#;
    let b = configured(&folder, "b", accepts, &pki.flags_of("b", &[]));
    let to = b.listen.to_string();

    let other = configured(&folder, "other", "", &pki.flags_of("other", &["n1.rack2.example"]));
    run(&other, "web", &qemu);
    assert_eq!(blockers(&other, "web", &b), [("peer-not-accepted".to_owned(), String::new())]);
    let refused = other.vmove(&["migrate", "web", "--to", &to]).expect(3);
    for words in ["n1.rack2.example", "127.0.0.1", "*.rack1.example", "accept-from in [peers]"] {
        assert!(refused.err.contains(words), "no {words:?} in {refused:?}");
    }
    assert!(b.log().contains("a guest of another node is refused"), "{}", b.log());
    assert_eq!(b.ask(&["list"])["vms"], serde_json::json!([]));
    assert_eq!(other.ask(&["show", "web"])["status"], "running");

    for (name, dns) in [("of-the-rack", "n7.rack1.example"), ("by-its-common-name", "elsewhere.example")] {
        let a = configured(&folder, name, "", &pki.flags_of(name, &[dns]));
        run(&a, name, &qemu);
        a.vmove(&["migrate", name, "--to", &to]).expect(0);
        assert_eq!(b.ask(&["show", name])["status"], "running");
    }
    // What it does not accept can be given to the others.
    b.vmove(&["migrate", "of-the-rack", "--to", &other.listen.to_string()]).expect(0);
}

#[test]
fn another_node_starts_no_program_and_uses_no_option_that_would_give_this_one_away() {
    let qemu = need!(qemu());
    // Not below /tmp, where QEMU may write logs, and where a clone may lie.
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    // QEMU's user writes a log there, and the program its note.
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let insecure = ["--insecure".to_owned()];
    let (a, b) = (far(), configured(&folder, "b", "", &insecure));
    // A program of the name of a QEMU that is none of those of the node: it notes how it is called.
    let (program, called, log) = (path("qemu-system-x86_64"), path("called"), path("log"));
    std::fs::write(&program, format!("#!/bin/sh\necho \"$@\" >> {called}\nexec {qemu} \"$@\"\n")).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let chardev = format!("null,id=n,logfile={log}");
    let more = ["-nodefaults", "-display", "none", "-m", "96M", "-chardev", &chardev];
    let words = [&["run", "--name", "web", "--env", "LD_BIND_NOW=1", "--", &program], &more[..]].concat();
    a.ask(&words);
    let refused = [
        ("qemu-not-allowed", program.as_str()),
        ("option-not-allowed", "chardev.logfile"),
        ("environment-not-allowed", "LD_BIND_NOW"),
    ];
    let refused = refused.map(|(code, subject)| (code.to_owned(), subject.to_owned()));
    assert_eq!(blockers(&a, "web", &b), refused);
    let end = a.vmove(&["migrate", "web", "--to", &b.listen.to_string()]).expect(3);
    assert!(end.err.contains("rule chardev.logfile") && end.err.contains("[peers]"), "{end:?}");
    assert_eq!(b.ask(&["list"])["vms"], serde_json::json!([]));
    let said = std::fs::read_to_string(&called).unwrap();
    assert!(!said.contains("-version"), "the node has started it to ask what it is: {said}");

    let allows = format!(
        "[peers]\nqemu-binaries = [{program:?}]\noptions = [\"chardev.*\"]\nenvironment = [\"LD_BIND_NOW\"]\n"
    );
    let c = configured(&folder, "c", &allows, &insecure);
    a.vmove(&["migrate", "web", "--to", &c.listen.to_string()]).expect(0);
    assert_eq!(c.ask(&["show", "web"])["status"], "running");
}
