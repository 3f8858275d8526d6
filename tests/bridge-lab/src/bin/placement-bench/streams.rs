//! Fleets on which VMs and clusters come and go.

use std::collections::BTreeMap;

use bridge_lab::churn::{Churn, Event};
use bridge_lab::fleet::{FleetSpec, gpu_cluster};
use bridge_lab::slurm_model::SlurmModel;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use sched_bridge::model::{Assignment, Fleet, Granted, Occupancy, VmName};
use sched_bridge::moves::{self, Resident};
use sched_bridge::place::{ClusterRequest, Options, PlaceError, Placement, place, score};

/// A departure although the fleet is not full yet.
const EARLY_DEPARTURE: f64 = 0.3;

/// Three levels of switches, small enough for long streams: 256 nodes of 8 GPUs, 8 below a leaf, 4 leaves below a spine.
pub fn small_fleet() -> FleetSpec {
    FleetSpec { per_leaf: 8, fan_in: vec![4], ..FleetSpec::three_levels(256) }
}

/// VMs of a cluster, each number equally likely.
pub fn cluster_sizes() -> Vec<u32> {
    (2..=48).collect()
}

fn gpus(fleet: &Fleet) -> usize {
    fleet.nodes().iter().map(|node| node.devices.len() / 2).sum()
}

/// Who places clusters.
#[derive(Clone, Copy)]
pub enum Scheduler {
    /// The bridge.
    Bridge,
    /// A model of Slurm.
    Slurm(SlurmModel),
}

impl Scheduler {
    /// Places a cluster.
    pub fn place(
        self,
        fleet: &Fleet,
        used: &Occupancy,
        request: &ClusterRequest,
    ) -> Result<Placement, PlaceError> {
        match self {
            Self::Bridge => place(fleet, used, request, &Options::default()),
            Self::Slurm(slurm) => slurm.place(fleet, used, request),
        }
    }
}

/// Single VMs with a GPU each that come and go at random nodes.
pub struct SingleVms<'a> {
    fleet: &'a Fleet,
    pub used: Occupancy,
    rng: StdRng,
    present: Vec<Assignment>,
    target: usize,
}

impl<'a> SingleVms<'a> {
    /// None yet, on a fleet that is to be filled to so much.
    pub fn new(fleet: &'a Fleet, load_percent: usize) -> Self {
        Self {
            fleet,
            used: Occupancy::new(fleet),
            rng: StdRng::seed_from_u64(5),
            present: Vec::new(),
            target: gpus(fleet) * load_percent / 100,
        }
    }

    /// So many arrivals and departures.
    pub fn run(&mut self, events: u32) -> anyhow::Result<()> {
        for _ in 0..events {
            let full = self.present.len() >= self.target;
            if full || (!self.present.is_empty() && self.rng.random_bool(EARLY_DEPARTURE)) {
                let gone = self.present.swap_remove(self.rng.random_range(0..self.present.len()));
                self.used.release(self.fleet, &gone)?;
                continue;
            }
            let node = &self.fleet.nodes()[self.rng.random_range(0..self.fleet.nodes().len())];
            let placed = node.devices.iter().step_by(2).find_map(|device| {
                let devices = vec![Granted { address: device.address, kind: device.kind }];
                let vm = VmName::new("single").ok()?;
                let vm = Assignment { vm, node: node.name.clone(), devices, shares: Vec::new() };
                self.used.take(self.fleet, &vm).is_ok().then_some(vm)
            });
            self.present.extend(placed);
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
    /// Hops of each cluster that is there.
    pub hops: BTreeMap<u32, u64>,
}

impl<'a> Stream<'a> {
    /// An empty fleet, and a stream for it.
    pub fn new(fleet: &'a Fleet, seed: u64, load_percent: u64) -> Self {
        let churn = Churn::new(seed, &cluster_sizes(), gpus(fleet) as u64 * load_percent / 100);
        Self { fleet, used: Occupancy::new(fleet), churn, placed: BTreeMap::new(), hops: BTreeMap::new() }
    }

    /// So many events.
    pub fn run(&mut self, events: u32, scheduler: Scheduler) -> anyhow::Result<()> {
        for _ in 0..events {
            self.step(scheduler)?;
        }
        Ok(())
    }

    /// The next event. Gives the placement if a cluster has arrived and there was room for it.
    pub fn step(&mut self, scheduler: Scheduler) -> anyhow::Result<Option<Placement>> {
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
                match scheduler.place(self.fleet, &self.used, &request) {
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

    /// Brings clusters together by moves. Gives the number of VMs that moved.
    pub fn compact(&mut self) -> anyhow::Result<u64> {
        let request = |id: u32, vms: usize| -> anyhow::Result<ClusterRequest> {
            Ok(gpu_cluster(&format!("c{id}"), u32::try_from(vms)?, 1, 0))
        };
        let residents: Vec<Resident> = (self.placed.iter())
            .map(|(id, assignments)| {
                let request = request(*id, assignments.len())?;
                Ok(Resident { request, assignments: assignments.clone(), pinned: Vec::new() })
            })
            .collect::<anyhow::Result<_>>()?;
        let plan = moves::compact(self.fleet, &residents, None)?;
        for step in &plan.steps {
            self.used.take(self.fleet, &step.to)?;
            self.used.release(self.fleet, &step.from)?;
            for assignment in self.placed.values_mut().flatten().filter(|own| own.vm == step.to.vm) {
                *assignment = step.to.clone();
            }
        }
        for (id, assignments) in &self.placed {
            let request = request(*id, assignments.len())?;
            self.hops.insert(*id, score(self.fleet, &self.used, &request, assignments)?.sum_hops);
        }
        Ok(plan.steps.len() as u64)
    }
}
