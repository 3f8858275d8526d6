//! `./run bench visit`: when a visit pays. See `vmove_tests::bench::visit`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use vmove_tests::bench::report::{self, Setting};
use vmove_tests::bench::visit::{self, Case, HEAD};

/// Has a guest read data of another node: from afar, on a visit there, and after a migration there. Says from how much data on each pays.
#[derive(Debug, Parser)]
#[command(
    name = "./run bench visit",
    after_help = "Examples:\n  ./run bench visit\n  ./run bench visit --mbit 100 --working-set-mib 8,64 --idle-mib 512"
)]
struct Arguments {
    /// Speeds of the link in each direction, in Mbit/s
    #[arg(long, value_delimiter = ',', default_value = "100,1000")]
    mbit: Vec<u32>,
    /// What the guest works on beside its reading, in MiB
    #[arg(long, value_delimiter = ',', default_value = "8,64")]
    working_set_mib: Vec<u32>,
    /// What it has used before and does not touch any more, in MiB
    #[arg(long, value_delimiter = ',', default_value = "192")]
    idle_mib: Vec<u32>,
    /// Folder for visit.json and visit.md
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
}

fn main() -> ExitCode {
    report::exit("visit", run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<()> {
    let out = &arguments.out;
    let parameters = "two nodes in network namespaces, a link of the same speed in each direction, whose queue honours priorities (pfifo_fast); an emulated guest that \
                      rewrites 500 pages/s and reads a disk of the second node (qemu-nbd) in parts of 8 MiB";
    let setting = Setting::begin("./run bench visit", parameters, out)?;
    println!("{}\n{parameters}\n\n{HEAD}", setting.line());
    let mut done = Vec::new();
    for mbit in arguments.mbit.iter().copied() {
        for working_set_mib in arguments.working_set_mib.iter().copied() {
            for idle_mib in arguments.idle_mib.iter().copied() {
                let case = Case { mbit, working_set_mib, idle_mib };
                let outcome = visit::run(&case).with_context(|| format!("{case:?}"))?;
                println!("{}", visit::line(&case, &outcome));
                done.push((case, outcome));
            }
        }
    }
    setting.write_cases(out, "visit", &done, (HEAD, visit::line))
}
