//! The guides tell the truth: their commands are followed line by line, by daemons with nothing but their defaults.
#![cfg(test)]

use vmove_skip::need;
use vmove_tests::bridge::{ready_for_guests, until};
use vmove_tests::hosts::Host;
use vmove_tests::networks::{self, Networks};
use vmove_tests::pki::Pki;
use vmove_tests::process::Guarded;
use vmove_tests::sandbox::Sandbox;

/// The command lines of a guide, between its marks.
fn commands(guide: &str) -> Vec<String> {
    let mut inside = false;
    let mut found = Vec::new();
    for line in guide.lines() {
        match line {
            "<!-- guide -->" => inside = true,
            "<!-- /guide -->" => inside = false,
            _ if inside => {
                let command = line.strip_prefix("    ").or_else(|| line.strip_prefix("# "));
                found.extend(command.map(|command| command.trim().to_owned()));
            }
            _ => {}
        }
    }
    found
}

/// Two hosts, node1 and node7, on each of which a `vmoved` runs as the operators' guide says: with certificates, and the names of the
/// others.
struct Fleet {
    daemons: Vec<Guarded>,
    hosts: Vec<Host>,
    _networks: Networks,
    _pki: Pki,
    // Last: it removes whatever is left.
    _sandbox: Sandbox,
}

impl Fleet {
    fn start() -> Self {
        let networks = Networks::new(2).expect("namespaces");
        let sandbox = Sandbox::new().expect("a sandbox");
        let addresses = [networks.address(1), networks.address(2)];
        let pki = Pki::new(&addresses.map(|address| address.ip())).expect("certificates");
        let [cert, key, ca] = ["node.pem", "node.key", "ca.pem"].map(|name| pki.path(name));
        let user = if vmove_skip::user_of_qemus().is_empty() { "" } else { "[qemu]\nuser = \"root\"\n" };
        let config = format!(
            "[tls]\ncert = {cert:?}\nkey = {key:?}\nca = {ca:?}\n{user}[nodes]\nnode1 = \"{}\"\nnode7 = \"{}\"\n",
            addresses[0], addresses[1]
        );
        let (mut hosts, mut daemons) = (Vec::new(), Vec::new());
        for (number, name) in [(1, "node1"), (2, "node7")] {
            let host = Host::start(&sandbox, &networks, number, name).expect("a host");
            let file = host.folder().join("vmoved.toml");
            std::fs::write(&file, &config).expect("a file");
            let line = format!("mkdir -p /etc/vmove && cp {} /etc/vmove/vmoved.toml", file.display());
            host.run(&line).expect("it is configured");
            daemons.push(host.spawn("vmoved --config /etc/vmove/vmoved.toml").expect("vmoved starts"));
            until("vmoved answers", || host.run("vmove list").is_ok());
            hosts.push(host);
        }
        Self { daemons, hosts, _networks: networks, _pki: pki, _sandbox: sandbox }
    }

    /// Follows the commands on node1. Returns what each printed.
    fn follow(&mut self, commands: &[String]) -> Vec<(String, String)> {
        let host = &self.hosts[0];
        let (mut printed, mut plan): (Vec<(String, String)>, _) = (Vec::new(), String::new());
        for line in commands.iter().flat_map(|line| line.split(" && ")) {
            let line = line.split_once("  #").map_or(line, |(line, _)| line).trim();
            if let Some(daemon) = line.strip_suffix('&') {
                self.daemons.push(host.spawn(daemon.trim()).expect("it starts"));
                until("the bridge answers", || host.run("vmove fleet list").is_ok());
                continue;
            }
            // The beginning of an id is enough.
            let line = line.replace("plan run ID", &format!("plan run {}", plan.get(..8).unwrap_or("ID")));
            let output = host.run(&line).unwrap_or_else(|error| {
                panic!("{error}\nlog of node1:\n{}\nlog of node7:\n{}", host.log(), self.hosts[1].log())
            });
            if let Some(id) = output.strip_prefix("plan ").and_then(|rest| rest.split(':').next()) {
                plan = id.to_owned();
            }
            printed.push((line, output));
        }
        printed
    }
}

fn after<'a>(printed: &'a [(String, String)], command: &str) -> &'a str {
    let found = printed.iter().find(|(line, _)| line.starts_with(command));
    found.map_or_else(|| panic!("{command} is not in the guide"), |(_, output)| output.as_str())
}

#[test]
fn the_commands_of_the_guides_work_with_nothing_but_defaults() {
    need!(ready_for_guests());
    need!(networks::possible());
    let mut fleet = Fleet::start();
    let printed = fleet.follow(&commands(include_str!("../../../docs/sched-bridge.md")));
    assert!(after(&printed, "vmove fleet list").contains("node7"), "{printed:?}");
    let placed = after(&printed, "vmove place");
    assert!(
        placed.contains("web-vm-0 runs on") && placed.contains("kept as long as a VM of it runs"),
        "{placed}"
    );
    assert!(after(&printed, "vmove lease list").contains("with its VMs"), "{printed:?}");
    let plans: Vec<&str> = printed
        .iter()
        .filter(|(line, _)| line.starts_with("vmove plan run"))
        .map(|(_, out)| &**out)
        .collect();
    assert_eq!(plans.len(), 2, "there and back");
    // Wherever the VMs were, they have left it, and come back.
    let moved = plans.iter().flat_map(|plan| plan.lines()).filter(|line| line.ends_with("  done")).count();
    assert!(moved >= 2 && plans.iter().all(|plan| plan.contains(", done;")), "{plans:?}");
    assert!(after(&printed, "vmove account").contains("web"), "{printed:?}");

    // The other guide, from the beginning, on the same hosts.
    drop(fleet.daemons.pop());
    fleet.hosts[0].run("rm -r /var/lib/vbridged").expect("the bridge forgets");
    let files = "echo 'SwitchName=leaf1 Nodes=node1,node7' >topology.conf && printf 'name: web\\nvms:\\n- {name: vm, count: 2, request: \"vcpus=1; memory_mb=256\"}\\n' >cluster.yaml";
    fleet.hosts[0].run(files).expect("files");
    let printed = fleet.follow(&commands(include_str!("../../../README.md")));
    assert!(after(&printed, "vmove place cluster.yaml --what-if").contains("chosen"), "{printed:?}");
    assert!(after(&printed, "vmove plan run").contains(", done;"), "{printed:?}");
    for host in &fleet.hosts {
        let left = host.run("vmove --json list").expect("a list");
        assert!(left.contains("\"vms\":[]"), "{}: {left}", host.name());
    }
}
