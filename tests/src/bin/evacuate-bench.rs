//! `./run bench evacuate`: many guests leave a node. See `vmove_tests::bench::evacuate`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use vmove_tests::bench::evacuate::{self, Case, HEAD};
use vmove_tests::bench::report::{self, Setting};
use vmove_tests::guest::Accel;

/// Moves many guests off a node, one after the other and all at once, and says how near that comes to the speed of the link.
#[derive(Debug, Parser)]
#[command(
    name = "./run bench evacuate",
    after_help = "Examples:\n  ./run bench evacuate\n  ./run bench evacuate --guests 4,16 --mbit 10000 --mode postcopy"
)]
struct Arguments {
    /// How many guests move
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    guests: Vec<u32>,
    /// Speed of the link in each direction, in Mbit/s
    #[arg(long, default_value_t = 1000)]
    mbit: u32,
    /// Content of each guest's memory besides the 32 MiB that it rewrites, in MiB
    #[arg(long, default_value_t = 192)]
    cold_mib: u32,
    /// Modes
    #[arg(long, value_delimiter = ',', default_value = "hybrid,postcopy")]
    mode: Vec<String>,
    /// Runs of each case
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Emulate the guests, although there is KVM
    #[arg(long)]
    emulated: bool,
    /// Folder for evacuate.json and evacuate.md
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
}

fn main() -> ExitCode {
    report::exit("evacuate", run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<()> {
    let out = &arguments.out;
    let parameters = format!(
        "two nodes in network namespaces, a link of {} Mbit/s in each direction, whose queue honours priorities (pfifo_fast); guests with {} MiB of content that rewrite 1,000 \
         pages/s, and one more that stays",
        arguments.mbit,
        arguments.cold_mib + 32
    );
    let setting = Setting::begin("./run bench evacuate", &parameters, out)?;
    println!("{}\n{parameters}\n\n{HEAD}", setting.line());
    let accel = Accel::best(arguments.emulated);
    let mut done = Vec::new();
    for mode in &arguments.mode {
        for guests in arguments.guests.iter().copied() {
            for at_once in [false, true] {
                if guests == 1 && at_once {
                    continue;
                }
                let case = Case {
                    guests,
                    mbit: arguments.mbit,
                    cold_mib: arguments.cold_mib,
                    mode: mode.clone(),
                    at_once,
                };
                let runs = (0..arguments.runs.max(1))
                    .map(|_| evacuate::run(&case, accel))
                    .collect::<Result<Vec<_>>>()
                    .with_context(|| format!("{guests} guests, {mode}"))?;
                println!("{}", evacuate::line(&case, &runs));
                done.push((case, runs));
            }
        }
    }
    setting.write_cases(out, "evacuate", &done, (HEAD, |case, runs| evacuate::line(case, runs)))
}
