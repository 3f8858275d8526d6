//! `./run bench client`: what a client on the network sees of moves. See `vmove_tests::bench::client`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use serde::Serialize;
use vmove_tests::bench::client::{self, Row, Way};
use vmove_tests::bench::report::Setting;
use vmove_tests::interrupt;
use vmove_tests::places::Qemu;

const PARAMETERS: &str = "two nodes in namespaces, bridges and taps; a guest of 256 MiB under TCG, 2000 pages/s; one client, one TCP connection, one question \
     after the other";
const HEAD: &str = "| | moves | longest gap, ms | downtime, ms | frames passed on |\n|---|--:|--:|--:|--:|";

/// Measures the longest gap that a client on the network sees in each move.
#[derive(Debug, Parser)]
#[command(name = "./run bench client", after_help = "Example:\n  ./run bench client --moves 10")]
struct Arguments {
    /// Moves of each way, to and fro
    #[arg(long, default_value_t = 10)]
    moves: usize,
    /// Folder for client.json and client.md
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
}

#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    setting: &'a Setting,
    rows: &'a [Row],
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench client: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    interrupt::clean_up_when_killed()?;
    let out = &arguments.out;
    std::fs::create_dir_all(out).with_context(|| format!("could not make {}", out.display()))?;
    let setting = Setting::here("./run bench client", &Qemu::under_test()?, PARAMETERS)?;
    println!("{}\n{PARAMETERS}\n\n{HEAD}", setting.line());
    let mut rows = Vec::new();
    for way in Way::ALL {
        let row = client::run(way, arguments.moves.max(1)).context(way.label())?;
        println!("{}", row.line());
        rows.push(row);
    }
    let report = Report { schema: 1, setting: &setting, rows: &rows };
    std::fs::write(out.join("client.json"), serde_json::to_string_pretty(&report)?)?;
    let lines: Vec<String> = rows.iter().map(Row::line).collect();
    let table = format!("{}\n\n{PARAMETERS}\n\n{HEAD}\n{}\n", setting.line(), lines.join("\n"));
    std::fs::write(out.join("client.md"), table)?;
    println!("\nwritten: {0}/client.json, {0}/client.md", out.display());
    Ok(())
}
