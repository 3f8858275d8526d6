//! Virtual clusters as a whole, by `vmove cluster`: real daemons in network namespaces, which share a folder for templates, and real guests.
#![cfg(test)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmove_guest::beacon::Beacon;
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::bridge::{Bridge, ready_for_guests, until};
use vmove_tests::daemon::Node;
use vmove_tests::fleet;
use vmove_tests::forks::Parent;
use vmove_tests::guest::{Guest, failures};
use vmove_tests::networks::{self, Networks};
use vmove_tests::sandbox::Sandbox;

const NODES: u8 = 4;

/// Two leaves of two nodes, each with room for two VMs.
struct Scene {
    bridge: Bridge,
    nodes: Vec<Node>,
    guest: Guest,
    /// Where the guests of `train` have their beacons, by the ends of their names: in copies they are there, too, in private memory.
    beacons: RefCell<BTreeMap<String, Parent>>,
    _networks: Networks,
    // Last: it ends whatever is left.
    _sandbox: Sandbox,
}

impl Scene {
    fn new(shared: bool) -> Self {
        let networks = Networks::new(NODES).expect("namespaces");
        let sandbox = Sandbox::new().expect("a sandbox");
        let folder = sandbox.folder("templates").expect("a folder");
        let config = format!("[fork]\ntemplate-dir = {:?}\n", folder.display().to_string());
        let config = if shared { config } else { String::new() };
        let nodes = fleet::daemons(&sandbox, &networks, |_| config.clone()).expect("daemons");
        let bridge = Bridge::start(&sandbox, &nodes).expect("a bridge");
        nodes.iter().for_each(|node| bridge.publish(node, 2, 448).expect("published"));
        let conf = "SwitchName=l1 Nodes=n[1-2]\nSwitchName=l2 Nodes=n[3-4]\nSwitchName=s Switches=l[1-2]\n";
        bridge.publish_topology(conf).expect("published");
        let config = Config { working_set_mib: 16, rate: Rate::PagesPerSecond(500), ..Config::default() };
        let guest = Guest::new(192, config).expect("a QEMU");
        let beacons = RefCell::default();
        Self { bridge, nodes, guest, beacons, _networks: networks, _sandbox: sandbox }
    }

    fn ask(&self, arguments: &[&str]) -> Value {
        self.bridge.ask(arguments).unwrap_or_else(|error| panic!("{error:#}"))
    }

    fn refused(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let output = self.bridge.command(arguments).expect("vmove").output().expect("it runs");
        assert!(!output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stdout));
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Starts a cluster of so many VMs.
    fn start(&self, name: &str, count: &str) -> Value {
        let line = self.guest.command_line("{vmdir}/serial.log").expect("a command line");
        let line: Vec<String> = line
            .into_iter()
            .map(|word| if word == "192" { "{memory_mib}".to_owned() } else { word })
            .collect();
        let text =
            ["cluster", "start", "--text", "vcpus=1; memory_mb=192", "--count", count, "--cluster", name];
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        self.ask(&[&text[..], &["--holder", "test", "--"], &line].concat())
    }

    fn node(&self, name: &str) -> &Node {
        self.nodes.iter().find(|node| node.name() == name).expect("a node")
    }

    /// VMs of a cluster with their nodes; all run there, nowhere else, and find their memory right.
    fn sound(&self, cluster: &str) -> Vec<(String, String)> {
        let status = self.ask(&["cluster", "status", cluster]);
        let mut found = Vec::new();
        for member in status["members"].as_array().expect("members") {
            let text = |key: &str| member[key].as_str().expect("a text").to_owned();
            let (vm, node) = (text("vm"), text("node"));
            assert_eq!(member["state"], "running", "{status}");
            let at: Vec<&str> = self
                .nodes
                .iter()
                .filter(|n| n.vms().is_ok_and(|vms| vms.contains(&vm)))
                .map(Node::name)
                .collect();
            assert_eq!(at, [node.as_str()], "{vm}");
            self.works(&vm, &node);
            found.push((vm, node));
        }
        assert_eq!(status["running"].as_u64(), Some(found.len() as u64), "{status}");
        found
    }

    /// The guest goes on verifying its memory.
    fn works(&self, vm: &str, node: &str) {
        let at = self.node(node);
        let beats = || self.beacon(vm, node);
        until("the guest is at work", || beats().is_some());
        let first = beats().expect("a beacon");
        until("it goes on", || {
            beats().is_some_and(|now| now.beats > first.beats + 20 && now.verified > first.verified + 100)
        });
        let last = beats().expect("a beacon");
        assert_eq!(last.errors, 0, "{vm}: {}", last.verdict());
        assert_eq!(failures(&at.vm(vm).expect("it is there").console()), Vec::<String>::new());
    }

    fn beacon(&self, vm: &str, node: &str) -> Option<Beacon> {
        let (found, end) = (self.node(node).vm(vm).ok()?, vm.rsplit('-').next()?);
        let mut known = self.beacons.borrow_mut();
        if vm.starts_with("train")
            && let Ok(parent) = Parent::at_work(vm, self.guest.clone(), &found)
        {
            known.insert(end.to_owned(), parent);
        }
        match known.get(end) {
            Some(parent) => parent.page(&found).ok()?.read(),
            None => found.beacon().ok()?.read(),
        }
    }

    /// VMs on all nodes that answer.
    fn all(&self) -> Vec<String> {
        let mut all: Vec<String> =
            self.nodes.iter().flat_map(|node| node.vms().unwrap_or_default()).collect();
        all.sort();
        all
    }

    /// None of the guests stands still.
    fn none_is_paused(&self, cluster: &str) {
        for (vm, node) in self.sound(cluster) {
            assert_eq!(self.node(&node).vm(&vm).expect("it is there").status, "running", "{vm}");
        }
    }
}

fn nodes_of(members: &[(String, String)]) -> Vec<&str> {
    let mut nodes: Vec<&str> = members.iter().map(|(_, node)| node.as_str()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes
}

fn leaf(node: &str) -> u8 {
    if ["n1", "n2"].contains(&node) { 1 } else { 2 }
}

#[test]
fn a_cluster_grows_shrinks_moves_and_is_forked() {
    need!(ready_for_guests());
    need!(networks::possible());
    let scene = Scene::new(true);
    scene.start("train", "2");
    let members = scene.sound("train");
    assert_eq!(nodes_of(&members).len(), 1, "{members:?}");
    let home = members[0].1.clone();

    // One more: on the same leaf; the others stay.
    let grown = scene.ask(&["cluster", "resize", "train", "3"]);
    assert_eq!(grown["added"][0]["vm"], "train-vm-2", "{grown}");
    let now = scene.sound("train");
    assert_eq!(now[..2], members[..], "the others stay");
    assert!(now[2].1 != home && leaf(&now[2].1) == leaf(&home), "{now:?}");
    // More than there is: nothing happens.
    let (code, said) = scene.refused(&["cluster", "resize", "train", "20"]);
    assert_eq!((code, scene.sound("train")), (Some(3), now.clone()), "{said}");
    assert!(said.contains("more VMs fit"), "{said}");
    let (code, said) = scene.refused(&["cluster", "resize", "train", "4", "--", "/nonexistent/qemu"]);
    assert_eq!((code, scene.sound("train")), (Some(1), now.clone()), "{said}");
    // The one that is alone leaves first, and its share is free.
    let shrunk = scene.ask(&["cluster", "resize", "train", "2"]);
    assert_eq!(shrunk["removed"], json!(["train-vm-2"]), "{shrunk}");
    assert_eq!(shrunk["after"], json!({ "most": 0, "sum": 0 }), "{shrunk}");
    assert_eq!(scene.sound("train"), members);
    assert_eq!(scene.all().len(), 2);

    // All of it goes to the other leaf; what is only planned moves nothing.
    let away = if leaf(&home) == 1 { "n1,n2" } else { "n3,n4" };
    let plan = scene.ask(&["cluster", "move", "train", "--away", away, "--what-if"]);
    assert_eq!((plan["steps"].as_array().map(Vec::len), &plan["state"]["is"]), (Some(2), &json!("planned")));
    assert_eq!(scene.sound("train"), members);
    let moved = scene.ask(&["cluster", "move", "train", "--away", away]);
    assert_eq!(moved["state"]["is"], "done", "{moved}");
    let there = scene.sound("train");
    assert!(there.iter().all(|(_, node)| leaf(node) != leaf(&home)), "{there:?}");
    let (code, said) = scene.refused(&["cluster", "move", "train", "--away", "n1,n2,n3,n4"]);
    assert_eq!(code, Some(3), "{said}");

    // A copy, compact as well. The parents go on, and stood still for a moment that is told.
    let forked = scene.ask(&["cluster", "fork", "train", "what-if"]);
    let pairs: Vec<(&str, &str)> = forked["members"]
        .as_array()
        .expect("members")
        .iter()
        .map(|one| (one["parent"].as_str().expect("a name"), one["vm"].as_str().expect("a name")))
        .collect();
    assert_eq!(pairs, [("train-vm-0", "what-if-vm-0"), ("train-vm-1", "what-if-vm-1")], "{forked}");
    for member in forked["members"].as_array().expect("members") {
        assert!(member["stood_still_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{member}");
    }
    let copies = scene.sound("what-if");
    assert_eq!(nodes_of(&copies).len(), 1, "{copies:?}");
    scene.none_is_paused("train");
    let boot = |vm: &str, node: &str| scene.beacon(vm, node).expect("a beacon").boot;
    for ((parent, at), (child, node)) in there.iter().zip(&copies) {
        assert_eq!(boot(parent, at), boot(child, node), "{child} is another guest");
    }
    // One VM alone, twice, in a lease of its own: where the copies are says the bridge.
    scene.ask(&["cluster", "stop", "what-if"]);
    let output = scene.node(&there[0].1);
    let socket = scene.bridge.socket();
    let words =
        ["create", "train-vm-0", "--place", "3", "--cluster", "what-if", "--bridge", &socket, "--json"];
    let output = output.vfork(&words).expect("vfork");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let forked: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(forked["members"].as_array().expect("members").iter().all(|one| one["parent"] == "train-vm-0"));
    for end in ["0", "1", "2"] {
        let vm = scene.node(&there[0].1).vm("train-vm-0").expect("it is there");
        let parent = Parent::at_work("train-vm-0", scene.guest.clone(), &vm).expect("it is at work");
        scene.beacons.borrow_mut().insert(end.to_owned(), parent);
    }
    assert_eq!(scene.sound("what-if").len(), 3);
    scene.none_is_paused("train");

    // There is no room for another one: nothing of it is left, nobody stands still.
    for node in &scene.nodes {
        scene.ask(&["fleet", "drain", node.name()]);
    }
    let (code, said) = scene.refused(&["cluster", "fork", "train", "third"]);
    assert_eq!(code, Some(3), "{said}");
    let list = scene.ask(&["cluster", "list"]);
    let ids: Vec<&Value> =
        list["clusters"].as_array().expect("clusters").iter().map(|cluster| &cluster["id"]).collect();
    assert_eq!(ids, ["train", "what-if"], "{list}");
    scene.none_is_paused("train");

    for cluster in ["train", "what-if"] {
        scene.ask(&["cluster", "stop", cluster]);
    }
    assert_eq!((scene.all(), scene.ask(&["lease", "list"])["leases"].clone()), (vec![], json!([])));
}

#[test]
fn a_cluster_that_has_lost_a_node_goes_back_to_its_checkpoint_elsewhere() {
    need!(ready_for_guests());
    need!(networks::possible());
    let mut scene = Scene::new(true);
    scene.start("train", "3");
    let before = scene.sound("train");
    let kept = scene.ask(&["cluster", "checkpoint", "train", "noon"]);
    assert_eq!(
        (kept["members"].as_array().map(Vec::len), &kept["at_barrier"]),
        (Some(3), &json!(true)),
        "{kept}"
    );
    assert_eq!(kept["notes"], Value::Null, "all nodes see the templates: {kept}");
    for member in kept["members"].as_array().expect("members") {
        assert!(member["stood_still_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{member}");
        assert!(member["disk_bytes"].as_u64().is_some_and(|bytes| bytes > 16 << 20), "{member}");
    }
    scene.none_is_paused("train");
    let (code, said) = scene.refused(&["cluster", "checkpoint", "train", "noon"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("there is a checkpoint noon"), "{said}");
    // While it runs, it is not restored: each VM would be there twice.
    let (code, said) = scene.refused(&["cluster", "restore", "noon"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("runs on node") && said.contains("vmove cluster stop train"), "{said}");
    assert_eq!(scene.sound("train"), before);

    // A node is lost, with its guests. Whether these run nobody knows until somebody says that it is off.
    let lost = before[0].1.clone();
    let at = scene.nodes.iter().position(|node| node.name() == lost).expect("the node");
    fleet::lose(&mut scene.nodes[at]);
    let (code, said) = scene.refused(&["cluster", "restore", "noon", "--lost", &lost]);
    assert_eq!(code, Some(1), "the others run on: {said}");
    for (vm, node) in before.iter().filter(|(_, node)| *node != lost) {
        scene.node(node).ask(&["stop", vm]).expect("stopped");
    }
    let (code, said) = scene.refused(&["cluster", "restore", "noon"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("does not answer") && said.contains(&format!("--lost {lost}")), "{said}");
    let restored = scene.ask(&["cluster", "restore", "noon", "--lost", &lost]);
    assert_eq!(restored["made_wall_ms"], kept["made_wall_ms"], "{restored}");
    let after = scene.sound("train");
    let names = |all: &[(String, String)]| all.iter().map(|(vm, _)| vm.clone()).collect::<Vec<_>>();
    assert_eq!(names(&after), names(&before));
    assert!(after.iter().all(|(_, node)| *node != lost), "{after:?}");
    assert_eq!(scene.ask(&["fleet", "show", &lost])["node"]["state"], "down");
    // It is a cluster as before: it can grow, and has its checkpoint still.
    assert_eq!(scene.ask(&["cluster", "resize", "train", "4"])["added"][0]["vm"], "train-vm-3");
    assert_eq!(scene.ask(&["cluster", "status", "train"])["checkpoints"], json!(["noon"]));
    scene.ask(&["cluster", "stop", "train"]);
    // Once more, and then the checkpoint is not needed any more.
    scene.ask(&["cluster", "restore", "noon"]);
    assert_eq!(names(&scene.sound("train")), names(&before));
    scene.ask(&["cluster", "forget", "noon"]);
    assert_eq!(scene.ask(&["cluster", "checkpoints"])["checkpoints"], json!([]));
    let (code, said) = scene.refused(&["cluster", "restore", "noon"]);
    assert_eq!(code, Some(1), "{said}");
    for node in scene.nodes.iter().filter(|node| node.name() != lost) {
        let output = node.vfork(&["template", "list", "--json"]).expect("vfork");
        let list: Value = serde_json::from_slice(&output.stdout).expect("a list");
        assert_eq!(list["templates"], json!([]), "{}", node.name());
    }
}

/// `./run demo cluster`.
#[test]
fn the_demonstration_goes_as_it_says() {
    need!(ready_for_guests());
    need!(networks::possible());
    let sandbox = Sandbox::new().expect("a sandbox");
    let pictures = sandbox.folder("pictures").expect("a folder");
    let began = Instant::now();
    vmove_tests::cluster_demo::run(&sandbox, Some(&pictures)).unwrap_or_else(|error| panic!("{error:#}"));
    let took = began.elapsed();
    assert!(
        took < Duration::from_secs(180),
        "expected the demonstration to be over within 3 min, found {took:.1?}"
    );
    assert!(pictures.join("before.svg").exists() && pictures.join("after.svg").exists());
}

#[test]
fn templates_that_only_their_node_has_are_told() {
    need!(ready_for_guests());
    need!(networks::possible());
    let scene = Scene::new(false);
    scene.start("solo", "1");
    scene.sound("solo");
    let kept = scene.ask(&["cluster", "checkpoint", "solo", "here"]);
    let note = kept["notes"][0].as_str().unwrap_or_default();
    assert!(note.contains("template-dir"), "{kept}");
    scene.ask(&["cluster", "stop", "solo"]);
}
