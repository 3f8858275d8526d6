//! What a placement costs by size of the fleet, and how many hops clusters have beside Slurm's topology/tree
//! (`./run bench placement`).
#![forbid(unsafe_code)]

mod cost;
mod hops;
mod streams;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use serde::Serialize;
use vmove_picture::plot::Plot;

/// Measures placements: prints tables, and writes sched_bench.json and sched_bench.svg
#[derive(Debug, Parser)]
struct Arguments {
    /// Folder for the files
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
    /// Smaller fleets, shorter streams
    #[arg(long)]
    quick: bool,
    /// Tables to make; all, if none is named
    tables: Vec<TableName>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TableName {
    /// Milliseconds of one placement
    Cost,
    /// Clusters on a fleet of scattered single VMs
    Scattered,
    /// Clusters on a fleet of clusters that Slurm placed
    Snapshots,
    /// Streams of clusters, each scheduler with a fleet of its own
    Streams,
    /// The same with moves
    Compacted,
}

/// The file `sched_bench.json`.
#[derive(Default, Serialize)]
struct Report {
    cost: Vec<cost::Cost>,
    scattered: Vec<hops::Comparison>,
    one_snapshot: Vec<hops::Comparison>,
    whole_stream: Vec<hops::Comparison>,
    compacted: Vec<hops::Compacted>,
}

fn main() -> anyhow::Result<()> {
    let Arguments { out, quick, tables } = Arguments::parse();
    std::fs::create_dir_all(&out).with_context(|| format!("could not make {}", out.display()))?;
    let wanted = |table| tables.is_empty() || tables.contains(&table);
    let mut report = Report::default();
    if wanted(TableName::Cost) {
        report.cost = cost::cost(if quick { &[100, 1000] } else { &[100, 300, 1000, 3000, 10_000] })?;
        std::fs::write(out.join("sched_bench.svg"), picture(&report.cost))?;
    }
    if wanted(TableName::Scattered) {
        report.scattered = hops::scattered(quick)?;
    }
    if wanted(TableName::Snapshots) {
        report.one_snapshot = hops::snapshots(quick)?;
    }
    if wanted(TableName::Streams) {
        report.whole_stream = hops::streams(quick)?;
    }
    if wanted(TableName::Compacted) {
        report.compacted = hops::compacted(quick)?;
    }
    let file = out.join("sched_bench.json");
    std::fs::write(&file, serde_json::to_string_pretty(&report)?)?;
    println!("written: {}", file.display());
    Ok(())
}

/// The goal for one placement. Unit: milliseconds.
const GOAL_MS: f64 = 200.0;

/// Medians of all cases, by the size of the fleet.
fn picture(costs: &[cost::Cost]) -> String {
    let line = |(case, name)| {
        let mine = costs.iter().filter(|cost| cost.case == case);
        (name, mine.map(|cost| (f64::from(cost.nodes), cost.median_ms)).collect())
    };
    Plot {
        title: "One placement of 64 VMs",
        across: "nodes of the fleet",
        up: "median time, ms",
        series: cost::CASES.into_iter().map(line).collect(),
        goal: Some((GOAL_MS, "goal: 200 ms")),
    }
    .draw()
}
