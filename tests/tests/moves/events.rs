//! Events of a migration, followed by a client that loses its connection.
#![cfg(test)]

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::Accel;
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::sandbox::Sandbox;

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
