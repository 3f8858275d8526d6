//! The exact search: from the nodes up, the least cost of every number of VMs below each switch.
//!
//! The sum of hops over all pairs can be split by the links of the tree: a link with k of n VMs on one side is between the VMs of
//! k (n - k) pairs. So costs add up from the bottom, and the least cost of k VMs below a switch follows from those of its children (a
//! knapsack on a tree), whatever is above.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::net::{Block, CostTerms, Net, Order, loss};
use super::packer::{NodeTable, Packer};
use super::request::AntiAffinity;
use super::space::{Cost, Entry, Space, Table};
use crate::model::{NodeIndex, Occupancy};
use crate::topology::SwitchId;

/// VMs of the cluster that are placed already and stay where they are.
#[derive(Debug, Default)]
pub(super) struct Fixed {
    /// Hops from each node to all of them.
    pub hops: Vec<u64>,
    /// Number of them on each node.
    pub on_node: Vec<u32>,
    /// Number of them below each switch.
    pub below: Vec<u32>,
    /// Whether each switch is a leaf switch that they use.
    pub leaves: Vec<bool>,
}

/// A search for some groups of VMs, which are placed together.
pub(super) struct Tree<'a, 'b> {
    pub net: &'b Net<'a>,
    pub used: &'b Occupancy,
    pub packer: Packer<'a>,
    pub space: Space,
    /// Units of free blocks that a VM of each group takes.
    pub units: Vec<u64>,
    pub vms: u64,
    pub order: Order,
    pub near: Option<&'b [Option<u32>]>,
    pub anti: Option<AntiAffinity>,
    /// Nodes that may be used.
    pub allowed: &'b [bool],
    pub fixed: Option<&'b Fixed>,
    /// States below each switch, with all nodes.
    pub whole: HashMap<SwitchId, Rc<Table>>,
    pub packed: Vec<Option<Rc<NodeTable>>>,
    pub scratch: Vec<Option<Entry>>,
    /// All nodes were packed exactly.
    pub exact: bool,
}

/// Nodes that a search is limited to.
pub(super) type Within = HashSet<NodeIndex>;

/// Chosen nodes, with the number of VMs of each group.
pub(super) type Chosen = Vec<(NodeIndex, Vec<u16>)>;

impl Tree<'_, '_> {
    /// The ways to fill a node.
    pub fn packed(&mut self, index: NodeIndex) -> Rc<NodeTable> {
        if let Some(table) = &self.packed[index.usize()] {
            return table.clone();
        }
        let table = if self.allowed[index.usize()] {
            self.packer.node(self.net.fleet, self.used, index)
        } else {
            Rc::default()
        };
        self.exact &= table.exact || table.ways.is_empty();
        self.packed[index.usize()] = Some(table.clone());
        table
    }

    /// Number of pairs with VMs on different sides of a link, for a given number of VMs below it.
    fn link(&self, vms: u32) -> u64 {
        let vms = u64::from(vms);
        vms * (self.vms - vms)
    }

    /// Units of free blocks that the given numbers of VMs of each group take.
    pub fn taken(&self, counts: &[u16]) -> u64 {
        counts.iter().zip(&self.units).map(|(count, units)| u64::from(*count) * units).sum()
    }

    /// VMs that anti-affinity still allows below a switch, if this is a domain: not higher than asked for, while the switch above it
    /// is.
    pub fn most_below(&self, id: SwitchId) -> u32 {
        let Some(anti) = self.anti else { return u32::MAX };
        let height = |id: SwitchId| self.net.topology.switch(id).height;
        let parent = self.net.topology.switch(id).parent;
        if height(id) > anti.domain.height()
            || parent.is_some_and(|parent| height(parent) <= anti.domain.height())
        {
            return u32::MAX;
        }
        anti.at_most.saturating_sub(self.fixed.map_or(0, |fixed| fixed.below[id.usize()]))
    }

    /// VMs that anti-affinity still allows on a node, if the node is a domain by itself.
    fn most_on(&self, index: NodeIndex) -> u32 {
        let Some(anti) = self.anti else { return u32::MAX };
        let home = self.net.home[index.usize()];
        if home.is_some_and(|home| self.net.topology.switch(home).height <= anti.domain.height()) {
            return u32::MAX;
        }
        anti.at_most.saturating_sub(self.fixed.map_or(0, |fixed| fixed.on_node[index.usize()]))
    }

    /// States of a node, including the link above it.
    pub fn node(&mut self, index: NodeIndex) -> Table {
        let packed = self.packed(index);
        let mut table = vec![self.space.zero()];
        let near = match self.near {
            Some(hops) => hops[index.usize()].map(u64::from),
            None => Some(0),
        };
        let Some(near) = near else { return table };
        let hops = self.fixed.map_or(0, |fixed| fixed.hops[index.usize()]);
        let most = self.most_on(index);
        for way in &packed.ways {
            let vms: u32 = way.counts.iter().map(|count| u32::from(*count)).sum();
            if vms == 0 || vms > most || u64::from(vms) > self.vms {
                continue;
            }
            let pairs = u64::from(vms) * u64::from(vms - 1) / 2;
            let cost = self.order.cost(CostTerms {
                // VMs on different nodes have one more link than switches between them, VMs on one node have none of both. So each
                // pair of the cluster counts one too much, once the pairs on one node are added.
                sum_hops: self.link(vms) + pairs + hops * u64::from(vms),
                leaves: 0,
                near: near * u64::from(vms),
                fragmentation: loss(Block::Other, self.net.free_node[index.usize()], self.taken(&way.counts)),
                devices: u64::from(way.cost),
            });
            table.extend(self.space.entry(&way.counts, cost));
        }
        table.sort_by_key(|entry| entry.index);
        table
    }

    /// States below a switch, without the switch itself. Notes every merge in `steps`, if given.
    fn gather(&mut self, id: SwitchId, within: Option<&Within>, mut steps: Option<&mut Steps>) -> Table {
        let zero = vec![self.space.zero()];
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut direct = zero.clone();
        for index in self.net.direct[id.usize()].clone() {
            if within.is_some_and(|within| !within.contains(&index)) {
                continue;
            }
            let node = self.node(index);
            if node.len() == 1 {
                continue;
            }
            let sum = self.space.merge(&direct, &node, &mut scratch);
            if let Some(steps) = steps.as_deref_mut() {
                steps.direct.push((std::mem::replace(&mut direct, sum), node, index));
            } else {
                direct = sum;
            }
        }
        let mut all = self.with_leaf(id, &direct);
        if let Some(steps) = steps.as_deref_mut() {
            steps.direct_all = direct;
        }
        for child in self.net.topology.switch(id).children.clone() {
            self.scratch = scratch;
            let below = self.below(child, within);
            scratch = std::mem::take(&mut self.scratch);
            if below.len() == 1 {
                continue;
            }
            let sum = self.space.merge(&all, &below, &mut scratch);
            if let Some(steps) = steps.as_deref_mut() {
                steps.children.push((std::mem::replace(&mut all, sum), below, child));
            } else {
                all = sum;
            }
        }
        self.scratch = scratch;
        let most = self.most_below(id);
        all.retain(|entry| entry.vms <= most);
        all
    }

    /// A switch with VMs on nodes that are connected to it directly counts as a leaf switch in use.
    fn with_leaf(&self, id: SwitchId, direct: &Table) -> Table {
        if self.fixed.is_some_and(|fixed| fixed.leaves[id.usize()]) {
            return direct.clone();
        }
        let leaf = self.order.cost(CostTerms { leaves: 1, ..CostTerms::default() });
        let used = |entry: &Entry| {
            if entry.vms == 0 {
                return Some(*entry);
            }
            let mut entry = self.space.with_leaf(entry)?;
            entry.cost = entry.cost + leaf;
            Some(entry)
        };
        direct.iter().filter_map(used).collect()
    }

    /// What a switch adds: the loss of the free block below it, and its link upwards.
    fn above(&self, id: SwitchId, entry: &Entry) -> Cost {
        let counts = self.space.counts(entry);
        self.order.cost(CostTerms {
            sum_hops: self.link(entry.vms),
            fragmentation: loss(
                Block::of(self.net.topology, id),
                self.net.free_switch[id.usize()],
                self.taken(&counts),
            ),
            ..CostTerms::default()
        })
    }

    /// States below a switch, including the link above it.
    pub fn below(&mut self, id: SwitchId, within: Option<&Within>) -> Rc<Table> {
        if let Some(table) = self.whole.get(&id).filter(|_| within.is_none()) {
            return table.clone();
        }
        let mut table = self.gather(id, within, None);
        for entry in &mut table {
            entry.cost = entry.cost + self.above(id, entry);
        }
        let table = Rc::new(table);
        if within.is_none() {
            self.whole.insert(id, table.clone());
        }
        table
    }

    /// Finds the nodes that make up a state below a switch (without what the switch itself adds).
    pub fn trace(&mut self, id: SwitchId, within: Option<&Within>, state: &Entry, chosen: &mut Chosen) {
        let mut steps = Steps::default();
        self.gather(id, within, Some(&mut steps));
        let mut state = Entry { cost: Cost::default(), ..*state };
        for (before, below, child) in steps.children.into_iter().rev() {
            let Some((left, right)) = self.split(&before, &below, &state) else { return };
            if right.vms > 0 {
                self.trace(child, within, &right, chosen);
            }
            state = left;
        }
        let leaf = steps.direct_all.iter().find(|entry| {
            let with = if entry.vms > 0 && !self.fixed.is_some_and(|fixed| fixed.leaves[id.usize()]) {
                self.space.with_leaf(entry)
            } else {
                Some(**entry)
            };
            with.is_some_and(|with| with.index == state.index)
        });
        let Some(leaf) = leaf else { return };
        let mut state = *leaf;
        for (before, node, index) in steps.direct.into_iter().rev() {
            let Some((left, right)) = self.split(&before, &node, &state) else { return };
            if right.vms > 0 {
                chosen.push((index, self.space.counts(&right)));
            }
            state = left;
        }
    }

    /// The two states with the least cost that make up a third.
    fn split(&self, before: &Table, below: &Table, state: &Entry) -> Option<(Entry, Entry)> {
        let mut best: Option<(Cost, Entry, Entry)> = None;
        for right in below {
            let Some(rest) = state.index.checked_sub(right.index) else { continue };
            let Ok(at) = before.binary_search_by_key(&rest, |entry| entry.index) else { continue };
            let left = before[at];
            // Indices may add up although a single count exceeds its limit; that is not a sum.
            let Some(sum) = self.space.sum(&left, right) else { continue };
            if best.as_ref().is_none_or(|(cost, ..)| sum.cost < *cost) {
                best = Some((sum.cost, left, *right));
            }
        }
        best.map(|(_, left, right)| (left, right))
    }
}

/// The tables before each merge, and what was merged.
#[derive(Default)]
struct Steps {
    direct: Vec<(Table, Table, NodeIndex)>,
    direct_all: Table,
    children: Vec<(Table, Rc<Table>, SwitchId)>,
}
