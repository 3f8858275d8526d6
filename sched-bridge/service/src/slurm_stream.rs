//! The same stream of requests, placed by Slurm's topology/tree and by this bridge on the same fleet.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use anyhow::Context;
use sched_bridge::model::{DeviceKind, Fleet, MemoryMib, NodeName, Occupancy};
use sched_bridge::place::{
    Alternative, ClusterRequest, Compactness, DeviceFilter, DeviceNeed, Options, Placement, VmGroup, place,
};

use crate::slurm::Slurm;

/// A fleet and a stream.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Nodes.
    pub nodes: u32,
    /// Nodes of a leaf switch.
    pub leaf: u32,
    /// Leaf switches of a spine.
    pub spine: u32,
    /// Nodes of the largest request; the smallest is 2.
    pub largest: u32,
    /// Arrivals and departures.
    pub events: u32,
    /// Of the random numbers.
    pub seed: u64,
}

/// Requests of one size.
#[derive(Debug, Clone, Copy, Default)]
pub struct Row {
    /// How many.
    pub requests: u64,
    /// Pairs of nodes in them.
    pub pairs: u64,
    /// Switches between the nodes of each pair, where Slurm put them.
    pub slurm: u64,
    /// And where the bridge did.
    pub bridge: u64,
}

/// What came out, by size.
#[derive(Debug, Clone, Default)]
pub struct Table(pub BTreeMap<u32, Row>);

impl Table {
    fn sum(&self, of: impl Fn(&Row) -> u64) -> u64 {
        self.0.values().map(of).sum()
    }

    /// Requests of all sizes.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.sum(|row| row.requests)
    }

    /// All hops of Slurm's placements.
    #[must_use]
    pub fn slurm_hops(&self) -> u64 {
        self.sum(|row| row.slurm)
    }

    /// All hops of the bridge's.
    #[must_use]
    pub fn bridge_hops(&self) -> u64 {
        self.sum(|row| row.bridge)
    }
}

impl fmt::Display for Table {
    #[allow(clippy::cast_precision_loss)]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| nodes | requests | hops a pair, Slurm | hops a pair, vmove | difference |")?;
        writeln!(f, "|---|---|---|---|---|")?;
        let mut line = |name: &str, row: Row| {
            let pairs = row.pairs.max(1) as f64;
            let (slurm, bridge) = (row.slurm as f64, row.bridge as f64);
            let change = if row.slurm == 0 { 0.0 } else { (bridge / slurm - 1.0) * 100.0 };
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
        let all = Row {
            requests: self.requests(),
            pairs: self.sum(|row| row.pairs),
            slurm: self.slurm_hops(),
            bridge: self.bridge_hops(),
        };
        line("all", all)
    }
}

/// `vms` VMs, each on a node of its own with all 8 GPUs.
#[must_use]
pub fn whole_nodes(name: &str, vms: u32) -> ClusterRequest {
    let need = DeviceNeed { count: 8, filter: DeviceFilter::kind(DeviceKind::Gpu) };
    let alternative =
        Alternative { vcpus: 8, memory: MemoryMib(1024), devices: vec![need], ..Alternative::default() };
    ClusterRequest {
        name: sched_bridge::model::ClusterName::new(name)
            .unwrap_or_else(|_| unreachable!("names of tests are names")),
        groups: vec![VmGroup { name: "vm".into(), count: vms, alternatives: vec![alternative] }],
        compactness: Compactness::default(),
        anti_affinity: None,
        near: None,
        only_nodes: std::collections::BTreeSet::new(),
        not_nodes: std::collections::BTreeSet::new(),
    }
}

/// A request that both have placed.
#[derive(Debug)]
struct Placed {
    job: String,
    bridge: Placement,
}

/// Plays the stream.
///
/// # Errors
/// Slurm does not answer, or places what the bridge cannot.
pub async fn compare(slurm: &Slurm, shape: &Shape) -> anyhow::Result<Table> {
    let fleet = Fleet::new(slurm.nodes().await?, slurm.topology().await?)?;
    let mut used = Occupancy::new(&fleet);
    let mut random = Random(shape.seed);
    let (mut live, mut free, mut table): (Vec<Placed>, u32, Table) =
        (Vec::new(), shape.nodes, Table::default());
    for event in 0..shape.events {
        let size = 2 + random.below(shape.largest - 1);
        // Departures as soon as nothing fits, and now and then.
        if size > free || (!live.is_empty() && random.below(3) == 0) {
            if live.is_empty() {
                continue;
            }
            let at = random.below(u32::try_from(live.len())?) as usize;
            let gone = live.swap_remove(at);
            end_job(slurm, &gone.job).await?;
            for assignment in &gone.bridge.assignments {
                used.release(&fleet, assignment)?;
            }
            free += u32::try_from(gone.bridge.assignments.len())?;
            continue;
        }
        let name = format!("vc{event}");
        let (job, nodes) = start_job(slurm, &name, size).await?;
        let bridge = place(&fleet, &used, &whole_nodes(&name, size), &Options::default())
            .with_context(|| format!("Slurm placed {size} nodes, {free} are free"))?;
        for assignment in &bridge.assignments {
            used.take(&fleet, assignment)?;
        }
        let there: Vec<NodeName> = bridge.assignments.iter().map(|a| a.node.clone()).collect();
        let row = table.0.entry(size).or_default();
        row.requests += 1;
        row.pairs += u64::from(size) * u64::from(size - 1) / 2;
        row.slurm += hops(&fleet, &nodes);
        row.bridge += hops(&fleet, &there);
        free -= size;
        live.push(Placed { job, bridge });
    }
    for left in live {
        end_job(slurm, &left.job).await?;
    }
    Ok(table)
}

fn hops(fleet: &Fleet, nodes: &[NodeName]) -> u64 {
    let index: HashMap<&NodeName, _> =
        nodes.iter().filter_map(|n| Some((n, fleet.find(n.as_str())?))).collect();
    let pairs = nodes.iter().enumerate().flat_map(|(at, a)| nodes[..at].iter().map(move |b| (a, b)));
    pairs.map(|(a, b)| u64::from(fleet.hops(index[a], index[b]).unwrap_or(0))).sum()
}

async fn start_job(slurm: &Slurm, name: &str, size: u32) -> anyhow::Result<(String, Vec<NodeName>)> {
    let size = size.to_string();
    slurm
        .run(&[
            "salloc",
            "--no-shell",
            "--immediate=60",
            "--exclusive",
            "--gres=gpu:8",
            "-J",
            name,
            "-N",
            &size,
        ])
        .await?;
    let line = slurm.run(&["squeue", "-h", "-n", name, "-o", "%i %N"]).await?;
    let (job, list) = line.trim().split_once(' ').context("squeue gives id and nodes")?;
    let hosts = slurm.run(&["scontrol", "show", "hostnames", list]).await?;
    let nodes: Result<Vec<NodeName>, _> = hosts.lines().map(NodeName::new).collect();
    Ok((job.to_owned(), nodes?))
}

async fn end_job(slurm: &Slurm, job: &str) -> anyhow::Result<()> {
    slurm.run(&["scancel", job]).await?;
    for _ in 0..1200 {
        if slurm.run(&["squeue", "-h", "-j", job]).await.is_ok_and(|out| out.trim().is_empty()) {
            return Ok(());
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    anyhow::bail!("job {job} does not end")
}

/// Ends the job of a name and waits until its nodes are free.
#[cfg(test)]
pub(crate) async fn end_named(slurm: &Slurm, name: &str) -> anyhow::Result<()> {
    let job = slurm.run(&["squeue", "-h", "-n", name, "-o", "%i"]).await?;
    if job.trim().is_empty() { Ok(()) } else { end_job(slurm, job.trim()).await }
}

/// Waits until no job is left.
#[cfg(test)]
pub(crate) async fn until_idle(slurm: &Slurm) -> anyhow::Result<()> {
    for _ in 0..1200 {
        if slurm.run(&["squeue", "-h"]).await?.trim().is_empty() {
            return Ok(());
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    anyhow::bail!("jobs do not end")
}

/// A linear congruential generator (Knuth, MMIX): the stream is the same wherever it is played.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(self.0 >> 33).unwrap_or(0) % limit.max(1)
    }
}
