//! The `vmove-pve` command: VMs of Proxmox VE.
//!
//! Proxmox VE starts and ends QEMUs, and this program has one migrate to the other, as `qm migrate` does; vmove carries the memory. The place of the
//! VM's configuration decides where the guest may run: it is moved by one rename, after the guest has stopped at the source and before it runs at the
//! destination. Only the node that has it lets the guest run.

mod cluster;
mod enable;
mod host;
mod moving;
mod obstacles;
mod qemu;
mod receive;
mod recover;
mod remote;
mod switch;

use std::process::ExitCode;

use tokio::task::LocalSet;
use vmove_client::Client;
use vmove_pve::PveError;
use vmove_types::problem::{Code, Exit, chain};

use crate::args::pve::{Cli, Command};
use crate::failure::Failure;
use crate::manual;
use crate::output::{End, parse, report};
use crate::waiting::LEFT_RUNNING;

const PROGRAM: &str = "vmove-pve";

/// Runs `vmove-pve` with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let cli: Cli = match parse(PROGRAM) {
        Ok(cli) => cli,
        Err(exit) => return exit,
    };
    let json = cli.json;
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report(PROGRAM, &Failure::new(Code::Internal, error.to_string()), json),
    };
    match runtime.block_on(LocalSet::new().run_until(dispatch(cli))) {
        Ok(exit) => ExitCode::from(exit.code()),
        Err(End::BrokenPipe) => ExitCode::SUCCESS,
        Err(End::Left) => ExitCode::from(LEFT_RUNNING),
        Err(End::Failed(failure)) => report(PROGRAM, &failure, json),
    }
}

async fn dispatch(cli: Cli) -> Result<Exit, End> {
    let client = Client::connect(&cli.control);
    match cli.command {
        Command::Enable(args) => enable::enable(&args, cli.json),
        Command::Disable(args) => enable::disable(&args, cli.json),
        Command::Host(args) => host::prepare(args.check, cli.json),
        Command::Move(args) => moving::move_vm(&client, &args, cli.json).await,
        Command::Recover(args) => recover::recover(&args, cli.json).await,
        Command::Receive(args) => receive::receive(&client, &args).await,
        Command::Relay(args) => receive::relay(args.vmid),
        Command::Completions(args) => manual::completions_of::<Cli>(PROGRAM, args.shell),
        Command::Man(args) => manual::man(&args.dir, cli.json),
    }
}

/// Nothing was changed.
fn refused(why: impl Into<String>) -> Failure {
    Failure::new(Code::NotMovable, why)
}

/// It did not work; the guest runs where it was.
fn failed(why: impl Into<String>) -> Failure {
    Failure::new(Code::DomainRefused, why)
}

/// Nobody knows whether the guest runs.
fn unknown(why: impl Into<String>) -> Failure {
    Failure { exit_code: Exit::NeedsRecovery.code(), ..Failure::new(Code::DomainRefused, why) }
}

impl From<PveError> for Failure {
    fn from(error: PveError) -> Self {
        refused(chain(&error))
    }
}
