//! The commands in the heads of `examples/cluster` and `examples/blueprint`, taken from the files and followed line by line.
#![cfg(test)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::bridge::{Bridge, ready_for_guests, until};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::sandbox::Sandbox;

use crate::blueprints::adapter;
use crate::commands::ready;

/// Path of an example, and the `vmove` commands of its first lines, without what is said of them.
fn example(name: &str) -> (String, Vec<Vec<String>>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples").join(name);
    let text = std::fs::read_to_string(&path).expect("the example");
    let words = |line: &str| {
        let command = line.strip_prefix("#   vmove ")?.split("    ").next()?;
        Some(command.split_whitespace().map(str::to_owned).collect())
    };
    let commands = text.lines().take_while(|line| line.starts_with('#')).filter_map(words).collect();
    (path.to_string_lossy().into_owned(), commands)
}

/// The answers to the commands of an example, with some of their words replaced.
fn follow(bridge: &Bridge, name: &str, replaced: &[(&str, &str)]) -> impl Iterator<Item = (String, Value)> {
    let (path, commands) = example(name);
    let file = Path::new(name).file_name().expect("a name").to_string_lossy().into_owned();
    commands.into_iter().map(move |command| {
        let other = |word: &String| {
            let replaced = replaced.iter().find(|(old, _)| old == word).map(|(_, new)| (*new).to_owned());
            if *word == file { path.clone() } else { replaced.unwrap_or_else(|| word.clone()) }
        };
        let words: Vec<String> = command.iter().map(other).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        (command.join(" "), bridge.ask(&words).unwrap_or_else(|error| panic!("{command:?}: {error:#}")))
    })
}

#[test]
fn the_commands_of_the_small_cluster_do_what_they_say() {
    need!(ready_for_guests());
    let qemu = need!(vmove_skip::qemu());
    let sandbox = Sandbox::new().expect("a sandbox");
    let nodes: Vec<Node> = (1..=2)
        .map(|number| Node::start(&sandbox, &format!("n{number}"), NodeOptions::default()).expect("a daemon"))
        .collect();
    let bridge = Bridge::start(&sandbox, &nodes).expect("a bridge");
    nodes.iter().for_each(|node| bridge.publish(node, 1, 512).expect("published"));
    bridge.publish_topology("SwitchName=l Nodes=n[1-2]\n").expect("published");
    let running = || {
        let mut all: Vec<String> = nodes.iter().flat_map(|node| node.vms().expect("a list")).collect();
        all.sort();
        all
    };
    let both = ["small-vm-0", "small-vm-1"];

    // Not every machine that runs the tests has KVM.
    let replaced = [("qemu-system-x86_64", qemu.as_str()), ("kvm", "tcg")];
    let mut told = follow(&bridge, "cluster/small.yaml", &replaced);
    let mut next = |begin: &str| {
        let (command, answer) = told.next().expect("a command");
        assert!(command.starts_with(begin), "{command}");
        answer
    };
    let what_if = next("place small.yaml --what-if --explain");
    let places = what_if["placement"]["assignments"].as_array().expect("places");
    assert_eq!((places.len(), running().len()), (2, 0), "{what_if}");
    next("cluster start small.yaml -- ");
    assert_eq!(running(), both);
    let status = next("cluster status small").to_string();
    assert!(both.iter().all(|vm| status.contains(vm)), "{status}");
    next("cluster stop small");
    until("both have ended", || running().is_empty());
    assert_eq!(bridge.ask(&["lease", "list"]).expect("a list")["leases"], json!([]));
    assert!(told.next().is_none(), "a command that the test does not know");
}

/// Stands for `vmove` on nodes with eight GPUs, which this machine lacks: a VM is a file.
const GPU_NODES: &str = r#"#!/bin/sh
node=$1
cd "$(dirname "$0")" && mkdir -p "vms/$node"
for last; do case "$last" in --name=*) touch "vms/$node/${last#--name=}" ;; esac; done
case " $* " in
*" stop "*) rm -f "vms/$node/$last" ;;
*" list "*)
  vms=; for vm in $(ls "vms/$node"); do vms="$vms${vms:+,}{\"name\":\"$vm\",\"status\":\"running\"}"; done
  echo "{\"node\":\"$node\",\"vms\":[$vms]}"; exit ;;
esac
echo '{}'
"#;

#[test]
fn the_commands_of_the_blueprint_do_what_they_say() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut bridge = Bridge::start(&sandbox, &[]).expect("a bridge");
    let vmove = bridge.write("gpu-nodes", GPU_NODES).expect("a script");
    std::fs::set_permissions(&vmove, std::fs::Permissions::from_mode(0o755)).expect("it can be run");
    let folder = Path::new(&vmove).parent().expect("a folder").to_owned();
    let config = std::fs::read_to_string(folder.join("vbridged.toml")).expect("its configuration");
    let by_script = |line: &str| match line.strip_prefix("command = ") {
        Some(_) => format!("command = [{vmove:?}, \"{{node}}\"]"),
        None => line.to_owned(),
    };
    let config: Vec<String> = config.lines().map(by_script).collect();
    bridge.kill();
    bridge.write("vbridged.toml", &config.join("\n")).expect("a file");
    bridge.run().expect("it runs again");
    let gpu = |at: u8| json!({ "address": format!("0000:0{at}:00.0"), "kind": "gpu", "id": "10de:2330" });
    let numa = json!([{ "id": 0, "socket": 0, "cores": 8, "memory": 32768 }]);
    let node = |n| json!({ "name": format!("n{n}"), "numa": numa, "devices": [gpu(1), gpu(2)] }).to_string();
    let nodes = bridge.write("nodes.json", &(1..=4).map(node).collect::<String>()).expect("a file");
    bridge.ask(&["fleet", "publish", &nodes]).expect("published");
    bridge.publish_topology("SwitchName=l Nodes=n[1-4]\n").expect("published");
    let running = || {
        let on = |n: u8| std::fs::read_dir(folder.join(format!("vms/n{n}"))).map_or(0, Iterator::count);
        (1..=4).map(on).sum::<usize>()
    };

    let fake = format!("slurm={}", adapter(&bridge, "good"));
    let replaced = [("slurm=vmove-slurm-adapter", fake.as_str())];
    let mut told = follow(&bridge, "blueprint/app.yaml", &replaced);
    let mut next = |begin: &str| {
        let (command, answer) = told.next().expect("a command");
        assert!(command.starts_with(begin), "{command}");
        answer
    };
    let parts = next("blueprint app.yaml");
    assert_eq!(parts["groups"][0]["environments"], json!(["solver"]), "{parts}");
    assert_eq!(
        (parts["groups"][1]["adapter"].as_str(), running()),
        (Some("slurm"), 0),
        "nothing is started: {parts}"
    );
    let ran = next("blueprint app.yaml --run --holder alice --adapter ");
    assert_eq!((ran["together"][0]["vms"].as_array().map(Vec::len), running()), (Some(8), 8), "{ran}");
    let status = next("blueprint status app.yaml --adapter ");
    assert_eq!((&status["state"], status["elements"].as_array().map(Vec::len)), (&json!("running"), Some(9)));
    let stopped = next("blueprint stop app.yaml --adapter ");
    assert_eq!((&stopped["state"], running()), (&json!("stopped"), 0), "{stopped}");
    assert!(told.next().is_none(), "a command that the test does not know");
}
