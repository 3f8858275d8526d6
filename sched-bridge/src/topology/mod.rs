//! The network: switches, what hangs on them, and how far apart two nodes are.
//!
//! Every network becomes a forest of switches (Slurm's topology/tree, InfiniBand fat trees, blocks, labels of Kubernetes). The
//! distance of two nodes is the number of switches that a packet passes: 0 within a node, 1 under one leaf, 3 across one
//! switch above the leaves, and so on.

mod block;
mod build;
mod error;
mod fabric;
pub mod hostlist;
pub mod ibnet;
mod import;
pub mod labels;
pub mod slurm_conf;
pub mod slurm_yaml;
pub mod svg;

pub use build::{Builder, SwitchSpec};
pub use error::{Origin, TopologyError};
pub use fabric::Imported;
pub use import::{Format, import};

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::model::NodeName;
pub use crate::model::SwitchName;

/// A switch's place in [`Topology::switches`].
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
    /// Nodes on its own ports.
    pub nodes: Vec<NodeName>,
    /// 1 if only nodes are below it, else one more than the highest switch below it.
    pub height: u32,
    /// Switches above it.
    pub depth: u32,
    /// Speed of its links, as the source words it.
    pub link_speed: Option<String>,
}

/// What kind of network it was described as; exported as the same.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Style {
    /// Switches over switches.
    #[default]
    Tree,
    /// Blocks of nodes (Slurm's topology/block), and the sizes in nodes by which blocks are put together.
    Block {
        /// Sizes, the smallest first; each a power of two times the first.
        sizes: Vec<u32>,
    },
    /// All nodes alike.
    Flat,
}

/// A forest of switches with nodes below them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "build::Written", into = "build::Written")]
pub struct Topology {
    switches: Vec<Switch>,
    by_name: HashMap<SwitchName, SwitchId>,
    home: HashMap<NodeName, SwitchId>,
    style: Style,
}

impl Topology {
    /// All switches; those above others may come before or after them.
    #[must_use]
    pub fn switches(&self) -> &[Switch] {
        &self.switches
    }

    /// The switch at an id of this topology.
    ///
    /// # Panics
    /// If the id came from another, larger topology.
    #[must_use]
    pub fn switch(&self, id: SwitchId) -> &Switch {
        &self.switches[id.usize()]
    }

    /// The switch of that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<SwitchId> {
        self.by_name.get(name).copied()
    }

    /// The switch that a node hangs on.
    #[must_use]
    pub fn leaf_of(&self, node: &str) -> Option<SwitchId> {
        self.home.get(node).copied()
    }

    /// What kind of network it was described as.
    #[must_use]
    pub fn style(&self) -> &Style {
        &self.style
    }

    /// Switches without one above them.
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

    /// The most switches over each other: 0 without any.
    #[must_use]
    pub fn height(&self) -> u32 {
        self.switches.iter().map(|switch| switch.height).max().unwrap_or(0)
    }

    /// Switches that a packet passes between two nodes: 0 if they are one, none if there is no way.
    #[must_use]
    pub fn hops(&self, a: &NodeName, b: &NodeName) -> Option<u32> {
        if a == b {
            return Some(0);
        }
        self.switch_hops(self.leaf_of(a.as_str())?, self.leaf_of(b.as_str())?)
    }

    /// Switches on the way between two switches, both counted; 1 if they are one.
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

    /// The way from the top down to a node, with the node at its end (Slurm's `SLURM_TOPOLOGY_ADDR`).
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
