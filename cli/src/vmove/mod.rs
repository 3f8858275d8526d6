//! The `vmove` command.

pub(crate) mod bar;
mod devices;
mod disk_latency;
mod disks;
mod doctor;
mod fabric;
mod follow;
mod groups;
mod hooks;
mod libvirt;
mod migrations;
mod progress_text;
mod report;
mod secrets;
mod setup;
mod snapshots;
mod tune;
mod visit;
mod vms;
mod waiting;
mod watch;

use std::process::ExitCode;

use vmove_client::Client;
use vmove_types::problem::{Code, Exit};

use crate::args::vmove::{
    Cli, Command, Devices, DevicesCommand, FabricCommand, HookCommand, LibvirtCommand, SetupCommand,
};
use crate::failure::{Failure, where_it_went};
use crate::output::{End, parse, report};
use crate::waiting::LEFT_RUNNING;
use crate::{clusters, manual, page};

/// What a command came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// With this exit code; everything was said.
    With(Exit),
    /// The operator left a migration to itself.
    LeftRunning,
}

/// Runs `vmove` with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let cli: Cli = match parse("vmove") {
        Ok(cli) => cli,
        Err(exit) => return exit,
    };
    let json = cli.global.json;
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report("vmove", &Failure::new(Code::Internal, error.to_string()), json),
    };
    let client = match cli.global.client() {
        Ok(client) => client,
        Err(failure) => return report("vmove", &failure, json),
    };
    let ended = runtime.block_on(async {
        let ended = dispatch(&client, cli).await;
        match ended {
            Err(End::Failed(failure)) => Err(End::Failed(where_it_went(&client, failure).await)),
            other => other,
        }
    });
    // A pending read of a terminal must not hold the end up.
    runtime.shutdown_background();
    match ended {
        Ok(Ended::With(exit)) => ExitCode::from(exit.code()),
        Ok(Ended::LeftRunning) | Err(End::Left) => ExitCode::from(LEFT_RUNNING),
        Err(End::BrokenPipe) => ExitCode::SUCCESS,
        Err(End::Failed(failure)) => report("vmove", &failure, json),
    }
}

async fn dispatch(client: &Client, cli: Cli) -> Result<Ended, End> {
    let global = cli.global.clone();
    let (json, control) = (cli.global.json, cli.global.control);
    let exit = match cli.command {
        Command::Run(args) => vms::run(client, args, json).await?,
        Command::Adopt(args) => vms::adopt(client, args, json).await?,
        Command::List => vms::list(client, json).await?,
        Command::Devices(Devices { command: None }) => devices::list(client, json).await?,
        Command::Devices(Devices { command: Some(DevicesCommand::Attach(args)) }) => {
            devices::attach(client, &args, json).await?
        }
        Command::Tune(args) => tune::tune(client, &args, json).await?,
        Command::Show(args) => vms::show(client, &args.vm, json).await?,
        Command::Stop(args) => vms::stop(client, &args, json).await?,
        Command::Pause(args) => vms::pause(client, &args, json).await?,
        Command::Resume(args) => vms::resume(client, &args.vm, json).await?,
        Command::Forget(args) => vms::forget(client, &args.vm, json).await?,
        Command::Check(args) => vms::check(client, &args, json).await?,
        Command::Node => vms::node(client, json).await?,
        Command::Page(args) => page::of_node(&global, args.at, json).await?,
        Command::Hook(HookCommand::List) => hooks::list(client, json).await?,
        Command::Hook(HookCommand::Test(args)) => hooks::test(client, args, json).await?,
        Command::Libvirt(LibvirtCommand::Enable(args)) => libvirt::enable(&args, &control, json).await?,
        Command::Libvirt(LibvirtCommand::Disable(args)) => libvirt::disable(&args, json).await?,
        Command::Libvirt(LibvirtCommand::Host(args)) => libvirt::prepare_host(args.check, &control, json)?,
        Command::Libvirt(LibvirtCommand::Hook(args)) => libvirt::hook(client, args).await?,
        Command::Doctor(args) => doctor::doctor(&args, &control, json).await?,
        Command::Setup(SetupCommand::Tls(args)) => setup::tls(&args, json)?,
        Command::Fabric(FabricCommand::Check(args)) => fabric::check(client, &args.to, json).await?,
        Command::Migrate(args) => return migrations::migrate(client, args, json).await,
        Command::Disks(args) => disks::list(client, &args.vm, json).await?,
        Command::MoveDisk(args) => return disks::move_disk(client, &args, json).await,
        Command::Visit(args) => return visit::visit(client, args, json).await,
        Command::Status(args) => return migrations::status(client, args, json).await,
        Command::Recover(args) => return migrations::recover(client, args, json).await,
        Command::Reclaim(args) => return migrations::reclaim(client, args, json).await,
        Command::Cancel(args) => migrations::cancel(client, &args.id, json).await?,
        Command::Report(args) => report::report(client, &args, json).await?,
        Command::Watch(args) => watch::watch(client, &args, &global).await?,
        Command::History(args) => migrations::history(client, args, json).await?,
        Command::Cluster(command) => {
            clusters::run(command, json).await?;
            Exit::Done
        }
        Command::Completions(args) => manual::completions_of::<Cli>("vmove", args.shell)?,
        Command::Man(args) => manual::man(&args.dir, json)?,
    };
    Ok(Ended::With(exit))
}
