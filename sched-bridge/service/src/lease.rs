//! Leases: which holder has which devices, cores, memory and huge pages, and until when.

use sched_bridge::model::{Assignment, ClusterName, DeviceKind, NodeName, VmName};
use sched_bridge::place::ClusterRequest;
use serde::{Deserialize, Serialize};
pub use vmove_bridge_types::lease::{BadId, Held, LeaseId, Part, Usage};
use vmove_bridge_types::requests::LeaseInfo;

use crate::clock::Stamp;

/// Shortest time to live of a lease: a heartbeat must fit in. Unit: milliseconds.
pub const MIN_TTL_MS: u64 = 500;
/// Longest time to live of a lease: 30 days. Unit: milliseconds.
pub const MAX_TTL_MS: u64 = 30 * 24 * 3600 * 1000;
/// Time to live of a lease whose request has none. Unit: milliseconds.
pub const DEFAULT_TTL_MS: u64 = 60_000;

/// A lease, as it is kept in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Its id.
    pub id: LeaseId,
    /// The holder: a user, a job, a scheduler's name for it.
    pub holder: String,
    /// The virtual cluster.
    pub cluster: ClusterName,
    /// The request, for plans that find another place. Absent if the holder chose nodes and devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<ClusterRequest>,
    /// The resources, by VM and node.
    pub held: Vec<Held>,
    /// Time to live without a heartbeat. Unit: milliseconds.
    pub ttl_ms: u64,
    /// Its VMs move at one barrier, though they own no devices.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub together: bool,
    /// Heartbeats so far.
    #[serde(default)]
    pub beats: u64,
    /// When it was granted.
    pub granted: Stamp,
    /// The moment up to which `usage` is counted.
    pub counted: Stamp,
    /// Usage until then.
    #[serde(default)]
    pub usage: Usage,
    /// All of the usage was measured by clocks that do not jump.
    #[serde(default)]
    pub exact: bool,
}

impl Lease {
    /// Counts usage up to now, before something changes.
    pub fn count(&mut self, now: &Stamp) {
        let (ms, exact) = self.counted.until(now, self.ttl_ms.saturating_mul(2));
        let sum = |of: &dyn Fn(&Assignment) -> u64| -> u64 {
            self.held
                .iter()
                .fold(0, |sum: u64, held| sum.saturating_add(of(&held.assignment)))
                .saturating_mul(ms)
        };
        let devices = |a: &Assignment, network: bool| {
            a.devices
                .iter()
                .filter(|d| d.kind.is_network() == network && (network || d.kind == DeviceKind::Gpu))
                .count() as u64
        };
        let (gpu, adapter) = (sum(&|a| devices(a, false)), sum(&|a| devices(a, true)));
        let (core, memory) = (sum(&|a| u64::from(a.cores())), sum(&|a| a.memory().0));
        let usage = &mut self.usage;
        usage.held_ms = usage.held_ms.saturating_add(ms);
        usage.gpu_ms = usage.gpu_ms.saturating_add(gpu);
        usage.adapter_ms = usage.adapter_ms.saturating_add(adapter);
        usage.core_ms = usage.core_ms.saturating_add(core);
        usage.memory_mib_ms = usage.memory_mib_ms.saturating_add(memory);
        self.exact &= exact;
        self.counted = now.clone();
    }

    /// The nodes of which resources are held, each once, by name.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeName> {
        let mut nodes: Vec<NodeName> = self.held.iter().map(|held| held.assignment.node.clone()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// The resources of a VM on the node where it runs or will run.
    #[must_use]
    pub fn home(&self, vm: &VmName) -> Option<&Held> {
        self.held.iter().find(|held| held.part == Part::Home && held.assignment.vm == *vm)
    }

    /// Whether a VM of it is known to run.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.held.iter().any(|held| held.seen)
    }

    /// Names of the VMs.
    pub fn vms(&self) -> impl Iterator<Item = &VmName> {
        self.held.iter().filter(|held| held.part == Part::Home).map(|held| &held.assignment.vm)
    }
}

impl Lease {
    /// What is told of it, with the time after which it ends without a heartbeat, if it may.
    #[must_use]
    pub fn info(&self, ends_in_ms: Option<u64>) -> LeaseInfo {
        LeaseInfo {
            id: self.id.clone(),
            holder: self.holder.clone(),
            cluster: self.cluster.clone(),
            held: self.held.clone(),
            ttl_ms: self.ttl_ms,
            ends_in_ms,
            beats: self.beats,
            granted_wall_ms: self.granted.wall_ms,
            usage: self.usage,
        }
    }
}
