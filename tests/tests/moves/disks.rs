//! Disks that move with their guest, which works on them meanwhile and knows what each block must hold.
#![cfg(test)]

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::disks::{DISK, DISK_BYTES, Moved, OPERATOR, blank, drive, for_qemu, qemu_img};
use vmove_tests::monitor::Monitor;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, ready, vmove};

/// Disks beside the one that the guest works on.
const SIDE_BYTES: u64 = 32 << 20;

/// What a program of qemu-utils says of an image.
pub(super) fn tool(program: &str, arguments: &[&str], image: &Path) -> String {
    let output = Command::new(program).args(arguments).arg(image).output().expect("qemu-utils run");
    assert!(output.status.success(), "{program} {arguments:?} {}: {output:?}", image.display());
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(super) fn info(image: &Path) -> Value {
    serde_json::from_str(&tool("qemu-img", &["info", "-U", "--output=json"], image)).expect("JSON")
}

/// Fills a part of an image that no QEMU has.
fn write(image: &Path, format: &str, what: &str) {
    tool("qemu-io", &["-f", format, "-c", what], image);
}

fn same(one: &Path, format: &str, other: &Path) {
    let output = Command::new("qemu-img")
        .args(["compare", "-U", "-f", format, "-F", format])
        .args([one, other])
        .output();
    let output = output.expect("qemu-img runs");
    assert!(output.status.success(), "{} and {}: {output:?}", one.display(), other.display());
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

pub(super) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

#[test]
fn a_raw_disk_moves_there_and_back_while_its_guest_works_on_it() {
    need!(ready());
    need!(qemu_img());
    let moved = Moved::start("raw", "").expect("a guest");
    for mode in ["hybrid", "precopy", "postcopy"] {
        let (_, _, here, there) = moved.sides().expect("it is somewhere");
        moved.works().expect("it works on its disk");
        let report = moved.migrate(&["--mode", mode]).expect("it moves");
        moved.works().expect("it works on its disk there");
        let disk = &report["disks"][0];
        assert_eq!(
            (text(&disk["to"]), text(&disk["format"])),
            (there.to_str().unwrap_or_default(), "raw"),
            "{report}"
        );
        let kept = PathBuf::from(text(&disk["left_at"]));
        assert!(kept.to_string_lossy().contains(".moved-"), "{report}");
        std::fs::remove_file(kept).expect("the old image is under its new name");
        assert!(!here.exists() && there.is_file(), "the source's image keeps its name");
        // The guest works on half of it.
        let taken = there.metadata().expect("an image").blocks() * 512;
        assert!(taken <= DISK_BYTES / 2 + (1 << 20), "holes are filled: {taken} bytes; {report}");
        moved.nothing_left().expect("nothing is left of the copy");
    }
}

#[test]
fn a_qcow2_disk_over_a_backing_file_moves_as_one_image() {
    need!(ready());
    need!(qemu_img());
    let sandbox = Sandbox::new().expect("a sandbox");
    let base = sandbox.path().join("base.raw");
    let moved = Moved::start_with(sandbox, "qcow2", |image| {
        blank(&base, DISK_BYTES).expect("a base");
        write(&base, "raw", "write -P 5 48M 4M");
        std::fs::remove_file(image).expect("it was made");
        let base = base.to_str().unwrap_or_default();
        tool(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", base, "-o", "cluster_size=128k"],
            image,
        );
        for_qemu(image).expect("it is given to QEMU");
        drive(image, "qcow2", ",discard=unmap")
    })
    .expect("a guest");
    for (round, verb) in ["there", "back"].into_iter().enumerate() {
        let (_, _, _, there) = moved.sides().expect("it is somewhere");
        let report =
            moved.migrate(&["--source-disks", if round == 0 { "keep" } else { "delete" }]).expect(verb);
        moved.works().expect("it works on its disk");
        let found = info(&there);
        assert_eq!(found.get("backing-filename"), None, "{found}");
        assert_eq!(
            (number(&found["cluster-size"]), number(&found["virtual-size"])),
            (128 << 10, DISK_BYTES),
            "{found}"
        );
        let kept = report["disks"][0]["left_at"].as_str();
        assert_eq!(kept.is_some(), round == 0, "{report}");
    }
    let (node, _, here, _) = moved.sides().expect("it is somewhere");
    node.ask(&["pause", NAME]).expect("it pauses");
    write_check(&here);
}

/// What came of the base is there, and the image is sound.
fn write_check(image: &Path) {
    tool("qemu-img", &["check", "-q", "-U"], image);
    let read = Command::new("qemu-io")
        .args(["-U", "-r", "-f", "qcow2", "-c", "read -P 5 48M 4M"])
        .arg(image)
        .output();
    let read = String::from_utf8_lossy(&read.expect("qemu-io runs").stdout).into_owned();
    assert!(!read.contains("failed") && read.contains("4 MiB"), "{read}");
}

#[test]
fn disks_of_all_front_ends_move_at_once() {
    need!(ready());
    need!(qemu_img());
    let sandbox = Sandbox::new().expect("a sandbox");
    let folder = sandbox.folder("sides").expect("a folder");
    for_qemu(&folder).expect("it is given to QEMU");
    let sides = [("vdb0", "raw"), ("scsi0", "qcow2"), ("blank0", "raw")];
    let medium = folder.join("medium.iso");
    blank(&medium, 1 << 20).expect("a medium");
    let moved = Moved::start_with(sandbox, "raw", |image| {
        let file = format!(
            "driver=file,node-name=file0,filename={},cache.direct=on,aio=threads,discard=unmap",
            image.display()
        );
        let disk = format!("driver=raw,node-name={DISK},file=file0,cache.direct=on,discard=unmap");
        let mut words: Vec<String> =
            ["-object", "iothread,id=io0", "-blockdev", &file, "-blockdev", &disk].map(str::to_owned).into();
        words.extend(["-device", "virtio-blk-pci,drive=disk0,id=vda,iothread=io0"].map(str::to_owned));
        for (name, format) in sides {
            let side = folder.join(format!("{name}.{format}"));
            tool(
                "qemu-img",
                &["create", "-q", "-f", format, side.to_str().unwrap_or_default()],
                Path::new("32M"),
            );
            if name != "blank0" {
                write(&side, format, "write -P 7 1M 3M");
                write(&side, format, "write -P 8 20M 64k");
            }
            for_qemu(&side).expect("it is given to QEMU");
            words.extend([
                "-drive".to_owned(),
                format!("if=none,id={name},format={format},file={}", side.display()),
            ]);
        }
        words.extend(
            ["-device", "virtio-blk-pci,drive=vdb0", "-device", "virtio-scsi-pci,id=scsi"].map(str::to_owned),
        );
        words.extend(
            ["-device", "scsi-hd,drive=scsi0,bus=scsi.0", "-device", "scsi-hd,drive=blank0,bus=scsi.0"]
                .map(str::to_owned),
        );
        words.extend([
            "-drive".to_owned(),
            format!("if=none,id=cd0,media=cdrom,format=raw,readonly=on,file={}", medium.display()),
        ]);
        words.extend(["-device", "scsi-cd,drive=cd0,bus=scsi.0"].map(str::to_owned));
        words
    })
    .expect("a guest");
    let there = |name: &str, format: &str| folder.join(format!("there-{name}.{format}"));
    let maps: Vec<String> =
        sides.map(|(name, format)| format!("{name}={}", there(name, format).display())).into();
    let more: Vec<&str> = maps.iter().flat_map(|map| ["--disk-map", map]).collect();
    let report = moved.migrate(&more).expect("it moves");
    moved.works().expect("it works on its disk there");
    let disks = report["disks"].as_array().cloned().unwrap_or_default();
    assert_eq!(disks.len(), 4, "{report}");
    for (name, format) in sides {
        let disk = disks.iter().find(|disk| disk["name"] == name).expect("it has moved");
        same(Path::new(text(&disk["left_at"])), format, &there(name, format));
        let (sent, allocated) = (number(&disk["sent_bytes"]), number(&disk["allocated_bytes"]));
        assert!(sent <= allocated + allocated / 20 + (64 << 10), "{sent} bytes for {allocated}: {report}");
        assert!(
            there(name, format).metadata().expect("an image").blocks() * 512 < SIDE_BYTES / 2,
            "holes are filled"
        );
    }
    assert!(medium.is_file(), "a medium that is only read stays where it is");
}

/// What `vmove migrate` says of these options; it is refused.
fn refused(moved: &Moved, options: &[&str]) -> String {
    let peer = moved.scene.b.listen().to_string();
    let end =
        vmove(&moved.scene.a, &[&["migrate", NAME, "--to", &peer], options].concat()).expect("an answer");
    assert_eq!(end.code, 3, "{options:?}: {} {}", end.answer, end.said);
    end.error().to_owned()
}

#[test]
fn disks_that_cannot_move_are_refused_by_name() {
    need!(ready());
    need!(qemu_img());
    let sandbox = Sandbox::new().expect("a sandbox");
    let small = sandbox.mount_small("small", 1 << 20).expect("a small file system");
    let medium = sandbox.path().join("medium.iso");
    blank(&medium, 1 << 20).expect("a medium");
    let moved = Moved::start_with(sandbox, "raw", |image| {
        let mut words = drive(image, "raw", "");
        words.extend([
            "-drive".to_owned(),
            format!("if=none,id=cd0,media=cdrom,format=raw,readonly=on,file={}", medium.display()),
        ]);
        words.extend(
            ["-device", "virtio-scsi-pci,id=scsi", "-device", "scsi-cd,drive=cd0,bus=scsi.0"]
                .map(str::to_owned),
        );
        words
    })
    .expect("a guest");
    let [here, there] = moved.images();
    let before = moved.files().expect("files");
    let map = |path: &Path| format!("{DISK}={}", path.display());
    let to = |path: &Path| refused(&moved, &["--disks", "all", "--disk-map", &map(path)]);
    for (said, words) in [
        (refused(&moved, &["--disks", "vdz"]), "no disk vdz: it has disk0, cd0"),
        (refused(&moved, &["--disks", "cd0"]), "can only be read"),
        (
            refused(&moved, &["--disks", "all"]),
            "is there already: remove it, or name another path by --disk-map disk0=PATH",
        ),
        (to(&here), "is there already"),
        (to(Path::new("/no/such/folder/x")), "is not there: make it"),
        (to(&small.join("x")), "MiB free: make room there"),
        (to(Path::new("/dev/null")), "is there already"),
    ] {
        assert!(said.contains(words), "{words:?} is not in {said:?}");
    }
    // A job of somebody else's.
    let operator =
        Monitor::connect(&moved.scene.a.vm(NAME).expect("a VM").dir.join(OPERATOR)).expect("a monitor");
    let target = here.with_extension("theirs");
    // Of a mirror, QEMU shows no filter on top of the disk.
    for kind in ["drive-backup", "drive-mirror"] {
        let job = json!({ "device": DISK, "job-id": "theirs", "sync": "full", "target": target, "format": "raw", "speed": 1 << 16 });
        operator.run(kind, job).expect("it begins");
        let said = to(&there);
        assert!(said.contains("job") && said.contains("wait for its end, or cancel it"), "{kind}: {said}");
        operator
            .run("block-job-cancel", json!({ "device": "theirs", "force": true }))
            .expect("it is cancelled");
        let limit = std::time::Duration::from_secs(10);
        operator.wait("JOB_STATUS_CHANGE", limit, |e| e.text("status") == Some("null")).expect("it ends");
        std::fs::remove_file(&target).expect("its target");
    }
    assert_eq!(moved.files().expect("files"), before, "something is left");
    // `check` says the same, and that the disk could come along.
    let peer = moved.scene.b.listen().to_string();
    let check =
        vmove(&moved.scene.a, &["check", NAME, "--to", &peer, "--disks", "all", "--disk-map", &map(&there)]);
    let check = check.expect("an answer");
    assert_eq!((check.code, &check.answer["blockers"]), (0, &json!([])), "{}", check.answer);
    moved.works().expect("it works on its disk");
    moved.migrate(&[]).expect("it moves now");
    moved.works().expect("it works on its disk there");
}
