//! `vmove watch` on a terminal, while real guests are moved and forked.
#![cfg(test)]

use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::json;
use vmove_skip::need;
use vmove_tests::daemon::Node;
use vmove_tests::forks::done;
use vmove_tests::places;
use vmove_tests::scene::{SLOW, Scene, ready};

use crate::terminal::Terminal;

fn vmove(arguments: &[&Path]) -> Command {
    let mut command = Command::new(places::product("vmove").expect("vmove is built"));
    command.args(arguments);
    command
}

/// Watches a node.
fn watch(node: &Node, columns: u16, rows: u16) -> Terminal {
    let command = vmove(&[Path::new("--control"), &node.control(), Path::new("watch")]);
    Terminal::start(&command, columns, rows)
}

/// The share that the bar of a migration shows.
fn percent(text: &str) -> Option<u32> {
    let line = text.lines().find(|line| line.contains("] ") && line.contains(" %"))?;
    line.split("] ").nth(1)?.split(" %").next()?.trim().parse().ok()
}

/// Writes what the daemon tells to the file of `VMOVE_RECORD_WATCH`: states from which the drawing is tested.
fn record(node: &Node) {
    let Some(file) = std::env::var_os("VMOVE_RECORD_WATCH") else { return };
    let of = |path: &str, key: &str| node.rest("GET", path, &json!(null)).expect("an answer").1[key].clone();
    let state = json!({
        "vms": of("/v1/vms", "vms"),
        "live": of("/v1/migrations?live=true", "migrations"),
        "past": of("/v1/migrations", "migrations"),
        "forks": of("/v1/forks", "forks"),
    });
    std::fs::write(file, state.to_string()).expect("it is written");
}

#[test]
fn a_move_is_seen_on_a_terminal_which_is_as_before_afterwards() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let mut wide = watch(&scene.a, 120, 40);
    let both = vmove(&[Path::new("watch"), &scene.a.control(), &scene.b.control()]);
    let mut narrow = Terminal::start(&both, 40, 30);
    wide.until("a VM that runs", |text| text.contains("a: 1 VM") && text.contains("running"));
    wide.is_taken();
    narrow.until("two nodes", |text| text.contains("a: 1 VM") && text.contains("b: 0 VMs"));

    let id = scene.start(&["--mode", "hybrid", "--bandwidth", SLOW]).expect("it begins");
    let early = wide.until("a first round", |text| {
        text.contains("guest → b") && text.contains("rounds 1") && percent(text) > Some(0)
    });
    record(&scene.a);
    let begun = percent(&early).expect("a share");
    let later =
        wide.until("that it goes on", |text| percent(text) > Some(begun + 5) && text.contains(" left, "));
    assert!(later.contains("rate") && later.contains("left") && later.contains("pages/s"), "{later}");
    let both = narrow.until("both ends", |text| text.contains("guest → b") && text.contains("guest ← a"));
    assert!(both.lines().any(|line| line.trim_start().starts_with("rate")), "{both}");

    let end = scene.end(&id).expect("it ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    wide.until("the end, and the pause", |text| {
        text.contains("done, down") && text.contains("0 migrations at work")
    });
    narrow.until("the guest at b", |text| text.contains("b: 1 VM"));
    wide.press("G\r");
    wide.until("everything about it", |text| text.contains("Phases") && text.contains("switchover"));
    wide.press("\u{1b}");
    wide.until("the list", |text| text.contains("ended:"));
    wide.press("?");
    wide.until("the help", |text| text.contains("No key changes anything"));
    wide.press("q");
    assert!(wide.end().success());
    narrow.press("\u{3}");
    assert!(narrow.end().success(), "Ctrl-C ends it");
    scene.sound_at(&scene.b).expect("the guest is as it was");
}

#[test]
fn a_daemon_that_goes_away_is_waited_for() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let nowhere = scene.a.folder().join("nowhere.sock");
    let none = vmove(&[Path::new("--control"), &nowhere, Path::new("watch")]);
    assert_eq!(
        Terminal::start(&none, 80, 24).end().code(),
        Some(5),
        "it does not wait for what was never there"
    );
    let id = scene.start(&["--mode", "precopy", "--bandwidth", SLOW]).expect("it begins");
    let shown = watch(&scene.a, 100, 40);
    shown.until("a round", |text| text.contains("guest → b") && text.contains("rounds"));
    scene.a.crash();
    let lost = shown.until("that it is lost", |text| text.contains("a: LOST for "));
    assert!(lost.contains("systemctl start vmoved") && lost.contains("guest"), "{lost}");
    shown.is_taken();
    scene.a.run().expect("it starts again");
    // A daemon that is started anew in the rounds calls the migration off.
    shown.until("that it is back", |text| {
        !text.contains("LOST") && text.contains("a: 1 VM, 0 migrations at work")
    });
    shown.until("how the migration ended", |text| text.contains("ended:"));
    shown.signal(Signal::SIGTERM);
    assert!(shown.end().success());
    assert_ne!(scene.end(&id).expect("it has ended").code, 0);
    scene.sound_at(&scene.a).expect("the guest is as it was");
}

#[test]
fn a_fork_is_seen_with_its_children_and_has_a_report() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let mut shown = watch(&scene.a, 80, 24);
    let answer = done(&scene.a, &["create", "guest", "--count", "2"]).expect("two children");
    let id = answer["id"].as_str().expect("an id");
    let text = shown.until("both children", |text| text.contains("fork, 2 of 2 children run, done"));
    assert!(text.matches("ran after").count() == 2 && text.contains("a: 3 VMs"), "{text}");
    let name = answer["children"][0]["name"].as_str().expect("a name");
    let output = scene.a.vmove(&["report", id]).expect("vmove runs");
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && report.contains("Pause of the parent") && report.contains(name),
        "{report}"
    );
    let output = scene.a.vmove(&["report", &id[..6], "--svg", "-"]).expect("vmove runs");
    let svg = String::from_utf8_lossy(&output.stdout).into_owned();
    let xml = roxmltree::Document::parse(&svg).expect("XML");
    let texts: Vec<_> = xml.descendants().filter_map(|node| node.text()).collect();
    assert!(texts.iter().any(|text| text.trim() == format!("{name} ran")), "{texts:?}");
    record(&scene.a);
    shown.press("G\r");
    shown.until("everything about the fork", |text| {
        text.contains("From the request") || text.contains("children")
    });
    shown.press("q");
    assert!(shown.end().success());
}
