//! How compact clusters are beside Slurm's topology/tree.

use std::error::Error;

use sched_bridge::model::Occupancy;
use sched_bridge::place::Placement;
use sched_bridge::sim::{SlurmTree, gpu_cluster};
use serde::Serialize;

use crate::fleets::{Scatter, Stream, Who, sizes, small};

/// Parts of a hundred that are in use.
pub const LOADS: [u32; 7] = [50, 60, 70, 80, 85, 90, 95];

/// The models of Slurm, as columns.
const SLURMS: [(SlurmTree, &str); 3] =
    [(SlurmTree::V24, "24.05"), (SlurmTree::V22, "22.05"), (SlurmTree::Guide, "guide")];

/// Hops summed over all pairs of VMs of the same clusters.
#[derive(Serialize)]
pub struct Side {
    pub load: u32,
    pub clusters: u32,
    pub ours: u64,
    pub slurm: Vec<Beside>,
    /// Each cluster as if it were alone: nobody can do better.
    pub alone: u64,
}

/// The same clusters placed by a model of Slurm.
#[derive(Serialize)]
pub struct Beside {
    pub model: &'static str,
    pub hops: u64,
    pub saved_percent: f64,
    /// Clusters that have more hops with us.
    pub worse: u32,
}

/// Hops of all clusters that are there, summed over time, each with a fleet of its own.
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

impl Side {
    fn new(load: u32) -> Self {
        let beside = |model| Beside { model, hops: 0, saved_percent: 0.0, worse: 0 };
        Self { load, clusters: 0, ours: 0, slurm: SLURMS.map(|(_, name)| beside(name)).into(), alone: 0 }
    }

    fn add(&mut self, ours: &Placement, slurms: &[Placement], alone: &[u64]) {
        self.clusters += 1;
        self.ours += ours.score.sum_hops;
        self.alone += alone[ours.assignments.len()];
        let key = |placement: &Placement| (placement.score.max_hops, placement.score.sum_hops);
        for (side, slurm) in self.slurm.iter_mut().zip(slurms) {
            side.hops += slurm.score.sum_hops;
            side.worse += u32::from(key(ours) > key(slurm));
        }
    }

    fn done(mut self) -> Self {
        print!("{:>4} % {:>9} {:>10}", self.load, self.clusters, self.ours);
        for side in &mut self.slurm {
            side.saved_percent = saved(self.ours, side.hops);
            print!(" {:>10} {:>6.1} % {:>6}", side.hops, side.saved_percent, side.worse);
        }
        println!(" {:>10}", self.alone);
        self
    }
}

#[expect(clippy::cast_precision_loss, reason = "hops stay far below 2^53")]
fn saved(ours: u64, theirs: u64) -> f64 {
    100.0 * (1.0 - ours as f64 / theirs.max(1) as f64)
}

fn heading() {
    print!("{:>6} {:>9} {:>10}", "in use", "clusters", "ours");
    for (_, name) in SLURMS {
        print!(" {name:>10} {:>8} {:>6}", "fewer", "worse");
    }
    println!(" {:>10}", "alone");
}

/// Least hops of a cluster of each size, on an empty fleet.
fn alone() -> Result<Vec<u64>, Box<dyn Error>> {
    let fleet = small().build()?;
    let used = Occupancy::new(&fleet);
    let most = sizes().into_iter().max().unwrap_or(0);
    let of = |vms| Ok(Who::Ours.place(&fleet, &used, &gpu_cluster("c", vms, 1, 0))?.score.sum_hops);
    std::iter::once(Ok(0)).chain((1..=most).map(of)).collect()
}

/// 10,000 single VMs with one GPU come and go on nodes taken at random, as a cloud without regard to topology has it; then
/// clusters are placed by all on the very same fleet.
pub fn scattered(quick: bool) -> Result<Vec<Side>, Box<dyn Error>> {
    println!(
        "sum of hops over all pairs of VMs, the same clusters on the same fleet; 10,000 single VMs came and went at random\n"
    );
    heading();
    let (sizes, alone) = (sizes(), alone()?);
    let mut sides = Vec::new();
    for load in LOADS {
        let fleet = small().build()?;
        let mut scatter = Scatter::new(&fleet, load as usize);
        scatter.run(if quick { 4000 } else { 10_000 })?;
        let mut side = Side::new(load);
        for at in 0..if quick { 47 } else { 470 } {
            let request = gpu_cluster("probe", sizes[at % sizes.len()], 1, 0);
            let slurms = SLURMS.map(|(slurm, _)| Who::Slurm(slurm).place(&fleet, &scatter.used, &request));
            let slurms: Result<Vec<_>, _> = slurms.into_iter().collect();
            if let (Ok(ours), Ok(slurms)) = (Who::Ours.place(&fleet, &scatter.used, &request), slurms) {
                side.add(&ours, &slurms, &alone);
            }
            scatter.run(50)?;
        }
        sides.push(side.done());
    }
    println!();
    Ok(sides)
}

/// After 10,000 arrivals and departures of clusters placed by Slurm, each of some clusters is placed by all on the very same fleet.
pub fn snapshots(quick: bool) -> Result<Vec<Side>, Box<dyn Error>> {
    println!("the same, on a fleet on which clusters placed by Slurm (24.05) came and went\n");
    heading();
    let (mut sides, sizes, alone) = (Vec::new(), sizes(), alone()?);
    for load in LOADS {
        let fleet = small().build()?;
        let mut stream = Stream::new(&fleet, 7, u64::from(load));
        let who = Who::Slurm(SlurmTree::V24);
        stream.run(if quick { 1000 } else { 10_000 }, who)?;
        let mut side = Side::new(load);
        for at in 0..if quick { 47 } else { 470 } {
            let request = gpu_cluster("probe", sizes[at % sizes.len()], 1, 0);
            let slurms = SLURMS.map(|(slurm, _)| Who::Slurm(slurm).place(&fleet, &stream.used, &request));
            let slurms: Result<Vec<_>, _> = slurms.into_iter().collect();
            if let (Ok(ours), Ok(slurms)) = (Who::Ours.place(&fleet, &stream.used, &request), slurms) {
                side.add(&ours, &slurms, &alone);
            }
            stream.run(10, who)?;
        }
        sides.push(side.done());
    }
    println!();
    Ok(sides)
}

/// Each has a fleet of its own, and places the whole stream on it.
pub fn streams(quick: bool) -> Result<Vec<Side>, Box<dyn Error>> {
    println!("the same, each with a fleet of its own for the whole stream\n");
    heading();
    let (mut sides, alone) = (Vec::new(), alone()?);
    for load in LOADS {
        let fleet = small().build()?;
        let events = if quick { 2000 } else { 20_000 };
        let mut ours = Stream::new(&fleet, 11, u64::from(load));
        let mut slurms = SLURMS.map(|_| Stream::new(&fleet, 11, u64::from(load)));
        let mut side = Side::new(load);
        for step in 0..events {
            let own = ours.step(Who::Ours)?;
            let mut theirs = Vec::new();
            for (stream, (slurm, _)) in slurms.iter_mut().zip(SLURMS) {
                theirs.extend(stream.step(Who::Slurm(slurm))?);
            }
            // The first half fragments the fleet.
            if let (Some(own), true, true) = (own, theirs.len() == SLURMS.len(), step >= events / 2) {
                side.add(&own, &theirs, &alone);
            }
        }
        sides.push(side.done());
    }
    println!();
    Ok(sides)
}

/// Each has a fleet of its own; hops of the clusters that all of them have placed, summed over time: by Slurm's choices, by ours,
/// and by ours with clusters brought together by moves every so many events.
pub fn compacted(quick: bool) -> Result<Vec<Compacted>, Box<dyn Error>> {
    println!(
        "hops of all clusters that are there, summed over time, each with a fleet of its own; moves bring clusters together now and then\n"
    );
    println!(
        "{:>6} {:>6} {:>11} {:>11} {:>11} {:>8} {:>11} {:>12}",
        "in use", "every", "24.05", "ours", "with moves", "fewer", "alone", "VMs moved"
    );
    let alone = alone()?;
    let mut rows = Vec::new();
    for (load, every) in [(50, 200), (70, 200), (80, 200), (80, 50), (90, 200)] {
        let fleet = small().build()?;
        let events = if quick { 1000 } else { 4000 };
        let mut streams = [0; 3].map(|_| Stream::new(&fleet, 11, u64::from(load)));
        let mut sums = [0_u64; 3];
        let (mut arrived, mut moved, mut least) = (0_u64, 0_u64, 0_u64);
        for step in 0..events {
            streams[0].step(Who::Slurm(SlurmTree::V24))?;
            streams[1].step(Who::Ours)?;
            let second_half = step >= events / 2;
            let vms = streams[2].step(Who::Ours)?.map_or(0, |placement| placement.assignments.len());
            let moves = if step % every == every - 1 { streams[2].compact()? } else { 0 };
            if second_half {
                arrived += vms as u64;
                moved += moves;
                let common: Vec<u32> = (streams[0].hops.keys().copied())
                    .filter(|id| streams[1..].iter().all(|stream| stream.hops.contains_key(id)))
                    .collect();
                for (sum, stream) in sums.iter_mut().zip(&streams) {
                    *sum += common.iter().map(|id| stream.hops[id]).sum::<u64>();
                }
                least += common.iter().map(|id| alone[streams[0].vms(*id)]).sum::<u64>();
            }
        }
        let [slurm, placed, compacted] = sums;
        let saved_percent = saved(compacted, slurm);
        println!(
            "{load:>4} % {every:>6} {slurm:>11} {placed:>11} {compacted:>11} {saved_percent:>6.1} % {least:>11} {moved:>6} of {arrived}"
        );
        rows.push(Compacted {
            load,
            every,
            slurm,
            placed,
            compacted,
            alone: least,
            saved_percent,
            arrived_vms: arrived,
            moved_vms: moved,
        });
    }
    println!();
    Ok(rows)
}
