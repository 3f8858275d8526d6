//! Journals of earlier releases are read. Those releases wrote the files of `tests/formats`; only paths and process ids are others.

#![cfg(test)]

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use vmove_node::journal::Journal;
use vmove_skip::formats::{self, WHAT_TO_DO};

use crate::ownership::{DestinationState, SourceState};
use crate::records::{DestinationRecord, SourceRecord};

/// Reads the newest record as a daemon does.
fn read<R: DeserializeOwned + Serialize + Clone>(path: &Path) -> R {
    let record = Journal::read(path).unwrap_or_else(|error| panic!("{error}. {WHAT_TO_DO}"));
    formats::check(path, &record);
    record
}

/// The state as journals name it.
fn word(state: impl Serialize) -> String {
    serde_json::to_value(state).unwrap().as_str().unwrap().to_owned()
}

#[test]
fn journals_of_0_1_are_read() {
    use DestinationState::{Complete, Filling, Gone, Loaded, Owner};
    use SourceState::{Aborted, Committed, Released, Stopped, Warm};
    let mut read_states = Vec::new();
    for path in formats::of_release(env!("CARGO_MANIFEST_DIR"), "0.1") {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let (side, state) = name.split_once('-').unwrap();
        if side == "source" {
            let record: SourceRecord = read(&path);
            assert_eq!((word(record.state).as_str(), record.vm.name.as_str()), (state, "guest"), "{name}");
        } else {
            let record: DestinationRecord = read(&path);
            assert_eq!(word(record.state), state, "{name}");
            // Figures for a source that asks again.
            assert_eq!(record.complete.is_some(), record.state == Complete, "{name}");
        }
        read_states.push(name);
    }
    let source = [Warm, Stopped, Committed, Released, Aborted].map(|state| format!("source-{}", word(state)));
    let destination =
        [Filling, Loaded, Owner, Complete, Gone].map(|state| format!("destination-{}", word(state)));
    for state in source.into_iter().chain(destination) {
        assert!(read_states.contains(&state), "there is no journal in state {state}");
    }
}
