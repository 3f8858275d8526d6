//! What `./run bench bridge` runs: many clients while bridges are killed, and the same requests placed by Slurm and by vmove.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Parser, Subcommand};
use vmove_bridge::lab::{EtcdServer, SlurmLab};
use vmove_bridge::slurm::Slurm;
use vmove_bridge::slurm_stream::{Shape, compare};
use vmove_bridge::storm::{Outcome, Plan, storm};

/// Measures what a bridge promises
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Clients ask two bridges on etcd, which are killed at random; then one bridge on its own store
    Storm {
        /// Clients
        #[arg(long, default_value_t = 8)]
        clients: u32,
        /// Requests of each
        #[arg(long, default_value_t = 10_000)]
        requests: u32,
        /// Longest pause between two kills. Unit: milliseconds
        #[arg(long, default_value_t = 2000)]
        kill_every: u64,
        /// Only with etcd, or only without
        #[arg(long, value_parser = ["etcd", "redb"])]
        store: Option<String>,
    },
    /// The same stream of requests, placed by a real Slurm and by vmove
    Slurm {
        /// Nodes
        #[arg(long, default_value_t = 64)]
        nodes: u32,
        /// Arrivals and departures
        #[arg(long, default_value_t = 400)]
        events: u32,
        /// Of the random numbers
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match arguments.what {
            What::Storm { clients, requests, kill_every, store } => {
                let plan = |stores| -> anyhow::Result<Plan> {
                    let kill_every = Some(Duration::from_millis(kill_every));
                    Ok(Plan { program: vbridged()?, stores, clients, requests, kill_every })
                };
                println!("| store | clients x requests | granted | did not fit | repeated | answers lost | kills | given twice | leaked | seconds |");
                println!("|---|---|---|---|---|---|---|---|---|---|");
                if store.as_deref() != Some("redb") {
                    let server = EtcdServer::start_or_skip().context("etcd is missing: ./run setup gets it")?;
                    let url = format!("etcd:{}", server.url());
                    let history = Arc::new(server.store("/vmove/bridge/"));
                    let outcome = storm(&plan(vec![url.clone(), url])?, Some(history)).await?;
                    report("etcd, 2 bridges", clients, requests, &outcome)?;
                }
                if store.as_deref() != Some("etcd") {
                    let folder = tempfile::tempdir()?;
                    let file = format!("redb:{}", folder.path().join("state.redb").display());
                    report("redb, 1 bridge", clients, requests, &storm(&plan(vec![file])?, None).await?)?;
                }
                Ok(())
            }
            What::Slurm { nodes, events, seed } => {
                let shape = Shape { nodes, leaf: 8, spine: 4, largest: 16, events, seed };
                let lab = SlurmLab::start_or_skip(nodes, shape.leaf, shape.spine).context("Slurm is missing: ./run setup gets it")?;
                let table = compare(&Slurm::new(lab.environment()), &shape).await?;
                println!("{table}");
                if table.bridge_hops() > table.slurm_hops() {
                    bail!("vmove needed more hops than Slurm");
                }
                Ok(())
            }
        }
    })
}

/// `vbridged`, beside this program.
fn vbridged() -> anyhow::Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name("vbridged");
    if !path.is_file() {
        bail!("{} is not there: cargo build -p vmove-bridge", path.display());
    }
    Ok(path)
}

fn report(store: &str, clients: u32, requests: u32, o: &Outcome) -> anyhow::Result<()> {
    let twice = o.twice + o.twice_in_history.unwrap_or(0);
    println!(
        "| {store} | {clients} x {requests} | {} | {} | {} | {} | {} | {twice} | {} | {:.0} |",
        o.granted,
        o.refused,
        o.repeated,
        o.again,
        o.kills,
        o.leaked,
        o.took.as_secs_f64()
    );
    if twice + o.leaked > 0 {
        bail!("devices were given twice, or lost");
    }
    Ok(())
}
