//! Amounts of cores and memory.

use super::request::{Alternative, Pages};
use crate::model::NumaShare;

/// An amount of cores and memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Pool {
    pub cores: u64,
    /// Outside huge pages. Unit: MiB.
    pub memory: u64,
    pub pages_2m: u64,
    pub pages_1g: u64,
}

impl Pool {
    /// What a VM with this alternative takes.
    pub fn need(alternative: &Alternative) -> Self {
        let mut pool = Self { cores: u64::from(alternative.vcpus), ..Self::default() };
        let mib = alternative.memory.0;
        match alternative.pages {
            Pages::Normal => pool.memory = mib,
            Pages::Huge2M => pool.pages_2m = mib.div_ceil(2),
            Pages::Huge1G => pool.pages_1g = mib.div_ceil(1024),
        }
        pool
    }

    fn map(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            cores: f(self.cores, other.cores),
            memory: f(self.memory, other.memory),
            pages_2m: f(self.pages_2m, other.pages_2m),
            pages_1g: f(self.pages_1g, other.pages_1g),
        }
    }

    /// The sum of both.
    pub fn plus(self, other: Self) -> Self {
        self.map(other, u64::saturating_add)
    }

    /// As much as that many VMs take.
    pub fn times(self, count: u64) -> Self {
        self.map(self, |own, _| own.saturating_mul(count))
    }

    /// Of each resource, the smaller amount of both.
    pub fn least(self, other: Self) -> Self {
        self.map(other, u64::min)
    }

    /// Whether it has as much of everything as the other.
    pub fn holds(self, other: Self) -> bool {
        self.map(other, u64::saturating_sub).plus(other) == self
    }

    /// The other pool must be held by this one.
    pub fn minus(self, other: Self) -> Self {
        self.map(other, |own, less| own - less)
    }

    /// What a NUMA node has.
    pub fn of(share: &NumaShare) -> Self {
        Self {
            cores: u64::from(share.cores),
            memory: share.memory.0,
            pages_2m: share.huge.pages_2m,
            pages_1g: share.huge.pages_1g,
        }
    }
}
