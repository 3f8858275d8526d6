//! Records of earlier releases are read. Those releases wrote the files of `tests/formats`; only paths and process ids are others.

use std::path::Path;

use serde::Serialize;
use vmove_node::journal::Journal;
use vmove_skip::formats::{self, WHAT_TO_DO};

use super::host::HostRecord;
use crate::record::{ForkPhase, ForkRecord, Member, Members};
use crate::template::{MANIFEST, Manifest, read_manifest};

/// A folder with only this file, under the name that its reader looks for.
fn alone(path: &Path, name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(path, dir.path().join(name)).unwrap();
    dir
}

fn checked<R: Serialize>(path: &Path, record: Option<R>) -> R {
    let record = record.unwrap_or_else(|| panic!("{} is not read. {WHAT_TO_DO}", path.display()));
    formats::check(path, &record);
    record
}

fn fork(path: &Path) -> ForkRecord {
    let record = Journal::read(path).unwrap_or_else(|error| panic!("{error}. {WHAT_TO_DO}"));
    checked(path, Some(record))
}

fn manifest(path: &Path) -> Manifest {
    let dir = alone(path, MANIFEST);
    let read = read_manifest(dir.path()).unwrap_or_else(|error| panic!("{error}. {WHAT_TO_DO}"));
    checked(path, Some(read))
}

fn member(path: &Path) -> Member {
    let dir = alone(path, "guest.json");
    checked(path, Members::open(dir.path()).unwrap().list().pop())
}

fn host(path: &Path) -> HostRecord {
    checked(path, HostRecord::left(alone(path, "fork.json").path()).pop().and_then(|(_, read)| read.ok()))
}

#[test]
fn records_of_0_1_are_read() {
    use ForkPhase::{Begun, Complete, Frozen, Keeping, Stopping};
    let mut read = Vec::new();
    for path in formats::of_release(env!("CARGO_MANIFEST_DIR"), "0.1") {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        match name.split_once('-').map_or(name.as_str(), |(kind, _)| kind) {
            "fork" => assert_eq!(format!("fork-{}", fork(&path).phase.word()), name),
            "member" => assert!(!member(&path).fork.is_empty(), "{name}"),
            "template" => assert!(manifest(&path).guest_bytes() > 0, "{name}"),
            "host" => assert!(!host(&path).children.is_empty(), "{name}"),
            _ => panic!("{} is read by no test", path.display()),
        }
        read.push(name);
    }
    let phases = [Begun, Stopping, Keeping, Frozen, Complete].map(|phase| format!("fork-{}", phase.word()));
    let others = ["member-parent", "member-child", "template-memory", "template-disk", "host"];
    for wanted in phases.into_iter().chain(others.map(str::to_owned)) {
        assert!(read.contains(&wanted), "there is no {wanted}");
    }
}
