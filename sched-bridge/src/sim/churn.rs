//! Clusters that come and go.

use super::Rng;

/// Something that happens to a fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A cluster of so many VMs asks for room.
    Arrive {
        /// Number of the cluster, from 0.
        id: u32,
        /// Its VMs.
        vms: u32,
    },
    /// A cluster that arrived before leaves, if it was placed.
    Leave {
        /// Number of the cluster.
        id: u32,
    },
}

/// A stream of arrivals and departures, the same for everybody who starts with the same seed. Whoever consumes it says which
/// clusters were placed.
#[derive(Debug, Clone)]
pub struct Churn {
    rng: Rng,
    next: u32,
    there: Vec<u32>,
    sizes: Vec<u32>,
    /// VMs of the clusters that are there.
    load: u64,
    target: u64,
    vms: Vec<u32>,
}

impl Churn {
    /// Clusters of these sizes, with equal chance; departures hold the number of VMs near `target`.
    #[must_use]
    pub fn new(seed: u64, sizes: &[u32], target: u64) -> Self {
        let sizes = if sizes.is_empty() { vec![1] } else { sizes.to_vec() };
        Self { rng: Rng::new(seed), next: 0, there: Vec::new(), sizes, load: 0, target, vms: Vec::new() }
    }

    /// What happens next. Does not depend on what was placed.
    pub fn next_event(&mut self) -> Event {
        let leave = !self.there.is_empty() && (self.load >= self.target || self.rng.chance(10));
        if leave {
            let count = u32::try_from(self.there.len()).unwrap_or(u32::MAX);
            let id = self.there.swap_remove(self.rng.below(count) as usize);
            self.load -= u64::from(self.vms[id as usize]);
            return Event::Leave { id };
        }
        let kinds = u32::try_from(self.sizes.len()).unwrap_or(u32::MAX);
        let vms = self.sizes[self.rng.below(kinds) as usize];
        let id = self.next;
        self.next += 1;
        self.vms.push(vms);
        self.there.push(id);
        self.load += u64::from(vms);
        Event::Arrive { id, vms }
    }
}
