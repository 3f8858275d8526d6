//! Move plans: migrations in a feasible sequence. Plans are kept in the store, so that any bridge can continue them.

use sched_bridge::model::{Assignment, NodeName, VmName};
use serde::{Deserialize, Serialize};

use crate::lease::LeaseId;
use crate::request_text::RequestText;

/// What a plan is to achieve.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields, tag = "for")]
pub enum PlanRequest {
    /// Empty a node.
    Evacuate {
        /// The node.
        node: String,
    },
    /// Bring a cluster, or all clusters, closer together.
    Compact {
        /// The cluster; all, if left out.
        #[serde(default)]
        cluster: Option<String>,
    },
    /// Move a cluster off some nodes, all of it placed anew.
    Relocate {
        /// The cluster.
        cluster: String,
        /// Nodes that it leaves.
        away: Vec<String>,
    },
    /// Make room for a request that does not fit now.
    MakeRoom {
        /// The request.
        text: RequestText,
        /// Name of the virtual cluster, where the text has none.
        #[serde(default)]
        cluster: Option<String>,
    },
}

/// A plan, as kept in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Plan {
    /// Its id.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub id: LeaseId,
    /// Its purpose (`evacuate n1`).
    pub purpose: String,
    /// When it was made, by the time of day. Unit: milliseconds since 1970-01-01 00:00 UTC.
    pub made_wall_ms: u64,
    /// Its migrations, in sequence.
    pub steps: Vec<PlanStep>,
    /// Hops between the VMs of each cluster, summed over all pairs.
    pub hops: HopsGain,
    /// The node that it is to empty: running the plan drains it, if it is up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub drains: Option<NodeName>,
    /// What could not be planned, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Its state.
    pub state: PlanState,
    /// The bridge that runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner: Option<Runner>,
}

/// Hops before and after a plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HopsGain {
    /// Before the plan.
    pub before: u64,
    /// After it.
    pub after: u64,
}

/// A bridge that runs a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Runner {
    /// Id of the run.
    pub id: String,
    /// Increases while the bridge is alive.
    pub beat: u64,
}

/// State of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum PlanState {
    /// Not run yet.
    Planned,
    /// Being run.
    Running,
    /// Every step is done.
    Done,
    /// A step failed, and no later one was begun. Running the plan again continues it.
    Stopped {
        /// What failed, and what to do.
        reason: String,
    },
}

/// One migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PlanStep {
    /// The VM.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub vm: VmName,
    /// Its node.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub from: NodeName,
    /// Its destination, and what it gets there.
    pub to: Assignment,
    /// Memory that is moved. Unit: MiB.
    pub memory_mib: u64,
    /// The destination is a spare place, because VMs wait for each other's places; a later step moves the VM on.
    #[serde(default)]
    pub spare: bool,
    /// Steps of the same number move at one barrier: all of them, or none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<usize>,
    /// How long the VM is predicted to be without its devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outages: Vec<DeviceOutage>,
    /// Its state.
    pub state: StepState,
}

/// How long a VM is predicted to be without a device: until the guest, and those that move with it, have let theirs go, their memory has crossed
/// a network of 10 Gbit/s, and QEMU has pinned it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DeviceOutage {
    /// The address of the device at the source.
    pub device: String,
    /// Unit: milliseconds.
    pub outage_ms: u64,
}

/// State of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum StepState {
    /// Not begun.
    Pending,
    /// Begun. It may have ended without being recorded: then the VM's node tells how.
    Moving,
    /// The VM is at its destination.
    Done {
        /// Duration of the migration. Unit: milliseconds.
        total_ms: u64,
        /// Downtime of the guest. Unit: microseconds.
        downtime_us: u64,
    },
    /// The VM is still at its source.
    Failed {
        /// The daemon's message.
        reason: String,
    },
}

impl PlanStep {
    /// Whether the VM is at its destination.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.state, StepState::Done { .. })
    }
}

impl Plan {
    /// Steps that must be done before step `at`: those that free something at its destination, and earlier steps of the same VM.
    pub fn before(&self, at: usize) -> impl Iterator<Item = usize> + '_ {
        let later = &self.steps[at];
        let needs = move |earlier: &PlanStep| earlier.vm == later.vm || earlier.from == later.to.node;
        self.steps[..at].iter().enumerate().filter(move |(_, earlier)| needs(earlier)).map(|(index, _)| index)
    }
}
