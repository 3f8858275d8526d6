//! Guests with a disk and a network card.

use std::path::Path;

use vmove_skip::{free_port, need};
use vmove_tests::disks::{self, DISK_BYTES};
use vmove_tests::guest::Guest;
use vmove_tests::libvirt::{self, Arm, DOMAIN, Pair, Settings};
use vmove_tests::sandbox::Sandbox;

/// A guest that works on this disk, which libvirt gives it, and on its memory.
fn guest(image: &Path) -> Guest {
    disks::guest_on(image, Vec::new()).expect("a guest")
}

/// Its disk is a file that both hosts have. libvirt knows of none of this machine that it is shared: `--unsafe`.
fn moves_on_a_shared_disk(qemu_conf: &'static str, user: &str) {
    need!(libvirt::ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let image = sandbox.path().join("disk.raw");
    disks::blank(&image, DISK_BYTES).expect("a disk");
    let pair =
        Pair::with(sandbox, &guest(&image), Arm::Enabled, Settings { qemu_conf, ..Settings::default() })
            .expect("two hosts");
    pair.hosts[0].virsh(&["start", DOMAIN]).expect("started");
    pair.hosts[0].beacon().expect("it runs");
    for from in [0, 1] {
        pair.works_on_disk_at(from).expect("it works on its disk");
        pair.migrate(from, &["--unsafe"])
            .unwrap_or_else(|error| panic!("from {from}: {error}\n{}", pair.logs()));
        let qemu = pair.hosts[1 - from].qemu().expect("a QEMU");
        let status = std::fs::read_to_string(format!("/proc/{qemu}/status")).expect("it runs");
        let uid = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
        assert_eq!(uid.split_whitespace().next(), Some(user));
        pair.works_on_disk_at(1 - from).expect("it works on its disk there");
        pair.sound_at(1 - from).expect("sound");
    }
}

#[test]
fn a_guest_with_a_shared_disk_and_a_network_card_moves() {
    moves_on_a_shared_disk("", "64055");
}

#[test]
fn a_guest_whose_qemu_runs_as_root_moves() {
    moves_on_a_shared_disk("user = \"root\"\ngroup = \"root\"", "0");
}

/// Each host has a file of this name of its own, and libvirt copies one into the other.
#[test]
fn a_guest_moves_while_libvirt_copies_its_disk() {
    need!(libvirt::ready());
    let image = Path::new("/var/lib/libvirt/images/disk.raw");
    let sandbox = Sandbox::new().expect("a sandbox");
    let pair = Pair::with(sandbox, &guest(image), Arm::Enabled, Settings::default()).expect("two hosts");
    for host in &pair.hosts {
        let file = host.file(image);
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("made");
        std::fs::File::create(file).and_then(|file| file.set_len(DISK_BYTES)).expect("a disk");
    }
    pair.hosts[0].virsh(&["start", DOMAIN]).expect("started");
    pair.hosts[0].beacon().expect("it runs");
    for from in [0, 1] {
        pair.works_on_disk_at(from).expect("it works on its disk");
        let disks = format!("tcp://127.0.0.1:{}", free_port().port());
        pair.migrate(from, &["--copy-storage-all", "--disks-uri", &disks])
            .unwrap_or_else(|error| panic!("from {from}: {error}\n{}", pair.logs()));
        pair.works_on_disk_at(1 - from).expect("it works on its copy");
        pair.sound_at(1 - from).expect("sound");
    }
}
