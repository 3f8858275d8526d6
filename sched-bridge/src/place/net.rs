//! The fleet as a forest: which nodes hang where, what is free below each switch, and what distances cost.

use super::PlaceError;
use super::request::{Alternative, ClusterRequest, Mode, NearTo, VmGroup};
use super::result::Score;
use super::space::Cost;
use crate::model::{DeviceKind, Fleet, NodeIndex, NodeState, Occupancy};
use crate::topology::{SwitchId, Topology};

/// In which unit free blocks are measured.
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

    /// What a VM takes at least, whichever alternative it gets.
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

/// What is lost of a free block when so much of it is taken: the difference of squares, of cubes at leaf switches. So whole leaves
/// are spared first, then nodes, then what is above: a big cluster misses a leaf more than half-empty spines.
pub(super) fn loss(block: Block, free: u64, taken: u64) -> u64 {
    let left = free.saturating_sub(taken);
    let worth = |free: u64| match block {
        Block::Leaf => free.saturating_mul(free).saturating_mul(free),
        Block::Other => free.saturating_mul(free),
    };
    worth(free) - worth(left)
}

/// What a free block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Block {
    /// A switch with nothing but nodes below it.
    Leaf,
    /// A node, or a higher switch.
    Other,
}

impl Block {
    /// What a switch is.
    pub fn of(topology: &Topology, id: SwitchId) -> Self {
        if topology.switch(id).height == 1 { Self::Leaf } else { Self::Other }
    }
}

/// The forest.
#[derive(Debug)]
pub(super) struct Net<'a> {
    pub fleet: &'a Fleet,
    pub topology: &'a Topology,
    /// Nodes of the fleet on the ports of each switch.
    pub direct: Vec<Vec<NodeIndex>>,
    /// The switch of each node.
    pub home: Vec<Option<SwitchId>>,
    /// Nodes of the fleet below each switch.
    pub below: Vec<u32>,
    pub free_node: Vec<u64>,
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

    /// A value of nodes, summed over all below each switch.
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

    /// Hops of each node to what the request is to be near to; none where it cannot be reached.
    ///
    /// # Errors
    /// A node or switch that is not there.
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

    /// Switches between two nodes.
    pub fn hops(&self, a: NodeIndex, b: NodeIndex) -> Option<u32> {
        if a == b {
            return Some(0);
        }
        self.topology.switch_hops(self.home[a.usize()]?, self.home[b.usize()]?)
    }

    /// 0 below the switch, else the switches on the way to it.
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

/// Parts of a cost, before they are put in order.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Parts {
    pub sum_hops: u64,
    pub leaves: u64,
    pub near: u64,
    pub fragmentation: u64,
    pub devices: u64,
}

/// What counts more than what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Order {
    /// Distance comes first; if not, leaving big blocks whole does.
    pub compact: bool,
}

impl Order {
    pub fn of(mode: Mode) -> Self {
        Self { compact: mode != Mode::Unconstrained }
    }

    /// What to compare scores by.
    pub fn key(self, score: Score) -> (u64, Score) {
        (if self.compact { 0 } else { score.fragmentation }, score)
    }

    pub fn cost(self, parts: Parts) -> Cost {
        if self.compact {
            Cost([parts.sum_hops, parts.leaves, parts.near, parts.fragmentation, parts.devices])
        } else {
            Cost([parts.fragmentation, parts.sum_hops, parts.leaves, parts.near, parts.devices])
        }
    }
}
