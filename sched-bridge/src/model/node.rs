//! A node: processors, memory, devices, hypervisors.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Device, MemoryMib, NodeName, NumaId, SocketId};

/// Whether VMs may be put on a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum NodeState {
    /// Takes VMs.
    #[default]
    Up,
    /// Keeps what it has, takes nothing new, is to be emptied.
    Drained,
    /// Not there.
    Down,
}

/// The processors of a node; all sockets are taken to be alike.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// Architecture as `uname -m` says it (`x86_64`).
    pub arch: Arc<str>,
    /// Model name of the first processor.
    #[serde(default)]
    pub model: Arc<str>,
    /// Feature flags in lower case, as the kernel spells them (`sse4_2`).
    #[serde(default)]
    pub features: Arc<BTreeSet<String>>,
}

/// Huge pages, by their size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HugePages {
    /// Pages of 2 MiB.
    #[serde(default)]
    pub pages_2m: u64,
    /// Pages of 1 GiB.
    #[serde(default)]
    pub pages_1g: u64,
}

/// A NUMA node of a host, and what of it VMs may have.
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
    /// Whether it takes VMs.
    #[serde(default)]
    pub state: NodeState,
    /// Processors.
    #[serde(default)]
    pub cpu: Cpu,
    /// NUMA nodes, by number. A host without NUMA has one.
    pub numa: Vec<NumaNode>,
    /// Devices that VMs can be given, by address.
    #[serde(default)]
    pub devices: Vec<Device>,
    /// Hypervisors that are there (`kvm`, `qemu`, `xen`), in lower case.
    #[serde(default)]
    pub hypervisors: BTreeSet<Arc<str>>,
    /// Traits, as OpenStack spells them.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub traits: BTreeSet<Arc<str>>,
    /// Labels, as Kubernetes has them.
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
