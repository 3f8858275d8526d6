//! What moving disks costs: the rate of a copy beside that of `qemu-img`, and what it adds to the pause. The bounds are wide, since other
//! programs run meanwhile; the figures are printed.
#![cfg(test)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::disks::{Moved, drive, for_qemu, qemu_img};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, ready, vmove};

const SIDE_MIB: usize = 512;

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    println!("{figures:.1?}");
    figures[figures.len() / 2]
}

/// Copies an image over a connection of this host, as `vmove` does, by QEMU's own tools. In seconds.
fn by_qemu_img(image: &Path, target: &Path) -> f64 {
    let _ = std::fs::remove_file(target);
    std::fs::File::create(target).and_then(|file| file.set_len((SIDE_MIB as u64) << 20)).expect("a target");
    let port = "10933";
    let mut server = Command::new("qemu-nbd")
        .args(["-f", "raw", "-b", "127.0.0.1", "-p", port, "--discard=unmap", "--cache=writeback"])
        .arg(target)
        .stdout(Stdio::null())
        .spawn()
        .expect("qemu-nbd runs");
    while std::net::TcpStream::connect(format!("127.0.0.1:{port}")).is_err() {
        std::thread::sleep(Duration::from_millis(20));
        let ended = server.try_wait().expect("a process");
        if ended.is_some() {
            // It serves one connection, which was ours.
            server = Command::new("qemu-nbd")
                .args(["-f", "raw", "-b", "127.0.0.1", "-p", port, "-t"])
                .arg(target)
                .spawn()
                .expect("qemu-nbd runs");
        }
    }
    let begun = Instant::now();
    let done = Command::new("qemu-img")
        .args(["convert", "-U", "-n", "-f", "raw", "-O", "raw"])
        .arg(image)
        .arg(format!("nbd://127.0.0.1:{port}"))
        .status();
    let took = begun.elapsed().as_secs_f64();
    let _ = server.kill();
    let _ = server.wait();
    assert!(done.expect("qemu-img runs").success());
    took
}

#[test]
#[ignore = "measures: ./run bench disk"]
fn a_disk_is_copied_as_fast_as_by_qemu_img() {
    need!(ready());
    need!(qemu_img());
    let sandbox = Sandbox::new().expect("a sandbox");
    let folder = sandbox.folder("sides").expect("a folder");
    for_qemu(&folder).expect("it is given to QEMU");
    let side = folder.join("side.raw");
    let bytes: Vec<u8> = (0..SIDE_MIB << 17)
        .flat_map(|word| (word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    std::fs::write(&side, bytes).expect("an image");
    for_qemu(&side).expect("it is given to QEMU");
    let moved = Moved::start_with(sandbox, "raw", |image| {
        let mut words = drive(image, "raw", "");
        words.extend(["-drive".to_owned(), format!("if=none,id=side0,format=raw,file={}", side.display())]);
        words.extend(["-device", "virtio-blk-pci,drive=side0"].map(str::to_owned));
        words
    })
    .expect("a guest");
    let (mut ours, mut theirs, mut here) = (Vec::new(), Vec::new(), side);
    for turn in 0..3 {
        theirs.push(by_qemu_img(&here, &folder.join("compared.raw")));
        let there = folder.join(format!("side-{turn}.raw"));
        let report =
            moved.migrate(&["--disk-map", &format!("side0={}", there.display()), "--source-disks", "delete"]);
        let report = report.expect("it moves");
        let disks = report["disks"].as_array().cloned().unwrap_or_default();
        let disk = disks.iter().find(|disk| disk["name"] == "side0").expect("it has moved");
        ours.push(disk["copy_ms"].as_f64().unwrap_or(f64::MAX) / 1e3);
        here = there;
    }
    let (ours, theirs) = (median(ours), median(theirs));
    println!(
        "copy of {SIDE_MIB} MiB: {ours:.2} s, by qemu-img {theirs:.2} s: {:.2} of its rate",
        theirs / ours
    );
    assert!(theirs / ours > 0.4, "expected 0.8 of the rate of qemu-img, found {:.2}", theirs / ours);
}

/// The images are in memory: what QEMU waits for when it flushes the source's own disk is the same with and without a copy, and no figure of
/// vmove's.
#[test]
#[ignore = "measures: ./run bench disk"]
fn a_disk_adds_little_to_the_pause() {
    need!(ready());
    need!(qemu_img());
    let sandbox = Sandbox::new().expect("a sandbox");
    for folder in ["disks-a", "disks-b"] {
        sandbox.mount_small(folder, 80 << 20).expect("a file system in memory");
    }
    let moved = Moved::start_with(sandbox, "raw", |image| drive(image, "raw", "")).expect("a guest");
    let (mut with, mut without) = (Pauses::default(), Pauses::default());
    for _ in 0..5 {
        with.add(&moved.migrate(&["--mode", "hybrid", "--source-disks", "delete"]).expect("it moves"));
        // Both nodes are on this host, and see the disk: away and back, so that the image is where it was.
        for _ in 0..2 {
            let (from, to, ..) = moved.sides().expect("it is somewhere");
            let peer = to.listen().to_string();
            let end = vmove(from, &["migrate", NAME, "--to", &peer, "--mode", "hybrid"]).expect("an end");
            assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
            without.add(&end.answer);
        }
    }
    let (with, without) = (with.told("with its disk"), without.told("without"));
    println!("a disk adds {:.1} ms to the pause", with - without);
    assert!(with - without < 30.0, "expected some 6 ms more, found {:.1}", with - without);
    moved.works().expect("it works on its disk");
}

/// Pauses of migrations, by steps.
#[derive(Default)]
struct Pauses(BTreeMap<String, Vec<f64>>);

impl Pauses {
    fn add(&mut self, report: &Value) {
        let mut one = |name: &str, ms: &Value| {
            self.0.entry(name.to_owned()).or_default().push(ms.as_f64().unwrap_or(f64::MAX));
        };
        one("all", &report["downtime_ms"]);
        for step in report["pause"].as_array().into_iter().flatten() {
            one(step["name"].as_str().unwrap_or_default(), &step["duration_ms"]);
        }
    }

    /// The median of all.
    fn told(self, what: &str) -> f64 {
        println!("{what}:");
        let medians: Vec<(String, f64)> = self
            .0
            .into_iter()
            .map(|(name, all)| {
                (name.clone(), {
                    print!("  {name} ");
                    median(all)
                })
            })
            .collect();
        medians.into_iter().find(|(name, _)| name == "all").map_or(f64::MAX, |(_, ms)| ms)
    }
}
