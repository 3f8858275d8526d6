//! Blueprints, run by real daemons with tiny guests: either all VMs of a blueprint run, or none.
#![cfg(test)]

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::{Value, json};
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::bridge::{Bridge, ready_for_guests, until};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::{Guest, failures};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

use crate::commands::ready;

/// An adapter that records its requests. What it has started is a file, or it fails, hangs, prints garbage, or says what is not so.
pub(crate) fn adapter(bridge: &Bridge, way: &str) -> String {
    let (start, status, stop) = match way {
        "good" => ("touch $0.is; now=running", "[ -e $0.is ] && now=running", "rm -f $0.is"),
        "failing" => ("now=failed", "", ""),
        "hanging" => ("sleep 1000", "", ""),
        "garbage" => ("echo '[1, 2'; exit 0", "", ""),
        "lying" => ("now=running", "", ""),
        other => panic!("no such adapter: {other}"),
    };
    let script = format!(
        r#"#!/bin/sh
read -r asked
echo "$asked" >>"$0.log"
now=absent
case "$asked" in
*'"start"'*) {start} ;;
*'"status"'*) {status} ;;
*) {stop} ;;
esac
echo '{{"version":1,"environments":[{{"name":"view","state":"'$now'","message":"as told"}}]}}'
"#
    );
    let path = bridge.write(way, &script).expect("a file");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("it can be run");
    path
}

/// Exit code, answer and messages of `vmove blueprint`.
fn blueprint(bridge: &Bridge, arguments: &[&str], adapter: &str) -> (Option<i32>, Value, String) {
    let adapter = format!("fake={adapter}");
    let arguments = [&["blueprint"], arguments, &["--adapter", &adapter, "--adapter-limit", "3s"]].concat();
    let output = bridge.command(&arguments).expect("vmove").output().expect("it runs");
    let answer = serde_json::from_slice(&output.stdout).unwrap_or_default();
    (output.status.code(), answer, String::from_utf8_lossy(&output.stderr).into_owned())
}

fn run(bridge: &Bridge, file: &str, adapter: &str) -> (Option<i32>, Value, String) {
    blueprint(bridge, &[file, "--run", "--holder", "test", "--ttl", "10m"], adapter)
}

/// Name and state of each element.
fn states(answer: &Value) -> Vec<(&str, &str)> {
    let elements = answer["elements"].as_array().map(Vec::as_slice).unwrap_or_default();
    elements.iter().filter_map(|own| Some((own["name"].as_str()?, own["state"].as_str()?))).collect()
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
    let written = |name: &str, last: &[String]| {
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
    let good = adapter(&bridge, "good");
    let missing = vec!["/nonexistent/qemu".to_owned(), "-m".to_owned(), "192".to_owned()];
    let (code, answer, said) = run(&bridge, &written("odd", &missing), &good);
    assert_eq!((code, leases(), running()), (Some(1), Some(0), vec![]), "{said}");
    assert!(said.contains("odd-0-head-0 does not start") && said.contains("undone"), "{said}");
    let failed = &answer["details"]["failed"];
    assert!(failed["odd-0-head-0"].as_str().is_some_and(|why| why.contains("does not start")), "{answer}");
    assert_eq!(
        (failed.as_object().map(serde_json::Map::len), states(&answer["details"]).len()),
        (Some(1), 4)
    );

    // All VMs run, but the adapter fails: they are stopped.
    let failing = adapter(&bridge, "failing");
    let (code, _, said) = run(&bridge, &written("late", &command), &failing);
    assert_eq!((code, leases(), running()), (Some(1), Some(0), vec![]), "{said}");
    let log = std::fs::read_to_string(format!("{failing}.log")).expect("it was asked");
    let told: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let actions: Vec<&str> = told.iter().filter_map(|own| own["action"].as_str()).collect();
    assert_eq!(actions[..3], ["status", "start", "stop"], "{actions:?}");
    assert_eq!(told[0]["environments"][0]["near"], json!(["n1", "n2", "n3"]), "the VMs had their places");

    // So it is with one that breaks the contract; the reason is told of the element that failed.
    let file = written("app", &command);
    for (way, wanted) in [
        ("hanging", "has not ended within 3 s and was killed"),
        ("garbage", "JSON of the contract"),
        ("lying", "view is not there: it said running"),
    ] {
        let (code, answer, said) = run(&bridge, &file, &adapter(&bridge, way));
        assert_eq!((code, leases(), running()), (Some(1), Some(0), vec![]), "{said}");
        assert!(said.contains(wanted) && said.contains("undone"), "{said}");
        assert_eq!(
            (&answer["code"], answer["details"]["failed"]["view"].is_string()),
            (&json!("adapter-failed"), true)
        );
        assert_eq!(answer["details"]["state"], "stopped", "{answer}");
    }

    // The blueprint succeeds: one VM on each node, because each node has one processor. A second request changes nothing.
    for again in [false, true] {
        let (code, answer, said) = run(&bridge, &file, &good);
        assert_eq!((code, leases()), (Some(0), Some(1)), "{said}");
        let vms = answer["together"][0]["vms"].as_array().expect("VMs").clone();
        assert_eq!(vms.len(), 3, "{answer}");
        for vm in &vms {
            let node = nodes.iter().find(|node| vm["node"] == node.name()).expect("a node");
            assert_eq!(node.vms().expect("a list"), [vm["vm"].as_str().expect("a name")]);
            assert_eq!(vm["again"], again);
        }
    }
    let names: Vec<String> = nodes.iter().map(|node| node.vms().expect("a list").remove(0)).collect();
    for (node, name) in nodes.iter().zip(&names) {
        until("the guest prints", || !node.vm(name).expect("it is there").console().is_empty());
        let vm = node.vm(name).expect("it is there");
        assert_eq!((vm.status.as_str(), failures(&vm.console())), ("running", vec![]));
    }
    is_told_and_stopped(&bridge, &file, &good, || {
        nodes[0].ask(&["stop", &names[0]]).expect("stopped");
        names[0].clone()
    });
    assert_eq!((leases(), running()), (Some(0), vec![]));
}

/// The state of each element while all run, while `lose` has ended a VM, and when all were stopped; what cannot be stopped is told.
fn is_told_and_stopped(bridge: &Bridge, file: &str, good: &str, lose: impl Fn() -> String) {
    let status = |adapter: &str| blueprint(bridge, &["status", file], adapter).1;
    let now = status(good);
    assert_eq!(
        (&now["state"], now["elements"].as_array().map(Vec::len)),
        (&json!("running"), Some(4)),
        "{now}"
    );
    assert!(
        now["elements"].as_array().is_some_and(|all| all
            .iter()
            .filter(|own| own["kind"] == "vm")
            .all(|own| own["nodes"][0].is_string())),
        "{now}"
    );
    // A part of it fails: its state is told, that of others is as it was.
    let lost = lose();
    let now = status("/nonexistent");
    let of = |name: &str| states(&now).into_iter().find(|(own, _)| *own == name).map(|(_, state)| state);
    assert_eq!(
        (of(&lost), of("view"), &now["state"]),
        (Some("absent"), Some("unknown"), &json!("partial")),
        "{now}"
    );
    assert_eq!(states(&now).iter().filter(|(_, state)| *state == "running").count(), 2, "{now}");

    // What cannot be stopped does not keep the rest from it.
    let (code, answer, said) = blueprint(bridge, &["stop", file], "/nonexistent");
    assert_eq!((code, &answer["code"]), (Some(1), &json!("not-stopped")), "{said}");
    let left = answer["details"]["left"].as_array().expect("what is left");
    assert!(left.len() == 1 && left[0].as_str().is_some_and(|left| left.contains("view")), "{answer}");
    assert!(
        states(&answer["details"])
            .iter()
            .all(|(name, state)| *state == if *name == "view" { "unknown" } else { "absent" }),
        "{answer}"
    );
    for _ in 0..2 {
        let (code, answer, said) = blueprint(bridge, &["stop", file], good);
        assert_eq!((code, &answer["state"]), (Some(0), &json!("stopped")), "{said}");
    }
}

#[test]
fn who_waits_for_a_blueprint_is_told_for_what() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = Bridge::start(&sandbox, &[]).expect("a bridge");
    let view = json!({ "name": "view", "kind": "container", "adapter": "fake" });
    let text = json!({ "name": "slow", "environments": [view] });
    let file = bridge.write("slow.yaml", &text.to_string()).expect("a file");
    let program = format!("fake={}", adapter(&bridge, "hanging"));
    let words = ["blueprint", &file, "--run", "--adapter", &program, "--adapter-limit", "3s"];

    let json = bridge.command(&words).expect("vmove");
    let mut plain = Command::new(json.get_program());
    let variables = json.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let output = plain.envs(variables).args(words).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.starts_with("vmove: waiting: adapter fake starts view ("), "{said}");

    let (code, answer, said) = run(&bridge, &file, &adapter(&bridge, "hanging"));
    assert!(code == Some(1) && answer["code"] == "adapter-failed", "{answer}");
    assert!(!said.contains("waiting"), "programs are told nothing of it: {said}");
}
