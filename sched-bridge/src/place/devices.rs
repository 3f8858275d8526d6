//! Devices of one node for several VMs: how many VMs can get theirs, and how close the devices of each are at best.
//!
//! Devices are counted in bins: those below one PCIe root that meet the same needs are interchangeable. PCIe roots with equal bins are
//! interchangeable, too, so states are kept sorted and each is looked at once.

use std::collections::HashMap;

use super::request::Affinity;

/// Most states that are kept for one number of VMs.
const MOST_STATES: usize = 512;

/// How close each GPU of a VM must be to one of its adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Closeness {
    /// Below one PCIe root.
    Root,
    /// On one NUMA node.
    Numa,
}

/// Interchangeable devices.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Bin {
    /// The needs that they meet, as bits.
    pub needs: u64,
    /// GPUs and shares of them, not network adapters.
    pub gpu: bool,
    /// Number of the VFs' adapter in the group.
    pub parent: u16,
}

/// The devices below one PCIe root.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct RootGroup {
    /// Index in [`crate::model::Node::numa`]; `u16::MAX` if the firmware does not tell.
    pub numa: u16,
    pub bins: Vec<Bin>,
}

/// The device needs of one alternative.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Wants {
    /// Number of the bit, and of devices.
    pub needs: Vec<(u32, u32)>,
    pub closeness: Option<Closeness>,
    /// VFs must come from different adapters.
    pub isolate_vfs: bool,
}

impl Wants {
    pub fn closeness(affinity: Affinity) -> Option<Closeness> {
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

/// Free devices, counted by bin, in sorted order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct FreeDevices {
    pub groups: Vec<RootGroup>,
    /// Number of free devices by bin, group after group.
    pub counts: Vec<u8>,
    /// First bin of each group, and the end.
    starts: Vec<usize>,
    /// Ranges of equal groups.
    runs: Vec<(usize, usize)>,
}

impl FreeDevices {
    /// Puts groups in order. Returns the index of the given group for each place, too.
    pub fn new(groups: &[(RootGroup, Vec<u8>)]) -> (Self, Vec<usize>) {
        let mut order: Vec<usize> = (0..groups.len()).collect();
        order.sort_by(|a, b| groups[*a].0.cmp(&groups[*b].0).then_with(|| groups[*b].1.cmp(&groups[*a].1)));
        let (mut all_counts, mut starts, mut runs) = (Vec::new(), vec![0], Vec::new());
        let mut sorted: Vec<RootGroup> = Vec::new();
        for at in &order {
            let (group, counts) = &groups[*at];
            if sorted.last() == Some(group) {
                runs.last_mut().map(|run: &mut (usize, usize)| run.1 += 1).unwrap_or_default();
            } else {
                runs.push((sorted.len(), sorted.len() + 1));
            }
            sorted.push(group.clone());
            all_counts.extend(counts);
            starts.push(all_counts.len());
        }
        (Self { groups: sorted, counts: all_counts, starts, runs }, order)
    }

    /// Bins of a group.
    pub fn bins(&self, group: usize) -> std::ops::Range<usize> {
        self.starts[group]..self.starts[group + 1]
    }

    /// The order of groups in which, of equal ones, those with most free devices come first.
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

/// Free devices in some state, what that cost, and how it was reached.
#[derive(Debug, Clone)]
pub(super) struct Reached {
    pub counts: Vec<u8>,
    pub cost: u32,
    /// State of the layer before.
    pub from: usize,
    /// Devices taken, by bin of that state.
    pub taken: Vec<u8>,
}

/// All states after one more VM has got its devices in any of the states `before`. The second value says whether some are left out.
pub(super) fn add_vm(devices: &FreeDevices, before: &[Reached], wants: &Wants) -> (Vec<Reached>, bool) {
    let mut best: HashMap<Vec<u8>, usize> = HashMap::new();
    let mut after: Vec<Reached> = Vec::new();
    for (from, state) in before.iter().enumerate() {
        let mut chooser = Chooser {
            devices,
            counts: &state.counts,
            wants,
            taken: vec![0; devices.counts.len()],
            left: wants.needs.iter().map(|(_, count)| *count).collect(),
            found: Vec::new(),
        };
        chooser.group(0);
        for (taken, distance) in chooser.found {
            let rest: Vec<u8> = state.counts.iter().zip(&taken).map(|(free, taken)| free - taken).collect();
            let rest = devices.sort(&rest);
            let cost = state.cost + distance;
            match best.get(&rest) {
                Some(at) if after[*at].cost <= cost => {}
                Some(at) => after[*at] = Reached { counts: rest, cost, from, taken },
                None => {
                    best.insert(rest.clone(), after.len());
                    after.push(Reached { counts: rest, cost, from, taken });
                }
            }
        }
    }
    after.sort_by_key(|state| state.cost);
    let cut = after.len() > MOST_STATES;
    after.truncate(MOST_STATES);
    (after, cut)
}

/// Goes through the groups and chooses what one VM takes from each.
struct Chooser<'a> {
    devices: &'a FreeDevices,
    counts: &'a [u8],
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
        } else if group < self.devices.groups.len() {
            self.bin(group, self.devices.bins(group).start, 0);
        }
    }

    /// Chooses how many devices of this bin meet this need; then the next need, the next bin, the next group.
    fn bin(&mut self, group: usize, bin: usize, need: usize) {
        if bin == self.devices.bins(group).end {
            if self.in_order(group) {
                self.group(group + 1);
            }
            return;
        }
        if need == self.wants.needs.len() {
            return self.bin(group, bin + 1, 0);
        }
        let kind = &self.devices.groups[group].bins[bin - self.devices.bins(group).start];
        let fits = kind.needs >> self.wants.needs[need].0 & 1 == 1;
        let mut most =
            if fits { u32::from(self.counts[bin] - self.taken[bin]).min(self.left[need]) } else { 0 };
        if self.wants.isolate_vfs && !kind.gpu {
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

    /// Whether, of equal groups with equal counts, the earlier one gives at least as much: otherwise the choice is made twice.
    fn in_order(&self, group: usize) -> bool {
        let devices = self.devices;
        if group == 0 || devices.groups[group] != devices.groups[group - 1] {
            return true;
        }
        let (this, before) = (devices.bins(group), devices.bins(group - 1));
        self.counts[this.clone()] != self.counts[before.clone()] || self.taken[this] <= self.taken[before]
    }

    /// Distance of the chosen devices; none if they are further apart than allowed.
    fn distance(&self) -> Option<u32> {
        let mut parts: Vec<(u16, u32, u32)> = Vec::with_capacity(self.devices.groups.len());
        for (at, group) in self.devices.groups.iter().enumerate() {
            let (mut gpus, mut nics) = (0, 0);
            for (bin, taken) in group.bins.iter().zip(&self.taken[self.devices.bins(at)]) {
                *(if bin.gpu { &mut gpus } else { &mut nics }) += u32::from(*taken);
            }
            if gpus + nics > 0 {
                parts.push((group.numa, gpus, nics));
            }
        }
        distance(&parts, self.wants.closeness)
    }
}

/// Distance of the devices of a VM. Each part is a PCIe root: its NUMA node, GPUs and adapters.
pub(super) fn distance(parts: &[(u16, u32, u32)], closeness: Option<Closeness>) -> Option<u32> {
    let any_nic = parts.iter().any(|(_, _, nics)| *nics > 0);
    let mut sum = 0;
    for (numa, gpus, nics) in parts.iter().filter(|(_, gpus, _)| *gpus > 0) {
        if *nics > 0 || !any_nic {
            continue;
        }
        let near = *numa != u16::MAX && parts.iter().any(|(other, _, nics)| other == numa && *nics > 0);
        let distance = match closeness {
            Some(Closeness::Root) => return None,
            Some(Closeness::Numa) if !near => return None,
            _ if near => 1,
            _ => 2,
        };
        sum += gpus * distance;
    }
    let mut numa: Vec<u16> = parts.iter().map(|part| part.0).collect();
    numa.sort_unstable();
    numa.dedup();
    Some(sum + u32::try_from(numa.len().saturating_sub(1)).unwrap_or(0))
}

/// Whether it does not matter which devices a VM gets, because no VM needs two.
pub(super) fn fungible<'a>(wants: impl IntoIterator<Item = &'a Wants>) -> bool {
    wants.into_iter().all(|wants| wants.total() <= 1)
}
