//! From numbers of VMs on a node to the devices, cores and memory of each VM.

use super::packer::{NodeTable, Packer, UnitTable};
use super::pool::Pool;
use super::view::{NodeView, Unit};
use crate::model::{Fleet, Granted, HugePages, MemoryMib, Node, NodeIndex, NumaShare, Occupancy};

/// What a VM gets.
#[derive(Debug)]
pub(super) struct Grant {
    /// Index among the groups that were packed.
    pub group: usize,
    pub devices: Vec<Granted>,
    pub shares: Vec<NumaShare>,
}

/// Grants for these numbers of VMs by group. None if the node has no room for them.
pub(super) fn grants(
    packer: &mut Packer<'_>,
    fleet: &Fleet,
    used: &Occupancy,
    index: NodeIndex,
    counts: &[u16],
) -> Option<Vec<Grant>> {
    let view = NodeView::new(fleet, used, index, &packer.wanted)?;
    let table: std::rc::Rc<NodeTable> = packer.view(&view);
    let way = table.way(counts)?;
    let mut free: Vec<Pool> = used.free(fleet, index).iter().map(Pool::of).collect();
    let mut grants = Vec::new();
    for (at, unit) in view.units.iter().enumerate() {
        for (alt, devices) in replay(&table.units[at], way.picks[at], unit) {
            let alt = &packer.wanted.alts[alt];
            let node = fleet.node(index);
            let shares = shares(node, unit, &mut free, alt.need, &devices)?;
            let mut devices: Vec<Granted> = devices
                .into_iter()
                .map(|at| Granted { address: node.devices[at].address, kind: node.devices[at].kind })
                .collect();
            devices.sort_unstable();
            grants.push(Grant { group: alt.group, devices, shares });
        }
    }
    Some(grants)
}

/// The VMs of a layer in the order in which they were added: alternative, and indices of devices.
fn replay(table: &UnitTable, layer: usize, unit: &Unit) -> Vec<(usize, Vec<usize>)> {
    let (mut steps, mut at, mut state) = (Vec::new(), layer, 0);
    while let Some((from, alt)) = table.layers[at].from {
        let reached = &table.layers[at].states[state];
        steps.push((alt, &reached.taken));
        (at, state) = (from, reached.from);
    }
    let mut indices = unit.devices.clone();
    let mut counts = unit.free_devices.counts.clone();
    let mut result = Vec::new();
    for (alt, taken) in steps.into_iter().rev() {
        let mut devices = Vec::new();
        for (group, bins) in indices.iter_mut().enumerate() {
            for (bin, members) in unit.free_devices.bins(group).zip(bins) {
                let count = usize::from(taken[bin]);
                devices.extend(members.drain(..count));
                counts[bin] -= taken[bin];
            }
        }
        // The next step refers to the sorted groups.
        let order = unit.free_devices.sorted_order(&counts);
        counts =
            order.iter().flat_map(|group| counts[unit.free_devices.bins(*group)].iter().copied()).collect();
        indices = order.into_iter().map(|group| std::mem::take(&mut indices[group])).collect();
        result.push((alt, devices));
    }
    result
}

/// Cores and memory: from one NUMA node if one has enough, preferably that of the devices; else from several.
fn shares(
    node: &Node,
    unit: &Unit,
    free: &mut [Pool],
    need: Pool,
    devices: &[usize],
) -> Option<Vec<NumaShare>> {
    let near = |at: usize| {
        devices.iter().filter(|device| node.devices[**device].numa == Some(node.numa[at].id)).count()
    };
    let mut order = unit.numa.clone();
    // Among equals the fullest comes first, so that others stay whole for VMs that need all from one NUMA node.
    order.sort_by_key(|at| (!free[*at].holds(need), usize::MAX - near(*at), free[*at].cores, *at));
    let mut left = need;
    let mut shares = Vec::new();
    for at in order {
        let part = free[at].least(left);
        if part != Pool::default() {
            free[at] = free[at].minus(part);
            left = left.minus(part);
            shares.push(NumaShare {
                numa: node.numa[at].id,
                cores: u32::try_from(part.cores).unwrap_or(u32::MAX),
                memory: MemoryMib(part.memory),
                huge: HugePages { pages_2m: part.pages_2m, pages_1g: part.pages_1g },
            });
        }
    }
    shares.sort_by_key(|share| share.numa);
    (left == Pool::default()).then_some(shares)
}
