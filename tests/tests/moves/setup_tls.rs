//! Two nodes and their clients with what `vmove setup tls` makes, and nothing else.
#![cfg(test)]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::{Accel, failures};
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

/// `vmove --json`: exit code, and the object that it printed.
fn vmove(words: &[&str]) -> (Option<i32>, Value) {
    let mut command = Command::new(places::product("vmove").expect("the program"));
    let output = command.arg("--json").args(words).output().expect("it runs");
    let last = String::from_utf8_lossy(&output.stdout).lines().last().unwrap_or_default().to_owned();
    (output.status.code(), serde_json::from_str(&last).unwrap_or_default())
}

/// A node with the vmoved.toml that was made for it; its files are not in /etc/vmove.
fn node(sandbox: &Sandbox, pki: &Path, name: &str, port: u16) -> Node {
    let folder = pki.join("nodes").join(name);
    let config = std::fs::read_to_string(folder.join("vmoved.toml")).expect("settings");
    let config = config.replace("/etc/vmove/", &format!("{}/", folder.display()));
    let listen = Some(format!("127.0.0.1:{port}").parse().expect("an address"));
    Node::start(sandbox, name, NodeOptions { config, listen, ..NodeOptions::default() }).expect("it starts")
}

/// A command to a node elsewhere, as a client.
fn as_client(folder: &Path, at: &Node, words: &[&str]) -> (Option<i32>, Value) {
    let [cert, key, ca] =
        ["client.pem", "client.key", "ca.pem"].map(|name| folder.join(name).display().to_string());
    let at = at.listen().to_string();
    vmove(&[&["--at", &at, "--tls-cert", &cert, "--tls-key", &key, "--tls-ca", &ca], words].concat())
}

fn is_whole_at(node: &Node, other: &Node) {
    assert_eq!(node.vms().expect("a list"), ["web"]);
    assert!(other.vms().expect("a list").is_empty());
    let vm = node.vm("web").expect("it is there");
    assert_eq!((vm.status.as_str(), failures(&vm.console())), ("running", Vec::new()));
}

#[test]
fn a_guest_moves_with_the_certificates_of_one_command_and_a_viewer_changes_nothing() {
    need!(payload::ready(Accel::Tcg));
    let sandbox = Sandbox::new().expect("a sandbox");
    let ports = [vmove_skip::free_port().port(), vmove_skip::free_port().port()];
    let make = |name: &str| -> PathBuf {
        let pki = sandbox.path().join(name);
        let nodes = ["a", "b"].iter().zip(ports).map(|(name, port)| format!("{name}=127.0.0.1:{port}"));
        let nodes: Vec<String> = nodes.collect();
        let out = pki.display().to_string();
        let (code, said) = vmove(&[
            "setup",
            "tls",
            "--out",
            &out,
            "--node",
            &nodes[0],
            "--node",
            &nodes[1],
            "--client",
            "ops:operator",
            "--client",
            "eyes:viewer",
        ]);
        assert_eq!(code, Some(0), "{said}");
        pki
    };
    let pki = make("pki");
    let (a, b) = (node(&sandbox, &pki, "a", ports[0]), node(&sandbox, &pki, "b", ports[1]));
    // The doctor reads the same settings, and asks the other node with the same certificate.
    let (settings, control) = (a.folder().join("vmoved.toml"), a.control());
    let (settings, control) = (settings.display().to_string(), control.display().to_string());
    let (_, said) = vmove(&["doctor", "--area", "daemon", "--config", &settings, "--control", &control]);
    let findings = said["findings"].as_array().expect("findings").iter();
    let states: Vec<_> = findings.map(|found| (found["topic"].as_str(), found["state"].as_str())).collect();
    let expected = ["vmoved", "settings", "certificate", "peer b"];
    assert_eq!(states, expected.map(|topic| (Some(topic), Some("ok"))), "{said:#}");

    let guest =
        payload::guest(sandbox.path(), Accel::Tcg, &payload::light(), KvmPages::None).expect("a guest");
    a.run_guest("web", "thp", &guest).expect("it runs");

    // By the node's own socket, to the name that its settings know.
    a.migrate("web", "b", &[]).expect("it moves");
    is_whole_at(&b, &a);
    let (eyes, ops) = (pki.join("clients/eyes"), pki.join("clients/ops"));
    let (code, listed) = as_client(&eyes, &b, &["list"]);
    assert_eq!((code, &listed["vms"][0]["name"]), (Some(0), &"web".into()), "{listed}");
    for words in [&["migrate", "web", "--to", "a"][..], &["pause", "web"], &["stop", "web"]] {
        let (code, problem) = as_client(&eyes, &b, words);
        assert_eq!((code, &problem["code"]), (Some(3), &"forbidden".into()), "{words:?}: {problem}");
    }
    is_whole_at(&b, &a);
    let (code, report) = as_client(&ops, &b, &["migrate", "web", "--to", "a"]);
    assert_eq!(code, Some(0), "{report}");
    is_whole_at(&a, &b);
    // What another authority has signed counts for nothing, though all names are the same.
    let stranger = make("other").join("clients/ops");
    std::fs::copy(pki.join("ca.pem"), stranger.join("ca.pem")).expect("a copy");
    let (code, problem) = as_client(&stranger, &a, &["migrate", "web", "--to", "b"]);
    assert_eq!((code, &problem["code"]), (Some(5), &"daemon-unreachable".into()), "{problem}");
    is_whole_at(&a, &b);
}
