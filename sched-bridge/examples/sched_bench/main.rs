//! What a placement costs, by size of the fleet, and how compact clusters are beside Slurm's topology/tree.
//!
//! `cargo run --release -p vmove-sched --example sched_bench -- [--out DIR] [--quick] [TABLE...]` prints tables, and writes
//! `sched_bench.json` and `sched_bench.svg` into DIR. Tables: cost scattered snapshots streams compacted; all, if none is named.

mod cost;
mod fleets;
mod hops;

use std::error::Error;
use std::path::PathBuf;

use serde::Serialize;

#[derive(Default, Serialize)]
struct Report {
    cost: Vec<cost::Cost>,
    scattered: Vec<hops::Side>,
    one_snapshot: Vec<hops::Side>,
    whole_stream: Vec<hops::Side>,
    compacted: Vec<hops::Compacted>,
}

const TABLES: [&str; 5] = ["cost", "scattered", "snapshots", "streams", "compacted"];

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = PathBuf::from(".");
    let mut quick = false;
    let mut wanted = Vec::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--out" => out = args.next().ok_or("--out needs a folder")?.into(),
            "--quick" => quick = true,
            table if TABLES.contains(&table) => wanted.push(arg),
            other => {
                let known = TABLES.join(" ");
                return Err(
                    format!("unknown argument {other}; there are: --out DIR, --quick, {known}").into()
                );
            }
        }
    }
    std::fs::create_dir_all(&out)?;
    let wants = |table: &str| wanted.is_empty() || wanted.iter().any(|own| own == table);
    let mut report = Report::default();
    if wants("cost") {
        report.cost = cost::cost(if quick { &[100, 1000] } else { &[100, 300, 1000, 3000, 10_000] })?;
        let fragmented = report.cost.iter().filter(|cost| cost.case == "fragmented");
        let points: Vec<(f64, f64)> =
            fragmented.map(|cost| (f64::from(cost.nodes), cost.median_ms)).collect();
        std::fs::write(out.join("sched_bench.svg"), sched_bridge::sim::plot("nodes", "ms", &points))?;
    }
    if wants("scattered") {
        report.scattered = hops::scattered(quick)?;
    }
    if wants("snapshots") {
        report.one_snapshot = hops::snapshots(quick)?;
    }
    if wants("streams") {
        report.whole_stream = hops::streams(quick)?;
    }
    if wants("compacted") {
        report.compacted = hops::compacted(quick)?;
    }
    let file = out.join("sched_bench.json");
    std::fs::write(&file, serde_json::to_string_pretty(&report)?)?;
    println!("written: {}", file.display());
    Ok(())
}
