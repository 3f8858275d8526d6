//! What a placement costs, by size of the fleet, and how compact clusters are beside Slurm's topology/tree.
//!
//! `cargo run --release -p vmove-sched --example sched_bench -- [--out DIR] [--quick]` prints tables, and writes
//! `sched_bench.json` and `sched_bench.svg` into DIR.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use sched_bridge::model::{Assignment, Fleet, Occupancy};
use sched_bridge::moves::{self, Resident};
use sched_bridge::place::{ClusterRequest, Options, PlaceError, Placement, place, score};
use sched_bridge::sim::{Churn, Event, FleetSpec, Rng, SlurmTree, gpu_cluster};
use serde::Serialize;

/// Cost of placements on fleets of one size.
#[derive(Serialize)]
struct Cost {
    nodes: u32,
    gpus: u32,
    case: &'static str,
    runs: usize,
    median_ms: f64,
    worst_ms: f64,
    rss_mib: u64,
}

/// Hops of the same stream placed by both.
#[derive(Serialize)]
struct Side {
    fleet: String,
    clusters: u32,
    ours: u64,
    slurm: u64,
    worse: u32,
    saved_percent: f64,
}

#[derive(Serialize)]
struct Report {
    cost: Vec<Cost>,
    scattered: Vec<Side>,
    one_snapshot: Vec<Side>,
    whole_stream: Vec<Side>,
    compacted: Vec<Compacted>,
}

/// Hops of all clusters that are there, over a whole stream, with moves now and then.
#[derive(Serialize)]
struct Compacted {
    fleet: String,
    /// Events between two compactions.
    every: u32,
    slurm: u64,
    placed: u64,
    compacted: u64,
    saved_percent: f64,
    arrived_vms: u64,
    moved_vms: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = PathBuf::from(".");
    let mut quick = false;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--out" => out = args.next().ok_or("--out needs a folder")?.into(),
            "--quick" => quick = true,
            other => return Err(format!("unknown argument {other}; there are: --out DIR, --quick").into()),
        }
    }
    std::fs::create_dir_all(&out)?;
    let cost = cost(if quick { &[100, 1000] } else { &[100, 300, 1000, 3000, 10_000] })?;
    let fragmented = cost.iter().filter(|cost| cost.case == "fragmented");
    let points: Vec<(f64, f64)> = fragmented.map(|cost| (f64::from(cost.nodes), cost.median_ms)).collect();
    std::fs::write(out.join("sched_bench.svg"), sched_bridge::sim::plot("nodes", "ms", &points))?;
    let report = Report {
        cost,
        scattered: scattered(quick)?,
        one_snapshot: snapshots(quick)?,
        whole_stream: streams(quick)?,
        compacted: compacted(quick)?,
    };
    std::fs::write(out.join("sched_bench.json"), serde_json::to_string_pretty(&report)?)?;
    println!("written: {0}/sched_bench.json, {0}/sched_bench.svg", out.display());
    Ok(())
}

fn cost(sizes: &[u32]) -> Result<Vec<Cost>, Box<dyn Error>> {
    println!("64 VMs of one GPU and one adapter each; milliseconds for one placement\n");
    println!(
        "{:>7} {:>7}  {:<28} {:>9} {:>9} {:>10}",
        "nodes", "GPUs", "fleet", "median", "worst", "RSS (MiB)"
    );
    let mut rows = Vec::new();
    for nodes in sizes {
        let fleet = FleetSpec::three_levels(*nodes).build()?;
        let mut used = Occupancy::new(&fleet);
        rows.push(measure(&fleet, &used, "empty", *nodes, &gpu_cluster("c", 64, 1, 1))?);
        fragment(&fleet, &mut used, 85)?;
        rows.push(measure(&fleet, &used, "fragmented", *nodes, &gpu_cluster("c", 64, 1, 1))?);
        let mut spread = gpu_cluster("c", 64, 1, 1);
        spread.compactness.mode = sched_bridge::place::Mode::Unconstrained;
        rows.push(measure(&fleet, &used, "fragmented, unconstrained", *nodes, &spread)?);
        let mut mixed = gpu_cluster("c", 60, 1, 1);
        let mut head = gpu_cluster("c", 4, 2, 1).groups.remove(0);
        head.name = "head".to_owned();
        mixed.groups.push(head);
        rows.push(measure(&fleet, &used, "fragmented, 60 + 4 bigger", *nodes, &mixed)?);
    }
    for row in &rows {
        println!(
            "{:>7} {:>7}  {:<28} {:>9.1} {:>9.1} {:>10}",
            row.nodes, row.gpus, row.case, row.median_ms, row.worst_ms, row.rss_mib
        );
    }
    println!();
    Ok(rows)
}

fn measure(
    fleet: &Fleet,
    used: &Occupancy,
    case: &'static str,
    nodes: u32,
    request: &ClusterRequest,
) -> Result<Cost, PlaceError> {
    let mut times = Vec::new();
    for _ in 0..7 {
        let start = Instant::now();
        match place(fleet, used, request, &Options::default()) {
            Ok(_) | Err(PlaceError::NoRoom { .. }) => {}
            Err(error) => return Err(error),
        }
        times.push(start.elapsed().as_secs_f64() * 1000.0);
    }
    times.sort_by(f64::total_cmp);
    let worst_ms = times[times.len() - 1];
    Ok(Cost {
        nodes,
        gpus: nodes * 8,
        case,
        runs: times.len(),
        median_ms: times[times.len() / 2],
        worst_ms,
        rss_mib: rss_mib(),
    })
}

/// Takes single GPUs everywhere, so many of a hundred.
fn fragment(fleet: &Fleet, used: &mut Occupancy, percent: u32) -> Result<(), Box<dyn Error>> {
    let mut rng = Rng::new(1);
    for node in fleet.nodes() {
        let taken = node.devices.chunks(2).filter(|_| rng.chance(percent)).flatten();
        let devices = taken
            .map(|device| sched_bridge::model::Granted { address: device.address, kind: device.kind })
            .collect();
        let vm = sched_bridge::model::VmName::new("old")?;
        used.take(fleet, &Assignment { vm, node: node.name.clone(), devices, shares: Vec::new() })?;
    }
    Ok(())
}

fn rss_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or("");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// VMs of a cluster, with equal chance.
fn sizes() -> Vec<u32> {
    (2..=48).collect()
}

/// 10,000 single VMs with one GPU come and go on nodes taken at random, as a cloud without regard to topology has it; then
/// clusters are placed by both on the very same fleet.
fn scattered(quick: bool) -> Result<Vec<Side>, Box<dyn Error>> {
    println!(
        "sum of hops over all pairs of VMs, the same clusters on the same fleet; 10,000 single VMs came and went at random\n"
    );
    heading();
    let sizes = sizes();
    let mut sides = Vec::new();
    for load in [50, 70, 80, 90] {
        let fleet = small().build()?;
        let mut scatter = Scatter::new(&fleet, load);
        scatter.run(if quick { 4000 } else { 10_000 })?;
        let mut side = Side::new(format!("256 nodes, {load} % in use"));
        for at in 0..if quick { 47 } else { 188 } {
            let request = gpu_cluster("probe", sizes[at % sizes.len()], 1, 0);
            let (ours, slurm) =
                (Ours.place(&fleet, &scatter.used, &request), Slurm.place(&fleet, &scatter.used, &request));
            if let (Ok(ours), Ok(slurm)) = (ours, slurm) {
                side.add(&ours, &slurm);
            }
            scatter.run(50)?;
        }
        sides.push(side.done());
    }
    println!();
    Ok(sides)
}

/// Single VMs that come and go at random.
struct Scatter<'a> {
    fleet: &'a Fleet,
    used: Occupancy,
    rng: Rng,
    there: Vec<Assignment>,
    target: usize,
}

impl<'a> Scatter<'a> {
    fn new(fleet: &'a Fleet, load_percent: usize) -> Self {
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
    fn run(&mut self, events: u32) -> Result<(), Box<dyn Error>> {
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
                let devices =
                    vec![sched_bridge::model::Granted { address: device.address, kind: device.kind }];
                let vm = sched_bridge::model::VmName::new("single").ok()?;
                let one = Assignment { vm, node: node.name.clone(), devices, shares: Vec::new() };
                self.used.take(self.fleet, &one).is_ok().then_some(one)
            });
            self.there.extend(free);
        }
        Ok(())
    }
}

/// After 10,000 arrivals and departures, each of some clusters is placed by both on the very same fleet.
fn snapshots(quick: bool) -> Result<Vec<Side>, Box<dyn Error>> {
    println!(
        "sum of hops over all pairs of VMs, the same clusters on the same fleet fragmented by arrivals and departures\n"
    );
    heading();
    let (mut sides, sizes) = (Vec::new(), sizes());
    for load in [70, 80, 90] {
        let fleet = small().build()?;
        let mut stream = Stream::new(&fleet, 7, load);
        stream.run(if quick { 1000 } else { 10_000 }, Slurm)?;
        let mut side = Side::new(format!("256 nodes, {load} % in use"));
        for at in 0..200_usize {
            let request = gpu_cluster("probe", sizes[at % sizes.len()], 1, 0);
            let (ours, slurm) =
                (Ours.place(&fleet, &stream.used, &request), Slurm.place(&fleet, &stream.used, &request));
            if let (Ok(ours), Ok(slurm)) = (ours, slurm) {
                side.add(&ours, &slurm);
            }
            stream.run(10, Slurm)?;
        }
        sides.push(side.done());
    }
    println!();
    Ok(sides)
}

/// Each has a fleet of its own, and places the whole stream on it.
fn streams(quick: bool) -> Result<Vec<Side>, Box<dyn Error>> {
    println!("the same, each with a fleet of its own for the whole stream\n");
    heading();
    let mut sides = Vec::new();
    for load in [70, 80, 90] {
        let fleet = small().build()?;
        let events = if quick { 2000 } else { 20_000 };
        let (mut ours, mut slurm) = (Stream::new(&fleet, 11, load), Stream::new(&fleet, 11, load));
        let mut side = Side::new(format!("256 nodes, {load} % in use"));
        for step in 0..events {
            let (a, b) = (ours.step(&Ours)?, slurm.step(&Slurm)?);
            // The first half fragments the fleet.
            if let (Some(a), Some(b), true) = (a, b, step >= events / 2) {
                side.add(&a, &b);
            }
        }
        sides.push(side.done());
    }
    println!();
    Ok(sides)
}

/// Each has a fleet of its own; hops of the clusters that all of them have placed, summed over time: by Slurm's choices, by ours, and
/// by ours with clusters brought together by moves every so many events.
fn compacted(quick: bool) -> Result<Vec<Compacted>, Box<dyn Error>> {
    println!(
        "hops of all clusters that are there, summed over time, each with a fleet of its own; moves bring clusters together now and then\n"
    );
    println!(
        "{:<28} {:>6} {:>11} {:>11} {:>11} {:>8} {:>12}",
        "fleet", "every", "Slurm", "ours", "with moves", "saved", "VMs moved"
    );
    let mut rows = Vec::new();
    for (load, every) in [(80, 200)] {
        let fleet = small().build()?;
        let events = if quick { 1000 } else { 8000 };
        let mut streams = [0; 3].map(|_| Stream::new(&fleet, 11, load));
        let mut sums = [0_u64; 3];
        let (mut arrived, mut moved) = (0_u64, 0_u64);
        for step in 0..events {
            streams[0].step(&Slurm)?;
            streams[1].step(&Ours)?;
            let second_half = step >= events / 2;
            let vms = streams[2].step(&Ours)?.map_or(0, |placement| placement.assignments.len());
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
            }
        }
        let [slurm, placed, compacted] = sums;
        #[expect(clippy::cast_precision_loss, reason = "hops stay far below 2^53")]
        let saved_percent = 100.0 * (1.0 - compacted as f64 / slurm.max(1) as f64);
        let fleet = format!("256 nodes, {load} % in use");
        println!(
            "{fleet:<28} {every:>6} {slurm:>11} {placed:>11} {compacted:>11} {saved_percent:>6.1} % {moved:>6} of {arrived}"
        );
        rows.push(Compacted {
            fleet,
            every,
            slurm,
            placed,
            compacted,
            saved_percent,
            arrived_vms: arrived,
            moved_vms: moved,
        });
    }
    println!();
    Ok(rows)
}

fn small() -> FleetSpec {
    FleetSpec { per_leaf: 8, fan_in: vec![4], ..FleetSpec::three_levels(256) }
}

fn heading() {
    println!(
        "{:<28} {:>9} {:>10} {:>10} {:>8} {:>16}",
        "fleet", "clusters", "ours", "Slurm", "saved", "worse than Slurm"
    );
}

impl Side {
    fn new(fleet: String) -> Self {
        Self { fleet, clusters: 0, ours: 0, slurm: 0, worse: 0, saved_percent: 0.0 }
    }

    fn add(&mut self, ours: &Placement, slurm: &Placement) {
        self.clusters += 1;
        self.ours += ours.score.sum_hops;
        self.slurm += slurm.score.sum_hops;
        let key = |placement: &Placement| (placement.score.max_hops, placement.score.sum_hops);
        self.worse += u32::from(key(ours) > key(slurm));
    }

    #[expect(clippy::cast_precision_loss, reason = "hops stay far below 2^53")]
    fn done(mut self) -> Self {
        self.saved_percent = 100.0 * (1.0 - self.ours as f64 / self.slurm.max(1) as f64);
        let mut line = String::new();
        write!(line, "{:<28} {:>9} {:>10} {:>10}", self.fleet, self.clusters, self.ours, self.slurm)
            .unwrap_or_default();
        println!("{line} {:>6.1} % {:>16}", self.saved_percent, self.worse);
        self
    }
}

trait Placer {
    fn place(
        &self,
        fleet: &Fleet,
        used: &Occupancy,
        request: &ClusterRequest,
    ) -> Result<Placement, PlaceError>;
}

#[derive(Clone, Copy)]
struct Ours;
#[derive(Clone, Copy)]
struct Slurm;

impl Placer for Ours {
    fn place(
        &self,
        fleet: &Fleet,
        used: &Occupancy,
        request: &ClusterRequest,
    ) -> Result<Placement, PlaceError> {
        place(fleet, used, request, &Options::default())
    }
}

impl Placer for Slurm {
    fn place(
        &self,
        fleet: &Fleet,
        used: &Occupancy,
        request: &ClusterRequest,
    ) -> Result<Placement, PlaceError> {
        SlurmTree.place(fleet, used, request)
    }
}

/// A fleet on which clusters come and go.
struct Stream<'a> {
    fleet: &'a Fleet,
    used: Occupancy,
    churn: Churn,
    placed: BTreeMap<u32, Vec<Assignment>>,
    hops: BTreeMap<u32, u64>,
}

impl<'a> Stream<'a> {
    fn new(fleet: &'a Fleet, seed: u64, load_percent: u64) -> Self {
        let gpus: u64 = fleet.nodes().iter().map(|node| node.devices.len() as u64 / 2).sum();
        let churn = Churn::new(seed, &sizes(), gpus * load_percent / 100);
        Self { fleet, used: Occupancy::new(fleet), churn, placed: BTreeMap::new(), hops: BTreeMap::new() }
    }

    fn run(&mut self, events: u32, placer: impl Placer + Copy) -> Result<(), Box<dyn Error>> {
        for _ in 0..events {
            self.step(&placer)?;
        }
        Ok(())
    }

    fn step(&mut self, placer: &impl Placer) -> Result<Option<Placement>, Box<dyn Error>> {
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
                match placer.place(self.fleet, &self.used, &request) {
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

    /// Brings clusters together by moves. Returns how many VMs moved.
    fn compact(&mut self) -> Result<u64, Box<dyn Error>> {
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
