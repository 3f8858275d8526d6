//! The networks of blueprints, made by the adapter that ships on nodes that are network namespaces.
#![cfg(test)]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use vmove_adapter::network::names::{self, Names};
use vmove_guest::config::Config;
use vmove_skip::need;
use vmove_tests::bridge::{Bridge, ready_for_guests};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::Guest;
use vmove_tests::networks::{self, Networks};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

fn shell(script: &str) -> Output {
    let script = format!("PATH=$PATH:/usr/sbin:/sbin\n{script}");
    Command::new("sh").args(["-c", &script]).output().expect("a shell")
}

fn done(script: &str) -> String {
    let output = shell(script);
    assert!(output.status.success(), "{script}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

pub(crate) fn ready() -> Result<()> {
    places::root()?;
    networks::possible()?;
    places::product("vmove-network-adapter")?;
    if shell("command -v dnsmasq").stdout.is_empty() {
        bail!("there is no dnsmasq (Debian: dnsmasq-base)");
    }
    Ok(())
}

/// The adapter, three nodes, and a network on them, which is stopped when this is dropped.
struct Nodes {
    // Dropped after what was made on the nodes.
    networks: Networks,
    sandbox: Sandbox,
    config: PathBuf,
    network: String,
}

impl Nodes {
    fn start() -> Result<Self> {
        let (networks, sandbox) = (Networks::new(3)?, Sandbox::new()?);
        let config = sandbox.folder("network")?.join("adapter.toml");
        let mut nodes = Self { networks, sandbox, config, network: "net".to_owned() };
        let mut text = format!(
            "command = [\"nsenter\", \"--net=/run/netns/{{node}}\"]\nown = \"none\"\nstate = {:?}\n",
            nodes.sandbox.folder("state")?
        );
        for number in nodes.networks.numbers() {
            let address = nodes.networks.address(number).ip();
            text.push_str(&format!("[nodes.{}]\naddress = \"{address}\"\n", nodes.node(number)));
        }
        std::fs::write(&nodes.config, text)?;
        nodes.network = format!("net-{}", std::process::id());
        Ok(nodes)
    }

    fn node(&self, number: u8) -> String {
        self.networks.path(number).file_name().expect("a name").to_string_lossy().into_owned()
    }

    fn nodes(&self) -> Vec<String> {
        self.networks.numbers().map(|number| self.node(number)).collect()
    }

    /// A VM on each node.
    fn request(&self, action: &str) -> Value {
        let net = &self.network;
        let member = |(number, node): (usize, &String)| {
            let name = format!("app-0-vm-{number}");
            json!({
                "name": name, "aliases": [format!("vm-{number}")], "node": node, "interface": names::tap("app", net, &name),
                "mac": names::mac("app", net, &name), "address": names::address(number).expect("an address"),
            })
        };
        let nodes = self.nodes();
        let members: Vec<Value> = nodes.iter().enumerate().map(member).collect();
        let environment =
            json!({ "name": net, "kind": "network", "mode": "private", "nodes": nodes, "members": members });
        json!({ "version": 1, "action": action, "cluster": "app", "environments": [environment] })
    }

    /// The status of the network.
    fn ask(&self, action: &str) -> Value {
        self.send(&self.request(action))
    }

    fn send(&self, request: &Value) -> Value {
        let mut child = Command::new(places::product("vmove-network-adapter").expect("the adapter"))
            .arg("--config")
            .arg(&self.config)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let request = request.to_string();
        child.stdin.take().expect("its input").write_all(request.as_bytes()).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        answer["environments"][0].clone()
    }

    /// All interfaces of all nodes, and the network namespaces of name servers on them.
    fn all(&self) -> String {
        let nodes = self.nodes().join(" ");
        done(&format!(
            "for node in {nodes}; do ip -n $node -br link show | sed 's/[@ ].*//'; ip netns list | grep -o -- \"vmove-.*-$node\" || true; done"
        ))
    }

    /// A machine with the card of the member of this number (from 0) on its node, on the bridge where its tap is. It has asked for an
    /// address as guests do: gives its namespace and the name server that it was told.
    fn guest(&self, number: u8) -> (String, String) {
        let (node, guest) = (self.node(number + 1), format!("{}g", self.node(number + 1)));
        let mac = &self.request("start")["environments"][0]["members"][usize::from(number)]["mac"];
        let bridge = Names::new("app", &self.network).bridge;
        let script = self.sandbox.path().join("udhcpc");
        let text = "#!/bin/sh\n[ \"$1\" = bound ] && ip address add $ip/$mask dev $interface && echo $dns $mtu \"router:$router\"\nexit 0\n";
        std::fs::write(&script, text).expect("a script");
        done(&format!(
            "chmod +x {0}; ip netns add {guest} && ip link add eth0 address {mac} netns {guest} type veth peer name guest netns {node} && ip -n {node} link set guest master {bridge} up && ip -n {guest} link set eth0 mtu 1450 up",
            script.display()
        ));
        let told = done(&format!(
            "nsenter --net=/run/netns/{guest} {} udhcpc -i eth0 -n -q -f -O mtu -t 20 -T 1 -s {} 2>/dev/null",
            busybox(),
            script.display()
        ));
        let (server, rest) = told.trim().split_once(' ').expect("server and more");
        assert_eq!(rest, "1450 router:", "the size of packets, and no way out");
        (guest, server.to_owned())
    }
}

fn busybox() -> String {
    places::busybox().expect("a busybox").display().to_string()
}

impl Drop for Nodes {
    fn drop(&mut self) {
        let _ = self.ask("stop");
        for node in self.nodes() {
            shell(&format!("ip netns del {node}g"));
        }
    }
}

#[test]
fn members_on_three_nodes_reach_each_other_by_name_and_a_stop_leaves_nothing() {
    need!(ready());
    need!(places::busybox());
    let nodes = Nodes::start().expect("nodes");
    let before = nodes.all();
    assert_eq!(nodes.ask("status")["state"], "absent");
    let started = nodes.ask("start");
    assert_eq!(
        (&started["state"], started["nodes"].as_array().map(Vec::len)),
        (&json!("running"), Some(3)),
        "{started}"
    );
    let made = nodes.all();
    assert_eq!(nodes.ask("start"), started, "asked again, it is as it was");
    assert_eq!(nodes.all(), made);

    let guests: Vec<(String, String)> = (0..3).map(|number| nodes.guest(number)).collect();
    let servers: Vec<&str> = guests.iter().map(|(_, server)| server.as_str()).collect();
    assert_eq!(servers, ["10.213.255.0", "10.213.255.1", "10.213.255.2"], "each is answered on its own node");
    // As a guest does: by the name server that it was told. The third answers for a name without its cluster.
    for (from, to) in [(0, "app-0-vm-2"), (1, "vm-0"), (2, "vm-1")] {
        let (guest, server) = &guests[from];
        let resolv = nodes.sandbox.path().join("resolv.conf");
        std::fs::write(&resolv, format!("nameserver {server}\n")).expect("a file");
        let script = format!(
            "mount --bind {} /etc/resolv.conf && {} ping -c 1 -W 5 {to}",
            resolv.display(),
            busybox()
        );
        let said = done(&format!("nsenter --net=/run/netns/{guest} unshare --mount sh -c '{script}'"));
        assert!(said.contains("1 packets received"), "{said}");
    }
    // The nodes themselves are not on the network.
    let node = nodes.node(1);
    let found = shell(&format!("nsenter --net=/run/netns/{node} {} ping -c 1 -W 1 10.213.0.1", busybox()));
    assert!(!found.status.success(), "{found:?}");

    // A part that is lost is told, and comes again.
    let bridge = Names::new("app", &nodes.network).vxlan;
    done(&format!("ip -n {node} link del {bridge}"));
    let broken = nodes.ask("status");
    assert_eq!(broken["state"], "failed");
    assert!(
        broken["message"].as_str().is_some_and(|why| why.contains(&node) && why.contains(&bridge)),
        "{broken}"
    );
    assert_eq!(nodes.ask("start")["state"], "running");

    for number in 1..=3 {
        done(&format!("ip netns del {}g", nodes.node(number)));
    }
    for _ in 0..2 {
        assert_eq!(nodes.ask("stop")["state"], "absent");
        assert_eq!(nodes.all(), before);
        assert_eq!(nodes.ask("status")["state"], "absent");
    }
}

#[test]
fn a_name_that_is_taken_is_refused_and_nothing_changes() {
    need!(ready());
    let nodes = Nodes::start().expect("nodes");
    let taken = names::tap("app", &nodes.network, "app-0-vm-1");
    let third = nodes.node(3);
    done(&format!("ip -n {third} link add {taken} type bridge"));
    let before = nodes.all();
    let refused = nodes.ask("start");
    let why = refused["message"].as_str().unwrap_or_default();
    assert_eq!(refused["state"], "failed");
    assert!(why.contains(&taken) && why.contains(&third) && why.contains("is taken"), "{why}");
    assert_eq!((nodes.all(), &nodes.ask("status")["state"]), (before.clone(), &json!("absent")));
    // It is not removed with ours either.
    assert_eq!(nodes.ask("stop")["state"], "absent");
    assert_eq!(nodes.all(), before);
    done(&format!("ip -n {third} link del {taken}"));

    // Somebody else's VXLAN has the identifier that would be ours.
    let vni = Names::new("app", &nodes.network).first_vni;
    done(&format!("ip -n {third} link add other type vxlan id {vni} dstport 4789 local 10.77.0.3"));
    assert_eq!(nodes.ask("start")["state"], "running");
    let vxlan = Names::new("app", &nodes.network).vxlan;
    for node in nodes.nodes() {
        let shown = done(&format!("ip -n {node} -d link show {vxlan}"));
        assert!(shown.contains(&format!("vxlan id {}", vni + 1)), "{shown}");
    }
}

#[test]
fn a_public_network_is_that_of_an_interface_that_nothing_else_uses() {
    need!(ready());
    let nodes = Nodes::start().expect("nodes");
    let text = std::fs::read_to_string(&nodes.config).expect("its configuration");
    let public = |interface: &str| {
        std::fs::write(&nodes.config, format!("public = \"{interface}\"\n{text}")).expect("a file");
        let mut request = nodes.request("start");
        request["environments"][0]["mode"] = json!("public");
        nodes.send(&request)
    };
    for node in nodes.nodes() {
        done(&format!(
            "ip -n {node} link add br0 type bridge; ip -n {node} link add spare type veth peer name far"
        ));
    }
    let before = nodes.all();
    for (interface, wanted) in [("eth0", "has addresses of the node"), ("eth7", "has no interface eth7")] {
        let refused = public(interface);
        assert!(refused["message"].as_str().is_some_and(|why| why.contains(wanted)), "{refused}");
        assert_eq!(nodes.all(), before);
    }
    let own = Names::new("app", &nodes.network).bridge;
    for (interface, bridge) in [("br0", "br0"), ("spare", own.as_str())] {
        let started = public(interface);
        assert_eq!(started["state"], "running", "{started}");
        for (number, node) in nodes.nodes().iter().enumerate() {
            let tap = names::tap("app", &nodes.network, &format!("app-0-vm-{number}"));
            let ports = done(&format!("ip -n {node} -br link show master {bridge}"));
            assert!(ports.contains(&tap) && (interface == "br0" || ports.contains("spare")), "{ports}");
        }
        assert_eq!(nodes.ask("stop")["state"], "absent");
        assert_eq!(nodes.all(), before);
    }
}

#[test]
fn the_adapter_keeps_its_contract() {
    need!(ready());
    let nodes = Nodes::start().expect("nodes");
    let program = format!(
        "{} --config {}",
        places::product("vmove-network-adapter").expect("the adapter").display(),
        nodes.config.display()
    );
    let before = nodes.all();
    let mut command = Command::new(places::product("vmove").expect("vmove"));
    command.args(["--json", "adapter", "check", &program, "--kind", "network"]);
    for node in &nodes.nodes()[..2] {
        command.args(["--node", node]);
    }
    let output = command.output().expect("it runs");
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(output.status.success(), "{answer}");
    assert_eq!(answer["lines"].as_array().map(Vec::len), Some(15));
    assert_eq!(nodes.all(), before);
}

/// A blueprint of two VMs, and its network on this host.
struct Blueprint {
    file: String,
    adapter: String,
    bridge: Bridge,
}

impl Blueprint {
    fn ask(&self, arguments: &[&str]) -> (Option<i32>, Value) {
        let arguments = [&["blueprint"], arguments, &[&self.file, "--adapter", &self.adapter]].concat();
        let output = self.bridge.command(&arguments).expect("vmove").output().expect("it runs");
        (output.status.code(), serde_json::from_slice(&output.stdout).unwrap_or_default())
    }
}

impl Drop for Blueprint {
    fn drop(&mut self) {
        // Also after a failed test, nothing of it stays on this host.
        self.ask(&["stop"]);
    }
}

#[test]
fn the_vms_of_a_blueprint_are_on_its_network_until_it_is_stopped() {
    need!(ready_for_guests());
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    // Not on every machine may others than root open /dev/net/tun.
    let options = NodeOptions { config: "[qemu]\nuser = \"root\"\n".to_owned(), ..NodeOptions::default() };
    let node = Node::start(&sandbox, "n1", options).expect("a daemon");
    let bridge = Bridge::start(&sandbox, std::slice::from_ref(&node)).expect("a bridge");
    bridge.publish(&node, 2, 1024).expect("published");
    bridge.publish_topology("SwitchName=l Nodes=n1\n").expect("published");
    let state = sandbox.folder("networks").expect("a folder");
    let config = bridge
        .write("adapter.toml", &format!("own = \"n1\"\nqemu_user = \"root\"\nstate = {state:?}\n"))
        .expect("a file");
    let program = places::product("vmove-network-adapter").expect("the adapter");
    let adapter = format!("network={} --config {config}", program.display());

    let guest = Guest::new(192, Config::default()).expect("a QEMU");
    let card = ["-netdev", "tap,id=net,ifname={network:private},script=no,downscript=no", "-device"];
    let mut command = guest.command_line("{vmdir}/serial.log").expect("a command line");
    command.extend(card.map(str::to_owned));
    command.push("virtio-net-pci,romfile=,netdev=net,mac={mac:private}".to_owned());
    let cluster = format!("bp{}", std::process::id());
    let vm = |name: &str, command: &[String]| json!({ "name": name, "kind": "vm", "request": "vcpus=1; memory_mb=192", "command": command });
    let text = |command: &[String]| {
        let connections = json!([{ "from": "web", "to": "db" }]);
        json!({ "name": cluster, "environments": [vm("web", command), vm("db", command)], "connections": connections }).to_string()
    };
    let file = bridge.write("blueprint.yaml", &text(&command)).expect("a file");
    let blueprint = Blueprint { file, adapter, bridge };
    let network = format!("{cluster}-0-private");
    let names = Names::new(&cluster, &network);
    let here = || {
        done(&format!(
            "ip -br link show | grep -c '{}\\|{}' || true",
            &names.bridge[2..],
            names::tap(&cluster, &network, &format!("{cluster}-0-web-0"))
        ))
    };
    let before = done("ip -br link show | sed 's/[@ ].*//' | sort");

    // A network that the VM is not on: refused before anything is done.
    let wrong: Vec<String> =
        command.iter().map(|word| word.replace("{mac:private}", "{mac:public}")).collect();
    std::fs::write(&blueprint.file, text(&wrong)).expect("a file");
    let (code, answer) = blueprint.ask(&["--run"]);
    assert!(
        code == Some(2) && answer["error"].as_str().is_some_and(|why| why.contains("{mac:private}")),
        "{answer}"
    );
    // VMs that do not start have no network.
    let broken: Vec<String> =
        command.iter().map(|word| word.replace("virtio-net-pci", "no-such-card")).collect();
    std::fs::write(&blueprint.file, text(&broken)).expect("a file");
    let (code, answer) = blueprint.ask(&["--run"]);
    assert_eq!(
        (code, &answer["details"]["state"], here().trim()),
        (Some(1), &json!("stopped"), "0"),
        "{answer}"
    );
    std::fs::write(&blueprint.file, text(&command)).expect("a file");

    let (code, answer) = blueprint.ask(&["--run"]);
    assert_eq!((code, &answer["together"][0]["made"][0]["state"]), (Some(0), &json!("running")), "{answer}");
    for vm in ["web", "db"] {
        let tap = names::tap(&cluster, &network, &format!("{cluster}-0-{vm}-0"));
        let shown = done(&format!("ip link show {tap}"));
        // With a QEMU behind it, it has a carrier.
        assert!(shown.contains("LOWER_UP") && shown.contains(&format!("master {}", names.bridge)), "{shown}");
    }
    let (_, status) = blueprint.ask(&["status"]);
    let kinds: Vec<&str> =
        status["elements"].as_array().into_iter().flatten().filter_map(|own| own["kind"].as_str()).collect();
    assert_eq!((&status["state"], kinds), (&json!("running"), vec!["network", "vm", "vm"]), "{status}");
    let (code, stopped) = blueprint.ask(&["stop"]);
    assert_eq!((code, &stopped["state"]), (Some(0), &json!("stopped")), "{stopped}");
    assert_eq!(done("ip -br link show | sed 's/[@ ].*//' | sort"), before);
}
