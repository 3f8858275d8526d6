//! Guests that visit another node by demand, come home with what they touched there, or stay.
#![cfg(test)]

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::beacon::ram_files;
use vmove_tests::daemon::Node;
use vmove_tests::fleet::until;
use vmove_tests::guest::Guest;
use vmove_tests::sandbox::{Sandbox, qemu_in};
use vmove_tests::scene::{End, NAME, Scene, gone_from, memory_mib, ready, vmove};

/// What the guest has used and does not touch any more.
const IDLE_MIB: u32 = 192;

/// Works on a small part of its memory.
fn local() -> Config {
    Config {
        working_set_mib: 8,
        cold_mib: 8,
        rate: Rate::PagesPerSecond(500),
        verify: 4_000,
        ..Config::default()
    }
}

pub(super) fn scene() -> Scene {
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut guest = Guest::new(memory_mib(&local()) + IDLE_MIB + 96, local()).expect("a QEMU");
    guest.used_mib = IDLE_MIB;
    Scene::in_sandbox(sandbox, "thp", &guest).expect("a guest")
}

pub(super) fn done(node: &Node, arguments: &[&str]) -> Value {
    let End { code, answer, said } = vmove(node, arguments).expect("an answer");
    assert_eq!(code, 0, "{arguments:?}: {answer} {said}\n{}", node.log());
    answer
}

pub(super) fn refused(node: &Node, arguments: &[&str], why: &str) {
    let end = vmove(node, arguments).expect("an answer");
    assert!(end.code != 0 && end.error().contains(why), "{arguments:?}: {} {}", end.answer, end.said);
}

/// Sends the guest of `a` to `b`. Returns the id of the visit.
fn go(scene: &Scene) -> String {
    let there = scene.visit(&[]).expect("it goes");
    assert_eq!((&there["mode"], &there["phase"]), (&"visit".into(), &"fetch".into()), "{there}");
    there["id"].as_str().expect("an id").to_owned()
}

/// Nothing but the guest's memory is at home.
pub(super) fn away(node: &Node) {
    until("the QEMU at home has ended", || qemu_in(node.folder()).is_none());
    until("the VM at home is forgotten", || node.vms().is_ok_and(|vms| vms.is_empty()));
    let kept = ram_files(&node.memory());
    assert!(!kept.is_empty(), "its memory is kept");
}

/// The report of a migration that `node` remembers.
fn report(node: &Node, id: &str) -> Value {
    let status = done(node, &["status", id]);
    assert_eq!(status["outcome"]["state"], "done", "{status}");
    status["outcome"]["report"].clone()
}

fn bytes_sent(report: &Value) -> u64 {
    report["bytes_sent"].as_u64().unwrap_or_else(|| panic!("bytes: {report}"))
}

#[test]
fn a_guest_comes_home_with_what_it_touched_on_its_visit() {
    need!(ready());
    let scene = scene();
    // What a migration to and fro costs.
    done(&scene.a, &["migrate", NAME, "--to", "b", "--mode", "postcopy"]);
    let back = done(&scene.b, &["migrate", NAME, "--to", "a", "--mode", "postcopy"]);
    let whole = 2 * bytes_sent(&back);
    for round in 0..3 {
        let visit = go(&scene);
        scene.sound_at(&scene.b).expect("it works there, and all that it reads is right");
        away(&scene.a);
        let back = done(&scene.b, &["visit", NAME, "--back"]);
        scene.sound_at(&scene.a).expect("it works at home again, and all that it reads is right");
        gone_from(&scene.b).expect("nothing of it is left there");
        until("the visit has ended", || done(&scene.a, &["status", &visit])["outcome"]["state"] == "done");
        assert_eq!(
            ram_files(&scene.a.memory()).len(),
            1,
            "what was kept is its memory, and nothing beside it"
        );
        let there = report(&scene.a, &visit);
        assert_eq!(there["visit"], "home", "{there}");
        let (there, back) = (bytes_sent(&there), bytes_sent(&back));
        eprintln!("round {round}: {there} bytes there, {back} back; a migration to and fro {whole}");
        assert!((there + back) * 4 < whole, "{there} and {back} of {whole}");
        assert!(back < there, "what it has only read is at home: {back} of {there}");
    }
}

/// Of 1 GiB in use, the guest touches 64 MiB there and writes 16.
#[test]
fn a_visit_of_a_large_guest_brings_little_of_it_to_and_fro() {
    need!(ready());
    let working = Config {
        working_set_mib: 16,
        cold_mib: 48,
        rate: Rate::PagesPerSecond(2_000),
        verify: 16_000,
        ..Config::default()
    };
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut guest = Guest::new(1024, working).expect("a QEMU");
    guest.used_mib = 440;
    let scene = Scene::in_sandbox(sandbox, "thp", &guest).expect("a guest");
    done(&scene.a, &["migrate", NAME, "--to", "b", "--mode", "postcopy"]);
    let whole = 2 * bytes_sent(&done(&scene.b, &["migrate", NAME, "--to", "a", "--mode", "postcopy"]));
    let visit = go(&scene);
    scene.sound_at(&scene.b).expect("it has touched all of its 64 MiB there");
    let back = bytes_sent(&done(&scene.b, &["visit", NAME, "--back"]));
    scene.sound_at(&scene.a).expect("it works at home again, and all that it reads is right");
    until("the visit has ended", || done(&scene.a, &["status", &visit])["outcome"]["state"] == "done");
    let there = bytes_sent(&report(&scene.a, &visit));
    eprintln!(
        "{there} bytes there, {back} back; a migration to and fro {whole}: {:.3}",
        (there + back) as f64 / whole as f64
    );
    assert!((there + back) * 100 <= whole * 15, "{there} and {back} of {whole}");
}

#[test]
fn a_guest_that_visits_can_stay_and_move_on() {
    need!(ready());
    let scene = scene();
    let visit = go(&scene);
    scene.sound_at(&scene.b).expect("it works there");
    let pages = |node: &Node| done(node, &["status", &visit])["bytes_done"].as_u64();
    assert!(pages(&scene.b).is_some());
    // While it visits it goes nowhere else.
    refused(&scene.b, &["migrate", NAME, "--to", "a"], "--stay` lets it stay");
    let stayed = done(&scene.b, &["visit", NAME, "--stay"]);
    assert_eq!(stayed["visit"], "stayed", "{stayed}");
    scene.arrived().expect("all of its memory is there");
    refused(&scene.b, &["visit", NAME, "--back"], "not here for a visit");
    let end = vmove(&scene.b, &["migrate", NAME, "--to", "a"]).expect("an answer");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    scene.sound_at(&scene.a).expect("it works");
}

#[test]
fn what_is_no_visit_is_refused_by_name() {
    need!(ready());
    let scene = scene();
    refused(&scene.a, &["visit", NAME, "--back"], "not here for a visit");
    refused(&scene.a, &["visit", NAME, "--stay"], "not here for a visit");
    refused(&scene.a, &["visit", "nobody", "--to", "b"], "nobody");
    let migration =
        serde_json::json!({ "vm": NAME, "to": "b", "options": { "visit": "go", "verify": true } });
    let (code, answer) = scene.a.rest("POST", "/v1/migrations", &migration).expect("an answer");
    assert!(
        code >= 400 && answer["message"].as_str().is_some_and(|m| m.contains("verify")),
        "{code} {answer}"
    );
    let migration = serde_json::json!({ "vm": NAME, "to": "b", "options": { "visit": "back" } });
    let (code, answer) = scene.a.rest("POST", "/v1/migrations", &migration).expect("an answer");
    assert_eq!((code, &answer["code"]), (409, &"not-visiting".into()), "{answer}");
    scene.unharmed().expect("nothing was changed");
    go(&scene);
    refused(&scene.a, &["visit", NAME, "--back"], "it visits b");
    scene.sound_at(&scene.b).expect("it works there");
    let other = serde_json::json!({ "vm": NAME, "to": "127.0.0.1:1", "options": { "visit": "back" } });
    let (_, answer) = scene.b.rest("POST", "/v1/migrations", &other).expect("an answer");
    assert!(answer["message"].as_str().is_some_and(|m| m.contains("home of")), "{answer}");
    done(&scene.b, &["visit", NAME, "--back"]);
    scene.sound_at(&scene.a).expect("it works");
}

/// A guest that ends on its visit leaves nothing at home, and neither does one whose home hears nothing more of it.
#[test]
fn a_guest_that_ends_on_its_visit_leaves_nothing() {
    need!(ready());
    let first = scene();
    let visit = go(&first);
    first.alive_at(&first.b).expect("it works there");
    away(&first.a);
    done(&first.b, &["stop", NAME, "--force"]);
    gone_from(&first.a).expect("its memory is freed at home");
    gone_from(&first.b).expect("and there");
    assert_eq!(report(&first.a, &visit)["visit"], "ended");

    let mut second = scene();
    go(&second);
    away(&second.a);
    second.b.crash();
    kill(Pid::from_raw(qemu_in(second.b.folder()).expect("its QEMU")), Signal::SIGKILL).expect("it ends");
    until("home knows that the other node is lost", || {
        done(&second.a, &["status"])["migrations"][0]["outcome"]["state"] == "reconnecting"
    });
    done(&second.a, &["stop", NAME, "--force"]);
    gone_from(&second.a).expect("its memory is freed at home");
}

/// Whichever daemon does not hear of the guest's end at once.
#[test]
fn the_end_of_a_guest_on_its_visit_is_heard_of_later() {
    need!(ready());
    let mut first = scene();
    let visit = go(&first);
    away(&first.a);
    first.b.crash();
    kill(Pid::from_raw(qemu_in(first.b.folder()).expect("its QEMU")), Signal::SIGKILL).expect("it ends");
    first.b.run().expect("it starts again");
    gone_from(&first.a).expect("its memory is freed at home");
    assert_eq!(report(&first.a, &visit)["visit"], "ended");
    // Listed until somebody has taken note of it, as any that ended by itself.
    assert_eq!(done(&first.b, &["stop", NAME])["how"], "had ended before");
    gone_from(&first.b).expect("nothing of it is left there");

    let mut second = scene();
    let visit = go(&second);
    away(&second.a);
    second.a.crash();
    until("the other node knows that home is lost", || {
        done(&second.b, &["status"])["migrations"][0]["outcome"]["state"] == "reconnecting"
    });
    done(&second.b, &["stop", NAME, "--force"]);
    gone_from(&second.b).expect("nothing of it is left there");
    until("its migration has ended there", || {
        done(&second.b, &["status"])["migrations"].as_array().is_some_and(Vec::is_empty)
    });
    second.a.run().expect("it starts again");
    gone_from(&second.a).expect("its memory is freed at home");
    assert_eq!(report(&second.a, &visit)["visit"], "ended");
}

/// Daemons of both sides are killed while it visits, and started again.
#[test]
fn a_visit_outlives_the_daemons_of_both_sides() {
    need!(ready());
    for (home, there) in [(true, false), (false, true), (true, true)] {
        let mut scene = scene();
        go(&scene);
        scene.alive_at(&scene.b).expect("it works there");
        if there {
            scene.b.crash();
        }
        if home {
            scene.a.crash();
            scene.a.run().expect("it starts again");
        }
        if there {
            scene.b.run().expect("it starts again");
        }
        eprintln!("killed: home {home}, there {there}");
        scene.sound_at(&scene.b).expect("it works on");
        away(&scene.a);
        done(&scene.b, &["visit", NAME, "--back"]);
        scene.sound_at(&scene.a).expect("it works at home again");
        gone_from(&scene.b).expect("nothing of it is left there");
    }
}

/// Daemons are killed at each moment of the way home.
#[test]
fn a_guest_is_in_one_place_wherever_a_daemon_is_killed_on_its_way_home() {
    need!(ready());
    let mut scene = scene();
    for (after_ms, home) in [20, 120, 220, 350].into_iter().flat_map(|ms| [(ms, false), (ms, true)]) {
        go(&scene);
        scene.sound_at(&scene.b).expect("it works there");
        done(&scene.b, &["visit", NAME, "--back", "--detach"]);
        std::thread::sleep(Duration::from_millis(after_ms));
        let killed = if home { &mut scene.a } else { &mut scene.b };
        killed.crash();
        killed.run().expect("it starts again");
        until("it runs in one place", || scene.a.runs(NAME) != scene.b.runs(NAME));
        eprintln!(
            "home {home}, after {after_ms} ms: at home {}, there {}",
            scene.a.runs(NAME),
            scene.b.runs(NAME)
        );
        if !scene.a.runs(NAME) {
            // Unless it is still on its way: the daemon that was killed was back before it was missed.
            if let Err(error) = scene.sound_at(&scene.b) {
                assert!(scene.a.runs(NAME), "it still visits: {error:#}");
            }
            until("it can go home", || {
                let end = vmove(&scene.b, &["visit", NAME, "--back"]);
                end.is_ok_and(|end| end.code == 0) || scene.a.runs(NAME)
            });
        }
        scene.sound_at(&scene.a).expect("it works at home again");
        gone_from(&scene.b).expect("nothing of it is left there");
    }
}

/// What a guest is to read decides whether it goes; and what its visits have brought counts the next time.
#[test]
fn a_guest_goes_where_it_is_to_read_if_that_is_faster() {
    need!(ready());
    let scene = scene();
    let command = |verb, size| [verb, NAME, "--to", "b", "--reads", size, "--reads-near", "20GiB"];
    let choice = |size| done(&scene.a, &command("check", size))["choice"].clone();
    let ms = |choice: &Value, way: &str| {
        choice[way]["time_ms"].as_f64().unwrap_or_else(|| panic!("{way}: {choice}"))
    };
    let little = choice("64MiB");
    assert_eq!(little["choice"], "stay", "{little}");
    assert!(ms(&little, "stay") < ms(&little, "visit").min(ms(&little, "migrate")), "{little}");
    let End { code, answer, said } = vmove(&scene.a, &command("migrate", "64MiB")).expect("an answer");
    assert_eq!((code, &answer["code"]), (3, &"stays".into()), "{answer} {said}");
    assert_eq!(answer["details"]["choice"], "stay", "{answer}");
    scene.unharmed().expect("nothing was changed");

    let much = choice("20GiB");
    eprintln!("64 MiB: {little}\n20 GiB: {much}");
    assert_eq!(much["choice"], "visit", "{much}");
    assert!(ms(&much, "visit") < ms(&much, "stay").min(ms(&much, "migrate")), "{much}");
    assert!(much["pays_from_bytes"].as_u64().is_some_and(|from| from > 64 << 20 && from < 20 << 30));
    let there = done(&scene.a, &[&command("migrate", "20GiB")[..], &["--for", "1h"]].concat());
    assert_eq!((&there["mode"], &there["phase"]), (&"visit".into(), &"fetch".into()), "{there}");
    assert!(there["going_home"].is_object(), "it is taken home by itself: {there}");
    scene.sound_at(&scene.b).expect("it works there");
    away(&scene.a);
    done(&scene.b, &["visit", NAME, "--back"]);
    scene.sound_at(&scene.a).expect("it works at home again");
    let visit = there["id"].as_str().expect("an id");
    until("the visit has ended", || done(&scene.a, &["status", visit])["outcome"]["state"] == "done");
    assert_eq!(report(&scene.a, visit)["choice"]["choice"], "visit");
    until("what the visit brought is counted on", || {
        choice("20GiB")["basis"].as_str().is_some_and(|basis| basis.contains("its visits have brought"))
    });
}
