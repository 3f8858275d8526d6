//! A bridge with two daemons: the VMs of a lease that belong together leave their node at one barrier.
#![cfg(test)]

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::bridge::{Bridge, ready_for_guests};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::Accel;
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::sandbox::Sandbox;

const LEASE: &str = "job";

/// The VMs of the lease, and the node of each according to the bridge.
fn sits(bridge: &Bridge) -> Vec<(String, String)> {
    let lease = bridge.ask(&["lease", "show", LEASE]).expect("the lease is there");
    let text = |value: &Value| value.as_str().expect("a name").to_owned();
    lease["held"].as_array().expect("a list").iter().map(|h| (text(&h["vm"]), text(&h["node"]))).collect()
}

/// Both nodes say what the bridge says: all VMs are at one.
fn all_at(bridge: &Bridge, nodes: [&Node; 2], at: &Node) {
    for (vm, node) in sits(bridge) {
        assert_eq!(node, at.name(), "{vm}");
        for one in nodes {
            let has = one.vms().expect("a list").contains(&vm);
            assert_eq!(has, one.name() == at.name(), "{vm} at {}", one.name());
        }
    }
}

#[test]
fn vms_that_belong_together_leave_a_node_together_or_stay() {
    need!(ready_for_guests());
    need!(payload::ready(Accel::Tcg));
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let nodes = [a, b];
    let bridge = Bridge::start(&sandbox, &nodes).expect("a bridge");
    nodes.iter().for_each(|node| bridge.publish(node, 2, 2048).expect("published"));
    bridge.publish_topology("SwitchName=l1 Nodes=a,b\n").expect("published");
    let cluster = "name: job\nvms:\n- {name: rank, count: 2, request: \"vcpus=1; memory_mb=320\"}\n";
    let cluster = bridge.write("job.yaml", cluster).expect("a file");
    let place = ["place", &cluster, "--holder", "test", "--id", LEASE, "--ttl", "10m", "--together"];
    bridge.ask(&place).expect("placed");
    let from = sits(&bridge)[0].1.clone();
    let [here, there] = if nodes[0].name() == from { [&nodes[0], &nodes[1]] } else { [&nodes[1], &nodes[0]] };
    let guest =
        payload::guest(sandbox.path(), Accel::Tcg, &payload::light(), KvmPages::None).expect("a guest");
    let vms: Vec<String> = sits(&bridge).into_iter().map(|(vm, _)| vm).collect();
    vms.iter().for_each(|vm| drop(here.run_guest(vm, "thp", &guest).expect("it runs")));

    let plan = bridge.ask(&["plan", "evacuate", &from]).expect("a plan");
    let steps = plan["steps"].as_array().expect("steps");
    assert!(steps.len() == 2 && steps.iter().all(|step| step["group"] == 1), "{plan}");
    let id = plan["id"].as_str().expect("an id").to_owned();

    // The destination has a VM of the second one's name: so the first stays as well, and the plan says which and why.
    there.run_guest(&vms[1], "thp", &guest).expect("it runs");
    let refused = bridge.ask(&["plan", "run", &id]).expect_err("it cannot be carried out").to_string();
    assert!(refused.contains("which move at one barrier") && refused.contains(&vms[1]), "{refused}");
    let stopped = bridge.ask(&["plan", "show", &id]).expect("the plan is there");
    for step in stopped["steps"].as_array().expect("steps") {
        assert_eq!(step["state"]["is"], "failed", "{stopped}");
    }
    there.ask(&["stop", &vms[1]]).expect("it ends");
    all_at(&bridge, [here, there], here);

    let done = bridge.ask(&["plan", "run", &id]).expect("the plan is run");
    assert_eq!(done["state"]["is"], "done", "{done}");
    all_at(&bridge, [here, there], there);
    for vm in &vms {
        assert_eq!(there.vm(vm).expect("it is there").status, "running");
    }
    let history = here.ask(&["history"]).expect("a history").to_string();
    assert!(history.contains("\"group\":\""), "they went as a group: {history}");
}
