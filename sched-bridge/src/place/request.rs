//! What is asked for: the common form behind all spellings of a request.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::PlaceError;
use crate::model::{ClusterName, DeviceKind, LinkLayer, MemoryMib, NodeName, PciId, VmName};
use crate::topology::SwitchName;

/// A virtual cluster to be placed as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRequest {
    /// Its name.
    pub name: ClusterName,
    /// Its VMs, by kind.
    pub groups: Vec<VmGroup>,
    /// How close together.
    #[serde(default)]
    pub compactness: Compactness,
    /// How far apart, for the sake of failures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anti_affinity: Option<AntiAffinity>,
    /// What to be near to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub near: Option<Near>,
    /// Nodes that may be used; all, if empty.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub only_nodes: BTreeSet<NodeName>,
    /// Nodes that may not be used.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub not_nodes: BTreeSet<NodeName>,
}

/// VMs that are alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmGroup {
    /// VMs are called `CLUSTER-NAME-0`, `CLUSTER-NAME-1` and so on.
    pub name: String,
    /// How many.
    pub count: u32,
    /// What each needs: any one of these will do.
    pub alternatives: Vec<Alternative>,
}

/// One way in which the need of a VM can be met. All of it must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Alternative {
    /// Hardware threads of its own.
    pub vcpus: u32,
    /// Memory.
    pub memory: MemoryMib,
    /// What the memory is made of.
    #[serde(default)]
    pub pages: Pages,
    /// Devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceNeed>,
    /// How close cores, memory and devices must be to each other.
    #[serde(default)]
    pub numa: NumaPolicy,
    /// How close each GPU must be to a network adapter of the VM.
    #[serde(default)]
    pub affinity: Affinity,
    /// VFs of a VM come from different adapters.
    #[serde(default)]
    pub isolate_vfs: bool,
    /// What must be true of the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<NodeCondition>,
}

/// What a VM's memory is made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Pages {
    /// Whatever the host has beside reserved huge pages.
    #[default]
    #[serde(rename = "normal")]
    Normal,
    /// Reserved pages of 2 MiB.
    #[serde(rename = "2m")]
    Huge2M,
    /// Reserved pages of 1 GiB.
    #[serde(rename = "1g")]
    Huge1G,
}

/// Devices of one kind that a VM needs.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceNeed {
    /// How many.
    pub count: u32,
    /// Which will do.
    pub filter: DeviceFilter,
}

/// Which devices will do. Empty sets allow everything.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceFilter {
    /// GPU, adapter or virtual function.
    pub kind: DeviceKind,
    /// Architectures in lower case, any of them.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub archs: BTreeSet<String>,
    /// Architectures that will not do.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub not_archs: BTreeSet<String>,
    /// Vendor ids (`10de`), any of them.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub vendors: BTreeSet<u16>,
    /// Vendor and device ids, any of them.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub ids: BTreeSet<PciId>,
    /// InfiniBand or Ethernet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_layer: Option<LinkLayer>,
    /// Lowest rate of an active port, in Gb/s.
    #[serde(default)]
    pub min_rate_gbps: u32,
    /// Traits that it must have.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub traits: BTreeSet<String>,
    /// Only devices that can move with a running VM.
    #[serde(default)]
    pub live_migratable: bool,
}

impl DeviceFilter {
    /// Every device of a kind.
    #[must_use]
    pub fn kind(kind: DeviceKind) -> Self {
        Self {
            kind,
            archs: BTreeSet::new(),
            not_archs: BTreeSet::new(),
            vendors: BTreeSet::new(),
            ids: BTreeSet::new(),
            link_layer: None,
            min_rate_gbps: 0,
            traits: BTreeSet::new(),
            live_migratable: false,
        }
    }
}

/// How close the parts of a VM must be (`hw:pci_numa_affinity_policy` of Nova).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum NumaPolicy {
    /// All from one NUMA node.
    Required,
    /// All from one socket.
    Socket,
    /// Close where it costs nothing else.
    #[default]
    Preferred,
}

/// How close two devices are, the closest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Closeness {
    /// Below one PCIe root.
    Root,
    /// On one NUMA node.
    Numa,
    /// In one node.
    Node,
}

/// How close each GPU must be to some network adapter of the same VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Affinity {
    /// As close as possible, once everything else is decided.
    #[default]
    Preferred,
    /// Below one PCIe root, or not at all.
    SameRoot,
    /// On one NUMA node, or not at all.
    SameNuma,
}

/// What must be true of a node. Text is compared without regard to case.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum NodeCondition {
    /// One of these architectures.
    CpuArch(BTreeSet<String>),
    /// None of these architectures.
    CpuArchNot(BTreeSet<String>),
    /// The model's name contains this.
    CpuModel(String),
    /// All of these features; `SSE4.2`, `sse4_2` and `sse4-2` are one.
    CpuFeatures(BTreeSet<String>),
    /// One of these hypervisors.
    Hypervisor(BTreeSet<String>),
    /// None of these hypervisors.
    HypervisorNot(BTreeSet<String>),
    /// A trait of the node or of one of its devices.
    Trait(String),
    /// No such trait.
    TraitNot(String),
    /// A label, with one of these values; with any, if there are none.
    Label(String, BTreeSet<String>),
    /// Memory of the whole node, in MiB, from and to (both included).
    NodeMemory(u64, u64),
    /// Hardware threads of the whole node, from and to (both included).
    NodeCores(u64, u64),
}

/// Where a domain of failure or of closeness ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Domain {
    /// A node.
    Node,
    /// A switch of this height: 1 is a leaf switch, 2 the switch above, and so on.
    Switch(u32),
}

impl Domain {
    /// A leaf switch.
    pub const LEAF: Self = Self::Switch(1);
    /// A switch above leaf switches.
    pub const SPINE: Self = Self::Switch(2);
    /// A switch above those.
    pub const CORE: Self = Self::Switch(3);

    /// 0 for a node, else the height of the switch.
    #[must_use]
    pub fn height(self) -> u32 {
        match self {
            Self::Node => 0,
            Self::Switch(height) => height,
        }
    }
}

/// How much compactness matters (the three modes of Kueue's topology-aware scheduling).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mode {
    /// All VMs within one domain of the level, or no placement.
    Required,
    /// As close as possible.
    #[default]
    Preferred,
    /// Does not matter: what is left over of other clusters is used up first.
    Unconstrained,
}

/// How close together a cluster must be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compactness {
    /// How much it matters.
    #[serde(default)]
    pub mode: Mode,
    /// The level for [`Mode::Required`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<Domain>,
    /// Most switches between any two VMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_hops: Option<u32>,
    /// Most leaf switches in use (`--switches` of Slurm).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_leaf_switches: Option<u32>,
}

/// At most so many VMs of the cluster in one domain. The domain of a node is the highest switch above it that is not higher than
/// asked for, or the node itself if there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AntiAffinity {
    /// The domain.
    pub domain: Domain,
    /// How many.
    pub at_most: u32,
}

/// Data, or something else to be near to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Near {
    /// Where it is.
    pub to: NearTo,
    /// Most switches between it and any VM; as near as possible, if none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_hops: Option<u32>,
}

/// Where data is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NearTo {
    /// On a node.
    Node(NodeName),
    /// Below a switch.
    Switch(SwitchName),
}

impl ClusterRequest {
    /// VMs of all groups.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.groups.iter().fold(0, |sum, group| sum.saturating_add(group.count))
    }

    /// Names of all VMs with the group of each, in order.
    ///
    /// # Errors
    /// A group whose name makes no VM name.
    pub fn vm_names(&self) -> Result<Vec<(VmName, usize)>, PlaceError> {
        let mut names = Vec::new();
        for (at, group) in self.groups.iter().enumerate() {
            for number in 0..group.count {
                let name = VmName::new(format!("{}-{}-{number}", self.name, group.name))
                    .map_err(|error| PlaceError::Contradiction { reason: error.to_string() })?;
                names.push((name, at));
            }
        }
        Ok(names)
    }

    /// Looks for what no fleet could fulfil.
    ///
    /// # Errors
    /// [`PlaceError::Contradiction`] with the first that is found.
    pub fn check(&self) -> Result<(), PlaceError> {
        let refuse = |reason: String| Err(PlaceError::Contradiction { reason });
        let count = self.groups.iter().map(|group| u64::from(group.count)).sum::<u64>();
        if count == 0 {
            return refuse(format!("cluster {} has no VMs; expected at least one", self.name));
        }
        if count > 100_000 {
            return refuse(format!(
                "cluster {} has {count} VMs; at most 100000 are placed at once",
                self.name
            ));
        }
        let mut seen = BTreeSet::new();
        for group in &self.groups {
            if !seen.insert(group.name.as_str()) {
                return refuse(format!("group {} is there twice; expected each name once", group.name));
            }
            if group.alternatives.is_empty() {
                return refuse(format!("group {} says nothing of what its VMs need", group.name));
            }
        }
        if let Some(node) = self.only_nodes.intersection(&self.not_nodes).next() {
            return refuse(format!("node {node} is both asked for and excluded"));
        }
        self.check_compactness()
    }

    fn check_compactness(&self) -> Result<(), PlaceError> {
        let refuse = |reason: String| Err(PlaceError::Contradiction { reason });
        let compactness = &self.compactness;
        if compactness.mode == Mode::Required && compactness.level.is_none() && compactness.max_hops.is_none()
        {
            return refuse(
                "compactness is required, but neither a level nor max_hops says at which".to_owned(),
            );
        }
        if compactness.max_leaf_switches == Some(0) {
            return refuse("max_leaf_switches is 0; expected at least 1".to_owned());
        }
        let Some(anti) = self.anti_affinity else { return Ok(()) };
        if anti.at_most == 0 {
            return refuse("anti-affinity allows 0 VMs in a domain; expected at least 1".to_owned());
        }
        let required = compactness.level.filter(|_| compactness.mode == Mode::Required);
        if required.is_some_and(|level| level <= anti.domain) && self.count() > anti.at_most {
            let level = required.map_or(0, Domain::height);
            return refuse(format!(
                "{} VMs must be within one domain of height {level}, but anti-affinity allows {} in one of height {}",
                self.count(),
                anti.at_most,
                anti.domain.height()
            ));
        }
        let too_few = |leaves: &u32| u64::from(*leaves) * u64::from(anti.at_most) < u64::from(self.count());
        let leaves = compactness.max_leaf_switches.filter(|_| anti.domain == Domain::LEAF);
        if let Some(leaves) = leaves.filter(too_few) {
            return refuse(format!(
                "{} VMs on at most {leaves} leaf switches, but anti-affinity allows {} on each",
                self.count(),
                anti.at_most
            ));
        }
        if compactness.max_hops == Some(0) && anti.domain == Domain::Node && self.count() > anti.at_most {
            return refuse("max_hops 0 wants all VMs on one node, which anti-affinity forbids".to_owned());
        }
        Ok(())
    }
}
