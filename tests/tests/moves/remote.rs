//! Two nodes with TLS that are driven from elsewhere, by a program with a certificate.
#![cfg(test)]

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use serde_json::Value;
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::{Accel, failures};
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::pki::Pki;
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::SLOW;

use crate::terminal::Terminal;

const CLIENTS: &str =
    "[[client]]\nname = \"ops\"\nrole = \"operator\"\n[[client]]\nname = \"eyes\"\nrole = \"viewer\"\n";
const VMS: [&str; 2] = ["db", "web"];

/// A scheduler in `examples/`.
#[derive(Debug, Clone, Copy)]
enum Example {
    Rust,
    Python,
}

impl Example {
    fn command(self) -> Command {
        match self {
            Self::Rust => Command::new(places::product("examples/scheduler").expect("the example")),
            Self::Python => {
                let mut command = Command::new("python3");
                command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/scheduler.py"));
                command
            }
        }
    }

    /// Whether it can run here.
    fn ready(self) -> anyhow::Result<()> {
        let version = self.command().arg("--version").output();
        match self {
            Self::Rust => Ok(()),
            Self::Python => version.map(drop).context("python3 is not installed"),
        }
    }
}

struct Site {
    nodes: [Node; 2],
    pki: Pki,
    _sandbox: Sandbox,
}

impl Site {
    /// Two nodes; the first has two guests.
    fn start() -> Self {
        let sandbox = Sandbox::new().expect("a sandbox");
        let pki = Pki::new(&["127.0.0.1".parse().expect("an address")]).expect("certificates");
        let options =
            NodeOptions { extra: pki.flags(), config: CLIENTS.to_owned(), ..NodeOptions::default() };
        let (a, b) = Node::pair(&sandbox, &options).expect("two nodes");
        let guest = payload::guest(sandbox.path(), Accel::Tcg, &payload::light(), KvmPages::None);
        let guest = guest.expect("a guest");
        for vm in VMS {
            a.run_guest(vm, "thp", &guest).expect("it runs");
        }
        Self { nodes: [a, b], pki, _sandbox: sandbox }
    }

    /// An example, as this client.
    fn scheduler(&self, example: Example, folder: &Path, from: usize, to: &str) -> (Option<i32>, String) {
        let mut command = example.command();
        let output = command.arg(folder).arg(self.at(from)).arg(to).output().expect("it runs");
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    }

    fn at(&self, node: usize) -> String {
        self.nodes[node].listen().to_string()
    }

    /// A command about the first node, as this client.
    fn command(&self, program: &str, folder: &Path, words: &[&str]) -> (Option<i32>, Value) {
        let file = |name: &str| folder.join(name).display().to_string();
        let mut command = Command::new(places::product(program).expect("the program"));
        command.args(["--json", "--at", &self.nodes[0].listen().to_string()]);
        command.args(["--tls-cert", &file("client.pem"), "--tls-key", &file("client.key")]);
        let output = command.args(["--tls-ca", &file("ca.pem")]).args(words).output().expect("it runs");
        let last = String::from_utf8_lossy(&output.stdout).lines().last().unwrap_or_default().to_owned();
        (output.status.code(), serde_json::from_str(&last).unwrap_or_default())
    }

    fn client(&self, name: &str) -> PathBuf {
        self.pki.client(name).expect("a certificate")
    }

    /// Checks that all VMs run at one node, and are whole.
    fn all_at(&self, node: usize) {
        assert_eq!(self.nodes[node].vms().expect("a list"), VMS);
        assert!(self.nodes[1 - node].vms().expect("a list").is_empty());
        for name in VMS {
            let vm = self.nodes[node].vm(name).expect("it is there");
            assert_eq!(vm.status, "running");
            assert_eq!(failures(&vm.console()), Vec::<String>::new());
        }
    }
}

fn empties_a_node(example: Example) {
    let site = Site::start();
    let ops = site.client("ops");
    for (from, to) in [(0, 1), (1, 0)] {
        let (code, said) = site.scheduler(example, &ops, from, &site.at(to));
        assert_eq!(code, Some(0), "{said}");
        for vm in VMS {
            assert!(said.contains(&format!("{vm}: at ")), "{said}");
        }
        site.all_at(to);
    }
    // There is no node at this port.
    let (code, said) = site.scheduler(example, &ops, 0, &vmove_skip::free_port().to_string());
    assert!(code == Some(1) && said.contains("web stays: "), "{said}");
    site.all_at(0);
    // One that may only look.
    let (code, said) = site.scheduler(example, &site.client("eyes"), 0, &site.at(1));
    assert!(code == Some(1) && said.contains("viewer"), "{said}");
    site.all_at(0);
}

#[test]
fn a_scheduler_of_sixty_lines_in_rust_empties_a_node_over_tls() {
    need!(payload::ready(Accel::Tcg));
    need!(Example::Rust.ready());
    assert!(include_str!("../../../examples/scheduler.rs").lines().count() <= 60);
    empties_a_node(Example::Rust);
}

#[test]
fn a_scheduler_of_sixty_lines_in_python_empties_a_node_over_tls() {
    need!(payload::ready(Accel::Tcg));
    need!(Example::Python.ready());
    assert!(include_str!("../../../examples/scheduler.py").lines().count() <= 60);
    empties_a_node(Example::Python);
}

#[test]
fn a_viewer_sees_guests_and_changes_none() {
    need!(payload::ready(Accel::Tcg));
    let site = Site::start();
    let (eyes, ops, there) = (site.client("eyes"), site.client("ops"), site.at(1));
    let (code, listed) = site.command("vmove", &eyes, &["list"]);
    assert_eq!((code, listed["vms"].as_array().map(Vec::len)), (Some(0), Some(2)), "{listed}");
    let verbs: [&[&str]; 10] = [
        &["vmove", "migrate", "web", "--to", &there],
        &["vmove", "migrate", "web", "db", "--to", &there],
        &["vmove", "pause", "web"],
        &["vmove", "resume", "web"],
        &["vmove", "stop", "web"],
        &["vmove", "stop", "--force", "web"],
        &["vmove", "run", "--name", "new", "--", "qemu-system-x86_64"],
        &["vfork", "create", "web", "--count", "1"],
        &["vfork", "promote", "web"],
        &["vfork", "template", "save", "web", "kept"],
    ];
    for words in verbs {
        let (code, problem) = site.command(words[0], &eyes, &words[1..]);
        assert_eq!((code, &problem["code"]), (Some(3), &Value::from("forbidden")), "{words:?}: {problem}");
        site.all_at(0);
    }
    // Somebody who may does it by the same command, to its end.
    let (code, report) = site.command("vmove", &ops, &["migrate", "db", "web", "--to", &there]);
    assert_eq!(code, Some(0), "{report}");
    site.all_at(1);
}

#[test]
fn a_group_that_moves_into_a_pipe_says_how_far_each_of_it_is() {
    need!(payload::ready(Accel::Tcg));
    let site = Site::start();
    let folder = site.client("ops");
    let file = |name: &str| folder.join(name).display().to_string();
    let mut command = Command::new(places::product("vmove").expect("vmove is built"));
    command.args(["--at", &site.at(0), "--tls-cert", &file("client.pem"), "--tls-key", &file("client.key")]);
    command.args(["--tls-ca", &file("ca.pem"), "migrate", "db", "web", "--to", &site.at(1)]);
    let output = command.args(["--bandwidth", SLOW]).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    for vm in VMS {
        let lines: Vec<&str> = said.lines().filter(|line| line.starts_with(&format!("{vm}: "))).collect();
        assert!(lines.len() >= 2 && lines.iter().any(|line| line.contains(" of ")), "{vm}: {said}");
    }
    site.all_at(1);
}

#[test]
fn a_viewer_watches_two_nodes_from_elsewhere() {
    need!(payload::ready(Accel::Tcg));
    let site = Site::start();
    let folder = site.client("eyes");
    let mut command = Command::new(places::product("vmove").expect("vmove is built"));
    for (option, name) in [("--tls-cert", "client.pem"), ("--tls-key", "client.key"), ("--tls-ca", "ca.pem")]
    {
        command.arg(option).arg(folder.join(name));
    }
    command.args(["watch", &site.at(0), &site.at(1)]);
    let mut shown = Terminal::start(&command, 100, 30);
    shown.until("both nodes", |text| text.contains("a: 2 VMs") && text.contains("b: 0 VMs"));
    site.nodes[0].migrate("web", "b", &[]).expect("it moves");
    shown.until("the guest at b, and the move at both ends", |text| {
        text.contains("a: 1 VM,") && text.contains("b: 1 VM,") && text.matches("done, down").count() == 2
    });
    shown.press("q");
    assert!(shown.end().success());
}

/// `vmove watch --all` of a node by its control socket, with these options.
fn watch_all(node: &Node, options: &[String]) -> Terminal {
    let mut command = Command::new(places::product("vmove").expect("vmove is built"));
    command.arg("--control").arg(node.control()).args(options).args(["watch", "--all"]);
    Terminal::start(&command, 100, 30)
}

#[test]
fn all_nodes_that_a_daemon_knows_are_watched() {
    need!(payload::ready(Accel::Tcg));
    let sandbox = Sandbox::new().expect("a sandbox");
    let pki = Pki::new(&["127.0.0.1".parse().expect("an address")]).expect("certificates");
    let options = NodeOptions { extra: pki.flags(), config: CLIENTS.to_owned(), ..NodeOptions::default() };
    let mut b = Node::start(&sandbox, "b", options.clone()).expect("b starts");
    let own = vmove_skip::free_port();
    // It is named in its own file, and the certificate of the other is for no name that would be dialled.
    let dialled = format!("localhost:{}", b.listen().port());
    let nodes = format!("[nodes]\na = '{own}'\nb = {{ address = '{dialled}', server-name = '127.0.0.1' }}\n");
    let config = format!("{CLIENTS}{nodes}");
    let a = Node::start(&sandbox, "a", NodeOptions { config, listen: Some(own), ..options.clone() });
    let a = a.expect("a starts");
    let guest = payload::guest(sandbox.path(), Accel::Tcg, &payload::light(), KvmPages::None);
    b.run_guest("web", "thp", &guest.expect("a guest")).expect("it runs");
    let folder = pki.client("eyes").expect("a certificate");
    let files = [("--tls-cert", "client.pem"), ("--tls-key", "client.key"), ("--tls-ca", "ca.pem")];
    let tls: Vec<String> =
        files.iter().map(|(option, name)| format!("{option}={}", folder.join(name).display())).collect();

    let mut shown = watch_all(&a, &tls);
    let both = shown.until("both nodes", |text| text.contains("a: 0 VMs") && text.contains("b: 1 VM,"));
    assert!(both.contains("web") && both.matches("a: ").count() == 1, "{both}");
    b.crash();
    shown.until("that b is lost", |text| text.contains("b: LOST for ") && text.contains("a: 0 VMs"));
    // One that is not there from the beginning is waited for, too.
    let mut later = watch_all(&a, &tls);
    later.until("a, and that b is lost", |text| text.contains("b: LOST for ") && text.contains("a: 0 VMs"));
    b.run().expect("it starts again");
    for terminal in [&mut shown, &mut later] {
        terminal.until("b again", |text| text.contains("b: 1 VM,") && !text.contains("LOST"));
        terminal.press("q");
    }
    assert!(shown.end().success() && later.end().success());

    let refused = watch_all(&a, &tls[..1]);
    let why = "--all needs --tls-cert, --tls-key and --tls-ca, found no --tls-key, --tls-ca";
    refused.until("which options it lacks", |text| text.replace('\n', "").contains(why));
    assert_eq!(refused.end().code(), Some(2));
    let alone = Node::start(&sandbox, "alone", options).expect("it starts");
    let refused = watch_all(&alone, &tls);
    let why = "--all: expected other nodes in [nodes] of the configuration of alone, found none";
    refused.until("that it knows none", |text| text.replace('\n', "").contains(why));
    assert_eq!(refused.end().code(), Some(2));
}
