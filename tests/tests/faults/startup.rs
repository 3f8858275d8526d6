//! Daemons that start where something is damaged or hangs: everything else is served at once, and what cannot be read is listed, kept, and
//! taken for nothing else.
#![cfg(test)]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::places::Qemu;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{SLOW, STEP_TIMEOUT, Scene, ready, vmove};

use crate::waits::{status, until};

const POSTCOPY: &[&str] = &["--mode", "postcopy", "--bandwidth", SLOW];
/// A daemon waits for a monitor for 5 s. Whatever does not need that one answers sooner.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Starts a VM that runs nothing but its firmware.
fn run_small(node: &Node, name: &str) -> Result<i32> {
    let qemu = Qemu::under_test()?;
    let qemu = qemu.to_str().context("a path in UTF-8")?;
    let line = [qemu, "-nodefaults", "-no-user-config", "-display", "none", "-machine", "pc", "-m", "64"];
    node.ask(&[&["run", "--name", name, "--memory", "thp", "--"], &line[..]].concat())?;
    Ok(node.vm(name)?.pid)
}

/// A QEMU that is stopped until this is dropped: its monitor takes a connection and says nothing.
struct Hung(i32);

impl Hung {
    fn new(pid: i32) -> Result<Self> {
        kill(Pid::from_raw(pid), Signal::SIGSTOP)?;
        Ok(Self(pid))
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.0), Signal::SIGCONT);
    }
}

/// What a daemon leaves that was killed while it started children for a fork of another node: the next one asks each whether it runs.
fn leave_a_fork_of(node: &Node, child: &str) -> Result<()> {
    let folder = node.folder().join("state/forks/hosted");
    std::fs::create_dir_all(&folder)?;
    let record = json!({ "fork": "f1", "parent": "p", "node": "n", "children": [child], "fetching": false, "template": [] });
    Ok(std::fs::write(folder.join("f1.json"), record.to_string())?)
}

/// What a daemon leaves that was killed before it brought a guest back: a migration that was called off, and nobody knows whether the
/// guest runs. The next one asks QEMU.
fn leave_a_migration_of(node: &Node, name: &str) -> Result<()> {
    let failed = vmove(node, &["migrate", name, "--to", "127.0.0.1:1"])?;
    anyhow::ensure!(failed.code != 0, "nobody listens there: {}", failed.answer);
    let sessions = std::fs::read_dir(node.folder().join("state/sessions"))?;
    for session in sessions.flatten() {
        let path = session.path().join("source.jsonl");
        let text = std::fs::read_to_string(&path)?;
        let first = text.lines().next().context("a line")?;
        if first.contains(&format!(r#""name":"{name}""#)) {
            std::fs::write(&path, format!("{first}\n"))?;
        }
    }
    Ok(())
}

#[test]
fn a_hung_monitor_is_in_nobody_elses_way() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let mut pids: Vec<i32> = Vec::new();
    for name in ["one", "hung", "other"] {
        pids.push(run_small(&node, name).expect("it runs"));
    }
    leave_a_migration_of(&node, "hung").expect("a migration that was not undone");
    node.crash();
    leave_a_fork_of(&node, "hung").expect("a fork that was not undone");
    let hung = Hung::new(pids[1]).expect("it can be stopped");
    let began = Instant::now();
    node.run().expect("it starts again");
    for name in ["one", "other"] {
        assert_eq!(node.vm(name).expect("it is served").status, "running");
    }
    let took = began.elapsed();
    eprintln!("two VMs were served {took:?} after the start, the third one's monitor hangs");
    assert!(took < AT_ONCE, "{took:?}\n{}", node.log());
    drop(hung);
    let deadline = Instant::now() + STEP_TIMEOUT;
    while node.vm("hung").expect("it is listed").status != "running" {
        assert!(Instant::now() < deadline, "it is not served: {}", node.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Beside a VM whose monitor hangs, which something else waits for: a fork that was not undone.
#[test]
fn a_guest_that_lacks_pages_is_served_before_anything_else() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let pid = run_small(&scene.b, "hung").expect("it runs");
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    scene.b.crash();
    leave_a_fork_of(&scene.b, "hung").expect("a fork that was not undone");
    let _hung = Hung::new(pid).expect("it can be stopped");
    until("the source has lost it", || Ok(status(&scene.a, &id)?["outcome"]["state"] == "reconnecting"))
        .expect("it is noticed");
    let began = Instant::now();
    scene.b.run().expect("it starts again");
    until("the source serves it again", || {
        let state = status(&scene.a, &id)?["outcome"]["state"].clone();
        Ok(state == "running" || state == "done")
    })
    .expect("pages come again");
    let took = began.elapsed();
    eprintln!("the guest's pages came again {took:?} after the start");
    assert!(took < AT_ONCE, "{took:?}\n{}", scene.b.log());
    let log = scene.b.log();
    let last_start = log.rfind("taking up a migration to here").expect("it is taken up");
    let others = log.rfind("cleaning up").expect("so is the fork");
    assert!(last_start < others, "others were taken up first: {log}");
    let end = scene.end(&id).expect("the migration ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    scene.sound_at(&scene.b).expect("it is whole");
}

#[test]
fn a_damaged_record_is_listed_and_left_alone() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    run_small(&node, "whole").expect("it runs");
    let pid = run_small(&node, "damaged").expect("it runs");
    node.crash();
    let record = node.folder().join("state/vms/damaged.json");
    let before = std::fs::read(&record).expect("a record");
    std::fs::write(&record, &before[..before.len() / 2]).expect("it is damaged");
    node.run().expect("it starts again");
    assert_eq!(node.vm("whole").expect("it is served").status, "running");
    let list = node.ask(&["list"]).expect("an answer");
    assert_eq!(list["vms"][0]["name"], "damaged", "{list}");
    assert_eq!(list["vms"][0]["status"], format!("unknown, see {}", record.display()), "{list}");
    for request in [
        &["stop", "damaged", "--force"][..],
        &["migrate", "damaged", "--to", "127.0.0.1:1"],
        &["show", "damaged"],
    ] {
        let refused = vmove(&node, request).expect("an answer");
        assert!(
            refused.code != 0 && format!("{} {}", refused.answer, refused.said).contains("damaged.json"),
            "{request:?}: {}",
            refused.answer
        );
    }
    run_small(&node, "damaged").expect_err("its name is taken");
    assert_eq!(std::fs::read(&record).expect("it is there"), before[..before.len() / 2]);
    assert!(Path::new(&format!("/proc/{pid}")).exists(), "its QEMU was ended");
    node.crash();
    std::fs::write(&record, before).expect("it is put right");
    node.run().expect("it starts again");
    assert_eq!(node.vm("damaged").expect("it is served").status, "running");
}

/// The source of a guest hears "busy" from a destination that cannot read how far it is, and keeps the guest's memory.
#[test]
fn a_destination_whose_journal_is_damaged_answers_busy() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    scene.b.crash();
    let journal = journal(&scene.b, &id, "destination");
    let before = damage(&journal).expect("a journal");
    scene.b.run().expect("it starts again");
    listed_as_unknown(&scene.b, &id, &journal);
    std::thread::sleep(Duration::from_secs(1));
    let state = status(&scene.a, &id).expect("an answer");
    assert_eq!(state["outcome"]["state"], "reconnecting", "{state}");
    let why = state["outcome"]["error"].as_str().unwrap_or_default();
    assert!(why.contains("cannot tell how session"), "it was told something else: {state}");
    scene.b.crash();
    std::fs::write(&journal, before).expect("it is put right");
    scene.b.run().expect("it starts again");
    let end = scene.end(&id).expect("the migration ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    scene.arrived().expect("it is whole");
}

/// Nobody knows whether the guest was given away: it is not run here, and no other migration takes it.
#[test]
fn a_source_whose_journal_is_damaged_leaves_the_guest_alone() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    scene.a.crash();
    let journal = journal(&scene.a, &id, "source");
    let before = damage(&journal).expect("a journal");
    scene.a.run().expect("it starts again");
    listed_as_unknown(&scene.a, &id, &journal);
    let stopped = scene.beacon_at(&scene.a).expect("a beacon").work;
    for request in [&["migrate", "guest", "--to", "b"][..], &["recover", &id], &["stop", "guest", "--force"]]
    {
        let refused = vmove(&scene.a, request).expect("an answer");
        assert_ne!(refused.code, 0, "{request:?}: {}", refused.answer);
    }
    assert_eq!(scene.beacon_at(&scene.a).expect("a beacon").work, stopped, "it runs at the source, too");
    scene.a.crash();
    std::fs::write(&journal, before).expect("it is put right");
    scene.a.run().expect("it starts again");
    let end = scene.end(&id).expect("the migration ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    scene.arrived().expect("it is whole");
}

fn journal(node: &Node, id: &str, side: &str) -> PathBuf {
    node.folder().join("state/sessions").join(id).join(format!("{side}.jsonl"))
}

/// Adds a line that is none. Gives the journal as it was.
fn damage(journal: &Path) -> Result<String> {
    let before = std::fs::read_to_string(journal)?;
    std::fs::write(journal, format!("{before}{{damaged\n"))?;
    Ok(before)
}

fn listed_as_unknown(node: &Node, id: &str, journal: &Path) {
    let listed = status(node, id).expect("an answer");
    assert_eq!(listed["vm"], "guest", "{listed}");
    assert_eq!(listed["outcome"]["guest"], "unknown", "{listed}");
    let error = listed["outcome"]["error"].as_str().unwrap_or_default();
    assert!(error.starts_with(&format!("unknown, see {}", journal.display())), "{listed}");
}

/// A program inherits the blocked signals of the thread that starts it.
#[test]
fn a_daemon_ends_on_sigterm_though_who_started_it_blocks_signals() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.thread_block().expect("signals are blocked");
    let started = Node::start(&sandbox, "a", NodeOptions::default());
    signals.thread_unblock().expect("signals are not blocked any more");
    started.expect("a daemon").stop().expect("it ends");
}
