//! `./run bench pause`: how long a guest stands still, by its size. See `vmove_tests::bench::pause`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use vmove_tests::bench::pause::{self, Case, Fill, Memory, Report, Row};
use vmove_tests::bench::report::Setting;
use vmove_tests::guest::Accel;
use vmove_tests::interrupt;
use vmove_tests::places::Qemu;

const PARAMETERS: &str = "two daemons on this machine, loopback TCP; the payload guest, 300 pages/s, moved to and fro";

/// Moves a small guest in a large address space to and fro, and says how long it stood still and why.
#[derive(Debug, Parser)]
#[command(
    name = "./run bench pause",
    after_help = "Examples:\n  ./run bench pause --memory 1G,16G,256G,1T\n  ./run bench pause --memory 1G --fill half,full --mode hybrid,postcopy --runs 9"
)]
struct Arguments {
    /// Sizes of the guest: 512M, 16G, 1T
    #[arg(long, value_delimiter = ',', default_value = "1G,16G,256G,1T")]
    memory: Vec<Memory>,
    /// How much of the guest's memory is in use; what the machine has no memory for is left out
    #[arg(long, value_enum, value_delimiter = ',', default_value = "empty,half,full")]
    fill: Vec<Fill>,
    /// Modes
    #[arg(long, value_delimiter = ',', default_value = "hybrid")]
    mode: Vec<String>,
    /// Moves of each case
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Emulate the guest, although there is KVM: up to 900 GiB
    #[arg(long)]
    emulated: bool,
    /// Folder for pause.json and pause.md
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench pause: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    interrupt::clean_up_when_killed()?;
    let out = &arguments.out;
    std::fs::create_dir_all(out).with_context(|| format!("could not make {}", out.display()))?;
    let setting = Setting::here("./run bench pause", &Qemu::under_test()?, PARAMETERS)?;
    println!("{}\n{PARAMETERS}\n", setting.line());
    let accel = if arguments.emulated || Accel::Kvm.usable().is_err() { Accel::Tcg } else { Accel::Kvm };
    let mut rows = Vec::new();
    let mut sound = true;
    for memory in arguments.memory.iter().copied() {
        for fill in arguments.fill.iter().copied() {
            for mode in &arguments.mode {
                let case = Case { memory, fill, mode: mode.clone(), runs: arguments.runs.max(1) };
                eprintln!("{memory}, {}, {mode}", fill.label());
                rows.push(match fill.fits(memory).err() {
                    Some(why) => Row { case, moves: Vec::new(), failure: Some(format!("{why:#}")) },
                    None => match pause::run(&case, accel) {
                        Ok(moves) => Row { case, moves, failure: None },
                        Err(why) => {
                            sound = false;
                            eprintln!("  {why:#}");
                            Row { case, moves: Vec::new(), failure: Some(format!("{why:#}")) }
                        }
                    },
                });
                let report = Report { schema: 1, setting: &setting, rows: &rows };
                std::fs::write(out.join("pause.json"), serde_json::to_string_pretty(&report)?)?;
                let text = format!("{}\n\n`{}`\n\n{PARAMETERS}\n\n{}", setting.line(), setting.command, pause::text(&rows));
                std::fs::write(out.join("pause.md"), text)?;
            }
        }
    }
    println!("{}\nwritten: {1}/pause.json, {1}/pause.md", pause::text(&rows), out.display());
    Ok(sound)
}
