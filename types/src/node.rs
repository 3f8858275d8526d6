//! What a node says of itself and of its fabrics.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Control socket of `vmoved`, unless another is given.
pub const DEFAULT_CONTROL: &str = "/run/vmove/control.sock";

/// Port of `vmoved` for peers and remote requests, unless another is given.
pub const DEFAULT_PORT: u16 = 7420;

/// What a node says of itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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
    /// VMs that run here without a grant of a bridge; absent where the configuration names no bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vms_without_grant: Option<usize>,
    /// Release of the running kernel.
    pub kernel: String,
    /// Why pre-copy and hybrid are not possible here; absent when they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_dirty_tracking: Option<String>,
    /// Why what guests write to logs in their folders can stop the journals; absent when it cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_disk: Option<String>,
    /// As whom QEMUs are started here: `user vmove-qemu (60742)`, `user 60742`, `root`.
    #[serde(default)]
    pub qemu_user: String,
    /// Whether QEMUs are started with a filter of system calls (`-sandbox on`).
    #[serde(default)]
    pub qemu_sandbox: bool,
    /// What an operator should do about the user; absent when all is well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu_user_note: Option<String>,
    /// Memory that new guests could have.
    pub memory: NodeMemory,
    /// Names and addresses from the configuration that `--to` understands.
    pub nodes: BTreeMap<String, String>,
    /// Of those whose certificate has another name than the host of their address: that name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub server_names: BTreeMap<String, String>,
    /// How many VMs are here.
    pub vms: usize,
    /// How many migrations are at work here, both directions.
    pub migrations_running: usize,
}

/// Memory of a node. Unit: bytes.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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

/// What a trial of the fabrics between two nodes found.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
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
