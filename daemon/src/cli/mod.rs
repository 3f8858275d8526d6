//! The `vmove` command.

pub mod args;
mod bar;
mod client;
mod fabric;
mod follow;
pub mod fork;
mod generate;
mod migrations;
mod output;
mod vms;

use std::process::ExitCode;

use clap::Parser;
use serde_json::json;

use crate::api::problem::{Code, Exit, Problem};
use crate::api::types::Running;
use args::{Cli, Command, FabricCommand};
use client::Client;
use output::{End, note, say_json};

/// Exit code after a second Ctrl-C: the migration goes on, so none of the others would be true.
const LEFT_RUNNING: u8 = 130;

/// What a command came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// With this exit code; everything was said.
    With(Exit),
    /// With this code; everything was said by the commands for virtual clusters.
    Code(u8),
    /// The operator left a migration to itself.
    LeftRunning,
}

/// Runs `vmove` with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.global.json;
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report("vmove", &Problem::from_error(Code::Internal, &error), json),
    };
    let ended = runtime.block_on(dispatch(cli));
    // A pending read of a terminal must not hold the end up.
    runtime.shutdown_background();
    match ended {
        Ok(Ended::With(exit)) => ExitCode::from(exit.code()),
        Ok(Ended::Code(code)) => ExitCode::from(code),
        Ok(Ended::LeftRunning) => ExitCode::from(LEFT_RUNNING),
        Err(End::BrokenPipe) => ExitCode::SUCCESS,
        Err(End::Problem(problem)) => report("vmove", &problem, json),
    }
}

async fn dispatch(cli: Cli) -> Result<Ended, End> {
    let client = Client::new(&cli.global.control);
    let json = cli.global.json;
    let exit = match cli.command {
        Command::Run(args) => vms::run(&client, args, json).await?,
        Command::Adopt(args) => vms::adopt(&client, args, json).await?,
        Command::List => vms::list(&client, json).await?,
        Command::Show(args) => vms::show(&client, &args.vm, json).await?,
        Command::Stop(args) => vms::stop(&client, &args, json).await?,
        Command::Pause(args) => vms::set_state(&client, &args.vm, Running::Paused, json).await?,
        Command::Resume(args) => vms::set_state(&client, &args.vm, Running::Running, json).await?,
        Command::Forget(args) => vms::forget(&client, &args.vm, json).await?,
        Command::Check(args) => vms::check(&client, &args, json).await?,
        Command::Node => vms::node(&client, json).await?,
        Command::Fabric(FabricCommand::Check(args)) => fabric::check(&client, &args.to, json).await?,
        Command::Migrate(args) => return migrations::migrate(&client, args, json).await,
        Command::Status(args) => return migrations::status(&client, args, json).await,
        Command::Recover(args) => return migrations::recover(&client, args, json).await,
        Command::Cancel(args) => migrations::cancel(&client, &args.id, json).await?,
        Command::History(args) => migrations::history(&client, args, json).await?,
        Command::Bridge(command) => return Ok(Ended::Code(vmove_bridge::cli::run(command, json).await)),
        Command::Completions(args) => generate::completions_of::<Cli>("vmove", args.shell)?,
        Command::Man(args) => generate::man(&args.dir, json)?,
    };
    Ok(Ended::With(exit))
}

/// Says what went wrong: for people always, for programs when they asked.
fn report(program: &str, problem: &Problem, json: bool) -> ExitCode {
    note(&format!("{program}: {problem}"));
    if json {
        let _ = say_json(
            &json!({ "error": problem.message, "code": problem.code, "exit_code": problem.exit_code }),
        );
    }
    ExitCode::from(problem.exit_code)
}
