//! What a daemon leaves that is killed while it makes or removes something: the next one finds all of it, and removes it.
#![cfg(test)]

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use serde_json::Value;
use vmove_skip::need;
use vmove_tests::beacon::ram_files;
use vmove_tests::daemon::Node;
use vmove_tests::fleet::until;
use vmove_tests::places::Qemu;
use vmove_tests::scene::{NAME, Scene, ready};

/// The journal says Gone, so that the source is answered, before QEMU has ended and its files are removed. The next process of a daemon that is
/// killed in between removes them.
#[test]
fn a_destination_killed_while_it_removes_a_migration_leaves_nothing() {
    need!(ready());
    let mut scene = Scene::behind_proxy().expect("a guest");
    let id = scene.start_and_stick_in_the_switchover().expect("it begins");
    scene.b.crash();
    assert!(!ram_files(&scene.b.memory()).is_empty(), "there is memory to remove");
    // The line that it writes first; see the next test.
    let journal = journal_at_b(&scene, &id);
    let mut gone = lines(&journal).pop().expect("a line");
    gone["state"] = "gone".into();
    gone["to_remove"] = true.into();
    let mut file = OpenOptions::new().append(true).open(&journal).expect("the journal");
    writeln!(file, "{gone}").expect("it takes a line");
    scene.proxy().expect("a proxy").heal();
    scene.b.run().expect("it starts again");
    scene.gone_from(&scene.b).expect("nothing is left of it");
    let end = scene.end(&id).expect("it ends");
    assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{} {}", end.answer, end.said);
    scene.unharmed().expect("the guest is at the source");
    scene.moves_now().expect("it moves there afterwards");
}

/// Once it is done, nothing is to be removed any more: by then it could belong to a later migration.
#[test]
fn what_is_to_be_removed_is_noted_before_and_after() {
    need!(ready());
    let scene = Scene::behind_proxy().expect("a guest");
    let id = scene.start_and_stick_in_the_switchover().expect("it begins");
    scene.proxy().expect("a proxy").cut_all();
    scene.end(&id).expect("it ends");
    scene.gone_from(&scene.b).expect("nothing is left of it");
    let journal = journal_at_b(&scene, &id);
    let noted = || -> Vec<_> {
        let gone = |line: &Value| (line["state"] == "gone").then(|| line["to_remove"] == true);
        lines(&journal).iter().filter_map(gone).collect()
    };
    until("the last line is written", || noted().len() > 1);
    assert_eq!(noted(), [true, false]);
}

/// What cannot be removed is noted, by the daemon whose migration it was and by one that was started anew, and removed as soon as it can be. The
/// log that an earlier VM of the name has left is not what the migration brought.
#[test]
fn what_cannot_be_removed_is_tried_again_and_logs_of_others_stay() {
    need!(ready());
    let mut scene = Scene::behind_proxy().expect("a guest");
    let log = log_of_an_earlier_vm(&scene.b);
    for killed in [true, false] {
        let id = scene.start_and_stick_in_the_switchover().expect("it begins");
        if killed {
            scene.b.crash();
        }
        let ram = ram_files(&scene.b.memory()).pop().expect("there is memory to remove");
        let in_use = InUse::new(&ram);
        if killed {
            scene.proxy().expect("a proxy").heal();
            scene.b.run().expect("it starts again");
        } else {
            scene.proxy().expect("a proxy").cut_all();
        }
        let end = scene.end(&id).expect("it ends");
        assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{} {}", end.answer, end.said);
        let journal = journal_at_b(&scene, &id);
        let noted = || {
            let last = lines(&journal).pop().expect("a line");
            (last["state"] == "gone").then(|| (last["to_remove"] == true, last["vm"]["ram"].clone()))
        };
        let left = serde_json::json!([ram]);
        let named = |ram: &Value| -> Value {
            ram.as_array().into_iter().flatten().map(|file| file["path"].clone()).collect()
        };
        // In the first line of Gone all of it is still there.
        std::thread::sleep(std::time::Duration::from_secs(2));
        let (to_remove, files) = noted().expect("it is gone");
        assert_eq!((to_remove, named(&files)), (true, left), "killed: {killed}");
        assert!(ram.exists(), "it could be removed");
        drop(in_use);
        scene.b.crash();
        scene.b.run().expect("it starts again");
        scene.gone_from(&scene.b).expect("nothing is left of it");
        until("that is written down", || noted().is_some_and(|(to_remove, _)| !to_remove));
        scene.proxy().expect("a proxy").heal();
        scene.unharmed().expect("the guest is at the source");
        let text = std::fs::read_to_string(&log).expect("the log is there");
        assert!(text.starts_with(OF_EARLIER), "{text}");
    }
    scene.moves_now().expect("it moves there afterwards");
}

const OF_EARLIER: &str = "of an earlier VM\n";

/// Runs a VM of the guest's name at `node` and ends it. Gives its log.
fn log_of_an_earlier_vm(node: &Node) -> PathBuf {
    let qemu = Qemu::under_test().expect("a QEMU").display().to_string();
    node.ask(&["run", "--name", NAME, "--", &qemu, "-nodefaults", "-display", "none", "-m", "64"])
        .expect("it starts");
    let log = node.vm(NAME).expect("it is there").dir.join("qemu.log");
    node.ask(&["stop", NAME]).expect("it ends");
    std::fs::write(&log, OF_EARLIER).expect("its log stays");
    log
}

/// A file that cannot be removed until this is dropped: another is mounted over it.
struct InUse(PathBuf);

impl InUse {
    fn new(file: &Path) -> Self {
        mount(Some(file), file, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a mount");
        Self(file.to_owned())
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).expect("no mount");
    }
}

fn journal_at_b(scene: &Scene, id: &str) -> PathBuf {
    scene.b.folder().join("state/sessions").join(id).join("destination.jsonl")
}

fn lines(journal: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(journal).expect("a journal");
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
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
    let again = scene.a.vmove(&["stop", NAME]).expect("an answer");
    assert!(again.status.success(), "{again:?}");
    scene.gone_from(&scene.a).expect("nothing is left");
}
