//! Disks that move, and what goes wrong meanwhile: the guest finds what it wrote, wherever it goes on, and neither half an image nor anything of a
//! copy is left.
#![cfg(test)]

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::disks::{DISK, Moved, drive, for_qemu, qemu_img};
use vmove_tests::proxy::{Direction, Fault, Rule};
use vmove_tests::sandbox::{Sandbox, qemu_in};
use vmove_tests::scene::{End, NAME, STEP_TIMEOUT, device_state, gone_from, ready, vmove};

/// So slow that copying takes some seconds.
const SLOW: &str = "64Mbit";
/// The connection of the disk, counted from the first of the migration: control, pages, then the disk.
const DISK_WIRE: u64 = 4;

/// Lets no more than the beginning of the next migration's device state through, which comes one connection later than without a disk.
fn stall_device_state(moved: &Moved) {
    let proxy = moved.scene.proxy().expect("a proxy");
    proxy.add(device_state(proxy.connections() + 1, Fault::Stall));
}

/// The migration failed, and the guest goes on at `a` as if nothing had been asked.
fn back(moved: &Moved, end: &End) -> Result<()> {
    ensure!(end.code == 1, "expected that it fails: {} {}", end.answer, end.said);
    ensure!(end.answer["guest"] == "source", "{}", end.answer);
    stays(moved)
}

pub(super) fn stays(moved: &Moved) -> Result<()> {
    moved.works()?;
    gone_from(&moved.scene.b)?;
    let [here, there] = moved.images();
    ensure!(
        here.is_file() && !there.exists(),
        "expected the image at the source alone, found {:?}",
        moved.files()?
    );
    moved.nothing_left()
}

/// It moves after all, and finds its disk as it left it.
fn moves_now(moved: &Moved) -> Result<()> {
    moved.migrate(&[])?;
    moved.works()?;
    moved.nothing_left()
}

/// A blow, at a phase as the source tells it.
fn at(moved: &mut Moved, phase: &str, options: &[&str], blow: impl FnOnce(&mut Moved, &str)) -> Result<End> {
    let id = moved.start_move(options)?;
    moved.scene.reach(&id, phase)?;
    std::thread::sleep(Duration::from_millis(300));
    blow(moved, &id);
    moved.scene.end(&id)
}

#[test]
fn a_copy_that_is_called_off_or_cut_leaves_nothing() {
    need!(ready());
    need!(qemu_img());
    let mut moved = Moved::behind_proxy("raw").expect("a guest");
    let cancelled = at(&mut moved, "disks", &["--bandwidth", SLOW], |moved, id| {
        moved.scene.a.ask(&["cancel", id]).expect("it is cancelled");
    });
    back(&moved, &cancelled.expect("an end")).expect("the guest stays");
    let cut = at(&mut moved, "disks", &["--bandwidth", SLOW], |moved, _| {
        moved.scene.proxy().expect("a proxy").cut_all();
    });
    back(&moved, &cut.expect("an end")).expect("the guest stays");
    // The disk's connection alone: the copy ends, and the migration with it.
    let proxy = moved.scene.proxy().expect("a proxy");
    let connection = Some(proxy.connections() + DISK_WIRE);
    proxy.add(Rule { connection, direction: Direction::Forth, after: 2 << 20, fault: Fault::Cut });
    let id = moved.start_move(&[]).expect("it begins");
    let end = moved.scene.end(&id).expect("an end");
    assert!(end.error().contains("The copy of disk disk0 to the destination ended"), "{}", end.answer);
    back(&moved, &end).expect("the guest stays");
    // In step, and the guest writes to both: nobody answers any more.
    stall_device_state(&moved);
    let id = moved.start_move(&["--mode", "hybrid"]).expect("it begins");
    moved.scene.reach_one_of(&id, &["switchover", "hand-over"]).expect("the guest stops");
    moved.scene.proxy().expect("a proxy").cut_all();
    let end = moved.scene.end(&id).expect("an end");
    back(&moved, &end).expect("the guest stays");
    moved.scene.proxy().expect("a proxy").heal();
    moves_now(&moved).expect("it moves now");
}

#[test]
fn a_copy_for_which_room_runs_out_leaves_nothing() {
    need!(ready());
    need!(qemu_img());
    let sandbox = Sandbox::new().expect("a sandbox");
    let small = sandbox.mount_small("small", 20 << 20).expect("a small file system");
    let moved = Moved::start_with(sandbox, "raw", |image| drive(image, "raw", "")).expect("a guest");
    moved.works().expect("it works on its disk");
    let map = format!("{DISK}={}", small.join("disk").display());
    // More than is free comes while the copy is made: the guest writes on.
    let filler = small.join("filler");
    std::fs::write(&filler, vec![1; 8 << 20]).expect("room is taken");
    let options = ["--disks", "all", "--disk-map", &map, "--bandwidth", SLOW];
    // Whoever sends a guest does not have files made where the guest's QEMU could make none.
    let end = moved.scene.migrate_to("b", &options).expect("an answer");
    assert_eq!((end.code, &end.answer["blockers"][0]["code"]), (3, &"qemu-user".into()), "{}", end.answer);
    for_qemu(&small).expect("it is given to QEMU");
    let id = moved.scene.start(&options).expect("it begins");
    let begun = Instant::now();
    let mut more = std::fs::File::options().append(true).open(&filler).expect("a file");
    let reached = moved.scene.reach(&id, "disks");
    while reached.is_ok() && std::io::Write::write(&mut more, &[1; 4096]).is_ok() {
        assert!(begun.elapsed() < STEP_TIMEOUT, "it is never full");
    }
    let end = moved.scene.end(&id).expect("an end");
    assert!(end.error().contains("No space left on device"), "{}", end.answer);
    moved.works().expect("the guest works on its disk");
    gone_from(&moved.scene.b).expect("nothing is left");
    moved.nothing_left().expect("nothing is left of the copy");
    assert!(!small.join("disk").exists(), "half an image is left");
    moves_now(&moved).expect("it moves now");
}

#[test]
fn a_daemon_or_qemu_killed_while_a_disk_is_copied_leaves_nothing() {
    need!(ready());
    need!(qemu_img());
    let mut moved = Moved::start("qcow2", "").expect("a guest");
    let slow = ["--bandwidth", SLOW];
    let id = moved.start_move(&slow).expect("it begins");
    moved.scene.reach(&id, "disks").expect("disks are copied");
    moved.scene.a.crash();
    moved.scene.a.run().expect("it starts again");
    stays_soon(&moved).expect("the guest stays");
    let end = at(&mut moved, "disks", &slow, |moved, _| moved.scene.b.crash());
    moved.scene.b.run().expect("it starts again");
    back(&moved, &end.expect("an end")).expect("the guest stays");
    let end = at(&mut moved, "disks", &slow, |moved, _| {
        let qemu = qemu_in(moved.scene.b.folder()).expect("a QEMU");
        kill(Pid::from_raw(qemu), Signal::SIGKILL).expect("it is killed");
    });
    back(&moved, &end.expect("an end")).expect("the guest stays");
    moves_now(&moved).expect("it moves now");
}

/// The daemon of the source has been started anew: it undoes the migration by itself.
fn stays_soon(moved: &Moved) -> Result<()> {
    let deadline = Instant::now() + STEP_TIMEOUT;
    loop {
        match stays(moved) {
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(200)),
            done => return done,
        }
    }
}

#[test]
fn a_daemon_killed_at_the_hand_over_leaves_one_disk() {
    need!(ready());
    need!(qemu_img());
    let mut moved = Moved::behind_proxy("raw").expect("a guest");
    for kills_source in [true, false] {
        // The guest stands still, its disk is whole on both sides, and only the source owns it.
        stall_device_state(&moved);
        let id = moved.start_move(&["--mode", "hybrid"]).expect("it begins");
        moved.scene.reach(&id, "hand-over").expect("the guest stops");
        std::thread::sleep(Duration::from_millis(300));
        if kills_source {
            moved.scene.a.crash();
            moved.scene.proxy().expect("a proxy").heal();
            moved.scene.a.run().expect("it starts again");
        } else {
            moved.scene.b.crash();
            moved.scene.proxy().expect("a proxy").heal();
            moved.scene.b.run().expect("it starts again");
            moved.scene.end(&id).expect("an end");
        }
        stays_soon(&moved).expect("the guest stays");
    }
    // After it: the source is killed before it has put its image aside.
    let id = moved.start_move(&["--mode", "postcopy", "--bandwidth", "256Mbit"]).expect("it begins");
    moved.scene.handed_over(&id).expect("the guest is handed over");
    moved.scene.a.crash();
    moved.scene.b.crash();
    moved.scene.b.run().expect("it starts again");
    moved.scene.a.run().expect("it starts again");
    let end = vmove(&moved.scene.a, &["status", &id, "--follow"]).expect("an end");
    assert_eq!(
        end.code,
        0,
        "{} {}\na: {}\nb: {}",
        end.answer,
        end.said,
        moved.scene.a.log(),
        moved.scene.b.log()
    );
    moved.works().expect("it works on its disk there");
    moved.nothing_left().expect("nothing is left of the copy");
    let [here, there] = moved.images();
    assert!(there.is_file() && !here.exists(), "the source's image keeps its name: {:?}", moved.files());
    assert_eq!(moved.scene.b.vms().expect("VMs"), [NAME]);
}

/// Waits until the disks of a guest that has moved are being compared.
fn are_compared(moved: &Moved, id: &str) -> Result<()> {
    let deadline = Instant::now() + STEP_TIMEOUT;
    loop {
        let (_, status) =
            moved.scene.a.rest("GET", &format!("/v1/migrations/{id}"), &serde_json::Value::Null)?;
        if status["compared_disks"]["bytes_done"].as_u64().is_some_and(|done| done > 0) {
            return Ok(());
        }
        ensure!(status["outcome"]["state"] == "running" && Instant::now() < deadline, "{status}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_daemon_killed_while_disks_are_compared_loses_no_guest_and_leaves_nothing() {
    need!(ready());
    need!(qemu_img());
    for kills_source in [true, false] {
        let mut moved = Moved::start("qcow2", "").expect("a guest");
        moved.works().expect("it works on its disk");
        let id = moved.start_move(&["--verify", "--mode", "hybrid", "--bandwidth", SLOW]).expect("it begins");
        are_compared(&moved, &id).expect("disks are compared");
        let killed = if kills_source { &mut moved.scene.a } else { &mut moved.scene.b };
        killed.crash();
        killed.run().expect("it starts again");
        let end = moved.scene.end(&id).expect("an end");
        assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
        // It is compared anew; hashes of memory went with the destination's daemon.
        let found = &end.answer["disks"][0]["verified"];
        assert_eq!(
            (&found["problem"], &found["differing_chunks"]),
            (&serde_json::Value::Null, &0.into()),
            "{found}"
        );
        assert!(found["equal_chunks"].as_u64().is_some_and(|equal| equal > 0), "{found}");
        moved.works().expect("it works on its disk there");
        moved.nothing_left().expect("nothing is left of the comparison");
    }
}

#[test]
fn a_guest_that_ends_while_its_disks_are_compared_ends_as_any() {
    need!(ready());
    need!(qemu_img());
    let moved = Moved::start("raw", "").expect("a guest");
    moved.works().expect("it works on its disk");
    let options = ["--verify", "--mode", "hybrid", "--bandwidth", SLOW, "--source-disks", "delete"];
    let id = moved.start_move(&options).expect("it begins");
    are_compared(&moved, &id).expect("disks are compared");
    let qemu = qemu_in(moved.scene.b.folder()).expect("a QEMU");
    kill(Pid::from_raw(qemu), Signal::SIGKILL).expect("it is killed");
    let end = moved.scene.end(&id).expect("an end");
    let found = &end.answer["disks"][0]["verified"]["problem"];
    assert!(found.as_str().is_some_and(|why| why.contains("at the destination")), "{}", end.answer);
    assert_eq!((end.code, &end.answer["verified"]), (0, &serde_json::Value::Null), "{}", end.answer);
    // What is not known to be right is not deleted.
    let kept = end.answer["disks"][0]["left_at"].as_str().unwrap_or_default();
    assert!(std::path::Path::new(kept).is_file(), "{}", end.answer);
}
