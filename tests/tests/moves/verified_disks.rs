//! `--verify` of disks that move: each is compared with the image that the guest left, while the guest works on it.
#![cfg(test)]

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::disks::{DISK_BYTES, Moved, blank, drive, for_qemu, node, qemu_img};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{End, NAME, ready};

use super::disks::{number, tool};

const CHUNK: u64 = 64 << 10;
/// So slow that a guest whose memory is fetched runs for seconds before that is there.
const SLOW: &str = "64Mbit";
/// Beyond what the guest works on: what it holds stays as it is.
const HELD: u64 = 48 << 20;

/// Has an image hold something at [`HELD`].
fn hold(image: &Path, format: &str) {
    tool("qemu-io", &["-f", format, "-c", &format!("write -P 5 {HELD} 4M")], image);
}

fn started(format: &str) -> Moved {
    Moved::start_with(Sandbox::new().expect("a sandbox"), format, |image| {
        hold(image, format);
        for_qemu(image).expect("it is given to QEMU");
        drive(image, format, "")
    })
    .expect("a guest")
}

/// All chunks of the only disk were compared, and nothing but what the guest wrote differs.
fn is_verified(report: &Value) {
    let found = &report["disks"][0]["verified"];
    let (equal, written) = (number(&found["equal_chunks"]), number(&found["written_chunks"]));
    assert_eq!((&report["verified"], &found["problem"]), (&Value::Bool(true), &Value::Null), "{report}");
    assert_eq!(number(&found["differing_chunks"]), 0, "{report}");
    assert_eq!(equal + written, DISK_BYTES / CHUNK, "{report}");
    // The guest works on half of the disk, and 4 MiB are held.
    assert!(equal >= (DISK_BYTES / 2) / CHUNK, "{report}");
    for side in ["source_read_bytes", "destination_read_bytes"] {
        let read = number(&found[side]);
        assert!((4 << 20..=DISK_BYTES / 2 + (5 << 20)).contains(&read), "{side}: {read}: {report}");
    }
}

#[test]
fn a_raw_disk_is_compared_while_its_guest_writes_to_it() {
    need!(ready());
    need!(qemu_img());
    let moved = started("raw");
    for mode in ["hybrid", "precopy", "postcopy"] {
        moved.works().expect("it works on its disk");
        let report = moved.migrate(&["--mode", mode, "--verify", "--source-disks", "delete"]);
        let report = report.expect("it moves");
        is_verified(&report);
        assert_eq!(report["disks"][0]["left_at"], Value::Null, "{report}");
        moved.works().expect("it works on its disk there");
        moved.nothing_left().expect("nothing is left of the comparison");
    }
    // Long after the hand-over: the guest has written to all that it works on, and that is not taken for damage.
    let report = moved.migrate(&["--mode", "postcopy", "--verify", "--bandwidth", SLOW]).expect("it moves");
    is_verified(&report);
    assert!(number(&report["disks"][0]["verified"]["written_chunks"]) > 0, "{report}");
    moved.nothing_left().expect("nothing is left of the comparison");
}

#[test]
fn a_qcow2_disk_over_a_backing_file_is_compared_with_the_image_that_it_became() {
    need!(ready());
    need!(qemu_img());
    let sandbox = Sandbox::new().expect("a sandbox");
    let base = sandbox.path().join("base.raw");
    let moved = Moved::start_with(sandbox, "qcow2", |image| {
        blank(&base, DISK_BYTES).expect("a base");
        hold(&base, "raw");
        for_qemu(&base).expect("it is given to QEMU");
        std::fs::remove_file(image).expect("it was made");
        let base = base.to_str().unwrap_or_default();
        tool("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", base], image);
        for_qemu(image).expect("it is given to QEMU");
        node(image, "qcow2")
    })
    .expect("a guest");
    for _ in ["there", "back"] {
        moved.works().expect("it works on its disk");
        is_verified(&moved.migrate(&["--verify", "--mode", "hybrid"]).expect("it moves"));
        moved.works().expect("it works on its disk there");
        moved.nothing_left().expect("nothing is left of the comparison");
    }
}

/// Begins a move whose memory takes seconds, and does something to the images once the guest runs at the destination. How it ends.
fn damaged(moved: &Moved, more: &[&str], damage: impl Fn(&Path, &Path)) -> End {
    let slowly = ["--mode", "postcopy", "--bandwidth", SLOW, "--source-disks", "delete"];
    let id = moved.start_move(&[more, &slowly].concat()).expect("it begins");
    moved.scene.handed_over(&id).expect("the guest runs there");
    let [here, there] = moved.images();
    damage(&here, &there);
    moved.scene.end(&id).expect("an end")
}

fn change(image: &Path, at: u64) {
    let file = std::fs::File::options().write(true).open(image).expect("an image");
    file.write_all_at(&[0xa5], at).expect("a byte");
}

/// Where what the guest sees at a place is in the image.
fn place_in(image: &Path, at: u64) -> u64 {
    let map = tool("qemu-img", &["map", "-U", "--output=json"], image);
    let map: Value = serde_json::from_str(&map).expect("JSON");
    let ranges = map.as_array().cloned().unwrap_or_default();
    let range = ranges.iter().find(|range| {
        let start = number(&range["start"]);
        (start..start + number(&range["length"])).contains(&at)
    });
    let range = range.expect("a range");
    range["offset"].as_u64().expect("it takes room") + at - number(&range["start"])
}

/// The difference was told, the old image is there, and the guest runs.
fn is_told(moved: &Moved, end: &End, words: &str) {
    assert_eq!((end.code, &end.answer["guest"]), (4, &"destination".into()), "{} {}", end.answer, end.said);
    let error = end.error();
    assert!(error.contains("Verification failed") && error.contains(words), "{error}");
    let [here, there] = moved.images();
    let kept: Vec<PathBuf> = moved.files().expect("files");
    let kept = kept.iter().find(|file| file.to_string_lossy().contains(".moved-"));
    let kept = kept.expect("the image that the guest left is kept");
    assert!(error.contains(&*kept.to_string_lossy()), "{error} does not name {}", kept.display());
    assert!(there.is_file() && !here.exists(), "{:?}", moved.files());
    moved.works().expect("it works on its disk there");
    moved.nothing_left().expect("nothing is left of the comparison");
}

#[test]
fn a_byte_that_differs_is_found_and_the_old_image_stays() {
    need!(ready());
    need!(qemu_img());
    let moved = started("raw");
    moved.works().expect("it works on its disk");
    let (first, hole) = (HELD + (1 << 20) + 17, 60 << 20);
    let end = damaged(&moved, &["--verify"], |_, there| {
        change(there, first);
        // What is a hole at the source must be zeros there.
        change(there, hole);
    });
    is_told(
        &moved,
        &end,
        &format!("2 chunks of 64 KiB of disk disk0, the first at byte {}", HELD + (1 << 20)),
    );
}

#[test]
fn a_byte_that_differs_in_an_image_with_a_format_is_found() {
    need!(ready());
    need!(qemu_img());
    let moved = started("qcow2");
    moved.works().expect("it works on its disk");
    let end = damaged(&moved, &["--verify"], |here, _| change(here, place_in(here, HELD + 5)));
    is_told(&moved, &end, &format!("1 chunk of 64 KiB of disk disk0, the first at byte {HELD}"));
}

#[test]
fn what_is_not_asked_for_is_not_compared() {
    need!(ready());
    need!(qemu_img());
    let moved = started("raw");
    let end = damaged(&moved, &[], |_, there| change(there, HELD));
    assert_eq!((end.code, &end.answer["verified"]), (0, &Value::Null), "{}", end.answer);
    assert_eq!(end.answer["disks"][0]["verified"], Value::Null, "{}", end.answer);
    assert!(moved.files().expect("files").iter().all(|file| !file.to_string_lossy().contains(".moved-")));
    moved.nothing_left().expect("nothing is left of the comparison");
}

#[test]
fn people_are_told_what_was_compared() {
    need!(ready());
    need!(qemu_img());
    let moved = started("raw");
    let options = moved.options().expect("options");
    let to = moved.scene.b.listen().to_string();
    let words: Vec<&str> = ["migrate", NAME, "--to", &to, "--verify"]
        .into_iter()
        .chain(options.iter().map(String::as_str))
        .collect();
    let output = moved.scene.a.vmove(&words).expect("it moves");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    for words in [
        "disk0: nothing differs; ",
        " are equal, the guest has written to ",
        "and what the guest left on its disks",
    ] {
        assert!(told.contains(words), "{words:?} is not in {told}");
    }
}
