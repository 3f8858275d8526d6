//! Children that are prepared on other hosts: they are used first, and end with the guest or its daemon.
#![cfg(test)]

use std::collections::BTreeSet;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::daemon::Node;
use vmove_tests::fleet::{Fleet, fleet, light, plain, qemu_pids, qemus, ready, until};
use vmove_tests::forks::{Parent, done, vfork};
use vmove_tests::guest::Guest;
use vmove_tests::scene::{NAME, memory_mib};

fn warm(node: &Node, count: &str, hosts: &[&str]) -> Value {
    let nodes: Vec<&str> = hosts.iter().flat_map(|host| ["--node", host]).collect();
    done(node, &[&["warm", NAME, "--count", count], &nodes[..]].concat()).expect("they are prepared")
}

fn prepared(node: &Node) -> Value {
    done(node, &["tree", NAME]).expect("a tree")["prepared"].clone()
}

/// For each child on a host: its number, whether it was prepared, and the process id of its QEMU.
fn children(answer: &Value, node: &str) -> Vec<(u64, bool, i32)> {
    let all = answer["children"].as_array().expect("children").iter();
    all.filter(|child| child["node"] == node)
        .map(|child| {
            assert!(child["error"].is_null(), "{child}");
            let pid = child["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("a process");
            (child["index"].as_u64().expect("a number"), child["warm"] == true, pid)
        })
        .collect()
}

fn no_qemu(node: &Node) {
    until("no QEMU is left", || qemus(node) == 0);
    assert_eq!(node.vms().expect("a list"), Vec::<String>::new(), "{}", node.name());
}

#[test]
fn prepared_children_on_other_hosts_are_used_first_and_what_remains_is_left() {
    need!(ready());
    let fleet = fleet(3, plain);
    let (a, b, c) = (&fleet.nodes[0], fleet.node("n2"), fleet.node("n3"));
    let answer = warm(a, "3", &["n2", "n3"]);
    assert_eq!(answer["nodes"], json!([{"node": "n2", "prepared": 3}, {"node": "n3", "prepared": 3}]));
    let waiting = qemu_pids(b);
    assert_eq!((waiting.len(), qemus(c)), (3, 3));
    assert_eq!(b.vms().expect("a list"), Vec::<String>::new(), "they are no VMs yet");
    warm(a, "2", &[]);
    assert_eq!(
        prepared(a),
        json!([{"node": "n1", "prepared": 2}, {"node": "n2", "prepared": 3}, {"node": "n3", "prepared": 3}])
    );

    let to = ["create", NAME, "--count", "7", "--here", "1", "--node", "n3", "--node", "n2", "--verify"];
    let answer = done(a, &to).expect("children");
    fleet.sound(&answer);
    let (at_b, at_c) = (children(&answer, "n2"), children(&answer, "n3"));
    assert!(at_b.iter().all(|(_, warm, pid)| *warm && waiting.contains(pid)), "{waiting:?}: {answer}");
    assert_eq!((at_b.len(), at_c.len()), (3, 3), "{answer}");
    assert!(at_c.iter().all(|(_, warm, _)| *warm), "{answer}");
    let here = children(&answer, "n1");
    assert!(matches!(here[..], [(_, true, _)]), "{answer}");
    let numbers: BTreeSet<u64> = [at_b, at_c, here].concat().iter().map(|(number, ..)| *number).collect();
    assert_eq!(numbers.len(), 7, "no number is given twice: {answer}");
    assert_eq!(prepared(a), json!([{"node": "n1", "prepared": 1}]));

    // Some remain. The next fork uses them, and one child that was not prepared.
    warm(a, "2", &["n2"]);
    let answer = done(a, &["create", NAME, "--count", "1", "--node", "n2"]).expect("a child");
    assert!(matches!(children(&answer, "n2")[..], [(_, true, _)]), "{answer}");
    assert_eq!(prepared(a)[1], json!({"node": "n2", "prepared": 1}));
    let answer = done(a, &["create", NAME, "--count", "2", "--node", "n2"]).expect("children");
    let mut warm_ones: Vec<bool> = children(&answer, "n2").iter().map(|(_, warm, _)| *warm).collect();
    warm_ones.sort_unstable();
    assert_eq!(warm_ones, [false, true], "{answer}");
    fleet.sound(&answer);
    assert_eq!(qemus(b), 6);
    fleet.clean();
}

/// Prepared children on another host have the lowest numbers; the guest's node has no children yet.
#[test]
fn no_number_of_a_prepared_child_elsewhere_is_given_again_by_the_fork_that_uses_it() {
    need!(ready());
    let fleet = fleet(2, plain);
    let (a, b) = (&fleet.nodes[0], fleet.node("n2"));
    warm(a, "2", &["n2"]);
    let answer = done(a, &["create", NAME, "--count", "4", "--here", "2", "--node", "n2"]).expect("children");
    let (here, at_b) = (children(&answer, "n1"), children(&answer, "n2"));
    assert_eq!((here.len(), at_b.len()), (2, 2), "{answer}");
    assert!(at_b.iter().all(|(_, warm, _)| *warm), "{answer}");
    let numbers: BTreeSet<u64> = [here, at_b].concat().iter().map(|(number, ..)| *number).collect();
    assert_eq!(numbers, BTreeSet::from([1, 2, 3, 4]), "{answer}");
    fleet.sound(&answer);
    let tree = done(a, &["tree", NAME]).expect("a tree");
    let places = |status: &str| {
        let all = tree["children"].as_array().expect("children").iter();
        all.filter(|child| child["status"] == status).count()
    };
    assert_eq!((places("here"), places("elsewhere")), (2, 2), "{tree}");
    for number in numbers {
        done(a, &["kill", &format!("{NAME}.{number}")]).expect("it ends");
    }
    no_qemu(b);
    assert_eq!(a.vms().expect("a list"), [NAME]);
    fleet.clean();
}

#[test]
fn no_child_elsewhere_gets_the_name_of_a_vm_here() {
    need!(ready());
    let fleet = fleet(2, plain);
    let a = &fleet.nodes[0];
    let (guest, other) = (Guest::new(memory_mib(&light()), light()), format!("{NAME}.2"));
    Parent::start(a, &other, "thp", guest.expect("a guest")).expect("it works");
    let create = || done(a, &["create", NAME, "--count", "1", "--node", "n2"]).expect("a child");
    assert!(matches!(children(&create(), "n2")[..], [(3, false, _)]));
    warm(a, "1", &["n2"]);
    assert!(matches!(children(&create(), "n2")[..], [(4, true, _)]));
    a.ask(&["stop", &other, "--force"]).expect("it ends");
    assert_eq!(a.vms().expect("a list"), [NAME], "it was the one here");
}

#[test]
fn prepared_children_on_other_hosts_end_when_they_are_not_wanted_any_more() {
    need!(ready());
    let fleet = fleet(3, |number| if number == 3 { "max-children = 1\n".to_owned() } else { String::new() });
    let (a, b, c) = (&fleet.nodes[0], fleet.node("n2"), fleet.node("n3"));
    let end = vfork(a, &["warm", NAME, "--count", "2", "--node", "n3"]).expect("an answer");
    assert!(end.code != 0 && end.said.contains("this node allows 1"), "{} {}", end.answer, end.said);
    warm(a, "1", &["n2", "n3"]);
    warm(a, "3", &["n2"]);
    assert_eq!((qemus(b), qemus(c)), (3, 1));
    warm(a, "0", &["n3"]);
    no_qemu(c);
    assert_eq!(prepared(a), json!([{"node": "n2", "prepared": 3}]));
    warm(a, "0", &[]);
    no_qemu(b);
    assert_eq!(prepared(a), Value::Null);
    // They end with the guest.
    warm(a, "2", &["n2"]);
    a.ask(&["stop", NAME, "--force"]).expect("it ends");
    no_qemu(b);
}

#[test]
fn a_host_asked_by_two_at_once_prepares_no_more_than_it_allows() {
    need!(ready());
    let allow = |number: u8| if number == 2 { "max-children = 2\n".to_owned() } else { String::new() };
    let fleet = fleet(2, allow);
    let (a, b) = (&fleet.nodes[0], fleet.node("n2"));
    let guest = Guest::new(memory_mib(&light()), light()).expect("a guest");
    Parent::start(a, "other", "thp", guest).expect("it works");
    let ask = |name, count| vfork(a, &["warm", name, "--count", count, "--node", "n2"]).expect("an answer");
    let ends = std::thread::scope(|scope| {
        let both = [NAME, "other"].map(|name| scope.spawn(move || ask(name, "2")));
        both.map(|asked| asked.join().expect("it does not panic"))
    });
    let said: Vec<&str> = ends.iter().map(|end| end.said.as_str()).collect();
    let refused = ends.iter().position(|end| end.code != 0).unwrap_or_else(|| panic!("4 wait: {said:?}"));
    assert!(said[refused].contains("this node allows 2"), "{said:?}");
    assert_eq!((ends[1 - refused].code, qemus(b)), (0, 2), "{said:?}");

    // A refused request reserves nothing, and children that end free their places.
    let [none, two] = if refused == 0 { [NAME, "other"] } else { ["other", NAME] };
    assert_eq!(ask(two, "0").code, 0);
    no_qemu(b);
    assert_eq!((ask(none, "2").code, qemus(b)), (0, 2));
}

/// The host is stopped for a while meanwhile.
#[test]
fn a_guest_that_ends_while_children_are_prepared_elsewhere_leaves_none() {
    need!(ready());
    let fleet = fleet(2, plain);
    let (a, b) = (&fleet.nodes[0], fleet.node("n2"));
    let send = |signal| kill(Pid::from_raw(b.pid().expect("it runs")), signal).expect("it is there");
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| vfork(a, &["warm", NAME, "--count", "8", "--node", "n2"]));
        until("a QEMU starts", || qemus(b) > 0);
        send(Signal::SIGSTOP);
        assert!(!asked.is_finished(), "they were prepared before the guest could end");
        let ended = a.ask(&["stop", NAME, "--force"]);
        send(Signal::SIGCONT);
        ended.expect("it ends");
        asked.join().expect("it does not panic").expect("an answer");
    });
    no_qemu(b);
    assert_eq!(a.vms().expect("a list"), Vec::<String>::new());
}

#[test]
fn killed_daemons_leave_no_prepared_qemu_behind() {
    need!(ready());
    let mut fleet = fleet(2, plain);
    let killed = |node: &mut Node| {
        kill(Pid::from_raw(node.pid().expect("it runs")), Signal::SIGKILL).expect("killed");
        node.crash();
    };
    // The host's daemon is killed: the restarted one ends them, and the parent's daemon knows that they are gone.
    warm(&fleet.nodes[0], "2", &["n2"]);
    killed(&mut fleet.nodes[1]);
    until("the parent's daemon notices", || prepared(&fleet.nodes[0]).is_null());
    fleet.nodes[1].run().expect("the next life");
    no_qemu(&fleet.nodes[1]);
    let answer = done(&fleet.nodes[0], &["create", NAME, "--count", "1", "--node", "n2"]).expect("a child");
    assert!(matches!(children(&answer, "n2")[..], [(_, false, _)]), "{answer}");
    fleet.sound(&answer);

    // The parent's daemon is killed.
    warm(&fleet.nodes[0], "2", &["n2"]);
    assert_eq!(qemus(&fleet.nodes[1]), 3);
    killed(&mut fleet.nodes[0]);
    until("they have ended", || qemus(&fleet.nodes[1]) == 1);
    fleet.nodes[0].run().expect("the next life");
    assert_eq!(prepared(&fleet.nodes[0]), Value::Null);
    warm(&fleet.nodes[0], "1", &["n2"]);
    let answer = done(&fleet.nodes[0], &["create", NAME, "--count", "1", "--node", "n2"]).expect("a child");
    assert!(matches!(children(&answer, "n2")[..], [(_, true, _)]), "{answer}");
    fleet.sound(&answer);
}

/// Milliseconds until the last child of a fork runs. Checks that all were prepared if `warm`, and none otherwise.
fn running_ms(fleet: &Fleet, count: &str, warm: bool) -> f64 {
    let begun = Instant::now();
    let answer =
        done(&fleet.nodes[0], &["create", NAME, "--count", count, "--node", "n2"]).expect("children");
    let times = answer["children"].as_array().expect("children").iter();
    let ms = times.map(|child| child["running_ms"].as_f64().expect("a time")).fold(0.0, f64::max);
    eprintln!("{ms:.0} ms, all of it {} ms", begun.elapsed().as_millis());
    for (number, was_warm, _) in children(&answer, "n2") {
        assert_eq!(was_warm, warm, "{answer}");
        done(&fleet.nodes[0], &["kill", &format!("{NAME}.{number}")]).expect("it ends");
    }
    ms
}

/// Measures the figures of docs/fork.md. On a busy machine the times mean nothing.
#[test]
fn a_fork_to_another_host_needs_to_start_no_qemu_that_was_prepared() {
    need!(ready());
    let fleet = fleet(2, plain);
    let mut all = [Vec::new(), Vec::new()];
    for _ in 0..3 {
        all[0].push(running_ms(&fleet, "8", false));
        warm(&fleet.nodes[0], "8", &["n2"]);
        all[1].push(running_ms(&fleet, "8", true));
    }
    all.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    eprintln!("8 children on another host run after {:.0?} ms, prepared after {:.0?} ms", all[0], all[1]);
}
