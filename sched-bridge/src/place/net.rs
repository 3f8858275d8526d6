//! The fleet as a forest: which nodes are below which switch, what is free there, and how placements are compared.

use super::PlaceError;
use super::placement::Score;
use super::request::{Alternative, ClusterRequest, Mode, NearTo, VmGroup};
use super::space::Cost;
use crate::model::{DeviceKind, Fleet, NodeIndex, NodeState, Occupancy};
use crate::topology::{SwitchId, Topology};

/// Unit in which free blocks are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockUnit {
    Gpus,
    Cores,
}

impl BlockUnit {
    /// GPUs if the request asks for any, cores otherwise.
    pub fn of(request: &ClusterRequest) -> Self {
        let gpus = request.groups.iter().any(|group| Self::Gpus.per_vm(group) > 0);
        if gpus { Self::Gpus } else { Self::Cores }
    }

    /// Least amount that a VM of the group takes, whichever alternative it gets.
    pub fn per_vm(self, group: &VmGroup) -> u64 {
        let of = |alternative: &Alternative| match self {
            Self::Cores => u64::from(alternative.vcpus),
            Self::Gpus => {
                let gpus = alternative.devices.iter().filter(|need| need.filter.kind == DeviceKind::Gpu);
                gpus.map(|need| u64::from(need.count)).sum()
            }
        };
        group.alternatives.iter().map(of).min().unwrap_or(0)
    }

    fn free(self, fleet: &Fleet, used: &Occupancy, index: NodeIndex) -> u64 {
        let node = fleet.node(index);
        if node.state != NodeState::Up {
            return 0;
        }
        match self {
            Self::Cores => used.free(fleet, index).iter().map(|share| u64::from(share.cores)).sum(),
            Self::Gpus => {
                let gpus =
                    node.devices.iter().enumerate().filter(|(_, device)| device.kind == DeviceKind::Gpu);
                gpus.filter(|(at, _)| !used.device_taken(index, *at)).count() as u64
            }
        }
    }
}

/// Loss of a free block when an amount of it is taken: the difference of squares, or of cubes for leaf switches. So whole leaf switches are
/// kept free first, then nodes, then what is above: a large cluster needs a free leaf switch more than half-empty spines.
pub(super) fn loss(block: Block, free: u64, taken: u64) -> u64 {
    let left = free.saturating_sub(taken);
    let worth = |free: u64| match block {
        Block::Leaf => free.saturating_mul(free).saturating_mul(free),
        Block::Other => free.saturating_mul(free),
    };
    worth(free) - worth(left)
}

/// Kind of a free block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Block {
    /// All below a switch with nothing but nodes below it.
    Leaf,
    /// A node, or all below a higher switch.
    Other,
}

impl Block {
    /// The block below a switch.
    pub fn of(topology: &Topology, id: SwitchId) -> Self {
        if topology.switch(id).height == 1 { Self::Leaf } else { Self::Other }
    }
}

/// The fleet as a forest.
#[derive(Debug)]
pub(super) struct Net<'a> {
    pub fleet: &'a Fleet,
    pub topology: &'a Topology,
    /// Nodes of the fleet that are connected to each switch directly.
    pub direct: Vec<Vec<NodeIndex>>,
    /// The switch that each node is connected to.
    pub home: Vec<Option<SwitchId>>,
    /// Number of nodes of the fleet below each switch.
    pub below: Vec<u32>,
    /// Free units on each node.
    pub free_node: Vec<u64>,
    /// Free units below each switch.
    pub free_switch: Vec<u64>,
    /// Switches from the bottom up.
    pub upwards: Vec<SwitchId>,
}

impl<'a> Net<'a> {
    pub fn new(fleet: &'a Fleet, used: &Occupancy, unit: BlockUnit) -> Self {
        let topology = fleet.topology();
        let switches = topology.switches().len();
        let mut net = Self {
            fleet,
            topology,
            direct: vec![Vec::new(); switches],
            home: Vec::with_capacity(fleet.nodes().len()),
            below: vec![0; switches],
            free_node: Vec::with_capacity(fleet.nodes().len()),
            free_switch: vec![0; switches],
            upwards: topology.ids().collect(),
        };
        net.upwards.sort_by_key(|id| topology.switch(*id).height);
        for (index, node) in indexed(fleet) {
            let home = topology.leaf_of(node.name.as_str());
            net.home.push(home);
            net.free_node.push(unit.free(fleet, used, index));
            if let Some(home) = home {
                net.direct[home.usize()].push(index);
            }
        }
        net.free_switch = net.sum_up(|index| net.free_node[index.usize()]);
        let below = net.sum_up(|_| 1);
        net.below = below.into_iter().map(|count| u32::try_from(count).unwrap_or(u32::MAX)).collect();
        net
    }

    /// The sum of a value over all nodes below each switch.
    pub fn sum_up(&self, of: impl Fn(NodeIndex) -> u64) -> Vec<u64> {
        let mut sums = vec![0; self.direct.len()];
        for id in &self.upwards {
            let own: u64 = self.direct[id.usize()].iter().map(|index| of(*index)).sum();
            sums[id.usize()] += own;
            if let Some(parent) = self.topology.switch(*id).parent {
                sums[parent.usize()] += sums[id.usize()];
            }
        }
        sums
    }

    /// Hops of each node to what the request is to be near; none for nodes that are not connected to it.
    ///
    /// # Errors
    /// A node or switch that is not in the fleet.
    pub fn near(&self, request: &ClusterRequest) -> Result<Option<Vec<Option<u32>>>, PlaceError> {
        let Some(near) = &request.near else { return Ok(None) };
        let hops: Vec<Option<u32>> = match &near.to {
            NearTo::Node(name) => {
                let target = self.fleet.find(name.as_str());
                let target =
                    target.ok_or_else(|| PlaceError::Unknown { what: "node", name: name.to_string() })?;
                indexed(self.fleet).map(|(index, _)| self.hops(index, target)).collect()
            }
            NearTo::Switch(name) => {
                let target = self.topology.find(name.as_str());
                let target =
                    target.ok_or_else(|| PlaceError::Unknown { what: "switch", name: name.to_string() })?;
                self.home.iter().map(|home| home.and_then(|home| self.to_switch(home, target))).collect()
            }
        };
        Ok(Some(hops))
    }

    /// Hops between two nodes.
    pub fn hops(&self, a: NodeIndex, b: NodeIndex) -> Option<u32> {
        if a == b {
            return Some(0);
        }
        self.topology.switch_hops(self.home[a.usize()]?, self.home[b.usize()]?)
    }

    /// 0 for nodes below the switch, else the switches on the path to it.
    fn to_switch(&self, home: SwitchId, target: SwitchId) -> Option<u32> {
        let mut at = Some(home);
        while let Some(id) = at {
            if id == target {
                return Some(0);
            }
            at = self.topology.switch(id).parent;
        }
        self.topology.switch_hops(home, target)
    }
}

/// Nodes with their indices.
pub(super) fn indexed(fleet: &Fleet) -> impl Iterator<Item = (NodeIndex, &crate::model::Node)> {
    fleet
        .nodes()
        .iter()
        .enumerate()
        .map(|(at, node)| (NodeIndex(u32::try_from(at).unwrap_or(u32::MAX)), node))
}

/// The terms of a cost, before they are put in order.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CostTerms {
    pub sum_hops: u64,
    pub leaves: u64,
    pub near: u64,
    pub fragmentation: u64,
    pub devices: u64,
}

/// The order in which terms are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Order {
    /// Distance comes first; else large free blocks do.
    pub compact: bool,
}

impl Order {
    pub fn of(mode: Mode) -> Self {
        Self { compact: mode != Mode::Unconstrained }
    }

    /// The key by which scores are compared.
    pub fn key(self, score: Score) -> (u64, Score) {
        (if self.compact { 0 } else { score.fragmentation }, score)
    }

    pub fn cost(self, terms: CostTerms) -> Cost {
        if self.compact {
            Cost([terms.sum_hops, terms.leaves, terms.near, terms.fragmentation, terms.devices])
        } else {
            Cost([terms.fragmentation, terms.sum_hops, terms.leaves, terms.near, terms.devices])
        }
    }
}
