//! Nodes that take only VMs which a bridge has granted, also those that come from other nodes.
#![cfg(test)]

use std::time::{Duration, Instant};

use serde_json::Value;
use vmove_grant::SecretKey;
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::bridge::{Bridge, ready_for_guests, until};
use vmove_tests::daemon::Node;
use vmove_tests::fleet;
use vmove_tests::guest::{Guest, failures};
use vmove_tests::networks::{self, Networks};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::vmove;

const NODES: u8 = 3;

/// Daemons that require grants, and their bridge.
struct Site {
    nodes: Vec<Node>,
    bridge: Bridge,
    line: Vec<String>,
    _networks: Networks,
    _sandbox: Sandbox,
}

impl Site {
    fn start() -> Self {
        Self::start_with("", "")
    }

    /// With more in the configurations of the bridge and of the nodes.
    fn start_with(of_bridge: &str, of_nodes: &str) -> Self {
        let networks = Networks::new(NODES).expect("namespaces");
        let sandbox = Sandbox::new().expect("a sandbox");
        let (key, text) = SecretKey::generate().expect("a key");
        let key_file = sandbox.path().join("grant.key");
        std::fs::write(&key_file, text).expect("a file");
        let socket = format!("unix:{}/bridge/c.sock", sandbox.path().display());
        let of_nodes = of_nodes.replace("SOCKET", &socket);
        let config = |_| format!("[grants]\nkeys = [\"{}\"]\nrequired = true\n{of_nodes}", key.public());
        let nodes = fleet::daemons(&sandbox, &networks, config).expect("daemons");
        let bridge = Bridge::start_with(&sandbox, &nodes, &format!("grant_key = {key_file:?}\n{of_bridge}"));
        let bridge = bridge.expect("a bridge");
        nodes.iter().for_each(|node| bridge.publish(node, 2, 1024).expect("published"));
        bridge.publish_topology("SwitchName=l Nodes=n[1-3]\n").expect("published");
        let config = Config { working_set_mib: 16, rate: Rate::PagesPerSecond(500), ..Config::default() };
        let guest = Guest::new(192, config).expect("a QEMU");
        let line = guest.command_line("{vmdir}/serial.log").expect("a command line");
        Self { nodes, bridge, line, _networks: networks, _sandbox: sandbox }
    }

    /// Starts a cluster of one VM, and says what it is named.
    fn start_cluster(&self, id: &str) -> String {
        let text = ["cluster", "start", "--text", "vcpus=1; memory_mb=192", "--cluster", id];
        let more = ["--holder", "test", "--"];
        let line: Vec<&str> = self.line.iter().map(String::as_str).collect();
        self.bridge.ask(&[&text[..], &more, &line].concat()).expect("started");
        let listed = self.bridge.ask(&["lease", "show", id]).expect("the lease");
        listed["held"][0]["vm"].as_str().expect("a name").to_owned()
    }

    /// The node that a VM runs on, in a grant of this lease.
    fn of(&self, vm: &str, lease: &str) -> &Node {
        let has = |node: &&Node| node.vms().expect("a list").iter().any(|name| name == vm);
        let found: Vec<&Node> = self.nodes.iter().filter(has).collect();
        assert_eq!(found.len(), 1, "{vm} is on one node");
        assert_eq!(found[0].ask(&["show", vm]).expect("it is shown")["lease"], lease, "it is in its grant");
        found[0]
    }

    /// The peer port of a node other than this one.
    fn elsewhere(&self, node: &Node) -> String {
        let other = self.nodes.iter().find(|other| other.name() != node.name()).expect("another node");
        other.listen().to_string()
    }

    fn without_grant(&self) -> u64 {
        let count = |node: &Node| node.ask(&["node"]).expect("the node")["vms_without_grant"].as_u64();
        self.nodes.iter().map(|node| count(node).expect("a count")).sum()
    }
}

#[test]
fn a_vm_that_moves_comes_into_a_grant_of_the_node_that_it_comes_to() {
    need!(ready_for_guests());
    need!(networks::possible());
    let site = Site::start();
    let vm = site.start_cluster("vc");

    // Past the bridge it goes nowhere, and stays in its grant.
    let node = site.of(&vm, "vc");
    let other = &site.elsewhere(node);
    let past = vmove(node, &["migrate", &vm, "--to", other]).expect("an end");
    assert!(
        past.code == 3 && past.error().contains("comes without a grant"),
        "{} {}",
        past.answer,
        past.said
    );
    let check = vmove(node, &["check", &vm, "--to", other]).expect("an answer");
    let codes: Vec<&Value> =
        check.answer["blockers"].as_array().expect("a list").iter().map(|blocker| &blocker["code"]).collect();
    assert_eq!(codes, ["grant"], "{}", check.answer);
    let odd = vmove(node, &["migrate", &vm, "--to", other, "--grant", "e30.AA"]).expect("an end");
    assert!(odd.code == 3 && odd.answer["blockers"][0]["code"] == "grant", "{} {}", odd.answer, odd.said);
    site.of(&vm, "vc");

    // By the bridge it does, and to and fro.
    for _ in 0..3 {
        let from = site.of(&vm, "vc").name().to_owned();
        let plan = site.bridge.ask(&["plan", "evacuate", &from]).expect("a plan");
        let id = plan["id"].as_str().expect("an id");
        let done = site.bridge.ask(&["plan", "run", id]).expect("the plan is run");
        assert_eq!(done["state"]["is"], "done", "{done}");
        site.bridge.ask(&["fleet", "resume", &from]).expect("resumed");
        let now = site.of(&vm, "vc");
        assert_ne!(now.name(), from);
        assert_eq!(failures(&now.vm(&vm).expect("it is there").console()), Vec::<String>::new());
    }
    assert_eq!(site.without_grant(), 0);
    // Whoever it left has its share free again, for another VM that needs all of the node.
    until("the places that it left are free", || {
        let text =
            ["place", "--text", "vcpus=2; memory_mb=192", "--count", "2", "--cluster", "two", "--id", "two"];
        let line: Vec<&str> = site.line.iter().map(String::as_str).collect();
        let words = [&text[..], &["--holder", "test", "--run", "--"], &line].concat();
        site.bridge.command(&words).expect("vmove").output().expect("it runs").status.success()
    });
}

#[test]
fn children_and_guests_of_templates_come_into_grants_of_their_nodes() {
    need!(ready_for_guests());
    need!(networks::possible());
    let site = Site::start();
    let vm = site.start_cluster("vc");
    let node = site.of(&vm, "vc");

    // Past the bridge there are no children, here or elsewhere, and no guest of a template.
    let other = site.elsewhere(node);
    for to in [&[][..], &["--to", &other]] {
        let words = [&["--json", "create", vm.as_str(), "--count", "1"], to].concat();
        let past = node.vfork(&words).expect("vfork");
        let said = String::from_utf8_lossy(&past.stdout);
        assert!(past.status.code() == Some(3) && said.contains("comes without a grant"), "{to:?}: {said}");
    }
    assert_eq!((site.without_grant(), node.vms().expect("a list")), (0, vec![vm.clone()]));

    // By the bridge there are, each in a grant of its own, on as many nodes as it takes.
    let socket = site.bridge.socket();
    let create = ["create", &vm, "--place", "3", "--cluster", "copy", "--bridge", &socket, "--json"];
    let output = node.vfork(&create).expect("vfork");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let forked: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let children = forked["members"].as_array().expect("a list").clone();
    assert_eq!(children.len(), 3, "{forked}");
    let mut on = std::collections::BTreeSet::new();
    for child in &children {
        let child = child["vm"].as_str().expect("a name");
        let at = site.of(child, "copy");
        on.insert(at.name().to_owned());
        assert_eq!(failures(&at.vm(child).expect("it is there").console()), Vec::<String>::new());
    }
    assert!(on.len() > 1, "the parent's node has no room for all: {on:?}");
    assert_eq!(site.without_grant(), 0);
    site.bridge.ask(&["cluster", "stop", "copy"]).expect("stopped");

    // A checkpoint is restored into a grant, too.
    site.bridge.ask(&["cluster", "checkpoint", "vc", "kept"]).expect("kept");
    site.bridge.ask(&["cluster", "stop", "vc"]).expect("stopped");
    let restored = site.bridge.ask(&["cluster", "restore", "kept"]).expect("restored");
    let again = restored["members"][0]["vm"].as_str().unwrap_or_else(|| panic!("{restored}"));
    site.of(again, "vc");
    assert_eq!(site.without_grant(), 0);
}

/// The bridge would look at a node once in ten minutes. The hook that ships tells it of an end at once.
#[test]
fn a_node_tells_the_bridge_what_has_ended() {
    need!(ready_for_guests());
    need!(networks::possible());
    let hook =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/hooks/tell-bridge.toml"))
            .expect("the example");
    let vmove = places::product("vmove").expect("vmove");
    let told = format!("{} fleet --bridge SOCKET look", vmove.display());
    let site = Site::start_with("look_s = 600\n", &hook.replace("vmove fleet look", &told));
    let vm = site.start_cluster("vc");
    let node = site.of(&vm, "vc");
    let held =
        || site.bridge.ask(&["lease", "list"]).expect("a list")["leases"].as_array().map_or(0, Vec::len);
    assert_eq!(held(), 1);
    let listed = || site.bridge.ask(&["fleet", "show", node.name()]).expect("a node")["not_listed"].is_null();
    until("the bridge looks at the node", listed);
    // Past the bridge, as by its guest itself.
    node.ask(&["stop", &vm]).expect("stopped");
    let stopped = Instant::now();
    while held() > 0 {
        assert!(stopped.elapsed() < Duration::from_secs(10), "its lease has not ended: {}", node.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    eprintln!("given back after {:?}", stopped.elapsed());
}
