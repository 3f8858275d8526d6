//! `./run bench`: vmove beside QEMU's own migration modes. See `vmove_tests::bench`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use vmove_tests::bench::goals;
use vmove_tests::bench::measure::{self, Case, Load, Row};
use vmove_tests::bench::mover::{Backing, Mode};
use vmove_tests::bench::report::{self, Report, Setting};
use vmove_tests::bench::svg;
use vmove_tests::{interrupt, places};

const PARAMETERS: &str = "QEMU's modes: max-bandwidth 100 GB/s, all else at its defaults, in some cases RAM with align=2M; source and \
                          destination on this machine, loopback TCP";

/// Moves the same guest by QEMU's own modes and by vmove's, and compares.
#[derive(Debug, Parser)]
#[command(name = "./run bench")]
struct Args {
    /// Only thp, and 100k pages/s and the payload under KVM: some 5 minutes instead of 25
    #[arg(long)]
    quick: bool,
    /// Backings of guest memory [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    backing: Vec<Backing>,
    /// How fast the guest writes, or the payload under KVM [default: all that run here]
    #[arg(long, value_enum, value_delimiter = ',')]
    load: Vec<Load>,
    /// Modes to compare [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    mode: Vec<Mode>,
    /// Only the modes that there are with TLS, each beside the same without
    #[arg(long, conflicts_with = "mode")]
    tls: bool,
    /// Runs of each case; the median counts
    #[arg(long, default_value_t = 1)]
    runs: usize,
    /// Guest memory in MiB
    #[arg(long, default_value_t = 1024)]
    memory_mib: u32,
    /// Part of it that the guest fills and writes, in MiB
    #[arg(long, default_value_t = 512)]
    working_set_mib: u32,
    /// QEMU program [default: 10.0 of ./run setup]
    #[arg(long)]
    qemu: Option<PathBuf>,
    /// Let the destination have memory that the hypervisor may have taken back
    #[arg(long)]
    cold_memory: bool,
    /// Folder for bench.json, bench.svg and bench.md
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
    /// End with 1 if a promise is not kept
    #[arg(long)]
    strict: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<bool> {
    interrupt::clean_up_when_interrupted()?;
    places::root()?;
    let qemu = match &args.qemu {
        Some(qemu) => qemu.clone(),
        None => places::Qemu::under_test()?,
    };
    std::fs::create_dir_all(&args.out).with_context(|| format!("could not make {}", args.out.display()))?;
    let setting = Setting::here("./run bench", &qemu, PARAMETERS)?;
    println!("{}\n{PARAMETERS}\n", setting.line());

    let loads = loads(args)?;
    let mut rows = Vec::new();
    for backing in chosen(&args.backing, &[Backing::Thp, Backing::Hugetlb2M], &[Backing::Thp], args.quick) {
        for load in loads.iter().copied() {
            for mode in modes(args) {
                if mode.is_aligned() && backing == Backing::Hugetlb2M {
                    // Memory on hugetlbfs is always aligned.
                    continue;
                }
                let case = Case {
                    mode,
                    backing,
                    load,
                    memory_mib: args.memory_mib,
                    working_set_mib: args.working_set_mib,
                    qemu: qemu.clone(),
                    cold_memory: args.cold_memory,
                };
                rows.push(row(case.sized(), args.runs));
            }
            println!(
                "\n{}, guest load: {}\n{}",
                backing.name(),
                load.label(),
                report::table(&rows, backing, load)
            );
            // Written after each panel, so that an interrupted run leaves what it has.
            write(args, &setting, &rows)?;
        }
    }
    let goals = goals::judge(&rows);
    for goal in &goals {
        println!("{}", goal.line());
    }
    println!("\nwritten: {0}/bench.json, {0}/bench.svg, {0}/bench.md", args.out.display());
    // QEMU's own modes are reported as they are: 7.2's pre-copy damages a busy guest under emulation.
    let ours = rows.iter().filter(|row| row.case.mode.is_vmove());
    let damaged = ours.flat_map(|row| &row.runs).any(|outcome| outcome.guest_errors > 0);
    Ok(!damaged && (!args.strict || goals.iter().all(|goal| goal.holds)))
}

/// Without a wish, those that can run here.
fn loads(args: &Args) -> Result<Vec<Load>> {
    let all = [Load::Idle, Load::Steady, Load::Max, Load::Kvm];
    let mut loads = chosen(&args.load, &all, &[Load::Steady, Load::Kvm], args.quick);
    if let Err(why) = Load::Kvm.possible().context("no row under KVM") {
        if args.load.contains(&Load::Kvm) {
            return Err(why);
        }
        eprintln!("{why:#}");
        loads.retain(|load| *load != Load::Kvm);
    }
    Ok(loads)
}

fn row(case: Case, runs: usize) -> Row {
    let results = (0..runs.max(1))
        .map(|_| {
            eprint!("{:<22} {:<10} {:<12} ", case.mode.label(), case.backing.name(), case.load.label());
            let result = measure::run(&case);
            match &result {
                Ok(o) => eprintln!(
                    "total {:5.0} ms, down {:6.1} ms, lost {:5.0} ms, {}",
                    o.total_ms, o.downtime_ms, o.lost_work_ms, o.verdict
                ),
                Err(error) => eprintln!("{error:#}"),
            }
            result
        })
        .collect();
    Row::new(case, results)
}

fn modes(args: &Args) -> Vec<Mode> {
    match (args.tls, args.mode.is_empty()) {
        (true, _) => Mode::TLS.to_vec(),
        (false, true) => Mode::PLAIN.to_vec(),
        (false, false) => args.mode.clone(),
    }
}

/// What was asked for, else a default.
fn chosen<T: Copy>(asked: &[T], all: &[T], few: &[T], quick: bool) -> Vec<T> {
    match (asked.is_empty(), quick) {
        (false, _) => asked.to_vec(),
        (true, true) => few.to_vec(),
        (true, false) => all.to_vec(),
    }
}

fn write(args: &Args, setting: &Setting, rows: &[Row]) -> Result<()> {
    let goals = goals::judge(rows);
    let report = Report { schema: 1, setting, rows, goals: &goals };
    std::fs::write(args.out.join("bench.json"), serde_json::to_string_pretty(&report)?)?;
    let said = format!(
        "{} MiB guest, {} MiB working set; each mode's run of median lost work; {}",
        args.memory_mib, args.working_set_mib, setting.date
    );
    std::fs::write(args.out.join("bench.svg"), svg::picture(rows, &said))?;
    let mut text = format!("{}\n\n`{}`\n\n{PARAMETERS}\n", setting.line(), setting.command);
    let mut panels: Vec<_> = rows.iter().map(|row| (row.case.backing, row.case.load)).collect();
    panels.dedup();
    for (backing, load) in panels {
        text += &format!("\n### {}, guest load: {}\n\n", backing.name(), load.label());
        text += &report::table(rows, backing, load);
    }
    text += "\n";
    for goal in &goals {
        text += &format!("- {}\n", goal.line());
    }
    std::fs::write(args.out.join("bench.md"), text)?;
    Ok(())
}
