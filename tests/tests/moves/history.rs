//! Which past migrations a node remembers, and for how long.
#![cfg(test)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::until;
use vmove_tests::guest::Guest;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{SLOW, Scene, memory_mib, ready, steady, vmove};

/// The smallest number that can be set.
const KEPT: usize = 10;

/// Ids of the migrations of which node `b` has a journal.
fn remembered(scene: &Scene) -> Vec<String> {
    let folder = scene.b.folder().join("state/sessions");
    let entries = std::fs::read_dir(folder).expect("a folder").flatten();
    entries.map(|e| e.file_name().into_string().expect("an id")).collect()
}

fn journal_at_b(scene: &Scene, id: &str) -> PathBuf {
    scene.b.folder().join("state/sessions").join(id).join("destination.jsonl")
}

/// Restarts node `b` with a changed word in a journal.
fn rewrite(scene: &mut Scene, id: &str, from: &str, to: &str) {
    let path = journal_at_b(scene, id);
    let text = std::fs::read_to_string(&path).expect("a journal");
    assert!(text.contains(from), "no {from} in {text}");
    scene.b.crash();
    std::fs::write(&path, text.replace(from, to)).expect("it is written");
    scene.b.run().expect("it starts again");
}

fn until_remembered(scene: &Scene, number: usize) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while remembered(scene).len() != number {
        assert!(Instant::now() < deadline, "{} of {number}\n{}", remembered(scene).len(), scene.b.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn old_migrations_are_forgotten_but_for_those_that_a_peer_may_ask_for() {
    need!(ready());
    let options = NodeOptions { config: format!("keep-migrations = {KEPT}\n"), ..NodeOptions::default() };
    let guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut scene = Scene::with_options(sandbox, &options, "thp", &guest).expect("a guest");
    let moved = scene.a.migrate("guest", "b", &["--mode", "postcopy"]).expect("it moves").id;
    let journal = journal_at_b(&scene, &moved);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !std::fs::read_to_string(&journal).expect("a journal").contains(r#""released":true"#) {
        assert!(Instant::now() < deadline, "the source's last word is not in the journal");
        std::thread::sleep(Duration::from_millis(50));
    }
    let told = |node: &Node| {
        let progress = node.ask(&["status", &moved]).expect("it is remembered");
        let report = &progress["outcome"]["report"];
        assert_eq!(
            (&report["mode"], &progress["mode"]),
            (&json!("postcopy"), &json!("postcopy")),
            "{progress}"
        );
        assert_eq!(report["began_at"], progress["began_at"], "{progress}");
        assert!(report["faults"]["fetched"].as_u64() > Some(0), "{progress}");
        progress["began_at"].as_str().expect("a time").to_owned()
    };
    let began = [told(&scene.a), told(&scene.b)];
    assert!(began.iter().all(|at| at.starts_with("20") && at.ends_with('Z') && at.len() == 24), "{began:?}");
    let shown = scene.b.vmove(&["history"]).expect("a list");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("BEGAN (UTC)") && shown.contains(&began[1][11..19]), "{shown}");
    // Simulates that the word was lost: the source may still ask, and would take the guest back if `b` did not know it.
    rewrite(&mut scene, &moved, r#""released":true"#, r#""released":false"#);
    scene.a.crash();
    scene.a.run().expect("it starts again");
    assert_eq!([told(&scene.a), told(&scene.b)], began, "both daemons were started again");
    for _ in 0..KEPT + 3 {
        let end = vmove(&scene.b, &["migrate", "guest", "--to", "127.0.0.1:1"]).expect("an answer");
        assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
    }
    // The last request may have begun with one more.
    rewrite(&mut scene, &moved, r#""released":false"#, r#""released":false"#);
    until_remembered(&scene, KEPT + 1);
    assert!(remembered(&scene).contains(&moved), "the one that may be asked for is gone");
    let listed = scene.b.ask(&["history"]).expect("a list");
    assert_eq!(listed["migrations"].as_array().map(Vec::len), Some(KEPT + 1), "{listed}");

    rewrite(&mut scene, &moved, r#""released":false"#, r#""released":true"#);
    until_remembered(&scene, KEPT);
    assert!(!remembered(&scene).contains(&moved), "it is kept for nobody");
    scene.sound_at(&scene.b).expect("the guest is as it was");
}

/// What is told of all migrations, without the order.
fn told(node: &Node) -> Vec<Value> {
    let list = node.ask(&["history"]).expect("a list");
    let mut all = list["migrations"].as_array().expect("migrations").clone();
    all.sort_by_key(|one| one["id"].as_str().map(str::to_owned));
    all
}

/// Of a migration: how it ended, and its figures; of one that was called off, how far it was.
fn figures(progress: &Value) -> Vec<(&'static str, Value)> {
    let reached: &[_] = match progress["outcome"]["state"].as_str() {
        Some("failed") => &["/phase", "/phases", "/bytes_done", "/bytes_total", "/bytes_sent"],
        _ => &[],
    };
    let of = |pointer: &'static str| (pointer, progress.pointer(pointer).cloned().unwrap_or_default());
    let told = [
        "/mode",
        "/elapsed_ms",
        "/outcome/state",
        "/outcome/cancelled",
        "/outcome/error",
        "/outcome/report/downtime_ms",
        "/outcome/report/total_ms",
        "/outcome/report/fabric",
        "/outcome/report/destination",
        "/outcome/report/pages_total",
        "/outcome/report/phases",
    ];
    told.iter().chain(reached).map(|pointer| of(pointer)).collect()
}

#[test]
fn a_node_that_is_started_anew_tells_of_migrations_as_before() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let cancelled = scene.start(&["--mode", "precopy", "--bandwidth", SLOW]).expect("it begins");
    scene.reach(&cancelled, "rounds").expect("a round");
    // The destination is in it with the first page.
    until("both are in a round", || told(&scene.b).iter().any(|one| one["phase"] == "rounds"));
    scene.a.ask(&["cancel", &cancelled]).expect("it is called off");
    assert_ne!(scene.end(&cancelled).expect("its end").code, 0);
    // No mode was chosen yet.
    let failed = vmove(&scene.a, &["migrate", "guest", "--to", "127.0.0.1:1"]).expect("an answer");
    assert_eq!(failed.code, 1, "{} {}", failed.answer, failed.said);
    let moved = scene.start(&["--mode", "hybrid"]).expect("it begins");
    let downtime = &scene.end(&moved).expect("its end").answer["downtime_ms"];
    assert!(downtime.as_f64() > Some(0.0), "{downtime}");
    // The last word between them comes a moment later.
    until("both have ended", || told(&scene.b).iter().all(|one| one["outcome"]["state"] != "running"));

    let before = [told(&scene.a), told(&scene.b)];
    for side in &before {
        let of =
            |id: &String| side.iter().find(|one| one["id"] == id.as_str()).expect("it is listed").clone();
        let off = of(&cancelled);
        assert_eq!(off["outcome"]["cancelled"], true, "{side:#?}");
        assert_eq!((&off["mode"], &off["phase"]), (&json!("precopy"), &json!("rounds")), "{side:#?}");
        assert_eq!(&of(&moved)["outcome"]["report"]["downtime_ms"], downtime, "{side:#?}");
    }
    for node in [&mut scene.a, &mut scene.b] {
        node.stop().expect("it stops");
        node.run().expect("it starts again");
    }
    let after = [told(&scene.a), told(&scene.b)];
    for (before, after) in before.iter().flatten().zip(after.iter().flatten()) {
        let other: Vec<_> = figures(before).into_iter().zip(figures(after)).filter(|(b, a)| b != a).collect();
        // The journal is written a moment before the end is told.
        assert!(other.iter().all(|(b, _)| b.0 == "/elapsed_ms"), "{other:#?}");
        let ms = |told: &Value| told["elapsed_ms"].as_f64().expect("ms");
        assert!(ms(after) > 0.5 * ms(before), "{before:#} {after:#}");
    }
    let shown = scene.b.vmove(&["history"]).expect("a list");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("cancelled, ") && shown.contains("done, down "), "{shown}");
    assert!(!shown.contains("down 0.0 ms"), "{shown}");
}
