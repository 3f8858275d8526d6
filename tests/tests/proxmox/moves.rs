//! Moves that succeed, and what is as it was afterwards.

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::guest::Guest;
use vmove_tests::proxmox::{self, Cluster, VMID};
use vmove_tests::scene;

pub fn guest() -> Guest {
    scene::steady_guest().expect("a guest")
}

#[test]
fn a_vm_is_enabled_moves_to_and_fro_and_is_as_it_was() {
    need!(proxmox::ready());
    let cluster = Cluster::new(&guest()).expect("two nodes");
    let before = std::fs::read_to_string(cluster.conf(0)).expect("a configuration");
    let host = &cluster.hosts[0];
    let shown = host.run(&["vmove-pve", "enable", VMID, "--check"]).expect("shown");
    assert!(shown.contains("+args: -accel tcg") && shown.contains("id=vmove-ram"), "{shown}");
    assert_eq!(
        std::fs::read_to_string(cluster.conf(0)).expect("it"),
        before,
        "nothing was changed by --check"
    );
    host.run(&["vmove-pve", "enable", VMID]).expect("enabled");
    let enabled = std::fs::read_to_string(cluster.conf(0)).expect("it");
    host.run(&["qm", "start", VMID]).expect("started");
    host.beacon().expect("the guest works");
    for round in 0..4 {
        let said = cluster.move_from(round % 2).unwrap_or_else(|error| panic!("move {round}: {error:#}"));
        assert!(said.contains("it stood still for"), "{said}");
        cluster.sound_at(1 - round % 2).unwrap_or_else(|error| panic!("after move {round}: {error:#}"));
    }
    assert_eq!(
        std::fs::read_to_string(cluster.conf(0)).expect("it"),
        enabled,
        "moved as it was, and unlocked"
    );
    // Known by its number, since several VMs may have one name.
    let list = host.node.ask(&["list"]).expect("a list");
    let vm = &list["vms"][0];
    assert_eq!((&vm["name"], &vm["proxmox"]), (&"pve-100".into(), &Value::Bool(true)), "{list}");
    let history = host.node.ask(&["history"]).expect("a history");
    assert!(history["migrations"].as_array().is_some_and(|all| all.len() == 4), "{history}");
    assert!(history["migrations"][0]["vm"] == "pve-100", "{history}");
    // Stopped by Proxmox VE: vmoved frees the memory, and `disable` leaves what was there.
    host.run(&["qm", "stop", VMID]).expect("stopped");
    let memory = host.file(&format!("/var/lib/vmove/pve/ram/{VMID}-320M"));
    let freed = (0..400).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        !memory.exists()
    });
    assert!(freed, "its memory is freed");
    host.run(&["vmove-pve", "disable", VMID]).expect("disabled");
    assert_eq!(std::fs::read_to_string(cluster.conf(0)).expect("it"), before);
}

#[test]
fn a_vm_that_runs_is_enabled_from_its_next_start() {
    need!(proxmox::ready());
    let cluster = Cluster::new(&guest()).expect("two nodes");
    let host = &cluster.hosts[0];
    host.run(&["qm", "start", VMID]).expect("started");
    host.run(&["vmove-pve", "enable", VMID]).expect("enabled");
    let text = std::fs::read_to_string(cluster.conf(0)).expect("it");
    assert!(text.contains("[PENDING]\nargs: -accel"), "what its QEMU has stays said: {text}");
    let said = cluster.fails_from(0, 3).expect("refused");
    assert!(said.contains("was started without"), "{said}");
    host.run(&["qm", "stop", VMID]).expect("stopped");
    host.run(&["qm", "start", VMID]).expect("started");
    host.beacon().expect("the guest works");
    let json = cluster.moving(0, &["--json"]).expect("a command").output().expect("it runs");
    let told: Value =
        serde_json::from_slice(&json.stdout).unwrap_or_else(|_| panic!("{}", proxmox::said(&json)));
    assert_eq!((&told["done"], &told["to"]), (&Value::Bool(true), &"b".into()), "{told}");
    assert!(
        told["migration"]["outcome"]["report"]["downtime_ms"].as_f64().is_some_and(|ms| ms > 0.0),
        "{told}"
    );
    cluster.sound_at(1).expect("sound");
}
