//! `vmove place --run` with real daemons in network namespaces and real guests: either all VMs of a cluster run, or none; and whoever runs
//! them keeps their lease.
#![cfg(test)]

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmove_grant::SecretKey;
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::bridge::{Bridge, ready_for_guests, until};
use vmove_tests::daemon::Node;
use vmove_tests::fleet;
use vmove_tests::guest::{Guest, failures};
use vmove_tests::networks::{self, Networks};
use vmove_tests::sandbox::Sandbox;

const NODES: u8 = 3;

/// Exit code, answer and messages.
fn vmove(bridge: &Bridge, arguments: &[&str]) -> (Option<i32>, Value, String) {
    let output = bridge.command(arguments).expect("vmove").output().expect("it runs");
    let answer = serde_json::from_slice(&output.stdout).unwrap_or_default();
    (output.status.code(), answer, String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The count of VMs without a lease on a node.
fn without_lease(bridge: &Bridge, node: &str) -> Value {
    let list = bridge.ask(&["fleet", "list"]).expect("a list");
    let found = list["nodes"].as_array().expect("nodes").iter().find(|found| found["name"] == node).cloned();
    found.expect("the node")["vms_without_lease"].clone()
}

#[test]
fn a_cluster_runs_whole_or_not_at_all_and_keeps_its_lease() {
    need!(ready_for_guests());
    need!(networks::possible());
    let networks = Networks::new(NODES).expect("namespaces");
    let sandbox = Sandbox::new().expect("a sandbox");
    // Nodes check what the bridge leased. On n2, VMs may run without that.
    let (key, text) = SecretKey::generate().expect("a key");
    let key_file = sandbox.path().join("grant.key");
    std::fs::write(&key_file, text).expect("a file");
    let config = |number| format!("[grants]\nkeys = [\"{}\"]\nrequired = {}\n", key.public(), number != 2);
    let mut nodes = fleet::daemons(&sandbox, &networks, config).expect("daemons");
    let bridge =
        Bridge::start_with(&sandbox, &nodes, &format!("grant_key = {key_file:?}\n")).expect("a bridge");
    nodes.iter().for_each(|node| bridge.publish(node, 1, 512).expect("published"));
    bridge.publish_topology("SwitchName=l Nodes=n[1-3]\n").expect("published");

    let config = Config { working_set_mib: 16, rate: Rate::PagesPerSecond(500), ..Config::default() };
    let guest = Guest::new(192, config).expect("a QEMU");
    let line = guest.command_line("{vmdir}/serial.log").expect("a command line");
    let line: Vec<String> =
        line.into_iter().map(|word| if word == "192" { "{memory_mib}".to_owned() } else { word }).collect();
    let place = |id: &str, line: &[String]| -> (Option<i32>, Value, String) {
        let text = ["place", "--text", "vcpus=1; memory_mb=192", "--count", "3", "--cluster", id, "--id", id];
        let more = ["--holder", "test", "--ttl", "3s", "--run", "--"];
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        vmove(&bridge, &[&text[..], &more, &line].concat())
    };
    let running =
        |nodes: &[Node]| -> Vec<String> { nodes.iter().flat_map(|n| n.vms().expect("a list")).collect() };
    let leases = || bridge.ask(&["lease", "list"]).expect("a list")["leases"].clone();

    // Past the bridge, nothing is started where a grant is required.
    let own: Vec<&str> = line.iter().map(|word| if word == "{memory_mib}" { "192" } else { word }).collect();
    let past = nodes[0].vmove(&[&["run", "--name", "past", "--"], &own[..]].concat()).expect("vmove");
    let said = String::from_utf8_lossy(&past.stderr);
    assert!(past.status.code() == Some(3) && said.contains("has no grant"), "{said}");

    // There is no such QEMU on any node.
    let (code, _, said) = place("odd", &["/nonexistent/qemu".to_owned(), "-m".to_owned(), "192".to_owned()]);
    assert_eq!((code, leases(), running(&nodes)), (Some(1), json!([]), vec![]), "{said}");
    assert!(said.contains("does not start") && said.contains("lease odd is given back"), "{said}");

    // One node of three does not do it: QEMU finds no such file there, and what had begun on the others is ended.
    let sometimes = sandbox.path().join("sometimes");
    let script = format!(
        "#!/bin/sh\ncase \"$PWD\" in */n3/*) echo 'not on this node' >&2; exit 1;; esac\nexec '{}' \"$@\"\n",
        line[0]
    );
    std::fs::write(&sometimes, script).expect("a file");
    std::fs::set_permissions(&sometimes, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("it can be run");
    let mut partly = line.clone();
    partly[0] = sometimes.display().to_string();
    let (code, _, said) = place("partly", &partly);
    assert_eq!((code, leases(), running(&nodes)), (Some(1), json!([]), vec![]), "{said}");
    assert!(said.contains("on node n3") && said.contains("lease partly is given back"), "{said}");

    // All run, one on each node, far longer than the time to live of their lease.
    let (code, answer, said) = place("vc", &line);
    assert_eq!((code, answer["vms"].as_array().map(Vec::len)), (Some(0), Some(3)), "{said}");
    assert_eq!(answer["lease"]["ends_in_ms"], Value::Null, "it is kept by its VMs: {answer}");
    let start = Instant::now();
    for vm in answer["vms"].as_array().expect("VMs") {
        let node = nodes.iter().find(|node| vm["node"] == node.name()).expect("a node");
        let name = vm["vm"].as_str().expect("a name");
        assert_eq!(node.vms().expect("a list"), [name]);
        assert_eq!(node.ask(&["show", name]).expect("it is shown")["lease"], "vc", "it runs in its grant");
        until("the guest prints", || !node.vm(name).expect("it is there").console().is_empty());
    }
    // The bridge asks a node that does not answer later on: the lease stays meanwhile.
    nodes[0].crash();
    std::thread::sleep(Duration::from_secs(8).saturating_sub(start.elapsed()));
    assert_eq!(leases()[0]["held"].as_array().map(Vec::len), Some(3));
    let list = bridge.command(&["lease", "list"]).expect("vmove").output().expect("it runs").stdout;
    assert!(String::from_utf8_lossy(&list).contains("vc"), "it is there");
    nodes[0].run().expect("n1 is there again");

    // A VM that ends gives its share back; a VM without a lease is told.
    let mine = nodes[1].vms().expect("a list").remove(0);
    nodes[1].ask(&["stop", &mine]).expect("stopped");
    until("the share of an ended VM is free", || leases()[0]["held"].as_array().map(Vec::len) == Some(2));
    assert_eq!(without_lease(&bridge, "n2"), json!(0));
    let small = Guest::new(192, Config { working_set_mib: 16, ..Config::default() }).expect("a QEMU");
    nodes[1].run_guest("stranger", "thp", &small).expect("the guest runs");
    until("VMs without a lease are counted", || without_lease(&bridge, "n2") == json!(1));
    assert_eq!(
        bridge.ask(&["fleet", "show", "n2"]).expect("a node")["vms_without_lease"],
        json!(["stranger"])
    );
    nodes[1].ask(&["stop", "stranger"]).expect("stopped");

    // Stopped VMs leave the lease, which ends three seconds later.
    for name in [0, 2].map(|at| nodes[at].vms().expect("a list").remove(0)) {
        let node = nodes.iter().find(|node| node.vms().expect("a list").contains(&name)).expect("its node");
        assert_eq!(failures(&node.vm(&name).expect("it is there").console()), Vec::<String>::new());
    }
    bridge.ask(&["lease", "stop", "v"]).expect("the beginning of an id is enough");
    assert_eq!(running(&nodes), Vec::<String>::new());
    until("a lease in which nothing runs ends", || leases() == json!([]));
}
