//! How many VMs of each group a node has room for, and at what distance of their devices.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use super::devices::{Reached, add_vm};
use super::pool::Pool;
use super::view::{NodeView, Unit, UnitKey};
use super::wanted::Wanted;
use crate::model::{Fleet, NodeIndex, Occupancy};

/// Most combinations of alternatives that are tried on one unit.
const MOST_LAYERS: usize = 4096;

/// One combination of alternatives on one unit.
#[derive(Debug)]
pub(super) struct Layer {
    /// Number of VMs by alternative.
    pub counts: Vec<u16>,
    /// The layer with one VM less, and the alternative of the last VM.
    pub from: Option<(usize, usize)>,
    pub states: Vec<Reached>,
}

/// All combinations on one unit.
#[derive(Debug)]
pub(super) struct UnitTable {
    pub layers: Vec<Layer>,
    /// For each number of VMs by group, the cost and index of the cheapest layer.
    best: BTreeMap<Vec<u16>, (u32, usize)>,
    exact: bool,
}

/// One way to fill a node.
#[derive(Debug, Clone)]
pub(super) struct Packed {
    /// Number of VMs by group.
    pub counts: Vec<u16>,
    /// Distance of their devices.
    pub cost: u32,
    /// Index of the layer, by unit.
    pub picks: Vec<usize>,
}

/// The best way to fill a node for each number of VMs by group.
#[derive(Debug, Default)]
pub(super) struct NodeTable {
    pub ways: Vec<Packed>,
    pub units: Vec<Rc<UnitTable>>,
    /// Nothing was left out.
    pub exact: bool,
}

impl NodeTable {
    /// The way with these numbers of VMs.
    pub fn way(&self, counts: &[u16]) -> Option<&Packed> {
        self.ways.iter().find(|way| way.counts == counts)
    }

    /// Most VMs of a group, if the others get none.
    pub fn most(&self, group: usize) -> u32 {
        self.ways.iter().map(|way| u32::from(way.counts[group])).max().unwrap_or(0)
    }
}

/// Packs nodes, and remembers the results: most nodes of a fleet equal others.
#[derive(Debug)]
pub(super) struct Packer<'a> {
    pub wanted: Wanted<'a>,
    nodes: HashMap<(u64, Vec<UnitKey>), Rc<NodeTable>>,
    units: HashMap<(u64, UnitKey), Rc<UnitTable>>,
    empty: Rc<NodeTable>,
}

impl<'a> Packer<'a> {
    pub fn new(wanted: Wanted<'a>) -> Self {
        let empty = Rc::new(NodeTable { exact: true, ..NodeTable::default() });
        Self { wanted, nodes: HashMap::new(), units: HashMap::new(), empty }
    }

    /// The ways to fill a node.
    pub fn node(&mut self, fleet: &Fleet, used: &Occupancy, index: NodeIndex) -> Rc<NodeTable> {
        match NodeView::new(fleet, used, index, &self.wanted) {
            Some(view) => self.view(&view),
            None => self.empty.clone(),
        }
    }

    /// The ways to fill a node with this view.
    pub fn view(&mut self, view: &NodeView) -> Rc<NodeTable> {
        let key = view.key();
        if let Some(table) = self.nodes.get(&key) {
            return table.clone();
        }
        let table = Rc::new(self.fill(view));
        self.nodes.insert(key, table.clone());
        table
    }

    fn fill(&mut self, view: &NodeView) -> NodeTable {
        let mut exact = !self.wanted.mixed;
        let mut units = Vec::new();
        let mut ways: BTreeMap<Vec<u16>, (u32, Vec<usize>)> =
            BTreeMap::from([(vec![0; self.wanted.limits.len()], (0, Vec::new()))]);
        for unit in &view.units {
            let table = self.unit(view.usable, unit);
            exact &= table.exact;
            let mut next: BTreeMap<Vec<u16>, (u32, Vec<usize>)> = BTreeMap::new();
            for (counts, (cost, picks)) in &ways {
                for (more, (more_cost, layer)) in &table.best {
                    let sum: Vec<u16> = counts.iter().zip(more).map(|(a, b)| a + b).collect();
                    let total: u32 = sum.iter().map(|count| u32::from(*count)).sum();
                    let within =
                        sum.iter().zip(&self.wanted.limits).all(|(count, limit)| u32::from(*count) <= *limit);
                    if !within || total > self.wanted.per_node {
                        continue;
                    }
                    let sum_cost = cost + more_cost;
                    if next.get(&sum).is_none_or(|(old, _)| sum_cost < *old) {
                        let picks = picks.iter().copied().chain([*layer]).collect();
                        next.insert(sum, (sum_cost, picks));
                    }
                }
            }
            ways = next;
            units.push(table);
        }
        let ways = ways.into_iter().map(|(counts, (cost, picks))| Packed { counts, cost, picks }).collect();
        NodeTable { ways, units, exact }
    }

    fn unit(&mut self, usable: u64, unit: &Unit) -> Rc<UnitTable> {
        let key = (usable, (unit.pool, unit.free_devices.clone()));
        if let Some(table) = self.units.get(&key) {
            return table.clone();
        }
        let table = Rc::new(pack_unit(&self.wanted, usable, unit));
        self.units.insert(key, table.clone());
        table
    }
}

/// Starts with nothing and adds one VM after the other, of the same or a later alternative, so that each combination is reached once.
fn pack_unit(wanted: &Wanted<'_>, usable: u64, unit: &Unit) -> UnitTable {
    let start = Reached { counts: unit.free_devices.counts.clone(), cost: 0, from: 0, taken: Vec::new() };
    let mut layers = vec![Layer { counts: vec![0; wanted.alts.len()], from: None, states: vec![start] }];
    let (mut at, mut exact) = (0, true);
    while at < layers.len() {
        let first = layers[at].from.map_or(0, |(_, alt)| alt);
        for alt in first..wanted.alts.len() {
            if usable >> alt & 1 == 0 {
                continue;
            }
            let mut counts = layers[at].counts.clone();
            counts[alt] += 1;
            if !within(wanted, &counts, unit) {
                continue;
            }
            let (states, cut) = next_states(wanted, unit, &layers[at], alt);
            // States that were cut off cost more than those that are left. They matter only if none that costs nothing is left, or
            // if devices must be close.
            let strict = wanted.alts[alt].wants.closeness.is_some() || wanted.alts[alt].wants.isolate_vfs;
            exact &= !cut || (states.first().is_some_and(|state| state.cost == 0) && !strict);
            if layers.len() >= MOST_LAYERS {
                exact = false;
            } else if !states.is_empty() {
                layers.push(Layer { counts, from: Some((at, alt)), states });
            }
        }
        at += 1;
    }
    let mut best: BTreeMap<Vec<u16>, (u32, usize)> = BTreeMap::new();
    for (at, layer) in layers.iter().enumerate() {
        let groups = by_group(wanted, &layer.counts);
        let cost = layer.states[0].cost;
        if best.get(&groups).is_none_or(|(old, _)| cost < *old) {
            best.insert(groups, (cost, at));
        }
    }
    UnitTable { layers, best, exact }
}

fn by_group(wanted: &Wanted<'_>, counts: &[u16]) -> Vec<u16> {
    let mut groups = vec![0; wanted.limits.len()];
    for (alt, count) in wanted.alts.iter().zip(counts) {
        groups[alt.group] += count;
    }
    groups
}

fn within(wanted: &Wanted<'_>, counts: &[u16], unit: &Unit) -> bool {
    let groups = by_group(wanted, counts);
    let total: u32 = groups.iter().map(|count| u32::from(*count)).sum();
    let needs = wanted.alts.iter().zip(counts).map(|(alt, count)| alt.need.times(u64::from(*count)));
    total <= wanted.per_node
        && groups.iter().zip(&wanted.limits).all(|(count, limit)| u32::from(*count) <= *limit)
        && unit.pool.holds(needs.fold(Pool::default(), Pool::plus))
}

fn next_states(wanted: &Wanted<'_>, unit: &Unit, layer: &Layer, alt: usize) -> (Vec<Reached>, bool) {
    let wants = &wanted.alts[alt].wants;
    if !wants.needs.is_empty() {
        return add_vm(&unit.free_devices, &layer.states, wants);
    }
    let unchanged = |(from, state): (usize, &Reached)| Reached {
        counts: state.counts.clone(),
        cost: state.cost,
        from,
        taken: vec![0; state.counts.len()],
    };
    (layer.states.iter().enumerate().map(unchanged).collect(), false)
}
