//! Bad input, and faults before, during and after the hand-over: the error is clear, and the guest continues where it was.
#![cfg(test)]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use vmove_guest::config::{Config, Rate};
use vmove_skip::{need, skip};
use vmove_tests::beacon;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::until;
use vmove_tests::guest::Guest;
use vmove_tests::huge_pages::free_huge_pages;
use vmove_tests::process::sleeps;
use vmove_tests::proxy::{Direction, Fault, Rule};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{End, FOR_PAGES, NAME, SLOW, Scene, device_state, memory_mib, ready, steady, vmove};

const ROUNDS: &[&str] = &["--mode", "hybrid", "--bandwidth", SLOW];
const POSTCOPY: &[&str] = &["--mode", "postcopy", "--bandwidth", SLOW];

/// Checks a migration that failed: the guest is at the source, and the error contains `words`.
#[track_caller]
fn failed_at_source(end: &End, words: &[&str]) {
    assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
    assert_eq!(end.answer["guest"], "source", "{}", end.answer);
    for word in words {
        assert!(end.error().contains(word), "no {word:?} in: {}", end.error());
    }
    assert!(end.said.contains(end.error()), "people are told something else: {}", end.said);
}

/// Checks a request that was refused.
#[track_caller]
fn not_taken(end: &End, exit: i32, code: &str, words: &[&str]) {
    assert_eq!(end.code, exit, "{} {}", end.answer, end.said);
    assert_eq!(end.answer["code"], code, "{}", end.answer);
    for word in words {
        assert!(end.error().contains(word), "no {word:?} in: {}", end.error());
    }
}

#[test]
fn an_unknown_vm_node_or_migration_is_named() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, _b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let ask = |arguments: &[&str]| vmove(&a, arguments).expect("an answer");
    not_taken(&ask(&["migrate", "nobody", "--to", "b"]), 1, "unknown-vm", &["nobody"]);
    not_taken(&ask(&["check", "nobody", "--to", "b"]), 1, "unknown-vm", &["nobody"]);
    not_taken(&ask(&["migrate", "nobody", "--to", "elsewhere"]), 2, "unknown-node", &["elsewhere"]);
    not_taken(&ask(&["cancel", "12345678"]), 1, "unknown-migration", &["12345678", "vmove history"]);
    not_taken(&ask(&["recover", "12345678"]), 1, "unknown-migration", &["12345678"]);
}

#[test]
fn an_unreachable_peer_is_told() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let end = scene.migrate_to("127.0.0.1:1", &[]).expect("it ends");
    failed_at_source(&end, &["Could not reach", "127.0.0.1:1"]);
    scene.unharmed().expect("the guest goes on");
    let end = vmove(&scene.a, &["check", NAME, "--to", "127.0.0.1:1"]).expect("it ends");
    assert_eq!((end.code, &end.answer["blockers"][0]["code"]), (3, &"unreachable".into()), "{}", end.answer);
    scene.moves_now().expect("the right peer is reached");
}

/// A server that answers each client with `greeting`, or with nothing if that is empty. Returns its address.
fn stranger(greeting: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                let _ = stream.set_read_timeout(Some(Duration::from_secs(20)));
                let mut first = [0; 16];
                let heard = stream.read(&mut first);
                if !greeting.is_empty() {
                    let _ = stream.write_all(greeting);
                    return;
                }
                // Keeps reading without an answer until the other side gives up.
                let mut heard = heard.unwrap_or(0);
                while heard > 0 {
                    heard = stream.read(&mut first).unwrap_or(0);
                }
            });
        }
    });
    address
}

#[test]
fn a_peer_that_is_no_daemon_is_told() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let http = stranger(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    let end = scene.migrate_to(&http, &[]).expect("it ends");
    failed_at_source(&end, &[&http, "Expected a vmove daemon"]);
    let silent = stranger(b"");
    let end = scene.migrate_to(&silent, &[]).expect("it ends");
    failed_at_source(&end, &[&silent]);
    let end = vmove(&scene.a, &["check", NAME, "--to", &http]).expect("it ends");
    assert_eq!((end.code, &end.answer["blockers"][0]["code"]), (3, &"unreachable".into()), "{}", end.answer);
    scene.unharmed().expect("the guest goes on");
    scene.moves_now().expect("the right peer is known");
}

#[test]
fn a_stranger_at_the_peer_port_does_no_harm() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let id = scene.start(ROUNDS).expect("it begins");
    scene.reach(&id, "rounds").expect("the rounds begin");
    for words in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &[0; 4096], b""] {
        let mut stream = std::net::TcpStream::connect(scene.b.listen()).expect("connects");
        let _ = stream.write_all(words);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let end = scene.end(&id).expect("it ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    scene.arrived().expect("the guest is whole");
}

#[test]
fn cancelled_in_the_rounds_the_guest_goes_on_at_the_source() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let id = scene.start(ROUNDS).expect("it begins");
    scene.reach(&id, "rounds").expect("the rounds begin");
    std::thread::sleep(Duration::from_millis(300));
    let taken = vmove(&scene.a, &["cancel", &id]).expect("an answer");
    assert_eq!(
        (taken.code, &taken.answer["id"]),
        (0, &id.as_str().into()),
        "{} {}",
        taken.answer,
        taken.said
    );
    let end = scene.end(&id).expect("it ends");
    failed_at_source(&end, &["Cancelled"]);
    assert_eq!((&end.answer["cancelled"], &end.answer["phase"]), (&true.into(), &"rounds".into()));
    scene.unharmed().expect("the guest goes on");
    scene.moves_now().expect("it can be tried again");
}

#[test]
fn cancelled_at_once_the_guest_goes_on_at_the_source() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    for delay in [0, 50, 150, 300] {
        let id = scene.start(ROUNDS).expect("it begins");
        std::thread::sleep(Duration::from_millis(delay));
        let taken = vmove(&scene.a, &["cancel", &id]).expect("an answer");
        assert_eq!(taken.code, 0, "after {delay} ms: {} {}", taken.answer, taken.said);
        let end = scene.end(&id).expect("it ends");
        failed_at_source(&end, &["Cancelled"]);
        assert_eq!(end.answer["cancelled"], true);
        scene.unharmed().expect("the guest goes on");
    }
    scene.moves_now().expect("it can be tried again");
}

#[test]
fn cancelled_after_the_hand_over_it_is_too_late() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    let late = vmove(&scene.a, &["cancel", &id]).expect("an answer");
    not_taken(&late, 1, "too-late", &["handed", &id]);
    let end = scene.end(&id).expect("it ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    scene.arrived().expect("the guest is whole");
}

#[test]
fn a_second_migration_of_a_vm_is_refused_while_one_is_at_work() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let id = scene.start(ROUNDS).expect("it begins");
    scene.reach(&id, "rounds").expect("the rounds begin");
    let second = scene.migrate_to("b", &["--mode", "postcopy"]).expect("an answer");
    not_taken(&second, 1, "busy", &[&id, "vmove cancel"]);
    let check = vmove(&scene.a, &["check", NAME, "--to", "b"]).expect("an answer");
    assert_eq!(check.code, 3, "{}", check.answer);
    assert!(codes(&check.answer).contains(&"busy".to_owned()), "{}", check.answer);
    let stop = vmove(&scene.a, &["stop", NAME]).expect("an answer");
    not_taken(&stop, 1, "busy", &[NAME]);
    let end = scene.end(&id).expect("it ends");
    assert_eq!(end.code, 0, "the first one was disturbed: {} {}", end.answer, end.said);
    scene.arrived().expect("the guest is whole");
}

/// Codes of the blockers in an answer.
fn codes(answer: &Value) -> Vec<String> {
    let blockers = answer["blockers"].as_array().map(Vec::as_slice).unwrap_or_default();
    blockers.iter().filter_map(|b| b["code"].as_str().map(str::to_owned)).collect()
}

#[test]
fn a_destination_without_enough_huge_pages_refuses() {
    need!(ready());
    let guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
    let sandbox = Sandbox::new().expect("a sandbox");
    // Others would take free pages that are counted here.
    need!(sandbox.reserve_huge_pages_alone(2 << 20, 0));
    let missing = guest.bytes().saturating_sub(free_huge_pages() << 21);
    need!(sandbox.reserve_huge_pages(2 << 20, missing + (64 << 20)));
    let scene = Scene::in_sandbox(sandbox, "hugetlb-2m", &guest).expect("a guest");
    if free_huge_pages() << 21 >= guest.bytes() {
        return skip!("the machine has {} free huge pages that are not ours", free_huge_pages());
    }
    for command in ["migrate", "check"] {
        let end = vmove(&scene.a, &[command, NAME, "--to", "b"]).expect("it ends");
        assert_eq!(end.code, 3, "{command}: {} {}", end.answer, end.said);
        assert_eq!(codes(&end.answer), ["huge-pages"], "{command}: {}", end.answer);
        let message = end.answer["blockers"][0]["message"].as_str().unwrap_or_default();
        for words in [format!("needs {} MiB", guest.memory_mib), "nr_hugepages".to_owned()] {
            assert!(message.contains(&words), "{command}: no {words:?} in: {message}");
        }
        scene.unharmed().expect("the guest goes on");
    }
    if let Err(reason) = scene.sandbox().reserve_huge_pages(2 << 20, guest.bytes()) {
        return skip!(part = "with enough of them it moves", "{reason:#}");
    }
    scene.moves_now().expect("with enough of them it moves");
}

/// Two nodes, and a guest whose QEMU is a wrapper: it runs the shell commands `script`, then the QEMU under test. Returns the wrapper too.
fn wrapped(script: &str, config: Config) -> (PathBuf, Scene) {
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut guest = Guest::new(memory_mib(&config), config).expect("a QEMU");
    let path = sandbox.path().join("qemu-wrapper");
    let text = format!("#!/bin/sh\n{script}\nexec '{}' \"$@\"\n", guest.qemu.display());
    std::fs::write(&path, text).expect("writes");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("may be run");
    guest.qemu.clone_from(&path);
    // By default nodes take only installed QEMUs from each other.
    let config = format!("[peers]\nqemu-binaries = [{path:?}]\n");
    let options = NodeOptions { config, ..NodeOptions::default() };
    (path, Scene::with_options(sandbox, &options, "thp", &guest).expect("a guest"))
}

const FAILS_TO_TAKE_IN: &str =
    "for word; do if [ \"$word\" = -incoming ]; then echo 'no room at the inn' >&2; exit 7; fi; done";

#[test]
fn a_qemu_that_ends_at_its_start_at_the_destination_is_quoted() {
    need!(ready());
    let (program, scene) = wrapped(FAILS_TO_TAKE_IN, steady());
    for mode in ["hybrid", "postcopy", "precopy"] {
        let end = scene.migrate_to("b", &["--mode", mode]).expect("it ends");
        failed_at_source(&end, &["no room at the inn"]);
        scene.unharmed().expect("the guest goes on");
    }
    let script = std::fs::read_to_string(&program).expect("reads");
    std::fs::write(&program, script.replace(FAILS_TO_TAKE_IN, "")).expect("writes");
    scene.moves_now().expect("with a good QEMU it moves");
}

/// QEMU is asked twice for its version and machines. Together the answers take longer than the timeout for a silent peer.
#[test]
fn a_destination_whose_qemu_is_slow_to_tell_what_it_is_is_not_taken_for_dead() {
    need!(ready());
    let slow = "if [ \"$1\" = -version ] || [ \"$2\" = help ]; then sleep 9; fi";
    let (_, scene) = wrapped(slow, steady());
    scene.moves_now().expect("it moves");
}

#[test]
fn a_qemu_killed_at_the_destination_in_the_rounds_leaves_the_guest_at_the_source() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let id = scene.start(ROUNDS).expect("it begins");
    scene.reach(&id, "rounds").expect("the rounds begin");
    std::thread::sleep(Duration::from_secs(1));
    let qemu = vmove_tests::sandbox::qemu_in(scene.b.folder()).expect("a QEMU that waits");
    let killed = std::process::Command::new("kill").args(["-KILL", &qemu.to_string()]).status();
    assert!(killed.expect("kill runs").success());
    let end = scene.end(&id).expect("it ends");
    failed_at_source(&end, &["QEMU"]);
    scene.unharmed().expect("the guest goes on");
    scene.moves_now().expect("it can be tried again");
}

/// The control connection stays: the daemons open new page connections, and the migration continues.
#[test]
fn a_page_connection_cut_in_the_rounds_is_made_anew() {
    need!(ready());
    let scene = Scene::behind_proxy().expect("a guest");
    let proxy = scene.proxy().expect("a proxy");
    // The urgent connection does not reach this byte.
    for connection in FOR_PAGES {
        proxy.add(Rule {
            connection: Some(connection),
            direction: Direction::Forth,
            after: 8 << 20,
            fault: Fault::Cut,
        });
    }
    let end = scene.migrate_to("b", &[ROUNDS, &["--verify"]].concat()).expect("it ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    assert!(end.answer["recoveries"].as_u64() >= Some(1), "nothing was cut: {}", end.answer);
    assert_eq!(end.answer["verified"], true, "{}", end.answer);
    scene.arrived().expect("the guest goes on at the destination");
}

#[test]
fn a_cut_in_the_rounds_leaves_the_guest_at_the_source() {
    need!(ready());
    let scene = Scene::behind_proxy().expect("a guest");
    let proxy = scene.proxy().expect("a proxy");
    let id = scene.start(ROUNDS).expect("it begins");
    scene.reach(&id, "rounds").expect("the rounds begin");
    proxy.refuse();
    proxy.cut_all();
    let end = scene.end(&id).expect("it ends");
    failed_at_source(&end, &["The destination was lost"]);
    scene.unharmed().expect("the guest goes on");
    proxy.heal();
    scene.moves_now().expect("it can be tried again");
}

#[test]
fn a_cut_in_the_switchover_leaves_the_guest_at_the_source() {
    need!(ready());
    let scene = Scene::behind_proxy().expect("a guest");
    let proxy = scene.proxy().expect("a proxy");
    for mode in ["postcopy", "hybrid"] {
        proxy.add(device_state(proxy.connections(), Fault::Cut));
        let end = scene.migrate_to("b", &["--mode", mode]).expect("it ends");
        failed_at_source(&end, &[]);
        let phase = end.answer["phase"].as_str().unwrap_or_default();
        assert!(
            ["switchover", "hand-over"].contains(&phase),
            "{mode}: the cut was elsewhere: {}",
            end.answer
        );
        scene.unharmed().expect("the guest goes on");
    }
    scene.moves_now().expect("it can be tried again");
}

#[test]
fn a_stall_in_the_switchover_ends_with_the_guest_at_the_source() {
    need!(ready());
    let scene = Scene::behind_proxy().expect("a guest");
    let proxy = scene.proxy().expect("a proxy");
    proxy.add(device_state(proxy.connections(), Fault::Stall));
    let end = scene.migrate_to("b", &["--mode", "postcopy", "--timeout", "5s"]).expect("it ends");
    failed_at_source(&end, &["5000 ms"]);
    scene.unharmed().expect("the guest goes on");
    proxy.heal();
    scene.moves_now().expect("it can be tried again");
}

#[test]
fn a_cut_in_post_copy_is_mended() {
    need!(ready());
    let scene = Scene::behind_proxy().expect("a guest");
    let proxy = scene.proxy().expect("a proxy");
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    proxy.cut_all();
    let end = scene.end(&id).expect("it ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    assert!(end.answer["recoveries"].as_u64() >= Some(1), "nothing was cut: {}", end.answer);
    scene.arrived().expect("the guest is whole");
}

#[test]
fn a_link_that_is_gone_for_a_while_in_post_copy_is_waited_for() {
    need!(ready());
    let scene = Scene::behind_proxy().expect("a guest");
    let proxy = scene.proxy().expect("a proxy");
    let id = scene.start(POSTCOPY).expect("it begins");
    scene.reach(&id, "fetch").expect("the guest is handed over");
    proxy.refuse();
    proxy.cut_all();
    std::thread::sleep(Duration::from_secs(3));
    let status = scene.a.ask(&["status", &id]).expect("an answer");
    assert_eq!(status["outcome"]["state"], "reconnecting", "{status}");
    proxy.heal();
    let end = scene.end(&id).expect("it ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    scene.arrived().expect("the guest is whole");
}

#[test]
fn a_single_page_connection_cut_in_post_copy_is_mended() {
    need!(ready());
    for connection in FOR_PAGES {
        let scene = Scene::behind_proxy().expect("a guest");
        let cut = Rule {
            connection: Some(connection),
            direction: Direction::Forth,
            after: 1 << 20,
            fault: Fault::Cut,
        };
        scene.proxy().expect("a proxy").add(cut);
        let end = scene.migrate_to("b", POSTCOPY).expect("it ends");
        assert_eq!(end.code, 0, "connection {connection}: {} {}", end.answer, end.said);
        assert!(end.answer["recoveries"].as_u64() >= Some(1), "nothing was cut: {}", end.answer);
        scene.arrived().expect("the guest is whole");
    }
}

#[test]
fn out_of_time_the_guest_goes_on_at_the_source() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    for mode in ["precopy", "hybrid"] {
        let slowly = ["--mode", mode, "--bandwidth", "16Mbit", "--timeout", "1s"];
        let end = scene.migrate_to("b", &slowly).expect("it ends");
        failed_at_source(&end, &["not handed over within 1000 ms"]);
        assert_eq!(end.answer["cancelled"], false);
        scene.unharmed().expect("the guest goes on");
    }
    scene.moves_now().expect("with more time it moves");
}

#[test]
fn a_guest_too_busy_for_precopy_stays_and_may_go_by_another_mode() {
    need!(ready());
    let config = Config { rate: Rate::Max, working_set_mib: 16, ..steady() };
    let guest = Guest::new(memory_mib(&config), config).expect("a QEMU");
    let scene = Scene::with(NAME, "thp", &guest).expect("a guest");
    let slowly = ["--mode", "precopy", "--bandwidth", "1Gbit", "--max-downtime", "1ms"];
    let end = scene.migrate_to("b", &slowly).expect("it ends");
    failed_at_source(&end, &[NAME, "does not converge", "--mode hybrid", "--max-downtime"]);
    // It was told long before.
    let early = end.said.find("after 2 rounds").expect("the warning");
    assert!(end.said[early..].contains("after 60 rounds"), "{}", end.said);
    assert_eq!(end.answer["phase"], "rounds", "{}", end.answer);
    scene.unharmed().expect("the guest goes on");
    scene.moves_now().expect("another mode does it");
}

/// A guest that rewrites all of its memory faster than the link transfers it.
fn restless() -> Config {
    Config { rate: Rate::Max, working_set_mib: 256, ..steady() }
}

/// Checks that pre-copy does not send this guest's memory twice, over a slow link and with a long downtime allowed.
fn copied_once(scene: &Scene) {
    let slowly = ["--mode", "precopy", "--bandwidth", "500Mbit", "--max-downtime", "30s"];
    let end = scene.migrate_to("b", &slowly).expect("it ends");
    let report = &end.answer;
    let why = report["rounds_reason"].as_str().unwrap_or_default();
    assert!(end.code == 0 && why.contains("written again"), "{} {}", end.answer, end.said);
    let page_bytes = report["page_size"].as_u64().expect("a size");
    let pages = |key: &str| report[key].as_u64().expect("a number") * page_bytes;
    let content = pages("pages_total") - pages("pages_zero");
    let sent = report["bytes_sent"].as_u64().expect("a number");
    assert!(sent < content + content / 2, "{sent} bytes were sent of {content}: {report}");
}

#[test]
fn precopy_sends_nothing_twice_that_would_be_written_again() {
    need!(ready());
    let guest = Guest::new(memory_mib(&restless()), restless()).expect("a QEMU");
    copied_once(&Scene::with(NAME, "thp", &guest).expect("a guest"));
}

const STARTS_SLOWLY: &str = "for word; do if [ \"$word\" = -incoming ]; then sleep 8; fi; done";

/// QEMU takes so long to start that all memory could cross before.
#[test]
fn precopy_sends_nothing_in_vain_while_qemu_starts() {
    need!(ready());
    copied_once(&wrapped(STARTS_SLOWLY, restless()).1);
}

/// QEMU may have only one processor for its start, which the waiting threads must leave to it.
#[test]
fn the_destination_sleeps_while_its_qemu_starts() {
    need!(ready());
    let (_, scene) = wrapped(STARTS_SLOWLY, steady());
    let id = scene.start(&["--mode", "postcopy"]).expect("it begins");
    let pid = scene.b.pid().expect("a daemon");
    until("page connections, while QEMU starts", || sleeps(pid, "vmove-faults").is_some());
    for name in ["vmove-faults", "vmove-bulk"] {
        let before = sleeps(pid, name).expect("they wait");
        std::thread::sleep(Duration::from_secs(1));
        let slept = sleeps(pid, name).expect("they still do") - before;
        assert!(slept < 100, "{name} was awake {slept} times in a second");
    }
    let end = scene.end(&id).expect("it ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    scene.arrived().expect("the guest is whole");
}

#[test]
fn options_out_of_range_are_wrong_usage() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, _b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    for (options, words) in [
        (&["--mode", "rdma"][..], "postcopy"),
        (&["--bandwidth", "1kbit"], "1 MiB/s"),
        (&["--max-downtime", "2h"], "60000"),
    ] {
        let output = a.vmove(&[&["migrate", NAME, "--to", "b"], options].concat()).expect("it ends");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{options:?}: {said}");
        assert!(said.contains(words), "{options:?}: no {words:?} in: {said}");
    }
}

#[test]
fn asked_to_be_paused_the_guest_waits_at_the_destination() {
    need!(ready());
    for mode in ["hybrid", "postcopy", "precopy"] {
        let scene = Scene::new().expect("a guest");
        let end = scene.migrate_to("b", &["--mode", mode, "--paused"]).expect("it ends");
        assert_eq!(end.code, 0, "{mode}: {} {}", end.answer, end.said);
        assert_eq!(end.answer["paused"], true);
        scene.gone_from(&scene.a).expect("it has left");
        let vm = scene.b.vm(NAME).expect("it is listed");
        assert_eq!(vm.status, "paused", "{mode}");
        let before = scene.beacon_at(&scene.b).expect("a beacon");
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(scene.beacon_at(&scene.b).expect("a beacon"), before, "{mode}: it runs");
        let resumed = scene.b.ask(&["resume", NAME]).expect("it is told to go on");
        assert_eq!(resumed["status"], "running", "{resumed}");
        scene.arrived().expect("the guest is whole");
    }
}

#[test]
fn a_guest_that_was_paused_stays_paused() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let stopped = scene.a.ask(&["pause", NAME]).expect("it is told to stop");
    assert_eq!(stopped["status"], "paused", "{stopped}");
    let end = scene.migrate_to("b", &["--mode", "postcopy"]).expect("it ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    let at_b = scene.b.vm(NAME).expect("it is listed");
    assert_eq!(at_b.status, "paused");
    scene.b.ask(&["resume", NAME]).expect("it is told to go on");
    scene.arrived().expect("the guest is whole");
}

#[test]
fn verified_memory_is_equal_in_every_mode() {
    need!(ready());
    for mode in ["hybrid", "postcopy", "precopy"] {
        let scene = Scene::new().expect("a guest");
        let end = scene.migrate_to("b", &["--mode", mode, "--verify"]).expect("it ends");
        assert_eq!(end.code, 0, "{mode}: {} {}", end.answer, end.said);
        assert_eq!(end.answer["verified"], true, "{mode}: {}", end.answer);
        scene.arrived().expect("the guest is whole");
    }
}

#[test]
fn names_of_any_script_move() {
    need!(ready());
    let guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
    for name in ["Büro 東京 #1", "100% 'ja' \"nein\" ?&+", " -v "] {
        let scene = Scene::with(name, "thp", &guest).expect("a guest");
        assert_eq!(scene.a.vms().expect("a list"), [name]);
        let end = scene.migrate_to("b", &["--mode", "hybrid"]).expect("it ends");
        assert_eq!(end.code, 0, "{name:?}: {} {}", end.answer, end.said);
        assert_eq!(end.answer["vm"], name);
        assert_eq!(scene.b.vms().expect("a list"), [name]);
        scene.arrived().expect("the guest is whole");
        let stopped = vmove(&scene.b, &["stop", name]).expect("it ends");
        assert_eq!(stopped.code, 0, "{name:?}: {} {}", stopped.answer, stopped.said);
        scene.gone_from(&scene.b).expect("nothing stays");
    }
}

#[test]
fn names_that_are_no_file_names_are_refused() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let a = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    for name in ["", ".", "..", "a/b", "two\nlines", &"x".repeat(65)] {
        let end = vmove(&a, &["run", "--name", name, "--", "/bin/true"]).expect("it ends");
        not_taken(&end, 2, "bad-name", &[]);
    }
    assert!(beacon::ram_files(&a.memory()).is_empty());
}
