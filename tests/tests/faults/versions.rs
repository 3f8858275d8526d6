//! Daemons of two protocol versions. The proxy changes the version in greetings and answers, so that each side takes the other for a
//! daemon of the next version.
#![cfg(test)]

use std::time::Duration;

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::blows::moment::journaled;
use vmove_tests::fleet::until;
use vmove_tests::forks::vfork;
use vmove_tests::proxy::{Direction, Fault, Rule};
use vmove_tests::sandbox::qemu_in;
use vmove_tests::scene::{CONTROL, NAME, SLOW, Scene, ready, vmove};

/// This version and the next.
fn versions(scene: &Scene) -> (u16, u16) {
    let node = scene.a.ask(&["node"]).expect("an answer");
    let this = node["protocol"].as_u64().and_then(|version| u16::try_from(version).ok()).expect("a version");
    (this, this + 1)
}

/// What a side says of a peer of the next version.
fn other_version(scene: &Scene) -> String {
    let (this, next) = versions(scene);
    format!("xpected protocol version {this}, found {next}")
}

fn listed(scene: &Scene, at_destination: bool) -> Value {
    let node = if at_destination { &scene.b } else { &scene.a };
    let list = node.ask(&["list"]).expect("an answer");
    let vms = list["vms"].as_array().expect("vms");
    vms.iter().find(|vm| vm["name"] == NAME).cloned().unwrap_or_default()
}

fn outcome(scene: &Scene, id: &str) -> Value {
    let path = format!("/v1/migrations/{id}");
    scene.a.rest("GET", &path, &Value::Null).expect("an answer").1["outcome"].clone()
}

/// Restarts the source as a daemon of the next version, as far as the destination can tell.
fn upgrade_source(scene: &mut Scene) {
    let (_, next) = versions(scene);
    scene.a.crash();
    let proxy = scene.proxy().expect("a proxy");
    proxy.name_version(Some(next));
    proxy.cut_all();
    proxy.heal();
    scene.a.run().expect("it starts again");
}

fn back_to_this_version(scene: &Scene) {
    scene.proxy().expect("a proxy").name_version(None);
}

#[test]
fn daemons_of_two_versions_refuse_each_other() {
    need!(ready());
    let scene = Scene::behind_proxy().expect("a guest");
    let said = other_version(&scene);
    scene.proxy().expect("a proxy").name_version(Some(versions(&scene).1));
    let end = scene.migrate_to("b", &[]).expect("it ends");
    assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{} {}", end.answer, end.said);
    assert!(end.error().contains(&said), "expected {said:?} in: {}", end.error());
    assert!(end.error().contains("same version of vmoved"), "it does not say what to do: {}", end.error());
    let end = vmove(&scene.a, &["check", NAME, "--to", "b"]).expect("it ends");
    assert_eq!(end.code, 3, "{} {}", end.answer, end.said);
    assert!(end.answer.to_string().contains(&said), "expected {said:?} in: {}", end.answer);
    let end = vfork(&scene.a, &["create", NAME, "--count", "1", "--to", "b"]).expect("it ends");
    assert_ne!(end.code, 0, "{}", end.answer);
    assert!(end.said.contains(&said), "expected {said:?} in: {}", end.said);
    assert!(scene.b.log().contains(&said), "the destination says nothing: {}", scene.b.log());
    scene.unharmed().expect("the guest goes on");
    back_to_this_version(&scene);
    scene.moves_now().expect("the same version is taken");
}

/// Brings a migration to where the destination holds the device state and the messages in `direction` are lost.
fn loaded(direction: Direction, source: &str) -> (Scene, String) {
    let scene = Scene::behind_proxy().expect("a guest");
    let first = scene.proxy().expect("a proxy").connections();
    let id = scene.start_and_stick_in_the_switchover().expect("the guest is stopped");
    let rule = Rule { connection: Some(first + CONTROL), direction, after: 0, fault: Fault::Stall };
    scene.proxy().expect("a proxy").add(rule);
    // Until the rule applies to everything on its way.
    std::thread::sleep(Duration::from_millis(200));
    scene.unstick(first).expect("a proxy");
    until("the destination holds the device state", || {
        journaled(&scene.b, &id, "destination.jsonl") == "loaded"
            && journaled(&scene.a, &id, "source.jsonl") == source
    });
    (scene, id)
}

/// The source had not committed: its guest goes on there. The destination keeps what it holds until it is told so by a daemon that it
/// understands.
#[test]
fn a_destination_in_loaded_waits_for_a_source_of_its_version() {
    need!(ready());
    let (mut scene, id) = loaded(Direction::Back, "stopped");
    upgrade_source(&mut scene);
    let said = other_version(&scene);
    let end = scene.end(&id).expect("the migration ends");
    assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{} {}", end.answer, end.said);
    scene.alive_at(&scene.a).expect("the guest goes on");
    until("the destination says why", || scene.b.log().contains(&said));
    until("the source says why", || scene.a.log().contains(&said));
    assert!(qemu_in(scene.b.folder()).is_some(), "it did not wait");
    assert_eq!(journaled(&scene.b, &id, "destination.jsonl"), "loaded");
    back_to_this_version(&scene);
    scene.unharmed().expect("nothing is left");
    scene.moves_now().expect("it can be tried again");
}

/// The source had committed: the guest is the destination's, which does not know yet, and stands still.
#[test]
fn a_source_that_has_committed_waits_for_a_destination_of_its_version() {
    need!(ready());
    let (mut scene, id) = loaded(Direction::Forth, "committed");
    upgrade_source(&mut scene);
    let said = other_version(&scene);
    until("the source says what it waits for", || {
        let outcome = outcome(&scene, &id);
        outcome["state"] == "reconnecting" && outcome["error"].as_str().is_some_and(|e| e.contains(&said))
    });
    assert!(listed(&scene, false)["waiting"].is_string(), "{}", listed(&scene, false));
    let states = (journaled(&scene.a, &id, "source.jsonl"), journaled(&scene.b, &id, "destination.jsonl"));
    assert_eq!(states, ("committed".to_owned(), "loaded".to_owned()));
    back_to_this_version(&scene);
    let end = scene.end(&id).expect("the migration ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    scene.arrived().expect("it is whole");
}

/// The guest runs at the destination, and the source has pages that it lacks.
#[test]
fn a_guest_that_lacks_pages_waits_for_a_source_of_its_version() {
    need!(ready());
    let mut scene = Scene::behind_proxy().expect("a guest");
    let id = scene.start(&["--mode", "postcopy", "--bandwidth", SLOW]).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    upgrade_source(&mut scene);
    let said = other_version(&scene);
    until("the source says what it waits for", || {
        let outcome = outcome(&scene, &id);
        outcome["state"] == "reconnecting" && outcome["error"].as_str().is_some_and(|e| e.contains(&said))
    });
    until("the destination says what it waits for", || {
        let waiting = listed(&scene, true)["waiting"].as_str().unwrap_or_default().to_owned();
        waiting.starts_with("waiting for pages from a (lost since 20")
    });
    until("the destination says why", || scene.b.log().contains(&said));
    assert_eq!(journaled(&scene.b, &id, "destination.jsonl"), "owner");
    back_to_this_version(&scene);
    let end = scene.end(&id).expect("the migration ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    scene.arrived().expect("it is whole");
}
