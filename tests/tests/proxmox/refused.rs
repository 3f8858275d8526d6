//! What is refused: nothing is changed, and the guest runs on.

use vmove_skip::need;
use vmove_tests::proxmox::{self, Cluster, VMID};

use crate::moves::guest;

#[test]
fn what_is_in_the_way_is_named_and_nothing_is_changed() {
    need!(proxmox::ready());
    let mut cluster = Cluster::running(&guest()).expect("two nodes");
    let good = std::fs::read_to_string(cluster.conf(0)).expect("it");
    let lines = [
        ("hostpci0: 0000:01:00.0", "hostpci0"),
        ("scsi0: local:100/vm-100-disk-0.raw,size=1G", "of one node alone"),
        ("lock: backup", "is locked (backup)"),
    ];
    for (line, why) in lines {
        std::fs::write(cluster.conf(0), good.replace("\nname: web", &format!("\n{line}\nname: web")))
            .expect("it");
        let said = cluster.fails_from(0, 3).unwrap_or_else(|error| panic!("{line}: {error:#}"));
        assert!(said.contains(why), "{line}: {said}");
    }
    std::fs::write(cluster.conf(0), &good).expect("it");
    std::fs::create_dir_all(cluster.file("ha")).expect("it");
    std::fs::write(cluster.file("ha/resources.cfg"), format!("vm: {VMID}\n\tstate started\n")).expect("it");
    let said = cluster.fails_from(0, 3).expect("refused");
    assert!(said.contains(&format!("ha-manager remove vm:{VMID}")), "{said}");
    std::fs::remove_file(cluster.file("ha/resources.cfg")).expect("it");
    // The other node.
    let made = cluster.hosts[1].file("/etc/tmpfiles.d/vmove-pve.conf");
    let text = std::fs::read_to_string(&made).expect("it");
    std::fs::remove_file(&made).expect("it");
    let said = cluster.fails_from(0, 3).expect("refused");
    assert!(said.contains("b: ") && said.contains("vmove-pve host"), "{said}");
    std::fs::write(&made, text).expect("it");
    cluster.hosts[1].node.crash();
    let said = cluster.fails_from(0, 3).expect("refused");
    assert!(said.contains("systemctl start vmoved"), "{said}");
    cluster.hosts[1].node.run().expect("vmoved");
    assert_eq!(std::fs::read_to_string(cluster.conf(0)).expect("it"), good, "nothing was changed");
    cluster.sound_at(0).expect("it has gone on");
    let checked = cluster.moving(0, &["--check"]).expect("a command").output().expect("it runs");
    assert!(checked.status.success(), "{}", proxmox::said(&checked));
    assert_eq!(std::fs::read_to_string(cluster.conf(0)).expect("it"), good, "nor by --check");
    cluster.move_from(0).expect("it moves");
    cluster.sound_at(1).expect("sound");
    // From the node that no longer has it.
    let said = cluster.fails_from(0, 3).expect("refused");
    assert!(said.contains("is on node b"), "{said}");
}

/// Why VMs with `numa` and `hugepages` are refused: what QEMU says of the only ways to give them a named file.
#[test]
fn qemu_takes_no_memory_for_the_machine_beside_that_for_numa_nodes() {
    need!(proxmox::ready());
    let cluster = Cluster::new(&guest()).expect("two nodes");
    let host = &cluster.hosts[0];
    let plain = std::fs::read_to_string(cluster.conf(0)).expect("it");
    host.run(&["vmove-pve", "enable", VMID]).expect("enabled");
    let enabled = std::fs::read_to_string(cluster.conf(0)).expect("it");
    for numa in ["numa: 1", "hugepages: 2\nnuma: 1"] {
        std::fs::write(cluster.conf(0), enabled.replace("numa: 0", numa)).expect("it");
        let said = host.run(&["qm", "start", VMID]).expect_err("QEMU refuses that").to_string();
        assert!(said.contains("mutually exclusive"), "{said}");
        std::fs::write(cluster.conf(0), plain.replace("numa: 0", numa)).expect("it");
        let said = host.run(&["vmove-pve", "enable", VMID]).expect_err("so it is refused").to_string();
        assert!(said.contains("--numa 0"), "{said}");
    }
}

/// What was told to `qm set` of a VM that runs counts from its next start.
#[test]
fn what_is_pending_and_would_keep_it_from_starting_is_named() {
    need!(proxmox::ready());
    let cluster = Cluster::running(&guest()).expect("two nodes");
    let good = std::fs::read_to_string(cluster.conf(0)).expect("it");
    for (line, why) in [("numa: 1", "numa (pending)"), ("hugepages: 2", "hugepages (pending)")] {
        std::fs::write(cluster.conf(0), format!("{good}\n[PENDING]\n{line}\n")).expect("it");
        let said = cluster.fails_from(0, 3).unwrap_or_else(|error| panic!("{line}: {error:#}"));
        assert!(said.contains(why) && said.contains("--revert"), "{line}: {said}");
    }
}

#[test]
fn a_node_that_is_not_ready_fails_its_check_with_what_it_lacks() {
    need!(proxmox::ready());
    let cluster = Cluster::new(&guest()).expect("two nodes");
    let host = &cluster.hosts[0];
    let check = || {
        let output = host.command(&["vmove-pve", "host", "--check"]).expect("a command").output();
        let output = output.expect("it runs");
        (output.status.code(), proxmox::said(&output))
    };
    let (code, said) = check();
    assert!(code == Some(0) && said.contains("can take VMs"), "{code:?}: {said}");
    std::fs::remove_file(host.file("/etc/tmpfiles.d/vmove-pve.conf")).expect("removed");
    let (code, said) = check();
    assert!(code == Some(1) && said.contains("/etc/tmpfiles.d/vmove-pve.conf"), "{code:?}: {said}");
    let found = host.run(&["vmove", "doctor"]).unwrap_or_else(|error| error.to_string());
    assert!(found.contains("proxmox-folders"), "{found}");
}

/// `qm clone` copies `args`, and with them the names of the parent's monitor and memory.
#[test]
fn a_clone_that_nobody_has_enabled_is_told_of_before_it_is_started_and_not_moved() {
    need!(proxmox::ready());
    let cluster = Cluster::running(&guest()).expect("two nodes");
    let host = &cluster.hosts[0];
    let parent = std::fs::read_to_string(cluster.conf(0)).expect("it");
    let clone = cluster.conf(0).with_file_name("101.conf");
    std::fs::write(&clone, &parent).expect("cloned");
    let warned = format!("VM 101 was cloned from VM {VMID}");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !host.node.log().contains(&warned) {
        assert!(std::time::Instant::now() < deadline, "{}", host.node.log());
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let moving =
        host.command(&["vmove-pve", "move", "101", "b"]).expect("a command").output().expect("it runs");
    let said = proxmox::said(&moving);
    assert!(moving.status.code() == Some(3) && said.contains("vmove-pve enable 101"), "{said}");
    host.run(&["vmove-pve", "enable", "101"]).expect("mended");
    let mended = std::fs::read_to_string(&clone).expect("it");
    assert!(mended.contains("/run/vmove-pve/101.qmp") && !mended.contains("100-"), "{mended}");
    std::fs::remove_file(&clone).expect("removed");
    cluster.move_from(0).expect("the parent moves");
    cluster.sound_at(1).expect("sound");
}
