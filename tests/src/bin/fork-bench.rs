//! `./run bench fork`: forks, beside what QEMU alone can do. See `vmove_tests::bench::fork`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Parser;
use vmove_tests::bench::fork::qemu::Recipe;
use vmove_tests::bench::fork::report::Report;
use vmove_tests::bench::fork::{again, goals, guest, hosts, local, memory, qemu};
use vmove_tests::bench::report::Setting;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::forks::Parent;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::ready;

const PARAMETERS: &str =
    "QEMU's ways: max-bandwidth 1 TB/s, all else at its defaults; files in memory; guests write 200 pages/s";
/// Memory of a guest and what it has filled of it, in MiB.
const BIG: (u32, u32) = (1024, 512);
const SMALL: (u32, u32) = (256, 64);
/// What guests write that are not idle.
const PAGES_PER_SECOND: u32 = 200;

/// How fast children run, and what they cost, beside QEMU's own ways.
#[derive(Debug, Parser)]
#[command(name = "./run bench fork")]
struct Arguments {
    /// Children of the 1 GiB guest, and of QEMU's VM templating
    #[arg(long, default_value_t = 32)]
    children: usize,
    /// Children of the 256 MiB guest
    #[arg(long, default_value_t = 100)]
    many: usize,
    /// Rounds of each measurement; the median counts [0: only forks of one guest, and other hosts, once]
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Children for which all ways stand side by side: QEMU's saving, copying and loading takes them long, and some 1.3 GiB
    /// for each [0: without QEMU's ways]
    #[arg(long, default_value_t = 8)]
    qemu_children: usize,
    /// Forks of one busy guest, one each second, and its migrations right after a fork [0: none]
    #[arg(long, default_value_t = 10)]
    repeat: usize,
    /// Other hosts, each in a network namespace of its own [0: none]
    #[arg(long, default_value_t = 4)]
    hosts: u8,
    /// Speed of the parent's link, in Mbit/s; multicast takes eight tenths of it
    #[arg(long, default_value_t = 400)]
    mbit: u32,
    /// Print JSON only
    #[arg(long)]
    json: bool,
    /// Folder for fork.json and fork.md
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
    /// End with 1 if a promise is not kept
    #[arg(long)]
    strict: bool,
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench fork: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool> {
    let arguments = Arguments::parse();
    ready()?;
    let out = &arguments.out;
    let mut report = Report::new(Setting::begin("./run bench fork", PARAMETERS, out)?);
    let result = measure(&arguments, &mut report);
    // Prints what was measured, even if something failed.
    if arguments.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!("{}\nwritten: {1}/fork.json, {1}/fork.md", report.text(), out.display());
    }
    result?;
    let kept = !arguments.strict || report.goals.iter().all(|goal| goal.holds);
    Ok(report.guest_errors() == 0 && kept)
}

/// Runs all parts in turn and writes the results after each.
fn measure(arguments: &Arguments, report: &mut Report) -> Result<()> {
    if arguments.rounds > 0 {
        let sandbox = Sandbox::new()?;
        room(arguments)?;
        ours(arguments, &sandbox, report)?;
        write(arguments, report)?;
        theirs(arguments, &sandbox, report)?;
        write(arguments, report)?;
    }
    if arguments.repeat > 0 {
        let sandbox = Sandbox::new()?;
        let (a, b) = Node::pair(&sandbox, &NodeOptions::default())?;
        let parent = Parent::start(&a, "busy", "thp", again::guest(BIG.0, BIG.1)?)?;
        let rounds = arguments.rounds.max(1);
        report.again = Some(again::series(&a, &b, &parent, arguments.repeat, rounds)?);
        write(arguments, report)?;
    }
    if arguments.hosts > 0 {
        report.hosts = hosts::spread(arguments.hosts, arguments.mbit)?;
    }
    write(arguments, report)
}

/// Refuses settings at once that would make a later part fail.
fn room(arguments: &Arguments) -> Result<()> {
    let children = arguments.qemu_children;
    let needed = Recipe::SaveCopyLoad.needed_mib(&guest(BIG.0, BIG.1, PAGES_PER_SECOND)?, children);
    let available = memory::available_mib()?;
    ensure!(
        children == 0 || needed as f64 <= available,
        "expected {needed} MiB of available memory for {children} children that QEMU saves, copies and loads, found \
         {available:.0} MiB; name fewer with --qemu-children"
    );
    Ok(())
}

/// vmove's forks on one host.
fn ours(arguments: &Arguments, sandbox: &Sandbox, report: &mut Report) -> Result<()> {
    let node = Node::start(sandbox, "a", NodeOptions::default())?;
    let big = Parent::start(&node, "big", "thp", guest(BIG.0, BIG.1, PAGES_PER_SECOND)?)?;
    for count in counts(arguments) {
        report.forks.push(local::forks(&node, &big, count, arguments.rounds)?);
    }
    report.saves_ms = local::saves(&node, &big, arguments.rounds)?;
    node.ask(&["stop", "big", "--force"])?;
    let small = Parent::start(&node, "small", "thp", guest(SMALL.0, SMALL.1, PAGES_PER_SECOND)?)?;
    report.forks.push(local::forks(&node, &small, arguments.many, arguments.rounds)?);
    node.ask(&["stop", "small", "--force"])?;
    report.memory = Some(memory::idle(&node, guest(BIG.0, BIG.1, 0)?, arguments.children)?);
    Ok(())
}

/// QEMU's ways, of the same guest.
fn theirs(arguments: &Arguments, sandbox: &Sandbox, report: &mut Report) -> Result<()> {
    if arguments.qemu_children == 0 {
        return Ok(());
    }
    let big = guest(BIG.0, BIG.1, PAGES_PER_SECOND)?;
    let (few, rounds) = ([arguments.qemu_children], arguments.rounds);
    report.qemu = qemu::forks(Recipe::SaveCopyLoad, sandbox, &big, &few, rounds)?;
    report.qemu.extend(qemu::forks(Recipe::Templating, sandbox, &big, &counts(arguments), rounds)?);
    Ok(())
}

/// Numbers of children of the 1 GiB guest.
fn counts(arguments: &Arguments) -> Vec<usize> {
    let mut counts = vec![arguments.children, arguments.qemu_children];
    counts.retain(|count| *count > 0);
    counts.dedup();
    counts
}

fn write(arguments: &Arguments, report: &mut Report) -> Result<()> {
    report.goals = goals::judge(report);
    std::fs::write(arguments.out.join("fork.json"), serde_json::to_string_pretty(report)?)?;
    std::fs::write(arguments.out.join("fork.md"), report.text())?;
    Ok(())
}
