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
