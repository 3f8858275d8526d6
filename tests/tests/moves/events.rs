//! Events of a migration, followed by a client that loses its connection.
#![cfg(test)]

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use serde_json::Value;
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::until;
use vmove_tests::guest::Accel;
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, Scene, memory_mib, ready, steady};

/// A connection on which the events of a migration come.
fn follow(node: &Node, id: &str, last_id: &str) -> UnixStream {
    let mut stream = UnixStream::connect(node.control()).expect("the daemon listens");
    write!(
        stream,
        "GET /v1/migrations/{id}/events HTTP/1.1\r\nHost: vmoved\r\nAccept: text/event-stream\r\nLast-Event-ID: {last_id}\r\nConnection: close\r\n\r\n"
    )
    .expect("it takes a request");
    stream
}

fn to_its_end(mut stream: UnixStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("the stream ends");
    text
}

fn ids(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_prefix("id: ")).collect()
}

#[test]
fn events_go_on_behind_the_last_one_and_end_with_the_migration() {
    need!(payload::ready(Accel::Tcg));
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, _b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two nodes");
    let guest = payload::guest(sandbox.path(), Accel::Tcg, &payload::light(), KvmPages::None);
    a.run_guest("web", "thp", &guest.expect("a guest")).expect("it runs");
    let taken = a.ask(&["migrate", "web", "--to", "b", "--detach"]).expect("it begins");
    let id = taken["id"].as_str().expect("an ID").to_owned();

    // The connection is lost after the first event.
    let (mut stream, mut text) = (follow(&a, &id, ""), String::new());
    while ids(&text).is_empty() || !text.ends_with('\n') {
        let mut some = [0; 256];
        let count = stream.read(&mut some).expect("an event comes");
        assert!(count > 0, "the stream ended: {text}");
        text.push_str(&String::from_utf8_lossy(&some[..count]));
    }
    drop(stream);
    assert!(text.contains("200 OK") && text.contains("text/event-stream"), "{text}");
    let first = ids(&text)[0].to_owned();

    let rest = to_its_end(follow(&a, &id, &first));
    let later = ids(&rest);
    assert!(!later.is_empty() && !later.contains(&first.as_str()), "after {first}: {later:?}");
    assert!(rest.contains(r#""state":"done""#), "{rest}");
    let last = later[later.len() - 1];
    // What is left to be told to who has that, to who has an older one, and to who has none of them.
    assert!(to_its_end(follow(&a, &id, last)).starts_with("HTTP/1.1 204"));
    for known in [first.as_str(), "0", "no id at all"] {
        let told = to_its_end(follow(&a, &id, known));
        assert_eq!(ids(&told), [last], "{known}: {told}");
    }
    let unknown = to_its_end(follow(&a, "ffffffff", last));
    assert!(unknown.starts_with("HTTP/1.1 404") && unknown.contains("unknown-migration"), "{unknown}");
}

/// Snapshots of a migration, from its first to its last.
fn snapshots(node: &Node, id: &str) -> Vec<Value> {
    let text = to_its_end(follow(node, id, ""));
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.map(|json| serde_json::from_str(json).expect("a snapshot")).collect()
}

/// How many bytes have crossed, and how many cross in all.
fn counts(told: &[Value]) -> Vec<(u64, u64)> {
    let number = |one: &Value, key: &str| one[key].as_u64().expect("a number");
    told.iter().map(|one| (number(one, "bytes_done"), number(one, "bytes_total"))).collect()
}

/// A guest that writes nothing has no page that crosses twice: what is to cross does not grow, also while it is found out what the link carries.
#[test]
fn of_an_idle_guest_the_total_does_not_grow_and_rounds_count_up() {
    need!(payload::ready(Accel::Tcg));
    let sandbox = Sandbox::new().expect("a sandbox");
    let idle = Config { cold_mib: 48, rate: Rate::PagesPerSecond(0), ..payload::light() };
    let guest = payload::guest(sandbox.path(), Accel::Tcg, &idle, KvmPages::None).expect("a guest");
    let scene = Scene::in_sandbox(sandbox, "thp", &guest).expect("two nodes");
    for (mode, from, to) in [("postcopy", &scene.a, "b"), ("precopy", &scene.b, "a"), ("auto", &scene.a, "b")]
    {
        let asked = ["migrate", NAME, "--to", to, "--mode", mode, "--bandwidth", "32MiB/s", "--detach"];
        let id = from.ask(&asked).expect("it begins")["id"].as_str().expect("an ID").to_owned();
        let told = snapshots(from, &id);
        let counts: Vec<_> = counts(&told).into_iter().filter(|(_, total)| *total > 0).collect();
        assert!(counts.len() > 5, "{mode}: {counts:?}");
        // What it writes for the beacon crosses again.
        let most = counts[0].1 + (2 << 20);
        assert!(counts.iter().all(|(_, total)| *total <= most), "{mode}: {counts:?}");
        let rounds: Vec<_> = told.iter().filter_map(|one| one["round"].as_u64()).collect();
        assert!(rounds.windows(2).all(|two| two[0] <= two[1]), "{mode}: {rounds:?}");
        let points = &told[told.len() - 1]["outcome"]["report"]["over_time"];
        let left: Vec<_> =
            points.as_array().expect("a curve").iter().map(|p| p["left_bytes"].as_u64()).collect();
        assert!(left.len() > 3, "{mode}: {points}");
        let rises = left.windows(2).any(|two| two[1] > two[0].map(|left| left + (2 << 20)));
        assert!(!rises, "{mode}: what is left rises: {left:?}");
    }
}

/// The count of bytes is one count: it begins at nothing, does not fall, and ends at all of it, whatever the mode.
#[test]
fn what_has_crossed_does_not_fall_and_is_not_more_than_there_is() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    for (mode, from, to) in
        [("hybrid", &scene.a, "b"), ("postcopy", &scene.b, "a"), ("precopy", &scene.a, "b")]
    {
        let taken =
            from.ask(&["migrate", NAME, "--to", to, "--mode", mode, "--bandwidth", "400MiB/s", "--detach"]);
        let id = taken.expect("it begins")["id"].as_str().expect("an ID").to_owned();
        let other = if to == "b" { &scene.b } else { &scene.a };
        let (source, destination) = std::thread::scope(|scope| {
            let source = scope.spawn(|| snapshots(from, &id));
            until("the destination knows it", || other.ask(&["status", &id]).is_ok());
            (snapshots(other, &id), source.join().expect("snapshots"))
        });
        for told in [source, destination] {
            let counts = counts(&told);
            assert!(told.len() > 5, "{mode}: {counts:?}");
            assert!(counts.iter().all(|(done, total)| done <= total), "{mode}: {counts:?}");
            assert!(counts.windows(2).all(|two| two[0].0 <= two[1].0), "{mode}: {counts:?}");
            let last = counts[counts.len() - 1];
            assert!(last.0 == last.1 && last.0 > 0, "{mode}: {counts:?}");
            let waits = |one: &&Value| one["phase"] == "check" || one["phase"] == "prepare";
            assert!(told.iter().filter(waits).all(|one| one["bytes_done"] == 0), "{mode}: {counts:?}");
            // Memory that the guest has never touched is not counted.
            let begun = counts.iter().find(|(_, total)| *total > 0);
            let (_, total) = *begun.expect("memory crosses");
            let memory = u64::from(memory_mib(&steady())) << 20;
            assert!(total < memory * 9 / 10 && total > memory / 10, "{mode}: {counts:?}");
        }
    }
}
