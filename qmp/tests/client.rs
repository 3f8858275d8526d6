//! The client against a server that plays QEMU, well and badly.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use std::{io::IoSliceMut, mem::MaybeUninit, os::fd::AsFd, path::PathBuf, time::Duration};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
};
use vmove_qmp::{Client, EventsError, QmpError};

const TIMEOUT: Duration = Duration::from_secs(5);
const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": "test"}, "capabilities": ["oob"]}}"#;

/// The server's end.
struct Server(BufReader<UnixStream>);

impl Server {
    async fn say(&mut self, line: &str) {
        self.0.get_mut().write_all(format!("{line}\r\n").as_bytes()).await.unwrap();
    }

    async fn command(&mut self) -> Value {
        let mut line = String::new();
        assert_ne!(self.0.read_line(&mut line).await.unwrap(), 0, "client has gone");
        serde_json::from_str(&line).unwrap()
    }

    /// Reads one command and answers it.
    async fn answer(&mut self, reply: Value) -> Value {
        let command = self.command().await;
        self.say(&json!({"return": reply, "id": command["id"]}).to_string()).await;
        command
    }
}

/// A client and its server, past the negotiation.
async fn pair() -> (Client, Server) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = tokio::spawn(async move {
        let mut server = Server(BufReader::new(theirs));
        server.say(GREETING).await;
        let command = server.answer(json!({})).await;
        assert_eq!(command["execute"], "qmp_capabilities");
        assert_eq!(command["arguments"], json!({"enable": ["oob"]}));
        server
    });
    let client = Client::over(ours, &PathBuf::from("test"), TIMEOUT).await.unwrap();
    (client, server.await.unwrap())
}

async fn run(client: &Client, name: &str) -> Result<Value, QmpError> {
    client.execute_raw(name, Value::Null, TIMEOUT).await
}

#[tokio::test]
async fn greeting_gives_version_peer_and_oob() {
    let (client, _server) = pair().await;
    assert_eq!((client.version().major, client.version().minor, client.version().micro), (10, 0, 2));
    assert_eq!(client.version().to_string(), "10.0.2");
    assert!(client.has_out_of_band());
    assert_eq!(client.peer_pid(), Some(std::process::id()));
}

#[tokio::test]
async fn replies_in_another_order_reach_their_commands() {
    let (client, mut server) = pair().await;
    let serve = async {
        let (first, second) = (server.command().await, server.command().await);
        server.say(&json!({"return": second["execute"], "id": second["id"]}).to_string()).await;
        server.say(r#"{"return": {}, "id": 987654}"#).await;
        server.say(&json!({"return": first["execute"], "id": first["id"]}).to_string()).await;
        server
    };
    let (a, b, _server) = tokio::join!(run(&client, "one"), run(&client, "two"), serve);
    assert_eq!((a.unwrap(), b.unwrap()), (json!("one"), json!("two")));
}

#[tokio::test]
async fn a_refusal_carries_qemus_words() {
    let (client, mut server) = pair().await;
    let serve = async {
        let id = server.command().await["id"].clone();
        server
            .say(
                &json!({"error": {"class": "CommandNotFound", "desc": "no such thing"}, "id": id})
                    .to_string(),
            )
            .await;
        server
    };
    let (reply, mut server) = tokio::join!(run(&client, "nonsense"), serve);
    let error = reply.unwrap_err();
    assert!(error.is_refusal());
    assert_eq!(error.to_string(), "QEMU refused nonsense: no such thing (CommandNotFound)");
    let (reply, _) = tokio::join!(run(&client, "query-status"), server.answer(json!({"a": 1})));
    assert_eq!(reply.unwrap(), json!({"a": 1}));
}

#[tokio::test]
async fn a_malformed_reply_fails_its_command_and_nothing_else() {
    let (client, mut server) = pair().await;
    let serve = async {
        let id = server.command().await["id"].clone();
        server.say(&format!("{{\"return\": {{\"broken\": , \"id\": {id}}}")).await;
        server.say("not json at all").await;
        server
    };
    let (reply, mut server) = tokio::join!(run(&client, "query-x"), serve);
    assert!(matches!(reply, Err(QmpError::Malformed { .. })), "{reply:?}");
    let (reply, _server) = tokio::join!(run(&client, "query-y"), server.answer(json!(7)));
    assert_eq!(reply.unwrap(), json!(7));
}

#[tokio::test]
async fn events_known_and_unknown_are_kept_in_order() {
    let (client, mut server) = pair().await;
    let mut events = client.events();
    let stamp = json!({"seconds": 100, "microseconds": 5});
    server.say(&json!({"event": "FUTURE_EVENT", "data": {"x": [1]}, "timestamp": stamp}).to_string()).await;
    server.say(&json!({"event": "STOP", "timestamp": stamp}).to_string()).await;
    server
        .say(
            &json!({"event": "MIGRATION", "data": {"status": "not-invented-yet"}, "timestamp": stamp})
                .to_string(),
        )
        .await;
    let unknown = events.next().await.unwrap();
    assert_eq!((unknown.name.as_str(), &unknown.data), ("FUTURE_EVENT", &json!({"x": [1]})));
    assert!(unknown.known.is_none());
    let stop = events.next().await.unwrap();
    assert!(matches!(stop.known, Some(qapi::qmp::Event::STOP { .. })), "{stop:?}");
    assert_eq!((stop.qemu_time.seconds, stop.qemu_time.micros), (100, 5));
    assert!(stop.at >= unknown.at && stop.at <= vmove_types::time::Mono::now());
    let migration = events.next().await.unwrap();
    assert_eq!(migration.text("status"), Some("not-invented-yet"));
    drop(server);
    assert_eq!(events.next().await.unwrap_err(), EventsError::Closed);
    assert_eq!(client.events().next().await.unwrap_err(), EventsError::Closed);
}

#[tokio::test]
async fn an_event_that_comes_before_the_reply_is_not_missed() {
    let (client, mut server) = pair().await;
    let expected = client.expect("MIGRATION", |event| event.text("status") == Some("completed"));
    let serve = async {
        let id = server.command().await["id"].clone();
        server.say(r#"{"event": "MIGRATION", "data": {"status": "active"}, "timestamp": {}}"#).await;
        server.say(r#"{"event": "MIGRATION", "data": {"status": "completed"}, "timestamp": {}}"#).await;
        server.say(&json!({"return": {}, "id": id}).to_string()).await;
        server
    };
    let (reply, _server) = tokio::join!(run(&client, "migrate"), serve);
    reply.unwrap();
    let event = expected.wait(Duration::from_millis(500)).await.unwrap();
    assert_eq!(event.text("status"), Some("completed"));
}

#[tokio::test]
async fn patience_ends_and_a_late_reply_does_no_harm() {
    let (client, mut server) = pair().await;
    let reply = client.execute_raw("slow", Value::Null, Duration::from_millis(30)).await;
    assert!(matches!(reply, Err(QmpError::Timeout { .. })), "{reply:?}");
    let late = server.command().await;
    server.say(&json!({"return": {}, "id": late["id"]}).to_string()).await;
    let (reply, _server) = tokio::join!(run(&client, "next"), server.answer(json!("right")));
    assert_eq!(reply.unwrap(), json!("right"));
    let nothing = client.expect("STOP", |_| true).wait(Duration::from_millis(20)).await;
    assert!(matches!(nothing, Err(QmpError::Timeout { .. })), "{nothing:?}");
}

#[tokio::test]
async fn the_end_of_qemu_reaches_everyone_who_waits() {
    let (client, server) = pair().await;
    let (a, b) = (client.clone(), client.clone());
    let command = tokio::spawn(async move { run(&a, "query-status").await });
    let event = tokio::spawn(async move { b.expect("RESUME", |_| true).wait(Duration::from_secs(60)).await });
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(server);
    assert!(command.await.unwrap().unwrap_err().is_closed());
    assert!(event.await.unwrap().unwrap_err().is_closed());
    tokio::time::timeout(TIMEOUT, client.closed()).await.unwrap();
    assert!(run(&client, "query-status").await.unwrap_err().is_closed());
    let after = client.expect("RESUME", |_| true).wait(TIMEOUT).await;
    assert!(after.unwrap_err().is_closed());
}

#[tokio::test]
async fn at_most_seven_in_band_commands_are_in_flight_and_oob_passes_them() {
    let (client, mut server) = pair().await;
    let all: Vec<_> = (0..12)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { run(&client, "query-status").await })
        })
        .collect();
    let mut ids = Vec::new();
    for _ in 0..7 {
        ids.push(server.command().await["id"].clone());
    }
    let oob = client.execute_oob_raw("migrate-pause", Value::Null, TIMEOUT);
    let serve = async {
        // The next line is the out-of-band command, not the eighth query.
        let command = server.command().await;
        assert_eq!(command["exec-oob"], "migrate-pause");
        server.say(&json!({"return": {}, "id": command["id"]}).to_string()).await;
        for id in ids {
            server.say(&json!({"return": {}, "id": id}).to_string()).await;
        }
        for _ in 0..5 {
            server.answer(json!({})).await;
        }
    };
    let (reply, ()) = tokio::join!(oob, serve);
    reply.unwrap();
    for one in all {
        one.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_command_larger_than_the_socket_buffer_arrives_whole() {
    let (client, mut server) = pair().await;
    let big = "x".repeat(3 << 20);
    let send = client.execute_raw("huge", json!({"text": big}), Duration::from_secs(20));
    let serve = async {
        // Let the writer run into the full socket first.
        tokio::time::sleep(Duration::from_millis(50)).await;
        server.answer(json!(1)).await
    };
    let (reply, command) = tokio::join!(send, serve);
    assert_eq!(reply.unwrap(), json!(1));
    assert_eq!(command["arguments"]["text"].as_str().map(str::len), Some(big.len()));
}

#[tokio::test]
async fn a_caller_that_gives_up_leaves_no_half_line() {
    let (client, mut server) = pair().await;
    let big = json!({"text": "x".repeat(3 << 20)});
    let gave_up = client.execute_raw("huge", big, Duration::from_millis(10)).await;
    assert!(matches!(gave_up, Err(QmpError::Timeout { .. })), "{gave_up:?}");
    let serve = async {
        assert_eq!(server.command().await["execute"], "huge");
        server.answer(json!("after")).await
    };
    let (reply, command) = tokio::join!(run(&client, "small"), serve);
    assert_eq!((reply.unwrap(), &command["execute"]), (json!("after"), &json!("small")));
}

#[tokio::test]
async fn a_descriptor_travels_with_its_command() {
    let (client, server) = pair().await;
    let (left, mut right) = std::os::unix::net::UnixStream::pair().unwrap();
    let send = client.add_fd(Some(4), left.as_fd(), TIMEOUT);
    let serve = async {
        let stream = server.0.into_inner();
        let mut line = vec![0; 4096];
        let (count, fd) = loop {
            stream.readable().await.unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let got = stream.try_io(tokio::io::Interest::READABLE, || {
                let mut into = [IoSliceMut::new(&mut line)];
                Ok(rustix::net::recvmsg(&stream, &mut into, &mut control, RecvFlags::DONTWAIT)?)
            });
            if let Ok(got) = got {
                let fd = control.drain().find_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
                    _ => None,
                });
                break (got.bytes, fd.unwrap());
            }
        };
        let command: Value = serde_json::from_slice(&line[..count]).unwrap();
        let mut server = Server(BufReader::new(stream));
        server.say(&json!({"return": {"fdset-id": 4, "fd": 33}, "id": command["id"]}).to_string()).await;
        (command, fd, server)
    };
    let (entry, (command, fd, _server)) = tokio::join!(send, serve);
    let entry = entry.unwrap();
    assert_eq!((entry.set, entry.fd), (4, 33));
    assert_eq!((&command["execute"], &command["arguments"]), (&json!("add-fd"), &json!({"fdset-id": 4})));
    std::io::Write::write_all(&mut std::os::unix::net::UnixStream::from(fd), b"hi").unwrap();
    let mut two = [0; 2];
    std::io::Read::read_exact(&mut right, &mut two).unwrap();
    assert_eq!(&two, b"hi");
}

#[tokio::test]
async fn connecting_says_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp.sock");
    let nobody = Client::connect(&path, TIMEOUT).await.unwrap_err();
    assert!(matches!(nobody, QmpError::Connect { .. }), "{nobody:?}");

    let listener = UnixListener::bind(&path).unwrap();
    let silent = Client::connect(&path, Duration::from_millis(50)).await.unwrap_err();
    assert!(matches!(silent, QmpError::NoGreeting { .. }), "{silent:?}");
    assert!(silent.to_string().contains("one client at a time"), "{silent}");

    let (mut first, _) = listener.accept().await.unwrap();
    first.shutdown().await.unwrap();
    let human = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"QEMU 10.0.2 monitor - type 'help' for more information\r\n(qemu) ").await.unwrap();
        stream
    };
    let (wrong, _stream) = tokio::join!(Client::connect(&path, TIMEOUT), human);
    let wrong = wrong.unwrap_err();
    assert!(matches!(wrong, QmpError::NotQmp { .. }), "{wrong:?}");
}

#[tokio::test]
async fn paths_too_long_for_a_socket_are_reached() {
    let folder = tempfile::tempdir().unwrap();
    let long = folder.path().join("d".repeat(120)).join("ä b");
    std::fs::create_dir_all(&long).unwrap();
    // Bound through a short link, as QEMU does through its working directory.
    let link = folder.path().join("l");
    std::os::unix::fs::symlink(&long, &link).unwrap();
    let listener = UnixListener::bind(link.join("qmp.sock")).unwrap();
    let serve = async {
        let (stream, _) = listener.accept().await.unwrap();
        let mut server = Server(BufReader::new(stream));
        server.say(GREETING).await;
        server.answer(json!({})).await;
        server
    };
    let path = long.join("qmp.sock");
    assert!(path.as_os_str().len() > vmove_qmp::client::MAX_SOCKET_PATH);
    let (client, _server) = tokio::join!(Client::connect(&path, TIMEOUT), serve);
    assert_eq!(client.unwrap().path(), path);
}

#[tokio::test]
async fn a_monitor_without_oob_is_used_without_it() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let serve = async {
        let mut server = Server(BufReader::new(theirs));
        server
            .say(r#"{"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 22}}, "capabilities": []}}"#)
            .await;
        let command = server.answer(json!({})).await;
        assert_eq!(command["arguments"], json!({"enable": []}));
        server
    };
    let path = PathBuf::from("test");
    let (client, _server) = tokio::join!(Client::over(ours, &path, TIMEOUT), serve);
    let client = client.unwrap();
    assert_eq!(client.version().to_string(), "7.2.22");
    let refused = client.execute_oob_raw("migrate-pause", Value::Null, TIMEOUT).await;
    assert!(matches!(refused, Err(QmpError::NoOutOfBand { .. })), "{refused:?}");
}

#[tokio::test]
async fn a_typed_reply_of_another_form_is_a_decode_error() {
    let (client, mut server) = pair().await;
    let typed = client.execute(qapi::qmp::query_status {}, TIMEOUT);
    let (reply, _) = tokio::join!(typed, server.answer(json!({"running": "perhaps"})));
    assert!(matches!(reply, Err(QmpError::Decode { .. })), "{reply:?}");
}
