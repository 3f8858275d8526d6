//! Fleets on which VMs and clusters come and go.

use std::collections::BTreeMap;
use std::error::Error;

use sched_bridge::model::{Assignment, Fleet, Granted, Occupancy, VmName};
use sched_bridge::moves::{self, Resident};
use sched_bridge::place::{ClusterRequest, Options, PlaceError, Placement, place, score};
use sched_bridge::sim::{Churn, Event, FleetSpec, Rng, SlurmTree, gpu_cluster};

/// Three levels of switches, small enough for long streams: 256 nodes of 8 GPUs, 8 below a leaf, 4 leaves below a spine.
pub fn small() -> FleetSpec {
    FleetSpec { per_leaf: 8, fan_in: vec![4], ..FleetSpec::three_levels(256) }
}

/// VMs of a cluster, with equal chance.
pub fn sizes() -> Vec<u32> {
    (2..=48).collect()
}

/// Whose placements.
#[derive(Clone, Copy)]
pub enum Who {
    /// The bridge's.
    Ours,
    /// A model of Slurm's.
    Slurm(SlurmTree),
}

impl Who {
    /// Places a cluster.
    pub fn place(
        self,
        fleet: &Fleet,
        used: &Occupancy,
        request: &ClusterRequest,
    ) -> Result<Placement, PlaceError> {
        match self {
            Self::Ours => place(fleet, used, request, &Options::default()),
            Self::Slurm(slurm) => slurm.place(fleet, used, request),
        }
    }
}

/// Single VMs that come and go at random.
pub struct Scatter<'a> {
    fleet: &'a Fleet,
    pub used: Occupancy,
    rng: Rng,
    there: Vec<Assignment>,
    target: usize,
}

impl<'a> Scatter<'a> {
    /// An empty fleet, to be filled to so much.
    pub fn new(fleet: &'a Fleet, load_percent: usize) -> Self {
        let gpus: usize = fleet.nodes().iter().map(|node| node.devices.len() / 2).sum();
        Self {
            fleet,
            used: Occupancy::new(fleet),
            rng: Rng::new(5),
            there: Vec::new(),
            target: gpus * load_percent / 100,
        }
    }

    /// So many arrivals and departures; arrivals go on until the fleet is as full as it is to be.
    pub fn run(&mut self, events: u32) -> Result<(), Box<dyn Error>> {
        let mut left = events;
        while left > 0 {
            left -= 1;
            let count = u32::try_from(self.there.len())?;
            if self.there.len() >= self.target || (count > 0 && self.rng.chance(30)) {
                let gone = self.there.swap_remove(self.rng.below(count) as usize);
                self.used.release(self.fleet, &gone)?;
                continue;
            }
            let node = &self.fleet.nodes()[self.rng.below(u32::try_from(self.fleet.nodes().len())?) as usize];
            let free = node.devices.iter().step_by(2).find_map(|device| {
                let devices = vec![Granted { address: device.address, kind: device.kind }];
                let vm = VmName::new("single").ok()?;
                let one = Assignment { vm, node: node.name.clone(), devices, shares: Vec::new() };
                self.used.take(self.fleet, &one).is_ok().then_some(one)
            });
            self.there.extend(free);
        }
        Ok(())
    }
}
/// A fleet on which clusters come and go.
pub struct Stream<'a> {
    fleet: &'a Fleet,
    pub used: Occupancy,
    churn: Churn,
    placed: BTreeMap<u32, Vec<Assignment>>,
    /// Hops of the clusters that are there.
    pub hops: BTreeMap<u32, u64>,
}

impl<'a> Stream<'a> {
    /// An empty fleet, and a stream for it.
    pub fn new(fleet: &'a Fleet, seed: u64, load_percent: u64) -> Self {
        let gpus: u64 = fleet.nodes().iter().map(|node| node.devices.len() as u64 / 2).sum();
        let churn = Churn::new(seed, &sizes(), gpus * load_percent / 100);
        Self { fleet, used: Occupancy::new(fleet), churn, placed: BTreeMap::new(), hops: BTreeMap::new() }
    }

    /// So many events.
    pub fn run(&mut self, events: u32, who: Who) -> Result<(), Box<dyn Error>> {
        for _ in 0..events {
            self.step(who)?;
        }
        Ok(())
    }

    /// The next event; what it placed.
    pub fn step(&mut self, who: Who) -> Result<Option<Placement>, Box<dyn Error>> {
        match self.churn.next_event() {
            Event::Leave { id } => {
                self.hops.remove(&id);
                for assignment in self.placed.remove(&id).unwrap_or_default() {
                    self.used.release(self.fleet, &assignment)?;
                }
                Ok(None)
            }
            Event::Arrive { id, vms } => {
                let request = gpu_cluster(&format!("c{id}"), vms, 1, 0);
                match who.place(self.fleet, &self.used, &request) {
                    Ok(placement) => {
                        for assignment in &placement.assignments {
                            self.used.take(self.fleet, assignment)?;
                        }
                        self.placed.insert(id, placement.assignments.clone());
                        self.hops.insert(id, placement.score.sum_hops);
                        Ok(Some(placement))
                    }
                    Err(PlaceError::NoRoom { .. }) => Ok(None),
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    /// VMs of a cluster that is there.
    pub fn vms(&self, id: u32) -> usize {
        self.placed.get(&id).map_or(0, Vec::len)
    }

    /// Brings clusters together by moves. Returns how many VMs moved.
    pub fn compact(&mut self) -> Result<u64, Box<dyn Error>> {
        let request = |id: u32, vms: usize| -> Result<ClusterRequest, Box<dyn Error>> {
            Ok(gpu_cluster(&format!("c{id}"), u32::try_from(vms)?, 1, 0))
        };
        let residents: Vec<Resident> = (self.placed.iter())
            .map(|(id, own)| {
                let request = request(*id, own.len())?;
                Ok(Resident { request, assignments: own.clone(), pinned: Vec::new() })
            })
            .collect::<Result<_, Box<dyn Error>>>()?;
        let plan = moves::compact(self.fleet, &residents, None)?;
        for step in &plan.steps {
            self.used.take(self.fleet, &step.to)?;
            self.used.release(self.fleet, &step.from)?;
            let all = self.placed.values_mut().flatten();
            for own in all.filter(|own| own.vm == step.to.vm) {
                *own = step.to.clone();
            }
        }
        for (id, own) in &self.placed {
            let hops = score(self.fleet, &self.used, &request(*id, own.len())?, own)?.sum_hops;
            self.hops.insert(*id, hops);
        }
        Ok(plan.steps.len() as u64)
    }
}
