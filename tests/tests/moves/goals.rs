//! Goals: a migration promises to keep them, or does not begin; they say how it goes, and it says what it kept.
#![cfg(test)]

use serde_json::Value;
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::guest::Guest;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{End, NAME, Scene, memory_mib, ready, vmove};

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("no {key} in {value}"))
}

/// What came of a goal: promised and measured, if it was kept.
fn kept(end: &End, goal: &str) -> (f64, f64) {
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    let all = end.answer["verdict"].as_array().expect("a verdict");
    let one = all.iter().find(|one| one["goal"] == goal).unwrap_or_else(|| panic!("{all:?}"));
    assert_eq!(one["kept"], true, "{}", end.answer);
    (number(one, "promised"), number(one, "measured"))
}

/// Writes 64 MiB over and over: no rounds shrink that over the link of these tests.
fn busy() -> Config {
    Config {
        working_set_mib: 64,
        cold_mib: 32,
        rate: Rate::PagesPerSecond(40_000),
        verify: 10_000,
        ..Config::default()
    }
}

fn busy_scene() -> Scene {
    let guest = Guest::new(memory_mib(&busy()), busy()).expect("a QEMU");
    Scene::in_sandbox(Sandbox::new().expect("a sandbox"), "thp", &guest).expect("a guest")
}

const LINK: [&str; 2] = ["--bandwidth", "64MiB"];

#[test]
fn a_promise_is_made_without_moving_and_a_goal_that_cannot_be_kept_is_refused_with_what_could() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let check =
        |goals: &[&str]| vmove(&scene.a, &[&["check", NAME, "--to", "b"], goals].concat()).expect("it ends");
    // Of a guest with 128 MiB and more.
    let promised = check(&[]);
    assert_eq!(promised.code, 0, "{}", promised.answer);
    let promise = &promised.answer["promise"];
    assert!(number(promise, "sent_bytes") > 100e6, "{promise}");
    assert!((2e6..60e6).contains(&number(promise, "dirty_bytes_per_s")), "5,000 pages/s: {promise}");
    assert!(promise["basis"].as_str().is_some_and(|basis| basis.contains("not measured")), "{promise}");
    scene.sound_at(&scene.a).expect("the guest works as before");

    // 128 MiB at 8 MiB/s.
    let impossible = ["--within", "4s", "--bandwidth", "8MiB"];
    let refused = check(&impossible);
    assert_eq!(refused.code, 3, "{}", refused.answer);
    assert_eq!(refused.answer["blockers"][0]["code"], "goal", "{}", refused.answer);
    let refused = scene.migrate_to("b", &impossible).expect("it ends");
    assert_eq!(refused.code, 3, "{} {}", refused.answer, refused.said);
    let mut why = refused.error().to_owned();
    assert!(
        why.contains("--within 4s cannot be kept") && why.contains("may be used for 8.00 MiB/s"),
        "{why}"
    );
    scene.unharmed().expect("the guest stays");

    // What it says could be kept is kept. On a busy host the guest may write faster by then than it did, after it was held up.
    let mut moved = None;
    for _ in 0..3 {
        let could = why.split("what could be kept: --within ").nth(1).and_then(|rest| rest.split(' ').next());
        let could = could.unwrap_or_else(|| panic!("no suggestion in {why}"));
        let end = scene.migrate_to("b", &["--within", could, "--bandwidth", "8MiB"]).expect("it ends");
        if end.code != 3 {
            moved = Some(end);
            break;
        }
        why = end.error().to_owned();
    }
    let moved = moved.unwrap_or_else(|| panic!("refused again and again: {why}"));
    let (promised, measured) = kept(&moved, "within");
    assert!(measured < 2.0 * promised && promised < 2.0 * measured, "{}", moved.answer);
    scene.arrived().expect("the guest is whole");
}

#[test]
fn goals_that_contradict_are_refused_by_name() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    for (goals, words) in [
        (&["--max-pause", "20s", "--within", "10s"][..], "goals contradict each other"),
        (&["--max-pause", "20ms", "--paused"], "goals contradict the options"),
        (&["--within", "60s", "--timeout", "30s"], "timeout_ms calls the migration off"),
        (&["--max-pause", "20ms", "--max-downtime", "20ms"], ""),
    ] {
        let end = scene.migrate_to("b", goals).expect("it ends");
        assert_eq!(end.code, 2, "{goals:?}: {} {}", end.answer, end.said);
        assert!(end.error().contains(words), "{goals:?}: {}", end.answer);
    }
    scene.unharmed().expect("the guest stays");
}

#[test]
fn a_pause_that_precopy_cannot_keep_is_kept_by_another_mode() {
    need!(ready());
    let scene = busy_scene();
    // 64 MiB that are written all the time take a second.
    let only_precopy = [&["--mode", "precopy", "--max-pause", "400ms"], &LINK[..]].concat();
    let refused = scene.migrate_to("b", &only_precopy).expect("it ends");
    assert_eq!(refused.code, 3, "{} {}", refused.answer, refused.said);
    assert!(refused.error().contains("does not converge"), "{}", refused.answer);
    scene.unharmed().expect("the guest stays");

    let moved = scene.migrate_to("b", &[&["--max-pause", "400ms"], &LINK[..]].concat()).expect("it ends");
    kept(&moved, "max-pause");
    assert_ne!(moved.answer["mode"], "precopy", "{}", moved.answer);
    assert!(moved.answer["mode_reason"].as_str().is_some_and(|why| why.contains("keeps the goals")));
    assert_eq!(moved.answer["promise"]["mode"], moved.answer["mode"], "{}", moved.answer);
    scene.arrived().expect("the guest is whole");
    // The history has it, too.
    let id = moved.answer["id"].as_str().expect("an id");
    let told = scene.a.ask(&["status", id]).expect("it is remembered");
    assert_eq!(told["outcome"]["report"]["verdict"], moved.answer["verdict"], "{told}");

    // Who allows for that pause gets it by pre-copy, which `--max-downtime` (300 ms) would not end.
    let back =
        [&["migrate", NAME, "--to", "a", "--mode", "precopy", "--max-pause", "10s"], &LINK[..]].concat();
    let back = vmove(&scene.b, &back).expect("it ends");
    let (promised, measured) = kept(&back, "max-pause");
    assert!(measured > 400.0 && promised > 400.0, "{}", back.answer);
    scene.sound_at(&scene.a).expect("the guest is whole");
}

/// Holds 512 MiB that it hardly writes.
fn large() -> Config {
    let rate = Rate::PagesPerSecond(1_000);
    Config { working_set_mib: 8, cold_mib: 504, rate, verify: 20_000, ..Config::default() }
}

/// What was used of the processors, in percent, of each host.
fn host_cpu(end: &End) -> [f64; 2] {
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    ["source", "destination"].map(|host| {
        let used = &end.answer["host_cpu"][host];
        assert!(number(used, "cpu_ms") > 0.0, "{}", end.answer);
        number(used, "percent")
    })
}

/// What was used of the processors on that host that used more of them, in milliseconds.
fn processors_ms(end: &End) -> f64 {
    ["source", "destination"]
        .map(|host| number(&end.answer["host_cpu"][host], "cpu_ms"))
        .into_iter()
        .fold(0.0, f64::max)
}

#[test]
fn a_share_of_the_processors_is_kept_on_both_hosts_in_the_time_that_was_promised() {
    need!(ready());
    let guest = Guest::new(memory_mib(&large()), large()).expect("a QEMU");
    let sandbox = Sandbox::new().expect("a sandbox");
    let scene = Scene::in_sandbox(sandbox, "thp", &guest).expect("a guest");

    // Without the goal it is told, too, and remembered.
    let free = scene.migrate_to("b", &["--mode", "precopy"]).expect("it ends");
    let most = host_cpu(&free).into_iter().fold(0.0, f64::max);
    eprintln!("without the goal: {} in {} ms", free.answer["host_cpu"], free.answer["total_ms"]);
    assert!(most > 6.0, "{}", free.answer);
    scene.arrived().expect("the guest is whole");

    // Nobody has moved to this node before. What the guest waits for is not held back.
    let back = ["migrate", NAME, "--to", "a", "--mode", "postcopy", "--host-cpu", "5%"];
    let back = vmove(&scene.b, &back).expect("it ends");
    eprintln!("back by post-copy: {} in {} ms", back.answer["host_cpu"], back.answer["total_ms"]);
    for percent in host_cpu(&back) {
        assert!(percent <= 6.0, "{}", back.answer);
    }
    assert!(number(&back.answer, "downtime_ms") < 1_000.0, "{}", back.answer);
    scene.sound_at(&scene.a).expect("the guest is whole");

    // What is in the way is named.
    let hurried = scene.migrate_to("b", &["--host-cpu", "1%", "--within", "4s"]).expect("it ends");
    assert_eq!(hurried.code, 3, "{} {}", hurried.answer, hurried.said);
    let why = hurried.error();
    assert!(why.contains("1 % of the processors") && why.contains("as earlier moves have shown"), "{why}");
    assert!(why.contains("or --host-cpu "), "{why}");

    let kept_to = scene.migrate_to("b", &["--host-cpu", "5%"]).expect("it ends");
    eprintln!(
        "with the goal: {} in {} ms, {}",
        kept_to.answer["host_cpu"], kept_to.answer["total_ms"], kept_to.said
    );
    for percent in host_cpu(&kept_to) {
        assert!(percent <= 6.0, "{}", kept_to.answer);
    }
    let (promised, measured) = kept(&kept_to, "host-cpu");
    assert!(promised <= 5.0 && measured <= 5.0, "{}", kept_to.answer);
    // What a page costs of the processors is taken from earlier moves: on a busy host it has become dearer since.
    let dearer = (processors_ms(&kept_to) / processors_ms(&free)).max(1.0);
    let (promised, took) =
        (dearer * number(&kept_to.answer["promise"], "time_ms"), number(&kept_to.answer, "total_ms"));
    assert!(took < 2.0 * promised && promised < 2.0 * took, "{promised} {took}: {}", kept_to.answer);
    assert!(number(&kept_to.answer, "downtime_ms") < 1_000.0, "{}", kept_to.answer);
    scene.arrived().expect("the guest is whole");
}

#[test]
fn a_share_of_the_processors_that_there_is_not_is_refused() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    for bad in ["0%", "101%", "50", "half"] {
        let end = scene.migrate_to("b", &["--host-cpu", bad]).expect("it ends");
        assert_eq!(end.code, 2, "{bad}: {} {}", end.answer, end.said);
        assert!(
            format!("{} {}", end.answer, end.said).contains("from 1% to 100%"),
            "{} {}",
            end.answer,
            end.said
        );
    }
    scene.unharmed().expect("the guest stays");
}
