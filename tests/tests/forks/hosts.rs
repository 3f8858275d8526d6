//! Real guests are forked to daemons in other network namespaces: their children check their own memory there.
#![cfg(test)]

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use serde_json::Value;
use vmove_guest::config::Config;
use vmove_skip::need;
use vmove_tests::daemon::Node;
use vmove_tests::fleet::{Fleet, Setup, fleet, fleet_with, host, light, plain, qemus, ready, until};
use vmove_tests::forks::{done, names, template_files, vfork};
use vmove_tests::places;
use vmove_tests::places::Qemu;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{End, NAME};
use vmove_tests::tap::Tap;

const GROUP: &str = "multicast-group = \"239.78.0.1:7421\"\n";
const GROUP_ADDRESS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(239, 78, 0, 1), 7421);

#[test]
fn children_run_on_other_hosts_whichever_way_memory_went() {
    need!(ready());
    let fleet = fleet(4, plain);
    let a = &fleet.nodes[0];
    let to = ["--node", "n2", "--node", "n3", "--node", "n4", "--here", "1", "--verify"];
    for (way, chosen) in [("auto", "pipeline"), ("unicast", "unicast")] {
        let answer =
            done(a, &[&["create", NAME, "--count", "5", "--way", way], &to[..]].concat()).expect("children");
        assert_eq!(answer["distribution"]["way"], chosen, "{answer}");
        assert_eq!(answer["children"].as_array().map(Vec::len), Some(5), "{answer}");
        let counts: Vec<_> = ["n2", "n3", "n4"].iter().map(|n| host(&answer, n)["running"].clone()).collect();
        assert_eq!(counts, [2, 1, 1], "{answer}");
        let verified = |child: &Value| child["verified"] == true;
        assert!(answer["children"].as_array().expect("children").iter().all(verified), "{answer}");
        fleet.sound(&answer);
        fleet.clean();
        let memory = answer["distribution"]["memory_bytes"].as_u64().expect("bytes");
        let left = answer["distribution"]["root_bytes"].as_u64().expect("bytes");
        #[allow(clippy::cast_precision_loss)]
        let copies = left as f64 / memory as f64;
        eprintln!("{way}: {chosen}, {memory} bytes, {copies:.3} copies left; {}", answer["hosts"]);
        let expected = if chosen == "unicast" { 2.9..3.2 } else { 0.9..1.6 };
        assert!(expected.contains(&copies), "{chosen}: {copies}");
        let why =
            answer["distribution"]["estimates"][0]["arithmetic"].as_str().unwrap_or_default().to_owned();
        assert!(why.contains("256 KiB"), "{answer}");
        // No number is given twice.
        for name in names(&answer) {
            assert_eq!(
                fleet.nodes.iter().filter(|n| n.vms().expect("a list").contains(&name)).count(),
                1,
                "{name}"
            );
        }
    }
    let tree = done(a, &["tree", NAME]).expect("a tree");
    let elsewhere = |node: &&Value| node["status"] == "elsewhere" && node["node"].is_string();
    assert_eq!(tree["children"].as_array().expect("children").iter().filter(elsewhere).count(), 8, "{tree}");
    // A child on another host is a VM like any other: it is forked there, and moves.
    let b = fleet.node("n2");
    let child = b.vms().expect("a list").into_iter().next().expect("a child");
    let answer =
        done(b, &["create", &child, "--count", "1", "--node", "n1", "--verify"]).expect("a grandchild");
    fleet.parent.sound(a, &names(&answer)[0]).expect("a grandchild at its grandparent's node is sound");
}

/// n1, n2 and n3 hang on one leaf switch, n4 and n5 on another.
fn on_two_leaves(number: u8) -> String {
    let leaf = |number: u8| if number <= 3 { "near" } else { "far" };
    let table = |other: u8| {
        let address = format!("10.77.0.{other}:7420");
        format!("[nodes.n{other}]\naddress = {address:?}\nleaf = {:?}\n", leaf(other))
    };
    let tables: String = (1..=5).map(table).collect();
    format!("leaf = {:?}\n{tables}", leaf(number))
}

#[test]
fn in_two_stages_memory_leaves_the_parents_node_once_for_each_leaf() {
    need!(ready());
    let fleet = fleet(5, on_two_leaves);
    let sent = || -> Vec<u64> {
        (1..=5).map(|number| fleet.networks.sent_bytes(number).expect("statistics")).collect()
    };
    let before = sent();
    let to = ["--node", "n2", "--node", "n3", "--node", "n4", "--node", "n5"];
    let end = create(&fleet, &[&["--count", "4", "--way", "two-stage", "--verify"], &to[..]].concat());
    let after = sent();
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    let answer = end.answer;
    assert_eq!(answer["distribution"]["way"], "two-stage", "{answer}");
    let memory = answer["distribution"]["memory_bytes"].as_u64().expect("bytes");
    #[allow(clippy::cast_precision_loss)]
    let copies = |bytes: u64| bytes as f64 / memory as f64;
    // The first of each leaf reads from the parent's node, the other one from the first.
    for (first, second) in [("n2", "n3"), ("n4", "n5")] {
        let read = |node: &str, whence: &str| copies(host(&answer, node)[whence].as_u64().expect("bytes"));
        assert!(read(first, "from_root_bytes") >= 1.0, "{first}: {answer}");
        assert!(read(first, "from_hosts_bytes") < 0.01, "{first}: {answer}");
        assert!(read(second, "from_hosts_bytes") > 0.75, "{second}: {answer}");
    }
    let links: Vec<f64> = after.iter().zip(&before).map(|(after, before)| copies(after - before)).collect();
    eprintln!("copies of {memory} bytes on the links of n1 to n5: {links:.3?}; {}", answer["hosts"]);
    assert!((1.9..2.6).contains(&links[0]), "{links:?}");
    for first in [1, 3] {
        assert!(links[first] > 0.75 && links[first + 1] < 0.1, "{links:?}");
    }
    fleet.sound(&answer);
    fleet.clean();
}

/// Each child is on the node that it is said to be on, and finds its memory right. Nothing is said of the parent.
fn children_are_sound(fleet: &Fleet, answer: &Value, expected: &[(&str, &str)]) {
    let mut found = Vec::new();
    for child in answer["children"].as_array().expect("children") {
        let (name, node) = (child["name"].as_str().expect("a name"), child["node"].as_str().expect("a node"));
        assert!(child["error"].is_null(), "{child}");
        found.push((name, node));
    }
    let children: Vec<_> = found.iter().map(|(name, node)| (fleet.node(node), *name)).collect();
    fleet.parent.all_sound(&children).expect("their memory is right");
    assert_eq!(found, expected, "{answer}");
}

#[test]
fn a_paused_parent_stays_paused_while_its_children_run_elsewhere() {
    need!(ready());
    let fleet = fleet(3, plain);
    let a = &fleet.nodes[0];
    a.ask(&["pause", NAME]).expect("it pauses");
    let beacon = || fleet.parent.beacon(a, NAME).expect("a beacon");
    let to = ["create", NAME, "--count", "3", "--here", "1", "--node", "n2", "--node", "n3"];
    // The second time its children wait for all of their memory.
    let rounds: [(&[&str], _); 2] = [
        (&[], [("guest.1", "n1"), ("guest.2", "n2"), ("guest.3", "n3")]),
        (&["--verify"], [("guest.4", "n1"), ("guest.5", "n2"), ("guest.6", "n3")]),
    ];
    for (more, expected) in rounds {
        let answer = done(a, &[&to[..], more].concat()).expect("children");
        assert_eq!(answer["parent_pause_ms"], 0.0, "{answer}");
        assert!(answer["own_memory_before"].is_null() && !answer["own_memory"].is_null(), "{answer}");
        assert_eq!(answer["parent_stood_still_ms"], 0.0, "{answer}");
        let before = beacon();
        children_are_sound(&fleet, &answer, &expected);
        assert_eq!(a.vm(NAME).expect("it is listed").status, "paused");
        assert_eq!(beacon(), before, "the parent has run");
        fleet.clean();
    }
    a.ask(&["resume", NAME]).expect("it resumes");
    fleet.parent.sound(a, NAME).expect("the parent runs on");
}

#[test]
fn a_kept_template_is_forked_to_other_hosts_also_without_its_guest() {
    need!(ready());
    let fleet = fleet(3, plain);
    let (a, b) = (&fleet.nodes[0], fleet.node("n2"));
    let boot = fleet.parent.beacon(a, NAME).expect("a beacon").boot;
    done(a, &["template", "save", NAME, "golden"]).expect("a template");
    let files = template_files(a);
    assert_eq!(files.len(), 1, "{files:?}");
    let to =
        ["create", "--template", "golden", "--count", "3", "--here", "1", "--node", "n2", "--node", "n3"];
    // While its guest runs and writes, and without it.
    let rounds: [(&[&str], _); 2] = [
        (&["--verify"], [("golden.1", "n1"), ("golden.2", "n2"), ("golden.3", "n3")]),
        (&[], [("golden.4", "n1"), ("golden.5", "n2"), ("golden.6", "n3")]),
    ];
    for (more, expected) in rounds {
        if more.is_empty() {
            fleet.parent.sound(a, NAME).expect("the guest does not mind");
            a.ask(&["stop", NAME, "--force"]).expect("it ends");
        }
        let answer = done(a, &[&to[..], more].concat()).expect("children");
        assert_eq!(answer["parent"], "golden", "{answer}");
        assert_eq!(answer["parent_pause_ms"], 0.0, "{answer}");
        children_are_sound(&fleet, &answer, &expected);
        for (name, node) in expected {
            let child = fleet.parent.beacon(fleet.node(node), name).expect("a beacon");
            assert_eq!(child.boot, boot, "{name} is another guest");
        }
        // What arrived there goes with the fork, the template stays, and is what was saved.
        for node in &fleet.nodes[1..] {
            assert_eq!(template_files(node), Vec::<std::path::PathBuf>::new(), "{}", node.name());
        }
        assert_eq!(template_files(a), files);
        let saved = a.folder().join("state/templates/golden/ram-0");
        let same = std::process::Command::new("cmp").arg(&files[0]).arg(saved).status();
        assert!(same.expect("cmp runs").success(), "the template has changed");
    }
    // Its children are found by its name, wherever they are.
    let tree = done(a, &["tree", "golden"]).expect("a tree");
    let at = |node: &str| {
        let children = tree["children"].as_array().expect("children").iter();
        children.filter(|child| child["status"] == "elsewhere" && child["node"] == node).count()
    };
    assert_eq!((at("n2"), at("n3")), (2, 2), "{tree}");
    done(a, &["kill", "golden.2"]).expect("it ends");
    assert_eq!(b.vms().expect("a list"), ["golden.5"]);
}

/// What `vfork create` says with these arguments.
fn create(fleet: &Fleet, arguments: &[&str]) -> End {
    vfork(&fleet.nodes[0], &[&["create", NAME], arguments].concat()).expect("an answer")
}

#[test]
fn by_multicast_memory_crosses_the_parents_link_about_once() {
    need!(ready());
    let config = Config { working_set_mib: 64, cold_mib: 64, ..light() };
    let setup = Setup { config: Some(config), ..Setup::default() };
    let fork = |_| format!("{GROUP}multicast-mbit = 240\n");
    let fleet = fleet_with(5, &setup, fork);
    let before = fleet.networks.sent_bytes(1).expect("statistics");
    let to =
        ["--node", "n2", "--node", "n3", "--node", "n4", "--node", "n5", "--way", "multicast", "--verify"];
    let end = create(&fleet, &[&["--count", "4"], &to[..]].concat());
    let sent = fleet.networks.sent_bytes(1).expect("statistics") - before;
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    let answer = end.answer;
    let memory = answer["distribution"]["memory_bytes"].as_u64().expect("bytes");
    #[allow(clippy::cast_precision_loss)]
    let ratio = sent as f64 / memory as f64;
    eprintln!("{sent} bytes on the link of n1 for {memory} to 4 hosts: {ratio:.3}; {}", answer["hosts"]);
    assert!(ratio <= 1.15, "{ratio}: {answer}");
    assert_eq!(answer["distribution"]["way"], "multicast", "{answer}");
    assert!(answer["multicast"]["sent_bytes"].as_u64() > Some(memory), "{answer}");
    fleet.sound(&answer);
    fleet.clean();
}

#[test]
fn losses_are_repaired_and_a_host_that_may_not_hear_reads() {
    need!(ready());
    let fork = |number| if number == 4 { String::new() } else { format!("{GROUP}multicast-mbit = 240\n") };
    let fleet = fleet(4, fork);
    fleet.networks.lose(2, 0.01).expect("losses");
    fleet.networks.lose(3, 0.10).expect("losses");
    let to = ["--node", "n2", "--node", "n3", "--node", "n4", "--way", "multicast", "--verify"];
    let end = create(&fleet, &[&["--count", "3"], &to[..]].concat());
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    assert!(end.said.contains("n4 takes no datagrams"), "{}", end.said);
    let count = |node: &str, field: &str| host(&end.answer, node)[field].as_u64().expect("a number");
    assert!(count("n3", "multicast_bytes") > 0, "{}", end.answer);
    // What several hosts miss is sent again, what one misses it reads.
    assert!(end.answer["multicast"]["repaired_chunks"].as_u64() > Some(0), "{}", end.answer);
    assert_eq!(count("n4", "multicast_bytes"), 0, "{}", end.answer);
    assert!(
        count("n4", "from_root_bytes") >= end.answer["distribution"]["memory_bytes"].as_u64().expect("bytes")
    );
    fleet.sound(&end.answer);
    fleet.clean();
}

#[test]
fn with_tls_datagrams_are_encrypted_too() {
    need!(ready());
    let zeros_of = |tls: bool| {
        let setup = Setup { tls, ..Setup::default() };
        let fleet = fleet_with(3, &setup, |_| format!("{GROUP}multicast-mbit = 240\n"));
        let tap = Tap::open(&fleet.networks, 2, GROUP_ADDRESS).expect("a socket that hears the group");
        let to = ["--count", "2", "--node", "n2", "--node", "n3", "--way", "multicast", "--verify"];
        let end = create(&fleet, &to);
        assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
        assert_eq!(end.answer["distribution"]["way"], "multicast", "{}", end.answer);
        for node in ["n2", "n3"] {
            assert!(host(&end.answer, node)["multicast_bytes"].as_u64() > Some(0), "{}", end.answer);
        }
        fleet.sound(&end.answer);
        let heard = tap.heard();
        fleet.clean();
        assert!(heard.len() > 1 << 20, "{} bytes were heard", heard.len());
        #[allow(clippy::cast_precision_loss)]
        let part = heard.iter().filter(|byte| **byte == 0).count() as f64 / heard.len() as f64;
        part
    };
    // Guest memory has many zero bytes, encrypted memory one in 256; headers are in clear, and half zero: 1 % more.
    let (clear, encrypted) = (zeros_of(false), zeros_of(true));
    eprintln!("zero bytes among what was heard: {clear:.3} without TLS, {encrypted:.4} with it");
    assert!(clear > 0.05, "{clear}: the test would not notice memory in clear");
    assert!(encrypted < 0.02, "{encrypted}");
}

#[test]
fn hosts_that_cannot_take_part_are_told_of_and_the_others_go_on() {
    need!(ready());
    let fork = |number| match number {
        3 => "max-children = 0\n".to_owned(),
        _ => "max-children = 10000000\n".to_owned(),
    };
    let mut fleet = fleet(4, fork);
    fleet.nodes[3].crash();
    let refused = |arguments: &[&str], code: i32, words: &[&str]| {
        let end = create(&fleet, arguments);
        assert_eq!(end.code, code, "{arguments:?}: {} {}", end.answer, end.said);
        for word in words {
            assert!(end.said.contains(word), "{arguments:?}: {word}: {}", end.said);
        }
        assert_eq!(fleet.nodes[0].vms().expect("a list"), [NAME], "{arguments:?}");
        assert_eq!(fleet.nodes[1].vms().expect("a list"), Vec::<String>::new(), "{arguments:?}");
    };
    refused(&["--count", "1", "--node", "n9"], 2, &["n9", "n1, n2, n3, n4"]);
    refused(&["--count", "2", "--node", "n2", "--node", "n2"], 2, &["twice"]);
    refused(&["--count", "2", "--node", "n2", "--here", "3"], 2, &["found 3"]);
    refused(&["--count", "1", "--node", "n3"], 3, &["n3", "this node allows 0 (max-children in [fork])"]);
    refused(
        &["--count", "1", "--node", "n2", "--way", "multicast"],
        3,
        &["n1 does not allow it", "multicast-group"],
    );
    refused(&["--count", "1", "--node", "n4"], 1, &["n4", "connection refused"]);
    refused(
        &["--count", "1000000", "--node", "n2"],
        3,
        &["n2", "MiB of template + 1000000 x (32 MiB of QEMU + 14 MiB", "available"],
    );
    // One of them can: it does.
    let end = create(&fleet, &["--count", "3", "--node", "n2", "--node", "n3", "--node", "n4", "--verify"]);
    assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
    assert!(end.said.contains("2 of 3 children did not come to be"), "{}", end.said);
    assert_eq!(host(&end.answer, "n2")["running"], 1, "{}", end.answer);
    for (node, word) in [("n3", "allows 0"), ("n4", "refused")] {
        let error = host(&end.answer, node)["error"].as_str().unwrap_or_default().to_owned();
        assert!(error.contains(word), "{node}: {error}");
    }
    fleet.sound(&end.answer);
    fleet.clean();
}

#[test]
fn a_host_with_another_qemu_refuses() {
    need!(ready());
    need!(Qemu::V7_2.path());
    let setup = Setup { odd_qemu: true, ..Setup::default() };
    let fleet = fleet_with(3, &setup, plain);
    let end = create(&fleet, &["--count", "2", "--node", "n2", "--node", "n3", "--verify"]);
    assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
    let error = host(&end.answer, "n2")["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("made by QEMU 10.0") && error.contains("is 7.2"), "{error}");
    assert_eq!(host(&end.answer, "n3")["running"], 1, "{}", end.answer);
    fleet.sound(&end.answer);
    fleet.clean();
}

#[test]
fn all_children_of_a_host_come_to_be_or_none() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a folder");
    let hook = sandbox.path().join("hook");
    std::fs::write(&hook, "#!/bin/sh\n[ $VMOVE_CHILD_INDEX != 3 ] || { echo no disk >&2; exit 7; }\n")
        .expect("a hook");
    std::fs::set_permissions(&hook, std::fs::Permissions::from_mode(0o755)).expect("a hook");
    let fleet = fleet(3, |_| format!("child-start = {:?}\n", hook.display().to_string()));
    for early in [&["--whole"][..], &[]] {
        let to = ["--count", "4", "--node", "n3", "--node", "n2"];
        // n3 gets the numbers 1 and 2 and n2 the next; those that failed are given again, in the second round to n3.
        let end = create(&fleet, &[&to[..], early].concat());
        assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
        let failed = |name: &&str| !host(&end.answer, name)["error"].is_null();
        let nodes = ["n2", "n3"];
        let failed: Vec<_> = nodes.iter().copied().filter(failed).collect();
        let [failed] = failed[..] else { panic!("{}", end.answer) };
        let error = host(&end.answer, failed)["error"].as_str().expect("a reason");
        assert!(error.contains("none is there") && error.contains("no disk"), "{error}");
        let node = fleet.node(failed);
        assert_eq!((qemus(node), node.vms().expect("a list")), (0, Vec::new()), "{failed}");
        fleet.sound(&end.answer);
        fleet.clean();
        // From the parent's node they are waited for and ended.
        let a = &fleet.nodes[0];
        let early = vfork(a, &["join", NAME, "--timeout", "1s"]).expect("an answer");
        assert!(early.code == 1 && early.said.contains("2 children"), "{} {}", early.code, early.said);
        for name in names(&end.answer) {
            assert_eq!(done(a, &["kill", &name]).expect("it ends")["name"], name.as_str());
            let again = vfork(a, &["kill", &name]).expect("an answer");
            assert!(again.code != 0 && again.said.contains("has no child"), "{} {}", again.code, again.said);
        }
        assert!(fleet.nodes[1..].iter().all(|node| qemus(node) == 0));
        done(a, &["join", NAME, "--timeout", "30s"]).expect("all have ended");
    }
}

#[test]
fn children_that_migrations_took_elsewhere_are_followed() {
    need!(ready());
    let fleet = fleet(3, plain);
    let (a, b, c) = (&fleet.nodes[0], &fleet.nodes[1], &fleet.nodes[2]);
    done(a, &["create", NAME, "--count", "2", "--here", "1", "--node", "n2"]).expect("children");
    let (here, there) = ("guest.1", "guest.2");
    let move_to = |node: &Node, child: &str, to: &str| {
        let moved = node.vmove(&["migrate", child, "--to", to]).expect("an answer");
        assert!(moved.status.success(), "{child} to {to}: {}", String::from_utf8_lossy(&moved.stderr));
    };
    // One from here over n2 to n3, one from n2 to n3.
    move_to(a, here, "n2");
    move_to(b, here, "n3");
    move_to(b, there, "n3");
    assert_eq!(c.vms().expect("a list"), [here, there]);
    let tree = done(a, &["tree", NAME]).expect("a tree");
    for child in tree["children"].as_array().expect("children") {
        assert!(child["status"] == "elsewhere" && child["node"] == "n2", "{tree}");
    }
    let early = vfork(a, &["join", NAME, "--timeout", "1s"]).expect("an answer");
    assert!(early.code == 1 && early.said.contains("2 children"), "{} {}", early.code, early.said);
    for child in [here, there] {
        fleet.parent.sound(c, child).expect("it is sound");
        done(a, &["kill", child]).expect("it ends");
        let again = vfork(a, &["kill", child]).expect("an answer");
        assert!(again.code != 0, "{} {}", again.code, again.said);
    }
    assert_eq!((qemus(b), qemus(c)), (0, 0));
    done(a, &["join", NAME, "--timeout", "30s"]).expect("all have ended");
}

/// A fork to n2 and n3 that takes seconds, once both fetch.
fn slow_fork(fleet: &Fleet) -> std::process::Child {
    // Twice some 90 MiB: half a minute.
    fleet.networks.limit(1, 50).expect("tc limits");
    let control = fleet.nodes[0].control();
    let mut command = std::process::Command::new(places::product("vfork").expect("it is built"));
    command
        .arg("--control")
        .arg(control)
        .args(["--json", "create", NAME, "--count", "2", "--way", "unicast", "--whole"]);
    command.args(["--node", "n2", "--node", "n3"]);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().expect("vfork starts");
    let arrives = |node: &Node| {
        let some = |file: &std::path::PathBuf| std::fs::metadata(file).is_ok_and(|m| m.blocks() > 2048);
        template_files(node).iter().any(some)
    };
    until("the template is on its way to both", || {
        if child.try_wait().expect("vfork can be asked").is_some() {
            let logs: Vec<String> = fleet.nodes.iter().map(Node::log).collect();
            panic!("vfork has ended already: {logs:#?}");
        }
        fleet.nodes[1..3].iter().all(arrives)
    });
    child
}

#[test]
fn without_the_parents_daemon_hosts_stop_and_say_why() {
    need!(ready());
    let mut fleet = fleet(3, plain);
    let mut asked = slow_fork(&fleet);
    fleet.nodes[0].crash();
    asked.wait().expect("vfork ends");
    for node in &fleet.nodes[1..] {
        until("the host gives up", || node.log().contains("no children of a fork from another node"));
        let log = node.log();
        let line =
            log.lines().find(|line| line.contains("no children of a fork")).expect("a line").to_owned();
        assert!(line.contains("missing") || line.contains("the parent's node is gone"), "{line}");
        eprintln!("{line}");
        until("its QEMU is gone", || qemus(node) == 0);
        assert_eq!(node.vms().expect("a list"), Vec::<String>::new());
    }
    fleet.nodes[0].run().expect("the daemon starts again");
    fleet.parent.sound(&fleet.nodes[0], NAME).expect("the parent runs on");
    fleet.clean();
    // And can be forked again.
    fleet.networks.limit(1, 10_000).expect("tc limits");
    let answer =
        done(&fleet.nodes[0], &["create", NAME, "--count", "2", "--node", "n2", "--node", "n3", "--verify"]);
    fleet.sound(&answer.expect("children"));
}

#[test]
fn a_host_that_is_killed_on_the_way_holds_up_nobody() {
    need!(ready());
    let mut fleet = fleet(3, plain);
    let asked = slow_fork(&fleet);
    fleet.nodes[1].crash();
    let output = asked.wait_with_output().expect("vfork ends");
    let answer: Value = serde_json::from_slice(&output.stdout).expect("an answer");
    assert_eq!(output.status.code(), Some(1), "{answer}");
    let error = host(&answer, "n2")["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("connection to it is lost"), "{error}");
    assert_eq!(host(&answer, "n3")["running"], 1, "{answer}");
    fleet.sound(&answer);
    // Its next life removes what it had begun.
    assert!(qemus(&fleet.nodes[1]) > 0, "a QEMU was prepared there");
    assert!(!template_files(&fleet.nodes[1]).is_empty(), "half a template is there");
    fleet.nodes[1].run().expect("the daemon starts again");
    until("its QEMU is gone", || qemus(&fleet.nodes[1]) == 0);
    assert_eq!(fleet.nodes[1].vms().expect("a list"), Vec::<String>::new());
    fleet.clean();
}
