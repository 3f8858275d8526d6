//! The command line of `vmove-pve`: the one definition behind help, man pages and completions.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use vmove_pve::Vmid;
use vmove_types::node::DEFAULT_CONTROL;

use super::{Completions, Man};

/// Moves running VMs of Proxmox VE between the nodes of its cluster, their memory carried by vmove
#[derive(Debug, Parser)]
#[command(name = "vmove-pve", version, propagate_version = true, after_long_help = EXIT_CODES, arg_required_else_help = true)]
pub struct Cli {
    /// Control socket of the vmoved of this node
    #[arg(long, global = true, value_name = "SOCK", env = "VMOVE_CONTROL", default_value = DEFAULT_CONTROL)]
    pub control: PathBuf,
    /// Answer with one JSON object on standard output
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "Two commands move a VM:
  vmove-pve enable 100           # counts from the next start of its QEMU
  vmove-pve move 100 node2

Exit codes:
  0  done
  1  failed; the guest runs where it was
  2  wrong usage
  3  refused; nothing was changed
  4  the guest may be paused: see the message, and `vmove-pve recover VMID`
  5  vmoved cannot be reached

  Ctrl-C during `move` calls it off; once the guest runs on the other node it ends with 130, and the rest of the memory goes on.

Environment:
  VMOVE_CONTROL     control socket, unless --control is given
  VMOVE_PVE_REMOTE  how other nodes are reached, unless --remote is given";

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Give a VM memory that vmove can move, and a monitor for it: shows what is changed, and changes it
    #[command(after_help = "Examples:
  vmove-pve enable 100 --check   # show the changes, and what is in the way; change nothing
  vmove-pve enable 100           # counts from the next start of its QEMU: `qm shutdown 100; qm start 100`

Only `args` of the VM is changed, in [PENDING] if the VM runs. After `qm set 100 --memory` do it again. `vmove-pve disable 100` undoes it.")]
    Enable(EnableArgs),
    /// Undo what `enable` has changed
    #[command(after_help = "Example:
  vmove-pve disable 100          # counts from the next start of its QEMU")]
    Disable(EnableArgs),
    /// Make this node ready: folders for monitors and guest memory; says what else is missing
    #[command(after_help = "Example:
  vmove-pve host --check

Each node of the cluster to which VMs are to move needs it once.")]
    Host(HostArgs),
    /// Move a running VM to another node: its guest, and then its configuration
    #[command(after_help = "Examples:
  vmove-pve move 100 node2 --check   # name all that is in the way, here and there; change nothing
  vmove-pve move 100 node2
  vmove-pve --json move 100 node2

Run it on the node that has the VM. Until its configuration is on the other node, Ctrl-C calls the move off.")]
    Move(MoveArgs),
    /// After a move that was cut: have the guest run where its configuration is, there alone, and unlock it
    #[command(after_help = "Example:
  vmove-pve recover 100          # on the node from which it was moved")]
    Recover(RecoverArgs),
    /// What `move` runs on the other node: has its QEMU started, and its memory come
    #[command(after_help = "Example:
  ssh node2 vmove-pve receive 100 --from node1 --uuid 7b10d7af-b932-4c66-b2c3-3996152ec465

Speaks with `move` by lines on standard input and output; not for people.")]
    Receive(ReceiveArgs),
    /// What `move` runs on the other node: passes the state of devices on, from standard input to QEMU
    #[command(after_help = "Example:
  ssh node2 vmove-pve relay 100 <state

Started by `move`; not for people.")]
    Relay(VmArgs),
    /// Print a completion script
    Completions(Completions),
    /// Write the man pages into a folder
    Man(Man),
}

/// A VM.
#[derive(Debug, Args)]
pub struct VmArgs {
    /// Number of the VM
    #[arg(value_name = "VMID")]
    pub vmid: Vmid,
}

/// Arguments of `enable` and `disable`.
#[derive(Debug, Args)]
pub struct EnableArgs {
    /// Number of the VM
    #[arg(value_name = "VMID")]
    pub vmid: Vmid,
    /// Show the changes, and change nothing
    #[arg(long)]
    pub check: bool,
}

/// Arguments of `host`.
#[derive(Debug, Args)]
pub struct HostArgs {
    /// Change nothing
    #[arg(long)]
    pub check: bool,
}

/// How other nodes are reached.
#[derive(Debug, Clone, Args)]
pub struct Remote {
    /// Command that runs a line of shell on NODE: `{node}` becomes its name, and the line is added as the last word; default: ssh as Proxmox VE itself
    /// uses it, as root
    #[arg(long, value_name = "COMMAND", env = "VMOVE_PVE_REMOTE")]
    pub remote: Option<String>,
}

/// Arguments of `move`.
#[derive(Debug, Args)]
pub struct MoveArgs {
    /// Number of the VM
    #[arg(value_name = "VMID")]
    pub vmid: Vmid,
    /// Node to which it moves
    #[arg(value_name = "NODE")]
    pub node: String,
    /// Check both nodes, and change nothing
    #[arg(long)]
    pub check: bool,
    /// How it is reached.
    #[command(flatten)]
    pub remote: Remote,
}

/// Arguments of `recover`.
#[derive(Debug, Args)]
pub struct RecoverArgs {
    /// Number of the VM
    #[arg(value_name = "VMID")]
    pub vmid: Vmid,
    /// How the other node is reached.
    #[command(flatten)]
    pub remote: Remote,
}

/// Arguments of `receive`.
#[derive(Debug, Args)]
pub struct ReceiveArgs {
    /// Number of the VM
    #[arg(value_name = "VMID")]
    pub vmid: Vmid,
    /// Node that has it
    #[arg(long, value_name = "NODE")]
    pub from: String,
    /// UUID of the VM
    #[arg(long, value_name = "UUID")]
    pub uuid: String,
    /// Machine type of its QEMU
    #[arg(long, value_name = "TYPE")]
    pub machine: Option<String>,
    /// Model of its processors, as its QEMU was given it
    #[arg(long, value_name = "MODEL")]
    pub force_cpu: Option<String>,
    /// Check this node, and begin nothing
    #[arg(long, conflicts_with = "finish")]
    pub check: bool,
    /// The guest has left, and its configuration is here: see to it that it runs
    #[arg(long)]
    pub finish: bool,
}
