//! The network: switches, the nodes connected to them, and how far apart two nodes are.
//!
//! Every network becomes a forest of switches (Slurm's topology/tree, InfiniBand fat trees, blocks, labels of Kubernetes). The
//! distance of two nodes is in hops, the switches that a packet passes: 0 within a node, 1 below one leaf switch, 3 across a switch
//! above two leaf switches, and so on.
//!
//! ```
//! use sched_bridge::model::NodeName;
//! use sched_bridge::topology::{Format, import};
//!
//! let text = "SwitchName=leaf1 Nodes=n[1-2]\nSwitchName=leaf2 Nodes=n3\nSwitchName=top Switches=leaf[1-2]\n";
//! let topology = import(text, Format::guess("topology.conf", text), &[])?.topology;
//! let hops = |a, b| Ok::<_, sched_bridge::model::IdError>(topology.hops(&NodeName::new(a)?, &NodeName::new(b)?));
//! assert_eq!((hops("n1", "n2")?, hops("n1", "n3")?), (Some(1), Some(3)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod block;
mod build;
mod error;
mod fabric;
pub mod hostlist;
pub mod ibnet;
mod import;
pub mod labels;
mod names;
pub mod slurm_conf;
pub mod slurm_yaml;

pub use build::{Builder, SwitchSpec};
pub use error::{Origin, TopologyError};
pub use fabric::Imported;
pub use import::{Format, import};

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::ids::NodeName;
pub use crate::ids::SwitchName;

/// Index of a switch in [`Topology::switches`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SwitchId(pub u32);

impl SwitchId {
    /// For indexing slices.
    #[must_use]
    pub fn usize(self) -> usize {
        self.0 as usize
    }
}

/// A switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Switch {
    /// Its name.
    pub name: SwitchName,
    /// The switch above it.
    pub parent: Option<SwitchId>,
    /// Switches below it.
    pub children: Vec<SwitchId>,
    /// Nodes connected to it directly.
    pub nodes: Vec<NodeName>,
    /// 1 if only nodes are below it, else one more than that of the highest switch below it.
    pub height: u32,
    /// Number of switches above it.
    pub depth: u32,
    /// Speed of its links, in the words of the source.
    pub link_speed: Option<String>,
}

/// How the source describes the network; it is exported in the same way.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Style {
    /// Switches over switches.
    #[default]
    Tree,
    /// Blocks of nodes (Slurm's topology/block).
    Block {
        /// Sizes in nodes by which blocks are joined, the smallest first; each is a power of two times the first.
        sizes: Vec<u32>,
    },
    /// All nodes equally far from each other.
    Flat,
}

/// A forest of switches with nodes below them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "build::TopologyFile", into = "build::TopologyFile")]
pub struct Topology {
    switches: Vec<Switch>,
    by_name: HashMap<SwitchName, SwitchId>,
    home: HashMap<NodeName, SwitchId>,
    style: Style,
}

impl Topology {
    /// All switches, in the order of the source.
    #[must_use]
    pub fn switches(&self) -> &[Switch] {
        &self.switches
    }

    /// The switch with an id of this topology.
    ///
    /// # Panics
    /// If the id is of another, larger topology.
    #[must_use]
    pub fn switch(&self, id: SwitchId) -> &Switch {
        &self.switches[id.usize()]
    }

    /// The switch of that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<SwitchId> {
        self.by_name.get(name).copied()
    }

    /// The switch that a node is connected to.
    #[must_use]
    pub fn leaf_of(&self, node: &str) -> Option<SwitchId> {
        self.home.get(node).copied()
    }

    /// How the source describes the network.
    #[must_use]
    pub fn style(&self) -> &Style {
        &self.style
    }

    /// Switches without a switch above them.
    pub fn roots(&self) -> impl Iterator<Item = SwitchId> {
        self.ids().filter(|id| self.switch(*id).parent.is_none())
    }

    /// Ids of all switches.
    pub fn ids(&self) -> impl Iterator<Item = SwitchId> + use<> {
        (0..u32::try_from(self.switches.len()).unwrap_or(u32::MAX)).map(SwitchId)
    }

    /// Nodes, in no order.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeName> {
        self.home.keys()
    }

    /// Levels of switches; 0 without any.
    #[must_use]
    pub fn height(&self) -> u32 {
        self.switches.iter().map(|switch| switch.height).max().unwrap_or(0)
    }

    /// Hops between two nodes: 0 from a node to itself, none if they are not connected.
    #[must_use]
    pub fn hops(&self, a: &NodeName, b: &NodeName) -> Option<u32> {
        if a == b {
            return Some(0);
        }
        self.switch_hops(self.leaf_of(a.as_str())?, self.leaf_of(b.as_str())?)
    }

    /// Switches on the path between two switches, both included: 1 from a switch to itself, none if they are not connected.
    #[must_use]
    pub fn switch_hops(&self, mut a: SwitchId, mut b: SwitchId) -> Option<u32> {
        let mut hops = 1;
        while a != b {
            let (depth_a, depth_b) = (self.switch(a).depth, self.switch(b).depth);
            if depth_a >= depth_b {
                a = self.switch(a).parent?;
                hops += 1;
            }
            if depth_b >= depth_a {
                b = self.switch(b).parent?;
                hops += 1;
            }
        }
        Some(hops)
    }

    /// Switches above a node, from the top down (Slurm's `SLURM_TOPOLOGY_ADDR` without the node).
    #[must_use]
    pub fn path(&self, node: &NodeName) -> Vec<SwitchId> {
        let mut path = Vec::new();
        let mut at = self.leaf_of(node.as_str());
        while let Some(id) = at {
            path.push(id);
            at = self.switch(id).parent;
        }
        path.reverse();
        path
    }

    /// All nodes below a switch, from left to right.
    #[must_use]
    pub fn nodes_below(&self, id: SwitchId) -> Vec<&NodeName> {
        let (mut nodes, mut stack) = (Vec::new(), vec![id]);
        while let Some(id) = stack.pop() {
            let switch = self.switch(id);
            nodes.extend(&switch.nodes);
            stack.extend(switch.children.iter().rev());
        }
        nodes
    }
}
