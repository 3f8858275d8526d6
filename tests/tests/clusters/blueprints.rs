//! Blueprints, run by real daemons with tiny guests: either all VMs of a blueprint run, or none.
#![cfg(test)]

use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::bridge::{Bridge, ready_for_guests, until};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::{Guest, failures};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

/// An adapter that records its requests and answers with the given state.
fn adapter(bridge: &Bridge, state: &str) -> String {
    let script = format!(
        "#!/bin/sh\nread -r asked\necho \"$asked\" >>\"$0.log\"\necho '{{\"version\":1,\"environments\":[{{\"name\":\"view\",\"state\":\"{state}\"}}]}}'\n"
    );
    let path = bridge.write(state, &script).expect("a file");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("it can be run");
    path
}

/// Exit code and output.
fn run(bridge: &Bridge, file: &str, adapter: &str) -> (Option<i32>, Value, String) {
    let adapter = format!("fake={adapter}");
    let arguments = ["blueprint", file, "--run", "--holder", "test", "--ttl", "10m", "--adapter", &adapter];
    let output = bridge.command(&arguments).expect("vmove").output().expect("it runs");
    let answer = serde_json::from_slice(&output.stdout).unwrap_or_default();
    (output.status.code(), answer, String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn the_vms_of_a_blueprint_run_where_they_were_placed_or_nothing_does() {
    need!(ready_for_guests());
    let sandbox = Sandbox::new().expect("a sandbox");
    let nodes: Vec<Node> = (1..=3)
        .map(|number| Node::start(&sandbox, &format!("n{number}"), NodeOptions::default()).expect("a daemon"))
        .collect();
    let bridge = Bridge::start(&sandbox, &nodes).expect("a bridge");
    nodes.iter().for_each(|node| bridge.publish(node, 1, 512).expect("published"));
    bridge.publish_topology("SwitchName=l Nodes=n[1-3]\n").expect("published");

    let config = Config { working_set_mib: 16, rate: Rate::PagesPerSecond(500), ..Config::default() };
    let guest = Guest::new(192, config).expect("a QEMU");
    // The kernel is an artifact. The memory size is that of the lease.
    let kernel = places::guest_kernel().expect("a kernel");
    let command: Vec<String> = guest
        .command_line("{vmdir}/serial.log")
        .expect("a command line")
        .into_iter()
        .map(|word| if word == kernel.to_string_lossy() { "{artifact:kernel}".to_owned() } else { word })
        .map(|word| if word == "192" { "{memory_mib}".to_owned() } else { word })
        .collect();
    assert!(
        command.contains(&"{artifact:kernel}".to_owned()) && command.contains(&"{memory_mib}".to_owned())
    );
    let blueprint = |name: &str, last: &[String]| {
        let solver = |name: &str, count: u32, command: &[String]| {
            let request = "vcpus=1; memory_mb=192";
            json!({ "name": name, "kind": "vm", "count": count, "request": request, "artifacts": ["kernel"], "command": command })
        };
        let view = json!({ "name": "view", "kind": "container", "adapter": "fake", "artifacts": ["image"] });
        let text = json!({
            "name": name,
            "environments": [solver("solver", 2, &command), solver("head", 1, last), view],
            "artifacts": [{ "name": "kernel", "source": kernel }, { "name": "image", "source": "view.sif" }],
            "connections": [{ "from": "solver", "to": "head" }, { "from": "head", "to": "view" }],
        });
        // Every JSON text is YAML.
        bridge.write(&format!("{name}.yaml"), &text.to_string()).expect("a file")
    };
    let running = || -> Vec<String> {
        let vms = |node: &Node| node.vms().expect("a list");
        nodes.iter().flat_map(vms).collect()
    };
    let leases = || bridge.ask(&["lease", "list"]).expect("a list")["leases"].as_array().map(Vec::len);

    // One of the three VMs has no QEMU: the others are stopped.
    let none = adapter(&bridge, "running");
    let missing = vec!["/nonexistent/qemu".to_owned(), "-m".to_owned(), "192".to_owned()];
    let (code, _, said) = run(&bridge, &blueprint("odd", &missing), &none);
    assert_eq!((code, leases(), running()), (Some(1), Some(0), vec![]), "{said}");
    assert!(said.contains("odd-0-head-0 does not start") && said.contains("undone"), "{said}");

    // All VMs run, but the adapter fails: they are stopped.
    let failing = adapter(&bridge, "failed");
    let (code, _, said) = run(&bridge, &blueprint("late", &command), &failing);
    assert_eq!((code, leases(), running()), (Some(1), Some(0), vec![]), "{said}");
    let log = std::fs::read_to_string(format!("{failing}.log")).expect("it was asked");
    let told: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!((told.len(), &told[0]["action"], &told[1]["action"]), (2, &json!("start"), &json!("stop")));
    assert_eq!(told[0]["environments"][0]["near"], json!(["n1", "n2", "n3"]), "the VMs had their places");

    // The blueprint succeeds: one VM on each node, because each node has one processor. A second request changes nothing.
    let file = blueprint("app", &command);
    for again in [false, true] {
        let (code, answer, said) = run(&bridge, &file, &none);
        assert_eq!((code, leases()), (Some(0), Some(1)), "{said}");
        let vms = answer["together"][0]["vms"].as_array().expect("VMs").clone();
        assert_eq!(vms.len(), 3, "{answer}");
        for vm in &vms {
            let node = nodes.iter().find(|node| vm["node"] == node.name()).expect("a node");
            assert_eq!(node.vms().expect("a list"), [vm["vm"].as_str().expect("a name")]);
            assert_eq!(vm["again"], again);
        }
    }
    for node in &nodes {
        let name = node.vms().expect("a list").remove(0);
        until("the guest prints", || !node.vm(&name).expect("it is there").console().is_empty());
        let vm = node.vm(&name).expect("it is there");
        assert_eq!((vm.status.as_str(), failures(&vm.console())), ("running", vec![]));
        node.ask(&["stop", &name]).expect("stopped");
    }
}
