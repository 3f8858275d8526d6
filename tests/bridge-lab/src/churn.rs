//! Clusters that arrive and leave.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// A departure although the fleet is not full yet.
const EARLY_DEPARTURE: f64 = 0.1;

/// What happens to a fleet.
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

/// A stream of arrivals and departures: the same for one seed, whatever becomes of the clusters.
#[derive(Debug, Clone)]
pub struct Churn {
    rng: StdRng,
    sizes: Vec<u32>,
    target_vms: u64,
    /// VMs of each cluster, by number.
    vms: Vec<u32>,
    /// Numbers of the clusters that have arrived and not left.
    present: Vec<u32>,
    /// VMs of these clusters.
    present_vms: u64,
}

impl Churn {
    /// Clusters of these sizes, each equally likely; departures hold the number of VMs near `target_vms`.
    ///
    /// # Panics
    /// If there are no sizes.
    #[must_use]
    pub fn new(seed: u64, sizes: &[u32], target_vms: u64) -> Self {
        assert!(!sizes.is_empty(), "clusters have sizes");
        Self {
            rng: StdRng::seed_from_u64(seed),
            sizes: sizes.to_vec(),
            target_vms,
            vms: Vec::new(),
            present: Vec::new(),
            present_vms: 0,
        }
    }

    /// What happens next.
    ///
    /// # Panics
    /// After 2^32 arrivals.
    pub fn next_event(&mut self) -> Event {
        let full = self.present_vms >= self.target_vms;
        if !self.present.is_empty() && (full || self.rng.random_bool(EARLY_DEPARTURE)) {
            let at = self.rng.random_range(0..self.present.len());
            let id = self.present.swap_remove(at);
            self.present_vms -= u64::from(self.vms[id as usize]);
            return Event::Leave { id };
        }
        let vms = self.sizes[self.rng.random_range(0..self.sizes.len())];
        let id = u32::try_from(self.vms.len()).expect("fewer than 2^32 clusters");
        self.vms.push(vms);
        self.present.push(id);
        self.present_vms += u64::from(vms);
        Event::Arrive { id, vms }
    }
}
