//! Requests, in the form that all spellings are read into.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::PlaceError;
use crate::model::{ClusterName, DeviceKind, LinkLayer, MemoryMib, NodeName, PciId, VmName};
use crate::topology::SwitchName;

/// A virtual cluster that is to be placed as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRequest {
    /// Its name.
    pub name: ClusterName,
    /// Its VMs, in groups of equal ones.
    pub groups: Vec<VmGroup>,
    /// How close together its VMs must be.
    #[serde(default)]
    pub compactness: Compactness,
    /// How many VMs a failure may hit at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anti_affinity: Option<AntiAffinity>,
    /// Data, or something else to be near.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub near: Option<Near>,
    /// Nodes that may be used; all, if empty.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub only_nodes: BTreeSet<NodeName>,
    /// Nodes that may not be used.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub not_nodes: BTreeSet<NodeName>,
}

/// Equal VMs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmGroup {
    /// VMs are named `CLUSTER-NAME-0`, `CLUSTER-NAME-1` and so on.
    pub name: String,
    /// Number of VMs.
    pub count: u32,
    /// What each of them needs: one of these.
    pub alternatives: Vec<Alternative>,
}

/// One way to meet the needs of a VM: all of it must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Alternative {
    /// Hardware threads.
    pub vcpus: u32,
    /// Memory.
    pub memory: MemoryMib,
    /// Kind of pages.
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
    /// Whether VFs of a VM must come from different adapters.
    #[serde(default)]
    pub isolate_vfs: bool,
    /// Conditions on the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<NodeCondition>,
}

/// Kind of pages of a VM's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Pages {
    /// Memory outside reserved huge pages.
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
    /// Number of devices.
    pub count: u32,
    /// Which devices are suitable.
    pub filter: DeviceFilter,
}

/// Which devices are suitable. Empty sets allow everything.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceFilter {
    /// Kind of device.
    pub kind: DeviceKind,
    /// Allowed architectures, in lower case.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub archs: BTreeSet<String>,
    /// Forbidden architectures, in lower case.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub not_archs: BTreeSet<String>,
    /// Allowed types of vGPUs, profiles of MIG slices, or models of remote GPUs, in lower case.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub models: BTreeSet<String>,
    /// Allowed vendor ids (`10de`).
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub vendors: BTreeSet<u16>,
    /// Allowed vendor and device ids.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub ids: BTreeSet<PciId>,
    /// InfiniBand or Ethernet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_layer: Option<LinkLayer>,
    /// Lowest rate of its fastest active port, in Gb/s.
    #[serde(default)]
    pub min_rate_gbps: u32,
    /// Traits that it must have.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub traits: BTreeSet<String>,
    /// Only devices that can be migrated with a running VM.
    #[serde(default)]
    pub live_migratable: bool,
}

impl DeviceFilter {
    /// All devices of a kind.
    #[must_use]
    pub fn kind(kind: DeviceKind) -> Self {
        Self {
            kind,
            archs: BTreeSet::new(),
            not_archs: BTreeSet::new(),
            models: BTreeSet::new(),
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
    /// From one NUMA node where nothing else gets worse.
    #[default]
    Preferred,
}

/// How close each GPU must be to some network adapter of the same VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Affinity {
    /// As close as possible where nothing else gets worse.
    #[default]
    Preferred,
    /// Below the same PCIe root.
    SameRoot,
    /// On the same NUMA node.
    SameNuma,
}

/// A condition on a node. Text is compared case-insensitively.
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
    /// The node or one of its devices has this trait.
    Trait(String),
    /// Neither the node nor any of its devices has this trait.
    TraitNot(String),
    /// A label with one of these values; with any value, if none is given.
    Label(String, BTreeSet<String>),
    /// Memory of the whole node, in MiB, from and to (both included).
    NodeMemory(u64, u64),
    /// Hardware threads of the whole node, from and to (both included).
    NodeCores(u64, u64),
}

/// A domain of failure or of closeness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Domain {
    /// A node.
    Node,
    /// All below a switch of this height: 1 for leaf switches, 2 for the switches above them, and so on.
    Switch(u32),
}

impl Domain {
    /// All below a leaf switch.
    pub const LEAF: Self = Self::Switch(1);
    /// All below a spine switch.
    pub const SPINE: Self = Self::Switch(2);
    /// All below a core switch.
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

/// Importance of compactness (the modes of Kueue's topology-aware scheduling).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mode {
    /// All VMs must be within one domain of the given level.
    Required,
    /// As close as possible.
    #[default]
    Preferred,
    /// It does not matter: what other clusters have left over is used first.
    Unconstrained,
}

/// How close together a cluster must be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compactness {
    /// Its importance.
    #[serde(default)]
    pub mode: Mode,
    /// The level for [`Mode::Required`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<Domain>,
    /// Most hops between any two VMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_hops: Option<u32>,
    /// Most leaf switches in use (`--switches` of Slurm).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_leaf_switches: Option<u32>,
}

/// A limit on the VMs of a cluster in one domain. The domain of a node is all below the highest switch above it that is not higher than
/// asked for, or the node itself if there is no such switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AntiAffinity {
    /// The domain.
    pub domain: Domain,
    /// Most VMs in one domain.
    pub at_most: u32,
}

/// Data, or something else to be near.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Near {
    /// Where it is.
    pub to: NearTo,
    /// Most hops between it and any VM; as near as possible, if none.
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

impl fmt::Display for NearTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(name) => write!(f, "node {name}"),
            Self::Switch(name) => write!(f, "switch {name}"),
        }
    }
}

impl ClusterRequest {
    /// A cluster of these VMs on any nodes, as close together as possible.
    #[must_use]
    pub fn new(name: ClusterName, groups: Vec<VmGroup>) -> Self {
        Self {
            name,
            groups,
            compactness: Compactness::default(),
            anti_affinity: None,
            near: None,
            only_nodes: BTreeSet::new(),
            not_nodes: BTreeSet::new(),
        }
    }

    /// The same request without some nodes. None if it is limited to these.
    #[must_use]
    pub fn without_nodes(mut self, nodes: &[NodeName]) -> Option<Self> {
        let is_limited = !self.only_nodes.is_empty();
        for node in nodes {
            self.only_nodes.remove(node);
            self.not_nodes.insert(node.clone());
        }
        (!is_limited || !self.only_nodes.is_empty()).then_some(self)
    }

    /// Number of VMs of all groups.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.groups.iter().fold(0, |sum, group| sum.saturating_add(group.count))
    }

    /// Names of all VMs, group by group, each with the index of its group.
    ///
    /// # Errors
    /// A group whose name is not valid as part of a VM name.
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

    /// The group of a VM with such a name, and its number in it: what [`ClusterRequest::vm_names`] makes a name of. The number may be one that the
    /// group does not have.
    #[must_use]
    pub fn place_in_group(&self, vm: &VmName) -> Option<(usize, u32)> {
        self.groups.iter().enumerate().find_map(|(at, group)| {
            let number = vm.as_str().strip_prefix(&format!("{}-{}-", self.name, group.name))?;
            Some((at, number.parse().ok()?))
        })
    }

    /// Looks for contradictions, which no fleet can fulfil.
    ///
    /// # Errors
    /// [`PlaceError::Contradiction`] with the first one.
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
                return refuse(format!("group {} is listed twice; expected each name once", group.name));
            }
            if group.alternatives.is_empty() {
                return refuse(format!("group {} does not say what its VMs need", group.name));
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
            return refuse("compactness is required, but neither a level nor max_hops is given".to_owned());
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
            return refuse("max_hops = 0 puts all VMs on one node, which anti-affinity forbids".to_owned());
        }
        Ok(())
    }
}
