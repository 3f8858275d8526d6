//! What the two sides of a session must find again after a kill: the lines of their journals.

use std::fs::Metadata;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
pub use vmove_node::guest_devices::{Asked, Detached};
use vmove_node::peer::{PeerTarget, SessionId, Token};
use vmove_node::record::VmRecord;
use vmove_types::check::Blocker;
use vmove_types::progress::{GuestPlace, MissingDevice, Outcome, Phase, Progress};
use vmove_types::report::{PhaseTime, Report};
use vmove_types::spec::{MigrationSpec, Mode, Visit};

use crate::ownership::{DestinationState, SourceState};
use crate::proto::message::{Complete, Home, MovedDisk, Prepare};

/// How a session ended whose guest stayed at the source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CalledOff {
    /// Why.
    pub why: String,
    /// Somebody asked for it.
    pub cancelled: bool,
    /// What was in the way, if it was refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blockers: Vec<Blocker>,
    /// From the request to this end, in milliseconds.
    pub elapsed_ms: f64,
    /// How far it was; an older daemon has not noted that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reached: Option<Box<Reached>>,
}

/// How far a session was when it was called off.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reached {
    /// The mode, if that was chosen by then.
    pub mode: Option<String>,
    /// The phase that it was in.
    pub phase: Phase,
    /// Those before.
    pub phases: Vec<PhaseTime>,
    /// Bytes of pages that had crossed.
    pub bytes_done: u64,
    /// The same, with what was still to cross.
    pub bytes_total: u64,
    /// Bytes on the page connections.
    pub bytes_sent: u64,
}

impl Reached {
    /// What a session shows now.
    pub(crate) fn of(now: &Progress) -> Self {
        Self {
            mode: now.mode.clone(),
            phase: now.phase,
            phases: now.phases.clone(),
            bytes_done: now.bytes_done,
            bytes_total: now.bytes_total,
            bytes_sent: now.bytes_sent,
        }
    }

    /// Shows it again.
    fn show(&self, progress: &mut Progress) {
        progress.mode.clone_from(&self.mode);
        progress.phase = self.phase;
        progress.phases.clone_from(&self.phases);
        progress.bytes_done = self.bytes_done;
        progress.bytes_total = self.bytes_total;
        progress.bytes_sent = self.bytes_sent;
    }
}

impl CalledOff {
    /// The same for people.
    pub(crate) fn outcome(&self) -> Outcome {
        if self.blockers.is_empty() {
            let (error, cancelled) = (self.why.clone(), self.cancelled);
            Outcome::Failed { error, guest: GuestPlace::Source, cancelled }
        } else {
            Outcome::Refused { blockers: self.blockers.clone() }
        }
    }

    /// Shows how far it was.
    pub(crate) fn show(&self, progress: &mut Progress) {
        progress.elapsed_ms = self.elapsed_ms;
        if let Some(reached) = &self.reached {
            reached.show(progress);
        }
    }
}

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
    /// QEMU has ended here and its memory is freed, or an operator takes care of both: nothing is left to do.
    pub freed: bool,
    /// The guest stays here, and the destination, which may hold its device state, has not heard so yet.
    #[serde(default)]
    pub untold: bool,
    /// Called off, and the guest is not known to run here again.
    #[serde(default)]
    pub to_resume: bool,
    /// What the guest was asked to do about its devices: it is undone if the guest stays.
    #[serde(default)]
    pub detached: Detached,
    /// The group that it moves with, whose decision commits it (`group::journals`).
    #[serde(default)]
    pub group: Option<SessionId>,
    /// Devices that the guest lacks since then, here or at the destination.
    #[serde(default)]
    pub missing: Vec<MissingDevice>,
    /// Images that move with the guest: put aside or deleted in the end.
    #[serde(default)]
    pub disks: Vec<LeftImage>,
    /// Of these, those that follow it: the destination reads them when it is given up.
    #[serde(default)]
    pub after: Vec<ServedDisk>,
    /// The guest's memory is at the destination, and disks follow: nothing of QEMU here is needed any more.
    #[serde(default)]
    pub memory_is_there: bool,
    /// The visit that the guest comes back from.
    #[serde(default)]
    pub home: Option<Home>,
    /// What the report is to say of the time before.
    pub report: Report,
    /// How it ended, if the guest stayed here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub called_off: Option<CalledOff>,
}

/// A file as it was when it was noted: another that has taken its name since is not touched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftImage {
    /// The disk's name.
    pub name: String,
    /// Path.
    pub path: PathBuf,
    /// Which file it is; `None` for a block device.
    pub file: Option<FileId>,
}

/// A disk that follows its guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedDisk {
    /// As the destination was told of it.
    pub told: MovedDisk,
    /// Its image here.
    pub path: PathBuf,
}

/// Which file of this host something is, whatever it is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// The device that its file system is on.
    pub dev: u64,
    /// Its number there. A file system gives it to another file when this one is gone.
    pub ino: u64,
    /// When it was made, in nanoseconds since 1970, where the file system tells: so another file of that number is not taken for it.
    pub born: Option<u64>,
}

impl FileId {
    /// The regular file that has this path now.
    pub(crate) fn at(path: &Path) -> std::io::Result<Option<Self>> {
        Ok(Self::of(&path.symlink_metadata()?))
    }

    /// The regular file of which this was told.
    pub(crate) fn of(meta: &Metadata) -> Option<Self> {
        let born = meta.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let born = born.and_then(|at| u64::try_from(at.as_nanos()).ok());
        meta.is_file().then(|| Self { dev: meta.dev(), ino: meta.ino(), born })
    }

    /// Whether this file has this path (still).
    pub(crate) fn is_at(self, path: &Path) -> bool {
        Self::at(path).is_ok_and(|found| found == Some(self))
    }
}

impl SourceRecord {
    /// The guest was asked for devices, or was quiesced, and is not known to be as before.
    pub(crate) fn owes_devices(&self) -> bool {
        self.detached != Detached::default()
    }

    /// The guest, which stays, has got back its devices but for these.
    pub(crate) fn are_back(&mut self, but_for: &[MissingDevice]) {
        self.detached = Detached::default();
        self.missing = but_for.to_vec();
    }

    /// Notes a state, and what is to be done in it, should this process be killed at once.
    pub(crate) fn enter(&mut self, next: SourceState) {
        if next == SourceState::Aborted {
            self.to_resume = true;
            // A destination that holds the device state waits for our word, which may be lost with the connection.
            self.untold |= self.state == SourceState::Stopped;
        }
        self.state = next;
    }
}

/// What the destination must find again after a kill.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DestinationRecord {
    /// Session.
    pub id: SessionId,
    /// When that was: RFC 3339, UTC.
    #[serde(default)]
    pub began_at: Option<String>,
    /// What the source asked for.
    pub prepare: Prepare,
    /// Who owns the guest.
    pub state: DestinationState,
    /// The VM here, once its QEMU was started.
    pub vm: Option<VmRecord>,
    /// The descriptor that serves faults, as numbered inside QEMU.
    pub fault_fd: Option<i32>,
    /// Mode the source has chosen, once the guest was stopped.
    pub mode: Option<Mode>,
    /// The final set has been applied to the page maps: they can be trusted.
    pub final_applied: bool,
    /// Fabric in use.
    pub fabric: vmove_fabric::FabricKind,
    /// libvirt was told that it may go on: from then on it decides whether the guest runs here.
    #[serde(default)]
    pub let_go: bool,
    /// libvirt has had the guest run here: what the source holds is an old copy.
    #[serde(default)]
    pub ran: bool,
    /// The source has said that it freed its side: it will not ask again.
    #[serde(default)]
    pub released: bool,
    /// An operator ended the guest here, though pages were missing. It has run here: the source must not take it for one that never did.
    #[serde(default)]
    pub abandoned: bool,
    /// What the source is told when all pages are here: it may ask again when this process has ended.
    #[serde(default)]
    pub complete: Option<Box<Complete>>,
    /// Gone, and its QEMU and files may still be here: a daemon that is started anew removes them.
    #[serde(default)]
    pub to_remove: bool,
    /// The VM's folder was made for this session. Otherwise an earlier VM of that name has left its log there, which stays.
    #[serde(default)]
    pub folder_is_ours: bool,
    /// Devices that the guest lacks here.
    #[serde(default)]
    pub missing: Vec<MissingDevice>,
    /// Images that were made for the disks that move.
    #[serde(default)]
    pub images: Vec<LeftImage>,
    /// A guest that came for a visit is to stay: the rest of its memory is fetched.
    #[serde(default)]
    pub stays: bool,
    /// Where the home of a guest that came for a visit is reached: `host:port`.
    #[serde(default)]
    pub home_address: Option<String>,
    /// How it ended, if the guest stayed at the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub called_off: Option<CalledOff>,
    /// What the source has told of a migration that is over, and this side's own part of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole_report: Option<Box<Report>>,
}

impl DestinationRecord {
    /// The guest is here for a visit: only what it touches is fetched.
    pub(crate) fn is_visit(&self) -> bool {
        self.prepare.spec.visit == Visit::Go && !self.stays
    }

    /// The same, and the guest is ours.
    pub(crate) fn is_visit_of_owner(&self) -> bool {
        self.is_visit() && self.state == DestinationState::Owner && !self.abandoned
    }

    /// What a report says from the beginning on.
    pub(crate) fn report(&self) -> Report {
        let mode = self.mode.or_else(|| self.prepare.spec.mode.fixed());
        let mode = mode.map(|mode| mode.to_string()).unwrap_or_default();
        Report {
            schema: 1,
            id: self.id.to_string(),
            began_at: self.began_at.clone(),
            vm: self.prepare.vm.clone(),
            source: self.prepare.source.clone(),
            mode,
            memory: self.prepare.backing.name().to_owned(),
            ..Report::default()
        }
    }

    /// Notes a state, and what is to be done in it, should this process be killed at once.
    pub(crate) fn enter(&mut self, next: DestinationState) {
        // Not on every line: what is here by then may belong to a later session.
        if next == DestinationState::Gone && self.state != DestinationState::Gone {
            self.to_remove = true;
        }
        self.state = next;
    }

    /// Takes what a VM that came later has for that one's.
    pub(crate) fn leave_to(&mut self, later: &VmRecord) {
        self.folder_is_ours = false;
        if let Some(vm) = &mut self.vm {
            vm.ram.retain(|file| later.ram.iter().all(|its| its.path != file.path));
        }
    }

    /// Notes what is still here once removal was tried: the next process of the daemon tries again, and with nothing else. What is gone by now may
    /// belong to a later VM by then. `others_left`: something is here that is not noted by its path.
    pub(crate) fn note_removal(&mut self, others_left: bool) {
        let mut left = others_left;
        if let Some(vm) = &mut self.vm {
            vm.ram.retain(|file| may_be_there(&file.path));
            self.folder_is_ours &= may_be_there(&vm.vm_dir);
            left |= self.folder_is_ours || !vm.ram.is_empty();
        }
        self.to_remove = left;
    }

    /// The guest is to run here once it is ours: it ran at the source, and nobody asked for it to stay paused.
    pub(crate) const fn is_to_run(&self) -> bool {
        self.prepare.was_running && !self.prepare.spec.paused
    }
}

/// What cannot be looked at may be there.
fn may_be_there(path: &Path) -> bool {
    path.symlink_metadata().map_or_else(|error| error.kind() != ErrorKind::NotFound, |_| true)
}
