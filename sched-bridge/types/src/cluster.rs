//! Virtual clusters as a whole: a lease with its VMs, which grows, shrinks, moves, is forked, and goes back to a checkpoint.

use sched_bridge::model::{ClusterName, NodeName, VmName};
use serde::{Deserialize, Serialize};
use vmove_types::fork_report::ChildNic;

use crate::lease::LeaseId;
use crate::requests::{LeaseInfo, StartAll, StartedVm};

/// Clusters.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClusterList {
    /// By id.
    pub clusters: Vec<ClusterSummary>,
}

/// A cluster in a line.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClusterSummary {
    /// Id of its lease, by which it is named.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub id: LeaseId,
    /// Its name, with which those of its VMs begin.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub cluster: ClusterName,
    /// The holder of its lease.
    pub holder: String,
    /// Number of its VMs.
    pub vms: usize,
    /// Those of them that are known to run.
    pub running: usize,
    /// Nodes that it is on, by name.
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub nodes: Vec<NodeName>,
    /// Hops between its VMs.
    pub hops: ClusterHops,
    /// Time after which its lease ends without a heartbeat; absent while VMs of it run. Unit: milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends_in_ms: Option<u64>,
}

/// Hops between the VMs of a cluster: 0 within a node, 1 below one leaf switch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClusterHops {
    /// Most between two of them; absent if two are not connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most: Option<u32>,
    /// Summed over all pairs that are connected.
    pub sum: u64,
}

/// A cluster and its VMs, as their nodes say now.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClusterInfo {
    /// In a line.
    #[serde(flatten)]
    pub summary: ClusterSummary,
    /// Its VMs, by name.
    pub members: Vec<ClusterVm>,
    /// It was started as a whole, so that the bridge knows how further VMs of it are started.
    pub can_grow: bool,
    /// Its checkpoints, by name.
    pub checkpoints: Vec<String>,
}

/// A VM of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClusterVm {
    /// Its name.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub vm: VmName,
    /// Its node.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub node: NodeName,
    /// What its node says of it.
    pub state: VmState,
    /// Addresses of its devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// Why its state is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// State of a VM of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum VmState {
    /// Its node lists it.
    Running,
    /// It is being migrated.
    Moving,
    /// Its node does not list it.
    Absent,
    /// Its node does not answer.
    Unknown,
}

/// How many VMs a cluster is to have.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ResizeRequest {
    /// The group of VMs; may be left out for a cluster of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// How many VMs the group is to have, 1 or more.
    pub count: u32,
    /// How new VMs are started; as the cluster was, if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartAll>,
}

/// A cluster that has grown or shrunk.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Resized {
    /// Its lease.
    pub lease: LeaseInfo,
    /// VMs that were added, and run.
    pub added: Vec<StartedVm>,
    /// VMs that were stopped.
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub removed: Vec<VmName>,
    /// Hops between its VMs before.
    pub before: ClusterHops,
    /// And now.
    pub after: ClusterHops,
}

/// Makes a copy of a running cluster.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ForkClusterRequest {
    /// Name of the new cluster. Its VMs are named after it, and numbered as those of the old one.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub name: ClusterName,
    /// Id of its lease; the name, if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub id: Option<LeaseId>,
    /// Fork this VM alone, so many times; without it, each VM of the cluster once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<ForkOne>,
    /// Each VM is forked by itself, at another moment than the others. Needed for VMs with devices, which a guest can only let go while it runs.
    #[serde(default)]
    pub each_alone: bool,
}

/// Copies of one VM of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ForkOne {
    /// The VM.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub vm: VmName,
    /// How many, 1 or more.
    pub count: u32,
}

/// A cluster that was forked.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClusterForked {
    /// The lease of the new cluster.
    pub lease: LeaseInfo,
    /// Which VM of it came from which, by name.
    pub members: Vec<ForkedMember>,
    /// What the operator should know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A VM of a forked cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkedMember {
    /// The VM that was forked.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub parent: VmName,
    /// Its node.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub parent_node: NodeName,
    /// The new VM.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub vm: VmName,
    /// Its node.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub node: NodeName,
    /// How long the parent stood still, at the barrier and for its freeze; never more than this. Unit: milliseconds.
    pub stood_still_ms: f64,
    /// Its network: `none`, `up`, or why it is down.
    pub network: String,
    /// MAC addresses of its NICs, and those of its parent's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<ChildNic>,
}

/// Keeps a cluster as it is at one moment.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CheckpointRequest {
    /// Name of the checkpoint: 1 to 64 of `A-Z a-z 0-9 . _ -`, like an id.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub name: LeaseId,
    /// Each VM is kept as it is at another moment than the others. Needed for VMs with devices, which a guest can only let go while it runs.
    #[serde(default)]
    pub each_alone: bool,
}

/// A cluster as it was at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CheckpointInfo {
    /// Its name.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub name: LeaseId,
    /// Id of the cluster's lease.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub id: LeaseId,
    /// The cluster.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub cluster: ClusterName,
    /// The holder of its lease.
    pub holder: String,
    /// When it was made, by the time of day. Unit: milliseconds since 1970-01-01 00:00 UTC.
    pub made_wall_ms: u64,
    /// All VMs stood still at once: what one knows of another is consistent.
    pub at_barrier: bool,
    /// Its VMs.
    pub members: Vec<CheckpointVm>,
    /// What the operator should know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A VM of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CheckpointVm {
    /// The VM.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub vm: VmName,
    /// The node on which it was.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub node: NodeName,
    /// Name of its template there, or in the folder that the nodes share.
    pub template: String,
    /// Size of the template on disk. Unit: bytes.
    pub disk_bytes: u64,
    /// Roles of the devices that it owned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub roles: Vec<String>,
    /// How long it stood still, at the barrier and for its freeze; never more than this. Unit: milliseconds.
    pub stood_still_ms: f64,
}

/// Checkpoints.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CheckpointList {
    /// By name.
    pub checkpoints: Vec<CheckpointInfo>,
}

/// Lets a cluster run again as it was at its checkpoint.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct RestoreClusterRequest {
    /// Nodes that are lost: powered off, so that no VM of the cluster can run there any more. They take no VMs from then on (`down`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub lost: Vec<NodeName>,
}

/// A cluster that runs again.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClusterRestored {
    /// Its new lease.
    pub lease: LeaseInfo,
    /// The moment that it went back to: what its VMs did later is lost. Unit: milliseconds since 1970-01-01 00:00 UTC.
    pub made_wall_ms: u64,
    /// Its VMs.
    pub members: Vec<RestoredMember>,
}

/// A VM that runs again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct RestoredMember {
    /// The VM.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub vm: VmName,
    /// Its node.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub node: NodeName,
    /// Its network: `none`, `up`, or why it is down.
    pub network: String,
    /// It was running before: the request was a repeated one.
    pub again: bool,
}
