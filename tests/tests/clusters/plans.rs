//! A bridge with four daemons, each in its own network namespace. The bridge's plans are executed with real guests.
#![cfg(test)]

use std::process::Stdio;

use serde_json::{Value, json};
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::bridge::{Bridge, ready_for_guests, until};
use vmove_tests::daemon::Node;
use vmove_tests::fleet;
use vmove_tests::guest::{Guest, failures};
use vmove_tests::networks::{self, Networks};
use vmove_tests::sandbox::Sandbox;

const NODES: u8 = 4;

/// The node of each VM of a lease, according to the bridge.
fn sits(bridge: &Bridge, lease: &str) -> Vec<(String, String)> {
    let lease = bridge.ask(&["lease", "show", lease]).expect("the lease is there");
    let held = lease["held"].as_array().expect("a list").clone();
    let text = |value: &Value| value.as_str().expect("a name").to_owned();
    held.iter().map(|h| (text(&h["vm"]), text(&h["node"]))).collect()
}

fn agree(bridge: &Bridge, nodes: &[Node], lease: &str) {
    for (vm, at) in sits(bridge, lease) {
        let found: Vec<&str> =
            nodes.iter().filter(|n| n.vms().expect("a list").contains(&vm)).map(Node::name).collect();
        assert_eq!(found, [at.as_str()], "{vm}");
    }
}

#[test]
fn real_guests_leave_a_node_and_a_killed_bridge_goes_on() {
    need!(ready_for_guests());
    need!(networks::possible());
    let networks = Networks::new(NODES).expect("namespaces");
    let sandbox = Sandbox::new().expect("a sandbox");
    let nodes = fleet::daemons(&sandbox, &networks, |_| String::new()).expect("daemons");
    let mut bridge = Bridge::start(&sandbox, &nodes).expect("a bridge");
    nodes.iter().for_each(|node| bridge.publish(node, 2, 1024).expect("published"));
    let conf = "SwitchName=l1 Nodes=n[1-2]\nSwitchName=l2 Nodes=n[3-4]\nSwitchName=s Switches=l[1-2]\n";
    bridge.publish_topology(conf).expect("published");

    // Two VMs are placed as close together as possible, and started where the bridge placed them.
    let cluster = "name: vc\nvms:\n- {name: vm, count: 2, request: \"vcpus=1; memory_mb=320\"}\n";
    let cluster = bridge.write("vc.yaml", cluster).expect("a file");
    let placed =
        bridge.ask(&["place", &cluster, "--holder", "test", "--id", "vc", "--ttl", "10m"]).expect("placed");
    assert_eq!(placed["placement"]["score"]["max_hops"], 0, "both on one node: {placed}");
    let config = Config { working_set_mib: 32, rate: Rate::PagesPerSecond(2000), ..Config::default() };
    let node = |name: &str| nodes.iter().find(|n| n.name() == name).expect("a node");
    for (vm, at) in sits(&bridge, "vc") {
        node(&at)
            .run_guest(&vm, "thp", &Guest::new(256, config.clone()).expect("a QEMU"))
            .expect("the guest runs");
    }
    agree(&bridge, &nodes, "vc");

    // All VMs leave the node.
    let from = sits(&bridge, "vc")[0].1.clone();
    bridge.ask(&["fleet", "drain", &from]).expect("drained");
    let plan = bridge.ask(&["plan", "evacuate", &from]).expect("a plan");
    assert_eq!(plan["steps"].as_array().map(Vec::len), Some(2), "{plan}");
    let id = plan["id"].as_str().expect("an id").to_owned();
    let done = bridge.ask(&["plan", "run", &id]).expect("the plan is run");
    assert_eq!(done["state"]["is"], "done", "{done}");
    assert!(node(&from).vms().expect("a list").is_empty());
    assert!(sits(&bridge, "vc").iter().all(|(_, at)| *at != from));
    agree(&bridge, &nodes, "vc");
    eprintln!("evacuated: {}", done["steps"]);

    // Then they leave the next node; the bridge is killed meanwhile.
    bridge.ask(&["fleet", "resume", &from]).expect("resumed");
    let from = sits(&bridge, "vc")[0].1.clone();
    bridge.ask(&["fleet", "drain", &from]).expect("drained");
    let plan = bridge.ask(&["plan", "evacuate", &from]).expect("a plan");
    let id = plan["id"].as_str().expect("an id").to_owned();
    let mut command = bridge.command(&["plan", "run", &id]).expect("vmove");
    let mut running = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("vmove starts");
    let begun = |plan: &Value| {
        let steps = plan["steps"].as_array().expect("a list");
        steps.iter().any(|step| step["state"]["is"] != "pending")
    };
    until("a step is begun", || begun(&bridge.ask(&["plan", "show", &id]).expect("the plan is there")));
    bridge.kill();
    running.wait().expect("vmove ends when its bridge does");
    bridge.run().expect("the bridge starts again");
    let done = bridge.ask(&["plan", "run", &id]).expect("the plan is taken up");
    assert_eq!(done["state"]["is"], "done", "{done}");
    assert!(node(&from).vms().expect("a list").is_empty());
    agree(&bridge, &nodes, "vc");

    // The guests have found no error.
    for (vm, at) in sits(&bridge, "vc") {
        let vm = node(&at).vm(&vm).expect("it is there");
        assert_eq!(vm.status, "running");
        assert_eq!(failures(&vm.console()), Vec::<String>::new());
    }

    // The end of a VM frees its resources. The end of the last VM ends the lease.
    until("the bridge has seen the VMs where they are now", || {
        let lease = bridge.ask(&["lease", "show", "vc"]).expect("the lease is there");
        lease["held"].as_array().expect("a list").iter().all(|held| held["seen"] == true)
    });
    for (vm, at) in sits(&bridge, "vc") {
        node(&at).ask(&["stop", &vm]).expect("stopped");
    }
    until("the lease of ended VMs is given back", || {
        bridge.ask(&["lease", "list"]).expect("a list")["leases"] == json!([])
    });
    let account = bridge.command(&["account"]).expect("vmove").output().expect("it runs").stdout;
    let record: Value = serde_json::from_slice(&account).expect("one record");
    assert_eq!((record["end"].as_str(), record["holder"].as_str()), (Some("vms-ended"), Some("test")));
}
