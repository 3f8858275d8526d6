//! Leases: which holder has which devices, cores, memory and huge pages, and until when.

use std::collections::{BTreeMap, BTreeSet};

use sched_bridge::model::{Assignment, ClusterName, DeviceKind, NodeName, VmName};
use sched_bridge::place::ClusterRequest;
use serde::{Deserialize, Serialize};
pub use vmove_bridge_types::lease::{BadId, Held, LeaseId, Part, Usage};
use vmove_bridge_types::requests::{LeaseInfo, StartAll};

use crate::clock::Stamp;

/// Shortest time to live of a lease: a heartbeat must fit in. Unit: milliseconds.
pub const MIN_TTL_MS: u64 = 500;
/// Longest time to live of a lease: 30 days. Unit: milliseconds.
pub const MAX_TTL_MS: u64 = 30 * 24 * 3600 * 1000;
/// Time to live of a lease whose request has none. Unit: milliseconds.
pub const DEFAULT_TTL_MS: u64 = 60_000;

/// So many VMs are named in a note.
const NAMED: usize = 4;

/// A lease, as it is kept in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Its id.
    pub id: LeaseId,
    /// The holder: a user, a job, a scheduler's name for it.
    pub holder: String,
    /// The project on whose account it goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
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
    /// How its VMs were started, if all were started in one way: further ones are started so, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartAll>,
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
    /// The same for each VM; absent for leases of older versions.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub vms: BTreeMap<VmName, Usage>,
    /// All of the usage was measured by clocks that do not jump.
    #[serde(default)]
    pub exact: bool,
}

/// Adds what an assignment has used in this time.
fn add(usage: &mut Usage, assignment: &Assignment, ms: u64) {
    let devices = |wanted: fn(DeviceKind) -> bool| {
        assignment.devices.iter().filter(|device| wanted(device.kind)).count() as u64
    };
    let times = |sum: &mut u64, amount: u64| *sum = sum.saturating_add(amount.saturating_mul(ms));
    times(&mut usage.gpu_ms, devices(|kind| kind == DeviceKind::Gpu));
    times(&mut usage.adapter_ms, devices(DeviceKind::is_network));
    times(&mut usage.gpu_share_ms, devices(DeviceKind::is_share));
    times(&mut usage.remote_gpu_ms, devices(|kind| kind == DeviceKind::RemoteGpu));
    times(&mut usage.core_ms, assignment.cores().into());
    times(&mut usage.memory_mib_ms, assignment.memory().0);
}

impl Lease {
    /// Counts usage up to now, before something changes.
    pub fn count(&mut self, now: &Stamp) {
        let (ms, exact) = self.counted.until(now, self.ttl_ms.saturating_mul(2));
        self.usage.held_ms = self.usage.held_ms.saturating_add(ms);
        let vms: BTreeSet<&VmName> = self.held.iter().map(|held| &held.assignment.vm).collect();
        for vm in vms {
            // Whatever is leased for a VM that moves counts on both nodes; its time counts once.
            self.vms.entry(vm.clone()).or_default().held_ms += ms;
        }
        for held in &self.held {
            add(&mut self.usage, &held.assignment, ms);
            add(self.vms.entry(held.assignment.vm.clone()).or_default(), &held.assignment, ms);
        }
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

    /// What it holds where VMs run or will run, but not where those that are being moved go.
    pub fn at_home(&self) -> impl Iterator<Item = &Held> + Clone {
        self.held.iter().filter(|held| held.part == Part::Home)
    }

    /// The resources of a VM on the node where it runs or will run.
    #[must_use]
    pub fn home(&self, vm: &VmName) -> Option<&Held> {
        self.at_home().find(|held| held.assignment.vm == *vm)
    }

    /// The VMs, each with the node where it runs or will run.
    #[must_use]
    pub fn places(&self) -> Vec<(VmName, NodeName)> {
        self.at_home().map(|held| (held.assignment.vm.clone(), held.assignment.node.clone())).collect()
    }

    /// Whether a VM of it is known to run.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.held.iter().any(|held| held.seen)
    }

    /// Names of the VMs.
    pub fn vms(&self) -> impl Iterator<Item = &VmName> {
        self.at_home().map(|held| &held.assignment.vm)
    }
}

/// What can be done with a lease of a share of a GPU, since no daemon starts a VM with one.
pub(crate) fn instead_of_start(kind: DeviceKind) -> &'static str {
    if kind == DeviceKind::MigSlice {
        "QEMU gives no guest a MIG slice: use it on the node itself, and keep the lease by `vmove lease keep`"
    } else {
        "vmoved starts only VMs that can move: start it by QEMU with -device vfio-pci,sysfsdev=/sys/bus/mdev/devices/UUID, and keep the lease by \
         `vmove lease keep`"
    }
}

/// Notes on VMs that do not move, or that a lease alone gives no device, because of a share of a GPU.
pub fn notes_on_shares<'a>(assignments: &(impl Iterator<Item = &'a Assignment> + Clone)) -> Vec<String> {
    let vms_with = |kind: DeviceKind| -> Vec<&str> {
        assignments.clone().filter(|vm| vm.count(kind) > 0).map(|vm| vm.vm.as_str()).collect()
    };
    let mut notes = Vec::new();
    for kind in [DeviceKind::Vgpu, DeviceKind::MigSlice] {
        let (vms, Some(why)) = (vms_with(kind), kind.stays()) else { continue };
        let named = vms.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
        let who = match vms.len() {
            0 => continue,
            1 => format!("{named} does"),
            all if all > NAMED => format!("{named} and {} more do", all - NAMED),
            _ => format!("{named} do"),
        };
        notes.push(format!("{who} not move: {why}; {}", instead_of_start(kind)));
    }
    notes
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
