//! A node: processors, memory, devices, hypervisors.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Device, DeviceKind};
use crate::ids::{MemoryMib, NodeName, NumaId, SocketId};

/// Whether VMs may be put on a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum NodeState {
    /// VMs may be placed there.
    #[default]
    Up,
    /// Keeps its VMs, gets no new ones, and is to be emptied.
    Drained,
    /// Not running.
    Down,
}

impl fmt::Display for NodeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Up => "up",
            Self::Drained => "drained",
            Self::Down => "down",
        })
    }
}

/// The processors of a node; all sockets are assumed to be equal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// Architecture as printed by `uname -m` (`x86_64`).
    pub arch: Arc<str>,
    /// Model name of the first processor.
    #[serde(default)]
    pub model: Arc<str>,
    /// Feature flags in lower case and the kernel's spelling (`sse4_2`).
    #[serde(default)]
    pub features: Arc<BTreeSet<String>>,
}

/// Huge pages, by their size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HugePages {
    /// Pages of 2 MiB.
    #[serde(default)]
    pub pages_2m: u64,
    /// Pages of 1 GiB.
    #[serde(default)]
    pub pages_1g: u64,
}

/// A NUMA node of a host, and what VMs can get from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaNode {
    /// Its number.
    pub id: NumaId,
    /// The socket it is part of.
    pub socket: SocketId,
    /// Hardware threads.
    pub cores: u32,
    /// Memory that is not reserved as huge pages.
    pub memory: MemoryMib,
    /// Reserved huge pages.
    #[serde(default)]
    pub huge: HugePages,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its name in the scheduler.
    pub name: NodeName,
    /// Whether VMs may be placed there.
    #[serde(default)]
    pub state: NodeState,
    /// Processors.
    #[serde(default)]
    pub cpu: Cpu,
    /// NUMA nodes, by number. A host without NUMA has one.
    pub numa: Vec<NumaNode>,
    /// Devices that VMs can have, by address.
    #[serde(default)]
    pub devices: Vec<Device>,
    /// Installed hypervisors in lower case (`kvm`, `qemu`, `xen`).
    #[serde(default)]
    pub hypervisors: BTreeSet<Arc<str>>,
    /// Traits in OpenStack's spelling.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub traits: BTreeSet<Arc<str>>,
    /// Labels, like those of Kubernetes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

impl Node {
    /// A node with one NUMA node and no devices.
    #[must_use]
    pub fn plain(name: NodeName, cores: u32, memory: MemoryMib) -> Self {
        let numa = NumaNode { id: NumaId(0), socket: SocketId(0), cores, memory, huge: HugePages::default() };
        Self {
            name,
            state: NodeState::Up,
            cpu: Cpu::default(),
            numa: vec![numa],
            devices: Vec::new(),
            hypervisors: BTreeSet::new(),
            traits: BTreeSet::new(),
            labels: BTreeMap::new(),
        }
    }

    /// Counts, for each GPU, the slices and vGPUs that the node lists: whoever wrote the inventory may have left that out.
    pub fn count_shares(&mut self) {
        if !self.devices.iter().any(|device| device.kind.is_share() || device.shares > 0) {
            return;
        }
        let parents: Vec<_> =
            self.devices.iter().filter(|one| one.kind.is_share()).filter_map(|one| one.parent).collect();
        for gpu in self.devices.iter_mut().filter(|one| one.kind == DeviceKind::Gpu) {
            let shares = parents.iter().filter(|parent| gpu.address.pci() == Some(**parent)).count();
            gpu.shares = u16::try_from(shares).unwrap_or(u16::MAX);
        }
    }

    /// Hardware threads of all NUMA nodes.
    #[must_use]
    pub fn cores(&self) -> u32 {
        self.numa.iter().map(|numa| numa.cores).sum()
    }

    /// Memory of all NUMA nodes, without huge pages.
    #[must_use]
    pub fn memory(&self) -> MemoryMib {
        MemoryMib(self.numa.iter().map(|numa| numa.memory.0).sum())
    }
}
