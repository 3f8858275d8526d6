//! Sessions recorded from QEMU 7.2 and 10.0, played back: needs no QEMU.
//!
//! `C:` lines are what the client sent, `S:` lines what QEMU said. To each command the player says what QEMU said to the
//! first command of that name that has not been played yet, events included.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use std::{path::Path, time::Duration};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};
use vmove_qmp::{
    Client, QmpError,
    inspect::{self, DeviceKind, PageKind},
    switchover::{
        Announce, Destination, DestinationOptions, Hold, Inbound, MigrationStatus, Outbound, Source,
        SourceOptions, StateReceiver, StateSender, query_migration,
    },
};

const TIMEOUT: Duration = Duration::from_secs(5);

struct Entry {
    command: Value,
    said: Vec<Value>,
    played: bool,
}

fn read(name: &str) -> (String, Vec<Entry>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/transcripts").join(name);
    let text = std::fs::read_to_string(path).unwrap();
    let mut entries: Vec<Entry> = Vec::new();
    let mut greeting = String::new();
    for line in text.lines() {
        if let Some(command) = line.strip_prefix("C: ") {
            let command = serde_json::from_str(command).unwrap();
            entries.push(Entry { command, said: Vec::new(), played: false });
        } else if let Some(said) = line.strip_prefix("S: ") {
            match entries.last_mut() {
                Some(entry) => entry.said.push(serde_json::from_str(said).unwrap()),
                None => greeting = said.to_owned(),
            }
        }
    }
    (greeting, entries)
}

async fn play(stream: UnixStream, (greeting, mut entries): (String, Vec<Entry>)) {
    let mut stream = BufReader::new(stream);
    stream.get_mut().write_all(format!("{greeting}\r\n").as_bytes()).await.unwrap();
    let mut line = String::new();
    while stream.read_line(&mut line).await.unwrap() > 0 {
        let command: Value = serde_json::from_str(&line).unwrap();
        line.clear();
        let entry = entries
            .iter_mut()
            .find(|entry| !entry.played && entry.command["execute"] == command["execute"])
            .unwrap_or_else(|| panic!("{command} was not recorded"));
        entry.played = true;
        assert_eq!(entry.command["arguments"], command["arguments"], "{command}");
        for said in &entry.said {
            let mut said = said.clone();
            if said.get("id").is_some() {
                said["id"] = command["id"].clone();
            }
            stream.get_mut().write_all(format!("{said}\r\n").as_bytes()).await.unwrap();
        }
    }
}

async fn client(name: &str) -> Client {
    let (ours, theirs) = UnixStream::pair().unwrap();
    tokio::spawn(play(theirs, read(name)));
    Client::over(ours, Path::new(name), TIMEOUT).await.unwrap()
}

const VERSIONS: [(&str, (u32, u32)); 2] = [("7.2", (7, 2)), ("10.0", (10, 0))];

#[tokio::test]
async fn facts() {
    for (name, (major, minor)) in VERSIONS {
        let client = client(&format!("{name}-source.txt")).await;
        assert_eq!((client.version().major, client.version().minor), (major, minor));
        let facts = inspect::facts(&client, 1, None).await.unwrap();
        assert_eq!(facts.machine, format!("pc-q35-{name}"));
        assert_eq!((facts.vcpus, facts.status.as_str(), facts.name.as_deref()), (2, "running", Some("demo")));
        let ram = &facts.ram[0];
        assert_eq!((ram.size, ram.share, ram.kind.as_str()), (64 << 20, true, "memory-backend-file"));
        assert_ne!(ram.pages, PageKind::Anonymous);
        assert_eq!(facts.block.len(), 1);
        assert_eq!((facts.block[0].driver.as_str(), facts.block[0].direct_io), ("file", false));
        assert_eq!(facts.devices.iter().map(|one| one.kind).collect::<Vec<_>>(), [DeviceKind::Balloon]);
        assert_eq!(facts.netdevs[0].kind, "user");
        assert!(facts.qemu_blockers.is_empty());
    }
}

#[tokio::test]
async fn the_source_side() {
    for (name, _) in VERSIONS {
        let client = client(&format!("{name}-source.txt")).await;
        let mut events = client.events();
        // The first query of each kind belongs to the facts.
        inspect::facts(&client, 1, None).await.unwrap();
        let source = Source::prepare(&client, &SourceOptions::default().hold(Hold::UntilTold)).await.unwrap();
        assert!(source.was_running());
        let (_receiver, fd) = StateReceiver::pair().unwrap();
        source.start(Outbound::Fd(fd)).await.unwrap();
        let stopped = source.stopped(TIMEOUT).await.unwrap();
        let held = source.held(TIMEOUT).await.unwrap();
        assert!(held.at >= stopped.at);
        source.continue_().await.unwrap();
        source.completed(TIMEOUT).await.unwrap();
        assert_eq!(query_migration(&client, TIMEOUT).await.unwrap().status, MigrationStatus::Completed);
        let mut seen = Vec::new();
        while seen.last().map(String::as_str) != Some("completed") {
            let event = events.next().await.unwrap();
            assert!(event.known.is_some(), "{event:?}");
            seen.push(event.text("status").unwrap_or(&event.name).to_owned());
        }
        assert_eq!(
            seen,
            [
                "setup",
                "MIGRATION_PASS",
                "active",
                "STOP",
                "pre-switchover",
                "device",
                "MIGRATION_PASS",
                "completed"
            ]
        );
        let refused = client.execute_raw("no-such-command", Value::Null, TIMEOUT).await.unwrap_err();
        assert!(matches!(&refused, QmpError::Refused { class, .. } if class == "CommandNotFound"));
    }
}

#[tokio::test]
async fn the_destination_side() {
    for (name, _) in VERSIONS {
        let client = client(&format!("{name}-destination.txt")).await;
        let destination = Destination::prepare(&client, &DestinationOptions::default()).await.unwrap();
        let (_sender, fd) = StateSender::pair().unwrap();
        destination.listen(Inbound::Fd(fd)).await.unwrap();
        let loaded = destination.loaded(TIMEOUT).await.unwrap();
        let resumed = destination.resume(TIMEOUT).await.unwrap();
        assert!(resumed.at >= loaded.at);
        destination.announce(Announce::default()).await.unwrap();
    }
}
