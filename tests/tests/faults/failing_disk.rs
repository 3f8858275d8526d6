//! Journals that cannot be written though there is room: it is as with a full disk, at each line.
#![cfg(test)]

use anyhow::{Context as _, Result, ensure};
use vmove_skip::need;
use vmove_tests::daemon::Node;
use vmove_tests::failing_writes::{self, FailingWrites};
use vmove_tests::proxy::Fault;
use vmove_tests::scene::{Scene, ready};

use crate::space::{POSTCOPY, ROUNDS, called_off, caught_up, commit, goes_on, step, told_why};
use crate::waits::until;

const WHY: &str = "Input/output error";

/// Writes to a journal of migration `id` at `node` fail until this is dropped.
fn failing(node: &Node, id: &str, file: &str) -> Result<FailingWrites> {
    let journal = node.folder().join("state/sessions").join(id).join(file);
    FailingWrites::of(node.pid().context("a daemon")?, &journal)
}

fn told(node: &Node, id: &str, file: &str) -> Result<()> {
    told_why(node, id, file, WHY)
}

/// The source ends the migration, and the guest is there.
fn at_source(scene: &Scene, id: &str, failing: FailingWrites) -> Result<()> {
    let end = scene.end(id)?;
    called_off(&end)?;
    ensure!(end.error().contains(WHY), "it does not say why: {}", end.error());
    scene.alive_at(&scene.a)?;
    told(&scene.b, id, "destination.jsonl")?;
    drop(failing);
    caught_up(&scene.b, id)?;
    scene.unharmed()
}

#[test]
fn a_guest_goes_on_at_the_source_where_writes_to_a_journal_fail() {
    need!(ready());
    need!(failing_writes::possible());
    let mut scene = Scene::behind_proxy().expect("a guest");
    step(&mut scene, "source before Stopped", |scene| {
        let id = scene.start(ROUNDS)?;
        scene.reach(&id, "rounds")?;
        let failing = failing(&scene.a, &id, "source.jsonl")?;
        told(&scene.a, &id, "source.jsonl")?;
        goes_on(scene, &scene.a)?;
        drop(failing);
        called_off(&scene.end(&id)?)?;
        scene.unharmed()
    });
    step(&mut scene, "source in Stopped, whose destination is lost", |scene| {
        let id = scene.start_and_stick_in_the_switchover()?;
        let failing = failing(&scene.a, &id, "source.jsonl")?;
        scene.proxy()?.cut_all();
        told(&scene.a, &id, "source.jsonl")?;
        goes_on(scene, &scene.a)?;
        scene.proxy()?.heal();
        drop(failing);
        called_off(&scene.end(&id)?)?;
        scene.unharmed()
    });
    step(&mut scene, "source before Committed", |scene| {
        let first = scene.proxy()?.connections();
        let id = scene.start_and_stick_in_the_switchover()?;
        let failing = failing(&scene.a, &id, "source.jsonl")?;
        scene.unstick(first)?;
        told(&scene.a, &id, "source.jsonl")?;
        goes_on(scene, &scene.a)?;
        drop(failing);
        let end = scene.end(&id)?;
        called_off(&end)?;
        ensure!(end.error().contains("source.jsonl"), "it does not say why: {}", end.error());
        scene.unharmed()
    });
    step(&mut scene, "destination in Filling", |scene| {
        let id = scene.start(ROUNDS)?;
        scene.reach(&id, "rounds")?;
        let failing = failing(&scene.b, &id, "destination.jsonl")?;
        at_source(scene, &id, failing)
    });
    step(&mut scene, "destination before Loaded", |scene| {
        let first = scene.proxy()?.connections();
        let id = scene.start_and_stick_in_the_switchover()?;
        let failing = failing(&scene.b, &id, "destination.jsonl")?;
        scene.unstick(first)?;
        at_source(scene, &id, failing)
    });
    step(&mut scene, "destination before Owner", |scene| {
        let proxy = scene.proxy()?;
        let first = proxy.connections();
        let id = scene.start_and_stick_in_the_switchover()?;
        proxy.add(commit(first, Fault::Stall));
        std::thread::sleep(std::time::Duration::from_millis(200));
        scene.unstick(first)?;
        let journal = scene.a.folder().join("state/sessions").join(&id).join("source.jsonl");
        until("the source has committed", || {
            Ok(std::fs::read_to_string(&journal).is_ok_and(|text| text.contains(r#""state":"committed""#)))
        })?;
        let failing = failing(&scene.b, &id, "destination.jsonl")?;
        proxy.add(commit(first, Fault::Delay(std::time::Duration::ZERO)));
        at_source(scene, &id, failing)
    });
    scene.moves_now().expect("it can be tried again");
}

#[test]
fn a_migration_that_has_handed_over_finishes_once_its_journals_can_be_written() {
    need!(ready());
    need!(failing_writes::possible());
    for (name, file) in
        [("destination before Complete", "destination.jsonl"), ("source before Released", "source.jsonl")]
    {
        let mut scene = Scene::behind_proxy().expect("a guest");
        step(&mut scene, name, |scene| {
            let id = scene.start(POSTCOPY)?;
            scene.reach(&id, "fetch")?;
            let node = if file == "source.jsonl" { &scene.a } else { &scene.b };
            let failing = failing(node, &id, file)?;
            told(node, &id, file)?;
            scene.sound_at(&scene.b)?;
            if file == "source.jsonl" {
                scene.gone_from(&scene.a)?;
            }
            drop(failing);
            let end = scene.end(&id)?;
            ensure!(end.code == 0, "{} {}", end.answer, end.said);
            scene.arrived()
        });
    }
}
