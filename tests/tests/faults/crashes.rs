//! Daemons that are killed during a migration: the restarted daemon continues the migration or undoes it, and the guest finds no
//! error.
#![cfg(test)]

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::blows::moment::journaled;
use vmove_tests::proxy::{Direction, Fault, Rule};
use vmove_tests::sandbox::qemu_in;
use vmove_tests::scene::{CONTROL, SLOW, STEP_TIMEOUT, Scene, device_state, ready, vmove};

const POSTCOPY: &[&str] = &["--mode", "postcopy", "--bandwidth", SLOW];
const ROUNDS: &[&str] = &["--mode", "hybrid", "--bandwidth", SLOW];

/// Checks a migration that was interrupted and continued: it succeeded, its report counts the interruption, and the guest is intact at `b`.
fn finished(scene: &Scene, id: &str) {
    let end = scene.end(id).expect("the migration ends");
    assert_eq!(end.code, 0, "{} {}\na: {}\nb: {}", end.answer, end.said, scene.a.log(), scene.b.log());
    assert!(end.answer["recoveries"].as_u64() >= Some(1), "nothing was interrupted: {}", end.answer);
    let whole = scene.arrived();
    whole.unwrap_or_else(|e| panic!("{e:#}\na: {}\nb: {}", scene.a.log(), scene.b.log()));
}

#[test]
fn a_destination_killed_in_post_copy_finishes_after_its_restart() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    scene.b.crash();
    let qemu = qemu_in(scene.b.folder()).expect("the guest's QEMU outlives the daemon");
    std::thread::sleep(Duration::from_millis(500));
    scene.b.run().expect("it starts again");
    finished(&scene, &id);
    assert_eq!(scene.b.vm("guest").expect("it is listed").pid, qemu, "it is another QEMU");
}

#[test]
fn a_source_killed_in_post_copy_finishes_after_its_restart() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    scene.a.crash();
    assert!(qemu_in(scene.a.folder()).is_some(), "the memory that is still to be fetched is gone");
    std::thread::sleep(Duration::from_millis(500));
    scene.a.run().expect("it starts again");
    finished(&scene, &id);
}

/// A restarted daemon resumes the guest of a cancelled migration, but not if a later migration has moved it: the guest would run twice.
#[test]
fn a_guest_given_away_stays_stopped_though_an_earlier_migration_was_called_off() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let called_off = scene.start(ROUNDS).expect("it begins");
    scene.reach(&called_off, "rounds").expect("the rounds begin");
    scene.a.ask(&["cancel", &called_off]).expect("it can be cancelled");
    scene.end(&called_off).expect("it ends");
    scene.unharmed().expect("nothing is left of it");
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    // Simulates that the daemon was killed before it noted that the guest was back.
    scene.a.crash();
    let journal = scene.a.folder().join("state/sessions").join(&called_off).join("source.jsonl");
    let text = std::fs::read_to_string(&journal).expect("a journal");
    let noted = r#""to_resume":true"#;
    let until_then = text.rfind(noted).expect("it is noted that the guest is to come back");
    let end = text[until_then..].find('\n').expect("a whole line");
    std::fs::write(&journal, &text[..=until_then + end]).expect("it is cut");
    scene.a.run().expect("it starts again");
    let before = scene.beacon_at(&scene.a).expect("a beacon");
    let asked = vmove(&scene.a, &["recover", &called_off]).expect("an answer");
    assert_ne!(asked.code, 0, "there is nothing to recover: {}", asked.answer);
    std::thread::sleep(Duration::from_millis(500));
    let after = scene.beacon_at(&scene.a).expect("a beacon");
    assert_eq!(after.work, before.work, "the guest runs at the source, too");
    finished(&scene, &id);
}

#[test]
fn both_killed_in_post_copy_finish_after_their_restart() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    scene.a.crash();
    scene.b.crash();
    scene.b.run().expect("the destination starts again");
    std::thread::sleep(Duration::from_millis(300));
    scene.a.run().expect("the source starts again");
    finished(&scene, &id);
}

#[test]
fn a_destination_killed_again_and_again_in_post_copy_finishes() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    for pause in [0, 100, 300, 500] {
        scene.b.crash();
        scene.b.run().expect("it starts again");
        std::thread::sleep(Duration::from_millis(pause));
    }
    finished(&scene, &id);
}

/// Every page is there, and the hashes are not: started anew, the destination needs neither, and says so before it reads what the source
/// has to say.
#[test]
fn a_destination_killed_with_every_page_there_says_so_first() {
    need!(ready());
    let mut scene = Scene::behind_proxy().expect("a guest");
    let proxy = scene.proxy().expect("a proxy");
    let connection = Some(proxy.connections() + CONTROL);
    // Half a minute for the hashes: on a busy machine, too, all pages come before them.
    let fault = Fault::Limit(20 << 10);
    proxy.add(Rule { connection, direction: Direction::Forth, after: 0, fault });
    let id = scene.start(&["--mode", "postcopy", "--verify"]).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    until("every page is at the destination", || {
        let status = scene.b.ask(&["status"]).expect("an answer");
        let here = &status["migrations"][0];
        here["phase"] == "fetch" && here["bytes_done"] == here["bytes_total"]
    });
    scene.b.crash();
    let proxy = scene.proxy().expect("a proxy");
    proxy.cut_all();
    proxy.heal();
    scene.b.run().expect("it starts again");
    finished(&scene, &id);
}

/// What is sent for `--verify` comes after what the guest waits for.
#[test]
fn a_guest_does_not_wait_for_the_hashes() {
    need!(ready());
    let scene = Scene::behind_proxy().expect("a guest");
    let proxy = scene.proxy().expect("a proxy");
    let connection = Some(proxy.connections() + CONTROL);
    let fault = Fault::Limit(40 << 10);
    proxy.add(Rule { connection, direction: Direction::Forth, after: 0, fault });
    let id = scene.start(&["--mode", "postcopy", "--verify"]).expect("it begins");
    let end = scene.end(&id).expect("the migration ends");
    assert_eq!((end.code, &end.answer["verified"]), (0, &true.into()), "{} {}", end.answer, end.said);
    let ms = |figure: &str| end.answer[figure].as_f64().expect("milliseconds");
    eprintln!("downtime {} ms of {} ms", ms("downtime_ms"), ms("total_ms"));
    assert!(ms("downtime_ms") < ms("total_ms") / 20.0, "{}", end.answer);
    scene.arrived().expect("it is whole");
}

#[test]
fn a_destination_killed_in_the_rounds_leaves_the_guest_at_the_source() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let id = scene.start(ROUNDS).expect("it begins");
    scene.reach(&id, "rounds").expect("the rounds begin");
    std::thread::sleep(Duration::from_millis(300));
    scene.b.crash();
    let end = scene.end(&id).expect("the migration ends");
    assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
    assert_eq!(end.answer["guest"], "source");
    assert_eq!(end.answer["cancelled"], false);
    assert!(end.error().contains("destination"), "it does not say what was lost: {}", end.error());
    scene.alive_at(&scene.a).expect("the guest goes on");
    scene.b.run().expect("it starts again");
    scene.unharmed().expect("nothing is left of it");
    scene.moves_now().expect("it can be tried again");
}

/// The daemon may have been killed before it noted the QEMU that it started last.
#[test]
fn a_destination_killed_before_it_noted_its_qemu_leaves_none() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let id = scene.start(ROUNDS).expect("it begins");
    scene.reach(&id, "rounds").expect("the rounds begin");
    until("QEMU is started", || qemu_in(scene.b.folder()).is_some());
    scene.b.crash();
    let journal = scene.b.folder().join("state/sessions").join(&id).join("destination.jsonl");
    let lines = std::fs::read_to_string(&journal).expect("a journal");
    let first = lines.lines().next().expect("a record");
    assert!(first.contains(r#""pid":0"#), "it names a QEMU before there is one: {first}");
    std::fs::write(&journal, format!("{first}\n")).expect("it is cut");
    assert_eq!(scene.end(&id).expect("the migration ends").code, 1);
    scene.b.run().expect("it starts again");
    scene.unharmed().expect("nothing is left of it");
}

#[test]
fn a_source_killed_in_the_rounds_has_its_guest_after_the_restart() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let qemu = scene.a.vm("guest").expect("it is listed").pid;
    let id = scene.start(ROUNDS).expect("it begins");
    scene.reach(&id, "rounds").expect("the rounds begin");
    std::thread::sleep(Duration::from_millis(300));
    let before = scene.beacon_at(&scene.a).expect("a beacon");
    scene.a.crash();
    std::thread::sleep(Duration::from_millis(500));
    scene.a.run().expect("it starts again");
    let after = scene.beacon_at(&scene.a).expect("a beacon");
    assert!(after.work > before.work, "the guest stood still while there was no daemon");
    assert_eq!(scene.a.vm("guest").expect("it is listed").pid, qemu);
    let end = scene.end(&id).expect("the migration has ended");
    assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{} {}", end.answer, end.said);
    scene.unharmed().expect("nothing is left of it");
    scene.moves_now().expect("it can be tried again");
}

#[test]
fn a_caller_that_waits_is_told_the_end_though_its_daemon_was_killed() {
    need!(ready());
    let mut scene = Scene::new().expect("a guest");
    let waiting = scene
        .a
        .vmove_in_background(&[&["--json", "migrate", "guest", "--to", "b"], POSTCOPY].concat())
        .expect("it begins");
    let id = loop {
        let status = scene.a.ask(&["status"]).expect("an answer");
        if let Some(id) = status["migrations"][0]["id"].as_str() {
            break id.to_owned();
        }
    };
    scene.reach(&id, "fetch").expect("the guest is handed over");
    scene.a.crash();
    scene.a.run().expect("it starts again");
    let output = waiting.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    finished(&scene, &id);
}

#[test]
fn a_source_killed_in_the_switchover_runs_its_guest_after_the_restart() {
    need!(ready());
    let mut scene = Scene::behind_proxy().expect("a guest");
    let id = scene.start_and_stick_in_the_switchover().expect("the guest is stopped");
    scene.a.crash();
    scene.a.run().expect("it starts again");
    let end = scene.end(&id).expect("the migration has ended");
    assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{} {}", end.answer, end.said);
    scene.unharmed().expect("the guest goes on");
    scene.proxy().expect("a proxy").heal();
    scene.moves_now().expect("it can be tried again");
}

#[test]
fn a_destination_killed_in_the_switchover_leaves_the_guest_at_the_source() {
    need!(ready());
    let mut scene = Scene::behind_proxy().expect("a guest");
    let id = scene.start_and_stick_in_the_switchover().expect("the guest is stopped");
    scene.b.crash();
    let end = scene.end(&id).expect("the migration ends");
    assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{} {}", end.answer, end.said);
    scene.alive_at(&scene.a).expect("the guest goes on");
    scene.b.run().expect("it starts again");
    scene.unharmed().expect("nothing is left of it");
    scene.proxy().expect("a proxy").heal();
    scene.moves_now().expect("it can be tried again");
}

/// Loses the messages of the control connection in `direction`, then kills the source (`Some(true)`) or the destination (`Some(false)`), or
/// only cuts all connections (`None`).
fn lost_around_the_commit(direction: Direction, kill_source: Option<bool>) -> (Scene, String) {
    let mut scene = Scene::behind_proxy().expect("a guest");
    let proxy = scene.proxy().expect("a proxy");
    let first = proxy.connections();
    let id = scene.start_and_stick_in_the_switchover().expect("the guest is stopped");
    proxy.add(Rule { connection: Some(first + CONTROL), direction, after: 0, fault: Fault::Stall });
    // Until the rule applies to everything on its way.
    std::thread::sleep(Duration::from_millis(200));
    scene.unstick(first).expect("a proxy");
    std::thread::sleep(Duration::from_secs(1));
    let status = scene.a.ask(&["status", &id]).expect("an answer");
    assert_eq!(status["phase"], "hand-over", "{status}");
    match kill_source {
        Some(true) => scene.a.crash(),
        Some(false) => scene.b.crash(),
        None => {}
    }
    let proxy = scene.proxy().expect("a proxy");
    proxy.cut_all();
    proxy.heal();
    match kill_source {
        Some(true) => scene.a.run().expect("it starts again"),
        Some(false) => scene.b.run().expect("it starts again"),
        None => {}
    }
    (scene, id)
}

/// The destination has the device state, but the source has not been told: the guest stays at the source.
#[test]
fn before_the_commit_the_guest_is_the_sources_whoever_is_lost() {
    need!(ready());
    for killed in [None, Some(true), Some(false)] {
        let (scene, id) = lost_around_the_commit(Direction::Back, killed);
        let end = scene.end(&id).expect("the migration ends");
        let found = (end.code, &end.answer["guest"]);
        assert_eq!(found, (1, &"source".into()), "killed {killed:?}: {} {}", end.answer, end.said);
        scene.unharmed().expect("nothing is left of it");
        scene.moves_now().expect("it can be tried again");
    }
}

/// The source has committed, but the destination has not been told: the guest moves to the destination.
#[test]
fn after_the_commit_the_guest_is_the_destinations_whoever_is_lost() {
    need!(ready());
    for killed in [None, Some(true), Some(false)] {
        let (scene, id) = lost_around_the_commit(Direction::Forth, killed);
        eprintln!("source killed, or destination, or neither: {killed:?}");
        finished(&scene, &id);
    }
}

/// A migration whose guest is stopped and whose device state has arrived. The control connection was stalled just before.
fn loaded_and_stalled(directions: &[Direction]) -> (Scene, String, u64) {
    let scene = Scene::behind_proxy().expect("a guest");
    let proxy = scene.proxy().expect("a proxy");
    let first = proxy.connections();
    let id = scene.start_and_stick_in_the_switchover().expect("the guest is stopped");
    for direction in directions {
        let fault = Fault::Stall;
        proxy.add(Rule { connection: Some(first + CONTROL), direction: *direction, after: 0, fault });
    }
    // Until the rule applies to everything on its way.
    std::thread::sleep(Duration::from_millis(200));
    scene.unstick(first).expect("a proxy");
    until("the destination holds the device state", || {
        let status = scene.b.ask(&["status"]).expect("an answer");
        status["migrations"][0]["phase"] == "hand-over"
    });
    (scene, id, first)
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + STEP_TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within {STEP_TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn kill_qemu_at_the_destination(scene: &Scene) {
    let qemu = qemu_in(scene.b.folder()).expect("the destination's QEMU");
    kill(Pid::from_raw(qemu), Signal::SIGKILL).expect("it is there");
    until("the destination's QEMU ends", || qemu_in(scene.b.folder()).is_none());
}

/// Checks that the guest is back at the source, intact, and that the destination has nothing of it.
fn returned(scene: &Scene, id: &str) {
    let end = scene.end(id).expect("the migration ends");
    let context = format!("{} {}\na: {}\nb: {}", end.answer, end.said, scene.a.log(), scene.b.log());
    assert_eq!((end.code, &end.answer["guest"]), (1, &"source".into()), "{context}");
    assert!(end.error().contains("QEMU"), "it does not say what was lost: {}", end.error());
    scene.unharmed().expect(&context);
    // In the move, the guest checks its memory.
    scene.proxy().expect("a proxy").heal();
    scene.moves_now().expect("it can be tried again");
}

/// The destination's QEMU ends when it has the device state. The source is told both at once.
#[test]
fn a_destination_qemu_that_dies_before_the_commit_is_not_given_the_guest() {
    need!(ready());
    let (scene, id, first) = loaded_and_stalled(&[Direction::Forth, Direction::Back]);
    kill_qemu_at_the_destination(&scene);
    scene.gone_from(&scene.b).expect("the destination gives up");
    // Only from destination to source: messages in the other direction would reach a closed socket and reset the connection.
    let back = Direction::Back;
    let passes = Rule {
        connection: Some(first + CONTROL),
        direction: back,
        after: 0,
        fault: Fault::Delay(Duration::ZERO),
    };
    scene.proxy().expect("a proxy").add(passes);
    returned(&scene, &id);
}

/// The source has committed, the destination has not been told, and its QEMU ends: the guest has not run since the stop.
#[test]
fn a_destination_qemu_that_dies_before_the_commit_arrives_gives_the_guest_back() {
    need!(ready());
    for (kill_source, kill_destination) in [(false, false), (false, true), (true, false)] {
        let (mut scene, id, _) = loaded_and_stalled(&[Direction::Forth]);
        let journal = scene.a.folder().join("state/sessions").join(&id).join("source.jsonl");
        until("the source commits", || {
            let text = std::fs::read_to_string(&journal).expect("a journal");
            text.lines().last().is_some_and(|line| line.contains(r#""state":"committed""#))
        });
        if kill_source {
            scene.a.crash();
        }
        if kill_destination {
            scene.b.crash();
        }
        kill_qemu_at_the_destination(&scene);
        if kill_source || kill_destination {
            let proxy = scene.proxy().expect("a proxy");
            proxy.cut_all();
            proxy.heal();
        }
        if kill_destination {
            scene.b.run().expect("it starts again");
        }
        if kill_source {
            scene.a.run().expect("it starts again");
        }
        eprintln!("killed beside QEMU: source {kill_source}, destination {kill_destination}");
        returned(&scene, &id);
    }
}

/// The destination has noted that the guest is its own, and its QEMU ends before the guest is resumed. It cannot be known later whether it
/// ran: an operator decides.
#[test]
fn a_destination_qemu_that_dies_before_it_resumes_the_guest_leaves_the_copy_at_the_source() {
    need!(ready());
    let (scene, id, _) = loaded_and_stalled(&[Direction::Forth]);
    let qemu = Pid::from_raw(qemu_in(scene.b.folder()).expect("the destination's QEMU"));
    // It hears nothing of what it is told.
    kill(qemu, Signal::SIGSTOP).expect("it is there");
    scene.proxy().expect("a proxy").heal();
    until("the guest is the destination's", || journaled(&scene.b, &id, "destination.jsonl") == "owner");
    kill_qemu_at_the_destination(&scene);
    let end = scene.end(&id).expect("the migration ends");
    assert_eq!(end.code, 4, "{} {}\nb: {}", end.answer, end.said, scene.b.log());
    let ended = vmove(&scene.b, &["stop", "--force", "guest"]).expect("an answer");
    assert_eq!(ended.code, 0, "{} {}", ended.answer, ended.said);
    scene.gone_from(&scene.b).expect("nothing is left there");
    let reclaimed = vmove(&scene.a, &["reclaim", &id, "--guest-is-lost"]).expect("an answer");
    assert_eq!(reclaimed.code, 0, "{} {}", reclaimed.answer, reclaimed.said);
    scene.sound_at(&scene.a).expect("the guest goes on");
    scene.moves_now().expect("it can be tried again");
}

/// When a daemon is killed: the phase of the migration as reported by the source, the milliseconds after the phase began, and the states
/// that the journals of source and destination may have then.
struct Moment {
    mode: &'static str,
    phase: &'static str,
    after_ms: u64,
    /// Fault of the connection for device state.
    device_state: Fault,
    source: &'static [&'static str],
    destination: &'static [&'static str],
}

impl Moment {
    const fn hybrid(phase: &'static str, after_ms: u64) -> Self {
        let device_state = Fault::Delay(Duration::ZERO);
        Self { mode: "hybrid", phase, after_ms, device_state, source: &["warm"], destination: &["filling"] }
    }
}

const MOMENTS: [Moment; 7] = [
    // The destination may be killed before it has noted anything.
    Moment { destination: &["", "filling"], ..Moment::hybrid("prepare", 0) },
    Moment::hybrid("rounds", 0),
    Moment::hybrid("rounds", 200),
    Moment { source: &["stopped"], device_state: Fault::Stall, ..Moment::hybrid("hand-over", 0) },
    Moment { source: &["stopped"], device_state: Fault::Stall, ..Moment::hybrid("hand-over", 100) },
    // Around the commit: each of the three pieces of the device state is delayed.
    Moment {
        device_state: Fault::Delay(Duration::from_millis(200)),
        source: &["stopped", "committed", "released"],
        destination: &["filling", "loaded", "owner", "complete"],
        ..Moment::hybrid("hand-over", 600)
    },
    Moment {
        mode: "postcopy",
        source: &["committed"],
        destination: &["owner", "complete"],
        ..Moment::hybrid("fetch", 0)
    },
];

/// Whether the destination owns the guest, according to this state in the journal of a killed daemon.
fn handed_over(state: &str) -> Option<bool> {
    match state {
        "" | "warm" | "stopped" | "filling" => Some(false),
        // Unknown: the source decides.
        "loaded" => None,
        "committed" | "released" | "owner" | "complete" => Some(true),
        other => panic!("unknown state {other:?}"),
    }
}

/// Whenever a daemon is killed, exactly one node has the guest afterwards: the one that the journals name.
fn killed_at_any_moment(source: bool) {
    need!(ready());
    // The next moment uses a guest that stayed at the source.
    let mut stayed: Option<Scene> = None;
    for moment in MOMENTS {
        let mut scene = stayed.take().unwrap_or_else(|| Scene::behind_proxy().expect("a guest"));
        let proxy = scene.proxy().expect("a proxy");
        // Rounds and fetching take some seconds.
        proxy.heal();
        proxy.add(device_state(proxy.connections(), moment.device_state));
        let id = scene.start(&["--mode", moment.mode, "--bandwidth", "1Gbit"]).expect("it begins");
        // `prepare` takes only a few milliseconds, so it may be over; the phase after it takes seconds.
        let phases = if moment.phase == "prepare" { &["prepare", "rounds"][..] } else { &[moment.phase][..] };
        scene.reach_one_of(&id, phases).expect("the phase");
        std::thread::sleep(Duration::from_millis(moment.after_ms));
        let (node, file, states) = if source {
            (&mut scene.a, "source.jsonl", moment.source)
        } else {
            (&mut scene.b, "destination.jsonl", moment.destination)
        };
        node.crash();
        let state = journaled(node, &id, file);
        let killed = format!("killed {} ms after the begin of {}, {state:?}", moment.after_ms, moment.phase);
        eprintln!("{killed}");
        assert!(states.contains(&state.as_str()), "{killed}: expected one of {states:?}");
        node.run().expect("it starts again");
        let end = vmove(&scene.a, &["status", &id, "--follow"]).expect("the migration ends");
        let context =
            format!("{killed}: {} {}\na: {}\nb: {}", end.answer, end.said, scene.a.log(), scene.b.log());
        match end.code {
            0 => scene.arrived().expect(&context),
            1 => {
                assert_eq!(end.answer["guest"], "source", "{context}");
                scene.unharmed().expect(&context);
                stayed = Some(scene);
            }
            _ => panic!("the guest needs an operator: {context}"),
        }
        assert!(handed_over(&state).is_none_or(|gone| gone == (end.code == 0)), "{context}");
    }
    assert!(stayed.is_none(), "the last one is killed after the guest was handed over");
}

#[test]
fn a_source_killed_at_any_moment_leaves_one_guest() {
    killed_at_any_moment(true);
}

#[test]
fn a_destination_killed_at_any_moment_leaves_one_guest() {
    killed_at_any_moment(false);
}
