//! `./run bench promise`: what was promised beside what was measured. See `vmove_tests::bench::promise`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use vmove_tests::bench::promise::{self, Report};
use vmove_tests::bench::report::{self, Setting};
use vmove_tests::guest::Accel;

const PARAMETERS: &str =
    "two daemons on this machine, loopback TCP; drawn payload guests, moved to and fro over drawn limits";

/// Moves drawn guests over drawn links, and compares what each move has promised with what was measured.
#[derive(Debug, Parser)]
#[command(
    name = "./run bench promise",
    after_help = "Example:\n  ./run bench promise --guests 20 --moves 8 --seed 7"
)]
struct Arguments {
    /// Guests
    #[arg(long, default_value_t = 12)]
    guests: usize,
    /// Moves of each
    #[arg(long, default_value_t = 8)]
    moves: usize,
    /// What is drawn follows from it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Emulate the guests, although there is KVM
    #[arg(long)]
    emulated: bool,
    /// Folder for promise.json, promise.md and promise.svg
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
}

fn main() -> ExitCode {
    report::exit("promise", run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<()> {
    let out = &arguments.out;
    let setting = Setting::begin("./run bench promise", PARAMETERS, out)?;
    println!("{}\n{PARAMETERS}\n", setting.line());
    let accel = Accel::best(arguments.emulated);
    let outcomes = promise::run(arguments.guests, arguments.moves, arguments.seed, accel)?;
    let report = Report { schema: 1, setting: &setting, outcomes: &outcomes };
    std::fs::write(out.join("promise.svg"), promise::picture(&outcomes))?;
    let told = promise::text(&outcomes);
    setting.write(out, "promise", &report, &told)?;
    println!("{told}\nwritten: {}/promise.json, promise.md, promise.svg", out.display());
    Ok(())
}
