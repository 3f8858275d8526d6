//! The commands of `vmove` that speak with a bridge.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use vmove_bridge_types::topology_text::TopologyFormat;
use vmove_types::Backing;

use super::blueprint::{AdapterArgs, BlueprintArgs};
use super::bridge::{HolderArgs, RequestArgs, Where, field_value};
use super::cluster::ClusterArgs;
use super::page::Listen;

/// Commands for virtual clusters.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Read what a node has: processors, memory, GPUs, adapters
    Inventory(InventoryArgs),
    /// Split a blueprint, run it, show what its parts do, or stop it: VMs, and by adapters the rest
    Blueprint(Box<BlueprintArgs>),
    /// Check a program against the contract of adapters, or print its JSON schema
    Adapter(AdapterArgs),
    /// Show, drain and resume the nodes of the fleet
    Fleet(FleetArgs),
    /// Read, convert, draw and publish the topology of the network
    Topology(TopologyArgs),
    /// Place a virtual cluster compactly, and lease what it needs
    Place(PlaceArgs),
    /// Show, renew and release leases; start and stop their VMs
    Lease(LeaseArgs),
    /// Start, watch, resize, move, fork, keep and restore virtual clusters
    Cluster(ClusterArgs),
    /// Make and run plans of migrations
    Plan(PlanArgs),
    /// Show the usage of leases that have ended
    Account(AccountArgs),
}

/// Arguments of `inventory`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove inventory
  vmove inventory --publish            on every node, at boot and when devices change
  vmove inventory --glue2 xml
  vmove --json inventory --root recorded/ --name dgx1")]
pub struct InventoryArgs {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// Read /sys and /proc below this folder, for example recorded ones
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// Name of the node [default: the short host name]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Publish it at the bridge
    #[arg(long)]
    pub publish: bool,
    /// Print it as GLUE 2: attributes as text, or a rendering with all that its schema asks for
    #[arg(long, value_name = "FORMAT", num_args = 0..=1, default_missing_value = "text")]
    pub glue2: Option<Glue2Format>,
    /// Name of the site in renderings of GLUE 2
    #[arg(long, value_name = "NAME", default_value = "vmove")]
    pub site: String,
}

/// How GLUE 2 is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Glue2Format {
    /// Attributes of the node, with those of accelerators by GLUE 2.1.
    Text,
    /// XML.
    Xml,
    /// JSON.
    Json,
    /// LDIF, for an information system.
    Ldif,
}

/// Arguments of `fleet`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove fleet list
  vmove fleet publish node7.json
  vmove fleet drain node7
  vmove fleet glue2 --format ldif --site MY-SITE
  vmove fleet page")]
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
    /// All nodes, with their free resources
    List,
    /// One node: its inventory, its VMs and its held devices
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
    /// Place no more VMs on a node; `vmove plan evacuate` moves those that it has
    Drain {
        /// Name of the node
        node: String,
    },
    /// Place VMs on a node again
    Resume {
        /// Name of the node
        node: String,
    },
    /// Have the bridge list the VMs of a node now, so that what ended VMs had is free at once
    Look {
        /// Name of the node
        node: String,
        /// VM that has ended there; may be repeated
        #[arg(long, value_name = "VM")]
        ended: Vec<String>,
    },
    /// Remove a node of which nothing is held
    Remove {
        /// Name of the node
        node: String,
    },
    /// All nodes as entities of GLUE 2
    Glue2 {
        /// How they are written
        #[arg(long, value_parser = ["xml", "json", "ldif"], default_value = "xml")]
        format: String,
        /// Name of the site
        #[arg(long, value_name = "NAME", default_value = "vmove")]
        site: String,
    },
    /// Serve a web page of the fleet on this host: switches, nodes, devices, leases, plans, accounts
    #[command(after_help = "Examples:
  vmove fleet page
  vmove fleet --bridge https://bridge.example:7430 --ca-file ca.pem --token-file me.token page
  vmove --json fleet page | jq -r .url

Prints the address of the page, and serves it until Ctrl-C. The address has a secret: whoever
knows it sees what you may see, so hand it to nobody. The page shows, and changes nothing.
From another machine: ssh -t -L 8420:127.0.0.1:8420 HOST vmove fleet page --listen 127.0.0.1:8420")]
    Page(Listen),
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
    /// Format of the file [default: guessed by name and content]
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<TopologyFormat>,
    /// Write the topology to standard output in this format
    #[arg(long, value_name = "FORMAT", value_parser = ["topology.conf", "topology.yaml", "labels"])]
    pub export: Option<String>,
    /// Draw switches, nodes, their devices and the clusters that have them. With --import, a bridge need not answer
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Publish it at the bridge
    #[arg(long, requires = "import")]
    pub publish: bool,
}

/// Arguments of `place`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove place cluster.toml --holder alice
  vmove place --text \"cg1.large; xpus=4\" --count 8 --cluster train --what-if --explain
  vmove place --text \"m1.xlarge; xpu_arch=fermi; xpus>=3 OR p7f.grande\" --cluster mixed
  vmove place --types
  vmove --json place cluster.yaml --holder job-17 --ttl 300s --id job-17 | jq -r .lease.id
  vmove place cluster.yaml --run --template small --field disk=alice.qcow2
  vmove place cluster.yaml --run -- qemu-system-x86_64 -accel kvm -smp {vcpus} -m {memory_mib} {devices}

With --run, either all VMs of the cluster run or none, and the lease needs no heartbeat while one of them does.

Exit code 3: the request does not fit; nothing was leased.")]
pub struct PlaceArgs {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// The request.
    #[command(flatten)]
    pub request: RequestArgs,
    /// In whose name.
    #[command(flatten)]
    pub lease: HolderArgs,
    /// Id of the lease: a repeated command with the same id returns the same lease
    #[arg(long, value_name = "ID")]
    pub id: Option<String>,
    /// Only show where it would be placed; lease nothing
    #[arg(long)]
    pub what_if: bool,
    /// List the instance types that requests may name
    #[arg(long, conflicts_with_all = ["file", "text", "what_if", "explain", "run", "id"])]
    pub types: bool,
    /// Explain for every node why it was chosen, not needed or ruled out, and what is the nearest that would fit; lease nothing
    #[arg(long)]
    pub explain: bool,
    /// Start all VMs on their nodes, by a template of the bridge or by the command line behind `--`; if one does not start, none is left
    #[arg(long, conflicts_with_all = ["what_if", "explain"])]
    pub run: bool,
    /// Name of the template
    #[arg(long, value_name = "NAME", requires = "run", conflicts_with = "command_line")]
    pub template: Option<String>,
    /// Value of a field of the template; may be repeated
    #[arg(long, value_name = "FIELD=VALUE", value_parser = field_value, requires = "template")]
    pub field: Vec<(String, String)>,
    /// Backing of guest memory: thp, hugetlb-2m or hugetlb-1g
    #[arg(long, value_name = "BACKING", default_value_t)]
    pub memory: Backing,
    /// QEMU and its arguments, as for `vmove run`
    #[arg(last = true, value_name = "QEMU", requires = "run")]
    pub command_line: Vec<String>,
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
        /// Only this holder
        #[arg(long)]
        holder: Option<String>,
    },
    /// One lease: nodes and resources of its VMs
    Show {
        /// Id of the lease, or its beginning
        id: String,
    },
    /// Send one heartbeat
    Renew {
        /// Id of the lease, or its beginning
        id: String,
    },
    /// Send heartbeats until interrupted
    Keep {
        /// Id of the lease, or its beginning
        id: String,
    },
    /// Start the VMs of a lease by a template of the bridge
    Start {
        /// Id of the lease, or its beginning
        id: String,
        /// Name of the template
        #[arg(long, value_name = "NAME")]
        template: String,
        /// Value of a field of the template; may be repeated
        #[arg(long, value_name = "FIELD=VALUE", value_parser = field_value)]
        field: Vec<(String, String)>,
        /// Only this VM; may be repeated
        #[arg(long, value_name = "VM")]
        vm: Vec<String>,
    },
    /// Stop the VMs of a lease; the lease stays
    Stop {
        /// Id of the lease, or its beginning
        id: String,
        /// Only this VM; may be repeated
        #[arg(long, value_name = "VM")]
        vm: Vec<String>,
    },
    /// Release a lease
    Release {
        /// Id of the lease, or its beginning
        id: String,
    },
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove plan evacuate node7
  vmove plan compact train
  vmove plan run 3f2a...         continues a plan that has stopped")]
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
    /// Move all VMs off a node; drains it at once, so that it gets no new ones
    Evacuate {
        /// Name of the node
        node: String,
    },
    /// Move the VMs of a cluster closer together
    Compact {
        /// Name of the cluster
        #[arg(required_unless_present = "all")]
        cluster: Option<String>,
        /// All clusters
        #[arg(long, conflicts_with = "cluster")]
        all: bool,
    },
    /// Move VMs so that a request fits
    MakeRoom {
        /// The request.
        #[command(flatten)]
        request: RequestArgs,
    },
    /// All plans
    List,
    /// One plan, with the state of each step
    Show {
        /// Id of the plan, or its beginning
        id: String,
    },
    /// Run a plan, or continue it
    Run {
        /// Id of the plan, or its beginning
        id: String,
    },
    /// Delete a plan that is not being run
    Delete {
        /// Id of the plan, or its beginning
        id: String,
    },
}

/// Arguments of `account`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove account --csv > usage.csv
  vmove account --apel --site MY-SITE --since 1790000000000 > outgoing/message
  vmove account --sum project
  vmove account --holder alice")]
pub struct AccountArgs {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// Comma-separated values instead of one JSON object a line
    #[arg(long)]
    pub csv: bool,
    /// A message for APEL (APEL-cloud-message v0.4), with a record for each VM
    #[arg(long, conflicts_with = "csv", requires = "site")]
    pub apel: bool,
    /// Name of the site in that message, as it is registered in the GOCDB
    #[arg(long, value_name = "NAME", requires = "apel")]
    pub site: Option<String>,
    /// Name of the service in that message [default: vmove]
    #[arg(long, value_name = "NAME", requires = "apel")]
    pub service: Option<String>,
    /// Add up hours, for each holder, project or VM
    #[arg(long, value_name = "WHAT", conflicts_with_all = ["csv", "apel"])]
    pub sum: Option<SumBy>,
    /// Only this holder
    #[arg(long, value_name = "NAME")]
    pub holder: Option<String>,
    /// Only leases that ended at or after this time, in milliseconds since 1970-01-01 00:00 UTC
    #[arg(long, value_name = "MS")]
    pub since: Option<u64>,
}

/// For what hours are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SumBy {
    /// Each holder.
    Holder,
    /// Each project; `-` for leases without one.
    Project,
    /// Each VM.
    Vm,
}
