//! Real distributions: each host is a process in a network namespace of its own, on one bridge.
#![allow(missing_docs, clippy::tests_outside_test_module)]

use std::ops::Range;
use std::time::{Duration, Instant};

use serde_json::Value;
use support::networks::{Networks, possible};
use support::{Node, Process};
use vmove_skip::need;
use vmove_spread::plan::{Network, Way};
use vmove_spread::simulate::{Scenario, simulate};
use vmove_spread::{HostId, Route, Scheme};

mod support;

#[test]
#[ignore = "the process of a root or host in other tests"]
fn node() {
    support::node();
}

fn count(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} in {value}"))
}

/// What a host says that has everything.
fn complete(process: &Process) -> Value {
    let value = process.says("complete");
    assert_eq!((&value["all_right"], count(&value, "wrong")), (&Value::Bool(true), 0), "{value}");
    value
}

fn start(networks: &Networks, root: &Node, hosts: u32) -> (Process, Vec<Process>) {
    let root = &Node { expected: hosts as usize, ..root.clone() };
    let process = Process::start(networks, root);
    process.says("ready");
    let hosts: Vec<Process> = (1..=hosts).map(|host| Process::start(networks, &root.host(host))).collect();
    hosts.iter().for_each(|host| drop(host.says("joined")));
    (process, hosts)
}

#[test]
fn by_multicast_each_byte_crosses_the_roots_link_about_once() {
    need!(possible());
    let networks = Networks::new(4).expect("namespaces");
    let node = Node::root(64, 40e6);
    let before = networks.sent_bytes(1);
    let (mut root, hosts) = start(&networks, &node, 4);
    let ends: Vec<Value> = hosts.iter().map(complete).collect();
    let sent = networks.sent_bytes(1) - before;
    let totals = root.end();
    #[allow(clippy::cast_precision_loss)]
    let ratio = sent as f64 / node.live_bytes() as f64;
    eprintln!("{sent} bytes for {} to 4 hosts: {ratio:.3}; {totals}", node.live_bytes());
    assert!(ratio <= 1.15, "{ratio}");
    for end in &ends {
        let (by_multicast, repaired) = (count(end, "by_multicast"), count(end, "repaired"));
        eprintln!("{end}");
        assert!(repaired * 100 <= by_multicast, "{repaired} of {by_multicast} pieces were repaired");
    }
    assert!(count(&totals, "resent") * 100 <= count(&totals, "sent"), "{totals}");
}

fn with_losses(part: f64, udp: bool) {
    need!(possible());
    let networks = Networks::new(4).expect("namespaces");
    for host in 2..=5 {
        networks.lose(host, part, udp).expect("losses");
    }
    let node = Node::root(32, 40e6);
    let (mut root, hosts) = start(&networks, &node, 4);
    for host in &hosts {
        let end = complete(host);
        eprintln!("{end}");
        assert!(count(&end, "repaired") > 0, "nothing was lost: {end}");
        assert_eq!(count(&end, "wrong_sums"), 0);
    }
    let totals = root.end();
    eprintln!("{totals}");
    assert!(count(&totals, "resent") > 0, "{totals}");
}

#[test]
fn one_percent_of_losses_is_repaired() {
    with_losses(0.01, false);
}

#[test]
fn ten_percent_of_losses_are_repaired() {
    with_losses(0.10, true);
}

#[test]
fn who_comes_late_gets_everything() {
    need!(possible());
    let networks = Networks::new(3).expect("namespaces");
    let node = Node::root(48, 12e6); // 3 seconds
    let (mut root, hosts) = start(&networks, &node, 1);
    std::thread::sleep(Duration::from_millis(1200));
    let late = [2, 3].map(|host| Process::start(&networks, &node.host(host)));
    late.iter().for_each(|host| drop(host.says("joined")));
    let first = complete(&hosts[0]);
    for host in &late {
        let end = complete(host);
        eprintln!("{end}");
        assert!(
            count(&end, "by_multicast") > 0
                && count(&end, "by_multicast") < count(&first, "by_multicast") * 2
        );
    }
    let totals = root.end();
    assert!(count(&totals, "resent") > 0, "two that came late miss the same: {totals}");
}

#[test]
fn a_killed_host_and_a_slow_one_hold_up_nobody() {
    need!(possible());
    let networks = Networks::new(4).expect("namespaces");
    let node = Node::root(48, 30e6); // 1.2 seconds
    let (mut root, mut hosts) = start(&networks, &node, 4);
    let begin = Instant::now();
    std::thread::sleep(Duration::from_millis(300));
    hosts[3].kill();
    hosts[2].signal(libc::SIGSTOP);
    for host in &hosts[..2] {
        eprintln!("{}", complete(host));
    }
    let others = begin.elapsed();
    assert!(others < Duration::from_secs(20), "the others took {others:?}");
    // The slow one misses what was sent meanwhile, and reads it.
    hosts[2].signal(libc::SIGCONT);
    eprintln!("slow: {}", complete(&hosts[2]));
    let totals = root.end();
    eprintln!("{totals}");
    assert_eq!((count(&totals, "complete"), count(&totals, "gone")), (3, 1));
    assert!(count(&totals, "slow") > 0, "{totals}");
}

#[test]
fn the_roots_death_is_told_with_what_is_missing() {
    need!(possible());
    let networks = Networks::new(2).expect("namespaces");
    for multicast in [true, false] {
        let mut node = Node { multicast, ..Node::root(64, 12e6) };
        if !multicast {
            networks.limit(1, 200).expect("a limit");
            node.mib = 96;
        }
        let (mut root, hosts) = start(&networks, &node, 2);
        std::thread::sleep(Duration::from_millis(1000));
        root.kill();
        for host in &hosts {
            let end = host.says("failed");
            eprintln!("{end}");
            let error = end["error"].as_str().unwrap();
            assert!(error.contains("The connection to the root ended"), "{error}");
            let missing = count(&end, "missing");
            assert!(missing > 0 && error.contains(&missing.to_string()), "{error}");
            // What was said to be there is.
            assert!(count(&end, "landed") > 0 && count(&end, "wrong") == 0, "{end}");
        }
    }
}

#[test]
fn memory_that_was_written_to_is_not_passed_off_as_the_template() {
    need!(possible());
    let networks = Networks::new(1).expect("namespaces");
    for multicast in [true, false] {
        let node = Node { spoilt: true, multicast, ..Node::root(4, 40e6) };
        let (_root, hosts) = start(&networks, &node, 1);
        let end = hosts[0].says("failed");
        eprintln!("{end}");
        assert!(end["error"].as_str().unwrap().contains("wrong checksums"), "{end}");
        // It may give up before the rest has come.
        assert!(count(&end, "wrong") == 0 && count(&end, "missing") > 0, "{end}");
    }
}

#[test]
fn what_somebody_waits_for_overtakes() {
    need!(possible());
    let networks = Networks::new(2).expect("namespaces");
    let node = Node::root(64, 15e6); // 3.3 seconds
    let process = Process::start(&networks, &node);
    process.says("ready");
    let last = (64 << 20) - 2 * 4096;
    let wants = Process::start(&networks, &Node { want: Some(last), ..node.host(1) });
    wants.says("joined");
    let wanted = wants.says("wanted");
    eprintln!("{wanted}");
    assert!(count(&wanted, "missing") > 64 * 256 / 4, "it came in its turn: {wanted}");
    complete(&wants);
}

/// All hosts in one group whose origin is the root.
fn one_group(hosts: u32, scheme: Scheme) -> Vec<Route> {
    let members: std::sync::Arc<[HostId]> = (0..=hosts).map(HostId).collect();
    (1..=hosts).map(|me| Route { scheme, members: members.clone(), me }).collect()
}

fn without_multicast(routes: Vec<Route>, copies: f64, kill: Option<usize>) {
    let hosts = u32::try_from(routes.len()).unwrap();
    need!(possible());
    let networks = Networks::new(hosts).expect("namespaces");
    let node = Node { multicast: false, routes, ..Node::root(64, 1e9) };
    for host in 1..=hosts + 1 {
        networks.limit(host, 400).expect("a limit");
    }
    let before = networks.sent_bytes(1);
    let (mut root, mut hosts) = start(&networks, &node, hosts);
    if let Some(kill) = kill {
        std::thread::sleep(Duration::from_millis(500));
        hosts.remove(kill).kill();
    }
    for host in &hosts {
        eprintln!("{}", complete(host));
    }
    let sent = networks.sent_bytes(1) - before;
    #[allow(clippy::cast_precision_loss)]
    let found = sent as f64 / node.live_bytes() as f64;
    let totals = root.end();
    eprintln!("{found:.3} copies on the root's link; {totals}");
    assert!(found <= copies, "{found} copies on the root's link");
}

#[test]
fn by_unicast_the_root_sends_a_copy_to_each() {
    without_multicast(one_group(3, Scheme::Unicast), 3.3, None);
}

#[test]
fn in_a_pipeline_the_root_sends_one_copy() {
    without_multicast(one_group(7, Scheme::Pipeline), 1.15, None);
    without_multicast(one_group(5, Scheme::Pipeline), 1.15, None);
}

#[test]
fn a_pipeline_goes_on_without_a_host_that_was_killed() {
    without_multicast(one_group(5, Scheme::Pipeline), 4.0, Some(0));
}

#[test]
fn in_two_stages_the_root_sends_one_copy_to_each_leaf() {
    let route = |members: &[u32], me, scheme| Route {
        scheme,
        members: members.iter().copied().map(HostId).collect(),
        me,
    };
    // Leaves of 1, 2, 3 and 4, 5, 6; the first of each reads from the root.
    let leader = |me| route(&[0, 1, 4], me, Scheme::Unicast);
    let member = |first, me| route(&[first, first + 1, first + 2], me, Scheme::Pipeline);
    let routes = vec![leader(1), member(1, 1), member(1, 2), leader(2), member(4, 1), member(4, 2)];
    without_multicast(routes, 2.3, None);
}

/// What is compared of the model and a real run.
const COMPARED: [&str; 3] = [
    "s until the last host has the first quarter, without which no child would run",
    "s until it has everything",
    "copies on the root's link",
];

/// How far real runs may be below and above the model, as a part of it.
const fn apart(way: Way) -> [Range<f64>; 3] {
    let first_quarter = match way {
        // The model shares a link out evenly. TCP does not: the last host may have its first quarter when others have everything.
        Way::Unicast => -0.35..2.2,
        // Real pipelines fill sooner than the model's, the more so the less memory there is.
        Way::Pipeline => -0.6..0.35,
        Way::Multicast | Way::TwoStage => -0.35..0.35,
    };
    [first_quarter, -0.25..0.25, -0.1..0.1]
}

/// Of each network and way. The median is compared: one of them may meet a machine that is busy with other things.
const RUNS: usize = 3;

/// How often the runs of a network are made. A machine may be busy for longer than three runs; what is wrong with the model is wrong each
/// time.
const ATTEMPTS: usize = 2;

type Figures = [f64; 3];

/// Links of 20 MB/s. For two stages the first half of the hosts is on the root's leaf, the other on a second one.
fn network(hosts: u32, way: Way, loss: f64) -> Network {
    let flat = Network::flat(hosts, 20e6);
    if way != Way::TwoStage {
        return Network { loss, ..flat };
    }
    let leaves = vec![flat.leaves[0]; 2];
    let leaf = |host: u32| usize::from(host > hosts / 2);
    Network { leaves, hosts: (0..=hosts).map(leaf).collect(), loss, ..flat }
}

/// Memory of 16 MiB, datagrams at 15 MB/s.
fn node_by(network: &Network, way: Way) -> Node {
    let routes = network.routes(way).into_values().collect();
    Node { multicast: way == Way::Multicast, routes, ..Node::root(16, 15e6) }
}

fn modelled(network: Network, way: Way) -> Figures {
    let bytes = node_by(&network, way).live_bytes();
    let scenario = Scenario { rate: Some(15e6), state: bytes / 4, ..Scenario::new(network, bytes) };
    let model = simulate(&scenario, way).expect("a model");
    #[allow(clippy::cast_precision_loss)]
    let bytes = bytes as f64;
    [model.first_instruction.1, model.complete.1, model.root_bytes / bytes]
}

fn real(hosts: u32, network: &Network, way: Way) -> Figures {
    let networks = Networks::new(hosts).expect("namespaces");
    for host in 1..=hosts + 1 {
        networks.limit(host, 160).expect("a limit");
    }
    for host in (2..=hosts + 1).filter(|_| network.loss > 0.0) {
        networks.lose(host, network.loss, true).expect("losses");
    }
    let node = node_by(network, way);
    let before = networks.sent_bytes(1);
    let (_root, processes) = start(&networks, &node, hosts);
    let ends: Vec<Value> = processes.iter().map(complete).collect();
    #[allow(clippy::cast_precision_loss)]
    let (sent, bytes) = ((networks.sent_bytes(1) - before) as f64, node.live_bytes() as f64);
    let last = |field: &str| {
        let seconds = ends.iter().map(|end| end[field].as_f64().expect("a number") / 1e3);
        seconds.fold(0.0, f64::max)
    };
    [last("first_quarter_ms"), last("ms"), sent / bytes]
}

/// Of each figure that of the middle run.
fn median(mut runs: [Figures; RUNS]) -> Figures {
    std::array::from_fn(|index| {
        runs.sort_by(|a, b| a[index].total_cmp(&b[index]));
        runs[RUNS / 2][index]
    })
}

fn the_model_agrees(way: Way, hosts: &[u32], loss: f64) {
    need!(possible());
    let mut wrong = Vec::new();
    for &hosts in hosts {
        let mut found = Vec::new();
        for _ in 0..ATTEMPTS {
            found = differences(way, hosts, loss);
            if found.is_empty() {
                break;
            }
        }
        wrong.extend(found);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Where the median of some real runs is too far from the model.
fn differences(way: Way, hosts: u32, loss: f64) -> Vec<String> {
    let network = network(hosts, way, loss);
    let runs = [(); RUNS].map(|()| real(hosts, &network, way));
    let modelled = modelled(network, way);
    let mut wrong = Vec::new();
    for (index, (what, apart)) in COMPARED.iter().zip(apart(way)).enumerate() {
        let (modelled, found) = (modelled[index], median(runs)[index]);
        let ratio = found / modelled - 1.0;
        let line = format!(
            "{way} to {hosts} hosts, {:.0} % lost: {what}: model {modelled:.2}, real {found:.2} ({:+.0} %), the runs {:.2?}",
            loss * 100.0,
            ratio * 100.0,
            runs.map(|run| run[index])
        );
        eprintln!("{line}");
        if !apart.contains(&ratio) {
            wrong.push(line);
        }
    }
    wrong
}

#[test]
fn the_model_agrees_with_real_runs_by_unicast() {
    the_model_agrees(Way::Unicast, &[2, 4, 8], 0.0);
}

#[test]
fn the_model_agrees_with_real_runs_by_multicast() {
    the_model_agrees(Way::Multicast, &[2, 4, 8], 0.0);
}

#[test]
fn the_model_agrees_with_real_runs_by_multicast_with_losses() {
    the_model_agrees(Way::Multicast, &[4], 0.01);
}

#[test]
fn the_model_agrees_with_real_runs_in_a_pipeline() {
    the_model_agrees(Way::Pipeline, &[2, 4, 8], 0.0);
}

#[test]
fn the_model_agrees_with_real_runs_in_two_stages() {
    the_model_agrees(Way::TwoStage, &[2, 4, 8], 0.0);
}
