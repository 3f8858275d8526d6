//! Sessions that have ended, read from their journals.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::group::journals;
use crate::ownership::{DestinationState, SourceState};
use crate::proto::message::{DestinationStand, ToDestination, ToSource};
use crate::records::{CalledOff, DestinationRecord, SourceRecord};
use vmove_node::disk::Disk;
use vmove_node::journal::Journal;
pub use vmove_node::migrations::{Moved, QemuId};
use vmove_node::peer::BoxedStream;
use vmove_node::peer::Channel;
use vmove_node::peer::SessionId;
use vmove_node::record::VmRecord;
use vmove_types::progress::{GuestPlace, MissingDevice, Outcome, Phase, Progress, Role};

/// What is said of a session whose stopped guest was ended at the source.
pub(crate) const ENDED_BY_OPERATOR: &str =
    "ended by an operator: the guest was given to the destination, and not all of its memory";

/// Where guests were sent, by the QEMU they had here, as long as the journals of that are kept.
pub(crate) fn moved(disk: &dyn Disk, dir: &Path) -> HashMap<QemuId, Moved> {
    let mut found = HashMap::new();
    for id in session_ids(disk, dir) {
        let Ok(Some(record)) = journals::read(disk, dir, id) else { continue };
        if matches!(record.state, SourceState::Committed | SourceState::Released) {
            let qemu = (record.vm.pid, record.vm.pid_start);
            // The newest is the first.
            found.entry(qemu).or_insert(Moved { session: id, to: record.to });
        }
    }
    found
}

/// Whether a session other than `except` has given this QEMU's guest away, or may have: a journal that cannot be read counts, unless an
/// older line says that it is about another VM.
pub(crate) fn may_have_moved(disk: &dyn Disk, dir: &Path, vm: &VmRecord, except: SessionId) -> bool {
    session_ids(disk, dir).into_iter().filter(|id| *id != except).any(|id| {
        let path = dir.join(id.to_string()).join("source.jsonl");
        match journals::read(disk, dir, id) {
            Ok(Some(record)) => {
                let given = matches!(record.state, SourceState::Committed | SourceState::Released);
                given && (record.vm.pid, record.vm.pid_start) == (vm.pid, vm.pid_start)
            }
            Ok(None) => false,
            Err(_) => {
                Journal::<SourceRecord>::read_older_on(disk, &path).is_none_or(|r| r.vm.name == vm.name)
            }
        }
    })
}

/// The newest session that takes the guest of a visit home again, and has not been called off.
pub(crate) fn homeward(disk: &dyn Disk, dir: &Path, visit: SessionId) -> Option<SourceRecord> {
    session_ids(disk, dir).into_iter().find_map(|id| {
        let record = journals::read(disk, dir, id).ok()??;
        let is_it = record.home.is_some_and(|home| home.visit == visit);
        let called_off = record.state == SourceState::Aborted && !record.to_resume;
        (is_it && !called_off).then_some(record)
    })
}

/// Whether the guest of a visit runs here again, which is its home.
pub(crate) fn is_home_again(disk: &dyn Disk, dir: &Path, visit: SessionId) -> bool {
    session_ids(disk, dir).into_iter().any(|id| {
        let path = dir.join(id.to_string()).join("destination.jsonl");
        let record = Journal::<DestinationRecord>::read_on(disk, &path);
        record.is_ok_and(|r| r.state.may_run() && r.prepare.home.is_some_and(|home| home.visit == visit))
    })
}

/// The guest that a session brought here, as long as its journal is kept.
pub(crate) fn came(disk: &dyn Disk, dir: &Path, session: SessionId) -> Option<VmRecord> {
    let path = dir.join(session.to_string()).join("destination.jsonl");
    Journal::<DestinationRecord>::read_on(disk, &path).ok()?.vm
}

/// Ids of all sessions that have a folder, the newest first.
pub(crate) fn session_ids(disk: &dyn Disk, dir: &Path) -> Vec<SessionId> {
    let entries = disk.list(dir).unwrap_or_default().into_iter();
    let mut found: Vec<_> = entries
        .filter_map(|e| {
            let id = SessionId(e.name.parse().ok()?);
            Some((e.modified, id))
        })
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, id)| id).collect()
}

/// Snapshots of sessions that no process of the daemon holds any more.
pub(crate) fn older(disk: &dyn Disk, dir: &Path, known: &[SessionId]) -> Vec<Progress> {
    session_ids(disk, dir)
        .into_iter()
        .filter(|id| !known.contains(id))
        .filter_map(|id| snapshot(disk, id, dir))
        .collect()
}

/// What is listed of a session whose journal cannot be read. `about`: VM and peer, if an older line names them.
pub(crate) fn unreadable(
    id: SessionId,
    path: &Path,
    role: Role,
    about: Option<(String, String)>,
    error: &std::io::Error,
) -> Progress {
    let unknown = || ("unknown".to_owned(), "unknown".to_owned());
    let (vm, peer) = about.unwrap_or_else(unknown);
    let error = format!("unknown, see {}: {error}", path.display());
    let outcome = Outcome::Failed { error, guest: GuestPlace::Unknown, cancelled: false };
    of(&id, &vm, role, &peer, "", outcome)
}

/// What the journal of a session says that no process of the daemon holds any more.
pub(crate) fn snapshot(disk: &dyn Disk, id: SessionId, sessions_dir: &Path) -> Option<Progress> {
    let dir = sessions_dir.join(id.to_string());
    let path = dir.join("source.jsonl");
    match journals::read(disk, sessions_dir, id) {
        Ok(Some(r)) => return Some(of_source(&r)),
        Ok(None) => {}
        Err(error) => return Some(unreadable(id, &path, Role::Source, None, &error)),
    }
    let path = dir.join("destination.jsonl");
    match Journal::<DestinationRecord>::read_begun_on(disk, &path) {
        Ok(record) => record.as_ref().map(of_destination),
        Err(error) => Some(unreadable(id, &path, Role::Destination, None, &error)),
    }
}

fn of_source(r: &SourceRecord) -> Progress {
    let failed = |error: &str, guest| Outcome::Failed { error: error.to_owned(), guest, cancelled: false };
    let outcome = match r.state {
        SourceState::Released => Outcome::Done { report: Box::new(r.report.clone()) },
        SourceState::Committed if r.freed => Outcome::Failed {
            error: ENDED_BY_OPERATOR.to_owned(),
            guest: GuestPlace::Destination,
            cancelled: true,
        },
        SourceState::Committed => {
            failed("unfinished: the guest was given to the destination", GuestPlace::PausedAtDestination)
        }
        _ => match &r.called_off {
            Some(off) => off.outcome(),
            None => failed("called off: the guest stayed at the source", GuestPlace::Source),
        },
    };
    let group = r.group.map(|group| group.to_string());
    let began_at = r.report.began_at.clone();
    let ended = of(&r.id, &r.vm.name, Role::Source, &r.to.name, &r.report.mode, outcome);
    let ended = Progress { group, began_at, ..after(ended, r.called_off.as_ref()) };
    lacking(ended, &r.missing)
}

fn of_destination(r: &DestinationRecord) -> Progress {
    let report = || {
        let mut report = r.report();
        if let Some(complete) = &r.complete {
            complete.add_to(&mut report);
        }
        Box::new(report)
    };
    let outcome = match r.state {
        DestinationState::Complete => Outcome::Done { report: r.whole_report.clone().unwrap_or_else(report) },
        DestinationState::Owner if r.abandoned => Outcome::Failed {
            error: "ended by an operator while pages were missing".to_owned(),
            guest: GuestPlace::Destination,
            cancelled: true,
        },
        DestinationState::Owner | DestinationState::Loaded => Outcome::Failed {
            error: "unfinished".to_owned(),
            guest: GuestPlace::PausedAtDestination,
            cancelled: false,
        },
        _ => r.called_off.as_ref().map_or_else(
            || Outcome::Failed {
                error: "the guest stayed at the source".to_owned(),
                guest: GuestPlace::Source,
                cancelled: false,
            },
            CalledOff::outcome,
        ),
    };
    let mode = r.report().mode;
    let ended = of(&r.id, &r.prepare.vm, Role::Destination, &r.prepare.source, &mode, outcome);
    let ended = Progress { began_at: r.began_at.clone(), ..after(ended, r.called_off.as_ref()) };
    lacking(ended, &r.missing)
}

/// With what was noted when it was called off.
fn after(mut progress: Progress, off: Option<&CalledOff>) -> Progress {
    off.iter().for_each(|off| off.show(&mut progress));
    progress
}

/// Of a guest that lacks these devices.
fn lacking(mut progress: Progress, missing: &[MissingDevice]) -> Progress {
    progress.missing_devices = missing.to_vec();
    progress
}

fn of(id: &SessionId, vm: &str, role: Role, peer: &str, mode: &str, outcome: Outcome) -> Progress {
    let mut progress = Progress::begun(id.to_string(), vm, role, peer);
    progress.mode = (!mode.is_empty()).then(|| mode.to_owned());
    progress.phase = Phase::Finish;
    if let Outcome::Done { report } = &outcome {
        progress.elapsed_ms = report.total_ms;
        progress.bytes_sent = report.bytes_sent;
    }
    progress.outcome = outcome;
    progress
}

/// Tells a source that dials again how a session ended here.
pub(crate) async fn answer_for_ended(
    disk: Arc<dyn Disk>,
    state: DestinationState,
    journal: PathBuf,
    stream: BoxedStream,
) {
    let disk = &*disk;
    let mut channel: Channel<ToDestination> = Channel::new(stream);
    let first = timeout(Duration::from_secs(10), channel.receive()).await;
    let Ok(Ok(ToDestination::Resume(_))) = first else { return };
    let stand = match state {
        DestinationState::Complete => DestinationStand::Complete,
        _ => DestinationStand::Gone,
    };
    let _ = channel.send(&ToSource::Resume(stand)).await;
    if stand == DestinationStand::Complete {
        let record = Journal::<DestinationRecord>::read_on(disk, &journal).ok();
        let complete = record.and_then(|record| record.complete).unwrap_or_default();
        let _ = channel.send(&ToSource::Complete(complete)).await;
    }
    // Stays until the source has read it, and closes or says that it has freed its side.
    if let Ok(Ok(ToDestination::Released(told))) = timeout(Duration::from_secs(10), channel.receive()).await {
        let written = Journal::<DestinationRecord>::open_on(disk, &journal).and_then(|mut j| {
            j.update(|r| (r.released, r.whole_report) = (true, serde_json::from_str(&told).ok()))
        });
        if let Err(error) = written {
            tracing::warn!(%error, "this migration stays in the history for good");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::missing;
    use crate::proto::message::{Complete, Counted, SourceStand};

    #[test]
    fn devices_that_a_guest_lacks_stay_in_the_history() {
        let lacks = vec![missing("b", "web", "net0", "it is gone".to_owned())];
        for side in ["source.jsonl", "destination.jsonl"] {
            let (sessions, id) = (tempfile::tempdir().unwrap(), SessionId::random());
            let dir = sessions.path().join(id.to_string());
            std::fs::create_dir(&dir).unwrap();
            let path = dir.join(side);
            if side == "source.jsonl" {
                crate::retention::tests::at_source(&dir, SourceState::Aborted, false, false);
                let mut journal = Journal::<SourceRecord>::open(&path).unwrap();
                journal.update(|r| r.are_back(&lacks)).unwrap();
            } else {
                crate::retention::tests::at_destination(&dir, DestinationState::Complete, true);
                let mut journal = Journal::<DestinationRecord>::open(&path).unwrap();
                journal.update(|r| r.missing.clone_from(&lacks)).unwrap();
            }
            let told = snapshot(&vmove_node::disk::KernelDisk, id, sessions.path()).unwrap();
            assert_eq!(told.missing_devices, lacks, "{side}");
        }
    }

    #[test]
    fn a_session_that_was_called_off_tells_how_far_it_was() {
        let (sessions, id) = (tempfile::tempdir().unwrap(), SessionId::random());
        let dir = sessions.path().join(id.to_string());
        std::fs::create_dir(&dir).unwrap();
        crate::retention::tests::at_source(&dir, SourceState::Aborted, false, false);
        let mut journal = Journal::<SourceRecord>::open(&dir.join("source.jsonl")).unwrap();
        let told = || snapshot(&vmove_node::disk::KernelDisk, id, sessions.path()).unwrap();
        let old = serde_json::json!({ "why": "cancelled", "cancelled": true, "elapsed_ms": 7.0 });
        let mut off: CalledOff = serde_json::from_value(old).unwrap();
        journal.update(|r| r.called_off = Some(off.clone())).unwrap();
        let of_an_older_daemon = told();
        assert_eq!((of_an_older_daemon.phase, of_an_older_daemon.elapsed_ms), (Phase::Finish, 7.0));

        let phase =
            vmove_types::report::PhaseTime { name: "check".to_owned(), start_ms: 0.0, duration_ms: 1.0 };
        let was = Progress {
            mode: Some("precopy".to_owned()),
            phase: Phase::Rounds,
            phases: vec![phase],
            bytes_done: 3,
            bytes_total: 5,
            bytes_sent: 4,
            ..of_an_older_daemon
        };
        off.reached = Some(Box::new(crate::records::Reached::of(&was)));
        journal.update(|r| r.called_off = Some(off)).unwrap();
        assert_eq!(told(), was);
    }

    /// The connection broke when the last page was here, and the session there has ended since.
    #[tokio::test]
    async fn a_source_that_asks_late_gets_the_figures() {
        let dir = tempfile::tempdir().unwrap();
        crate::retention::tests::at_destination(dir.path(), DestinationState::Owner, false);
        let path = dir.path().join("destination.jsonl");
        let told = Complete {
            counted: Counted { wire_bytes: 4096, ..Counted::default() },
            differing_pages: Some(0),
            ..Complete::default()
        };
        let mut journal = Journal::<DestinationRecord>::open(&path).unwrap();
        journal.update(|r| r.complete = Some(Box::new(told.clone()))).unwrap();
        journal.update(|r| r.state = DestinationState::Complete).unwrap();
        let (here, there) = tokio::io::duplex(1 << 16);
        let answering = answer_for_ended(
            Arc::new(vmove_node::disk::KernelDisk),
            DestinationState::Complete,
            path.clone(),
            Box::new(here),
        );
        let asking = async {
            let mut channel: Channel<ToSource> = Channel::new(Box::new(there));
            channel.send(&ToDestination::Resume(SourceStand::Committed)).await.unwrap();
            let stand = channel.receive().await.unwrap();
            let complete = channel.receive().await.unwrap();
            channel.send(&ToDestination::Released(String::new())).await.unwrap();
            (stand, complete)
        };
        let ((), answer) = tokio::join!(answering, asking);
        let expected = (ToSource::Resume(DestinationStand::Complete), ToSource::Complete(Box::new(told)));
        assert_eq!(answer, expected);
        assert!(Journal::<DestinationRecord>::read(&path).unwrap().released);
    }
}
