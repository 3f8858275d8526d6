//! The commands of `vmove` that speak with a bridge.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::api::types::{RequestFormat, TopologyFormat};
use crate::http::Endpoint;

/// Where the bridge is. Part of every command that needs one.
#[derive(Debug, Clone, Args)]
pub struct Where {
    /// The bridge: unix:/PATH or http://HOST:PORT
    #[arg(long, value_name = "BRIDGE", env = "VBRIDGE", default_value = "unix:/run/vbridged/control.sock")]
    pub bridge: Endpoint,
    /// File with the bearer token, over TCP
    #[arg(long, value_name = "FILE", env = "VBRIDGE_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
}

/// Commands for virtual clusters.
#[derive(Debug, Subcommand)]
pub enum BridgeCommand {
    /// Read what a node has: processors, memory, GPUs, adapters
    Inventory(InventoryArgs),
    /// Take a blueprint apart; place its VMs, and hand the rest to adapters
    Blueprint(BlueprintArgs),
    /// Show, drain and resume the nodes of the fleet
    Fleet(FleetArgs),
    /// Read, convert, draw and publish the topology of the network
    Topology(TopologyArgs),
    /// Place a virtual cluster compactly, and lease what it needs
    Place(PlaceArgs),
    /// Show, keep alive and give back leases
    Lease(LeaseArgs),
    /// Plan migrations, and run plans
    Plan(PlanArgs),
    /// Show what was used, by leases that have ended
    Account(AccountArgs),
}

/// Arguments of `inventory`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove inventory
  vmove inventory --publish            on every node, at boot and when devices change
  vmove inventory --glue2
  vmove --json inventory --root recorded/ --name dgx1")]
pub struct InventoryArgs {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// Read below this folder instead of /: a recorded /sys and /proc
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// Name of the node; the short host name otherwise
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Tell the bridge
    #[arg(long)]
    pub publish: bool,
    /// Print attributes in the style of GLUE 2
    #[arg(long)]
    pub glue2: bool,
}

/// Arguments of `blueprint`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove blueprint app.yaml
  vmove blueprint app.xml --run --holder alice --adapter slurm=vmove-slurm-adapter")]
pub struct BlueprintArgs {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// The blueprint, YAML or XML; - is standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Lease what its VMs need, start them, and hand the rest to adapters; without it, only show the parts
    #[arg(long)]
    pub run: bool,
    /// For whom
    #[arg(long, value_name = "NAME", env = "USER", default_value = "unknown")]
    pub holder: String,
    /// Without a heartbeat for so long, the leases end
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = milliseconds)]
    pub ttl: u64,
    /// Program of an adapter that the blueprint names; may be repeated
    #[arg(long, value_name = "NAME=COMMAND", value_parser = key_value)]
    pub adapter: Vec<(String, String)>,
}

/// Arguments of `fleet`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove fleet list
  vmove fleet publish node7.json
  vmove fleet drain node7")]
pub struct FleetArgs {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// What to do.
    #[command(subcommand)]
    pub action: FleetAction,
}

/// What to do with nodes.
#[derive(Debug, Subcommand)]
pub enum FleetAction {
    /// Nodes with what is free
    List,
    /// One node in full: its inventory, and who is on it
    Show {
        /// Name of the node
        node: String,
    },
    /// Publish inventories, one or more JSON objects in each file; - is standard input
    Publish {
        /// Files
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Place nothing more there; see `vmove plan evacuate` for what is there
    Drain {
        /// Name of the node
        node: String,
    },
    /// Place there again
    Resume {
        /// Name of the node
        node: String,
    },
    /// Forget a node on which nothing is held
    Remove {
        /// Name of the node
        node: String,
    },
}

/// Arguments of `topology`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove topology --import topology.conf --publish
  vmove topology --import fabric.txt --format ibnetdiscover --export topology.conf
  vmove topology --svg fleet.svg

Without --import, the topology is the bridge's.")]
pub struct TopologyArgs {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// Read this file; - is standard input
    #[arg(long, value_name = "FILE")]
    pub import: Option<PathBuf>,
    /// What it is written in; guessed by name and content otherwise
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<TopologyFormat>,
    /// Write it to standard output
    #[arg(long, value_name = "FORMAT", value_parser = ["topology.conf", "topology.yaml", "labels"])]
    pub export: Option<String>,
    /// Draw switches, nodes, and who sits where (if a bridge answers)
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Make it the bridge's topology
    #[arg(long, requires = "import")]
    pub publish: bool,
}

/// A request in one of its spellings.
#[derive(Debug, Args)]
pub struct RequestArgs {
    /// File with the request; - is standard input
    #[arg(value_name = "FILE", required_unless_present = "text")]
    pub file: Option<PathBuf>,
    /// The request itself, as an instance type string: "cg1.small; xpus=2"
    #[arg(long, value_name = "TEXT", conflicts_with = "file")]
    pub text: Option<String>,
    /// What it is written in; by the end of the file's name otherwise (.toml, .yaml, .json for a flavor)
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<RequestFormat>,
    /// How many VMs, where the spelling describes one
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub count: u32,
    /// Name of the virtual cluster, where the spelling has none
    #[arg(long, value_name = "NAME")]
    pub cluster: Option<String>,
}

/// Arguments of `place`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove place cluster.toml --holder alice
  vmove place --text \"cg1.large; xpus=4\" --count 8 --cluster train --what-if --explain
  vmove --json place cluster.yaml --holder job-17 --ttl 300s --id job-17 | jq -r .lease.id

Exit code 3: it does not fit; nothing was taken.")]
pub struct PlaceArgs {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// The request.
    #[command(flatten)]
    pub request: RequestArgs,
    /// For whom
    #[arg(long, value_name = "NAME", env = "USER", default_value = "unknown")]
    pub holder: String,
    /// Without a heartbeat for so long, the lease ends
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = milliseconds)]
    pub ttl: u64,
    /// Id of the lease: repeating the command with it gives the same lease
    #[arg(long, value_name = "ID")]
    pub id: Option<String>,
    /// Only say where it would go
    #[arg(long)]
    pub what_if: bool,
    /// Say of every node why it was chosen, left alone or ruled out; takes nothing
    #[arg(long)]
    pub explain: bool,
}

/// Arguments of `lease`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove lease list --holder alice
  vmove lease keep 3f2a...       renews until it is interrupted or the lease ends
  vmove lease release 3f2a...")]
pub struct LeaseArgs {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// What to do.
    #[command(subcommand)]
    pub action: LeaseAction,
}

/// What to do with leases.
#[derive(Debug, Subcommand)]
pub enum LeaseAction {
    /// All leases
    List {
        /// Only of this holder
        #[arg(long)]
        holder: Option<String>,
    },
    /// One lease: who has what where
    Show {
        /// Id of the lease
        id: String,
    },
    /// One heartbeat
    Renew {
        /// Id of the lease
        id: String,
    },
    /// Heartbeats, until interrupted
    Keep {
        /// Id of the lease
        id: String,
    },
    /// Give it back
    Release {
        /// Id of the lease
        id: String,
    },
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove plan evacuate node7
  vmove plan compact train
  vmove plan run 3f2a...         goes on where it stopped, when run again")]
pub struct PlanArgs {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// What to do.
    #[command(subcommand)]
    pub action: PlanAction,
}

/// What to do with plans.
#[derive(Debug, Subcommand)]
pub enum PlanAction {
    /// Move everything off a node
    Evacuate {
        /// Name of the node
        node: String,
    },
    /// Bring the VMs of a cluster closer together
    Compact {
        /// Name of the cluster
        #[arg(required_unless_present = "all")]
        cluster: Option<String>,
        /// All clusters
        #[arg(long, conflicts_with = "cluster")]
        all: bool,
    },
    /// Move VMs so that a request fits that does not fit now
    MakeRoom {
        /// The request.
        #[command(flatten)]
        request: RequestArgs,
    },
    /// All plans
    List,
    /// One plan, and how far it is
    Show {
        /// Id of the plan
        id: String,
    },
    /// Run a plan, or go on with it
    Run {
        /// Id of the plan
        id: String,
    },
    /// Forget a plan that is not being run
    Delete {
        /// Id of the plan
        id: String,
    },
}

/// Arguments of `account`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove account --csv > usage.csv
  vmove account --holder alice")]
pub struct AccountArgs {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// Comma-separated values instead of one JSON object a line
    #[arg(long)]
    pub csv: bool,
    /// Only of this holder
    #[arg(long, value_name = "NAME")]
    pub holder: Option<String>,
    /// Only what ended at or after this time, in milliseconds since 1970-01-01 00:00 UTC
    #[arg(long, value_name = "MS")]
    pub since: Option<u64>,
}

fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() && !value.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("expected NAME=COMMAND, found {text:?}")),
    }
}

/// `500ms`, `60s`, `5m`, `2h`.
fn milliseconds(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(format!("expected a time like 500ms, 60s, 5m or 2h, found {text:?}")),
    };
    let number: u64 = number.parse().map_err(|_| format!("expected a time like 60s, found {text:?}"))?;
    number.checked_mul(factor).ok_or_else(|| format!("{text:?} is too long"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(milliseconds("90s"), Ok(90_000));
        assert_eq!(milliseconds("2h"), Ok(7_200_000));
        for bad in ["90", "s", "1d", "99999999999999999999s", "18446744073709551615h"] {
            assert!(milliseconds(bad).is_err(), "{bad}");
        }
    }
}
