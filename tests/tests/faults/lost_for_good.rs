//! A peer that never comes back: an operator can end the guest here, or let it run again, and nothing is left over.
#![cfg(test)]

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::daemon::Node;
use vmove_tests::fleet::until;
use vmove_tests::proxy::{Direction, Fault, Rule};
use vmove_tests::sandbox::qemu_in;
use vmove_tests::scene::{CONTROL, NAME, SLOW, Scene, ready, vmove};

const POSTCOPY: &[&str] = &["--mode", "postcopy", "--bandwidth", SLOW];
/// Longest time of a forced end: QEMU gets `quit`, then SIGTERM, then SIGKILL.
const FORCED_END: Duration = Duration::from_secs(20);

/// A guest that runs at `b` while pages are still missing.
fn handed_over() -> (Scene, String) {
    let scene = Scene::new().expect("a guest");
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    (scene, id)
}

fn kill_qemu(node: &Node) {
    let qemu = qemu_in(node.folder()).expect("a QEMU");
    kill(Pid::from_raw(qemu), Signal::SIGKILL).expect("it is killed");
}

/// The guest's entry in `vmove list`.
fn listed(node: &Node) -> Value {
    let list = node.ask(&["list"]).expect("an answer");
    list["vms"]
        .as_array()
        .and_then(|vms| vms.iter().find(|vm| vm["name"] == NAME).cloned())
        .unwrap_or_default()
}

fn files_in(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.flat_map(|e| if e.path().is_dir() { files_in(&e.path()) } else { vec![e.path()] }).collect()
}

/// Checks that `node` has nothing of the guest, also after a restart of its daemon.
#[track_caller]
fn nothing_left(node: &mut Node) {
    for again in [false, true] {
        assert_eq!(listed(node), Value::Null, "started again: {again}");
        assert_eq!(qemu_in(node.folder()), None, "started again: {again}");
        assert_eq!(files_in(&node.memory()), Vec::<std::path::PathBuf>::new(), "started again: {again}");
        let maps =
            files_in(node.folder()).into_iter().filter(|f| f.extension().is_some_and(|e| e == "pages"));
        assert_eq!(maps.count(), 0, "started again: {again}");
        node.crash();
        node.run().expect("it starts again");
    }
}

/// Ends the guest at `node` with `--force`.
#[track_caller]
fn end(node: &Node) {
    let begun = Instant::now();
    let stopped = vmove(node, &["stop", "--force", NAME]).expect("an answer");
    assert_eq!(stopped.code, 0, "{} {}\n{}", stopped.answer, stopped.said, node.log());
    assert!(begun.elapsed() < FORCED_END, "it took {:?}", begun.elapsed());
}

#[test]
fn a_guest_whose_source_is_lost_for_good_is_listed_so_and_can_be_ended() {
    need!(ready());
    let (mut scene, _) = handed_over();
    scene.a.crash();
    kill_qemu(&scene.a);
    let waits = |scene: &Scene| {
        let waiting = listed(&scene.b)["waiting"].as_str().unwrap_or_default().to_owned();
        waiting.starts_with("waiting for pages from a (lost since 20")
    };
    until("it says what it waits for", || waits(&scene));
    let refused = vmove(&scene.b, &["stop", NAME]).expect("an answer");
    assert_eq!((refused.code, &refused.answer["code"]), (1, &"busy".into()), "{}", refused.answer);
    assert!(refused.error().contains("vmove stop --force guest"), "no way out: {}", refused.error());
    // A restarted daemon offers the same way out.
    scene.b.crash();
    scene.b.run().expect("it starts again");
    end(&scene.b);
    nothing_left(&mut scene.b);
}

#[test]
fn a_paused_copy_whose_source_is_lost_for_good_can_be_ended() {
    need!(ready());
    let mut scene = Scene::behind_proxy().expect("a guest");
    let proxy = scene.proxy().expect("a proxy");
    let first = proxy.connections();
    scene.start_and_stick_in_the_switchover().expect("the guest is stopped");
    // The destination has the device state, but the source is not told.
    let unheard =
        Rule { connection: Some(first + CONTROL), direction: Direction::Back, after: 0, fault: Fault::Stall };
    scene.proxy().expect("a proxy").add(unheard);
    std::thread::sleep(Duration::from_millis(200));
    scene.unstick(first).expect("a proxy");
    std::thread::sleep(Duration::from_secs(1));
    scene.a.crash();
    kill_qemu(&scene.a);
    scene.proxy().expect("a proxy").cut_all();
    until("it waits", || listed(&scene.b)["waiting"].is_string() || qemu_in(scene.b.folder()).is_some());
    std::thread::sleep(Duration::from_millis(500));
    end(&scene.b);
    nothing_left(&mut scene.b);
}

/// The destination's QEMU dies while the source is away. This is reported at once. Only then can the source's copy run again.
#[test]
fn a_guest_that_died_at_the_destination_can_be_reclaimed() {
    need!(ready());
    let (mut scene, id) = handed_over();
    scene.a.crash();
    let outcome = |node: &Node| {
        let (_, status) = node.rest("GET", &format!("/v1/migrations/{id}"), &Value::Null).expect("an answer");
        status["outcome"].clone()
    };
    until("it waits", || outcome(&scene.b)["state"] == "reconnecting");
    kill_qemu(&scene.b);
    let killed = Instant::now();
    until("its end is told", || outcome(&scene.b)["state"] == "failed");
    assert!(killed.elapsed() < Duration::from_secs(2), "it took {:?}", killed.elapsed());
    let error = outcome(&scene.b)["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("QEMU at the destination has ended"), "{error}");
    end(&scene.b);
    nothing_left(&mut scene.b);
    scene.a.run().expect("it starts again");
    until("the source waits", || outcome(&scene.a)["state"] == "reconnecting");
    until("it hears of the way out", || {
        outcome(&scene.a)["error"].as_str().is_some_and(|e| e.contains("vmove reclaim"))
    });
    let unsure = vmove(&scene.a, &["reclaim", &id]).expect("an answer");
    assert_eq!(unsure.code, 2, "{} {}", unsure.answer, unsure.said);
    let path = format!("/v1/migrations/{id}/reclaim");
    let (code, _) = scene.a.rest("POST", &path, &json!({ "guest_is_lost": false })).expect("an answer");
    assert_eq!(code, 400);
    let reclaimed = vmove(&scene.a, &["reclaim", &id, "--guest-is-lost"]).expect("an answer");
    assert_eq!(reclaimed.code, 0, "{} {}", reclaimed.answer, reclaimed.said);
    assert!(
        reclaimed.answer["note"].as_str().is_some_and(|n| n.contains("is not in this copy")),
        "{}",
        reclaimed.answer
    );
    scene.alive_at(&scene.a).expect("the guest goes on");
    scene.sound_at(&scene.a).expect("its memory is right");
    let again = vmove(&scene.a, &["reclaim", &id, "--guest-is-lost"]).expect("an answer");
    assert_eq!(again.code, 1, "{} {}", again.answer, again.said);
    scene.moves_now().expect("it can be moved again");
}

#[test]
fn the_copy_at_the_source_of_a_guest_that_died_can_be_dropped() {
    need!(ready());
    let (mut scene, id) = handed_over();
    kill_qemu(&scene.b);
    let told = scene.end(&id).expect("the migration ends");
    assert_eq!(told.code, 4, "{} {}", told.answer, told.said);
    assert!(listed(&scene.a)["waiting"].is_string(), "{}", listed(&scene.a));
    end(&scene.a);
    nothing_left(&mut scene.a);
    end(&scene.b);
    nothing_left(&mut scene.b);
}
