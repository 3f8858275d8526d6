//! Nodes and the network between them.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{Node, NodeName};
use crate::topology::Topology;

/// A node's place in [`Fleet::nodes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeIndex(pub u32);

impl NodeIndex {
    /// For indexing slices.
    #[must_use]
    pub fn usize(self) -> usize {
        self.0 as usize
    }
}

/// Why nodes make no fleet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// Two nodes of one name.
    #[error("node {0} is there twice: expected every node once")]
    Duplicate(NodeName),
    /// Two devices of one address, two NUMA nodes of one number.
    #[error("node {node} has {what} twice: expected every device and NUMA node once")]
    DuplicatePart {
        /// The node.
        node: NodeName,
        /// What it has twice.
        what: String,
    },
    /// More than 2^32 nodes.
    #[error("{0} nodes are too many: at most 4294967295 can be placed on")]
    TooMany(usize),
}

/// All nodes, and the switches between them. Who has taken what is not part of it: see [`super::Occupancy`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(try_from = "Parts", into = "Parts")]
pub struct Fleet {
    nodes: Vec<Node>,
    topology: Topology,
    index: HashMap<NodeName, NodeIndex>,
}

/// What is written down of a fleet.
#[derive(Serialize, Deserialize)]
struct Parts {
    nodes: Vec<Node>,
    #[serde(default)]
    topology: Topology,
}

impl TryFrom<Parts> for Fleet {
    type Error = FleetError;
    fn try_from(parts: Parts) -> Result<Self, FleetError> {
        Self::new(parts.nodes, parts.topology)
    }
}

impl From<Fleet> for Parts {
    fn from(fleet: Fleet) -> Self {
        Self { nodes: fleet.nodes, topology: fleet.topology }
    }
}

impl Fleet {
    /// Puts nodes and topology together. A node that the topology does not know is out of reach of all others; a node that only
    /// the topology knows is ignored.
    ///
    /// # Errors
    /// A node, device or NUMA node that is there twice.
    pub fn new(nodes: Vec<Node>, topology: Topology) -> Result<Self, FleetError> {
        let mut index = HashMap::with_capacity(nodes.len());
        for (at, node) in nodes.iter().enumerate() {
            check_parts(node)?;
            let at = u32::try_from(at).map_err(|_| FleetError::TooMany(nodes.len()))?;
            if index.insert(node.name.clone(), NodeIndex(at)).is_some() {
                return Err(FleetError::Duplicate(node.name.clone()));
            }
        }
        Ok(Self { nodes, topology, index })
    }

    /// All nodes, in the order in which they were given.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
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

    /// The node at an index that came from this fleet.
    ///
    /// # Panics
    /// If the index came from another, larger fleet.
    #[must_use]
    pub fn node(&self, index: NodeIndex) -> &Node {
        &self.nodes[index.usize()]
    }

    /// To change the state, labels or traits of a node. Names, devices and NUMA nodes must stay as they are.
    #[must_use]
    pub fn node_mut(&mut self, name: &str) -> Option<&mut Node> {
        let index = self.find(name)?;
        self.nodes.get_mut(index.usize())
    }

    /// Switches that a packet passes between two nodes; 0 within a node, none if there is no way.
    #[must_use]
    pub fn hops(&self, a: NodeIndex, b: NodeIndex) -> Option<u32> {
        if a == b { Some(0) } else { self.topology.hops(&self.node(a).name, &self.node(b).name) }
    }
}

fn check_parts(node: &Node) -> Result<(), FleetError> {
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
