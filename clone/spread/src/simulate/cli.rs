//! The command line of the model.

use std::path::PathBuf;

use clap::Args;

use super::{Outcome, Scenario, report, simulate};
use crate::plan::{Choice, Leaf, Network, PlanError, Way};

/// Arguments of the model.
#[derive(Debug, Clone, Args)]
pub struct SimulateArguments {
    /// Hosts beside the root, 1 to 10000
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    hosts: u32,
    /// Hosts under one leaf switch, the root counted with the first; default: all
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    per_leaf: Option<u32>,
    /// Rate of a host's link, in Gbit/s
    #[arg(long, default_value_t = 10.0)]
    link: f64,
    /// Rate of a leaf's uplink, in Gbit/s; default: as much as all its hosts together
    #[arg(long)]
    uplink: Option<f64>,
    /// The part of datagrams that each host loses, 0 to below 1
    #[arg(long, default_value_t = 0.0)]
    loss: f64,
    /// The network has no multicast
    #[arg(long)]
    no_multicast: bool,
    /// Payload of a datagram, in bytes: 1440 with an MTU of 1500, 4096 with InfiniBand
    #[arg(long, default_value_t = 1440)]
    payload: u32,
    /// Memory that is not zero, in MiB
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=16_777_216))]
    mib: u64,
    /// State of the devices, in KiB; travels first
    #[arg(long, default_value_t = 1024)]
    state_kib: u64,
    /// Latency of anything, in microseconds
    #[arg(long, default_value_t = 50.0)]
    latency: f64,
    /// A network as JSON, instead of the options about hosts, leaves, links and losses
    #[arg(long)]
    network: Option<PathBuf>,
    /// Only these ways
    #[arg(long, value_delimiter = ',')]
    way: Vec<Way>,
    /// Seed of the losses
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write a picture of the progress to this file, as SVG
    #[arg(long)]
    svg: Option<PathBuf>,
}

/// Why there is no model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimulateError {
    /// The network makes no sense.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A file could not be read or written.
    #[error("Could not {operation} {}", path.display())]
    File {
        /// What was tried.
        operation: &'static str,
        /// Which file.
        path: PathBuf,
        /// What the kernel reported.
        #[source]
        source: std::io::Error,
    },
    /// A file does not hold a network.
    #[error("{} does not describe a network", path.display())]
    Network {
        /// Which file.
        path: PathBuf,
        /// What was found.
        #[source]
        source: serde_json::Error,
    },
}

#[derive(serde::Serialize)]
struct Answer<'a> {
    scenario: &'a Scenario,
    choice: &'a Choice,
    outcomes: &'a [Outcome],
}

impl SimulateArguments {
    /// Runs the model; what to print: a table, or one JSON object.
    ///
    /// # Errors
    /// [`SimulateError`].
    pub fn run(&self, json: bool) -> Result<String, SimulateError> {
        let network = self.described()?;
        let mut scenario = Scenario::new(network, self.mib << 20);
        (scenario.state, scenario.latency, scenario.seed) =
            (self.state_kib << 10, self.latency * 1e-6, self.seed);
        let choice = scenario.network.choose(scenario.bytes)?;
        let possible =
            Way::ALL.into_iter().filter(|way| *way != Way::Multicast || scenario.network.multicast);
        let ways: Vec<Way> = if self.way.is_empty() { possible.collect() } else { self.way.clone() };
        let outcomes = ways.into_iter().map(|way| simulate(&scenario, way)).collect::<Result<Vec<_>, _>>()?;
        if let Some(path) = &self.svg {
            let file = |source| SimulateError::File { operation: "write", path: path.clone(), source };
            std::fs::write(path, report::picture(&outcomes)).map_err(file)?;
        }
        if json {
            let answer = Answer { scenario: &scenario, choice: &choice, outcomes: &outcomes };
            return Ok(serde_json::to_string(&answer).expect("plain data") + "\n");
        }
        let mut text = report::table(&outcomes);
        text += &format!("\nchosen by arithmetic: {}\n", choice.way);
        for estimate in &choice.estimates {
            text += &format!(
                "  {:<10} {:>9.3} s  {}\n",
                estimate.way.to_string(),
                estimate.seconds,
                estimate.arithmetic
            );
        }
        Ok(text)
    }

    fn described(&self) -> Result<Network, SimulateError> {
        if let Some(path) = &self.network {
            let file = |source| SimulateError::File { operation: "read", path: path.clone(), source };
            let text = std::fs::read(path).map_err(file)?;
            let network = |source| SimulateError::Network { path: path.clone(), source };
            return serde_json::from_slice(&text).map_err(network);
        }
        let per_leaf = self.per_leaf.unwrap_or(self.hosts + 1);
        let link = self.link * 1e9 / 8.0;
        let uplink = self.uplink.map_or(link * f64::from(per_leaf), |rate| rate * 1e9 / 8.0);
        let hosts: Vec<usize> = (0..=self.hosts).map(|host| (host / per_leaf) as usize).collect();
        let leaves = vec![Leaf { uplink }; hosts.last().map_or(1, |leaf| leaf + 1)];
        let (multicast, loss, payload) = (!self.no_multicast, self.loss, self.payload);
        Ok(Network { leaves, hosts, link, multicast, loss, payload })
    }
}
