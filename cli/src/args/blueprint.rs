//! The command lines of `vmove blueprint` and `vmove adapter`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::bridge::{HolderArgs, Where};
use super::milliseconds;

/// Arguments of `blueprint`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Examples:
  vmove blueprint app.yaml
  vmove blueprint app.xml --run --holder alice --adapter slurm=vmove-slurm-adapter
  vmove blueprint status app.xml --adapter slurm=vmove-slurm-adapter
  vmove blueprint stop app.xml --adapter slurm=vmove-slurm-adapter"
)]
pub struct BlueprintArgs {
    /// What to do with a blueprint that runs.
    #[command(subcommand)]
    pub action: Option<BlueprintAction>,
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// The blueprint, YAML or XML; - is standard input
    #[arg(value_name = "FILE", required = true)]
    pub file: Option<PathBuf>,
    /// Lease what the VMs need, start them, and pass the rest to adapters; without this option, only show the parts
    #[arg(long)]
    pub run: bool,
    /// In whose name.
    #[command(flatten)]
    pub lease: HolderArgs,
    /// The adapters.
    #[command(flatten)]
    pub programs: ProgramArgs,
}

/// What to do with a blueprint that runs.
#[derive(Debug, Subcommand)]
pub enum BlueprintAction {
    /// What each of its elements does now, where, and what of it failed and why
    Status(RunningArgs),
    /// End all of it: VMs, what adapters run, leases. Can be repeated; says what could not be stopped
    Stop(RunningArgs),
}

/// Arguments of `blueprint status` and `blueprint stop`.
#[derive(Debug, Args)]
pub struct RunningArgs {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// The blueprint as it was run; - is standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The adapters.
    #[command(flatten)]
    pub programs: ProgramArgs,
}

/// Where the programs of adapters are.
#[derive(Debug, Clone, Args)]
pub struct ProgramArgs {
    /// Program of an adapter that the blueprint names; may be repeated [default: the executable of that name in --adapter-dir]
    #[arg(long, value_name = "NAME=COMMAND", value_parser = key_value)]
    pub adapter: Vec<(String, String)>,
    /// How adapters are found and how long they may take.
    #[command(flatten)]
    pub found: FoundArgs,
}

/// How programs of adapters are found that no option names, and how long they may take.
#[derive(Debug, Clone, Args)]
pub struct FoundArgs {
    /// Folder with the executables of adapters, each called like its adapter
    #[arg(long, value_name = "DIR", env = "VMOVE_ADAPTER_DIR", default_value = "/usr/lib/vmove/adapters")]
    pub adapter_dir: PathBuf,
    /// How long an adapter may take for one request before it is killed
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = milliseconds)]
    pub adapter_limit: u64,
}

/// Arguments of `adapter`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove adapter schema >adapter.schema.json
  vmove adapter check slurm --artifact 'sleep 600'
  vmove adapter check network --kind network --node node1 --node node2
  vmove adapter check ./my-adapter --kind container --artifact 'registry/image:1 sleep 600' --node node7")]
pub struct AdapterArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: AdapterAction,
}

/// What to do with adapters.
#[derive(Debug, Subcommand)]
pub enum AdapterAction {
    /// Print the JSON schema of requests and answers
    Schema,
    /// Start two environments by a program, stop them, give it bad input, and tell line by line whether it keeps the contract
    Check(CheckArgs),
}

/// Arguments of `adapter check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The program, with its arguments in one word; without a slash and a space: an adapter in --adapter-dir, else a program of PATH
    #[arg(value_name = "PROGRAM")]
    pub program: String,
    /// Kind of the environments that are started: container, bare-metal, or network (private, with a VM on each --node)
    #[arg(long, value_name = "KIND", default_value = "container")]
    pub kind: String,
    /// Their artifact: must run until it is stopped
    #[arg(long, value_name = "TEXT", default_value = "sleep 600")]
    pub artifact: String,
    /// A node where they run; may be repeated
    #[arg(long, value_name = "NODE")]
    pub node: Vec<String>,
    /// Names of the two environments, for adapters that start only what they know
    #[arg(long, value_name = "NAME", num_args = 2, default_values = ["one", "two"])]
    pub names: Vec<String>,
    /// Name of the cluster; nothing of it may run [default: vmove-check-PID]
    #[arg(long, value_name = "NAME")]
    pub cluster: Option<String>,
    /// How adapters are found.
    #[command(flatten)]
    pub found: FoundArgs,
}

fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() && !value.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!(
            "expected NAME=COMMAND, found {text:?}; without a command, an adapter is found by its name"
        )),
    }
}
