//! Guests that go back to the moment of a template, and children that get names of their own.
#![cfg(test)]

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::{fleet, light, lose, plain, ready};
use vmove_tests::forks::{Parent, done, names, template_files, vfork};
use vmove_tests::guest::Guest;
use vmove_tests::monitor::Monitor;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, memory_mib};

const MAC: &str = "52:54:00:00:00:01";
const UUID: &str = "11111111-1111-4111-8111-111111111111";

fn ask(node: &Node, vm: &str, command: &str, arguments: Value) -> Value {
    let socket = node.vm(vm).expect("it is listed").dir.join("operator.sock");
    Monitor::connect(&socket).and_then(|monitor| monitor.run(command, arguments)).expect("an answer")
}

/// MAC address, UUID and VM Generation ID, as QEMU has them.
fn identity(node: &Node, vm: &str) -> (Value, Value, Value) {
    let mac = json!({ "path": "/machine/peripheral/nic", "property": "mac" });
    (
        ask(node, vm, "qom-get", mac),
        ask(node, vm, "query-uuid", Value::Null)["UUID"].clone(),
        ask(node, vm, "query-vm-generation-id", Value::Null)["guid"].clone(),
    )
}

/// Its node is lost; another one that sees the same folder goes on from the template.
#[test]
fn a_guest_goes_back_to_the_moment_of_its_template_on_another_node() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let shared = sandbox.folder("shared").expect("a folder");
    let config = format!("[fork]\ntemplate-dir = {:?}\n", shared.display().to_string());
    let node = |name: &str| {
        let options = NodeOptions { config: config.clone(), ..NodeOptions::default() };
        Node::start(&sandbox, name, options).expect("a daemon")
    };
    let (mut a, b) = (node("a"), node("b"));
    let mut guest = Guest::new(memory_mib(&light()), light()).expect("a QEMU");
    let nic = format!("virtio-net-pci,netdev=n0,id=nic,mac={MAC}");
    let extra = [
        ["-qmp", "unix:{vmdir}/operator.sock,server=on,wait=off"],
        ["-device", "vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87"],
        ["-uuid", UUID],
        ["-netdev", "hubport,id=n0,hubid=0"],
        ["-device", &nic],
    ];
    guest.extra.extend(extra.as_flattened().iter().map(|word| (*word).to_owned()));
    let parent = Parent::start(&a, NAME, "thp", guest).expect("the guest runs");
    let before = identity(&a, NAME);
    assert_eq!((&before.0, &before.1), (&json!(MAC), &json!(UUID)));
    done(&a, &["template", "save", NAME, "golden"]).expect("a template");
    let then = parent.sound(&a, NAME).expect("it runs on");
    lose(&mut a);

    let restored = done(&b, &["template", "restore", "golden"]).expect("it runs again");
    assert_eq!(restored["child"]["name"], NAME, "{restored}");
    assert_eq!(restored["child"]["network"], "up", "{restored}");
    assert_eq!(restored["warnings"], Value::Null, "{restored}");
    assert!(restored["own_memory"]["total_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{restored}");
    let after = identity(&b, NAME);
    assert_eq!((&after.0, &after.1), (&before.0, &before.1), "its addresses are its own");
    assert_ne!(after.2, before.2, "it is told that it went back");
    let now = parent.beacon(&b, NAME).expect("a beacon");
    assert_eq!(now.boot, then.boot, "another guest");
    assert!(now.beats < then.beats + 2000, "it went back: {then:?}, now {now:?}");
    parent.sound(&b, NAME).expect("its memory is what it was");
    // It is a guest like any other: with memory of its own, and nothing of the template is left in memory.
    assert!(template_files(&b).is_empty(), "{:?}", template_files(&b));
    assert_eq!(done(&b, &["tree", NAME]).expect("a tree")["private"], false);
    // Twice, under one name, it cannot be there.
    let refused = vfork(&b, &["template", "restore", "golden"]).expect("an answer");
    assert_eq!(refused.code, 1, "{} {}", refused.answer, refused.said);
    assert!(refused.said.contains(NAME), "{}", refused.said);
    assert!(template_files(&b).is_empty(), "{:?}", template_files(&b));
    parent.sound(&b, NAME).expect("the one that runs does not mind");
    let other = done(&b, &["template", "restore", "golden", "--name", "second"]).expect("under another name");
    assert_eq!(other["child"]["name"], "second", "{other}");
    parent.sound(&b, "second").expect("sound");
}

#[test]
fn a_paused_guest_runs_on_when_it_is_frozen_and_children_have_the_names_that_were_asked_for() {
    need!(ready());
    let fleet = fleet(2, plain);
    let a = &fleet.nodes[0];
    a.ask(&["pause", NAME, "--for", "10m"]).expect("it pauses");
    let saved = done(a, &["template", "save", NAME, "golden", "--let-run"]).expect("a template");
    assert!(saved["ran_on_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{saved}");
    fleet.parent.sound(a, NAME).expect("it runs");
    let saved = done(a, &["template", "save", NAME, "running", "--let-run"]).expect("a template");
    assert_eq!(saved["ran_on_ms"], Value::Null, "it was not paused: {saved}");

    a.ask(&["pause", NAME]).expect("it pauses");
    let to =
        ["create", NAME, "--count", "2", "--here", "1", "--to", "n2", "--name", "left,right", "--let-run"];
    let answer = done(a, &to).expect("children");
    assert!(answer["ran_on_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{answer}");
    let mut found: Vec<(String, String)> = fleet
        .family(&answer)
        .into_iter()
        .filter(|(_, name)| *name != NAME)
        .map(|(node, name)| (name.to_owned(), node.name().to_owned()))
        .collect();
    found.sort();
    let expected = [("left", "n1"), ("right", "n2")];
    assert_eq!(found, expected.map(|(name, node)| (name.to_owned(), node.to_owned())));
    fleet.sound(&answer);
    // Those without a name of their own are counted as ever.
    let answer = done(a, &["create", NAME, "--count", "1"]).expect("a child");
    assert_eq!(names(&answer), ["guest.1"], "{answer}");
    let again = vfork(a, &["create", NAME, "--count", "1", "--name", "left"]).expect("an answer");
    assert_eq!(again.code, 1, "{} {}", again.answer, again.said);
    for (words, told) in [
        (&["--count", "2", "--name", "one"][..], "a name for each of the 2 children"),
        (&["--count", "2", "--name", "one,one"], "\"one\" twice"),
    ] {
        let refused = vfork(a, &[&["create", NAME][..], words].concat()).expect("an answer");
        assert_eq!(refused.code, 2, "{} {}", refused.answer, refused.said);
        assert!(refused.said.contains(told), "{}", refused.said);
    }
}

#[test]
fn a_guest_that_was_paused_for_a_time_runs_on_by_itself() {
    need!(ready());
    let fleet = fleet(1, plain);
    let a = &fleet.nodes[0];
    let status = || a.vm(NAME).expect("it is listed").status;
    let begun = Instant::now();
    a.ask(&["pause", NAME, "--for", "2s"]).expect("it pauses");
    assert_eq!(status(), "paused");
    fleet.parent.sound(a, NAME).expect("it runs on");
    assert!(begun.elapsed() >= Duration::from_secs(2), "after {:?}", begun.elapsed());
    // Paused again by somebody who gives no time, it stays so.
    a.ask(&["pause", NAME, "--for", "1s"]).expect("it pauses");
    a.ask(&["pause", NAME]).expect("it pauses");
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(status(), "paused");
    let (code, answer) = a
        .rest("PUT", &format!("/v1/vms/{NAME}/state"), &json!({ "state": "running", "for_ms": 5 }))
        .expect("an answer");
    assert_eq!(code, 400, "{answer}");
    a.ask(&["resume", NAME]).expect("it resumes");
    fleet.parent.sound(a, NAME).expect("it runs");
}
