//! What `./run bench bridge` runs: clients while bridges are killed, and the same requests placed by Slurm and by vmove.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use bridge_lab::slurm_stream::{Shape, compare};
use bridge_lab::storm::{Outcome, StormSpec, storm};
use bridge_lab::vbridged;
use clap::{Parser, Subcommand};
use test_servers::{EtcdServer, SlurmCluster};
use vmove_bridge::config::open_store;
use vmove_bridge::store::etcd::DEFAULT_MAX_TXN_OPS;

/// Measures what a bridge promises
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Clients ask two bridges on etcd, which are killed at random; then one bridge on its own store
    Storm(StormArguments),
    /// The same stream of requests, placed by a real Slurm and by vmove
    Slurm(SlurmArguments),
}

#[derive(Debug, clap::Args)]
struct StormArguments {
    /// Number of clients
    #[arg(long, default_value_t = 8)]
    clients: u32,
    /// Requests of each client
    #[arg(long, default_value_t = 10_000)]
    requests: u32,
    /// Longest pause between two kills, in milliseconds; 0: no bridge is killed
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    kill_every: u64,
    /// Only with this store
    #[arg(long, value_parser = ["etcd", "redb"])]
    store: Option<String>,
}

#[derive(Debug, clap::Args)]
struct SlurmArguments {
    /// Nodes of the cluster
    #[arg(long, default_value_t = 64)]
    nodes: u32,
    /// Arrivals and departures
    #[arg(long, default_value_t = 400)]
    events: u32,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match arguments.bench {
            Bench::Storm(arguments) => storms(&arguments).await,
            Bench::Slurm(arguments) => beside_slurm(&arguments).await,
        }
    })
}

async fn storms(arguments: &StormArguments) -> anyhow::Result<()> {
    let spec = |stores| -> anyhow::Result<StormSpec> {
        let kill_interval = Duration::from_millis(arguments.kill_every);
        let (clients, requests) = (arguments.clients, arguments.requests);
        Ok(StormSpec { vbridged: vbridged()?, stores, clients, requests, kill_interval })
    };
    println!(
        "| store | clients x requests | granted | did not fit | repeated | answers lost | kills | leased twice | leaked | seconds | starts and ends a second |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    if arguments.store.as_deref() != Some("redb") {
        let server = EtcdServer::start()?;
        let store = format!("etcd:{}", server.url());
        let history = open_store(&store, DEFAULT_MAX_TXN_OPS)?;
        let outcome = storm(&spec(vec![store.clone(), store])?, Some(Arc::clone(&history))).await?;
        report("etcd, 2 bridges", arguments, &outcome)?;
    }
    if arguments.store.as_deref() != Some("etcd") {
        let folder = tempfile::tempdir()?;
        let store = format!("redb:{}", folder.path().join("state.redb").display());
        report("redb, 1 bridge", arguments, &storm(&spec(vec![store])?, None).await?)?;
    }
    Ok(())
}

fn report(store: &str, arguments: &StormArguments, outcome: &Outcome) -> anyhow::Result<()> {
    let twice = outcome.leased_twice + outcome.leased_twice_in_history.unwrap_or(0);
    println!(
        "| {store} | {} x {} | {} | {} | {} | {} | {} | {twice} | {} | {:.1} | {:.0} |",
        arguments.clients,
        arguments.requests,
        outcome.granted,
        outcome.refused,
        outcome.repeated,
        outcome.answers_lost,
        outcome.kills,
        outcome.leaked,
        outcome.elapsed.as_secs_f64(),
        (outcome.granted * 2) as f64 / outcome.elapsed.as_secs_f64()
    );
    if twice + outcome.leaked > 0 {
        bail!("{twice} GPUs were leased twice, {} leases were left", outcome.leaked);
    }
    Ok(())
}

async fn beside_slurm(arguments: &SlurmArguments) -> anyhow::Result<()> {
    let cluster = SlurmCluster::start(arguments.nodes, 8, 4)?;
    let shape = Shape { nodes: arguments.nodes, largest: 16, events: arguments.events, seed: arguments.seed };
    let table = compare(&cluster, &shape).await?;
    println!("{table}");
    let total = table.total();
    if total.bridge_hops > total.slurm_hops {
        bail!("vmove needed more hops than Slurm: {} and {}", total.bridge_hops, total.slurm_hops);
    }
    Ok(())
}
