//! `./run bench pause`: how long a guest stands still, by its size. See `vmove_tests::bench::pause`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use vmove_tests::bench::pause::{self, Case, Fill, Memory, Report, Row, Writes};
use vmove_tests::bench::report::Setting;
use vmove_tests::guest::Accel;

const PARAMETERS: &str =
    "two daemons on this machine, loopback TCP; the payload guest, 300 pages/s, moved to and fro";

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
    /// How KVM notes the guest's writes for QEMU; with a bitmap, QEMU's default, the pause of a large guest has the time to read that
    #[arg(long, value_enum, value_delimiter = ',', default_value = "ring")]
    writes: Vec<Writes>,
    /// Moves of each case
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Emulate the guest, although there is KVM: up to 900 GiB
    #[arg(long)]
    emulated: bool,
    /// Folder for pause.json, pause.md and pause.svg
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
    let out = &arguments.out;
    let setting = Setting::begin("./run bench pause", PARAMETERS, out)?;
    println!("{}\n{PARAMETERS}\n", setting.line());
    let accel = Accel::best(arguments.emulated);
    let mut rows = Vec::new();
    let mut sound = true;
    for case in cases(arguments) {
        eprintln!("{}, {}, {}", case.memory, case.fill.label(), case.mode);
        let result = match case.fill.fits(case.memory) {
            // Not a failure: there is no memory for it here.
            Err(why) => Ok(Err(why)),
            Ok(()) => pause::run(&case, accel).map(Ok),
        };
        let (moves, failure) = match result {
            Ok(Ok(moves)) => (moves, None),
            Ok(Err(why)) => (Vec::new(), Some(format!("{why:#}"))),
            Err(why) => {
                sound = false;
                eprintln!("  {why:#}");
                (Vec::new(), Some(format!("{why:#}")))
            }
        };
        rows.push(Row { case, moves, failure });
        write(out, &setting, &rows)?;
    }
    println!("{}\nwritten: {1}/pause.json, {1}/pause.md, {1}/pause.svg", pause::text(&rows), out.display());
    Ok(sound)
}

fn cases(arguments: &Arguments) -> Vec<Case> {
    let mut cases = Vec::new();
    for memory in arguments.memory.iter().copied() {
        for fill in arguments.fill.iter().copied() {
            for writes in arguments.writes.iter().copied() {
                let case = |mode: &String| Case {
                    memory,
                    fill,
                    writes,
                    mode: mode.clone(),
                    runs: arguments.runs.max(1),
                };
                cases.extend(arguments.mode.iter().map(case));
            }
        }
    }
    cases
}

fn write(out: &Path, setting: &Setting, rows: &[Row]) -> Result<()> {
    let report = Report { schema: 1, setting, rows };
    std::fs::write(out.join("pause.svg"), pause::picture(rows))?;
    setting.write(out, "pause", &report, &pause::text(rows))
}
