//! `./run bench client`: what a client on the network sees of moves. See `vmove_tests::bench::client`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use serde::Serialize;
use vmove_tests::bench::client::{self, Row, Way};
use vmove_tests::bench::report::{self, Setting};

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
    report::exit("client", run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<()> {
    let out = &arguments.out;
    let setting = Setting::begin("./run bench client", PARAMETERS, out)?;
    println!("{}\n{PARAMETERS}\n\n{HEAD}", setting.line());
    let mut rows = Vec::new();
    for way in Way::ALL {
        let row = client::run(way, arguments.moves.max(1)).context(way.label())?;
        println!("{}", row.line());
        rows.push(row);
    }
    let report = Report { schema: 1, setting: &setting, rows: &rows };
    let lines: Vec<String> = rows.iter().map(Row::line).collect();
    setting.write(out, "client", &report, &format!("{HEAD}\n{}\n", lines.join("\n")))?;
    println!("\nwritten: {0}/client.json, {0}/client.md", out.display());
    Ok(())
}
