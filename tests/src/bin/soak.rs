//! `./run soak`: a guest under load moves to and fro between two daemons for as long as asked, in changing modes. Ends
//! at the first error that the guest finds, or the first move that fails. With `--blows`, what takes part is killed, frozen, cut off and
//! filled meanwhile.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use vmove_guest::config::{Config, Rate};
use vmove_tests::blows::field::Kind;
use vmove_tests::blows::{self, BEYOND_TIMEOUTS, Plan, Until, deck};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::{Accel, Guest, failures};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::{cluster_walk, groups, interrupt, payload, places};

const NAME: &str = "soak";

const EXAMPLES: &str = "Examples:
  ./run soak 30                              under load for 30 minutes; nothing is killed
  ./run soak --blows --minutes 20            kills, freezes, cuts and fills for 20 minutes, by a seed that it prints
  ./run soak --blows --seed 7 --moves 12     twelve migrations, which the seed 7 chooses
  ./run soak --blows --seed 7 --step 4       step 4 of these again, on a guest of its own
  ./run soak --blows --moves 500 --lanes 4   five hundred, by four pairs of daemons at the same time
  ./run soak --blows --only fetch --only kill --moves 10
                                             only what is killed while pages are fetched
  ./run soak --blows --minutes 60 --json >soak.json
  ./run soak --groups 20                     two guests at one barrier, twenty times, with a blow each: both there or both back
  ./run soak --clusters 100                  clusters on eight nodes, in a hundred random sequences, with bridges and daemons killed";

/// Moves a guest to and fro: under load, or with blows at random moments.
#[derive(Debug, Parser)]
#[command(name = "./run soak", after_help = EXAMPLES)]
struct Args {
    /// For how long
    #[arg(default_value_t = 10)]
    minutes: u64,
    /// Kill, freeze, cut off and fill what takes part, at random moments; with a small guest, which the options of memory and load do not change
    #[arg(long)]
    blows: bool,
    /// Decides what each step does; default: another one each time
    #[arg(long)]
    seed: Option<u64>,
    /// Ends with the step that is under way after so many minutes
    #[arg(long = "minutes", value_name = "MINUTES", requires = "blows", conflicts_with_all = ["moves", "step"])]
    minutes_of_blows: Option<u64>,
    /// Ends after so many migrations; forks and blows at rest between them do not count
    #[arg(long, value_name = "MIGRATIONS", requires = "blows", conflicts_with = "step")]
    moves: Option<u64>,
    /// So many pairs of daemons at the same time, each pair with a guest of its own; most steps wait. Each takes some 0.7 GiB of memory
    #[arg(long, value_name = "PAIRS", default_value_t = 1, requires = "blows", conflicts_with = "step")]
    lanes: usize,
    /// Takes only the step of this number
    #[arg(long, requires = "seed")]
    step: Option<u64>,
    /// A guest of a few hundred instructions under KVM, in place of an emulated Linux
    #[arg(long, requires = "blows")]
    kvm: bool,
    /// Only steps of this moment, victim or blow; several words must all be in a step (see docs/testing.md)
    #[arg(long, value_name = "WORD", requires = "blows")]
    only: Vec<String>,
    /// Print the report as one JSON object; steps are told on stderr
    #[arg(long, requires = "blows")]
    json: bool,
    /// Move two small guests at one barrier so many times, and kill a daemon or a QEMU each time
    #[arg(long, value_name = "TRIES", conflicts_with = "blows")]
    groups: Option<u64>,
    /// Start, resize, move and stop clusters on eight nodes in so many sequences of random steps, while bridges and daemons are killed
    #[arg(long, value_name = "SEQUENCES", conflicts_with_all = ["blows", "groups"])]
    clusters: Option<u64>,
    /// Guest memory in MiB
    #[arg(long, default_value_t = 1024)]
    memory_mib: u32,
    /// Part of it that the guest fills and rewrites, in MiB
    #[arg(long, default_value_t = 512)]
    working_set_mib: u32,
    /// Pages of 4 KiB that the guest rewrites in a second
    #[arg(long, default_value_t = 50_000)]
    rate: u32,
    /// Virtual CPUs, each with its share of the pages
    #[arg(long, default_value_t = 2)]
    threads: u32,
    /// What guest memory is made of: thp or hugetlb-2m
    #[arg(long, default_value = "thp")]
    memory: String,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let ready = interrupt::clean_up_when_interrupted().and_then(|()| places::root());
    let mut sandbox = match ready.and_then(|()| Sandbox::new()) {
        Ok(sandbox) => sandbox,
        Err(error) => {
            eprintln!("soak: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    if args.blows {
        return strike(&args, &mut sandbox);
    }
    if let Some(tries) = args.groups {
        return strike_groups(tries, args.seed.unwrap_or_else(from_the_clock));
    }
    if let Some(sequences) = args.clusters {
        return walk_clusters(sequences, args.seed.unwrap_or_else(from_the_clock));
    }
    let mut moves = 0;
    let result = soak(&args, &sandbox, &mut moves);
    match result {
        Ok(()) => {
            println!("{moves} passed, 0 failed");
            ExitCode::SUCCESS
        }
        Err(error) => {
            sandbox.keep();
            eprintln!("soak: {error:#}\nlogs are in {}", sandbox.path().display());
            println!("{moves} passed, 1 failed");
            ExitCode::FAILURE
        }
    }
}

fn from_the_clock() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| u64::from(now.subsec_nanos()))
}

fn walk_clusters(sequences: u64, seed: u64) -> ExitCode {
    println!("seed {seed}");
    let walked = cluster_walk::ready(Accel::Tcg).and_then(|()| cluster_walk::Walk::new(Accel::Tcg));
    let walked = walked.and_then(|mut walk| {
        let walked =
            (0..sequences).try_for_each(|n| walk.sequence(seed.wrapping_add(n), cluster_walk::STEPS));
        println!("{:?}", walk.summary());
        walked
    });
    match walked {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("soak: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn strike_groups(tries: u64, seed: u64) -> ExitCode {
    println!("seed {seed}");
    match payload::ready(Accel::Tcg)
        .and_then(|()| groups::tries(Accel::Tcg, seed, tries, |line| println!("{line}")))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("soak: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn strike(args: &Args, sandbox: &mut Sandbox) -> ExitCode {
    let plan = Plan {
        seed: args.seed.unwrap_or_else(from_the_clock),
        first: args.step.unwrap_or(0),
        until: match (args.step, args.moves, args.minutes_of_blows) {
            (Some(_), ..) => Until::Steps(1),
            (_, Some(moves), _) => Until::Moves(moves),
            (.., minutes) => Until::Time(Duration::from_secs(minutes.unwrap_or(args.minutes) * 60)),
        },
        deck: deck::of_words(&args.only),
        options: options(args),
        lengths: BEYOND_TIMEOUTS,
        lanes: args.lanes,
        guest: if args.kvm { Kind::Kvm } else { Kind::Linux },
    };
    if args.kvm
        && let Err(error) = payload::ready(Accel::Kvm)
    {
        eprintln!("soak: {error:#}");
        return ExitCode::FAILURE;
    }
    let say = |line: &str| if args.json { eprintln!("{line}") } else { println!("{line}") };
    say(&format!("seed {}", plan.seed));
    match blows::soak(&plan, &sandbox.path().join("booted"), say) {
        Ok(tally) => {
            if args.json {
                println!("{:#}", tally.json(plan.seed));
            } else {
                println!("\nseed {}\n{}", plan.seed, tally.table());
            }
            if tally.is_harmless() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            sandbox.keep();
            eprintln!("soak: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Those that decide what a step is.
fn options(args: &Args) -> String {
    let kvm = args.kvm.then(|| " --kvm".to_owned());
    args.only.iter().map(|word| format!(" --only {word}")).chain(kvm).collect()
}

fn soak(args: &Args, sandbox: &Sandbox, moves: &mut u64) -> Result<()> {
    if args.memory != "thp" {
        sandbox.reserve_huge_pages(2 << 20, u64::from(args.memory_mib) << 21)?;
    }
    let nodes: [Node; 2] = Node::pair(sandbox, &NodeOptions::default())?.into();
    let config = Config {
        working_set_mib: args.working_set_mib,
        cold_mib: args.memory_mib / 8,
        rate: Rate::PagesPerSecond(args.rate),
        threads: args.threads,
        ..Config::default()
    };
    nodes[0].run_guest(NAME, &args.memory, &Guest::new(args.memory_mib, config)?)?;

    let end = Instant::now() + Duration::from_secs(args.minutes * 60);
    let modes = ["hybrid", "postcopy", "precopy", "auto", "postcopy", "hybrid"];
    while Instant::now() < end {
        let turn = usize::try_from(*moves)?;
        let (from, to) = (&nodes[turn % 2], &nodes[(turn + 1) % 2]);
        let mode = modes[turn % modes.len()];
        // Every other round of the modes, all pages are hashed on both sides.
        let verify = turn / modes.len() % 2 == 1;
        let options: &[&str] = if verify { &["--mode", mode, "--verify"] } else { &["--mode", mode] };
        let report = from.migrate(NAME, to.name(), options)?;
        if verify && report.verified != Some(true) {
            bail!("move {turn} was to be verified and was not: {:?}", report.verified);
        }
        // A shorter or longer stay at each node, so that some moves begin shortly after the one before.
        std::thread::sleep(Duration::from_millis([50, 700, 2500][turn % 3]));
        let vm = to.vm(NAME)?;
        let beacon = vm.beacon()?.read().context("the guest's beacon was lost")?;
        let told = failures(&vm.console());
        println!(
            "{turn:5} {} -> {} {:<9} total {:6.0} ms, down {:5.1} ms, faults {:6}, {}",
            from.name(),
            to.name(),
            report.mode,
            report.total_ms,
            report.downtime_ms,
            report.faults.count,
            beacon.verdict()
        );
        if beacon.errors > 0 || !told.is_empty() {
            bail!("the guest found its memory damaged: {told:?}");
        }
        *moves += 1;
    }
    Ok(())
}
