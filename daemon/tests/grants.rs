//! A node that knows the key of its bridge starts a VM only into a grant, and says why it does not.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

mod common;

use std::time::{SystemTime, UNIX_EPOCH};

use common::{Node, wait};
use serde_json::json;
use vmove_grant::{Grant, GrantedDevice, SecretKey};
use vmove_skip::{need, qemu};

fn now_ms() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

/// 96 MiB and one processor for a VM of this node.
fn grant(vm: &str, serial: u64) -> Grant {
    Grant {
        lease: format!("lease-of-{vm}"),
        holder: "alice".to_owned(),
        node: "tester".to_owned(),
        vm: vm.to_owned(),
        serial,
        expires_ms: now_ms() + 600_000,
        cores: 1,
        memory_mib: 96,
        huge_2m_mib: 0,
        huge_1g_mib: 0,
        devices: Vec::new(),
        numa: Vec::new(),
    }
}

fn node(key: &SecretKey, required: bool) -> (Node, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vmoved.toml");
    let config = format!("insecure = true\n[grants]\nkeys = [\"{}\"]\nrequired = {required}\n", key.public());
    std::fs::write(&file, config).unwrap();
    (Node::start_with(&["--config", file.to_str().unwrap()]), folder)
}

fn line<'a>(
    name: &'a str,
    grant: Option<&'a str>,
    qemu: &'a str,
    memory: &'a str,
    more: &[&'a str],
) -> Vec<&'a str> {
    let mut line = vec!["run", "--name", name];
    line.extend(grant);
    line.extend(["--", qemu, "-nodefaults", "-display", "none", "-m", memory]);
    line.extend(more);
    line
}

#[test]
fn what_a_bridge_has_not_granted_is_not_started_and_nothing_changes() {
    let qemu = need!(qemu());
    let (key, _) = SecretKey::generate().unwrap();
    let (stranger, _) = SecretKey::generate().unwrap();
    let (mut node, _folder) = node(&key, true);
    let argument = |key: &SecretKey, grant: &Grant| format!("--grant={}", key.sign(grant).unwrap());
    let good = grant("web", 1);
    let device = GrantedDevice { role: "gpu0".to_owned(), address: "0000:17:00.0".to_owned() };
    let cases: Vec<(Option<String>, &str, Vec<&str>, &str)> = vec![
        (None, "96M", vec![], "has no grant"),
        (Some(argument(&stranger, &good)), "96M", vec![], "not signed by a bridge that this node knows"),
        (
            Some(argument(&key, &Grant { node: "n2".to_owned(), ..good.clone() })),
            "96M",
            vec![],
            "for node n2, and this is tester",
        ),
        (Some(argument(&key, &Grant { vm: "db".to_owned(), ..good.clone() })), "96M", vec![], "for VM db"),
        (
            Some(argument(&key, &Grant { expires_ms: now_ms() - 9000, ..good.clone() })),
            "96M",
            vec![],
            "s ago by the clock",
        ),
        (
            Some(argument(&key, &good)),
            "97M",
            vec![],
            "wants 97 MiB of memory, and lease lease-of-web grants 96",
        ),
        (Some(argument(&key, &good)), "96M", vec!["-smp", "2"], "wants 2 cores"),
        (
            Some(argument(&key, &good)),
            "96M",
            vec!["-device", "vfio-pci,host=17:00.0"],
            "device 0000:17:00.0, which lease",
        ),
        (Some("--grant=x".to_owned()), "96M", vec![], "expected a grant"),
        (Some(argument(&key, &Grant { cores: 100_000, ..good.clone() })), "96M", vec![], "and it has"),
    ];
    for (grant, memory, more, wanted) in &cases {
        let refused = node.problem(&line("web", grant.as_deref(), &qemu, memory, more), 3);
        let message = refused["error"].as_str().unwrap();
        assert_eq!(refused["code"], "grant-refused", "{refused}");
        assert!(message.contains(wanted), "wanted {wanted:?}, found {message:?}");
        assert_eq!(node.ask(&["list"])["vms"], json!([]));
    }

    // Nothing of that has used the grant up.
    let text = argument(&key, &good);
    let vm = node.ask(&line("web", Some(&text), &qemu, "96M", &[]));
    assert_eq!(vm["lease"], "lease-of-web");
    // What it has is its own, also after a restart of the daemon.
    let other = Grant { devices: vec![device.clone()], ..grant("db", 2) };
    node.ask(&line("db", Some(&argument(&key, &other)), &qemu, "96M", &[]));
    node.kill();
    node.run();
    assert_eq!(node.ask(&["show", "web"])["lease"], "lease-of-web");
    let thief = argument(&key, &Grant { devices: vec![device], ..grant("thief", 3) });
    let refused = node.problem(&line("thief", Some(&thief), &qemu, "96M", &[]), 3);
    assert!(refused["error"].as_str().unwrap().contains("held by VM db of lease lease-of-db"), "{refused}");
    // It is given back with the VM, and to the next one; the grant itself is used up.
    node.ask(&["stop", "db"]);
    node.ask(&line("thief", Some(&thief), &qemu, "96M", &[]));
    node.ask(&["stop", "web"]);
    let refused = node.problem(&line("web", Some(&text), &qemu, "96M", &[]), 3);
    assert!(
        refused["error"].as_str().unwrap().contains("grant 1 of lease lease-of-web was used before"),
        "{refused}"
    );
    node.ask(&["stop", "thief"]);
}

#[test]
fn a_vm_without_a_grant_is_counted_where_none_is_required() {
    let qemu = need!(qemu());
    let (key, _) = SecretKey::generate().unwrap();
    let (node, _folder) = node(&key, false);
    let without = || node.ask(&["node"])["vms_without_grant"].clone();
    assert_eq!(without(), 0);
    node.ask(&line("plain", None, &qemu, "96M", &[]));
    assert_eq!(without(), 1);
    let text = format!("--grant={}", key.sign(&grant("web", 1)).unwrap());
    node.ask(&line("web", Some(&text), &qemu, "96M", &[]));
    assert_eq!(without(), 1);
    // The share of a VM that ends by itself is free again.
    let pid = node.ask(&["show", "web"])["pid"].as_i64().unwrap();
    common::signal(i32::try_from(pid).unwrap(), rustix::process::Signal::KILL);
    wait("what it had is given back", || node.log().contains("what the VM had is free"));
    node.ask(&["stop", "plain"]);
}
