//! What a daemon leaves that is killed while it makes or removes something: the next one finds all of it, and removes it.
#![cfg(test)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use vmove_skip::need;
use vmove_tests::beacon::ram_files;
use vmove_tests::blows::moment::journaled;
use vmove_tests::scene::{NAME, STEP_TIMEOUT, Scene, ready};

/// Attempts to kill a daemon while it waits for the end of a QEMU.
const ATTEMPTS: u32 = 10;

/// The journal says Gone, so that the source is answered, before QEMU has ended and its files are removed.
#[test]
fn a_destination_killed_while_it_removes_a_migration_leaves_nothing() {
    need!(ready());
    let mut scene = Scene::behind_proxy().expect("a guest");
    let mut in_between = false;
    for _ in 0..ATTEMPTS {
        let id = scene.start_and_stick_in_the_switchover().expect("it begins");
        scene.proxy().expect("a proxy").cut_all();
        let deadline = Instant::now() + STEP_TIMEOUT;
        while journaled(&scene.b, &id, "destination.jsonl") != "gone" {
            assert!(Instant::now() < deadline, "it is never gone: {}", scene.b.log());
            std::thread::sleep(Duration::from_micros(50));
        }
        scene.b.crash();
        in_between = !ram_files(&scene.b.memory()).is_empty();
        scene.proxy().expect("a proxy").heal();
        scene.b.run().expect("it starts again");
        scene.gone_from(&scene.b).expect("nothing is left of it");
        let end = scene.end(&id).expect("it ends");
        assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{} {}", end.answer, end.said);
        if in_between {
            break;
        }
    }
    assert!(in_between, "in {ATTEMPTS} attempts the daemon was never killed before everything was removed");
    scene.unharmed().expect("the guest is at the source");
    scene.moves_now().expect("it moves there afterwards");
}

/// Otherwise nobody would know of the files of a daemon that is killed in between, and no guest of that name could ever come again.
#[test]
fn what_is_made_for_a_migration_is_written_down_first() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    // Makes the folders, and mounts what holds guest memory.
    scene.a.ask(&["check", NAME, "--to", "b"]).expect("it could move");
    let state = scene.b.folder().join("state/sessions");
    let memory = scene.b.memory().join("thp");
    let events = Inotify::init(InitFlags::IN_NONBLOCK).expect("inotify");
    let journals = events.add_watch(&state, AddWatchFlags::IN_CREATE).expect("the sessions are watched");
    events.add_watch(&memory, AddWatchFlags::IN_CREATE).expect("the memory is watched");
    scene.moves_now().expect("it moves");
    let seen = events.read_events().expect("events");
    let named: Vec<_> = seen.iter().map(|event| (event.wd == journals, event.name.clone())).collect();
    assert!(named.iter().any(|(journal, _)| !journal), "no memory was made: {named:?}");
    assert!(named[0].0, "memory came first: {named:?}");
}

/// A daemon that is killed after the record is gone would not know of the rest.
#[test]
fn the_record_of_a_guest_goes_after_its_memory() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let record = scene.a.folder().join("state/vms").join(format!("{NAME}.json"));
    std::fs::remove_file(&record).expect("there is a record");
    // Neither a file nor an empty folder: it cannot be removed.
    std::fs::create_dir_all(record.join("in the way")).expect("a folder");
    let stopped = scene.a.vmove(&["stop", NAME]).expect("an answer");
    assert!(!stopped.status.success(), "the record could be removed: {stopped:?}");
    assert_eq!(ram_files(&scene.a.memory()), Vec::<PathBuf>::new());
    std::fs::remove_dir_all(&record).expect("it is removed");
    scene.gone_from(&scene.a).expect("nothing is left");
}
