//! Networks of blueprints on hosts that are reached by ssh alone: real servers of it, and guests that ask for their addresses themselves.
#![cfg(test)]

use std::cell::RefCell;
use std::net::IpAddr;
use std::path::Path;

use serde_json::{Value, json};
use vmove_adapter::network::names::{self, Names};
use vmove_guest::config::{Address, Config};
use vmove_skip::need;
use vmove_tests::bridge::{ready_for_guests, until};
use vmove_tests::guest::{Guest, VIRTIO, failures};
use vmove_tests::hosts::Host;
use vmove_tests::lan;
use vmove_tests::networks::Networks;
use vmove_tests::places;
use vmove_tests::process::Guarded;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::ssh::{Server, Ssh};

use crate::networks;

const NAMES: [&str; 3] = ["node1", "node2", "node3"];

/// Hosts, each with a server of ssh. On `node1` runs what an operator starts.
pub(crate) struct Site {
    servers: RefCell<Vec<Option<Server>>>,
    daemons: Vec<Guarded>,
    pub(crate) hosts: Vec<Host>,
    ssh: Ssh,
    networks: Networks,
    // Last: it removes whatever is left.
    sandbox: Sandbox,
}

impl Site {
    pub(crate) fn start(count: u8) -> Self {
        let networks = Networks::new(count).expect("namespaces");
        let sandbox = Sandbox::new().expect("a sandbox");
        let ssh = Ssh::new(&sandbox).expect("keys");
        let mut site = Self {
            servers: RefCell::default(),
            daemons: Vec::new(),
            hosts: Vec::new(),
            ssh,
            networks,
            sandbox,
        };
        let all: Vec<(&str, IpAddr)> =
            NAMES.into_iter().zip(1..=count).map(|(name, n)| (name, site.address(n))).collect();
        for (name, number) in NAMES.into_iter().zip(1..=count) {
            let mut host = Host::start(&site.sandbox, &site.networks, number, name).expect("a host");
            site.ssh.set_up(&mut host, &all).expect("ssh");
            let config = host.folder().join("network-adapter.toml");
            // Not on every machine may others than root open /dev/net/tun.
            std::fs::write(&config, "qemu_user = \"root\"\nlimit_s = 10\n").expect("a file");
            host.run(&format!("mkdir -p /etc/vmove && cp {} /etc/vmove/", config.display()))
                .expect("configured");
            site.hosts.push(host);
            site.servers.borrow_mut().push(None);
            site.serve(number);
        }
        site
    }

    fn address(&self, number: u8) -> IpAddr {
        self.networks.address(number).ip()
    }

    /// From now on, a host (from 1) is reached.
    fn serve(&self, number: u8) {
        let at = usize::from(number) - 1;
        let server = self.ssh.serve(&self.hosts[at], self.address(number)).expect("sshd");
        self.servers.borrow_mut()[at] = Some(server);
    }

    /// From now on, it is not.
    fn silence(&self, number: u8) {
        self.servers.borrow_mut()[usize::from(number) - 1] = None;
    }

    /// Runs `vmoved` on each host, and `vbridged` on the first, with nothing but their defaults.
    pub(crate) fn start_daemons(&mut self) {
        let nodes: String = (1..)
            .zip(&self.hosts)
            .map(|(n, host)| format!("{} = \"{}\"\n", host.name(), self.networks.address(n)))
            .collect();
        for (number, host) in (1..).zip(&self.hosts) {
            let config = host.folder().join("vmoved.toml");
            let listen = self.networks.address(number);
            std::fs::write(&config, format!("[qemu]\nuser = \"root\"\n[nodes]\n{nodes}")).expect("a file");
            self.daemons.push(
                host.spawn(&format!("vmoved --insecure --listen {listen} --config {}", config.display()))
                    .expect("vmoved starts"),
            );
            until("vmoved answers", || host.run("vmove list").is_ok());
        }
        let first = &self.hosts[0];
        self.daemons.push(first.spawn("vbridged").expect("vbridged starts"));
        until("the bridge answers", || first.run("vmove fleet list").is_ok());
        for host in &self.hosts {
            // Room for one VM.
            let numa = json!([{ "id": 0, "socket": 0, "cores": 1, "memory": 512 }]);
            let inventory = json!({ "name": host.name(), "numa": numa }).to_string();
            self.on_first(&format!("vmove fleet publish {}", self.file("inventory.json", &inventory)));
        }
        let all: Vec<&str> = self.hosts.iter().map(Host::name).collect();
        let topology = self.file("topology.conf", &format!("SwitchName=leaf Nodes={}\n", all.join(",")));
        self.on_first(&format!("vmove topology --import {topology} --publish"));
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.hosts[0].folder().join(name);
        std::fs::write(&path, text).expect("a file");
        path.display().to_string()
    }

    pub(crate) fn on_first(&self, line: &str) -> String {
        self.hosts[0].run(line).unwrap_or_else(|error| panic!("{error:#}\n{}", self.hosts[0].log()))
    }

    /// Exit code and answer of a command that answers in JSON.
    pub(crate) fn answer(&self, line: &str) -> (Option<i32>, Value) {
        let output = self.hosts[0].shell(line).output().expect("a shell");
        let answer = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{line}: {output:?}\n{}", self.hosts[0].log()));
        (output.status.code(), answer)
    }

    /// What a VM on a host (from 1) has printed.
    pub(crate) fn console(&self, number: u8, vm: &str) -> String {
        let host = &self.hosts[usize::from(number) - 1];
        let shown = host.run(&format!("vmove --json show {vm}")).expect("it runs");
        let shown: Value = serde_json::from_str(&shown).expect("JSON");
        let log = Path::new(shown["dir"].as_str().expect("its folder")).join("serial.log");
        // Its file is there when QEMU runs.
        host.run(&format!("cat {}", log.display())).unwrap_or_default()
    }

    /// Interfaces of a host (from 1) that belong to networks of blueprints, and namespaces of name servers.
    pub(crate) fn made(&self, number: u8) -> String {
        let host = &self.hosts[usize::from(number) - 1];
        host.run("ip -br link show | grep -o '^v[bxdt][0-9a-f]\\{10\\}' || true; ip netns list").expect("ip")
    }
}

pub(crate) fn ready() -> anyhow::Result<()> {
    networks::ready()?;
    places::ssh().map(drop)
}

/// QEMU's arguments for a card on the private network of a VM.
pub(crate) fn card() -> [&'static str; 4] {
    [
        "-netdev",
        "tap,id=net,ifname={network:private},script=no,downscript=no",
        "-device",
        "virtio-net-pci,romfile=,netdev=net,mac={mac:private}",
    ]
}

/// A blueprint of two VMs that call each other.
struct Pair<'a> {
    site: &'a Site,
    cluster: String,
    file: String,
}

impl<'a> Pair<'a> {
    fn new(site: &'a Site) -> Self {
        let cluster = "app".to_owned();
        let vm = |name: &str, other: &str| {
            let config = Config { working_set_mib: 16, address: Some(Address::Dhcp), ..Config::default() };
            let mut guest = Guest::new(192, config).expect("a QEMU");
            guest.modules = [&VIRTIO[..], &lan::MODULES].concat();
            guest.neighbour = Some(other.to_owned());
            let mut command = guest.command_line("{vmdir}/serial.log").expect("a command line");
            command.extend(card().map(str::to_owned));
            json!({ "name": name, "kind": "vm", "request": "vcpus=1; memory_mb=192", "command": command })
        };
        let text = json!({ "name": cluster, "environments": [vm("web", "db"), vm("db", "web-0")], "connections": [{ "from": "web", "to": "db" }] });
        let file = site.file("app.yaml", &text.to_string());
        Self { site, cluster, file }
    }

    fn ask(&self, action: &str) -> (Option<i32>, Value) {
        self.site.answer(&format!(
            "vmove --json blueprint {action} {} --adapter network=vmove-network-adapter",
            self.file
        ))
    }

    /// Where a VM is: the number of its host.
    fn host_of(&self, vm: &str) -> Option<u8> {
        let name = self.name(vm);
        (1..)
            .zip(&self.site.hosts)
            .find(|(_, host)| host.run(&format!("vmove show {name}")).is_ok())
            .map(|(n, _)| n)
    }

    fn name(&self, vm: &str) -> String {
        format!("{}-0-{vm}-0", self.cluster)
    }

    fn console(&self, vm: &str) -> String {
        self.site.console(self.host_of(vm).expect("it runs"), &self.name(vm))
    }
}

#[test]
fn guests_ask_for_their_addresses_and_reach_each_other_by_name_across_hosts() {
    need!(ready_for_guests());
    need!(ready());
    let mut site = Site::start(2);
    site.start_daemons();
    let pair = Pair::new(&site);
    let network = format!("{}-0-private", pair.cluster);
    let (code, answer) = pair.ask("--run");
    assert_eq!(code, Some(0), "{answer}");
    let web = pair.host_of("web").expect("it runs");
    assert_ne!(pair.host_of("db"), Some(web), "one on each host");
    for (vm, address, other) in
        [("web", "10.213.0.1", "PING db (10.213.0.2)"), ("db", "10.213.0.2", "PING web-0 (10.213.0.1)")]
    {
        until("the guest has reached the other", || pair.console(vm).contains("VMOVE-GUEST REACHED"));
        let console = pair.console(vm);
        assert_eq!(failures(&console), Vec::<String>::new(), "{console}");
        let own = pair.host_of(vm).expect("it runs") - 1;
        let told = format!("VMOVE-GUEST ADDRESS {address}/16 mtu=1450 dns=10.213.255.{own} router=");
        assert!(console.contains(&told) && console.contains(&format!("REACHED {other}")), "{console}");
    }
    // A guest that moves within the group keeps its address, and is reached from both hosts.
    let (moved, address) = if web == 2 { ("web", "10.213.0.1") } else { ("db", "10.213.0.2") };
    site.hosts[1]
        .run(&format!("vmove migrate {} --to node1 --mode postcopy", pair.name(moved)))
        .expect("it moves");
    assert_eq!([pair.host_of("web"), pair.host_of("db")], [Some(1), Some(1)]);
    for host in &site.hosts {
        let space = names::of_node(&Names::new(&pair.cluster, &network), host.name());
        let busybox = places::busybox().expect("busybox");
        host.run(&format!("ip netns exec {space} {} ping -c 1 -W 10 {address}", busybox.display()))
            .expect("an answer");
    }
    let (code, stopped) = pair.ask("stop");
    assert_eq!((code, &stopped["state"]), (Some(0), &json!("stopped")), "{stopped}");
    assert_eq!((site.made(1), site.made(2)), (String::new(), String::new()));
}

#[test]
fn a_blueprint_is_stopped_while_a_host_of_it_is_lost_and_says_what_is_left() {
    need!(ready_for_guests());
    need!(ready());
    let mut site = Site::start(2);
    site.start_daemons();
    let pair = Pair::new(&site);
    let (code, answer) = pair.ask("--run");
    assert_eq!(code, Some(0), "{answer}");
    let left = |answer: &Value| answer["details"]["left"].to_string();
    // Neither the bridge nor the adapter reaches the second host: its VM may run, and keeps its lease and the networks.
    site.silence(2);
    let (code, answer) = pair.ask("stop");
    assert_eq!(answer["code"], "not-stopped", "{answer}");
    assert!(code != Some(0) && left(&answer).contains("lease app.0"), "{answer}");
    assert!(left(&answer).contains("networks, which are kept for the VMs that may still run"), "{answer}");
    // It is switched off, and the operator says so.
    let lost = if pair.host_of("web") == Some(2) { "web" } else { "db" };
    site.hosts[1].run(&format!("vmove stop {}", pair.name(lost))).expect("its VM ends");
    site.on_first("vmove lease release app.0");
    let (_, answer) = pair.ask("stop");
    assert_eq!(answer["code"], "not-stopped", "{answer}");
    for wanted in ["network app-0-private is failed: node node2 still has its part", "--forget node2"] {
        assert!(left(&answer).contains(wanted), "{answer}");
    }
    assert!(!left(&answer).contains("lease"), "{answer}");
    assert_eq!(site.made(1), "", "the other is clean");
    assert!(site.made(2).contains("vmove-"));
    let (_, status) = pair.ask("status");
    let network = &status["elements"][0];
    assert_eq!(
        (&network["name"], &network["state"]),
        (&json!("app-0-private"), &json!("failed")),
        "{status}"
    );
    assert!(network["message"].to_string().contains("the next run or stop removes it"), "{status}");
    // It is back.
    site.serve(2);
    let (code, stopped) = pair.ask("stop");
    assert_eq!((code, &stopped["state"]), (Some(0), &json!("stopped")), "{stopped}");
    assert_eq!((site.made(1), site.made(2)), (String::new(), String::new()));
}

/// What the network adapter on `node1` answers for a network on all hosts.
fn network(site: &Site, action: &str, nodes: &[&str]) -> Value {
    let member = |node: &&str| {
        let name = format!("app-0-{node}-0");
        json!({
            "name": name, "node": node, "interface": names::tap("app", "net", &name), "mac": names::mac("app", "net", &name), "address": "10.213.0.1",
        })
    };
    let members: Vec<Value> = nodes.iter().map(member).collect();
    let environment =
        json!({ "name": "net", "kind": "network", "mode": "private", "nodes": nodes, "members": members });
    let request = json!({ "version": 1, "action": action, "cluster": "app", "environments": [environment] });
    let file = site.file("request.json", &request.to_string());
    site.answer(&format!("vmove-network-adapter <{file}")).1["environments"][0].clone()
}

fn state_and_message(answer: &Value) -> (&str, &str) {
    (answer["state"].as_str().unwrap_or_default(), answer["message"].as_str().unwrap_or_default())
}

#[test]
fn a_host_that_lets_nobody_in_is_told_with_the_reason_and_nothing_is_made() {
    need!(ready());
    let site = Site::start(2);
    let known = std::fs::read_to_string(site.ssh.path("known_hosts")).expect("keys");
    let (first, second) = known.trim_end().split_once('\n').expect("two hosts");
    let stranger = site.ssh.strange_key("stranger").expect("a key");
    let other = format!("{first}\nnode2,{} {stranger}", site.address(2));
    let refused = |site: &Site, wanted: &[&str]| {
        let answer = network(site, "start", &NAMES[..2]);
        let (state, why) = state_and_message(&answer);
        assert!(state == "failed" && why.starts_with("node node2 was not reached: "), "{answer}");
        assert!(wanted.iter().all(|wanted| why.contains(wanted)), "{answer}");
        assert_eq!((site.made(1), site.made(2)), (String::new(), String::new()));
        assert_eq!(network(site, "status", &[])["state"], "absent");
    };
    let file = |name: &str| site.ssh.path(name);
    // A host key that nobody knows, and one that has changed.
    std::fs::write(file("known_hosts"), format!("{first}\n")).expect("a file");
    refused(&site, &["Host key verification failed", "put it into known_hosts"]);
    std::fs::write(file("known_hosts"), other).expect("a file");
    refused(&site, &["has changed", "Host key verification failed", "compare its host key"]);
    std::fs::write(file("known_hosts"), format!("{first}\n{second}\n")).expect("a file");
    // A key that does not open.
    let keys = std::fs::read_to_string(file("authorized_keys")).expect("a key");
    std::fs::write(file("authorized_keys"), stranger).expect("a file");
    refused(&site, &["Permission denied (publickey", "let root of this host log in there by a key"]);
    std::fs::write(file("authorized_keys"), keys).expect("a file");
    // Nobody listens; and nobody is there at all.
    site.silence(2);
    refused(&site, &["Connection refused", "see whether it is up"]);
    site.hosts[1].run("ip link set eth0 down").expect("ip");
    refused(&site, &["see whether it is up"]);
    site.hosts[1].run("ip link set eth0 up").expect("ip");
    site.serve(2);
    assert_eq!(network(&site, "start", &NAMES[..2])["state"], "running");
    network(&site, "stop", &[]);
    assert_eq!((site.made(1), site.made(2)), (String::new(), String::new()));
}

#[test]
fn a_network_goes_from_the_others_at_once_while_a_host_is_not_reached_and_from_it_later() {
    need!(ready());
    let site = Site::start(3);
    let all = |site: &Site| [1, 2, 3].map(|number| site.made(number));
    assert_eq!(network(&site, "start", &NAMES)["state"], "running");
    let made = all(&site);
    assert!(made.iter().all(|own| own.contains("vx") && own.contains("vmove-")), "{made:?}");

    site.silence(2);
    network(&site, "stop", &[]);
    assert_eq!(all(&site), [String::new(), made[1].clone(), String::new()], "the others are clean");
    let answer = network(&site, "status", &[]);
    let (state, why) = state_and_message(&answer);
    assert_eq!(state, "failed");
    for wanted in [
        "node node2 still has its part",
        "Connection refused",
        "the next run or stop removes it",
        "--forget node2",
    ] {
        assert!(why.contains(wanted), "{answer}");
    }
    // It runs anew elsewhere, and says what is left. The identifier is another: what is left on node2 does not reach into it.
    let vni = |site: &Site, host: usize| {
        let shown = site.hosts[host].run("ip -d link show type vxlan").expect("ip");
        shown
            .split("vxlan id ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next())
            .expect("an identifier")
            .to_owned()
    };
    let others = [NAMES[0], NAMES[2]];
    let answer = network(&site, "start", &others);
    assert_eq!((&answer["state"], &answer["nodes"]), (&json!("running"), &json!(others)), "{answer}");
    assert!(state_and_message(&answer).1.contains("node node2 still has its part"), "{answer}");
    assert_ne!(vni(&site, 0), vni(&site, 1));
    // Not on the host that is not reached.
    assert_eq!(network(&site, "start", &NAMES)["state"], "failed");
    network(&site, "stop", &[]);
    assert_eq!(all(&site), [String::new(), made[1].clone(), String::new()]);

    // It is back: a run there begins with nothing, and another stop finds it.
    site.serve(2);
    assert_eq!(network(&site, "start", &NAMES)["state"], "running");
    assert_eq!(all(&site), made);
    site.silence(3);
    network(&site, "stop", &[]);
    assert_eq!(all(&site), [String::new(), String::new(), made[2].clone()]);
    site.serve(3);
    network(&site, "stop", &[]);
    assert_eq!(
        (all(&site).concat(), &network(&site, "status", &[])["state"]),
        (String::new(), &json!("absent"))
    );

    // One that is lost for good is forgotten on request.
    assert_eq!(network(&site, "start", &NAMES)["state"], "running");
    site.silence(3);
    network(&site, "stop", &[]);
    let said = site.on_first("vmove-network-adapter --forget node3");
    assert!(said.contains("network app/net: forgotten what node node3 has of it"), "{said}");
    assert_eq!(network(&site, "status", &[])["state"], "absent");
}
