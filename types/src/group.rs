//! Several VMs that move at one barrier: all of them, or none.

use serde::{Deserialize, Serialize};

use crate::migration::MigrateRequest;
use crate::problem::Exit;
use crate::progress::{GuestPlace, Outcome, Progress};

/// Moves several VMs of a node at one barrier: all of them, or none.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct GroupRequest {
    /// Two VMs or more, each with its destination and its options.
    pub members: Vec<MigrateRequest>,
}

/// A group was taken.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GroupTaken {
    /// Id of the group.
    pub id: String,
    /// Ids of the members' migrations, in the order of the request.
    pub members: Vec<String>,
    /// What was done first with guests whose memory is private since a fork.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A point at which the members of a group wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Gate {
    /// Its destination has room for it, and a QEMU that waits.
    Prepared,
    /// It is quiesced, if a script was named.
    Quiesced,
    /// It may be stopped: no further round pays.
    Ready,
    /// It is about to be stopped.
    Stop,
    /// Its destination holds the device state: once all are here, the group is decided.
    Loaded,
}

impl Gate {
    /// All of them, in order.
    pub const ALL: [Self; 5] = [Self::Prepared, Self::Quiesced, Self::Ready, Self::Stop, Self::Loaded];

    /// The word, as it is in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prepared => "prepared",
            Self::Quiesced => "quiesced",
            Self::Ready => "ready",
            Self::Stop => "stop",
            Self::Loaded => "loaded",
        }
    }
}

/// How long a member waited for the others at a gate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GateWait {
    /// Which gate.
    pub gate: Gate,
    /// Which member.
    pub vm: String,
    /// For so long, in milliseconds. At the gate `stop` the guest still runs; at `loaded` it stands still.
    pub ms: f64,
}

/// What a group says of itself, apart from the reports of its members.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct GroupReport {
    /// From the request to the end of the last member. `None` if the daemon was started anew meanwhile.
    pub total_ms: Option<f64>,
    /// How long each member waited for the others, gate by gate. Empty of gates that were passed before the daemon was started anew.
    pub waits: Vec<GateWait>,
    /// Between the first guest's stop and the last one's. `None` if the daemon was started anew meanwhile.
    pub stop_spread_ms: Option<f64>,
    /// Between the first guest that ran at its destination and the last one. `None` as above, or if a guest was left paused.
    pub resume_spread_ms: Option<f64>,
    /// From the first guest's stop until the last one ran: for so long the group as a whole did not work. `None` as above.
    pub downtime_ms: Option<f64>,
    /// Migrations by which a member followed the others later, whose destination had lost it after all were committed.
    pub followed: Vec<String>,
}

/// How a group ended, or that it has not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum GroupOutcome {
    /// At work, and any failure brings all guests back.
    Gathering,
    /// At work, and all go forward: nothing brings a guest back any more.
    Decided,
    /// Every guest is at its destination with all its memory.
    Done {
        /// The group's own figures.
        report: Box<GroupReport>,
    },
    /// No guest has moved.
    CalledOff {
        /// Which member was the reason, and why.
        error: String,
        /// An operator asked for the end.
        cancelled: bool,
        /// A member was refused before anything was changed.
        refused: bool,
    },
    /// The group was decided, and a member is not at its destination, or not whole there.
    Incomplete {
        /// Which, why, and what to do.
        error: String,
    },
}

impl GroupOutcome {
    /// Whether there is nothing more to come.
    #[must_use]
    pub const fn is_end(&self) -> bool {
        !matches!(self, Self::Gathering | Self::Decided)
    }
}

/// A group now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GroupProgress {
    /// Its id.
    pub id: String,
    /// The members' migrations: of one that followed the others later, the last.
    pub members: Vec<Progress>,
    /// The gate at which members wait, if any does.
    pub gate: Option<Gate>,
    /// The VMs that they wait for there.
    pub waiting_for: Vec<String>,
    /// How it ended, or how it stands.
    pub outcome: GroupOutcome,
}

/// Groups of a node, those at work first, then newest first.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct GroupList {
    /// Snapshots.
    pub groups: Vec<GroupProgress>,
}

impl GroupProgress {
    /// The exit code for the end of a group.
    #[must_use]
    pub fn exit(&self) -> Exit {
        let needs_recovery =
            self.members.iter().any(|member| Exit::of_progress(member) == Exit::NeedsRecovery);
        let unverified = |member: &Progress| {
            matches!(&member.outcome, Outcome::Failed { guest: GuestPlace::Destination, .. })
        };
        match &self.outcome {
            GroupOutcome::Gathering | GroupOutcome::Decided => Exit::Unreachable,
            GroupOutcome::Incomplete { .. } => Exit::NeedsRecovery,
            _ if needs_recovery || self.members.iter().any(unverified) => Exit::NeedsRecovery,
            GroupOutcome::Done { .. } => Exit::Done,
            GroupOutcome::CalledOff { refused: true, .. } => Exit::Refused,
            GroupOutcome::CalledOff { .. } => Exit::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Role;

    fn group(outcome: GroupOutcome, member: Outcome) -> GroupProgress {
        let member = Progress { outcome: member, ..Progress::begun("1", "web", Role::Source, "b") };
        GroupProgress {
            id: "9".to_owned(),
            members: vec![member],
            gate: None,
            waiting_for: Vec::new(),
            outcome,
        }
    }

    #[test]
    fn the_exit_code_says_whether_all_moved_or_none() {
        let failed = |guest| Outcome::Failed { error: String::new(), guest, cancelled: false };
        let off = |refused| GroupOutcome::CalledOff { error: String::new(), cancelled: false, refused };
        assert_eq!(group(off(true), failed(GuestPlace::Source)).exit(), Exit::Refused);
        assert_eq!(group(off(false), failed(GuestPlace::Source)).exit(), Exit::Failed);
        assert_eq!(group(off(false), failed(GuestPlace::PausedAtSource)).exit(), Exit::NeedsRecovery);
        let done = || GroupOutcome::Done { report: Box::default() };
        assert_eq!(group(done(), Outcome::Done { report: Box::default() }).exit(), Exit::Done);
        let split = GroupOutcome::Incomplete { error: String::new() };
        assert_eq!(group(split, failed(GuestPlace::Source)).exit(), Exit::NeedsRecovery);
    }
}
