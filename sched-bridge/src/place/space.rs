//! The states that the exact search goes through: how many VMs of each group are placed somewhere, and what that costs.

use std::ops::Add;

/// Costs that add up. They are compared from the first term to the last; [`super::net::Order`] decides the order of terms.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cost(pub [u64; 5]);

impl Add for Cost {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        let mut sum = self.0;
        for (own, more) in sum.iter_mut().zip(other.0) {
            *own = own.saturating_add(more);
        }
        Self(sum)
    }
}

/// A state that can be reached, and its least cost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    /// Index among all states; it adds up as the counts do.
    pub index: u32,
    /// All counts, each in its own bits with one to spare, so that a sum can be checked at once.
    pub packed: u128,
    /// VMs of all groups.
    pub vms: u32,
    /// The least cost.
    pub cost: Cost,
}

/// States, by index.
pub(super) type Table = Vec<Entry>;

/// All states: each count from 0 to its limit.
#[derive(Debug, Clone)]
pub(super) struct Space {
    limits: Vec<u32>,
    strides: Vec<u32>,
    shifts: Vec<u32>,
    /// Added to a packed sum, it carries into `guard` where a limit is exceeded.
    bias: u128,
    guard: u128,
    size: usize,
    /// The last count is that of leaf switches.
    leaves: bool,
}

impl Space {
    /// The states for these numbers of VMs per group, and for this number of leaf switches, if it is limited. None if there are more than `most`.
    pub fn new(groups: &[u32], leaves: Option<u32>, most: usize) -> Option<Self> {
        let limits: Vec<u32> = groups.iter().copied().chain(leaves).collect();
        let (mut strides, mut shifts) = (Vec::new(), Vec::new());
        let (mut size, mut shift, mut bias, mut guard) = (1_usize, 0_u32, 0_u128, 0_u128);
        for limit in &limits {
            strides.push(u32::try_from(size).ok()?);
            shifts.push(shift);
            let bits = 32 - limit.leading_zeros() + 1;
            if shift + bits > 128 {
                return None;
            }
            guard |= 1 << (shift + bits - 1);
            bias |= ((1_u128 << (bits - 1)) - 1 - u128::from(*limit)) << shift;
            shift += bits;
            size = size.checked_mul(*limit as usize + 1).filter(|size| *size <= most)?;
        }
        Some(Self { limits, strides, shifts, bias, guard, size, leaves: leaves.is_some() })
    }

    /// The state with these counts (without leaf switches) and this cost; none if a limit is exceeded.
    pub fn entry(&self, counts: &[u16], cost: Cost) -> Option<Entry> {
        let mut entry = Entry { index: 0, packed: 0, vms: 0, cost };
        for (at, count) in counts.iter().enumerate() {
            let count = u32::from(*count);
            if count > self.limits[at] {
                return None;
            }
            entry.index += count * self.strides[at];
            entry.packed |= u128::from(count) << self.shifts[at];
            entry.vms += count;
        }
        Some(entry)
    }

    /// No VMs.
    pub fn zero(&self) -> Entry {
        Entry { index: 0, packed: 0, vms: 0, cost: Cost::default() }
    }

    /// The sum of two states; none if a limit is exceeded.
    pub fn sum(&self, a: &Entry, b: &Entry) -> Option<Entry> {
        let packed = a.packed + b.packed;
        ((packed + self.bias) & self.guard == 0).then(|| Entry {
            index: a.index + b.index,
            packed,
            vms: a.vms + b.vms,
            cost: a.cost + b.cost,
        })
    }

    /// The state with one more leaf switch; none if the limit is exceeded.
    pub fn with_leaf(&self, entry: &Entry) -> Option<Entry> {
        if !self.leaves {
            return Some(*entry);
        }
        let last = self.limits.len() - 1;
        let leaf = Entry {
            index: self.strides[last],
            packed: 1 << self.shifts[last],
            vms: 0,
            cost: Cost::default(),
        };
        self.sum(entry, &leaf)
    }

    /// The cheapest state in which all groups are complete.
    pub fn complete(&self, table: &Table) -> Option<Entry> {
        let groups = self.limits.len() - usize::from(self.leaves);
        let all: u32 = (0..groups).map(|at| self.limits[at] * self.strides[at]).sum();
        let stride = if self.leaves { self.strides[groups] } else { u32::MAX };
        table
            .iter()
            .filter(|entry| entry.index % stride == all)
            .min_by_key(|entry| (entry.cost, entry.index))
            .copied()
    }

    /// The counts of a state, by group.
    pub fn counts(&self, entry: &Entry) -> Vec<u16> {
        let groups = self.limits.len() - usize::from(self.leaves);
        let count = |at: usize| entry.index / self.strides[at] % (self.limits[at] + 1);
        (0..groups).map(|at| u16::try_from(count(at)).unwrap_or(u16::MAX)).collect()
    }

    /// All sums of a state of one table and a state of the other, each with its least cost.
    pub fn merge(&self, a: &Table, b: &Table, scratch: &mut Vec<Option<Entry>>) -> Table {
        if b.len() == 1 && b[0].index == 0 {
            return a.clone();
        }
        scratch.clear();
        scratch.resize(self.size, None);
        for left in a {
            for right in b {
                if let Some(sum) = self.sum(left, right) {
                    let slot = &mut scratch[sum.index as usize];
                    if slot.as_ref().is_none_or(|old| sum.cost < old.cost) {
                        *slot = Some(sum);
                    }
                }
            }
        }
        scratch.iter().flatten().copied().collect()
    }
}
