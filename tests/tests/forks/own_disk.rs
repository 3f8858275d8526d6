//! A child on another host, whose disk is served from its parent's node, gets an image of its own and needs that node no more.
#![cfg(test)]

use std::path::{Path, PathBuf};

use vmove_skip::need;
use vmove_tests::disks::{DISK, for_qemu, node, overlays, qemu_img, task, works};
use vmove_tests::fleet::{Fleet, Setup, SetupDisk, fleet_with, host, plain, ready, until};
use vmove_tests::forks::{done, names};
use vmove_tests::scene::{NAME, vmove};

const QCOW2: SetupDisk = SetupDisk { format: "qcow2", attach: |image| node(image, "qcow2") };

fn tools() -> anyhow::Result<()> {
    ready()?;
    qemu_img()?;
    std::process::Command::new("qemu-nbd").arg("--version").output()?;
    Ok(())
}

/// A fleet of three with a guest that has most of its disk in use, and a child of it on n2, which does not see the image.
fn with_a_served_child() -> (Fleet, String) {
    let setup =
        Setup { config: Some(task(48)), disk: Some(QCOW2), unseen: true, tls: true, ..Setup::default() };
    let fleet = fleet_with(3, &setup, plain);
    works(&fleet.nodes[0], NAME).expect("the guest works on its disk");
    let answer = done(&fleet.nodes[0], &["create", NAME, "--count", "1", "--node", "n2"]).expect("a child");
    assert_eq!(host(&answer, "n2")["disks"], "nbd", "{answer}");
    let child = names(&answer)[0].clone();
    (fleet, child)
}

/// The parent's node serves nothing any more, and can go with all that it has.
fn lose_the_parent(fleet: &mut Fleet) {
    let folder = fleet.nodes[0].folder().join("state/forks/disks");
    until("nothing is served any more", || {
        std::fs::read_dir(&folder)
            .map_or(0, |entries| entries.flatten().filter(|e| e.path().is_dir()).count())
            == 0
    });
    fleet.nodes[0].ask(&["stop", NAME, "--force"]).expect("it ends");
    fleet.nodes[0].stop().expect("the daemon ends");
    std::fs::remove_file(fleet.images.join("disk")).expect("the image");
    for overlay in overlays(&fleet.images, NAME) {
        std::fs::remove_file(overlay).expect("the parent's overlay");
    }
}

/// It has read most of its blocks: each was written by its parent before the fork, or by itself.
fn reads_all(fleet: &Fleet, at: usize, child: &str) {
    for _ in 0..6 {
        works(&fleet.nodes[at], child).expect("it works on its disk");
    }
    fleet.parent.sound(&fleet.nodes[at], child).expect("it is sound");
}

/// A folder that all nodes see, and in which QEMUs may make images.
fn folder_for_images(fleet: &Fleet) -> PathBuf {
    let folder = fleet.images.with_file_name("own-disks");
    std::fs::create_dir(&folder).expect("a folder");
    for_qemu(&folder).expect("it is given to QEMU");
    folder
}

fn disk_of(fleet: &Fleet, at: usize, child: &str) -> String {
    let disks = fleet.nodes[at].ask(&["disks", child]).expect("disks");
    disks["disks"][0]["file"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_child_with_a_served_disk_gets_an_image_of_its_own_and_moves() {
    need!(tools());
    let (mut fleet, child) = with_a_served_child();
    let shared = folder_for_images(&fleet);
    let refused = vmove(&fleet.nodes[1], &["migrate", &child, "--to", "n3"]).expect("an answer");
    let said = refused.answer.to_string();
    assert!(refused.code == 3 && said.contains("vmove move-disk") && said.contains("--disks"), "{said}");

    let own = shared.join("child.qcow2");
    let to = ["move-disk", &child, DISK, "--to", &own.to_string_lossy()];
    let end = vmove(&fleet.nodes[1], &to).expect("an answer");
    assert_eq!((end.code, &end.answer["state"]), (0, &"moved".into()), "{} {}", end.answer, end.said);
    assert_eq!(end.answer["left_at"], serde_json::Value::Null, "its overlay is of no use any more");
    lose_the_parent(&mut fleet);
    reads_all(&fleet, 1, &child);
    // Where both nodes see the new image, and with it.
    let end = vmove(&fleet.nodes[1], &["migrate", &child, "--to", "n3"]).expect("an answer");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    assert_eq!(Path::new(&disk_of(&fleet, 2, &child)), own);
    reads_all(&fleet, 2, &child);
    let place = format!("{DISK}={}", shared.join("back.qcow2").display());
    let back = ["migrate", &child, "--to", "n2", "--disks", "all", "--disk-map", &place];
    let end = vmove(&fleet.nodes[2], &back).expect("an answer");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    reads_all(&fleet, 1, &child);
}

/// The copy that a migration makes has all that the images below hold, wherever these are.
#[test]
fn a_child_with_a_served_disk_moves_with_it() {
    need!(tools());
    let (mut fleet, child) = with_a_served_child();
    let image = folder_for_images(&fleet).join("child.qcow2");
    let overlay = disk_of(&fleet, 1, &child);
    let place = format!("{DISK}={}", image.display());
    let to = ["migrate", &child, "--to", "n3", "--disks", "all", "--disk-map", &place];
    let end = vmove(&fleet.nodes[1], &to).expect("an answer");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    assert!(!Path::new(&overlay).exists(), "its overlay is of no use any more");
    assert_eq!(end.answer["disks"][0]["left_at"], serde_json::Value::Null, "{}", end.answer);
    lose_the_parent(&mut fleet);
    assert_eq!(Path::new(&disk_of(&fleet, 2, &child)), image);
    reads_all(&fleet, 2, &child);
}
