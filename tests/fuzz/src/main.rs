//! `fuzz`: lists targets, writes their seeds, feeds an input again, and feeds targets for long without coverage.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use vmove_fuzz::targets::{ALL, Target, find};
use vmove_fuzz::{corpus, engine};

#[derive(Parser)]
#[command(about = "Feeds what reads others' input with damaged input")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Names of all targets, and what each feeds
    List,
    /// Write valid inputs of a target into a folder
    Seeds { target: String, folder: PathBuf },
    /// Feed the input of a file again
    Again { target: String, file: PathBuf },
    /// Feed targets with mutations for some minutes in all, and say how many inputs that were
    Run {
        minutes: f64,
        targets: Vec<String>,
        /// The first seed
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
}

/// Mutations between two looks at the clock.
const AT_ONCE: u64 = 5000;

fn main() -> Result<()> {
    match Args::parse().command {
        Command::List => {
            ALL.iter().for_each(|target| println!("{:18}{}", target.name, target.what));
            Ok(())
        }
        Command::Seeds { target, folder } => {
            let seeds = engine::inputs(known(&target)?);
            corpus::write(&folder, &seeds).with_context(|| format!("could not write {}", folder.display()))
        }
        Command::Again { target, file } => {
            let input = std::fs::read(&file).with_context(|| format!("could not read {}", file.display()))?;
            match engine::feed(known(&target)?, &input) {
                Ok(()) => println!("{target} stands {}", file.display()),
                Err(failed) => bail!("{}", failed.report),
            }
            Ok(())
        }
        Command::Run { minutes, targets, seed } => run(minutes, &targets, seed),
    }
}

fn known(name: &str) -> Result<&'static Target> {
    find(name).with_context(|| format!("expected a target that `fuzz list` names, found {name:?}"))
}

fn run(minutes: f64, names: &[String], seed: u64) -> Result<()> {
    let named: Vec<&Target> = names.iter().map(|name| known(name)).collect::<Result<_>>()?;
    let targets = if named.is_empty() { ALL.iter().collect() } else { named };
    let all = Duration::try_from_secs_f64(minutes * 60.0).context("expected a number of minutes")?;
    let share = all / u32::try_from(targets.len())?;
    let (mut sum, mut failures) = (0, 0);
    println!("seed {seed}");
    println!("{:18}{:>12}{:>12}  failed", "target", "inputs", "inputs/s");
    for target in targets {
        let (begin, mut inputs, mut failed, mut next) = (Instant::now(), 0, 0, seed);
        while begin.elapsed() < share {
            match engine::run(target, next, AT_ONCE) {
                Ok(fed) => inputs += fed,
                Err(error) => {
                    failed += 1;
                    eprintln!("{}", error.report);
                }
            }
            next += 1;
        }
        let seconds = begin.elapsed().as_secs_f64().max(1e-9);
        println!("{:18}{inputs:>12}{:>12.0}  {failed}", target.name, inputs as f64 / seconds);
        sum += inputs;
        failures += failed;
    }
    println!("{:18}{sum:>12}{:>12}  {failures}", "all", "");
    if failures > 0 {
        bail!("{failures} inputs failed");
    }
    Ok(())
}
