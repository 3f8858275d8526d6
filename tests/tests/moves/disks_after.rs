//! Disks that follow their guest: it runs at the destination over the source's image, works on its disk, and has all of it in the end.
#![cfg(test)]

use std::path::{Path, PathBuf};

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::disks::{DISK, Moved, OPERATOR, blank, busy, drive, for_qemu, guest_on, node, qemu_img};
use vmove_tests::monitor::Monitor;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, Scene, gone_from, ready, vmove};

use super::disks::{info, tool};

/// Beyond what the guest works on.
const PATTERN_AT: &str = "48M";
/// So slow that the disk takes some seconds.
const SLOW: &str = "256Mbit";
const LARGE: u64 = 512 << 20;

/// The image is one alone, and holds the pattern.
fn is_whole(moved: &Moved, image: &Path, pattern: &str) {
    let (node, ..) = moved.sides().expect("it is somewhere");
    node.ask(&["pause", NAME]).expect("it pauses");
    let found = info(image);
    assert_eq!((&found["format"], found.get("backing-filename")), (&"qcow2".into(), None), "{found}");
    tool("qemu-img", &["check", "-q", "-U"], image);
    let read = format!("read -P 7 {pattern}");
    let said = tool("qemu-io", &["-U", "-r", "-f", "qcow2", "-c", &read], image);
    assert!(!said.contains("failed"), "{said}");
    node.ask(&["resume", NAME]).expect("it goes on");
}

/// When the guest ran at the destination, in milliseconds after the request.
fn runs_ms(report: &Value) -> f64 {
    let phases = report["phases"].as_array().expect("phases");
    let fetch = phases.iter().find(|phase| phase["name"] == "fetch").expect("a phase");
    fetch["start_ms"].as_f64().expect("a number")
}

/// A raw image of 512 MiB, full of a pattern beyond what the guest works on.
fn large() -> Moved {
    let sandbox = Sandbox::new().expect("a sandbox");
    Moved::start_with(sandbox, "raw", |image| {
        blank(image, LARGE).expect("an image");
        tool("qemu-io", &["-f", "raw", "-c", &format!("write -P 7 {PATTERN_AT} 464M")], image);
        drive(image, "raw", "")
    })
    .expect("a guest")
}

#[test]
fn a_guest_runs_long_before_its_disk_is_there() {
    need!(ready());
    need!(qemu_img());
    let moved = large();
    moved.works().expect("it works on its disk");
    let options = ["--mode", "postcopy", "--bandwidth", SLOW];
    let after = moved.migrate(&[&options[..], &["--disks-after"]].concat()).expect("it moves");
    let (_, _, here, _) = moved.sides().expect("it is there");
    moved.works().expect("it works on its disk there");
    is_whole(&moved, &here, &format!("{PATTERN_AT} 464M"));
    let disk = &after["disks"][0];
    assert_eq!((&disk["after"], &disk["format"]), (&true.into(), &"qcow2".into()), "{after}");
    assert!(disk["sent_bytes"].as_u64().is_some_and(|sent| sent > 464 << 20), "{after}");
    let kept = PathBuf::from(disk["left_at"].as_str().expect("the old image"));
    assert!(kept.to_string_lossy().contains(".moved-"), "{after}");
    std::fs::remove_file(kept).expect("it is there");
    // The same image the other way, copied first.
    let first = moved.migrate(&options).expect("it moves back");
    let (after_ms, first_ms) = (runs_ms(&after), runs_ms(&first));
    eprintln!(
        "the guest ran at the destination after {after_ms:.0} ms, and {first_ms:.0} ms where its disk came first"
    );
    assert!(first_ms > 10_000.0, "464 MiB at 32 MB/s came in {first_ms} ms");
    assert!(after_ms < first_ms / 4.0, "{after_ms} ms, and {first_ms} ms where the disk came first");
    moved.nothing_left().expect("nothing is left of the copy");
}

/// Whatever the image was: once the move is done nothing of the source is needed.
#[test]
fn nothing_of_the_source_is_needed_in_the_end() {
    need!(ready());
    need!(qemu_img());
    for (mode, is_node) in [("hybrid", false), ("precopy", true)] {
        let sandbox = Sandbox::new().expect("a sandbox");
        let base = sandbox.path().join("base.raw");
        let mut moved = Moved::start_with(sandbox, "qcow2", |image| {
            blank(&base, 64 << 20).expect("a base");
            tool("qemu-io", &["-f", "raw", "-c", &format!("write -P 7 {PATTERN_AT} 8M")], &base);
            std::fs::remove_file(image).expect("it was made");
            let below = base.to_str().expect("a path");
            tool("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", below], image);
            for_qemu(image).expect("it is given to QEMU");
            if is_node { node(image, "qcow2") } else { drive(image, "qcow2", ",cache=none") }
        })
        .expect("a guest");
        moved.works().expect("it works on its disk");
        let options = ["--mode", mode, "--disks-after", "--source-disks", "delete"];
        let report = moved.migrate(&options).expect("it moves");
        assert_eq!(report["disks"][0]["left_at"], Value::Null, "{report}");
        moved.nothing_left().expect("nothing is left");
        moved.scene.a.stop().expect("the source's daemon ends");
        std::fs::remove_file(&base).expect("the base is removed");
        moved.scene.b.ask(&["list"]).expect("it is there");
        vmove_tests::disks::works(&moved.scene.b, NAME).expect("it works on its disk");
        is_whole(&moved, &moved.images()[1], &format!("{PATTERN_AT} 8M"));
    }
}

/// The guest shuts down before its disk is all there: what it left is in two images, which [the guide](../../../docs/guides/disks.md) makes one.
#[test]
fn the_disk_of_a_guest_that_ended_too_early_is_put_together_as_the_guide_says() {
    need!(ready());
    need!(qemu_img());
    let moved = large();
    let options = moved.options().expect("options");
    let mut words: Vec<&str> = options.iter().map(String::as_str).collect();
    words.extend_from_slice(&["--disks-after", "--mode", "postcopy", "--bandwidth", "64Mbit"]);
    let id = moved.scene.start(&words).expect("it begins");
    moved.scene.reach(&id, "disks-after").expect("the disk follows");
    vmove_tests::disks::works(&moved.scene.b, NAME).expect("it works on its disk there");
    let operator = moved.scene.b.vm(NAME).expect("a VM").dir.join(OPERATOR);
    Monitor::connect(&operator).expect("a monitor").run("quit", Value::Null).expect("QEMU ends");
    let end = vmove(&moved.scene.a, &["status", &id, "--follow"]).expect("an end");
    let [here, there] = moved.images();
    let told = format!("{} here lies over its image at a, and neither is whole alone", there.display());
    assert!(end.code == 4 && end.said.contains(&told), "{} {}", end.answer, end.said);
    assert!(!end.said.contains("guest-is-lost"), "it would write to what is below: {}", end.said);
    for node in [&moved.scene.a, &moved.scene.b] {
        node.ask(&["stop", "--force", NAME]).expect("nothing is kept of the guest");
        gone_from(node).expect("it has gone");
    }
    let (copy, lies_over) = (there.with_file_name("copy.raw"), info(&there)["backing-filename"].clone());
    assert!(here.is_file() && lies_over.is_string(), "{lies_over} {:?}", moved.files());
    std::fs::copy(&here, &copy).expect("it is copied");
    let below = copy.to_str().expect("a path");
    tool("qemu-img", &["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", below], &there);
    tool("qemu-img", &["rebase", "-f", "qcow2", "-b", ""], &there);
    std::fs::remove_file(&copy).expect("it is of no use any more");
    tool("qemu-img", &["check", "-q"], &there);
    let read = format!("read -P 7 {PATTERN_AT} 464M");
    let said = tool("qemu-io", &["-r", "-f", "qcow2", "-c", &read], &there);
    assert!(!said.contains("failed"), "{said}");
}

fn refused(scene: &Scene, options: &[&str]) -> (i32, String) {
    let peer = scene.b.listen().to_string();
    let end = vmove(&scene.a, &[&["migrate", NAME, "--to", &peer], options].concat()).expect("an answer");
    (end.code, format!("{} {}", end.answer, end.said))
}

#[test]
fn what_cannot_follow_is_refused_and_the_price_is_told() {
    need!(ready());
    need!(qemu_img());
    let sandbox = Sandbox::new().expect("a sandbox");
    let folder = sandbox.folder("disks").expect("a folder");
    let image = folder.join("guest.raw");
    for_qemu(&folder).expect("it is QEMU's");
    vmove_tests::disks::create(&image, "raw").expect("an image");
    let guest = guest_on(&image, drive(&image, "raw", "")).expect("a guest");
    assert!(busy().disk_mib > 0);
    let scene = Scene::in_sandbox(sandbox, "thp", &guest).expect("nodes");
    let map = format!("{DISK}={}", folder.join("there.qcow2").display());
    let follow = ["--disks", "all", "--disk-map", &map, "--disks-after"];
    for (more, word) in [
        (&["--paused"][..], "disks_after: expected a guest that runs"),
        (&["--device", "ib0=3b:00.1"], "found devices"),
        (&["--reads", "1GiB"], "found reads_bytes"),
    ] {
        let (code, said) = refused(&scene, &[&follow[..], more].concat());
        assert!(code != 0 && said.contains(word), "{code}: {said}");
    }
    let (code, said) =
        refused(&scene, &["--disks", "all", "--disk-map", "disk0=/dev/loop0", "--disks-after"]);
    if Path::new("/dev/loop0").exists() {
        assert!(code == 3 && said.contains("on the block device /dev/loop0"), "{code}: {said}");
    }
    let (code, said) = refused(&scene, &["--disks-after"]);
    assert!(code != 0 && said.contains("--disks"), "{code}: {said}");
    let peer = scene.b.listen().to_string();
    let checked = scene.a.ask(&[&["check", NAME, "--to", &peer], &follow[..]].concat()).expect("an answer");
    let told = checked["warnings"].to_string();
    assert!(
        told.contains("what has not crossed is lost") && told.contains("raw image becomes qcow2"),
        "{checked}"
    );
    assert!(checked["modes"].to_string().contains("postcopy"), "{checked}");
}
