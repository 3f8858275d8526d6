//! Requests and answers.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use vmove_migrate::progress::Progress;
use vmove_migrate::spec::MigrationSpec;

use super::schema;

/// What a node says of itself.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NodeInfo {
    /// Name of the node.
    pub node: String,
    /// Version of vmoved.
    pub version: String,
    /// Version of the protocol between daemons. Both ends of a migration need the same.
    pub protocol: u16,
    /// Process id of vmoved.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// Address of the peer port, as bound.
    pub listen: String,
    /// `mutual-tls` or `insecure`.
    pub security: String,
    /// Fabric back ends that can be used, best first.
    pub fabrics: Vec<String>,
    /// The kind of RDMA network that this node is on, if it is and may use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma_network: Option<String>,
    /// Why RDMA is wanted here and cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_rdma: Option<String>,
    /// Release of the running kernel.
    pub kernel: String,
    /// Why pre-copy and hybrid are not possible here; absent when they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_dirty_tracking: Option<String>,
    /// Memory that new guests could have.
    pub memory: NodeMemory,
    /// Names and addresses from the configuration that `--to` understands.
    pub nodes: BTreeMap<String, String>,
    /// How many VMs are here.
    pub vms: usize,
    /// How many migrations are at work here, both directions.
    pub migrations_running: usize,
}

/// Memory of a node. Unit: bytes.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct NodeMemory {
    /// All of it.
    pub total_bytes: u64,
    /// What the kernel says could be had without swapping (`MemAvailable`).
    pub available_bytes: u64,
    /// Free huge pages of 2 MiB, in bytes.
    pub free_huge_2m_bytes: u64,
    /// Free huge pages of 1 GiB, in bytes.
    pub free_huge_1g_bytes: u64,
}

/// All VMs of a node.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VmList {
    /// By name.
    pub vms: Vec<VmSummary>,
}

/// One VM in short.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmSummary {
    /// Name, unique on the node.
    pub name: String,
    /// Process id of QEMU.
    pub pid: i32,
    /// QEMU's own word (`running`, `paused`, `inmigrate`, ...), or `migrating` while a migration holds its monitor,
    /// `ended` when the process is gone, `unknown` when its monitor does not answer.
    pub status: String,
    /// Backing of guest memory: `thp`, `hugetlb-2m` or `hugetlb-1g`.
    pub memory: String,
    /// Size of guest memory. Unit: bytes.
    pub memory_bytes: u64,
    /// Somebody else started this QEMU.
    pub adopted: bool,
    /// The migration that holds it now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration: Option<String>,
    /// Why the daemon ended it, if it did so on its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// One VM in full.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VmDetail {
    /// The short form.
    #[serde(flatten)]
    pub summary: VmSummary,
    /// QEMU version; absent while the monitor cannot be asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qemu: Option<String>,
    /// Monitor socket. It serves one client at a time, and the daemon is one: use it for short questions.
    #[schema(value_type = String)]
    pub qmp: PathBuf,
    /// Working folder of QEMU.
    #[schema(value_type = String)]
    pub dir: PathBuf,
    /// What QEMU printed; absent for adopted ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub log: Option<PathBuf>,
    /// Character devices that can be reached from outside: consoles and the like.
    pub consoles: BTreeMap<String, String>,
    /// Files that hold guest memory.
    pub ram: Vec<RamFileInfo>,
    /// Share of guest memory that QEMU maps by huge pages. 0 to 1; absent if it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge_share: Option<f64>,
    /// Command line as the operator gave it.
    pub command_line: Vec<String>,
    /// Environment that QEMU was given.
    pub environment: BTreeMap<String, String>,
    /// The migration that holds it now, in full.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Progress>)]
    pub progress: Option<Progress>,
}

/// A file of guest memory.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RamFileInfo {
    /// QEMU's id of the memory backend.
    pub id: String,
    /// Where it is.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Length. Unit: bytes.
    pub size: u64,
    /// Memory it really holds. Unit: bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated: Option<u64>,
}

/// Starts a VM.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    /// Name: 1 to 64 bytes of UTF-8 without `/` and control characters.
    pub name: String,
    /// Backing of guest memory: `thp` (default), `hugetlb-2m` or `hugetlb-1g`.
    #[serde(default = "thp")]
    pub memory: String,
    /// QEMU and its arguments. `{vmdir}` and `{name}` are replaced on every node the VM comes to.
    pub command_line: Vec<String>,
    /// Environment variables for QEMU, here and on every node the VM comes to.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
}

fn thp() -> String {
    "thp".to_owned()
}

/// Takes in a QEMU that somebody else started.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdoptRequest {
    /// Name it shall have here.
    pub name: String,
    /// Path of its QMP socket.
    #[schema(value_type = String)]
    pub qmp: PathBuf,
}

/// How to end a VM.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StopQuery {
    /// End QEMU by a signal when its monitor does not answer, adopted or not.
    #[serde(default)]
    pub force: bool,
}

/// What a trial of the fabrics between two nodes found.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct FabricCheck {
    /// This node.
    pub node: String,
    /// The other, as it was named.
    pub to: String,
    /// RDMA ports of this node, a line each.
    pub devices: Vec<String>,
    /// The best fabric that works; what a migration takes unless the other node has less.
    pub best: Option<String>,
    /// Each fabric that this node offers, best first.
    pub fabrics: Vec<FabricTrial>,
}

/// One fabric, tried out.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct FabricTrial {
    /// `verbs`, `tcp`.
    pub fabric: String,
    /// Pages can cross by it.
    pub usable: bool,
    /// What is wrong if not.
    pub problem: Option<String>,
    /// Median time of a READ of 4 KiB, in microseconds.
    pub read_4k_p50_us: Option<f64>,
    /// Time that one such READ in a hundred exceeds, in microseconds.
    pub read_4k_p99_us: Option<f64>,
    /// Bytes per second by READs of 256 KiB, 8 at a time, over one connection.
    pub read_bytes_per_s: Option<f64>,
    /// Datagrams sent to a group that the other node had joined, at a quarter of that pace.
    pub multicast_sent: Option<u64>,
    /// Of these, datagrams that did not come.
    pub multicast_lost: Option<u64>,
    /// Bytes per second at which they were sent.
    pub multicast_bytes_per_s: Option<f64>,
    /// Why multicast does not work, where everything else does.
    pub multicast_problem: Option<String>,
}

/// Where a VM shall go.
#[derive(Debug, Clone, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct CheckQuery {
    /// Name from the configuration, or `host:port`.
    pub to: String,
}

/// Starts a migration.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// Name of the VM.
    pub vm: String,
    /// Name from the configuration, or `host:port`.
    pub to: String,
    /// Options; what is left out has its default.
    #[serde(default)]
    #[schema(value_type = schema::MigrationSpec)]
    pub options: MigrationSpec,
}

/// A request was taken.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Taken {
    /// Id of the migration.
    pub id: String,
    /// What was done first: a guest whose memory is private since a fork was given memory of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Migrations of a node, running ones first, then newest first.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MigrationList {
    /// Snapshots.
    #[schema(value_type = Vec<schema::Progress>)]
    pub migrations: Vec<Progress>,
}

/// Whether a guest is to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Running {
    /// Its processors run.
    Running,
    /// They are stopped; memory and devices stay.
    Paused,
}

/// Body of `PUT /v1/vms/{name}/state`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StateRequest {
    /// What it is to be.
    pub state: Running,
}

/// Stopping a VM.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Stopped {
    /// Name of the VM.
    pub name: String,
    /// `quit` (its monitor obeyed) or `killed`.
    pub how: String,
}
