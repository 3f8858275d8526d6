//! How many VMs of each group a node can take, and at what distance of their devices.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use super::PlaceError;
use super::devices::{Reached, Wants, fungible, serve};
use super::fit;
use super::request::{Alternative, DeviceFilter, NumaPolicy, VmGroup};
use super::view::{Pool, Unit, UnitKey, View};
use crate::model::{Device, Fleet, Node, NodeIndex, Occupancy};

/// Most combinations of alternatives that are looked at on one node.
const MOST_LAYERS: usize = 4096;

/// An alternative of one of the groups that are to be packed.
#[derive(Debug)]
pub(super) struct Alt<'a> {
    /// Place among the groups to be packed.
    pub group: usize,
    pub alternative: &'a Alternative,
    pub wants: Wants,
    pub need: Pool,
}

/// What is to be packed.
#[derive(Debug)]
pub(super) struct Wanted<'a> {
    pub alts: Vec<Alt<'a>>,
    /// VMs of each group.
    pub limits: Vec<u32>,
    pub filters: Vec<&'a DeviceFilter>,
    /// The tightest of all policies.
    pub scope: NumaPolicy,
    /// Policies differ, and all are treated as the tightest.
    pub mixed: bool,
    /// Nobody wants two devices: they need not be told apart by where they are.
    pub fungible: bool,
    /// Most VMs of these groups on one node.
    pub per_node: u32,
}

impl<'a> Wanted<'a> {
    /// Puts the needs of some groups together.
    ///
    /// # Errors
    /// More than 64 alternatives or device needs.
    pub fn new(groups: &[(&'a VmGroup, u32)], per_node: u32) -> Result<Self, PlaceError> {
        let (mut alts, mut filters): (Vec<Alt<'a>>, Vec<&DeviceFilter>) = (Vec::new(), Vec::new());
        for (group, (vms, _)) in groups.iter().enumerate() {
            for alternative in &vms.alternatives {
                let mut wants = Wants {
                    needs: Vec::new(),
                    closest: Wants::of_affinity(alternative.affinity),
                    isolate: alternative.isolate_vfs,
                };
                for need in alternative.devices.iter().filter(|need| need.count > 0) {
                    let bit =
                        filters.iter().position(|filter| **filter == need.filter).unwrap_or_else(|| {
                            filters.push(&need.filter);
                            filters.len() - 1
                        });
                    wants.needs.push((u32::try_from(bit).unwrap_or(u32::MAX), need.count));
                }
                let need = Pool::need(alternative.vcpus, alternative.memory.0, alternative.pages);
                alts.push(Alt { group, alternative, wants, need });
            }
        }
        if alts.len() > 64 || filters.len() > 64 {
            return Err(PlaceError::Contradiction {
                reason: format!(
                    "{} alternatives with {} kinds of devices; at most 64 of each are placed at once",
                    alts.len(),
                    filters.len()
                ),
            });
        }
        let rank = |policy: NumaPolicy| match policy {
            NumaPolicy::Required => 0,
            NumaPolicy::Socket => 1,
            NumaPolicy::Preferred => 2,
        };
        let policies = || alts.iter().map(|alt| alt.alternative.numa);
        let scope = policies().min_by_key(|policy| rank(*policy)).unwrap_or_default();
        let mixed = policies().any(|policy| policy != scope);
        let fungible = fungible(alts.iter().map(|alt| &alt.wants));
        Ok(Self {
            limits: groups.iter().map(|(_, count)| *count).collect(),
            scope,
            mixed,
            fungible,
            alts,
            filters,
            per_node,
        })
    }

    /// Alternatives whose conditions a node meets, as bits.
    pub fn usable(&self, node: &Node) -> u64 {
        let mut usable = 0;
        for (at, alt) in self.alts.iter().enumerate() {
            if fit::refusal(node, alt.alternative).is_none() {
                usable |= 1 << at;
            }
        }
        usable
    }

    /// Needs that a device answers, as bits.
    pub fn needs(&self, device: &Device) -> u64 {
        let bits = self.filters.iter().enumerate();
        bits.filter(|(_, filter)| fit::matches(filter, device)).fold(0, |mask, (bit, _)| mask | 1 << bit)
    }

    /// What all VMs together could use of one node.
    pub fn most(&self) -> Pool {
        let of = |alt: &Alt<'_>| alt.need.times(u64::from(self.limits[alt.group].min(self.per_node)));
        self.alts.iter().map(of).fold(Pool::default(), Pool::plus)
    }

    /// How many devices of those that are there can be of use to VMs that want such.
    pub fn useful(&self, needs: u64, there: usize) -> u8 {
        let of = |alt: &Alt<'_>| -> u64 {
            let wanted = alt.wants.needs.iter().filter(|(bit, _)| needs >> bit & 1 == 1);
            let each: u64 = wanted.map(|(_, count)| u64::from(*count)).sum();
            each * u64::from(self.limits[alt.group].min(self.per_node))
        };
        let useful: u64 = self.alts.iter().map(of).sum();
        u8::try_from(useful.min(there as u64)).unwrap_or(u8::MAX)
    }
}

/// One combination of alternatives on one unit: so many VMs of each.
#[derive(Debug)]
pub(super) struct Layer {
    /// VMs by alternative.
    pub counts: Vec<u16>,
    /// The layer with one VM less, and the alternative of that VM.
    pub from: Option<(usize, usize)>,
    pub states: Vec<Reached>,
}

/// All combinations on one unit.
#[derive(Debug)]
pub(super) struct UnitTable {
    pub layers: Vec<Layer>,
    /// Cheapest layer by number of VMs of each group, with its cost.
    best: BTreeMap<Vec<u16>, (u32, usize)>,
    exact: bool,
}

/// One way to fill a node.
#[derive(Debug, Clone)]
pub(super) struct Packed {
    /// VMs by group.
    pub counts: Vec<u16>,
    /// Distance of their devices.
    pub cost: u32,
    /// Layer by unit.
    pub picks: Vec<usize>,
}

/// All ways to fill a node, none of them worse than needed.
#[derive(Debug, Default)]
pub(super) struct NodeTable {
    pub ways: Vec<Packed>,
    pub units: Vec<Rc<UnitTable>>,
    /// Nothing was left out.
    pub exact: bool,
}

impl NodeTable {
    /// The way with these counts.
    pub fn way(&self, counts: &[u16]) -> Option<&Packed> {
        self.ways.iter().find(|way| way.counts == counts)
    }

    /// The most VMs of each group by itself.
    pub fn most(&self, group: usize) -> u32 {
        self.ways.iter().map(|way| u32::from(way.counts[group])).max().unwrap_or(0)
    }
}

/// Packs nodes, and remembers what it found: most nodes of a fleet are like others.
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

    /// How a node can be filled.
    pub fn node(&mut self, fleet: &Fleet, used: &Occupancy, index: NodeIndex) -> Rc<NodeTable> {
        match View::new(fleet, used, index, &self.wanted) {
            Some(view) => self.view(&view),
            None => self.empty.clone(),
        }
    }

    /// How a node that looks like this can be filled.
    pub fn view(&mut self, view: &View) -> Rc<NodeTable> {
        let key = view.key();
        if let Some(table) = self.nodes.get(&key) {
            return table.clone();
        }
        let table = Rc::new(self.fill(view));
        self.nodes.insert(key, table.clone());
        table
    }

    fn fill(&mut self, view: &View) -> NodeTable {
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
        let key = (usable, (unit.pool, unit.shelf.clone()));
        if let Some(table) = self.units.get(&key) {
            return table.clone();
        }
        let table = Rc::new(pack_unit(&self.wanted, usable, unit));
        self.units.insert(key, table.clone());
        table
    }
}

/// Starts with nothing and adds one VM after the other, of the same or a later alternative: so each combination is reached once.
fn pack_unit(wanted: &Wanted<'_>, usable: u64, unit: &Unit) -> UnitTable {
    let start = Reached { free: unit.shelf.free.clone(), cost: 0, from: 0, taken: Vec::new() };
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
            // What was cut off costs more than what is left; it matters only if nothing free of cost is left, or devices must
            // be close.
            let strict = wanted.alts[alt].wants.closest.is_some() || wanted.alts[alt].wants.isolate;
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
        return serve(&unit.shelf, &layer.states, wants);
    }
    let same = |(from, state): (usize, &Reached)| Reached {
        free: state.free.clone(),
        cost: state.cost,
        from,
        taken: vec![0; state.free.len()],
    };
    (layer.states.iter().enumerate().map(same).collect(), false)
}
