//! Nodes and the network between them.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::{Device, DeviceAddress, DeviceKind, Node};
use crate::ids::NodeName;
use crate::topology::Topology;

/// Index of a node in [`Fleet::nodes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeIndex(pub u32);

impl NodeIndex {
    /// For indexing slices.
    #[must_use]
    pub fn usize(self) -> usize {
        self.0 as usize
    }
}

/// Why nodes do not make a fleet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// Two nodes with the same name.
    #[error("node {0} is listed twice; list each node once")]
    Duplicate(NodeName),
    /// Two devices with the same address, or two NUMA nodes with the same number.
    #[error("node {node} lists {what} twice; list each device and NUMA node once")]
    DuplicatePart {
        /// The node.
        node: NodeName,
        /// The device or NUMA node.
        what: String,
    },
    /// More than 2^32 nodes.
    #[error("{0} nodes are too many; the limit is 4294967295")]
    TooMany(usize),
}

/// All nodes, and the switches between them. What is taken is not part of it: see [`super::Occupancy`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(try_from = "FleetFile", into = "FleetFile")]
pub struct Fleet {
    nodes: Vec<Node>,
    topology: Topology,
    index: HashMap<NodeName, NodeIndex>,
    /// Remote GPUs that nodes list, each once.
    remote: BTreeMap<DeviceAddress, Device>,
}

/// A fleet as it is written to files.
#[derive(Serialize, Deserialize)]
struct FleetFile {
    nodes: Vec<Node>,
    #[serde(default)]
    topology: Topology,
}

impl TryFrom<FleetFile> for Fleet {
    type Error = FleetError;
    fn try_from(file: FleetFile) -> Result<Self, FleetError> {
        Self::new(file.nodes, file.topology)
    }
}

impl From<Fleet> for FleetFile {
    fn from(fleet: Fleet) -> Self {
        Self { nodes: fleet.nodes, topology: fleet.topology }
    }
}

impl Fleet {
    /// A fleet of these nodes. A node that the topology does not name is connected to no other; a node that only the topology names is
    /// ignored.
    ///
    /// # Errors
    /// A node, device or NUMA node that is listed twice.
    pub fn new(mut nodes: Vec<Node>, topology: Topology) -> Result<Self, FleetError> {
        let mut index = HashMap::with_capacity(nodes.len());
        let mut remote = BTreeMap::new();
        for (at, node) in nodes.iter_mut().enumerate() {
            check_duplicates(node)?;
            node.count_shares();
            for device in node.devices.iter().filter(|device| device.kind == DeviceKind::RemoteGpu) {
                remote.entry(device.address).or_insert_with(|| device.clone());
            }
            let at = u32::try_from(at).map_err(|_| FleetError::TooMany(at))?;
            if index.insert(node.name.clone(), NodeIndex(at)).is_some() {
                return Err(FleetError::Duplicate(node.name.clone()));
            }
        }
        Ok(Self { nodes, topology, index, remote })
    }

    /// All nodes, in the order in which they were added.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Remote GPUs that a node of the fleet lists: VMs of all nodes can have them.
    pub fn remote_gpus(&self) -> impl Iterator<Item = &Device> {
        self.remote.values()
    }

    /// The remote GPU with this address.
    #[must_use]
    pub fn remote_gpu(&self, address: DeviceAddress) -> Option<&Device> {
        self.remote.get(&address)
    }

    /// The network.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The node of that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<NodeIndex> {
        self.index.get(name).copied()
    }

    /// The node at an index of this fleet.
    ///
    /// # Panics
    /// If the index is of another, larger fleet.
    #[must_use]
    pub fn node(&self, index: NodeIndex) -> &Node {
        &self.nodes[index.usize()]
    }

    /// Hops between two nodes: switches that a packet passes. 0 within a node, none if they are not connected.
    #[must_use]
    pub fn hops(&self, a: NodeIndex, b: NodeIndex) -> Option<u32> {
        if a == b { Some(0) } else { self.topology.hops(&self.node(a).name, &self.node(b).name) }
    }
}

fn check_duplicates(node: &Node) -> Result<(), FleetError> {
    let mut addresses: Vec<_> = node.devices.iter().map(|device| device.address).collect();
    addresses.sort_unstable();
    let mut numa: Vec<_> = node.numa.iter().map(|numa| numa.id).collect();
    numa.sort_unstable();
    let device =
        addresses.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| format!("device {}", pair[0]));
    let twice = device.or_else(|| {
        numa.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| format!("NUMA node {}", pair[0]))
    });
    match twice {
        Some(what) => Err(FleetError::DuplicatePart { node: node.name.clone(), what }),
        None => Ok(()),
    }
}
