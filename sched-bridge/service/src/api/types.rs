//! Requests and answers. Types of the library appear as it writes them; here they are described for OpenAPI.

use std::collections::BTreeMap;

use sched_bridge::model::{Assignment, ClusterName, Node, NodeState};
use sched_bridge::place::{ClusterRequest, Explanation, Placement};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::schema;
use crate::lease::{Held, Lease, LeaseId, Usage};

/// What a bridge says of itself.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct BridgeInfo {
    /// Version of vbridged.
    pub version: String,
    /// Its store.
    pub store: String,
    /// Transactions of the store that it has seen.
    pub revision: u64,
    /// Why it is out of touch with the store; absent if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_of_touch: Option<String>,
    /// Nodes of the fleet.
    pub nodes: usize,
    /// Switches.
    pub switches: usize,
    /// Leases.
    pub leases: usize,
    /// What in the store cannot be read, or does not fit together, by key.
    pub problems: BTreeMap<String, String>,
}

/// A request for a lease.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LeaseRequest {
    /// Id that the lease shall have: 1 to 64 of `A-Z a-z 0-9 . _ -`. Repeating a request with the same id gives the same lease; without one, a
    /// lost answer is a lost lease until it ends by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub id: Option<LeaseId>,
    /// For whom: a user, a job.
    pub holder: String,
    /// Time to live without a heartbeat. Unit: milliseconds. 60 s if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u64>,
    /// Only say where it would go.
    #[serde(default)]
    pub what_if: bool,
    /// Say of every node why it was chosen, left alone or ruled out. Only with `what_if`; a request that does not fit is then answered by
    /// an explanation with status 200, and why in `refused`.
    #[serde(default)]
    pub explain: bool,
    /// A virtual cluster to be placed, as the library's `ClusterRequest`. One of `request`, `text` and `assignments`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub request: Option<ClusterRequest>,
    /// A virtual cluster file, an instance type string, or the output of `openstack flavor show -f json`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<RequestText>,
    /// Exactly these devices, cores and memory, for a scheduler that decides itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<schema::Assignment>>)]
    pub assignments: Option<Vec<Assignment>>,
    /// Name of the virtual cluster, where `assignments` are given or `text` has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub cluster: Option<ClusterName>,
}

/// A request in one of its spellings.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RequestText {
    /// The spelling.
    pub format: RequestFormat,
    /// The text.
    pub text: String,
    /// How many VMs, where the spelling describes one.
    #[serde(default = "one")]
    pub count: u32,
}

fn one() -> u32 {
    1
}

/// A spelling of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum RequestFormat {
    /// `cg1.small; xpus=2; xpu_arch=fermi`.
    Instance,
    /// Output of `openstack flavor show -f json`.
    Flavor,
    /// A virtual cluster in TOML.
    Toml,
    /// A virtual cluster in YAML.
    Yaml,
}

/// A lease.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct LeaseInfo {
    /// Its id.
    #[schema(value_type = String)]
    pub id: LeaseId,
    /// Who has it.
    pub holder: String,
    /// The virtual cluster.
    #[schema(value_type = String)]
    pub cluster: ClusterName,
    /// What is held.
    #[schema(value_type = Vec<schema::Held>)]
    pub held: Vec<Held>,
    /// Without a heartbeat for so long, it ends. Unit: milliseconds.
    pub ttl_ms: u64,
    /// Heartbeats so far.
    pub beats: u64,
    /// When it was granted, by the time of day. Unit: milliseconds since 1970-01-01 00:00 UTC.
    pub granted_wall_ms: u64,
    /// What was used until the last heartbeat or change.
    pub usage: Usage,
}

impl From<&Lease> for LeaseInfo {
    fn from(lease: &Lease) -> Self {
        Self {
            id: lease.id.clone(),
            holder: lease.holder.clone(),
            cluster: lease.cluster.clone(),
            held: lease.held.clone(),
            ttl_ms: lease.ttl_ms,
            beats: lease.beats,
            granted_wall_ms: lease.granted.wall_ms,
            usage: lease.usage,
        }
    }
}

/// The answer to a request for a lease.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct LeaseAnswer {
    /// The lease; absent with `what_if`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<LeaseInfo>,
    /// Where it was placed and how well; absent if the caller placed it, or the request was a repeated one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Placement>)]
    pub placement: Option<Placement>,
    /// The lease was there already.
    pub again: bool,
    /// Every node: why it was chosen, left alone or ruled out. Only with `explain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub explanation: Option<Explanation>,
    /// Why there is no placement. Only with `explain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// Leases.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct LeaseList {
    /// By id.
    pub leases: Vec<LeaseInfo>,
}

/// Which leases.
#[derive(Debug, Clone, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct LeaseQuery {
    /// Only those of this holder.
    #[serde(default)]
    pub holder: Option<String>,
}

/// A node of the fleet.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NodeDetail {
    /// Its inventory.
    #[schema(value_type = Object)]
    pub node: Node,
    /// VMs with something held here.
    pub vms: Vec<String>,
    /// Devices that are held, by address.
    pub held_devices: Vec<String>,
}

/// Nodes.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NodeList {
    /// By name.
    pub nodes: Vec<NodeSummary>,
}

/// A node in short.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NodeSummary {
    /// Its name.
    pub name: String,
    /// `up`, `drained` or `down`.
    #[schema(value_type = String)]
    pub state: NodeState,
    /// GPUs, all.
    pub gpus: usize,
    /// GPUs that are not held.
    pub gpus_free: usize,
    /// Adapters and virtual functions, all.
    pub adapters: usize,
    /// Hardware threads, all.
    pub cores: u32,
    /// Hardware threads that are not held.
    pub cores_free: u32,
    /// Memory, all. Unit: MiB.
    pub memory_mib: u64,
    /// Memory that is not held. Unit: MiB.
    pub memory_free_mib: u64,
    /// VMs with something held here.
    pub vms: u32,
}

/// Changes the state of a node.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeStateRequest {
    /// `up`, `drained` or `down`.
    #[schema(value_type = String)]
    pub state: NodeState,
}

/// A topology, as a text in one of its formats.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TopologyText {
    /// The format.
    pub format: TopologyFormat,
    /// The text.
    pub text: String,
}

/// A format of topologies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
pub enum TopologyFormat {
    /// Slurm's `topology.conf`.
    #[serde(rename = "topology.conf")]
    #[value(name = "topology.conf")]
    Conf,
    /// Slurm's `topology.yaml`.
    #[serde(rename = "topology.yaml")]
    #[value(name = "topology.yaml")]
    Yaml,
    /// Output of `ibnetdiscover`.
    #[serde(rename = "ibnetdiscover")]
    #[value(name = "ibnetdiscover")]
    Ibnetdiscover,
    /// Labels of Kubernetes nodes (`kubectl get nodes -o json`).
    #[serde(rename = "labels")]
    #[value(name = "labels")]
    Labels,
    /// Plain TOML.
    #[serde(rename = "toml")]
    #[value(name = "toml")]
    Toml,
}

/// How records are wanted.
#[derive(Debug, Clone, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct AccountQuery {
    /// `jsonl` (one JSON object a line) or `csv`.
    #[serde(default)]
    pub format: Option<String>,
    /// Only of this holder.
    #[serde(default)]
    pub holder: Option<String>,
    /// Only what ended at or after this time of day. Unit: milliseconds since 1970-01-01 00:00 UTC.
    #[serde(default)]
    pub since_ms: Option<u64>,
}
