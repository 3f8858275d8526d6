//! How long a guest's requests to its disks take, before, during and after these move.
#![cfg(test)]

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::disks::{DISK, Moved, OPERATOR, blank, drive, for_qemu, qemu_img};
use vmove_tests::monitor::Monitor;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, ready, vmove};

const KINDS: [&str; 2] = ["reads", "writes"];
const SIDE_BYTES: u64 = 32 << 20;

/// A guest that works on its disk, and has another one, in that folder, which it does not touch once it has booted.
fn with_an_idle_disk(make: impl FnOnce(&Path)) -> (Moved, PathBuf) {
    let sandbox = Sandbox::new().expect("a sandbox");
    let folder = sandbox.folder("sides").expect("a folder");
    for_qemu(&folder).expect("it is given to QEMU");
    let side = folder.join("side.raw");
    make(&side);
    for_qemu(&side).expect("it is given to QEMU");
    let moved = Moved::start_with(sandbox, "raw", |image| {
        let mut words = drive(image, "raw", "");
        words.extend(["-drive".to_owned(), format!("if=none,id=side0,format=raw,file={}", side.display())]);
        words.extend(["-device", "virtio-blk-pci,drive=side0"].map(str::to_owned));
        words
    });
    (moved.expect("a guest"), folder)
}

/// How many requests there were, and what they took on average.
fn requests(io: &Value, kind: &str) -> (u64, f64) {
    let of = &io[kind];
    (of["requests"].as_u64().unwrap_or(0), of["mean_ms"].as_f64().unwrap_or(0.0))
}

/// What the monitors say of the guest's disks.
fn stats(moved: &Moved) -> Value {
    let (at, ..) = moved.sides().expect("it is somewhere");
    let operator = at.vm(NAME).expect("a VM").dir.join(OPERATOR);
    Monitor::connect(&operator).expect("a monitor").run("query-blockstats", Value::Null).expect("figures")
}

fn to(moved: &Moved, image: &Path, more: &[&str]) -> Value {
    let (at, ..) = moved.sides().expect("it is somewhere");
    let image = image.to_string_lossy();
    let end = vmove(at, &[&["move-disk", NAME, DISK, "--to", &image], more].concat()).expect("an answer");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    end.answer
}

#[test]
fn a_report_tells_how_long_requests_took_before_during_and_after_in_each_mode() {
    need!(ready());
    need!(qemu_img());
    let (moved, folder) = with_an_idle_disk(|side| blank(side, SIDE_BYTES).expect("an image"));
    for mode in ["hybrid", "precopy", "postcopy"] {
        moved.works().expect("it works on its disk");
        let there = folder.join(format!("side-{mode}.raw"));
        let place = format!("side0={}", there.display());
        // Slow enough that the guest writes meanwhile, and memory that it writes to as fast is let go.
        let slow = ["--bandwidth", "160Mbit", "--max-downtime", "5s"];
        let report = moved.migrate(&[&["--mode", mode, "--disk-map", &place], &slow[..]].concat());
        let report = report.expect("it moves");
        let of = |name: &str| {
            let disks = report["disks"].as_array().cloned().unwrap_or_default();
            disks.into_iter().find(|disk| disk["name"] == name).expect("it has moved")["latency"].clone()
        };
        let (worked, idle) = (of(DISK), of("side0"));
        println!("{mode}: {worked}");
        for kind in KINDS {
            for period in ["before", "during"] {
                let (count, mean) = requests(&worked[period], kind);
                assert!(count > 0 && mean > 0.0, "{mode}, {kind} {period}: {worked}");
            }
        }
        let bins = worked["during"]["writes"]["histogram"].as_array().cloned().unwrap_or_default();
        let counted: u64 = bins.iter().filter_map(|bin| bin["requests"].as_u64()).sum();
        assert_eq!(counted, requests(&worked["during"], "writes").0, "{worked}");
        // What it writes meanwhile goes to both disks at the end, or from the beginning.
        let (before, during) = (requests(&worked["before"], "writes"), requests(&worked["during"], "writes"));
        println!("{mode}: writes took {:.2} ms before, {:.2} ms during", before.1, during.1);
        // Before it there is also what the guest did while it came here, slowed down, in the other two.
        assert!(mode != "hybrid" || during.1 >= before.1, "{before:?} {during:?}");
        assert!(worked["after"].is_object(), "{worked}");
        // None, and no zeros.
        let none = json!({ "reads": null, "writes": null, "flushes": null });
        assert_eq!((&idle["during"], &idle["after"]), (&none, &none), "{idle}");
        assert_eq!(idle["before"]["writes"], Value::Null, "{idle}");
        assert!(!stats(&moved).to_string().contains("latency_histogram"), "a histogram is left");
    }
}

#[test]
fn a_disk_that_gets_another_image_tells_how_long_its_requests_take() {
    need!(ready());
    need!(qemu_img());
    let moved = Moved::start("raw", "").expect("a guest");
    let [here, _] = moved.images();
    let (second, third) = (here.with_file_name("second.raw"), here.with_file_name("third.raw"));
    moved.works().expect("it works on its disk");
    let (at, ..) = moved.sides().expect("it is somewhere");
    to(&moved, &second, &["--bandwidth", "80Mbit", "--detach"]);
    // What it does at present.
    let mut present = Value::Null;
    while present["writes"].is_null() {
        let now = at.ask(&["disks", NAME]).expect("disks")["moves"][0].clone();
        assert_eq!(now["state"], "copying", "it has ended, and told nothing: {now}");
        present = now["progress"]["io"].clone();
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert!(stats(&moved).to_string().contains("wr_latency_histogram"), "QEMU keeps a histogram");
    let ended = moved.until_disk_move_ends().expect("it ends");
    moved.works().expect("it works on its disk");
    let latency = at.ask(&["disks", NAME]).expect("disks")["moves"][0]["latency"].clone();
    println!("{latency}");
    for kind in KINDS {
        for period in ["before", "during", "after"] {
            assert!(requests(&latency[period], kind).0 > 0, "{kind} {period}: {latency} ({ended})");
        }
    }
    assert!(!latency["during"]["writes"]["histogram"].as_array().expect("a list").is_empty(), "{latency}");
    assert!(!stats(&moved).to_string().contains("latency_histogram"), "a histogram is left");

    // One that an operator has set stays, and is used.
    let device = stats(&moved)[0]["qdev"].clone();
    let operator = Monitor::connect(&at.vm(NAME).expect("a VM").dir.join(OPERATOR)).expect("a monitor");
    let order = json!({ "id": device, "boundaries": [1_000_000, 3_000_000] });
    operator.run("block-latency-histogram-set", order).expect("a histogram");
    drop(operator);
    let moved_again = to(&moved, &third, &[]);
    let during = &moved_again["latency"]["during"]["writes"];
    if !during.is_null() {
        let bins = during["histogram"].as_array().expect("a list");
        assert!(
            bins.iter().all(|bin| [json!(0.0), json!(1.0), json!(3.0)].contains(&bin["from_ms"])),
            "{during}"
        );
    }
    assert!(stats(&moved).to_string().contains("[1000000,3000000]"), "{}", stats(&moved));
}

#[test]
fn a_copy_gives_way_to_the_guests_requests_unless_it_is_told_not_to() {
    need!(ready());
    need!(qemu_img());
    // Without holes, so that its copy takes seconds.
    let noise = |side: &Path| {
        let words =
            (1..=48_u64 << 20).flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        std::fs::write(side, words.collect::<Vec<u8>>()).expect("an image");
    };
    let (moved, folder) = with_an_idle_disk(noise);
    for (pace, gives_way) in [("95%", true), ("0%", false)] {
        moved.works().expect("it works on its disk");
        let there = folder.join(format!("full-{pace}.raw"));
        let place = format!("side0={}", there.display());
        let options = ["--disk-map", &place, "--disk-pace", pace, "--source-disks", "delete"];
        let report = moved.migrate(&options).expect("it moves");
        let way = &report["disks"][0]["latency"]["gave_way"];
        println!("{pace}: {way}");
        assert_eq!(way.is_object(), gives_way, "{report}");
        let held = way["held_back_ms"].as_f64().unwrap_or_default();
        // It rested at least, to see what requests take then.
        assert!(!gives_way || held >= 200.0, "{report}");
    }
}
