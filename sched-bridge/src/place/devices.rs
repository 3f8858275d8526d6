//! Devices of one node for several VMs: which numbers of VMs can be served, and how close their devices are at best.
//!
//! Devices are counted in bins: those below one PCIe root that answer the same needs are alike. Groups of bins (PCIe roots) that
//! are alike may be exchanged, so states are kept sorted and each is looked at once.

use std::collections::HashMap;

use super::request::{Affinity, Closeness};

/// Most states that are kept for one number of VMs.
const MOST_STATES: usize = 512;

/// Devices that are alike.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Bin {
    /// Bit by need.
    pub needs: u64,
    /// A GPU, not a network adapter.
    pub gpu: bool,
    /// Which adapter of the group a VF is of.
    pub parent: u16,
}

/// A PCIe root with devices below it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Group {
    /// Place in [`crate::model::Node::numa`]; `u16::MAX` if the firmware does not tell.
    pub numa: u16,
    pub bins: Vec<Bin>,
}

/// The device needs of one alternative: bits and counts, and how close they must be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Wants {
    /// Number of the bit, and how many.
    pub needs: Vec<(u32, u32)>,
    pub closest: Option<Closeness>,
    pub isolate: bool,
}

impl Wants {
    pub fn of_affinity(affinity: Affinity) -> Option<Closeness> {
        match affinity {
            Affinity::Preferred => None,
            Affinity::SameRoot => Some(Closeness::Root),
            Affinity::SameNuma => Some(Closeness::Numa),
        }
    }

    fn total(&self) -> u32 {
        self.needs.iter().map(|(_, count)| count).sum()
    }
}

/// Groups with the number of free devices in each bin, in sorted order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Shelf {
    pub groups: Vec<Group>,
    /// Free devices by bin, group after group.
    pub free: Vec<u8>,
    /// First bin of each group, and the end.
    starts: Vec<usize>,
    /// Groups from-to that are alike.
    runs: Vec<(usize, usize)>,
}

impl Shelf {
    /// Puts groups in order. Returns the shelf and which of the given groups stands where.
    pub fn new(groups: &[(Group, Vec<u8>)]) -> (Self, Vec<usize>) {
        let mut order: Vec<usize> = (0..groups.len()).collect();
        order.sort_by(|a, b| groups[*a].0.cmp(&groups[*b].0).then_with(|| groups[*b].1.cmp(&groups[*a].1)));
        let (mut free, mut starts, mut runs) = (Vec::new(), vec![0], Vec::new());
        let mut sorted: Vec<Group> = Vec::new();
        for at in &order {
            let (group, counts) = &groups[*at];
            if sorted.last() == Some(group) {
                runs.last_mut().map(|run: &mut (usize, usize)| run.1 += 1).unwrap_or_default();
            } else {
                runs.push((sorted.len(), sorted.len() + 1));
            }
            sorted.push(group.clone());
            free.extend(counts);
            starts.push(free.len());
        }
        (Self { groups: sorted, free, starts, runs }, order)
    }

    /// Bins of a group.
    pub fn bins(&self, group: usize) -> std::ops::Range<usize> {
        self.starts[group]..self.starts[group + 1]
    }

    /// How groups must be reordered so that those which are alike stand with the fullest first.
    pub fn sorted_order(&self, free: &[u8]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.groups.len()).collect();
        for (from, to) in &self.runs {
            order[*from..*to].sort_by(|a, b| free[self.bins(*b)].cmp(&free[self.bins(*a)]));
        }
        order
    }

    fn sort(&self, free: &[u8]) -> Vec<u8> {
        self.sorted_order(free).into_iter().flat_map(|group| free[self.bins(group)].iter().copied()).collect()
    }
}

/// A state of the shelf, what it cost, and how it was reached.
#[derive(Debug, Clone)]
pub(super) struct Reached {
    pub free: Vec<u8>,
    pub cost: u32,
    /// State of the layer before.
    pub from: usize,
    /// Devices taken, by bin of that state.
    pub taken: Vec<u8>,
}

/// All states after serving one VM more from any of `before`. The second value says whether some were left out.
pub(super) fn serve(shelf: &Shelf, before: &[Reached], wants: &Wants) -> (Vec<Reached>, bool) {
    let mut best: HashMap<Vec<u8>, usize> = HashMap::new();
    let mut after: Vec<Reached> = Vec::new();
    for (from, state) in before.iter().enumerate() {
        let mut chooser = Chooser {
            shelf,
            free: &state.free,
            wants,
            taken: vec![0; shelf.free.len()],
            left: wants.needs.iter().map(|(_, count)| *count).collect(),
            found: Vec::new(),
        };
        chooser.group(0);
        for (taken, distance) in chooser.found {
            let rest: Vec<u8> = state.free.iter().zip(&taken).map(|(free, taken)| free - taken).collect();
            let rest = shelf.sort(&rest);
            let cost = state.cost + distance;
            match best.get(&rest) {
                Some(at) if after[*at].cost <= cost => {}
                Some(at) => after[*at] = Reached { free: rest, cost, from, taken },
                None => {
                    best.insert(rest.clone(), after.len());
                    after.push(Reached { free: rest, cost, from, taken });
                }
            }
        }
    }
    after.sort_by_key(|state| state.cost);
    let cut = after.len() > MOST_STATES;
    after.truncate(MOST_STATES);
    (after, cut)
}

/// Walks over the groups and chooses what one VM takes of each.
struct Chooser<'a> {
    shelf: &'a Shelf,
    free: &'a [u8],
    wants: &'a Wants,
    taken: Vec<u8>,
    left: Vec<u32>,
    found: Vec<(Vec<u8>, u32)>,
}

impl Chooser<'_> {
    fn group(&mut self, group: usize) {
        if self.left.iter().all(|left| *left == 0) {
            if let Some(distance) = self.distance() {
                self.found.push((self.taken.clone(), distance));
            }
        } else if group < self.shelf.groups.len() {
            self.bin(group, self.shelf.bins(group).start, 0);
        }
    }

    /// How many of this bin for this need; then the next need, the next bin, the next group.
    fn bin(&mut self, group: usize, bin: usize, need: usize) {
        if bin == self.shelf.bins(group).end {
            if self.in_order(group) {
                self.group(group + 1);
            }
            return;
        }
        if need == self.wants.needs.len() {
            return self.bin(group, bin + 1, 0);
        }
        let kind = &self.shelf.groups[group].bins[bin - self.shelf.bins(group).start];
        let fits = kind.needs >> self.wants.needs[need].0 & 1 == 1;
        let mut most =
            if fits { u32::from(self.free[bin] - self.taken[bin]).min(self.left[need]) } else { 0 };
        if self.wants.isolate && !kind.gpu {
            most = most.min(u32::from(self.taken[bin] == 0));
        }
        for take in (0..=most).rev() {
            let small = u8::try_from(take).unwrap_or(u8::MAX);
            self.taken[bin] += small;
            self.left[need] -= take;
            self.bin(group, bin, need + 1);
            self.left[need] += take;
            self.taken[bin] -= small;
        }
    }

    /// Of groups that are alike and equally full, the earlier ones give more: the others are the same choice again.
    fn in_order(&self, group: usize) -> bool {
        let shelf = self.shelf;
        if group == 0 || shelf.groups[group] != shelf.groups[group - 1] {
            return true;
        }
        let (own, before) = (shelf.bins(group), shelf.bins(group - 1));
        self.free[own.clone()] != self.free[before.clone()] || self.taken[own] <= self.taken[before]
    }

    /// How far apart the chosen devices are; none if further than allowed.
    fn distance(&self) -> Option<u32> {
        let mut parts: Vec<(u16, u32, u32)> = Vec::with_capacity(self.shelf.groups.len());
        for (at, group) in self.shelf.groups.iter().enumerate() {
            let (mut gpus, mut nics) = (0, 0);
            for (bin, taken) in group.bins.iter().zip(&self.taken[self.shelf.bins(at)]) {
                *(if bin.gpu { &mut gpus } else { &mut nics }) += u32::from(*taken);
            }
            if gpus + nics > 0 {
                parts.push((group.numa, gpus, nics));
            }
        }
        distance(&parts, self.wants.closest)
    }
}

/// Distance of what a VM has: by PCIe root, the NUMA node, GPUs and adapters.
pub(super) fn distance(parts: &[(u16, u32, u32)], closest: Option<Closeness>) -> Option<u32> {
    let any_nic = parts.iter().any(|(_, _, nics)| *nics > 0);
    let mut sum = 0;
    for (numa, gpus, nics) in parts.iter().filter(|(_, gpus, _)| *gpus > 0) {
        if *nics > 0 || !any_nic {
            continue;
        }
        let near = *numa != u16::MAX && parts.iter().any(|(other, _, nics)| other == numa && *nics > 0);
        let far = match closest {
            Some(Closeness::Root) => return None,
            Some(Closeness::Numa) if !near => return None,
            _ => {
                if near {
                    1
                } else {
                    2
                }
            }
        };
        sum += gpus * far;
    }
    let mut numa: Vec<u16> = parts.iter().map(|part| part.0).collect();
    numa.sort_unstable();
    numa.dedup();
    Some(sum + u32::try_from(numa.len().saturating_sub(1)).unwrap_or(0))
}

/// Whether it does not matter which device a VM gets: nobody wants two.
pub(super) fn fungible<'a>(wants: impl IntoIterator<Item = &'a Wants>) -> bool {
    wants.into_iter().all(|wants| wants.total() <= 1)
}
