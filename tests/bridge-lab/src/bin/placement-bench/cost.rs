//! What a placement costs, by size of the fleet.

use std::time::Instant;

use bridge_lab::fleet::{FleetSpec, gpu_cluster};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use sched_bridge::model::{Assignment, Fleet, Granted, Occupancy, VmName};
use sched_bridge::place::{ClusterRequest, Mode, Options, PlaceError, place};
use serde::Serialize;

const EMPTY: &str = "empty";
const FRAGMENTED: &str = "fragmented";
const UNCONSTRAINED: &str = "fragmented, unconstrained";
const MIXED: &str = "fragmented, 60 + 4 bigger";
/// All cases, and what pictures call them.
pub const CASES: [(&str, &str); 4] = [
    (EMPTY, "empty fleet"),
    (FRAGMENTED, "85 % leased"),
    (UNCONSTRAINED, "85 %, unconstrained"),
    (MIXED, "85 %, 60 + 4 larger"),
];
/// Part of the GPUs that is taken in it.
const TAKEN: f64 = 0.85;
const RUNS: usize = 7;

/// Cost of placements on fleets of one size.
#[derive(Serialize)]
pub struct Cost {
    pub nodes: u32,
    pub gpus: u32,
    pub case: &'static str,
    pub runs: usize,
    pub median_ms: f64,
    pub worst_ms: f64,
    pub rss_mib: u64,
}

/// Fleets of these numbers of nodes, empty and not.
pub fn cost(sizes: &[u32]) -> anyhow::Result<Vec<Cost>> {
    println!("64 VMs of one GPU and one adapter each; milliseconds for one placement\n");
    println!(
        "{:>7} {:>7}  {:<28} {:>9} {:>9} {:>10}",
        "nodes", "GPUs", "fleet", "median", "worst", "RSS (MiB)"
    );
    let mut rows = Vec::new();
    for nodes in sizes {
        let fleet = FleetSpec::three_levels(*nodes).build()?;
        let mut used = Occupancy::new(&fleet);
        rows.push(measure(&fleet, &used, EMPTY, &gpu_cluster("c", 64, 1, 1))?);
        take_gpus_at_random(&fleet, &mut used)?;
        rows.push(measure(&fleet, &used, FRAGMENTED, &gpu_cluster("c", 64, 1, 1))?);
        let mut unconstrained = gpu_cluster("c", 64, 1, 1);
        unconstrained.compactness.mode = Mode::Unconstrained;
        rows.push(measure(&fleet, &used, UNCONSTRAINED, &unconstrained)?);
        let mut mixed = gpu_cluster("c", 60, 1, 1);
        let mut bigger = gpu_cluster("c", 4, 2, 1).groups.remove(0);
        bigger.name = "head".to_owned();
        mixed.groups.push(bigger);
        rows.push(measure(&fleet, &used, MIXED, &mixed)?);
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
    request: &ClusterRequest,
) -> anyhow::Result<Cost> {
    let mut times = Vec::new();
    for _ in 0..RUNS {
        let start = Instant::now();
        match place(fleet, used, request, &Options::default()) {
            Ok(_) | Err(PlaceError::NoRoom { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        times.push(start.elapsed().as_secs_f64() * 1000.0);
    }
    times.sort_by(f64::total_cmp);
    let nodes = u32::try_from(fleet.nodes().len())?;
    Ok(Cost {
        nodes,
        gpus: nodes * 8,
        case,
        runs: RUNS,
        median_ms: times[RUNS / 2],
        worst_ms: times[RUNS - 1],
        rss_mib: rss_mib(),
    })
}

/// Takes single GPUs, each with its adapter, all over the fleet.
fn take_gpus_at_random(fleet: &Fleet, used: &mut Occupancy) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(1);
    for node in fleet.nodes() {
        let taken = node.devices.chunks(2).filter(|_| rng.random_bool(TAKEN)).flatten();
        let devices = taken.map(|device| Granted { address: device.address, kind: device.kind }).collect();
        let vm = VmName::new("old")?;
        used.take(fleet, &Assignment { vm, node: node.name.clone(), devices, shares: Vec::new() })?;
    }
    Ok(())
}

fn rss_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or("");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
}
