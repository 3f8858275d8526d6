//! Guests that write to disks are forked: what was written before is seen by all, what is written later by nobody else.
#![cfg(test)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::disks::{all_work, create, drive, node, overlays, qemu_img, task, works};
use vmove_tests::forks::{ForkPhase, Parent, done, kill_in_fork, names, vfork};
use vmove_tests::guest::{Guest, VIRTIO};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, memory_mib, ready};

struct Stage {
    node: Node,
    parent: Parent,
    image: PathBuf,
    // Last: it ends whatever is left.
    _sandbox: Sandbox,
}

/// A guest with a disk of this format; `attach` says how.
fn stage(options: NodeOptions, format: &str, attach: impl Fn(&Path) -> Vec<String>) -> Stage {
    let sandbox = Sandbox::new().expect("a sandbox");
    let image = sandbox.folder("images").expect("a folder").join(format!("disk.{format}"));
    create(&image, format).expect("an image");
    let node = Node::start(&sandbox, "a", options).expect("a daemon");
    let mut guest = Guest::new(memory_mib(&task(1)), task(1)).expect("a QEMU");
    guest.modules = VIRTIO.into_iter().chain(["virtio_blk"]).collect();
    guest.extra = attach(&image);
    guest.disk = Some(image.clone());
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    Stage { node, parent, image, _sandbox: sandbox }
}

/// `qemu-img check` of an image in use by a VM, which stands still meanwhile.
fn check(node: &Node, vm: &str, image: &Path) {
    node.ask(&["pause", vm]).expect("it pauses");
    let output = Command::new("qemu-img").args(["check", "-U"]).arg(image).output().expect("qemu-img runs");
    node.ask(&["resume", vm]).expect("it resumes");
    assert!(output.status.success(), "{vm}: {output:?}");
}

fn folder(image: &Path) -> &Path {
    image.parent().expect("a folder")
}

fn path(value: &Value) -> PathBuf {
    value.as_str().expect("a path").into()
}

/// The whole life of a disk: prepared and cold children, a second fork, ends.
fn nobody_sees_the_others_writes(format: &str, attach: impl Fn(&Path) -> Vec<String>) {
    let stage = stage(NodeOptions::default(), format, attach);
    let Stage { node, parent, image, .. } = &stage;
    works(node, NAME).expect("the guest works on its disk");
    // Prepared before the guest writes on: what its QEMU has read of the image by then must not count.
    done(node, &["warm", NAME, "--count", "3"]).expect("three are prepared");
    works(node, NAME).expect("the guest works on its disk");
    let answer = done(node, &["create", NAME, "--count", "2", "--verify"]).expect("two children");
    eprintln!("pause {} ms, all running after {} ms", answer["parent_pause_ms"], answer["all_running_ms"]);
    assert_eq!(answer["children"][0]["warm"], true, "{answer}");
    assert_eq!(path(&answer["disks"][0]["base"]), *image);
    let frozen = std::fs::read(image).expect("the image");
    let own = path(&answer["disks"][0]["overlay"]);
    let family = [NAME, "guest.1", "guest.2"].map(|vm| (node, vm));
    all_work(&family).expect("they work on their disks, which are what their memory knows");
    parent.all_sound(&family).expect("sound");
    assert!(std::fs::read(image).expect("the image") == frozen, "the frozen image was written");
    check(node, NAME, &own);
    for child in ["guest.1", "guest.2"] {
        let its = overlays(folder(image), child);
        assert_eq!(its.len(), 1, "{child}: {its:?}");
        check(node, child, &its[0]);
    }
    // A child and its parent are forked: one layer more. The child that is still prepared lies over the wrong image now.
    let again = done(node, &["create", NAME, "--count", "1", "--verify"]).expect("another child");
    assert_eq!(path(&again["disks"][0]["base"]), own);
    assert_eq!(again["children"][0]["warm"], false, "{again}");
    let third = &names(&again)[0];
    done(node, &["create", "guest.1", "--count", "1", "--verify"]).expect("a grandchild");
    let family = [NAME, "guest.1", "guest.2", third, "guest.1.1"].map(|vm| (node, vm));
    all_work(&family).expect("they work on their disks");
    let promoted = done(node, &["promote", NAME]).expect("memory of its own");
    let files = promoted["disks"][0]["files"].as_array().expect("a chain");
    assert_eq!(files.len(), 3, "{promoted}");
    assert_eq!((path(&files[1]), path(&files[2])), (own, image.clone()), "{promoted}");
    assert!(std::fs::read(image).expect("the image") == frozen, "the frozen image was written");
    // Overlays end with children; a layer that others read stays, and what the parent has written.
    for child in ["guest.2", third, "guest.1.1"] {
        done(node, &["kill", child]).expect("it ends");
        assert!(overlays(folder(image), child).is_empty(), "{child}");
    }
    assert_eq!(overlays(folder(image), "guest.1").len(), 2);
    done(node, &["kill", "guest.1"]).expect("it ends");
    assert_eq!(overlays(folder(image), "guest.1").len(), 1);
    node.ask(&["stop", NAME, "--force"]).expect("it ends");
    assert_eq!(overlays(folder(image), NAME).len(), 2);
}

#[test]
fn of_a_raw_image_given_by_drive() {
    need!(ready().and_then(|()| qemu_img()));
    nobody_sees_the_others_writes("raw", |image| drive(image, "raw", ",cache=none"));
}

#[test]
fn of_a_qcow2_image_given_by_blockdev() {
    need!(ready().and_then(|()| qemu_img()));
    nobody_sees_the_others_writes("qcow2", |image| node(image, "qcow2"));
}

#[test]
fn a_template_keeps_its_disk() {
    need!(ready().and_then(|()| qemu_img()));
    let stage = stage(NodeOptions::default(), "raw", |image| drive(image, "raw", ""));
    let Stage { node, image, .. } = &stage;
    works(node, NAME).expect("the guest works on its disk");
    done(node, &["template", "save", NAME, "golden"]).expect("a template");
    works(node, NAME).expect("the guest works on its disk");
    node.ask(&["stop", NAME, "--force"]).expect("it ends");
    for _ in 0..2 {
        let answer =
            done(node, &["create", "--template", "golden", "--count", "1", "--verify"]).expect("a child");
        for child in names(&answer) {
            works(node, &child).expect("it works on its disk");
            done(node, &["kill", &child]).expect("it ends");
            assert!(overlays(folder(image), &child).is_empty());
        }
    }
}

#[test]
fn disks_that_cannot_be_frozen_are_refused() {
    need!(ready().and_then(|()| qemu_img()));
    let refused = |config: &str, more: &str, said: [&str; 2]| {
        let options = NodeOptions { config: config.to_owned(), ..NodeOptions::default() };
        let stage = stage(options, "raw", |image| drive(image, "raw", more));
        let end = vfork(&stage.node, &["create", NAME, "--count", "1"]).expect("an answer");
        assert_eq!(end.code, 3, "{} {}", end.answer, end.said);
        for word in said {
            assert!(end.said.contains(word), "{word}: {}", end.said);
        }
        works(&stage.node, NAME).expect("the guest is unharmed");
        assert!(overlays(folder(&stage.image), NAME).is_empty());
    };
    refused("", ",file.locking=off", ["disk-unlocked", "locking=off"]);
    refused("[fork]\noverlay-dir = \"/nonexistent\"\n", "", ["no-overlay", "overlay-dir"]);
}

/// Whenever the daemon is killed, the guest's disk is what its memory knows, and its record names what it writes to.
#[test]
fn a_daemon_killed_in_the_middle_loses_no_disk() {
    need!(ready().and_then(|()| qemu_img()));
    let stage = stage(NodeOptions::default(), "raw", |image| drive(image, "raw", ""));
    let Stage { mut node, image, _sandbox, .. } = stage;
    works(&node, NAME).expect("the guest works on its disk");
    let mut hit = BTreeSet::new();
    let moments =
        [(ForkPhase::Begun, 0), (ForkPhase::Begun, 3), (ForkPhase::Stopping, 0), (ForkPhase::Stopping, 3)];
    let moments = moments.into_iter().chain([0, 5, 30].map(|after_ms| (ForkPhase::Frozen, after_ms)));
    for (phase, after_ms) in moments {
        let found = kill_in_fork(&mut node, 1, phase, Duration::from_millis(after_ms));
        hit.insert(found);
        node.run().expect("the next life");
        for vm in node.vms().expect("a list") {
            works(&node, &vm).unwrap_or_else(|error| panic!("{vm}, {found:?}: {error:#}"));
            if vm != NAME {
                done(&node, &["kill", &vm]).expect("it ends");
            }
        }
        // Those that the parent lies over, and no others.
        let promoted = done(&node, &["promote", NAME]).expect("memory of its own");
        let layers = promoted["disks"][0]["files"].as_array().map_or(1, Vec::len);
        eprintln!("{layers} layers");
        assert_eq!(overlays(folder(&image), NAME).len() + 1, layers, "{promoted}");
        assert!(overlays(folder(&image), "guest.1").is_empty());
    }
    for phase in [ForkPhase::Begun, ForkPhase::Stopping, ForkPhase::Frozen] {
        assert!(hit.contains(&phase), "no kill met {phase:?}: {hit:?}");
    }
    let answer = done(&node, &["create", NAME, "--count", "1", "--verify"]).expect("a child");
    for vm in names(&answer).iter().chain([&NAME.to_owned()]) {
        works(&node, vm).expect("it works on its disk");
    }
    drop(node);
}
