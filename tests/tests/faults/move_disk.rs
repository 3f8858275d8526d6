//! A disk gets another image on its host, and what goes wrong meanwhile: the guest finds what it wrote, on one image or the other, and nothing of
//! a copy is left.
#![cfg(test)]

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::disks::{DISK, Moved, OPERATOR, drive, for_qemu, qemu_img};
use vmove_tests::monitor::Monitor;
use vmove_tests::sandbox::{Sandbox, qemu_in};
use vmove_tests::scene::{NAME, STEP_TIMEOUT, ready, vmove};

/// So slow that copying takes some seconds.
const SLOW: &str = "64Mbit";
/// So slow that it does not end.
const ENDLESS: &str = "256kbit";

/// Begins to move the disk of the guest at `a`.
fn begin(moved: &Moved, image: &Path, bandwidth: &str) {
    let image = image.to_string_lossy();
    let words = ["move-disk", NAME, DISK, "--to", &image, "--bandwidth", bandwidth, "--detach"];
    let end = vmove(&moved.scene.a, &words).expect("an answer");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    std::thread::sleep(Duration::from_millis(500));
}

fn state(ended: &Value) -> &str {
    ended["state"].as_str().unwrap_or_default()
}

/// No journal of a move is left: nothing is taken up at the next start. It goes last.
fn nothing_noted(moved: &Moved) {
    let journals = moved.scene.a.folder().join("state/disk-moves");
    let deadline = Instant::now() + STEP_TIMEOUT;
    loop {
        let left: Vec<_> = std::fs::read_dir(&journals).into_iter().flatten().flatten().collect();
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "{left:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn operator(moved: &Moved) -> Monitor {
    let socket = moved.scene.a.vm(NAME).expect("a VM").dir.join(OPERATOR);
    Monitor::connect(&socket).expect("a monitor")
}

/// The job by which QEMU copies the disk.
fn job(moved: &Moved) -> String {
    let jobs = operator(moved).run("query-block-jobs", Value::Null).expect("jobs");
    jobs[0]["device"].as_str().unwrap_or_else(|| panic!("no job: {jobs}")).to_owned()
}

#[test]
fn a_move_of_a_disk_goes_on_when_its_daemon_is_killed() {
    need!(ready());
    need!(qemu_img());
    let mut moved = Moved::start("qcow2", "").expect("a guest");
    let [first, _] = moved.images();
    let second = first.with_file_name("second.qcow2");
    begin(&moved, &second, SLOW);
    moved.scene.a.crash();
    moved.works().expect_err("no daemon tells");
    moved.scene.a.run().expect("it starts again");
    let ended = moved.until_disk_move_ends().expect("it ends");
    assert_eq!(state(&ended), "moved", "{ended}");
    moved.works().expect("it works on its disk");
    moved.nothing_left().expect("nothing is left of the copy");
    assert!(second.is_file() && !first.exists(), "{:?}", moved.files());
    nothing_noted(&moved);

    // Killed in the switch: QEMU has done what it was asked for, and the next daemon finds out.
    begin(&moved, &first, ENDLESS);
    let job = job(&moved);
    moved.scene.a.crash();
    let monitor = Monitor::connect(&moved.scene.a.folder().join("run").join(NAME).join(OPERATOR));
    let monitor = monitor.expect("a monitor");
    monitor.run("block-job-set-speed", json!({ "device": job, "speed": 0 })).expect("it is faster");
    monitor.wait("BLOCK_JOB_READY", STEP_TIMEOUT, |_| true).expect("it is ready");
    monitor.run("block-job-complete", json!({ "device": job })).expect("it is switched");
    monitor.wait("BLOCK_JOB_COMPLETED", STEP_TIMEOUT, |_| true).expect("it has the new image");
    // It serves one client at a time.
    drop(monitor);
    moved.scene.a.run().expect("it starts again");
    let ended = moved.until_disk_move_ends().expect("it ends");
    assert_eq!(state(&ended), "moved", "{ended}");
    moved.works().expect("it works on its disk");
    moved.nothing_left().expect("nothing is left of the copy");
    assert!(first.is_file() && !second.exists(), "{:?}", moved.files());
    nothing_noted(&moved);
    // Its record names the image that it has.
    moved.migrate(&[]).expect("it moves");
    moved.works().expect("it works on its disk there");
}

#[test]
fn a_move_of_a_disk_that_fails_leaves_the_guest_its_disk() {
    need!(ready());
    need!(qemu_img());
    let sandbox = Sandbox::new().expect("a sandbox");
    let small = sandbox.mount_small("small", 40 << 20).expect("a small file system");
    for_qemu(&small).expect("it is given to QEMU");
    let mut moved = Moved::start_with(sandbox, "raw", |image| drive(image, "raw", "")).expect("a guest");
    moved.works().expect("it works on its disk");
    let [first, _] = moved.images();

    // Somebody else ends the job.
    begin(&moved, &first.with_file_name("second.raw"), ENDLESS);
    let job = job(&moved);
    operator(&moved).run("block-job-cancel", json!({ "device": job, "force": true })).expect("it is ended");
    let ended = moved.until_disk_move_ends().expect("it ends");
    assert_eq!(state(&ended), "failed", "{ended}");
    assert!(ended["error"].as_str().is_some_and(|why| why.contains("has its disk as before")), "{ended}");

    // Room runs out: more than is free then comes while the copy is made.
    begin(&moved, &small.join("disk"), ENDLESS);
    let mut taken = std::fs::File::create(small.join("filler")).expect("a file");
    while std::io::Write::write_all(&mut taken, &[1; 65536]).is_ok() {}
    let job = self::job(&moved);
    operator(&moved).run("block-job-set-speed", json!({ "device": job, "speed": 0 })).expect("it is faster");
    let ended = moved.until_disk_move_ends().expect("it ends");
    assert_eq!(state(&ended), "failed", "{ended}");
    assert!(ended["error"].as_str().is_some_and(|why| why.contains("No space left")), "{ended}");
    assert!(!small.join("disk").exists(), "half an image is left");
    moved.works().expect("it works on its disk");
    moved.nothing_left().expect("nothing is left of the copy");
    assert_eq!(moved.files().expect("files"), std::slice::from_ref(&first));
    nothing_noted(&moved);

    // QEMU ends: the disk is the old image, and half of a new one is not left, whether the daemon sees it or not.
    let second = first.with_file_name("second.raw");
    begin(&moved, &second, ENDLESS);
    moved.scene.a.crash();
    let qemu = qemu_in(moved.scene.a.folder()).expect("a QEMU");
    kill(Pid::from_raw(qemu), Signal::SIGKILL).expect("it is killed");
    moved.scene.a.run().expect("it starts again");
    let deadline = Instant::now() + STEP_TIMEOUT;
    while second.exists() {
        assert!(Instant::now() < deadline, "half an image is left: {}", moved.scene.a.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(first.is_file());
    nothing_noted(&moved);
}
