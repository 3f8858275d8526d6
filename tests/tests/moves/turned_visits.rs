//! Migrations that become visits while memory follows their guests.
#![cfg(test)]

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::beacon::ram_files;
use vmove_tests::daemon::Node;
use vmove_tests::fleet::until;
use vmove_tests::scene::{NAME, Scene, gone_from, ready, vmove};

use super::visits::{away, done, refused, scene};

/// At this rate its memory follows it for some 20 seconds.
const SLOW: &str = "12MiB/s";

/// Begins to move the guest of `a` to `b`, by so slow a link that most of its memory is missing there. Returns the migration's id.
fn begin(scene: &Scene, mode: &str, options: &[&str]) -> String {
    let arguments = ["migrate", NAME, "--to", "b", "--mode", mode, "--bandwidth", SLOW, "--detach"];
    let begun = done(&scene.a, &[&arguments, options].concat());
    begun["id"].as_str().expect("an id").to_owned()
}

/// Waits until memory crosses.
fn on_its_way(scene: &Scene, id: &str) {
    until("it is on its way", || {
        vmove(&scene.b, &["status", id]).is_ok_and(|end| end.answer["phase"] == "rounds")
    });
}

/// Waits until the guest of a migration runs there.
fn runs_there(scene: &Scene, id: &str) {
    until("the guest runs there", || {
        vmove(&scene.b, &["status", id]).is_ok_and(|end| end.answer["phase"] == "fetch")
    });
}

/// What has crossed, as the node where the guest is tells it. Unit: bytes.
fn crossed(node: &Node, id: &str) -> u64 {
    let status = done(node, &["status", id]);
    status["bytes_done"].as_u64().unwrap_or_else(|| panic!("bytes: {status}"))
}

fn turn(scene: &Scene, options: &[&str]) -> Value {
    let turned = done(&scene.b, &[&["visit", NAME, "--keep-home"], options].concat());
    assert_eq!(turned["mode"], "visit", "{turned}");
    turned
}

fn comes_home(scene: &Scene, visit: &str) {
    done(&scene.b, &["visit", NAME, "--back"]);
    scene.sound_at(&scene.a).expect("it works at home again, and all that it reads is right");
    gone_from(&scene.b).expect("nothing of it is left there");
    until("the visit has ended", || done(&scene.a, &["status", visit])["outcome"]["state"] == "done");
    assert_eq!(done(&scene.a, &["status", visit])["outcome"]["report"]["visit"], "home");
    assert_eq!(ram_files(&scene.a.memory()).len(), 1, "what was kept is its memory, and nothing beside it");
}

#[test]
fn a_migration_becomes_a_visit_while_memory_follows_its_guest() {
    need!(ready());
    let scene = scene();
    let id = begin(&scene, "postcopy", &[]);
    runs_there(&scene, &id);
    refused(&scene.b, &["visit", NAME, "--keep-home", "--until", "NO_SUCH_EVENT"], "QEMU does not have");
    turn(&scene, &[]);
    away(&scene.a);
    refused(&scene.b, &["visit", NAME, "--keep-home"], "it is one already");
    scene.sound_at(&scene.b).expect("it works there, and all that it reads is right");
    let before = crossed(&scene.b, &id);
    scene.sound_at(&scene.b).expect("it works on there");
    let after = crossed(&scene.b, &id);
    eprintln!("{before} bytes had crossed, and {after} after the guest had read its memory once more");
    // The bulk of 12 MiB a second would have brought ten times that meanwhile.
    assert!(after - before < 4 << 20, "{before}, then {after}");
    assert_eq!(done(&scene.a, &["status", &id])["mode"], "visit");
    comes_home(&scene, &id);
    // Its home is a node like any other.
    let there = done(&scene.a, &["migrate", NAME, "--to", "b", "--mode", "hybrid"]);
    assert_eq!(there["visit"], Value::Null, "{there}");
    scene.sound_at(&scene.b).expect("it works there");
}

/// Asked for before the hand-over, it is a visit from the hand-over on.
#[test]
fn a_migration_becomes_a_visit_as_it_hands_its_guest_over() {
    need!(ready());
    let scene = scene();
    let id = begin(&scene, "hybrid", &[]);
    on_its_way(&scene, &id);
    turn(&scene, &[]);
    away(&scene.a);
    scene.sound_at(&scene.b).expect("it works there, and all that it reads is right");
    comes_home(&scene, &id);
}

#[test]
fn a_migration_that_became_a_visit_can_become_a_migration_again_or_go_home_by_itself() {
    need!(ready());
    let scene = scene();
    let id = begin(&scene, "postcopy", &[]);
    runs_there(&scene, &id);
    let turned = turn(&scene, &["--for", "4s"]);
    assert!(turned["going_home"]["when"].is_object(), "{turned}");
    // Until then its home still lists the guest that has left.
    away(&scene.a);
    until("it is at home again", || scene.a.vms().is_ok_and(|vms| !vms.is_empty()));
    scene.sound_at(&scene.a).expect("it works at home");
    gone_from(&scene.b).expect("nothing of it is left there");

    let id = begin(&scene, "postcopy", &[]);
    runs_there(&scene, &id);
    turn(&scene, &[]);
    away(&scene.a);
    let stayed = done(&scene.b, &["visit", NAME, "--stay"]);
    assert_eq!((&stayed["id"], &stayed["visit"]), (&id.into(), &"stayed".into()), "{stayed}");
    scene.arrived().expect("all of its memory is there");
}

/// Both daemons are killed while the guest is on a visit that was a migration, and started again.
#[test]
fn a_visit_that_was_a_migration_outlives_the_daemons_of_both_sides() {
    need!(ready());
    let mut scene = scene();
    let id = begin(&scene, "postcopy", &[]);
    runs_there(&scene, &id);
    turn(&scene, &[]);
    away(&scene.a);
    scene.b.crash();
    scene.a.crash();
    scene.a.run().expect("it starts again");
    scene.b.run().expect("it starts again");
    scene.sound_at(&scene.b).expect("it works on");
    assert_eq!(done(&scene.b, &["status", &id])["mode"], "visit");
    comes_home(&scene, &id);
}

#[test]
fn what_cannot_become_a_visit_is_refused_by_name_and_goes_on() {
    need!(ready());
    let scene = scene();
    refused(&scene.b, &["visit", NAME, "--keep-home"], "No migration brings");
    let id = begin(&scene, "precopy", &[]);
    on_its_way(&scene, &id);
    let (code, answer) = scene
        .a
        .rest("POST", &format!("/v1/migrations/{id}/visit"), &serde_json::json!({}))
        .expect("an answer");
    assert_eq!((code, &answer["code"]), (409, &"not-visiting".into()), "{answer}");
    done(&scene.a, &["cancel", &id]);
    scene.unharmed().expect("it goes on at its source");

    let id = begin(&scene, "postcopy", &["--verify"]);
    runs_there(&scene, &id);
    refused(&scene.b, &["visit", NAME, "--keep-home"], "found verify");
    until("it has moved all the same", || {
        vmove(&scene.a, &["status", &id]).is_ok_and(|end| end.answer["outcome"]["state"] == "done")
    });
    assert_eq!(done(&scene.a, &["status", &id])["outcome"]["report"]["verified"], true);
    let (code, answer) = scene
        .b
        .rest("POST", &format!("/v1/migrations/{id}/visit"), &serde_json::json!({}))
        .expect("an answer");
    assert!(
        code == 409 && answer["message"].as_str().is_some_and(|m| m.contains("has followed it")),
        "{answer}"
    );
    scene.arrived().expect("all of its memory is there");
}
