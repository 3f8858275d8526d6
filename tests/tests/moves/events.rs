//! Events of a migration, followed by a client that loses its connection.
#![cfg(test)]

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use serde_json::Value;
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
            let number = |one: &Value, key: &str| one[key].as_u64().expect("a number");
            let counts: Vec<_> =
                told.iter().map(|one| (number(one, "bytes_done"), number(one, "bytes_total"))).collect();
            assert!(told.len() > 5, "{mode}: {counts:?}");
            assert!(counts.iter().all(|(done, total)| done <= total), "{mode}: {counts:?}");
            assert!(counts.windows(2).all(|two| two[0].0 <= two[1].0), "{mode}: {counts:?}");
            let last = counts[counts.len() - 1];
            assert!(last.0 == last.1 && last.0 > 0, "{mode}: {counts:?}");
            let waits = |one: &&Value| one["phase"] == "check" || one["phase"] == "prepare";
            assert!(
                told.iter().filter(waits).all(|one| number(one, "bytes_done") == 0),
                "{mode}: {counts:?}"
            );
            // Memory that the guest has never touched is not counted.
            let begun = counts.iter().find(|(_, total)| *total > 0);
            let (_, total) = *begun.expect("memory crosses");
            let memory = u64::from(memory_mib(&steady())) << 20;
            assert!(total < memory * 9 / 10 && total > memory / 10, "{mode}: {counts:?}");
        }
    }
}
