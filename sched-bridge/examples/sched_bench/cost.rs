//! What a placement costs, by size of the fleet.

use std::error::Error;
use std::time::Instant;

use sched_bridge::model::{Assignment, Fleet, Occupancy};
use sched_bridge::place::{ClusterRequest, Options, PlaceError, place};
use sched_bridge::sim::{FleetSpec, Rng, gpu_cluster};
use serde::Serialize;

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
pub fn cost(sizes: &[u32]) -> Result<Vec<Cost>, Box<dyn Error>> {
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
