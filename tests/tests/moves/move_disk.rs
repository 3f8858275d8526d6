//! A disk gets another image on its host, while its guest works on it and knows what each block must hold.
#![cfg(test)]

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::disks::{DISK, DISK_BYTES, Moved, OPERATOR, blank, drive, node, qemu_img, works};
use vmove_tests::monitor::Monitor;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{End, NAME, ready, vmove};

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Moves the disk of the guest to this image, on the node that has it.
fn to(moved: &Moved, image: &Path, more: &[&str]) -> End {
    let (at, ..) = moved.sides().expect("it is somewhere");
    let image = image.to_string_lossy();
    vmove(at, &[&["move-disk", NAME, DISK, "--to", &image], more].concat()).expect("an answer")
}

/// What its QEMU has open.
fn nodes(moved: &Moved) -> String {
    let (at, ..) = moved.sides().expect("it is somewhere");
    let operator = at.vm(NAME).expect("a VM").dir.join(OPERATOR);
    let operator = Monitor::connect(&operator).expect("a monitor");
    operator.run("query-named-block-nodes", json!({ "flat": true })).expect("nodes").to_string()
}

/// The guest works on `new`, and nobody has `old` open.
fn works_on(moved: &Moved, new: &Path, old: &Path) {
    moved.works().expect("it works on its disk");
    moved.nothing_left().expect("nothing is left of the copy");
    let (open, new) = (nodes(moved), new.to_string_lossy());
    assert!(open.contains(&*new), "{new} is not open: {open}");
    assert!(!open.contains(&format!("\"{}\"", old.display())), "{} is still open: {open}", old.display());
    let (at, ..) = moved.sides().expect("it is somewhere");
    let disks = at.ask(&["disks", NAME]).expect("disks");
    assert_eq!(
        (text(&disks["disks"][0]["name"]), text(&disks["disks"][0]["file"])),
        (DISK, &*new),
        "{disks}"
    );
}

fn another_image_and_back(format: &str, options: impl Fn(&Path) -> Vec<String>) {
    let mut moved = Moved::start_with(Sandbox::new().expect("a sandbox"), format, options).expect("a guest");
    let [first, there] = moved.images();
    let second = first.with_file_name(format!("second.{format}"));
    moved.works().expect("it works on its disk");
    let end = to(&moved, &second, &[]);
    assert_eq!((end.code, text(&end.answer["state"])), (0, "moved"), "{} {}", end.answer, end.said);
    let waited = end.answer["switch_ms"].as_f64().expect("how long its requests waited");
    assert!(waited < 2_000.0, "{}", end.answer);
    works_on(&moved, &second, &first);
    let kept = PathBuf::from(text(&end.answer["left_at"]));
    assert!(
        kept.to_string_lossy().contains(".moved-") && kept.is_file() && !first.exists(),
        "{}",
        end.answer
    );
    std::fs::remove_file(kept).expect("the old image");
    let taken = second.metadata().expect("an image").blocks() * 512;
    assert!(taken <= DISK_BYTES / 2 + (1 << 20), "holes are filled: {taken} bytes");

    // Back, by the same name.
    let end = to(&moved, &first, &["--source-disks", "delete"]);
    assert_eq!((end.code, &end.answer["left_at"]), (0, &Value::Null), "{} {}", end.answer, end.said);
    works_on(&moved, &first, &second);
    assert_eq!(moved.files().expect("files"), std::slice::from_ref(&first));

    // Whoever comes later knows where the disk is: a daemon that is started again, and a migration.
    let end = to(&moved, &second, &["--source-disks", "delete"]);
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    moved.scene.a.crash();
    moved.scene.a.run().expect("it starts again");
    let report = moved.migrate(&["--source-disks", "delete"]).expect("it moves");
    assert_eq!(text(&report["disks"][0]["from"]), second.to_string_lossy(), "{report}");
    works_on(&moved, &there, &second);
    assert_eq!(moved.files().expect("files"), std::slice::from_ref(&there));

    // After a fork its disk is an overlay over the image that its child has, too: it becomes whole again.
    let b = &moved.scene.b;
    let forked = b.vfork(&["create", NAME, "--count", "1"]).expect("an answer");
    assert!(forked.status.success(), "{forked:?}");
    let third = there.with_file_name(format!("third.{format}"));
    let end = to(&moved, &third, &["--source-disks", "delete"]);
    assert_eq!((end.code, &end.answer["left_at"]), (0, &Value::Null), "{} {}", end.answer, end.said);
    works_on(&moved, &third, &there);
    works(b, "guest.1").expect("its child works on its own");
    let backing = Command::new("qemu-img").args(["info", "-U", "--output=json"]).arg(&third).output();
    let backing = String::from_utf8_lossy(&backing.expect("qemu-img runs").stdout).into_owned();
    assert!(!backing.contains("backing-filename"), "{backing}");
}

#[test]
fn a_raw_disk_gets_another_image_while_its_guest_works_on_it() {
    need!(ready());
    need!(qemu_img());
    another_image_and_back("raw", |image| drive(image, "raw", ",discard=unmap"));
}

#[test]
fn a_qcow2_disk_given_by_blockdev_gets_another_image_while_its_guest_works_on_it() {
    need!(ready());
    need!(qemu_img());
    another_image_and_back("qcow2", |image| node(image, "qcow2"));
}

#[test]
fn a_disk_that_cannot_get_another_image_is_refused_by_name() {
    need!(ready());
    need!(qemu_img());
    let sandbox = Sandbox::new().expect("a sandbox");
    let small = sandbox.mount_small("small", 1 << 20).expect("a small file system");
    let medium = sandbox.path().join("medium.iso");
    blank(&medium, 1 << 20).expect("a medium");
    let moved = Moved::start_with(sandbox, "raw", |image| {
        let mut words = drive(image, "raw", "");
        let cd = format!("if=none,id=cd0,media=cdrom,format=raw,readonly=on,file={}", medium.display());
        words.extend(["-drive", &cd, "-device", "virtio-scsi-pci,id=scsi"].map(str::to_owned));
        words.extend(["-device", "scsi-cd,drive=cd0,bus=scsi.0"].map(str::to_owned));
        words
    })
    .expect("a guest");
    let (a, [here, _]) = (&moved.scene.a, moved.images());
    let second = here.with_file_name("second.raw");
    let before = moved.files().expect("files");
    let ask = |disk: &str, to: &Path| {
        vmove(a, &["move-disk", NAME, disk, "--to", &to.to_string_lossy()]).expect("an answer")
    };
    for (end, code, words) in [
        (ask("vdz", &second), 3, "has no disk vdz: it has disk0, cd0"),
        (ask("cd0", &second), 3, "can only be read by the guest"),
        (ask(DISK, &here), 3, "is there already: remove it, or name another path by --to"),
        (ask(DISK, Path::new("/no/such/folder/x")), 3, "is not there: make it"),
        (ask(DISK, &small.join("x")), 3, "MiB free: make room there, or name other paths by --to"),
        (ask(DISK, Path::new("relative")), 2, "expected an absolute path"),
        (ask(DISK, Path::new("/dev/null")), 3, "is there already"),
    ] {
        assert_eq!(end.code, code, "{words}: {} {}", end.answer, end.said);
        assert!(end.error().contains(words), "{words:?} is not in {:?}", end.error());
    }
    assert_eq!(moved.files().expect("files"), before, "something is left");
    let none = vmove(a, &["move-disk", NAME, DISK, "--cancel"]).expect("an answer");
    assert_eq!((none.code, &none.answer["code"]), (1, &json!("unknown-disk")), "{}", none.answer);

    // Nothing else begins with the guest while one of its disks moves.
    let slow = ["--bandwidth", "16Mbit", "--detach"];
    let begun = to(&moved, &second, &slow);
    assert_eq!((begun.code, text(&begun.answer["state"])), (0, "copying"), "{} {}", begun.answer, begun.said);
    let peer = moved.scene.b.listen().to_string();
    for (code, arguments) in [
        (1, &["migrate", NAME, "--to", &peer][..]),
        (3, &["check", NAME, "--to", &peer]),
        (1, &["move-disk", NAME, DISK, "--to", "/tmp/third"]),
    ] {
        let end = vmove(a, arguments).expect("an answer");
        assert_eq!(end.code, code, "{arguments:?}: {} {}", end.answer, end.said);
        let said = end.answer.to_string();
        assert!(said.contains("vmove move-disk guest disk0 --cancel"), "{arguments:?}: {said}");
    }
    let forked = a.vfork(&["--json", "create", NAME, "--count", "1"]).expect("an answer");
    let said = String::from_utf8_lossy(&forked.stdout).into_owned();
    assert!(!forked.status.success() && said.contains("vmove move-disk guest disk0 --cancel"), "{forked:?}");

    // Called off, by any name of the disk.
    let called_off = vmove(a, &["move-disk", NAME, DISK, "--cancel"]).expect("an answer");
    assert_eq!(called_off.code, 0, "{} {}", called_off.answer, called_off.said);
    let ended = moved.until_disk_move_ends().expect("it ends");
    assert_eq!(text(&ended["state"]), "cancelled", "{ended}");
    works_on(&moved, &here, &second);
    assert_eq!(moved.files().expect("files"), before, "something is left");
    let end = to(&moved, &second, &[]);
    assert_eq!(end.code, 0, "it moves now: {} {}", end.answer, end.said);
    works_on(&moved, &second, &here);
}
