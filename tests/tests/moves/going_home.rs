//! Guests that go home from a visit by themselves: after a time, on an event, when they are idle; and what stands in their way.
#![cfg(test)]

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::until;
use vmove_tests::guest::Guest;
use vmove_tests::monitor::Monitor;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, Scene, gone_from, memory_mib, ready, vmove};

/// Works on a little of its memory.
fn local() -> Config {
    Config { working_set_mib: 8, rate: Rate::PagesPerSecond(500), verify: 4_000, ..Config::default() }
}

/// `b` has no address of `a`: the guest's home has told it where it is.
fn scene(config: Config, extra: &[&str]) -> Scene {
    scene_with(config, extra, "")
}

/// The same, with this in the configuration of `b`.
fn scene_with(config: Config, extra: &[&str], node: &str) -> Scene {
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut guest = Guest::new(memory_mib(&config) + 32, config).expect("a QEMU");
    guest.extra = extra.iter().map(|word| (*word).to_owned()).collect();
    let b = Node::start(&sandbox, "b", NodeOptions { config: node.to_owned(), ..NodeOptions::default() })
        .expect("a daemon");
    Scene::to(sandbox, b, "thp", &guest).expect("a guest")
}

/// Sends the guest of `a` to `b`. Returns the visit's id and what was said.
fn go(scene: &Scene, options: &[&str]) -> (String, Value) {
    let said = scene.visit(options).expect("it goes");
    (said["id"].as_str().expect("an id").to_owned(), said)
}

fn status(node: &Node, id: &str) -> Value {
    node.ask(&["status", id]).expect("an answer")
}

/// It went home by itself, and is whole.
fn is_home(scene: &Scene, visit: &str) {
    until("it runs at home", || scene.a.runs(NAME));
    scene.sound_at(&scene.a).expect("it works, and all that it reads is right");
    gone_from(&scene.b).expect("nothing of it is left there");
    until("the visit has ended", || status(&scene.a, visit)["outcome"]["state"] == "done");
    assert_eq!(status(&scene.a, visit)["outcome"]["report"]["visit"], "home");
}

#[test]
fn a_visitor_goes_home_when_its_time_is_over_also_if_its_daemon_was_killed() {
    need!(ready());
    for killed in [false, true] {
        let mut scene = scene(local(), &[]);
        let (visit, said) = go(&scene, &["--for", "6s"]);
        assert_eq!(said["going_home"]["when"]["after_ms"], 6000, "{said}");
        scene.alive_at(&scene.b).expect("it works there");
        let there = status(&scene.b, &visit);
        assert_eq!(there["going_home"]["when"]["after_ms"], 6000, "{there}");
        if killed {
            scene.b.crash();
            scene.b.run().expect("it starts again");
        }
        assert!(scene.b.runs(NAME), "too early: {}", scene.b.log());
        is_home(&scene, &visit);
    }
}

#[test]
fn a_visitor_goes_home_on_an_event_of_its_qemu() {
    need!(ready());
    let scene = scene(local(), &["-qmp", "unix:{vmdir}/operator.sock,server=on,wait=off"]);
    let bad = vmove(&scene.a, &["visit", NAME, "--to", "b", "--until", "JOB_WELL_DONE"]).expect("an answer");
    assert!(bad.code != 0 && bad.error().contains("which QEMU does not have"), "{}", bad.answer);
    let (visit, _) = go(&scene, &["--until", "POWERDOWN", "--for", "1h"]);
    scene.sound_at(&scene.b).expect("it works there");
    std::thread::sleep(Duration::from_secs(2));
    assert!(scene.b.runs(NAME), "nothing has happened yet");
    let monitor = scene.b.vm(NAME).expect("it is listed").dir.join("operator.sock");
    let monitor = Monitor::connect(&monitor).expect("QEMU's second monitor");
    monitor.run("system_powerdown", serde_json::json!({})).expect("it answers");
    is_home(&scene, &visit);
}

#[test]
fn a_visitor_goes_home_when_it_is_idle_and_not_before() {
    need!(ready());
    let busy = scene(local(), &[]);
    go(&busy, &["--return-when", "idle", "--idle-for", "3s"]);
    // It checks now and then whether it is there, and that is all.
    let idle = Config {
        working_set_mib: 4,
        rate: Rate::PagesPerSecond(0),
        verify: 20,
        period_us: 100_000,
        ..Config::default()
    };
    let idle = scene(idle, &[]);
    let (visit, _) = go(&idle, &["--return-when", "idle", "--idle-for", "3s"]);
    until("it runs at home", || idle.a.runs(NAME));
    until("the visit has ended", || status(&idle.a, &visit)["outcome"]["state"] == "done");
    assert!(busy.b.runs(NAME), "one that works stays: {}", busy.b.log());
    busy.sound_at(&busy.b).expect("it works there");
}

#[test]
fn a_visitor_that_cannot_go_home_says_why_and_goes_later() {
    need!(ready());
    let forbids = tempfile::NamedTempFile::new().expect("a file");
    let mut scene = scene_with(local(), &[], &forbidding_hook(forbids.path()));
    let (visit, _) = go(&scene, &["--for", "3s"]);
    until("the first try has failed", || status(&scene.b, &visit)["going_home"]["failed"].is_string());
    let there = status(&scene.b, &visit);
    let why = there["going_home"]["failed"].as_str().expect("a reason").to_owned();
    assert!(why.contains("not-yet"), "{why}");
    let shown = scene.b.vmove(&["status", &visit]).expect("an answer");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(
        shown.contains("goes home") && shown.contains("the last try failed") && shown.contains("not-yet"),
        "{shown}"
    );
    scene.sound_at(&scene.b).expect("it works there meanwhile");
    // Home is lost when it may go at last.
    scene.a.crash();
    forbids.close().expect("it was there");
    std::thread::sleep(Duration::from_secs(2));
    scene.a.run().expect("it starts again");
    is_home(&scene, &visit);
}

/// Forbids every migration while the file is there.
fn forbidding_hook(file: &Path) -> String {
    format!(
        "[[hook]]\nname = \"not-yet\"\non = \"before-migration\"\ndo = {{ run = [\"/usr/bin/test\", \"!\", \"-e\", {:?}] }}\n",
        file.display().to_string()
    )
}
