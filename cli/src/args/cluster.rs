//! The command line of `vmove cluster`.

use clap::{Args, Subcommand};
use vmove_types::Backing;

use super::bridge::{HolderArgs, RequestArgs, Where, field_value};

/// Arguments of `cluster`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove cluster start train.yaml --template small --field disk=alice.qcow2
  vmove cluster resize train 12
  vmove cluster checkpoint train before-lunch
  vmove cluster restore before-lunch --lost node7
  vmove cluster fork train what-if
  vmove cluster move train --away node7,node8
  vmove cluster stop train

A cluster is a lease with its VMs, and is named by the id of the lease, or its beginning.")]
pub struct ClusterArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: ClusterAction,
}

/// What to do with clusters.
#[derive(Debug, Subcommand)]
pub enum ClusterAction {
    /// Place a cluster, lease what it needs, and start all of its VMs; the id of its lease is its name, unless --id says otherwise
    Start(Box<Start>),
    /// All clusters: VMs, nodes, hops
    List(List),
    /// One cluster: what its VMs do now
    Status(One),
    /// Stop all VMs of a cluster, and give its lease back
    Stop(One),
    /// Move a cluster off some nodes, all of it placed anew
    Move(Move),
    /// Copy a running cluster: each VM is forked once, all at one moment
    Fork(Fork),
    /// Give a group of VMs more of them, close to the others, or fewer
    Resize(Resize),
    /// Keep a running cluster as it is now, all VMs at one moment
    Checkpoint(Checkpoint),
    /// All checkpoints
    Checkpoints(All),
    /// Let a cluster run again as it was at its checkpoint
    Restore(Restore),
    /// Remove a checkpoint and its templates
    Forget(Forget),
}

/// Arguments of `start`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove cluster start train.yaml --template small --field disk=alice.qcow2
  vmove cluster start --text \"vcpus=4; gpus=1\" --count 8 --cluster train -- qemu-system-x86_64 -accel kvm -smp {vcpus} -m {memory_mib} {devices}

All VMs run, or none. The same as `vmove place --run --id NAME-OF-THE-CLUSTER`.

Exit code 3: it does not fit; nothing was leased.")]
pub struct Start {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// The request.
    #[command(flatten)]
    pub request: RequestArgs,
    /// In whose name.
    #[command(flatten)]
    pub lease: HolderArgs,
    /// Id of the lease [default: the name of the cluster]
    #[arg(long, value_name = "ID")]
    pub id: Option<String>,
    /// Name of the template of the bridge by which VMs are started
    #[arg(
        long,
        value_name = "NAME",
        required_unless_present = "command_line",
        conflicts_with = "command_line"
    )]
    pub template: Option<String>,
    /// Value of a field of the template; may be repeated
    #[arg(long, value_name = "FIELD=VALUE", value_parser = field_value, requires = "template")]
    pub field: Vec<(String, String)>,
    /// Backing of guest memory: thp, hugetlb-2m or hugetlb-1g
    #[arg(long, value_name = "BACKING", default_value_t)]
    pub memory: Backing,
    /// QEMU and its arguments, as for `vmove run`
    #[arg(last = true, value_name = "QEMU")]
    pub command_line: Vec<String>,
}

/// Arguments of `list`.
#[derive(Debug, Args)]
pub struct List {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// Only this holder
    #[arg(long, value_name = "NAME")]
    pub holder: Option<String>,
}

/// Arguments of `checkpoints`.
#[derive(Debug, Args)]
pub struct All {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
}

/// A cluster.
#[derive(Debug, Args)]
pub struct One {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// Id of its lease, or its beginning
    #[arg(value_name = "CLUSTER")]
    pub id: String,
}

/// Arguments of `move`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove cluster move train --away node7,node8

The cluster is placed as if it were new, on nodes that are not named; VMs that would be on their node again stay. A plan is made and run
(`vmove plan`): if a migration fails, it stops, and `vmove plan run` continues it.")]
pub struct Move {
    /// Which one.
    #[command(flatten)]
    pub cluster: One,
    /// Nodes that it leaves
    #[arg(long, value_name = "NODE,NODE", value_delimiter = ',', required = true)]
    pub away: Vec<String>,
    /// Only make and print the plan
    #[arg(long)]
    pub what_if: bool,
}

/// Arguments of `fork`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove --json cluster fork train what-if | jq '.members[] | {parent, vm, node, nics}'

All VMs are paused, frozen, and run on; the answer says how long each stood still. VMs of the copy are numbered as those of the cluster, and have
new MAC addresses: the answer has both. A copy is whole, or there is none.")]
pub struct Fork {
    /// Which one.
    #[command(flatten)]
    pub cluster: One,
    /// Name of the new cluster
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Id of its lease [default: its name]
    #[arg(long = "id", value_name = "ID")]
    pub new_id: Option<String>,
    /// Freeze each VM at a moment of its own; needed for VMs with devices
    #[arg(long)]
    pub each_alone: bool,
}

/// Arguments of `resize`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove cluster resize train 12
  vmove cluster resize train 4 --group worker
  vmove cluster resize train 12 -- qemu-system-x86_64 -smp {vcpus} -m {memory_mib} {devices}

New VMs are placed where the cluster is the most compact with them; the others stay where they are. Those that are the farthest from the others
leave first: they are stopped.")]
pub struct Resize {
    /// Which one.
    #[command(flatten)]
    pub cluster: One,
    /// How many VMs the group is to have
    #[arg(value_name = "COUNT")]
    pub count: u32,
    /// The group of VMs, for a cluster of several
    #[arg(long, value_name = "NAME")]
    pub group: Option<String>,
    /// Template of the bridge by which new VMs are started [default: as the cluster was]
    #[arg(long, value_name = "NAME", conflicts_with = "command_line")]
    pub template: Option<String>,
    /// Value of a field of the template; may be repeated
    #[arg(long, value_name = "FIELD=VALUE", value_parser = field_value, requires = "template")]
    pub field: Vec<(String, String)>,
    /// Backing of the memory of new VMs, with a template or command line: thp, hugetlb-2m or hugetlb-1g
    #[arg(long, value_name = "BACKING", default_value_t)]
    pub memory: Backing,
    /// QEMU and its arguments for new VMs
    #[arg(last = true, value_name = "QEMU")]
    pub command_line: Vec<String>,
}

/// Arguments of `checkpoint`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove cluster checkpoint train before-lunch

All VMs are paused, frozen, and run on while templates of them are written; the answer says how long each stood still. Set template-dir in [fork] of
the nodes to a folder that all of them see, so that the checkpoint outlives a node.")]
pub struct Checkpoint {
    /// Which one.
    #[command(flatten)]
    pub cluster: One,
    /// Name of the checkpoint
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Freeze each VM at a moment of its own; needed for VMs with devices
    #[arg(long)]
    pub each_alone: bool,
}

/// Arguments of `restore`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove cluster stop train && vmove cluster restore before-lunch
  vmove cluster restore before-lunch --lost node7

The VMs get their names, UUIDs and MAC addresses again, and what they did since the checkpoint is lost. None of them may run any more: a node that
does not answer has to be powered off first, and named by --lost. It takes no VMs until `vmove fleet resume`.")]
pub struct Restore {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// Name of the checkpoint
    #[arg(value_name = "CHECKPOINT")]
    pub name: String,
    /// Nodes that are powered off
    #[arg(long, value_name = "NODE,NODE", value_delimiter = ',')]
    pub lost: Vec<String>,
}

/// Arguments of `forget`.
#[derive(Debug, Args)]
pub struct Forget {
    /// The bridge.
    #[command(flatten)]
    pub at: Where,
    /// Name of the checkpoint
    #[arg(value_name = "CHECKPOINT")]
    pub name: String,
}
