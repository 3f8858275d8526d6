//! One stream of requests, placed by a real Slurm and by the bridge's placement, each on the same fleet.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use anyhow::{Context, bail};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use sched_bridge::model::{Fleet, NodeName, Occupancy};
use sched_bridge::place::{Options, Placement, place};
use test_servers::SlurmCluster;
use vmove_bridge::slurm::Slurm;

use crate::fleet::whole_nodes;

/// A departure although the next request fits.
const EARLY_DEPARTURE: f64 = 1.0 / 3.0;

/// A stream of requests for whole nodes.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Nodes of the cluster.
    pub nodes: u32,
    /// Nodes of the largest request; the smallest asks for 2.
    pub largest: u32,
    /// Arrivals and departures.
    pub events: u32,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Requests of one size.
#[derive(Debug, Clone, Copy, Default)]
pub struct Row {
    /// Requests.
    pub requests: u64,
    /// Pairs of nodes in them.
    pub pairs: u64,
    /// Hops between the nodes of each pair as Slurm placed them, summed up.
    pub slurm_hops: u64,
    /// The same as the bridge placed them.
    pub bridge_hops: u64,
}

/// Hops of both, by nodes of the request.
#[derive(Debug, Clone, Default)]
pub struct Table(pub BTreeMap<u32, Row>);

impl Table {
    /// Requests of all sizes.
    #[must_use]
    pub fn total(&self) -> Row {
        self.0.values().fold(Row::default(), |sum, row| Row {
            requests: sum.requests + row.requests,
            pairs: sum.pairs + row.pairs,
            slurm_hops: sum.slurm_hops + row.slurm_hops,
            bridge_hops: sum.bridge_hops + row.bridge_hops,
        })
    }
}

impl fmt::Display for Table {
    #[expect(clippy::cast_precision_loss, reason = "hops stay far below 2^53")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| nodes | requests | hops per pair, Slurm | hops per pair, vmove | difference |")?;
        writeln!(f, "|---|---|---|---|---|")?;
        let mut line = |name: &str, row: Row| {
            let pairs = row.pairs.max(1) as f64;
            let (slurm, bridge) = (row.slurm_hops as f64, row.bridge_hops as f64);
            let change = if row.slurm_hops == 0 { 0.0 } else { (bridge / slurm - 1.0) * 100.0 };
            writeln!(
                f,
                "| {name} | {} | {:.3} | {:.3} | {change:+.1} % |",
                row.requests,
                slurm / pairs,
                bridge / pairs
            )
        };
        for (size, row) in &self.0 {
            line(&size.to_string(), *row)?;
        }
        line("all", self.total())
    }
}

/// A request that both have placed.
struct Running {
    job_name: String,
    placement: Placement,
}

/// Plays a stream to both.
///
/// # Errors
/// Slurm does not answer, or places what the bridge cannot.
pub async fn compare(cluster: &SlurmCluster, shape: &Shape) -> anyhow::Result<Table> {
    let slurm = Slurm::new(cluster.environment());
    let fleet = Fleet::new(slurm.nodes().await?, slurm.topology().await?)?;
    let mut used = Occupancy::new(&fleet);
    let mut rng = StdRng::seed_from_u64(shape.seed);
    let (mut running, mut free, mut table): (Vec<Running>, u32, Table) =
        (Vec::new(), shape.nodes, Table::default());
    for event in 0..shape.events {
        let size = rng.random_range(2..=shape.largest);
        if !running.is_empty() && (size > free || rng.random_bool(EARLY_DEPARTURE)) {
            let gone = running.swap_remove(rng.random_range(0..running.len()));
            cluster.cancel(&gone.job_name)?;
            for assignment in &gone.placement.assignments {
                used.release(&fleet, assignment)?;
            }
            free += u32::try_from(gone.placement.assignments.len())?;
            continue;
        }
        let name = format!("vc{event}");
        let by_slurm = start_job(cluster, &name, size)?;
        let placement = place(&fleet, &used, &whole_nodes(&name, size), &Options::default())
            .with_context(|| format!("Slurm placed {size} nodes, {free} are free"))?;
        for assignment in &placement.assignments {
            used.take(&fleet, assignment)?;
        }
        let by_bridge: Vec<NodeName> = placement.assignments.iter().map(|vm| vm.node.clone()).collect();
        let row = table.0.entry(size).or_default();
        row.requests += 1;
        row.pairs += u64::from(size) * u64::from(size - 1) / 2;
        row.slurm_hops += hops(&fleet, &by_slurm);
        row.bridge_hops += hops(&fleet, &by_bridge);
        free -= size;
        running.push(Running { job_name: name, placement });
    }
    cluster.cancel_all()?;
    Ok(table)
}

/// Hops between the nodes of all pairs.
fn hops(fleet: &Fleet, nodes: &[NodeName]) -> u64 {
    let index: HashMap<&NodeName, _> =
        nodes.iter().filter_map(|node| Some((node, fleet.find(node.as_str())?))).collect();
    let pairs = nodes.iter().enumerate().flat_map(|(at, a)| nodes[..at].iter().map(move |b| (a, b)));
    pairs.map(|(a, b)| u64::from(fleet.hops(index[a], index[b]).unwrap_or(0))).sum()
}

/// Starts a job on whole nodes; gives the nodes that it has got.
fn start_job(cluster: &SlurmCluster, name: &str, nodes: u32) -> anyhow::Result<Vec<NodeName>> {
    let nodes = nodes.to_string();
    let allocate =
        ["salloc", "--no-shell", "--immediate=60", "--exclusive", "--gres=gpu:8", "-J", name, "-N"];
    cluster.run(&[&allocate[..], &[&nodes]].concat())?;
    let list = cluster.run(&["squeue", "-h", "-n", name, "-o", "%N"])?;
    if list.trim().is_empty() {
        bail!("squeue does not list job {name}, which has just been started");
    }
    let hosts = cluster.run(&["scontrol", "show", "hostnames", list.trim()])?;
    Ok(hosts.lines().map(NodeName::new).collect::<Result<_, _>>()?)
}
