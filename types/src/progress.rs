//! What a session shows while it runs.

use serde::{Deserialize, Serialize};

use crate::disk::DiskProgress;
use crate::go_home::GoHome;
use crate::promise::Promise;
use crate::report::{FaultStats, PhaseTime, Report};

/// Where a session stands. The order is that of a migration without trouble.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Peer reached, blockers looked for.
    Check,
    /// Destination QEMU started, both sides attached and registered.
    Prepare,
    /// Disks are copied.
    Disks,
    /// Memory is sent ahead while the guest has its devices.
    HeadStart,
    /// The guest is asked to let its devices go.
    Detach,
    /// Pre-copy rounds.
    Rounds,
    /// Guest stopped, device state crossing.
    Switchover,
    /// The destination holds the device state; ownership passes.
    HandOver,
    /// Guest runs at the destination, pages are being fetched.
    Fetch,
    /// Guest and memory are at the destination, disks follow.
    DisksAfter,
    /// All pages are there; source QEMU and memory are being released.
    Finish,
}

impl Phase {
    /// The word used in reports, journals, spans and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Prepare => "prepare",
            Self::Disks => "disks",
            Self::HeadStart => "head-start",
            Self::Detach => "detach",
            Self::Rounds => "rounds",
            Self::Switchover => "switchover",
            Self::HandOver => "hand-over",
            Self::Fetch => "fetch",
            Self::DisksAfter => "disks-after",
            Self::Finish => "finish",
        }
    }
}

/// Which end of the session this daemon is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The guest comes from here.
    Source,
    /// The guest goes here.
    Destination,
}

/// Where the guest is and whether it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum GuestPlace {
    /// It runs (or is paused, if it was) at the source, as if nothing had been asked.
    Source,
    /// It belongs to the destination.
    Destination,
    /// It is paused at the source and needs `vmove recover`.
    PausedAtSource,
    /// It is paused at the destination and needs `vmove recover`.
    PausedAtDestination,
    /// The journal that would say so cannot be read.
    Unknown,
}

impl GuestPlace {
    /// The word, as it is in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
            Self::PausedAtSource => "paused-at-source",
            Self::PausedAtDestination => "paused-at-destination",
            Self::Unknown => "unknown",
        }
    }
}

/// How a session ended, or that it has not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum Outcome {
    /// Still at work.
    Running,
    /// Peer or connection lost after the hand-over: trying again; the guest runs until it needs a missing page.
    Reconnecting {
        /// What was lost.
        error: String,
        /// When. Unit: seconds since 1970-01-01 UTC, by this node's clock.
        #[serde(default)]
        since: u64,
    },
    /// The guest is at the destination with all its memory.
    Done {
        /// The numbers.
        report: Box<Report>,
    },
    /// Blockers were found and nothing was changed.
    Refused {
        /// All of them.
        blockers: Vec<crate::check::Blocker>,
    },
    /// It did not work.
    Failed {
        /// What was expected, what was found, what to do.
        error: String,
        /// Where the guest is now.
        guest: GuestPlace,
        /// An operator asked for the end.
        cancelled: bool,
    },
}

impl Outcome {
    /// Whether there is nothing more to come.
    #[must_use]
    pub const fn is_end(&self) -> bool {
        match self {
            Self::Running | Self::Reconnecting { .. } => false,
            Self::Done { .. } | Self::Refused { .. } | Self::Failed { .. } => true,
        }
    }

    /// Whether the migration still has a hand on its VM: it runs, or it left the guest paused and awaits `recover`.
    #[must_use]
    pub const fn holds_vm(&self) -> bool {
        match self {
            Self::Running | Self::Reconnecting { .. } => true,
            Self::Failed { guest, .. } => {
                matches!(
                    guest,
                    GuestPlace::PausedAtSource | GuestPlace::PausedAtDestination | GuestPlace::Unknown
                )
            }
            Self::Done { .. } | Self::Refused { .. } => false,
        }
    }
}

/// A device that a guest should have and lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MissingDevice {
    /// What it is to the guest.
    pub role: String,
    /// Why it is missing.
    pub why: String,
    /// The node that the guest is on.
    pub node: String,
    /// The command that gives it to the guest, on that node.
    pub mend: String,
}

/// Mode of a guest that is away for a visit, instead of how its memory crosses.
pub const VISIT: &str = "visit";

/// How a guest that visits goes home by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GoingHome {
    /// When.
    pub when: GoHome,
    /// Why the last try has failed, on the node that it visits; it is tried again. `None`: not tried yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

impl GoingHome {
    /// Nothing was tried yet. `None` if nothing takes the guest home by itself.
    #[must_use]
    pub fn of(when: &GoHome) -> Option<Self> {
        when.is_some().then(|| Self { when: when.clone(), failed: None })
    }
}

/// How much of a RAM block has arrived, part by part: a map of it to look at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ArrivedBlock {
    /// RAM block, by the name of its file.
    pub block: String,
    /// Its length. Unit: bytes.
    pub bytes: u64,
    /// For each of its parts, in order and of the same length but for the last: the share of pages that are there and still good. At most 256
    /// parts. Unit: percent, 0 to 100. Of a part with more than 64 pages, 64 are looked at.
    pub parts: Vec<u8>,
}

/// How far the comparison of disks that have moved is (`--verify`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ComparedDisks {
    /// Bytes of all disks, holes included.
    pub bytes_total: u64,
    /// Bytes of these that the source has hashed.
    pub bytes_done: u64,
}

impl ComparedDisks {
    /// So many more bytes are hashed. The last chunk of a disk may be shorter than it counts.
    pub fn add(&mut self, bytes: u64) {
        self.bytes_done = self.bytes_done.saturating_add(bytes).min(self.bytes_total);
    }
}

/// A snapshot of a session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Progress {
    /// Session id.
    pub id: String,
    /// Name of the VM.
    pub vm: String,
    /// The group that it moves with, at the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// This daemon's side.
    pub role: Role,
    /// The other node, as it was named in the request or as it named itself.
    pub peer: String,
    /// Mode, once decided.
    pub mode: Option<String>,
    /// Where it stands.
    pub phase: Phase,
    /// When the request was taken, by this node's clock: RFC 3339, UTC, milliseconds. `None`: not known any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began_at: Option<String>,
    /// Phases that are over. Empty once it is done: the report has them all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<PhaseTime>,
    /// Milliseconds since the request.
    pub elapsed_ms: f64,
    /// Guest memory that has crossed and is still to cross, as far as that is known. Unit: bytes. Zero pages are not counted; a page that the
    /// guest writes to after it has crossed is counted again.
    pub bytes_total: u64,
    /// What of it has crossed. Unit: bytes. It does not fall, and is not above `bytes_total`.
    pub bytes_done: u64,
    /// Bytes on the wire so far.
    pub bytes_sent: u64,
    /// Page payload per second over the last interval.
    pub rate_bytes_per_s: f64,
    /// Pages per second that the guest dirties, from the last scan.
    pub dirty_pages_per_s: f64,
    /// Current round, from 1; 0 before and in `postcopy`.
    pub round: u32,
    /// Fabric in use and why, once agreed on.
    #[serde(default)]
    pub fabric: Option<String>,
    /// Estimated milliseconds to the end, where that can be said.
    pub eta_ms: Option<f64>,
    /// What it has promised to keep its goals, if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promise: Option<Promise>,
    /// What goes wrong though the session goes on, and what would help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// A file that it could not write, why, and since when: it tries again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unwritten: Option<String>,
    /// Page faults so far, at the destination. `None`: none yet. The source hears of them ten times a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub faults: Option<FaultStats>,
    /// Devices that the guest lacks since then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_devices: Vec<MissingDevice>,
    /// Disks that move with the guest, at the source; of disks that follow it, on both sides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskProgress>,
    /// How far the comparison of its disks is, once its memory is at the destination; `None` before that, and if they are not compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared_disks: Option<ComparedDisks>,
    /// What has arrived of the guest's memory, while it is at work. The source hears of it ten times a second.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arrived: Vec<ArrivedBlock>,
    /// Of a visit that something ends by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub going_home: Option<GoingHome>,
    /// How it ended, or `running`.
    pub outcome: Outcome,
}

impl Progress {
    /// A session that has just begun: in [`Phase::Check`], [`Outcome::Running`], and nothing else is known yet.
    #[must_use]
    pub fn begun(id: impl Into<String>, vm: impl Into<String>, role: Role, peer: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            vm: vm.into(),
            group: None,
            role,
            peer: peer.into(),
            mode: None,
            phase: Phase::Check,
            began_at: None,
            phases: Vec::new(),
            elapsed_ms: 0.0,
            bytes_total: 0,
            bytes_done: 0,
            bytes_sent: 0,
            rate_bytes_per_s: 0.0,
            dirty_pages_per_s: 0.0,
            round: 0,
            fabric: None,
            eta_ms: None,
            promise: None,
            warning: None,
            unwritten: None,
            faults: None,
            missing_devices: Vec::new(),
            disks: Vec::new(),
            compared_disks: None,
            arrived: Vec::new(),
            going_home: None,
            outcome: Outcome::Running,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paused_guest_is_still_held() {
        let failed = |guest| Outcome::Failed { error: String::new(), guest, cancelled: false };
        assert!(Outcome::Running.holds_vm());
        assert!(
            failed(GuestPlace::PausedAtSource).holds_vm()
                && failed(GuestPlace::PausedAtDestination).holds_vm()
        );
        assert!(
            !failed(GuestPlace::Source).holds_vm() && !Outcome::Refused { blockers: Vec::new() }.holds_vm()
        );
    }
}
