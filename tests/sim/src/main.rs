//! `./run sim`: many schedules, or one of them step by step.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use clap::Parser;
use vmove_sim::plan::Schedule;
use vmove_sim::run::{Report, run};

/// Where guest memory is.
const MEMORY: &str = "/dev/shm";
/// Violations that are told of before it ends.
const MOST_TOLD: u64 = 5;

/// Runs the sessions of two daemons under seeded schedules of crashes, cuts and failing disks.
#[derive(Debug, Parser)]
struct Flags {
    /// Run the schedule of this seed alone, and print all that happens.
    #[arg(long)]
    seed: Option<u64>,
    /// How many schedules to run.
    #[arg(long, default_value_t = 100_000)]
    schedules: u64,
    /// Seed of the first of them.
    #[arg(long, default_value_t = 1)]
    first: u64,
    /// Threads. 0: as many as there are processors.
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

/// A folder on tmpfs, for as long as it is needed.
struct Folder(PathBuf);

impl Folder {
    fn new(number: usize) -> anyhow::Result<Self> {
        // Names of one length: no seed may depend on the process.
        let path = Path::new(MEMORY).join(format!("vmove-sim-{:010}-{number:03}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    let done = match flags.seed {
        Some(seed) => one(seed),
        None => many(&flags),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("sim: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn one(seed: u64) -> anyhow::Result<bool> {
    let folder = Folder::new(0)?;
    println!("{:#?}", Schedule::of(seed));
    let report = run(Schedule::of(seed), &folder.0, true)?;
    println!("{:?} after {:?}, steps {:?}, hash {:016x}", report.end, report.took, report.steps, report.hash);
    tell(&report);
    Ok(report.violations.is_empty())
}

fn tell(report: &Report) {
    for violation in &report.violations {
        println!("seed {}: {violation}", report.schedule.seed);
    }
}

fn many(flags: &Flags) -> anyhow::Result<bool> {
    let threads = match flags.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        given => given,
    };
    let begun = Instant::now();
    let (next, bad) = (AtomicU64::new(flags.first), AtomicU64::new(0));
    let (struck, planned) = (AtomicU64::new(0), AtomicU64::new(0));
    let end = flags.first + flags.schedules;
    let ends = Mutex::new(BTreeMap::new());
    let worker = |number: usize| -> anyhow::Result<()> {
        let folder = Folder::new(number)?;
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end || bad.load(Ordering::Relaxed) >= MOST_TOLD {
                return Ok(());
            }
            let report = run(Schedule::of(seed), &folder.0, false)?;
            if !report.violations.is_empty() {
                bad.fetch_add(1, Ordering::Relaxed);
                tell(&report);
            }
            struck.fetch_add(report.struck as u64, Ordering::Relaxed);
            planned.fetch_add(report.schedule.blows.len() as u64, Ordering::Relaxed);
            if let Ok(mut ends) = ends.lock() {
                *ends.entry(report.end).or_insert(0_u64) += 1;
            }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|number| scope.spawn(move || worker(number))).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|_| anyhow::bail!("a schedule panicked")))
    })?;
    let took = begun.elapsed().as_secs_f64();
    let ends = ends.into_inner().unwrap_or_default();
    let ran: u64 = ends.values().sum();
    let bad = bad.into_inner();
    println!(
        "{ran} schedules in {took:.1} s, {:.0} a second; {ends:?}; {bad} with violations",
        ran as f64 / took
    );
    println!("{} of {} blows came in time", struck.into_inner(), planned.into_inner());
    if bad > 0 {
        println!("step by step: ./run sim --seed SEED");
    }
    Ok(bad == 0)
}
