//! Command lines about one VM of this node.

use clap::Args;

/// A VM.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove show web
  vmove --json show web | jq .huge_share")]
pub struct VmName {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
}

/// Arguments of `stop`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove stop web

Tells QEMU to quit, as pulling the plug would; the guest is not asked. Shut the guest down from within to be gentle.")]
pub struct Stop {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
    /// Also when QEMU's monitor does not answer, and also when QEMU was adopted
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `pause`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove pause web
  vmove pause web --for 30s

A guest that is paused already stays so. One that is being migrated is left alone.")]
pub struct Pause {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
    /// Let it run on by itself after this time, unless somebody pauses it again or resumes it before [default: never]
    #[arg(long = "for", value_name = "TIME", value_parser = super::milliseconds)]
    pub for_ms: Option<u64>,
}

/// Arguments of `resume`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove migrate web --to node2 --paused
  vmove --control /run/node2.sock resume web

A guest that runs already stays so. One that is being migrated is left alone.")]
pub struct Resume {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
}

/// Arguments of `forget`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove forget legacy

Frees the monitor of an adopted VM for others. One that `vmove run` started, or that was moved here, stays: its memory
belongs to the daemon.")]
pub struct Forget {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
}
