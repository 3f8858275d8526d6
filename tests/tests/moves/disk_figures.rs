//! What moving disks costs: the rate of a copy beside that of `nbdcopy`, and what it adds to the pause. The bounds are wide, since other
//! programs run meanwhile; the figures are printed.
#![cfg(test)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vmove_skip::need;
use vmove_tests::debian_disk;
use vmove_tests::disks::{Moved, OPERATOR, drive, for_qemu, qemu_img};
use vmove_tests::monitor::Monitor;
use vmove_tests::process::Guarded;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, ready, vmove};

const SIDE_MIB: usize = 512;

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    println!("{figures:.1?}");
    figures[figures.len() / 2]
}

/// The tool that copies over NBD, from Debian's `libnbd-bin`.
fn nbdcopy() -> Result<()> {
    let found = Command::new("nbdcopy").arg("--version").output().context("nbdcopy is not installed")?;
    ensure!(found.status.success(), "nbdcopy --version ended with {}", found.status);
    Ok(())
}

/// Copies an image over a connection of this host, as `vmove` does, by the tools of NBD and QEMU. In seconds.
fn by_nbdcopy(image: &Path, target: &Path, options: &[&str]) -> f64 {
    let _ = std::fs::remove_file(target);
    std::fs::File::create(target).and_then(|file| file.set_len((SIDE_MIB as u64) << 20)).expect("a target");
    let port = "10933";
    let server = Command::new("qemu-nbd")
        .args(["-f", "raw", "-b", "127.0.0.1", "-p", port, "-t", "--discard=unmap", "--cache=writeback"])
        .arg(target)
        .stdout(Stdio::null())
        .spawn()
        .expect("qemu-nbd runs");
    let mut server = Guarded::from(server);
    while std::net::TcpStream::connect(format!("127.0.0.1:{port}")).is_err() {
        assert_eq!(server.ended().expect("a process"), None, "qemu-nbd has ended");
        std::thread::sleep(Duration::from_millis(20));
    }
    let begun = Instant::now();
    let done = Command::new("nbdcopy")
        .args(options)
        .arg("--")
        .arg(image)
        .arg(format!("nbd://127.0.0.1:{port}"))
        .status();
    let took = begun.elapsed().as_secs_f64();
    assert!(done.expect("nbdcopy runs").success());
    took
}

/// The images are in memory: nothing but the two programs, the wire and the processors.
#[test]
#[ignore = "measures: ./run bench disk"]
fn a_disk_is_copied_as_fast_as_by_nbdcopy() {
    need!(ready());
    need!(qemu_img());
    need!(nbdcopy());
    let sandbox = Sandbox::new().expect("a sandbox");
    let folder = sandbox.mount_small("sides", 2 << 30).expect("a file system in memory");
    beside_nbdcopy(sandbox, &folder, &[]);
}

/// The images are on the disk of this host. A migration has the kernel write out what has come, once a second, so nbdcopy does so, too.
#[test]
#[ignore = "measures: ./run bench disk"]
fn a_disk_is_copied_to_a_disk_beside_nbdcopy() {
    need!(ready());
    need!(qemu_img());
    need!(nbdcopy());
    let sandbox = Sandbox::new().expect("a sandbox");
    let folder = sandbox.folder("sides").expect("a folder");
    beside_nbdcopy(sandbox, &folder, &["--flush"]);
}

fn beside_nbdcopy(sandbox: Sandbox, folder: &Path, options: &[&str]) {
    for_qemu(folder).expect("it is given to QEMU");
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
    for turn in 0..5 {
        theirs.push(by_nbdcopy(&here, &folder.join("compared.raw"), options));
        let there = folder.join(format!("side-{turn}.raw"));
        let place = format!("side0={}", there.display());
        // As fast as it goes, whatever the guest does with its other disk.
        let options = ["--disk-map", &place, "--disk-pace", "0%", "--source-disks", "delete"];
        let report = moved.migrate(&options).expect("it moves");
        let disks = report["disks"].as_array().cloned().unwrap_or_default();
        let disk = disks.iter().find(|disk| disk["name"] == "side0").expect("it has moved");
        ours.push(disk["copy_ms"].as_f64().unwrap_or(f64::MAX) / 1e3);
        here = there;
    }
    let (ours, theirs) = (median(ours), median(theirs));
    println!(
        "copy of {SIDE_MIB} MiB: {ours:.2} s, by nbdcopy {theirs:.2} s: {:.2} of its rate",
        theirs / ours
    );
    assert!(theirs / ours > 0.4, "expected 0.8 of the rate of nbdcopy, found {:.2}", theirs / ours);
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

/// Requests that QEMU has dealt with for the guest's disk, and how long they took, in seconds.
fn requests(monitor: &Monitor) -> (f64, f64) {
    let stats = monitor.run("query-blockstats", Value::Null).expect("figures");
    let of = |key: &str| stats[0]["stats"][key].as_f64().unwrap_or_default();
    let seconds = (of("rd_total_time_ns") + of("wr_total_time_ns")) / 1e9;
    (of("rd_operations") + of("wr_operations"), seconds)
}

/// Requests of the guest in a second, and how long one takes, in milliseconds.
fn pace(monitor: &Monitor, during: impl FnOnce()) -> (f64, f64) {
    let ((before, spent), begun) = (requests(monitor), Instant::now());
    during();
    let took = begun.elapsed().as_secs_f64();
    let (after, now_spent) = requests(monitor);
    ((after - before) / took, (now_spent - spent) / (after - before) * 1e3)
}

/// fio reads and writes at random places, one request at a time, past the guest's page cache; meanwhile its disk of some GiB is copied.
#[test]
#[ignore = "measures: ./run bench disk"]
fn what_a_guest_keeps_of_its_pace_while_its_disk_is_copied() {
    need!(ready());
    need!(debian_disk::ready());
    let (moved, mut typist) = debian_disk::guest().expect("a guest");
    let fill = "dd if=/dev/urandom of=/mnt/block bs=1M count=8 2>/dev/null && for i in $(seq 224); do cat /mnt/block; done >/mnt/filler && sync";
    assert_eq!(typist.line(fill, Duration::from_secs(300)).expect("it is filled").code, 0);
    let fio = "chroot /mnt fio --name=pace --filename=/pace --size=64M --rw=randrw --bs=4k --direct=1 --ioengine=psync --time_based --runtime=600 \
               >/dev/null 2>&1 &";
    assert_eq!(typist.line(fio, Duration::from_secs(60)).expect("it begins").code, 0);
    std::thread::sleep(Duration::from_secs(8));
    // The first is the default.
    let ways = [&[][..], &["--disk-pace", "0%"], &["--disk-pace", "0%", "--bandwidth", "800Mbit"]];
    let kept = ways.map(|options| {
        let kept = median((0..3).map(|_| kept_pace(&moved, options)).collect());
        println!("with {options:?}: {kept:.2} of its pace");
        kept
    });
    assert!(kept[0] > 0.5, "expected 0.7 of its pace, found {:.2}", kept[0]);
}

/// Of 1.
fn kept_pace(moved: &Moved, limit: &[&str]) -> f64 {
    let (node, ..) = moved.sides().expect("it is somewhere");
    let monitor = Monitor::connect(&node.vm(NAME).expect("a VM").dir.join(OPERATOR)).expect("a monitor");
    let (before, before_ms) = pace(&monitor, || std::thread::sleep(Duration::from_secs(5)));
    let id = moved.start_move(&[&["--source-disks", "delete"], limit].concat()).expect("it begins");
    moved.scene.reach(&id, "disks").expect("the disk is copied");
    let path = format!("/v1/migrations/{id}");
    let begun = Instant::now();
    let (meanwhile, meanwhile_ms) = pace(&monitor, || {
        let is_copied = || {
            let (_, told) = moved.scene.a.rest("GET", &path, &Value::Null).expect("an answer");
            told["phase"] != "disks"
        };
        while !is_copied() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let took = begun.elapsed().as_secs_f64();
    let end = moved.scene.end(&id).expect("an end");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    let gave_way = &end.answer["disks"][0]["latency"]["gave_way"];
    println!(
        "fio: {before:.0} requests/s of {before_ms:.3} ms before, {meanwhile:.0} of {meanwhile_ms:.3} ms while the disk is copied ({took:.1} s): {:.2}; told: {gave_way}",
        meanwhile / before
    );
    assert!(meanwhile > 0.0, "the guest should not stand still");
    // Back to where it is measured from.
    moved.migrate(&["--source-disks", "delete"]).expect("it moves back");
    meanwhile / before
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
