//! Move plans: sequences of migrations that are kept in the store, so that any bridge can go on with them.

pub mod make;
pub mod mover;
pub mod run;
#[cfg(test)]
pub(crate) mod tests;

use sched_bridge::model::{Assignment, NodeName, VmName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::schema;
use crate::lease::LeaseId;

/// A plan, as it is kept in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// Its id.
    #[schema(value_type = String)]
    pub id: LeaseId,
    /// What it is for (`evacuate n1`).
    pub purpose: String,
    /// When it was made, by the time of day. Unit: milliseconds since 1970-01-01 00:00 UTC.
    pub made_wall_ms: u64,
    /// Migrations in the order in which they were planned.
    pub steps: Vec<PlanStep>,
    /// Switches between VMs of the same cluster, summed over all pairs: before and after.
    pub hops: HopsGain,
    /// What could not be planned, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// How far it is.
    pub state: PlanState,
    /// The bridge that runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner: Option<Runner>,
}

/// What a plan gains.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HopsGain {
    /// Before.
    pub before: u64,
    /// After.
    pub after: u64,
}

/// A bridge that runs a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Runner {
    /// Which run of which bridge.
    pub id: String,
    /// Goes up while it is alive.
    pub beat: u64,
}

/// How far a plan is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum PlanState {
    /// Not run yet.
    Planned,
    /// At work.
    Running,
    /// Every step is done.
    Done,
    /// A step failed; no later one was begun. Running it again goes on.
    Stopped {
        /// What happened, and what to do.
        reason: String,
    },
}

/// One migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlanStep {
    /// The VM.
    #[schema(value_type = String)]
    pub vm: VmName,
    /// Where it is.
    #[schema(value_type = String)]
    pub from: NodeName,
    /// Where it goes, and what it gets there.
    #[schema(value_type = schema::Assignment)]
    pub to: Assignment,
    /// Memory that is moved. Unit: MiB.
    pub memory_mib: u64,
    /// A place to wait in, because VMs wait for each other's places; a later step takes the VM on.
    #[serde(default)]
    pub spare: bool,
    /// How far it is.
    pub state: StepState,
}

/// How far a step is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum StepState {
    /// Not begun.
    Pending,
    /// Begun. Its end may not have been written down: where the VM is, tells.
    Moving,
    /// The VM is there.
    Done {
        /// What the migration took. Unit: milliseconds.
        total_ms: u64,
        /// How long the guest stood still. Unit: microseconds.
        downtime_us: u64,
    },
    /// The VM is where it was.
    Failed {
        /// What the daemon said.
        reason: String,
    },
}

impl PlanStep {
    /// Whether it is over and well.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.state, StepState::Done { .. })
    }
}

impl Plan {
    /// Steps that must be done before step `at`: those that free something where it goes, and earlier moves of the same VM.
    pub fn before(&self, at: usize) -> impl Iterator<Item = usize> + '_ {
        let later = &self.steps[at];
        let needs = move |earlier: &PlanStep| earlier.vm == later.vm || earlier.from == later.to.node;
        self.steps[..at].iter().enumerate().filter(move |(_, earlier)| needs(earlier)).map(|(index, _)| index)
    }
}
