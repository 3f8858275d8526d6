//! What Slurm's topology/tree would have chosen, as far as nodes go.
//!
//! After the description in Slurm's Topology Guide and the order of its selection plugins: the lowest switch with enough free
//! resources (of several of one level the one with the fewest usable nodes); below it leaf switches by best fit, that is the
//! smallest that is enough, or the largest if none is; below a leaf, nodes in their order.

use crate::model::{Fleet, NodeIndex, Occupancy};
use crate::place::{ClusterRequest, PlaceError, Placement, capacities, place_at};
use crate::topology::{SwitchId, Topology};

/// Chooses nodes like Slurm does.
#[derive(Debug, Clone, Copy, Default)]
pub struct SlurmTree;

impl SlurmTree {
    /// Places the VMs of a request of one group on the nodes that Slurm would take for as many tasks.
    ///
    /// # Errors
    /// As [`crate::place::place`].
    pub fn place(
        self,
        fleet: &Fleet,
        used: &Occupancy,
        request: &ClusterRequest,
    ) -> Result<Placement, PlaceError> {
        let room = capacities(fleet, used, request)?;
        let chosen = slurm_nodes(fleet, &room, request.count());
        let chosen = chosen.ok_or_else(|| PlaceError::NoRoom {
            vms: request.count(),
            fit: room.iter().sum::<u32>().min(request.count()),
            reason: "no switch has enough free below it".to_owned(),
        })?;
        place_at(fleet, used, request, &chosen)
    }
}

/// Nodes for so many tasks and how many on each, given how many each node has room for. None if there is not enough below any
/// switch.
#[must_use]
pub fn slurm_nodes(fleet: &Fleet, room: &[u32], tasks: u32) -> Option<Vec<(NodeIndex, u32)>> {
    let topology = fleet.topology();
    let usable = |id: SwitchId| -> Vec<NodeIndex> {
        let below = topology.nodes_below(id).into_iter().filter_map(|name| fleet.find(name.as_str()));
        below.filter(|index| room[index.usize()] > 0).collect()
    };
    let total = |nodes: &[NodeIndex]| nodes.iter().map(|index| room[index.usize()]).sum::<u32>();
    // Few tasks are not worth a look below every switch: leaves first, upwards only as long as none is enough.
    let mut top = None;
    for height in 1..=topology.height() {
        let enough = topology.ids().filter(|id| topology.switch(*id).height == height).filter_map(|id| {
            let nodes = usable(id);
            (total(&nodes) >= tasks).then_some((nodes.len(), id))
        });
        top = enough.min_by_key(|(nodes, id)| (*nodes, id.0));
        if top.is_some() {
            break;
        }
    }
    let mut leaves: Vec<(u32, Vec<NodeIndex>)> = leaves(topology, top?.1)
        .into_iter()
        .map(usable)
        .map(|nodes| (total(&nodes), nodes))
        .filter(|(room, _)| *room > 0)
        .collect();
    let mut left = tasks;
    let mut chosen = Vec::new();
    while left > 0 {
        let enough =
            leaves.iter().enumerate().filter(|(_, leaf)| leaf.0 >= left).min_by_key(|(_, leaf)| leaf.0);
        let best = enough.or_else(|| leaves.iter().enumerate().rev().max_by_key(|(_, leaf)| leaf.0));
        let at = best.map(|(at, _)| at)?;
        for index in leaves.remove(at).1 {
            let here = room[index.usize()].min(left);
            if here > 0 {
                chosen.push((index, here));
                left -= here;
            }
        }
    }
    Some(chosen)
}

fn leaves(topology: &Topology, top: SwitchId) -> Vec<SwitchId> {
    let (mut leaves, mut stack) = (Vec::new(), vec![top]);
    while let Some(id) = stack.pop() {
        let switch = topology.switch(id);
        if !switch.nodes.is_empty() {
            leaves.push(id);
        }
        stack.extend(switch.children.iter().rev());
    }
    leaves
}
