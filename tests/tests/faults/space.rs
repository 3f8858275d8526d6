//! State folders, and folders of guest memory, that are full: the guest is neither lost nor doubled, does not wait for room on a disk, and
//! the migration finishes or is called off once there is room again.
#![cfg(test)]

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::beacon;
use vmove_tests::daemon::Node;
use vmove_tests::forks::{done, names, vfork};
use vmove_tests::guest::Guest;
use vmove_tests::proxy::{Direction, Fault, Rule};
use vmove_tests::sandbox::{Sandbox, qemu_in};
use vmove_tests::scene::{CONTROL, End, NAME, SLOW, STEP_TIMEOUT, Scene, memory_mib, ready, steady, vmove};

use crate::waits::{status, until};

pub(crate) const ROUNDS: &[&str] = &["--mode", "hybrid", "--bandwidth", SLOW];
pub(crate) const POSTCOPY: &[&str] = &["--mode", "postcopy", "--bandwidth", SLOW];
/// Of a state folder. A migration needs some dozens of KiB.
const STATE_BYTES: u64 = 2 << 20;
/// Takes all that is left of a file system.
const FILLER: &str = "filler";

/// Two nodes whose state folders are small, and a guest that makes each line of a journal longer than what may be left of its last page: no
/// line fits into a full folder.
fn tight() -> Result<Scene> {
    let sandbox = Sandbox::new()?;
    for node in ["a", "b"] {
        sandbox.mount_small(&format!("{node}/state"), STATE_BYTES)?;
    }
    let mut guest = Guest::new(memory_mib(&steady()), steady())?;
    guest
        .extra
        .extend(["-fw_cfg".to_owned(), format!("name=opt/org.vmove.test/long,string={}", "x".repeat(5000))]);
    Scene::behind_proxy_in(sandbox, &guest)
}

fn fill(node: &Node, folder: &str) -> Result<()> {
    let path = node.folder().join(folder).join(FILLER);
    let mut file = File::options().create(true).append(true).open(path)?;
    while file.write(&[1; 4096]).is_ok() {}
    Ok(())
}

fn free(node: &Node, folder: &str) -> Result<()> {
    Ok(std::fs::remove_file(node.folder().join(folder).join(FILLER))?)
}

/// Waits until `node` tells that it cannot write `file` of the migration.
fn told(node: &Node, id: &str, file: &str) -> Result<()> {
    told_why(node, id, file, "No space left on device")
}

/// As above, with this reason.
pub(crate) fn told_why(node: &Node, id: &str, file: &str, why: &str) -> Result<()> {
    let deadline = Instant::now() + STEP_TIMEOUT;
    loop {
        let status = status(node, id)?;
        if let Some(told) = status["unwritten"].as_str() {
            for word in ["cannot write", file, why, "trying again since 2"] {
                ensure!(told.contains(word), "expected {word:?} in {told:?}");
            }
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "it does not tell that {file} cannot be written: {status}\n{}",
            node.log()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until the guest runs at `node`: it is told that a line cannot be written just before the guest resumes.
pub(crate) fn goes_on(scene: &Scene, node: &Node) -> Result<()> {
    let running = || Ok(node.vm(NAME).is_ok_and(|vm| vm.status == "running"));
    until("the guest runs", running)?;
    scene.alive_at(node)
}

/// Waits until `node` has written what it could not: until then the migration holds its VM.
pub(crate) fn caught_up(node: &Node, id: &str) -> Result<()> {
    until("what could not be written is written", || {
        Ok(status(node, id)
            .is_ok_and(|status| status["unwritten"].is_null() && status["outcome"]["state"] != "running"))
    })
}

pub(crate) fn called_off(end: &End) -> Result<()> {
    ensure!((end.code, &end.answer["guest"]) == (1, &"source".into()), "{} {}", end.answer, end.said);
    Ok(())
}

/// Runs steps that follow each other in one scene, and says which has failed.
pub(crate) fn step(scene: &mut Scene, name: &str, run: impl FnOnce(&mut Scene) -> Result<()>) {
    let began = Instant::now();
    let done = run(scene);
    if let Err(error) = done {
        panic!("{name}: {error:#}\na: {}\nb: {}", scene.a.log(), scene.b.log());
    }
    eprintln!("{name}: {:?}", began.elapsed());
    scene.proxy().expect("a proxy").heal();
}

#[test]
fn a_guest_goes_on_at_a_source_that_cannot_write_its_journal() {
    need!(ready());
    let mut scene = tight().expect("a guest");
    step(&mut scene, "source before its first line", |scene| {
        fill(&scene.a, "state")?;
        let end = scene.migrate_to("b", ROUNDS)?;
        ensure!(end.code != 0 && end.error().contains("No space left"), "{} {}", end.answer, end.said);
        goes_on(scene, &scene.a)?;
        free(&scene.a, "state")?;
        scene.unharmed()
    });
    step(&mut scene, "source before Stopped", |scene| {
        let id = scene.start(ROUNDS)?;
        scene.reach(&id, "rounds")?;
        fill(&scene.a, "state")?;
        told(&scene.a, &id, "source.jsonl")?;
        goes_on(scene, &scene.a)?;
        let list = scene.a.ask(&["list"])?;
        let waiting = list["vms"][0]["waiting"].as_str().unwrap_or_default();
        ensure!(waiting.contains("cannot write"), "it is not listed: {list}");
        let again = scene.migrate_to("b", &[])?;
        ensure!(again.code != 0, "another migration began: {}", again.answer);
        scene.a.ask(&["cancel", &id]).context("it is called off anyway")?;
        std::thread::sleep(Duration::from_secs(3));
        let times = scene.a.log().matches("cannot write").count();
        ensure!(times == 1, "it was logged {times} times");
        free(&scene.a, "state")?;
        called_off(&scene.end(&id)?)?;
        scene.unharmed()
    });
    step(&mut scene, "source in Stopped, whose destination is lost", |scene| {
        let id = scene.start_and_stick_in_the_switchover()?;
        fill(&scene.a, "state")?;
        scene.proxy()?.cut_all();
        told(&scene.a, &id, "source.jsonl")?;
        goes_on(scene, &scene.a)?;
        scene.proxy()?.heal();
        free(&scene.a, "state")?;
        called_off(&scene.end(&id)?)?;
        scene.unharmed()
    });
    step(&mut scene, "source in Stopped, started anew", |scene| {
        let id = scene.start_and_stick_in_the_switchover()?;
        fill(&scene.a, "state")?;
        scene.a.crash();
        scene.a.run()?;
        told(&scene.a, &id, "source.jsonl")?;
        goes_on(scene, &scene.a)?;
        scene.proxy()?.heal();
        free(&scene.a, "state")?;
        called_off(&scene.end(&id)?)?;
        scene.unharmed()
    });
    step(&mut scene, "source before Committed", |scene| {
        let first = scene.proxy()?.connections();
        let id = scene.start_and_stick_in_the_switchover()?;
        fill(&scene.a, "state")?;
        scene.unstick(first)?;
        told(&scene.a, &id, "source.jsonl")?;
        goes_on(scene, &scene.a)?;
        free(&scene.a, "state")?;
        let end = scene.end(&id)?;
        called_off(&end)?;
        ensure!(end.error().contains("source.jsonl"), "it does not say why: {}", end.error());
        scene.unharmed()
    });
    scene.moves_now().expect("it can be tried again");
}

#[test]
fn a_guest_goes_on_at_the_source_of_a_destination_that_cannot_write_its_journal() {
    need!(ready());
    let mut scene = tight().expect("a guest");
    step(&mut scene, "destination before Filling", |scene| {
        fill(&scene.b, "state")?;
        let end = scene.migrate_to("b", ROUNDS)?;
        ensure!(end.code != 0 && end.error().contains("No space left"), "{} {}", end.answer, end.said);
        scene.alive_at(&scene.a)?;
        free(&scene.b, "state")?;
        scene.unharmed()
    });
    step(&mut scene, "destination in Filling", |scene| {
        let id = scene.start(ROUNDS)?;
        scene.reach(&id, "rounds")?;
        fill(&scene.b, "state")?;
        at_source_while_full(scene, &id)
    });
    step(&mut scene, "destination before Loaded", |scene| {
        let first = scene.proxy()?.connections();
        let id = scene.start_and_stick_in_the_switchover()?;
        fill(&scene.b, "state")?;
        scene.unstick(first)?;
        at_source_while_full(scene, &id)
    });
    step(&mut scene, "destination before Owner", |scene| {
        let proxy = scene.proxy()?;
        let first = proxy.connections();
        let id = scene.start_and_stick_in_the_switchover()?;
        proxy.add(commit(first, Fault::Stall));
        std::thread::sleep(Duration::from_millis(200));
        scene.unstick(first)?;
        let journal = scene.a.folder().join("state/sessions").join(&id).join("source.jsonl");
        until("the source has committed", || {
            Ok(std::fs::read_to_string(&journal).is_ok_and(|text| text.contains(r#""state":"committed""#)))
        })?;
        fill(&scene.b, "state")?;
        proxy.add(commit(first, Fault::Delay(Duration::ZERO)));
        at_source_while_full(scene, &id)
    });
    scene.moves_now().expect("it can be tried again");
}

/// A rule for what the source says to the destination, in the migration whose connections begin at `first`.
pub(crate) const fn commit(first: u64, fault: Fault) -> Rule {
    Rule { connection: Some(first + CONTROL), direction: Direction::Forth, after: 0, fault }
}

/// The source ends the migration though the destination has no room, and the guest is there; the destination tells why it cannot end it.
fn at_source_while_full(scene: &Scene, id: &str) -> Result<()> {
    let end = scene.end(id)?;
    called_off(&end)?;
    ensure!(end.error().contains("No space left"), "it does not say why: {}", end.error());
    scene.alive_at(&scene.a)?;
    told(&scene.b, id, "destination.jsonl")?;
    free(&scene.b, "state")?;
    caught_up(&scene.b, id)?;
    scene.unharmed()
}

#[test]
fn a_migration_that_has_handed_over_finishes_once_there_is_room() {
    need!(ready());
    let mut scene = tight().expect("a guest");
    step(&mut scene, "destination before Complete", |scene| {
        let id = scene.start(POSTCOPY)?;
        scene.reach(&id, "fetch")?;
        fill(&scene.b, "state")?;
        told(&scene.b, &id, "destination.jsonl")?;
        // All pages are there.
        scene.sound_at(&scene.b)?;
        let stopped = scene.beacon_at(&scene.a)?.work;
        // Longer than either side waits for a word of the other.
        std::thread::sleep(Duration::from_secs(17));
        ensure!(scene.beacon_at(&scene.a)?.work == stopped, "the guest runs at the source, too");
        let status = status(&scene.a, &id)?;
        ensure!(
            status["outcome"]["state"] == "running",
            "the source has freed its side, or is lost: {status}"
        );
        free(&scene.b, "state")?;
        let end = scene.end(&id)?;
        ensure!(end.code == 0, "{} {}", end.answer, end.said);
        scene.arrived()
    });
}

#[test]
fn a_source_frees_the_guests_memory_though_it_cannot_write_its_journal() {
    need!(ready());
    let mut scene = tight().expect("a guest");
    step(&mut scene, "source before Released", |scene| {
        let id = scene.start(POSTCOPY)?;
        scene.reach(&id, "fetch")?;
        fill(&scene.a, "state")?;
        told(&scene.a, &id, "source.jsonl")?;
        scene.gone_from(&scene.a)?;
        scene.sound_at(&scene.b)?;
        free(&scene.a, "state")?;
        let end = scene.end(&id)?;
        ensure!(end.code == 0, "{} {}", end.answer, end.said);
        scene.arrived()
    });
}

/// The run folder holds logs, sockets and what the guest's devices write: a full one costs at most their text.
#[test]
fn a_full_run_folder_loses_no_guest() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    for node in ["a", "b"] {
        sandbox.mount_small(&format!("{node}/run"), STATE_BYTES).expect("a small run folder");
    }
    let guest = Guest::new(memory_mib(&steady()), steady()).expect("a guest");
    let mut scene = Scene::behind_proxy_in(sandbox, &guest).expect("a guest");
    step(&mut scene, "full on both sides in the rounds, and their daemons are killed", |scene| {
        let id = scene.start(ROUNDS)?;
        scene.reach(&id, "rounds")?;
        fill(&scene.a, "run")?;
        fill(&scene.b, "run")?;
        for node in [&mut scene.a, &mut scene.b] {
            node.crash();
            node.run()?;
        }
        goes_on(scene, &scene.a)?;
        free(&scene.a, "run")?;
        free(&scene.b, "run")?;
        scene.unharmed()
    });
    step(&mut scene, "full at the destination from the beginning", |scene| {
        fill(&scene.b, "run")?;
        let end = scene.migrate_to("b", ROUNDS)?;
        free(&scene.b, "run")?;
        ensure!(end.code == 0, "{} {}", end.answer, end.said);
        scene.arrived()
    });
}

/// Memory that is there when a migration begins, and is not when pages come.
#[test]
fn a_guest_stays_where_a_destinations_memory_is_full() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let guest = Guest::new(memory_mib(&steady()), steady()).expect("a guest");
    let room = guest.bytes() + (80 << 20);
    // `memory-dir` has a folder for each kind of memory.
    sandbox.mount_small("b/mem/thp", room).expect("a small folder of memory");
    let mut scene = Scene::behind_proxy_in(sandbox, &guest).expect("a guest");
    step(&mut scene, "no room from the beginning", |scene| {
        fill(&scene.b, "mem/thp")?;
        let end = scene.migrate_to("b", ROUNDS)?;
        ensure!(end.code != 0 && end.answer["guest"] == "source", "{} {}", end.answer, end.said);
        free(&scene.b, "mem/thp")?;
        scene.unharmed()
    });
    step(&mut scene, "no room any more", |scene| {
        let id = scene.start(ROUNDS)?;
        scene.reach(&id, "rounds")?;
        fill(&scene.b, "mem/thp")?;
        let end = scene.end(&id)?;
        called_off(&end)?;
        ensure!(end.error().contains("has no room"), "it does not say why: {}", end.error());
        ensure!(!beacon::ram_files(&scene.a.memory()).is_empty(), "the guest's memory is gone");
        free(&scene.b, "mem/thp")?;
        scene.unharmed()
    });
    scene.moves_now().expect("it can be tried again");
}

#[test]
fn memory_of_its_own_that_could_not_be_noted_is_noted_later() {
    need!(ready());
    let mut scene = tight().expect("a guest");
    step(&mut scene, "promote", |scene| {
        let answer = done(&scene.a, &["create", NAME, "--count", "1"])?;
        let child = names(&answer).remove(0);
        fill(&scene.a, "state")?;
        let refused = vfork(&scene.a, &["promote", &child])?;
        ensure!(
            refused.code == 1 && refused.said.contains("No space left"),
            "{} {}",
            refused.answer,
            refused.said
        );
        scene.alive_at(&scene.a)?;
        free(&scene.a, "state")?;
        let promoted = done(&scene.a, &["promote", &child])?;
        ensure!(promoted["was_private"] == true, "{promoted}");
        ensure!(done(&scene.a, &["promote", &child])?["was_private"] == false, "it was not noted");
        scene.alive_at(&scene.a)?;
        scene.unharmed()
    });
}

/// Ends the guest at `node` by force while its state folder is full. The answer says what is owed.
fn end_by_force(node: &Node, file: &str) -> Result<()> {
    let end = vmove(node, &["stop", "--force", NAME])?;
    ensure!(end.code == 0, "{} {}\n{}", end.answer, end.said, node.log());
    let owed = end.answer["owed"].as_str().unwrap_or_default();
    for word in ["cannot write", file, "No space left on device"] {
        ensure!(owed.contains(word), "expected {word:?} in {}", end.answer);
    }
    ensure!(end.said.contains("does not come back"), "{}", end.said);
    is_gone(node)
}

/// Neither the VM nor anything of it is at `node`.
fn is_gone(node: &Node) -> Result<()> {
    let list = node.ask(&["list"])?;
    ensure!(list["vms"] == serde_json::json!([]), "it is listed: {list}");
    ensure!(qemu_in(node.folder()).is_none(), "its QEMU runs");
    let left = beacon::ram_files(&node.memory());
    ensure!(left.is_empty(), "its memory is there: {left:?}");
    Ok(())
}

/// Nothing comes back in later lives of the daemon, with the disk still full and afterwards; then the name is free.
fn stays_gone(node: &mut Node) -> Result<()> {
    node.crash();
    node.run()?;
    is_gone(node).context("in the next life, without room")?;
    free(node, "state")?;
    std::thread::sleep(Duration::from_secs(3));
    is_gone(node).context("with room")?;
    node.crash();
    node.run()?;
    is_gone(node).context("in the life after that")?;
    let status = node.ask(&["status"])?;
    ensure!(status["migrations"] == serde_json::json!([]), "a migration is still at work: {status}");
    Ok(())
}

/// Each line that may be owed while an operator ends the VM: what is done with it later, by this daemon and by the next.
#[test]
fn a_vm_is_ended_by_force_though_the_journal_of_its_migration_cannot_be_written() {
    need!(ready());
    let mut scene = tight().expect("a guest");
    step(&mut scene, "called off at the source", |scene| {
        let id = scene.start(ROUNDS)?;
        scene.reach(&id, "rounds")?;
        fill(&scene.a, "state")?;
        told(&scene.a, &id, "source.jsonl")?;
        goes_on(scene, &scene.a)?;
        end_by_force(&scene.a, "source.jsonl")?;
        stays_gone(&mut scene.a)?;
        scene.gone_from(&scene.b)
    });
    drop(scene);

    let mut scene = tight().expect("a guest");
    step(&mut scene, "whole at the destination", |scene| {
        let id = scene.start(POSTCOPY)?;
        scene.reach(&id, "fetch")?;
        fill(&scene.b, "state")?;
        told(&scene.b, &id, "destination.jsonl")?;
        end_by_force(&scene.b, "destination.jsonl")?;
        free(&scene.b, "state")?;
        // The migration was done before that.
        let end = scene.end(&id)?;
        ensure!(end.code == 0, "{} {}", end.answer, end.said);
        scene.gone_from(&scene.a)?;
        fill(&scene.b, "state")?;
        stays_gone(&mut scene.b)
    });
    drop(scene);

    let mut scene = tight().expect("a guest");
    step(&mut scene, "whole at the destination, which is started anew", |scene| {
        let id = scene.start(POSTCOPY)?;
        scene.reach(&id, "fetch")?;
        fill(&scene.b, "state")?;
        told(&scene.b, &id, "destination.jsonl")?;
        end_by_force(&scene.b, "destination.jsonl")?;
        stays_gone(&mut scene.b)?;
        // The source cannot know that nothing of what it keeps is needed. It hears of the way out.
        until("it hears of the way out", || {
            Ok(status(&scene.a, &id)?["outcome"]["error"]
                .as_str()
                .is_some_and(|e| e.contains("vmove reclaim")))
        })?;
        scene.a.ask(&["stop", "--force", NAME])?;
        scene.gone_from(&scene.a)
    });
    drop(scene);

    for (name, full) in [("the source is lost for good", "b"), ("the destination is lost for good", "a")] {
        let mut scene = tight().expect("a guest");
        step(&mut scene, name, |scene| {
            let id = scene.start(POSTCOPY)?;
            scene.reach(&id, "fetch")?;
            let lost = if full == "b" { &mut scene.a } else { &mut scene.b };
            lost.crash();
            let qemu = qemu_in(lost.folder()).context("a QEMU")?;
            kill(Pid::from_raw(qemu), Signal::SIGKILL)?;
            scene.proxy()?.cut_all();
            let left = if full == "b" { &mut scene.b } else { &mut scene.a };
            until("it has lost the other side", || {
                Ok(status(left, &id)?["outcome"]["state"] == "reconnecting")
            })?;
            fill(left, "state")?;
            end_by_force(left, if full == "b" { "destination.jsonl" } else { "source.jsonl" })?;
            left.crash();
            left.run()?;
            is_gone(left).context("in the next life, without room")?;
            free(left, "state")?;
            left.crash();
            left.run()?;
            is_gone(left).context("in the life after that")
        });
    }
}
