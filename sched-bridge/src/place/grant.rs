//! From numbers of VMs on a node to devices, cores and memory of each.

use super::packer::{NodeTable, Packer, UnitTable};
use super::view::{Pool, Unit, View};
use crate::model::{Fleet, Granted, HugePages, MemoryMib, Node, NodeIndex, NumaShare, Occupancy};

/// What one VM gets.
#[derive(Debug)]
pub(super) struct Grant {
    /// Place among the groups that were packed.
    pub group: usize,
    pub devices: Vec<Granted>,
    pub shares: Vec<NumaShare>,
}

/// Grants for these numbers of VMs by group. None if the node cannot take them (it changed since it was packed).
pub(super) fn grants(
    packer: &mut Packer<'_>,
    fleet: &Fleet,
    used: &Occupancy,
    index: NodeIndex,
    counts: &[u16],
) -> Option<Vec<Grant>> {
    let view = View::new(fleet, used, index, &packer.wanted)?;
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

/// The alternatives of a layer's VMs in the order in which they were added, each with its devices.
fn replay(table: &UnitTable, layer: usize, unit: &Unit) -> Vec<(usize, Vec<usize>)> {
    let (mut steps, mut at, mut state) = (Vec::new(), layer, 0);
    while let Some((from, alt)) = table.layers[at].from {
        let reached = &table.layers[at].states[state];
        steps.push((alt, &reached.taken));
        (at, state) = (from, reached.from);
    }
    let mut stock = unit.devices.clone();
    let mut free = unit.shelf.free.clone();
    let mut result = Vec::new();
    for (alt, taken) in steps.into_iter().rev() {
        let mut devices = Vec::new();
        for (group, bins) in stock.iter_mut().enumerate() {
            for (bin, members) in unit.shelf.bins(group).zip(bins) {
                let count = usize::from(taken[bin]);
                devices.extend(members.drain(..count));
                free[bin] -= taken[bin];
            }
        }
        // The next step speaks of the sorted shelf.
        let order = unit.shelf.sorted_order(&free);
        free = order.iter().flat_map(|group| free[unit.shelf.bins(*group)].iter().copied()).collect();
        stock = order.into_iter().map(|group| std::mem::take(&mut stock[group])).collect();
        result.push((alt, devices));
    }
    result
}

/// Cores and memory: from one NUMA node if one has enough, and there from that of the devices; else from several.
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
    // Fullest first among those that are alike: what is left whole may serve somebody who needs all from one.
    order.sort_by_key(|at| (!free[*at].holds(need), usize::MAX - near(*at), free[*at].cores, *at));
    let mut left = need;
    let mut shares = Vec::new();
    for at in order {
        let part = free[at].least(left);
        if part != Pool::default() {
            free[at] = less(free[at], part);
            left = less(left, part);
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

fn less(a: Pool, b: Pool) -> Pool {
    Pool {
        cores: a.cores - b.cores,
        memory: a.memory - b.memory,
        pages_2m: a.pages_2m - b.pages_2m,
        pages_1g: a.pages_1g - b.pages_1g,
    }
}
