//! The durable memory of a session: one line of JSON for each step, appended before the step is taken.
//!
//! One `write(2)` a line; no `fsync`, since what the lines protect (the guest's memory) does not outlive the kernel either. A line
//! cut short by a kill is ignored: the step it spoke of was not taken.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::link::PeerTarget;
use crate::ownership::{DestinationState, SourceState};
use crate::proto::hello::{SessionId, Token};
use crate::proto::message::{Complete, Prepare};
use crate::spec::MigrationSpec;
use crate::vm::VmRecord;

/// What the source must find again after a kill.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourceRecord {
    /// Session.
    pub id: SessionId,
    /// The VM, as it was registered.
    pub vm: VmRecord,
    /// Where to.
    pub to: PeerTarget,
    /// Options.
    pub spec: MigrationSpec,
    /// Secret.
    pub token: Token,
    /// Who owns the guest.
    pub state: SourceState,
    /// Guest code was running before.
    pub was_running: bool,
    /// Fabric in use.
    pub fabric: Option<vmove_fabric::FabricKind>,
    /// Its address at the peer.
    pub fabric_address: String,
    /// Bulk connections.
    pub bulk_connections: u8,
    /// Both sides have tcp, should that fabric fail.
    #[serde(default)]
    pub may_fall_back: bool,
    /// QEMU has ended here and its memory is freed: nothing is left to do.
    pub freed: bool,
    /// The guest stays here, and the destination, which may hold its device state, has not heard so yet.
    #[serde(default)]
    pub untold: bool,
    /// What the report is to say of the time before.
    pub report: crate::report::Report,
}

/// What the destination must find again after a kill.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DestinationRecord {
    /// Session.
    pub id: SessionId,
    /// What the source asked for.
    pub prepare: Prepare,
    /// Who owns the guest.
    pub state: DestinationState,
    /// The VM here, once its QEMU was started.
    pub vm: Option<VmRecord>,
    /// The descriptor that serves faults, as numbered inside QEMU.
    pub fault_fd: Option<i32>,
    /// Mode the source has chosen, once the guest was stopped.
    pub mode: Option<crate::spec::Mode>,
    /// The final set has been applied to the page maps: they can be trusted.
    pub final_applied: bool,
    /// Fabric in use.
    pub fabric: vmove_fabric::FabricKind,
    /// The source has said that it freed its side: it will not ask again.
    #[serde(default)]
    pub released: bool,
    /// What the source is told when all pages are here: it may ask again when this process has ended.
    #[serde(default)]
    pub complete: Option<Box<Complete>>,
}

/// An open journal.
#[derive(Debug)]
pub struct Journal<R> {
    path: PathBuf,
    file: File,
    record: R,
}

impl<R: Serialize + DeserializeOwned + Clone> Journal<R> {
    /// Begins a journal with its first record.
    ///
    /// # Errors
    /// The kernel's answer, for instance that there is one already.
    pub fn create(path: &Path, record: R) -> io::Result<Self> {
        let file = OpenOptions::new().create_new(true).append(true).open(path)?;
        let mut journal = Self { path: path.to_owned(), file, record };
        journal.append()?;
        Ok(journal)
    }

    /// Opens a journal at its last whole line.
    ///
    /// # Errors
    /// The kernel's answer; `InvalidData` if no line can be read.
    pub fn open(path: &Path) -> io::Result<Self> {
        let (record, whole) = last_record(path)?;
        let file = OpenOptions::new().append(true).open(path)?;
        // A torn line must not run into the next one.
        file.set_len(whole as u64)?;
        Ok(Self { path: path.to_owned(), file, record })
    }

    /// The newest record of a journal that somebody else may be writing: unlike [`Journal::open`] it changes nothing.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn read(path: &Path) -> io::Result<R> {
        last_record(path).map(|(record, _)| record)
    }

    /// The newest record.
    pub const fn record(&self) -> &R {
        &self.record
    }

    /// Where the journal is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Changes the record and writes it down. On an error the record is as before and the step must not be taken.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn update(&mut self, change: impl FnOnce(&mut R)) -> io::Result<()> {
        let before = self.record.clone();
        change(&mut self.record);
        self.append().inspect_err(|_| self.record = before)
    }

    fn append(&mut self) -> io::Result<()> {
        let mut line = serde_json::to_vec(&self.record).map_err(io::Error::other)?;
        line.push(b'\n');
        self.file.write_all(&line)
    }
}

/// The last whole line, and the length up to its end in bytes.
fn last_record<R: DeserializeOwned>(path: &Path) -> io::Result<(R, usize)> {
    let bytes = std::fs::read(path)?;
    let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1);
    let last = bytes[..whole].split(|b| *b == b'\n').rfind(|line| !line.is_empty());
    let record = last.and_then(|line| serde_json::from_slice(line).ok()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{} holds no readable record", path.display()))
    })?;
    Ok((record, whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_whole_line_wins_wherever_a_kill_cuts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        let mut journal = Journal::create(&path, 1u64).unwrap();
        journal.update(|r| *r = 22).unwrap();
        journal.update(|r| *r = 333).unwrap();
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(whole, b"1\n22\n333\n");
        for (cut, want) in [(2, 1), (3, 1), (4, 1), (5, 22), (7, 22), (9, 333)] {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(Journal::<u64>::read(&path).unwrap(), want, "cut at {cut}");
            assert_eq!(std::fs::read(&path).unwrap(), whole[..cut], "whoever only reads must not cut");
            let mut journal = Journal::<u64>::open(&path).unwrap();
            assert_eq!(*journal.record(), want, "cut at {cut}");
            journal.update(|r| *r = 4444).unwrap();
            assert_eq!(*Journal::<u64>::open(&path).unwrap().record(), 4444, "after a cut at {cut}");
        }
    }

    #[test]
    fn a_journal_without_a_line_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        std::fs::write(&path, b"{torn").unwrap();
        let error = Journal::<u64>::open(&path).unwrap_err();
        assert!(error.to_string().contains("no readable record"), "{error}");
    }

    #[test]
    fn a_session_is_not_begun_twice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        drop(Journal::create(&path, 1u64).unwrap());
        let error = Journal::create(&path, 1u64).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    }
}
