//! Children of a fork run on other hosts before all of their memory is there: they check it while it comes.
#![cfg(test)]

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vmove_guest::config::Config;
use vmove_skip::need;
use vmove_tests::daemon::Node;
use vmove_tests::fleet::{Fleet, Setup, fleet, fleet_with, host, host_in, light, plain, qemus, ready, until};
use vmove_tests::forks::{done, vfork};
use vmove_tests::places;
use vmove_tests::scene::NAME;

const GROUP: &str = "multicast-group = \"239.78.0.1:7421\"\n";

/// Begins a fork to other nodes over a link of so many megabits per second.
fn begin(fleet: &Fleet, mbit: u32, arguments: &str) -> Child {
    fleet.networks.limit(1, mbit).expect("tc limits");
    let mut command = Command::new(places::product("vfork").expect("it is built"));
    command.arg("--control").arg(fleet.nodes[0].control()).args(["--json", "create", NAME]);
    command.args(arguments.split(' ')).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("vfork starts")
}

fn answer_of(asked: Child) -> (Option<i32>, Value) {
    let output = asked.wait_with_output().expect("vfork ends");
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap_or(Value::Null))
}

/// What a node says of the children of the guest.
fn children(node: &Node) -> Vec<Value> {
    let tree = vfork(node, &["tree", NAME]).expect("an answer").answer;
    tree["children"].as_array().cloned().unwrap_or_default()
}

fn have(node: &Node, count: usize, status: &str) -> bool {
    children(node).iter().filter(|child| child["status"] == status).count() == count
}

/// Guests that run here while their memory is on its way.
fn run_while_fetching(fleet: &Fleet, node: &Node, count: usize) -> bool {
    let fetching: Vec<Value> =
        children(node).into_iter().filter(|child| child["status"] == "fetching").collect();
    let runs = |child: &Value| {
        let vm = node.vm(child["name"].as_str().expect("a name"));
        vm.is_ok_and(|vm| vm.status == "running" && fleet.parent.beacon(node, &vm.name).is_ok())
    };
    fetching.len() == count && fetching.iter().all(runs)
}

/// Begins a fork, and waits until so many children run on n2 and n3 while their memory is on its way.
fn fetching(fleet: &Fleet, mbit: u32, arguments: &str, counts: [usize; 2]) -> Child {
    let asked = begin(fleet, mbit, arguments);
    for (node, count) in fleet.nodes[1..].iter().zip(counts) {
        until("children run", || run_while_fetching(fleet, node, count));
    }
    asked
}

/// What a datagram carries where frames have 1500 bytes: a third of a chunk of 4 KiB, rounded up to 8 bytes.
const PIECE_BYTES: u64 = 1368;

/// A guest with 187 MiB that are not zero, twice those of others.
fn larger() -> Setup {
    let config = Config { working_set_mib: 64, cold_mib: 64, ..light() };
    Setup { config: Some(config), ..Setup::default() }
}

fn ms(value: &Value) -> f64 {
    value.as_f64().expect("milliseconds")
}

/// Every child of an answer ran before its host had all memory; says when.
fn ran_early(answer: &Value) {
    for child in answer["children"].as_array().expect("children") {
        let at = host(answer, child["node"].as_str().expect("a node"));
        let (ran, whole) = (ms(&child["running_ms"]), ms(&at["template_ms"]));
        eprintln!("{}: ran after {ran:.0} ms, whole after {whole:.0} ms; {at}", child["name"]);
        assert!(ran < whole, "{child} {at}");
        assert!(at["faults"]["fetched"].as_u64() > Some(0), "{at}");
    }
}

#[test]
fn children_run_while_their_memory_is_on_its_way() {
    need!(ready());
    let fleet = fleet(3, plain);
    let b = &fleet.nodes[1];
    let asked = begin(&fleet, 300, "--count 3 --node n2 --node n3 --way unicast");
    until("children run on n2", || run_while_fetching(&fleet, b, 2));
    // What needs all memory is refused, and says why.
    let child = children(b)[0]["name"].as_str().expect("a name").to_owned();
    for refused in [&["promote", &child][..], &["create", &child, "--count", "1"]] {
        let end = vfork(b, refused).expect("an answer");
        assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
        assert!(end.said.contains("still on its way from n1"), "{}", end.said);
    }
    let moved = b.vmove(&["migrate", &child, "--to", "n3"]).expect("an answer");
    let said = String::from_utf8_lossy(&moved.stderr).into_owned();
    assert!(!moved.status.success() && said.contains("still on its way from n1"), "{said}");
    let (code, answer) = answer_of(asked);
    assert_eq!(code, Some(0), "{answer}");
    ran_early(&answer);
    // Two children of a host read what both need once.
    let memory = answer["distribution"]["memory_bytes"].as_u64().expect("bytes");
    for node in ["n2", "n3"] {
        let read = host(&answer, node)["from_root_bytes"].as_u64().expect("bytes");
        assert!(read <= memory + memory / 100, "{node} read {read} of {memory}");
        assert!(host(&answer, node)["wanted"].as_u64() > Some(0), "{answer}");
    }
    fleet.sound(&answer);
    fleet.clean();
    fleet.networks.limit(1, 10_000).expect("tc limits");
    done(b, &["promote", &child]).expect("its memory is there");
    fleet.parent.sound(b, &child).expect("it is sound with memory of its own");
    // The same, waiting for all memory: later.
    for node in &fleet.nodes[1..3] {
        for name in node.vms().expect("a list") {
            node.vmove(&["stop", &name, "--force"]).expect("an answer");
        }
    }
    let (_, late) = answer_of(begin(&fleet, 300, "--count 3 --node n2 --node n3 --way unicast --whole"));
    for child in late["children"].as_array().expect("children") {
        let at = host(&late, child["node"].as_str().expect("a node"));
        assert!(ms(&child["running_ms"]) > ms(&at["template_ms"]) && at["faults"].is_null(), "{child} {at}");
    }
    let all = |answer: &Value| ms(&answer["all_running_ms"]);
    eprintln!(
        "all ran after {:.0} ms, whole {:.0} ms; complete after {:.0} and {:.0} ms",
        all(&answer),
        all(&late),
        ms(&answer["complete_ms"]),
        ms(&late["complete_ms"])
    );
    assert!(all(&answer) < all(&late) / 2.0, "{answer} {late}");
}

#[test]
fn what_early_children_touch_crosses_the_parents_link_once_for_all_hosts() {
    need!(ready());
    let setup = larger();
    let fork = |_| format!("{GROUP}multicast-mbit = 320\n");
    let fleet = fleet_with(5, &setup, fork);
    let to = "--count 4 --node n2 --node n3 --node n4 --node n5 --way multicast";
    let before = fleet.networks.sent_bytes(1).expect("statistics");
    let (code, answer) = answer_of(begin(&fleet, 400, to));
    let sent = fleet.networks.sent_bytes(1).expect("statistics") - before;
    assert_eq!(code, Some(0), "{answer}");
    ran_early(&answer);
    let memory = answer["distribution"]["memory_bytes"].as_u64().expect("bytes");
    #[allow(clippy::cast_precision_loss)]
    let copies = sent as f64 / memory as f64;
    eprintln!("{copies:.3} copies of {memory} bytes on the link; {}", answer["multicast"]);
    assert!(copies <= 1.15, "{copies} copies on the parent's link: {answer}");
    // Each READ all that its own children touched before the root sent it to all. What a busy machine sends too late is still READ (a
    // quarter of it, in a test run), and so is what it loses: that says nothing of what children touch.
    let of = |what: &str| -> u64 {
        let hosts = answer["hosts"].as_array().expect("hosts");
        hosts.iter().filter_map(|host| host[what].as_u64()).sum()
    };
    let (read, wanted) = (of("from_root_bytes") - of("repaired") * PIECE_BYTES, of("wanted") * 4096);
    eprintln!("{read} bytes were READ of {wanted} that were wanted");
    assert!(wanted > 0 && read * 2 <= wanted, "{read} bytes were READ of {wanted}: {answer}");
    fleet.sound(&answer);
    fleet.clean();
}

#[test]
fn a_host_that_is_late_gets_everything_and_holds_up_nobody() {
    need!(ready());
    let fleet = fleet(3, |_| format!("{GROUP}multicast-mbit = 80\n"));
    let (b, c) = (&fleet.nodes[1], &fleet.nodes[2]);
    let asked = begin(&fleet, 400, "--count 2 --node n2 --node n3 --way multicast");
    // It has said that it takes part.
    until("n3 starts a QEMU", || qemus(c) > 0);
    let daemon = Pid::from_raw(c.pid().expect("it runs"));
    kill(daemon, Signal::SIGSTOP).expect("it is stopped");
    until("children run on n2", || run_while_fetching(&fleet, b, 1));
    kill(daemon, Signal::SIGCONT).expect("it goes on");
    let (code, answer) = answer_of(asked);
    assert_eq!(code, Some(0), "{answer}");
    let whole = |node| ms(&host(&answer, node)["template_ms"]);
    eprintln!("whole after {:.0} and {:.0} ms; {}", whole("n2"), whole("n3"), answer["hosts"]);
    let memory = answer["distribution"]["memory_bytes"].as_u64().expect("bytes");
    let by_multicast = |node| host(&answer, node)["multicast_bytes"].as_u64().expect("bytes");
    // It came when some had been sent: that it reads, the rest it hears.
    assert!(by_multicast("n3") < by_multicast("n2") && by_multicast("n3") * 5 > memory, "{answer}");
    assert!(host(&answer, "n3")["from_root_bytes"].as_u64() > Some(0), "{answer}");
    fleet.sound(&answer);
    fleet.clean();
}

#[test]
fn whoever_asks_is_told_how_far_each_host_is() {
    need!(ready());
    let fleet = fleet(3, plain);
    fleet.networks.limit(1, 100).expect("tc limits");
    let order = json!({ "vm": NAME, "count": 3, "nodes": ["n2", "n3"], "way": "unicast", "id": "asked-for" });
    let parent = &fleet.nodes[0];
    let (answer, told) = std::thread::scope(|scope| {
        let forking = scope.spawn(|| parent.rest("POST", "/v1/forks", &order).expect("an answer"));
        let mut told: Vec<Value> = Vec::new();
        while !forking.is_finished() {
            let (status, progress) =
                parent.rest("GET", "/v1/forks/asked-for", &Value::Null).expect("an answer");
            if status == 200 {
                told.push(progress);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        (forking.join().expect("it is asked"), told)
    });
    let (status, answer) = answer;
    assert_eq!(status, 200, "{answer}");
    for (node, children) in [("n2", 2), ("n3", 1)] {
        let of_node = |progress: &Value| host_in(progress, node).cloned();
        let told: Vec<Value> = told.iter().filter_map(of_node).collect();
        let number = |at: &Value, field: &str| at[field].as_u64().expect("a number");
        let fetched = |at: &Value| number(at, "from_root_bytes");
        assert!(told.windows(2).all(|pair| fetched(&pair[0]) <= fetched(&pair[1])), "{told:?}");
        let under_way =
            |at: &&Value| number(at, "missing") > 0 && number(at, "missing") < number(at, "chunks");
        assert!(told.iter().filter(under_way).count() > 5, "{told:?}");
        // Its children run before all memory is there, and that is told.
        assert!(told.iter().filter(under_way).any(|at| number(at, "running") == children), "{told:?}");
        assert!(told.iter().all(|at| number(at, "children") == children), "{told:?}");
        let (_, last) = parent.rest("GET", "/v1/forks/asked-for", &Value::Null).expect("an answer");
        let last = host_in(&last, node).expect("the host");
        assert_eq!((&last["phase"], &last["missing"]), (&json!("done"), &json!(0)), "{last}");
        assert_eq!(last["from_root_bytes"], host(&answer, node)["from_root_bytes"], "{last} {answer}");
    }
    // What the guest has written again by then travels first.
    let first = answer["distribution"]["first_bytes"].as_u64().expect("bytes");
    assert!(first > 0 && first < answer["distribution"]["memory_bytes"].as_u64().expect("bytes"), "{answer}");
    fleet.sound(&answer);
    fleet.clean();
}

#[test]
fn losses_and_pipelines_leave_them_sound() {
    need!(ready());
    let config = Config { working_set_mib: 32, ..light() };
    let setup = Setup { config: Some(config), ..Setup::default() };
    let fork = |_| format!("{GROUP}multicast-mbit = 240\n");
    let fleet = fleet_with(3, &setup, fork);
    fleet.networks.lose(2, 0.01).expect("losses");
    fleet.networks.lose(3, 0.10).expect("losses");
    for way in ["multicast", "pipeline"] {
        let asked = begin(&fleet, 400, &format!("--count 3 --node n2 --node n3 --way {way}"));
        let (code, answer) = answer_of(asked);
        assert_eq!(code, Some(0), "{answer}");
        ran_early(&answer);
        if way == "multicast" {
            assert!(host(&answer, "n3")["multicast_bytes"].as_u64() > Some(0), "{answer}");
        }
        fleet.sound(&answer);
        fleet.clean();
    }
}

#[test]
fn without_the_parents_daemon_they_end_and_say_why() {
    need!(ready());
    // A minute of transfer: on a busy machine neither host is whole before children of both run.
    let mut fleet = fleet_with(3, &larger(), plain);
    let asked = fetching(&fleet, 50, "--count 3 --node n2 --node n3 --way unicast", [2, 1]);
    fleet.nodes[0].crash();
    drop(answer_of(asked));
    for (node, count) in [(&fleet.nodes[1], 2), (&fleet.nodes[2], 1)] {
        until("children are ended", || have(node, count, "ended"));
        assert_eq!(qemus(node), 0, "{}", node.name());
        for child in children(node) {
            let why = child["why"].as_str().unwrap_or_default();
            assert!(why.contains("can never be complete") && why.contains("missing here"), "{child}");
        }
        let list = node.vmove(&["list"]).expect("an answer");
        let list = String::from_utf8_lossy(&list.stdout).into_owned();
        assert_eq!(list.matches("can never be complete").count(), count, "{list}");
        eprintln!("{list}");
        until("it is logged", || node.log().contains("children that ran were ended"));
    }
    fleet.nodes[0].run().expect("the daemon starts again");
    fleet.parent.sound(&fleet.nodes[0], NAME).expect("the parent runs on");
    fleet.clean();
}

#[test]
fn a_host_that_has_all_memory_keeps_its_children_without_the_parents_daemon() {
    need!(ready());
    let mut fleet = fleet_with(3, &larger(), plain);
    let asked = fetching(&fleet, 50, "--count 3 --node n2 --node n3 --way unicast", [2, 1]);
    // One host stands still while the other takes the rest.
    let slow = Pid::from_raw(fleet.nodes[2].pid().expect("it runs"));
    kill(slow, Signal::SIGSTOP).expect("it is stopped");
    fleet.networks.limit(1, 1000).expect("tc limits");
    until("n2 has all memory", || have(&fleet.nodes[1], 2, "here"));
    fleet.nodes[0].crash();
    kill(slow, Signal::SIGCONT).expect("it goes on");
    drop(answer_of(asked));
    until("the child of n3 is ended", || have(&fleet.nodes[2], 1, "ended"));
    assert_eq!(qemus(&fleet.nodes[2]), 0);
    let why = children(&fleet.nodes[2])[0]["why"].as_str().unwrap_or_default().to_owned();
    assert!(why.contains("can never be complete"), "{why}");
    for child in children(&fleet.nodes[1]) {
        assert_eq!(child["status"], "here", "{child}");
        let name = child["name"].as_str().expect("a name");
        fleet.parent.sound(&fleet.nodes[1], name).expect("it lives, and its memory is right");
    }
    fleet.nodes[0].run().expect("the daemon starts again");
    fleet.parent.sound(&fleet.nodes[0], NAME).expect("the parent runs on");
    fleet.clean();
}

/// Its frozen memory is the daemon's, not the guest's.
#[test]
fn a_parent_that_is_killed_costs_its_children_nothing() {
    need!(ready());
    let fleet = fleet_with(3, &larger(), plain);
    let asked = fetching(&fleet, 50, "--count 3 --node n2 --node n3 --way unicast", [2, 1]);
    let parent = fleet.nodes[0].vm(NAME).expect("it is there").pid;
    kill(Pid::from_raw(parent), Signal::SIGKILL).expect("it is killed");
    fleet.networks.limit(1, 1000).expect("tc limits");
    let (code, answer) = answer_of(asked);
    assert_eq!(code, Some(0), "{answer}");
    let family = fleet.family(&answer);
    let (children, parent) = family.split_at(family.len() - 1);
    assert_eq!((children.len(), parent[0].1), (3, NAME));
    fleet.parent.all_sound(children).expect("their memory is right");
    fleet.clean();
}

#[test]
fn a_host_that_is_killed_ends_them_in_its_next_life() {
    need!(ready());
    let mut fleet = fleet_with(3, &larger(), plain);
    let asked = fetching(&fleet, 50, "--count 3 --node n3 --node n2 --way unicast", [1, 2]);
    // A child that is killed leaves its sibling alone.
    let (killed, sibling) = {
        let both = children(&fleet.nodes[2]);
        let name = |number: usize| both[number]["name"].as_str().expect("a name").to_owned();
        (name(0), name(1))
    };
    assert_eq!(vfork(&fleet.nodes[2], &["kill", &killed]).expect("an answer").code, 0);
    fleet.nodes[1].crash();
    assert_eq!(qemus(&fleet.nodes[1]), 1, "it waits for pages that nobody brings");
    fleet.networks.limit(1, 1000).expect("tc limits");
    let (code, answer) = answer_of(asked);
    assert_eq!(code, Some(1), "{answer}");
    let error = host(&answer, "n2")["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("connection to it is lost"), "{error}");
    assert_eq!(host(&answer, "n3")["running"], 2, "{answer}");
    fleet.parent.sound(&fleet.nodes[2], &sibling).expect("the sibling is sound");
    fleet.parent.sound(&fleet.nodes[0], NAME).expect("the parent is sound");
    fleet.nodes[1].run().expect("the daemon starts again");
    // It never says that all of the memory is here.
    until("the child of n2 is ended", || {
        assert!(!have(&fleet.nodes[1], 1, "here"));
        have(&fleet.nodes[1], 1, "ended")
    });
    assert_eq!(qemus(&fleet.nodes[1]), 0);
    let ended = children(&fleet.nodes[1]);
    let why = ended[0]["why"].as_str().unwrap_or_default();
    assert!(why.contains("on its way from n1"), "{ended:?}");
    fleet.clean();
}
