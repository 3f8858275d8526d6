//! How many hops clusters have beside Slurm's topology/tree.

use bridge_lab::fleet::gpu_cluster;
use bridge_lab::slurm_model::SlurmModel;
use sched_bridge::model::{Fleet, Occupancy};
use sched_bridge::place::Placement;
use serde::Serialize;

use crate::streams::{Scheduler, SingleVms, Stream, cluster_sizes, small_fleet};

/// Percent of the GPUs in use.
const LOADS: [u32; 7] = [50, 60, 70, 80, 85, 90, 95];

/// The models of Slurm, as columns.
const SLURMS: [(SlurmModel, &str); 3] =
    [(SlurmModel::V24, "24.05"), (SlurmModel::V22, "22.05"), (SlurmModel::Guide, "guide")];

/// Hops of the same clusters by several schedulers, summed over all pairs of VMs.
#[derive(Serialize)]
pub struct Comparison {
    pub load: u32,
    pub clusters: u32,
    pub ours: u64,
    pub slurm: Vec<SlurmHops>,
    /// Each cluster as if it were alone on the fleet: nobody can do better.
    pub alone: u64,
}

/// The same clusters placed by a model of Slurm.
#[derive(Serialize)]
pub struct SlurmHops {
    pub model: &'static str,
    pub hops: u64,
    pub saved_percent: f64,
    /// Clusters that have more hops when the bridge places them.
    pub worse: u32,
}

/// Hops of all clusters that are there, summed over time, each scheduler with a fleet of its own.
#[derive(Serialize)]
pub struct Compacted {
    pub load: u32,
    /// Events between two compactions.
    pub every: u32,
    pub slurm: u64,
    pub placed: u64,
    pub compacted: u64,
    pub alone: u64,
    pub saved_percent: f64,
    pub arrived_vms: u64,
    pub moved_vms: u64,
}

impl Comparison {
    fn new(load: u32) -> Self {
        let slurm = SLURMS.map(|(_, model)| SlurmHops { model, hops: 0, saved_percent: 0.0, worse: 0 });
        Self { load, clusters: 0, ours: 0, slurm: slurm.into(), alone: 0 }
    }

    fn add(&mut self, ours: &Placement, slurms: &[Placement], alone: &[u64]) {
        self.clusters += 1;
        self.ours += ours.score.sum_hops;
        self.alone += alone[ours.assignments.len()];
        let key = |placement: &Placement| (placement.score.max_hops, placement.score.sum_hops);
        for (column, slurm) in self.slurm.iter_mut().zip(slurms) {
            column.hops += slurm.score.sum_hops;
            column.worse += u32::from(key(ours) > key(slurm));
        }
    }

    /// Places a cluster by all schedulers on the same fleet; left out if one of them has no room for it.
    fn probe(&mut self, fleet: &Fleet, used: &Occupancy, vms: u32, alone: &[u64]) {
        let request = gpu_cluster("probe", vms, 1, 0);
        let slurms = SLURMS.map(|(model, _)| Scheduler::Slurm(model).place(fleet, used, &request));
        let slurms: Result<Vec<_>, _> = slurms.into_iter().collect();
        if let (Ok(ours), Ok(slurms)) = (Scheduler::Bridge.place(fleet, used, &request), slurms) {
            self.add(&ours, &slurms, alone);
        }
    }

    fn printed(mut self) -> Self {
        print!("{:>4} % {:>9} {:>10}", self.load, self.clusters, self.ours);
        for column in &mut self.slurm {
            column.saved_percent = saved_percent(self.ours, column.hops);
            print!(" {:>10} {:>6.1} % {:>6}", column.hops, column.saved_percent, column.worse);
        }
        println!(" {:>10}", self.alone);
        self
    }
}

#[expect(clippy::cast_precision_loss, reason = "hops stay far below 2^53")]
fn saved_percent(ours: u64, theirs: u64) -> f64 {
    100.0 * (1.0 - ours as f64 / theirs.max(1) as f64)
}

fn print_heading(text: &str) {
    println!("{text}\n");
    print!("{:>6} {:>9} {:>10}", "in use", "clusters", "ours");
    for (_, name) in SLURMS {
        print!(" {name:>10} {:>8} {:>6}", "fewer", "worse");
    }
    println!(" {:>10}", "alone");
}

/// Least hops of a cluster, by its number of VMs: on an empty fleet.
fn least_hops() -> anyhow::Result<Vec<u64>> {
    let fleet = small_fleet().build()?;
    let used = Occupancy::new(&fleet);
    let most = cluster_sizes().into_iter().max().unwrap_or(0);
    let of = |vms| Ok(Scheduler::Bridge.place(&fleet, &used, &gpu_cluster("c", vms, 1, 0))?.score.sum_hops);
    std::iter::once(Ok(0)).chain((1..=most).map(of)).collect()
}

fn probes(quick: bool) -> usize {
    if quick { 47 } else { 470 }
}

/// Single VMs come and go at random nodes, as in a cloud that does not look at the network; then clusters are placed by all
/// schedulers on the very same fleet.
pub fn scattered(quick: bool) -> anyhow::Result<Vec<Comparison>> {
    print_heading(
        "sum of hops over all pairs of VMs, the same clusters on the same fleet; 10,000 single VMs came and went at random",
    );
    let (sizes, alone) = (cluster_sizes(), least_hops()?);
    let mut rows = Vec::new();
    for load in LOADS {
        let fleet = small_fleet().build()?;
        let mut single_vms = SingleVms::new(&fleet, load as usize);
        single_vms.run(if quick { 4000 } else { 10_000 })?;
        let mut row = Comparison::new(load);
        for number in 0..probes(quick) {
            row.probe(&fleet, &single_vms.used, sizes[number % sizes.len()], &alone);
            single_vms.run(50)?;
        }
        rows.push(row.printed());
    }
    println!();
    Ok(rows)
}

/// Clusters placed by Slurm come and go; now and then a cluster is placed by all schedulers on the very same fleet.
pub fn snapshots(quick: bool) -> anyhow::Result<Vec<Comparison>> {
    print_heading("the same, on a fleet on which clusters placed by Slurm (24.05) came and went");
    let (mut rows, sizes, alone) = (Vec::new(), cluster_sizes(), least_hops()?);
    let slurm = Scheduler::Slurm(SlurmModel::V24);
    for load in LOADS {
        let fleet = small_fleet().build()?;
        let mut stream = Stream::new(&fleet, 7, u64::from(load));
        stream.run(if quick { 1000 } else { 10_000 }, slurm)?;
        let mut row = Comparison::new(load);
        for number in 0..probes(quick) {
            row.probe(&fleet, &stream.used, sizes[number % sizes.len()], &alone);
            stream.run(10, slurm)?;
        }
        rows.push(row.printed());
    }
    println!();
    Ok(rows)
}

/// Each scheduler has a fleet of its own, and places the whole stream on it.
pub fn streams(quick: bool) -> anyhow::Result<Vec<Comparison>> {
    print_heading("the same, each scheduler with a fleet of its own for the whole stream");
    let (mut rows, alone) = (Vec::new(), least_hops()?);
    for load in LOADS {
        let fleet = small_fleet().build()?;
        let events = if quick { 2000 } else { 20_000 };
        let mut ours = Stream::new(&fleet, 11, u64::from(load));
        let mut slurms = SLURMS.map(|_| Stream::new(&fleet, 11, u64::from(load)));
        let mut row = Comparison::new(load);
        for step in 0..events {
            let own = ours.step(Scheduler::Bridge)?;
            let mut theirs = Vec::new();
            for (stream, (model, _)) in slurms.iter_mut().zip(SLURMS) {
                theirs.extend(stream.step(Scheduler::Slurm(model))?);
            }
            // The first half fragments the fleet.
            if let (Some(own), true, true) = (own, theirs.len() == SLURMS.len(), step >= events / 2) {
                row.add(&own, &theirs, &alone);
            }
        }
        rows.push(row.printed());
    }
    println!();
    Ok(rows)
}

/// Each has a fleet of its own; hops of the clusters that all of them have placed, summed over time: placed by Slurm, by the bridge,
/// and by the bridge with moves after every so many events.
pub fn compacted(quick: bool) -> anyhow::Result<Vec<Compacted>> {
    println!(
        "hops of all clusters that are there, summed over time, each with a fleet of its own; moves bring clusters together now and then\n"
    );
    println!(
        "{:>6} {:>6} {:>11} {:>11} {:>11} {:>8} {:>11} {:>12}",
        "in use", "every", "24.05", "ours", "with moves", "fewer", "alone", "VMs moved"
    );
    let alone = least_hops()?;
    let mut rows = Vec::new();
    for (load, every) in [(50, 200), (70, 200), (80, 200), (80, 50), (90, 200)] {
        rows.push(with_moves(load, every, if quick { 1000 } else { 4000 }, &alone)?);
    }
    println!();
    Ok(rows)
}

fn with_moves(load: u32, every: u32, events: u32, alone: &[u64]) -> anyhow::Result<Compacted> {
    let fleet = small_fleet().build()?;
    let mut streams = [0; 3].map(|_| Stream::new(&fleet, 11, u64::from(load)));
    let mut sums = [0_u64; 3];
    let (mut arrived_vms, mut moved_vms, mut least) = (0_u64, 0_u64, 0_u64);
    for step in 0..events {
        streams[0].step(Scheduler::Slurm(SlurmModel::V24))?;
        streams[1].step(Scheduler::Bridge)?;
        let arrived = streams[2].step(Scheduler::Bridge)?.map_or(0, |placement| placement.assignments.len());
        let moved = if step % every == every - 1 { streams[2].compact()? } else { 0 };
        if step < events / 2 {
            continue;
        }
        arrived_vms += arrived as u64;
        moved_vms += moved;
        let common: Vec<u32> = (streams[0].hops.keys().copied())
            .filter(|id| streams[1..].iter().all(|stream| stream.hops.contains_key(id)))
            .collect();
        for (sum, stream) in sums.iter_mut().zip(&streams) {
            *sum += common.iter().map(|id| stream.hops[id]).sum::<u64>();
        }
        least += common.iter().map(|id| alone[streams[0].vms(*id)]).sum::<u64>();
    }
    let [slurm, placed, compacted] = sums;
    let saved_percent = saved_percent(compacted, slurm);
    println!(
        "{load:>4} % {every:>6} {slurm:>11} {placed:>11} {compacted:>11} {saved_percent:>6.1} % {least:>11} {moved_vms:>6} of {arrived_vms}"
    );
    Ok(Compacted {
        load,
        every,
        slurm,
        placed,
        compacted,
        alone: least,
        saved_percent,
        arrived_vms,
        moved_vms,
    })
}
