//! The command line of `vmove hook`.

use clap::{Args, Subcommand};

/// What `hook` does.
#[derive(Debug, Subcommand)]
pub enum HookCommand {
    /// List the hooks in the order in which they run, and what came of them since vmoved was started
    List,
    /// Say what a hook would do for an event that is made up
    Test(HookTest),
}

/// Arguments of `hook test`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove hook test evacuate
  vmove hook test evacuate --vm web --event '{\"recipient\": \"hypervisor\"}'
  vmove hook test tell-slurm --vm web --run

Without --event, the conditions of the hook are taken to hold. Nothing is done without --run; with it, a program is told
that it is a test (VMOVE_TEST=1), and a guest is really moved, forked or paused. Exit code 0 if the hook runs, 3 if it
does not or forbids, 1 if it failed.")]
pub struct HookTest {
    /// Name of the hook
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Data of the event, as JSON: what QEMU or vmoved would give
    #[arg(long, value_name = "JSON")]
    pub event: Option<String>,
    /// The VM that the event is about [default: each VM of the node is tried]
    #[arg(long, value_name = "VM")]
    pub vm: Option<String>,
    /// Do it
    #[arg(long)]
    pub run: bool,
}
