//! `./run demo`: a guest under load moves between two daemons on this machine: forth in hybrid mode and back in post-copy mode. At
//! the end the guest itself reports whether its memory is correct. `./run demo cluster`: the life of a virtual cluster.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use vmove_guest::config::{Config, Rate};
use vmove_tests::beacon;
use vmove_tests::daemon::{MigrateReport, Node, NodeOptions};
use vmove_tests::guest::{Guest, failures};
use vmove_tests::sampler::{Loss, Measure, Sampler, Series, now};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::{cluster_demo, interrupt, places};

const NAME: &str = "demo";

/// Moves a guest under load between two daemons on this machine, there and back.
#[derive(Debug, Parser)]
#[command(name = "./run demo")]
struct Args {
    /// Another scene.
    #[command(subcommand)]
    scene: Option<Scene>,
    /// Guest memory in MiB
    #[arg(long, default_value_t = 1024)]
    memory_mib: u32,
    /// Part of it that the guest fills and rewrites, in MiB
    #[arg(long, default_value_t = 512)]
    working_set_mib: u32,
    /// Pages of 4 KiB that the guest rewrites in a second
    #[arg(long, default_value_t = 100_000)]
    rate: u32,
    /// What guest memory is made of: thp or hugetlb-2m
    #[arg(long, default_value = "thp")]
    memory: String,
}

/// Another scene than the two moves.
#[derive(Debug, Subcommand)]
enum Scene {
    /// The life of a virtual cluster on two racks: placed, forked, drained, compacted, kept, lost and restored
    Cluster {
        /// Draw the racks before and after into this folder
        #[arg(long, value_name = "DIR")]
        pictures: Option<PathBuf>,
    },
}

/// One of the two moves.
struct Leg {
    name: String,
    report: MigrateReport,
    loss: Loss,
    picture: String,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let mut sandbox = match interrupt::clean_up_when_interrupted()
        .and_then(|()| places::root())
        .and_then(|()| Sandbox::new())
    {
        Ok(sandbox) => sandbox,
        Err(error) => {
            eprintln!("demo: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let played = match &args.scene {
        Some(Scene::Cluster { pictures }) => cluster_demo::run(&sandbox, pictures.as_deref()),
        None => demo(&args, &sandbox),
    };
    match played {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            sandbox.keep();
            eprintln!(
                "\ndemo: {error:#}\nlogs of both daemons and their guests are in {}",
                sandbox.path().display()
            );
            ExitCode::FAILURE
        }
    }
}

fn demo(args: &Args, sandbox: &Sandbox) -> Result<()> {
    let began = Instant::now();
    let say = |text: &str| println!("[{:5.1} s] {text}", began.elapsed().as_secs_f64());

    if args.memory != "thp" {
        sandbox.reserve_huge_pages(2 << 20, u64::from(args.memory_mib) << 21)?;
    }
    let (a, b) = Node::pair(sandbox, &NodeOptions::default())?;
    say(&format!("two daemons: a at {}, b at {}", a.listen(), b.listen()));

    let config = Config {
        working_set_mib: args.working_set_mib,
        rate: Rate::PagesPerSecond(args.rate),
        ..Config::default()
    };
    let guest = Guest::new(args.memory_mib, config)?;
    say(&format!(
        "vmove run --name {NAME} --memory {}: a guest of {} MiB that rewrites and checks {} MiB at {} pages/s",
        args.memory, args.memory_mib, args.working_set_mib, args.rate
    ));
    let vm = a.run_guest(NAME, &args.memory, &guest)?;
    let sampler = Sampler::start(vm.beacon()?, Duration::from_millis(1))?;
    drop(vm);
    std::thread::sleep(Duration::from_millis(500));
    let from = now();
    std::thread::sleep(Duration::from_millis(1500));
    let full_rate = sampler.series().rate(Measure::Work, from, now()).context("the guest was not sampled")?;
    say(&format!("the guest is at work: {full_rate:.0} pages/s"));

    let mut legs = Vec::new();
    for (from, to, mode) in [(&a, &b, "hybrid"), (&b, &a, "postcopy")] {
        say(&format!("vmove migrate {NAME} --to {} --mode {mode}", to.name()));
        legs.push(travel(from, to, mode, &sampler, full_rate)?);
        say(&format!("the guest runs on {} and {} is empty", to.name(), from.name()));
        std::thread::sleep(Duration::from_millis(500));
    }

    // Time for the guest to visit every page once more, wherever it is now.
    let pass = f64::from(args.working_set_mib) * 256.0 / full_rate.max(1.0);
    std::thread::sleep(Duration::from_secs_f64((pass * 1.2).clamp(1.0, 20.0)));
    let last = sampler.last().context("the guest was not sampled")?;
    drop(sampler);
    print_report(&legs, args);
    println!("\n  {}", last.verdict());
    let console = a.vm(NAME)?.console();
    let told = failures(&console);
    a.ask(&["stop", NAME])?;
    if last.errors > 0 || !told.is_empty() {
        bail!(
            "the guest found its memory damaged: {}",
            told.first().cloned().unwrap_or_else(|| last.verdict())
        );
    }
    say("done");
    Ok(())
}

fn travel(from: &Node, to: &Node, mode: &str, sampler: &Sampler, full_rate: f64) -> Result<Leg> {
    let memory = to.memory();
    sampler.also(move || beacon::ram_files(&memory).into_iter().next());
    let requested = now();
    let answer = from.ask_shown(&["migrate", NAME, "--to", to.name(), "--mode", mode])?;
    let ended = now();
    let report = MigrateReport::read(&answer)?;
    if from.vms()?.iter().any(|vm| vm == NAME) || !to.vms()?.iter().any(|vm| vm == NAME) {
        bail!("after the move, {} should have the guest and {} should not", to.name(), from.name());
    }
    std::thread::sleep(Duration::from_millis(700));
    let series = sampler.series();
    let loss =
        series.loss(Measure::Work, full_rate, requested, ended).context("the guest was not sampled")?;
    let picture = sparkline(&series, full_rate, requested.saturating_sub(100_000_000), ended + 200_000_000);
    Ok(Leg { name: format!("{} -> {}, {mode}", from.name(), to.name()), report, loss, picture })
}

/// The guest's rate as a line of text; each character stands for a fiftieth of the time.
fn sparkline(series: &Series, full_rate: f64, from: u64, to: u64) -> String {
    const STEPS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let bucket = (to - from) / 50;
    series
        .throughput(Measure::Work, from, to, bucket)
        .into_iter()
        .map(|(_, rate)| {
            let share = rate / full_rate;
            // A float range cannot be a pattern's bound for an index: the step is looked for instead.
            let step = (1_u8..=8).rev().find(|step| share >= f64::from(*step) / 8.0 - 0.06).unwrap_or(0);
            STEPS[usize::from(step)]
        })
        .collect()
}

#[expect(clippy::cast_precision_loss, reason = "bytes of a guest are below 2^53")]
fn print_report(legs: &[Leg], args: &Args) {
    println!("\n  {:<34}{}", "", legs.iter().map(|leg| format!("{:>20}", leg.name)).collect::<String>());
    let line = |name: &str, cell: &dyn Fn(&Leg) -> String| {
        println!("  {name:<34}{}", legs.iter().map(|leg| format!("{:>20}", cell(leg))).collect::<String>());
    };
    let guest = f64::from(args.memory_mib) * f64::from(1 << 20);
    line("total time", &|leg| format!("{:.0} ms", leg.report.total_ms));
    line("  of it preparing the destination", &|leg| format!("{:.0} ms", leg.report.setup_ms));
    line("downtime (STOP to RESUME)", &|leg| format!("{:.1} ms", leg.report.downtime_ms));
    line("work lost by the guest", &|leg| format!("{:.0} ms", leg.loss.lost_ms));
    line("bytes sent / guest memory", &|leg| format!("{:.2}", leg.report.bytes_sent as f64 / guest));
    line("page faults after the resumption", &|leg| leg.report.faults.count.to_string());
    line("  latency p50 / p99", &|leg| {
        format!("{:.0} / {:.0} us", leg.report.faults.p50_us, leg.report.faults.p99_us)
    });
    line("fabric, memory", &|leg| format!("{}, {}", leg.report.fabric, leg.report.memory));
    println!("\n  the guest's pace, from 0.1 s before the request to 0.2 s after the end:");
    for leg in legs {
        println!("  {:<18} |{}|", leg.name, leg.picture);
    }
}
