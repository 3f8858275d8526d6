//! Requests and answers. Types of `vmove-sched` appear as it writes them; here they are described for OpenAPI.

use std::collections::BTreeMap;

use sched_bridge::model::{Assignment, ClusterName, Node, NodeName, NodeState, VmName};
use sched_bridge::place::{ClusterRequest, Explanation, Nearest, Placement};
use serde::{Deserialize, Serialize};

use crate::lease::{Held, LeaseId, Usage};
use crate::plan::Plan;
use crate::request_text::RequestText;
use crate::topology_text::TopologyFormat;
use vmove_types::Backing;

/// Status of a bridge.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct BridgeInfo {
    /// Version of vbridged.
    pub version: String,
    /// Its store.
    pub store: String,
    /// The last transaction of the store that it has seen.
    pub revision: u64,
    /// Why it is out of touch with the store; absent if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_of_touch: Option<String>,
    /// Number of nodes.
    pub nodes: usize,
    /// Number of switches.
    pub switches: usize,
    /// Number of leases.
    pub leases: usize,
    /// Problems by key of the store: values that cannot be read, and leases of resources that do not exist.
    pub problems: BTreeMap<String, String>,
}

/// A request for a lease.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct LeaseRequest {
    /// Id of the new lease: 1 to 64 of `A-Z a-z 0-9 . _ -`. A repeated request with the same id returns the same lease. Without an id,
    /// a lease whose answer was lost stays until its time to live is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub id: Option<LeaseId>,
    /// Without an id: the name of the virtual cluster is the id.
    #[serde(default)]
    pub named: bool,
    /// The holder: a user, a job.
    pub holder: String,
    /// The project on whose account it goes: 1 to 128 bytes without control characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// Time to live without a heartbeat. Unit: milliseconds. Default: 60 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u64>,
    /// Plans move its VMs at one barrier, all of a node or none, as they do those with devices.
    #[serde(default)]
    pub together: bool,
    /// Only answer where it would be placed; lease nothing.
    #[serde(default)]
    pub what_if: bool,
    /// Explain for every node why it was chosen, not needed or ruled out. Only with `what_if`. A request that does not fit is then answered
    /// with status 200, the explanation, and the reason in `refused`.
    #[serde(default)]
    pub explain: bool,
    /// A virtual cluster to be placed, as `ClusterRequest`. Set exactly one of `request`, `text` and `assignments`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<Object>))]
    pub request: Option<ClusterRequest>,
    /// A virtual cluster file, an instance type string, or the output of `openstack flavor show -f json`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<RequestText>,
    /// Exactly these devices, cores and memory, chosen by the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assignments: Option<Vec<Assignment>>,
    /// Name of the virtual cluster, for `assignments` and for texts without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub cluster: Option<ClusterName>,
    /// Start all VMs of the lease on their nodes. If one does not start, those that did are stopped and a new lease is given back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartAll>,
}

/// A lease.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LeaseInfo {
    /// Its id.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub id: LeaseId,
    /// Its holder.
    pub holder: String,
    /// The virtual cluster.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub cluster: ClusterName,
    /// The resources that it holds, by VM and node.
    pub held: Vec<Held>,
    /// Time to live without a heartbeat. Unit: milliseconds.
    pub ttl_ms: u64,
    /// Time after which it ends, unless a heartbeat comes; as far as this bridge has measured. Absent: VMs of it run, it needs no heartbeat,
    /// and ends with the last of them. Unit: milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends_in_ms: Option<u64>,
    /// Heartbeats so far.
    pub beats: u64,
    /// When it was granted, by the time of day. Unit: milliseconds since 1970-01-01 00:00 UTC.
    pub granted_wall_ms: u64,
    /// Usage until the last heartbeat or change.
    pub usage: Usage,
}

/// The answer to a request for a lease.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LeaseAnswer {
    /// The lease; absent with `what_if`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<LeaseInfo>,
    /// Its placement; absent if the caller chose the resources, or for a repeated request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// The lease existed already: the request was a repeated one.
    pub again: bool,
    /// For every node: why it was chosen, not needed or ruled out. Only with `explain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<Object>))]
    pub explanation: Option<Explanation>,
    /// Why there is no placement. Only with `explain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// With which changes it would fit, the nearest first; each was tried. Only with `explain`; other refusals have it in the details of the
    /// problem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<Object>))]
    pub nearest: Option<Nearest>,
    /// What of the request's text is left to whoever starts the VMs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The VMs that run, if they were to be started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vms: Vec<StartedVm>,
}

/// Leases.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LeaseList {
    /// By id.
    pub leases: Vec<LeaseInfo>,
}

/// Selects leases.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub struct LeaseQuery {
    /// Only leases of this holder.
    #[serde(default)]
    pub holder: Option<String>,
}

/// A node of the fleet.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeDetail {
    /// Its inventory.
    #[cfg_attr(feature = "schema", schema(value_type = Object))]
    pub node: Node,
    /// VMs for which resources of this node are held.
    pub vms: Vec<String>,
    /// Addresses of the devices that are held.
    pub held_devices: Vec<String>,
    /// VMs that run there without a lease, so that what they use is counted as free; empty while the daemon does not list its VMs. Not shown
    /// to a tenant.
    #[serde(default)]
    pub vms_without_lease: Vec<String>,
    /// Why the VMs that run there are not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_listed: Option<String>,
}

/// Nodes.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeList {
    /// By name.
    pub nodes: Vec<NodeSummary>,
}

/// Summary of a node.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeSummary {
    /// Its name.
    pub name: String,
    /// `up`, `drained` or `down`.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub state: NodeState,
    /// All GPUs.
    pub gpus: usize,
    /// GPUs that are not held.
    pub gpus_free: usize,
    /// All vGPUs and MIG slices.
    #[serde(default)]
    pub gpu_shares: usize,
    /// Those that can be leased now.
    #[serde(default)]
    pub gpu_shares_free: usize,
    /// All adapters and virtual functions.
    pub adapters: usize,
    /// Those that are not held.
    #[serde(default)]
    pub adapters_free: usize,
    /// All hardware threads.
    pub cores: u32,
    /// Hardware threads that are not held.
    pub cores_free: u32,
    /// All memory. Unit: MiB.
    pub memory_mib: u64,
    /// Memory that is not held. Unit: MiB.
    pub memory_free_mib: u64,
    /// VMs for which resources of this node are held.
    pub vms: u32,
    /// VMs that run there without a lease; absent while the daemon of the node does not list its VMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vms_without_lease: Option<usize>,
}

/// How a fleet is told as GLUE 2.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub struct Glue2Query {
    /// `xml`, `json` or `ldif`. Default: `xml`.
    #[serde(default)]
    pub format: Option<String>,
    /// Name of the site. Default: `vmove`.
    #[serde(default)]
    pub site: Option<String>,
}

/// A new state of a node.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NodeStateRequest {
    /// `up`, `drained` or `down`.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub state: NodeState,
}

/// Has a node looked at.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct LookRequest {
    /// VMs that have ended there, as far as the caller knows.
    #[serde(default)]
    pub ended: Vec<String>,
}

/// A node is looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct LookAnswer {
    /// Its name.
    pub node: String,
}

/// A topology as text.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TopologyText {
    /// The format.
    pub format: TopologyFormat,
    /// The text.
    pub text: String,
}

/// Selects accounting records.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub struct AccountQuery {
    /// `jsonl` (one JSON object a line), `csv`, or `apel` (an APEL-cloud-message with a record for each VM).
    #[serde(default)]
    pub format: Option<String>,
    /// For `apel`: the name of the site, as it is registered in the GOCDB.
    #[serde(default)]
    pub site: Option<String>,
    /// For `apel`: the name of the service at the site. Default: `vmove`.
    #[serde(default)]
    pub service: Option<String>,
    /// Only records of this holder.
    #[serde(default)]
    pub holder: Option<String>,
    /// Only leases that ended at or after this time of day. Unit: milliseconds since 1970-01-01 00:00 UTC.
    #[serde(default)]
    pub since_ms: Option<u64>,
}

/// Plans.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PlanList {
    /// By id.
    pub plans: Vec<Plan>,
}

/// How a VM is started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct StartVm {
    /// The VM, one of the lease.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub vm: VmName,
    /// QEMU and its arguments, as for `vmove run`. `{vcpus}` and `{memory_mib}` stand for what the lease has for this VM; an argument
    /// `{devices}` gives it each of its devices, as `vmove run --device ROLE=ADDRESS` with the role of its grant. Needs the role operator: it runs as root on the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command_line: Vec<String>,
    /// Instead of a command line: the name of a template of the bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Values for all fields of the template.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fields: BTreeMap<String, String>,
    /// Backing of guest memory: `thp` (default), `hugetlb-2m` or `hugetlb-1g`.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub memory: Backing,
}

/// How all VMs of a lease are started. The fields mean what they mean for one VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct StartAll {
    /// QEMU and its arguments.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub command_line: Vec<String>,
    /// Instead of a command line: the name of a template of the bridge.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Values for all fields of the template.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub fields: BTreeMap<String, String>,
    /// Backing of guest memory: `thp` (default), `hugetlb-2m` or `hugetlb-1g`.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub memory: Backing,
}

impl StartAll {
    /// The same for one VM.
    #[must_use]
    pub fn of(&self, vm: VmName) -> StartVm {
        let Self { command_line, template, fields, memory } = self.clone();
        StartVm { vm, command_line, template, fields, memory }
    }
}

impl StartVm {
    /// Starts a VM by a command line.
    #[must_use]
    pub fn by_command_line(vm: VmName, command_line: Vec<String>) -> Self {
        Self { vm, command_line, template: None, fields: BTreeMap::new(), memory: Backing::default() }
    }

    /// Starts a VM by a template.
    #[must_use]
    pub fn by_template(vm: VmName, template: String, fields: BTreeMap<String, String>) -> Self {
        Self { vm, command_line: Vec::new(), template: Some(template), fields, memory: Backing::default() }
    }
}

/// A VM that runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct StartedVm {
    /// The VM.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub vm: VmName,
    /// Its node.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub node: NodeName,
    /// It was running before.
    pub again: bool,
}

/// VMs to be started.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct StartRequest {
    /// The VMs, each once.
    pub vms: Vec<StartVm>,
}

/// VMs that were started.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct StartAnswer {
    /// In the sequence of the request.
    pub vms: Vec<StartedVm>,
}

/// VMs to be stopped; in the answer, VMs that are stopped.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct StopVms {
    /// Names of VMs of the lease; all, if empty.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub vms: Vec<VmName>,
}
