//! One run: boots a guest, measures its full rate, moves it, and measures what the move cost.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use vmove_guest::config::{Config, Rate};
use vmove_guest::pattern::PAGE_BYTES;

use super::ballast::Ballast;
use super::cpu::{CpuWatch, Used};
use super::mover::{Backing, FaultTimes, Mode, Movable, Moved};
use super::{qemu, vmove};
use crate::guest::{Accel, Guest, failures};
use crate::payload::{self, KvmPages};
use crate::process::loopback_bytes;
use crate::sampler::{Measure, Sampler, Series, now};
use crate::sandbox::Sandbox;

/// How fast the guest writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// It rewrites nothing, but its working set is filled.
    Idle,
    /// 100,000 pages per second, in random order.
    Steady,
    /// As many pages as it can, in random order.
    Max,
    /// Not the emulated Linux guest, but the [payload] under KVM: 1,000 pages per second, in random order. KVM's timer makes up for ticks
    /// that the guest has missed while it ran, so its lost work is mostly that of the pause.
    Kvm,
}

impl Load {
    /// The name in tables.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Steady => "100k pages/s",
            Self::Max => "max",
            Self::Kvm => "payload under KVM, 1k pages/s",
        }
    }

    const fn rate(self) -> Rate {
        match self {
            Self::Idle => Rate::PagesPerSecond(0),
            Self::Steady => Rate::PagesPerSecond(100_000),
            Self::Max => Rate::Max,
            Self::Kvm => Rate::PagesPerSecond(1_000),
        }
    }

    /// Whether a guest with this load can run here.
    ///
    /// # Errors
    /// What is missing.
    pub fn possible(self) -> Result<()> {
        if self == Self::Kvm { Accel::Kvm.usable() } else { Ok(()) }
    }

    /// The counter of the guest's work. An idle guest still begins its periods.
    const fn measure(self) -> Measure {
        match self {
            Self::Idle => Measure::Beats,
            _ => Measure::Work,
        }
    }
}

/// The settings of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Case {
    /// How the guest is moved.
    pub mode: Mode,
    /// The backing of its memory.
    pub backing: Backing,
    /// How fast it writes.
    pub load: Load,
    /// Its memory, in MiB.
    pub memory_mib: u32,
    /// Its working set, in MiB.
    pub working_set_mib: u32,
    /// QEMU program.
    pub qemu: PathBuf,
    /// Leave free memory as it is, see [`super::ballast`].
    pub cold_memory: bool,
}

impl Case {
    /// With the memory of the guest that this load is for.
    #[must_use]
    pub fn sized(self) -> Self {
        if self.load != Load::Kvm {
            return self;
        }
        let config = payload::measured();
        Self { memory_mib: payload::memory_mib(&config), working_set_mib: config.working_set_mib, ..self }
    }

    fn guest(&self, sandbox: &Sandbox) -> Result<Guest> {
        let mut guest = if self.load == Load::Kvm {
            let config = Config { rate: self.load.rate(), ..payload::measured() };
            payload::guest(sandbox.path(), Accel::Kvm, &config, KvmPages::All)?
        } else {
            let config =
                Config { working_set_mib: self.working_set_mib, rate: self.load.rate(), ..Config::default() };
            Guest::new(self.memory_mib, config)?
        };
        guest.qemu.clone_from(&self.qemu);
        guest.aligned = self.mode.is_aligned();
        Ok(guest)
    }
}

impl Outcome {
    /// Whether the guest's full rate changed by more than a tenth during the run. The move cannot be the cause of that.
    #[must_use]
    pub fn is_disturbed(&self) -> bool {
        self.full_rate_after.is_some_and(|after| (after / self.full_rate - 1.0).abs() > 0.1)
    }
}

/// The result of a run. Times are in milliseconds after the request.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Outcome {
    /// From the request until everything is at the destination. This includes the start of its QEMU.
    pub total_ms: f64,
    /// The same, but from the moment when the destination was ready.
    pub total_without_start_ms: f64,
    /// From the source's STOP event to the destination's RESUME event.
    pub downtime_ms: f64,
    /// Work that the guest missed from the request until it ran at full rate again, in milliseconds of full-rate work.
    pub lost_work_ms: f64,
    /// When the guest ran at full rate again; `None`: not while it was watched after the move.
    pub full_rate_ms: Option<f64>,
    /// Longest time in which the guest did no work at all.
    pub longest_stall_ms: f64,
    /// Work per second before the request: pages, or periods of an idle guest.
    pub full_rate: f64,
    /// The same at the end of the run, at full rate again. If it differs much from [`Self::full_rate`], other programs used the
    /// processors, and the lost work is inexact.
    pub full_rate_after: Option<f64>,
    /// Bytes on the wire, as counted by the mover.
    pub wire_bytes: u64,
    /// Bytes sent on the loopback interface meanwhile, by any process.
    pub loopback_bytes: u64,
    /// Bytes of guest memory in pages that were not zero at the request.
    pub nonzero_bytes: u64,
    /// CPU time and daemon memory, from the request until everything was at the destination.
    pub used: Used,
    /// Latency of page faults at the destination, if the mover reports it.
    pub faults: Option<FaultTimes>,
    /// Time of a scan for dirty pages, in microseconds per GiB, if the mover reports it.
    pub scan_us_per_gib: Option<f64>,
    /// Errors that the guest found in its memory.
    pub guest_errors: u64,
    /// The guest's own verdict on its memory.
    pub verdict: String,
    /// Further remarks of the mover.
    pub note: String,
    /// Guest work over time: (milliseconds after the request, work per second), in buckets of [`BUCKET_MS`].
    pub throughput: Vec<(f64, f64)>,
}

/// Width of the buckets of [`Outcome::throughput`].
pub const BUCKET_MS: u64 = 20;

/// Time in which the full rate is measured before the request.
const BASELINE: Duration = Duration::from_millis(1500);
/// Wait before that: the guest's first moments after it has filled its memory are not typical.
const WARM_UP: Duration = Duration::from_millis(300);
/// Longest time for which a guest is watched after the move until it is back at full rate.
const RECOVERY: Duration = Duration::from_secs(5);

/// Runs `case` once.
///
/// # Errors
/// When the guest does not start, or the move fails or is refused. The message says which of them.
pub fn run(case: &Case) -> Result<Outcome> {
    let sandbox = Sandbox::new()?;
    let outcome = run_in(case, &sandbox);
    // Processes and mounts are removed before the next case begins.
    drop(sandbox);
    outcome
}

fn run_in(case: &Case, sandbox: &Sandbox) -> Result<Outcome> {
    let guest = case.guest(sandbox)?;
    let mut machine = boot(case.mode, case.backing, &guest, sandbox)?;
    // A quarter more than the destination needs, because other programs use some of it.
    let ballast = (!case.cold_memory).then(|| Ballast::take(guest.bytes() / 4 * 5)).transpose()?;
    let nonzero_bytes = nonzero(&machine.ram())?;

    let sampler = Sampler::start(machine.beacon()?, Duration::from_millis(1))?;
    sampler.also(machine.destination_ram());
    std::thread::sleep(WARM_UP);
    let baseline_from = now();
    std::thread::sleep(BASELINE);
    let measure = case.load.measure();
    let full_rate =
        sampler.series().rate(measure, baseline_from, now()).context("no samples of the full rate")?;

    let watch = CpuWatch::start(machine.processes());
    drop(ballast);
    let loopback = loopback_bytes();
    let moved = machine.migrate()?;
    let used = watch.used();
    let loopback_bytes = loopback_bytes().saturating_sub(loopback);
    drop(watch);

    let series = recovered(&sampler, measure, full_rate, &moved);
    let last = sampler.last().context("the beacon was lost")?;
    drop(sampler);
    let told = failures(&machine.console());
    let mut outcome = evaluate(&series, measure, full_rate, &moved)?;
    outcome.nonzero_bytes = nonzero_bytes;
    outcome.loopback_bytes = loopback_bytes;
    outcome.used = used;
    outcome.guest_errors = last.errors.max(told.len() as u64);
    outcome.verdict = told.first().cloned().unwrap_or_else(|| last.verdict());
    Ok(outcome)
}

/// Samples until the guest is back at full rate, and half a second longer for the picture.
fn recovered(sampler: &Sampler, measure: Measure, full_rate: f64, moved: &Moved) -> Series {
    let deadline = Instant::now() + RECOVERY;
    loop {
        std::thread::sleep(Duration::from_millis(500));
        let series = sampler.series();
        let loss = series.loss(measure, full_rate, moved.requested, moved.ended);
        if loss.is_some_and(|loss| loss.recovered) || Instant::now() > deadline {
            return series;
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "nanoseconds of minutes are below 2^53")]
fn evaluate(series: &Series, measure: Measure, full_rate: f64, moved: &Moved) -> Result<Outcome> {
    let since = |at: u64| at.saturating_sub(moved.requested) as f64 / 1e6;
    // The guest may be back at full rate before the last page has crossed, but with pre-copy not before it has resumed. So full
    // rate is searched from the resumption on.
    let loss = series
        .loss(measure, full_rate, moved.requested, moved.resumed.unwrap_or(moved.ended).min(moved.ended))
        .context("the guest was not sampled")?;
    let until = loss.full_rate_at.max(moved.ended);
    let end = series.samples.last().map_or(until, |sample| sample.at);
    let full_rate_after = loss.recovered.then(|| series.rate(measure, until, end)).flatten();
    let picture =
        series.throughput(measure, moved.requested.saturating_sub(200_000_000), end, BUCKET_MS * 1_000_000);
    Ok(Outcome {
        total_ms: since(moved.ended),
        total_without_start_ms: since(moved.ended) - since(moved.began),
        downtime_ms: moved.downtime_ms,
        lost_work_ms: loss.lost_ms,
        full_rate_ms: loss.recovered.then(|| since(loss.full_rate_at)),
        longest_stall_ms: series.longest_stall(measure, moved.requested, until) as f64 / 1e6,
        full_rate,
        full_rate_after,
        wire_bytes: moved.wire_bytes,
        faults: moved.faults,
        scan_us_per_gib: moved.scan_us_per_gib,
        note: moved.note.clone(),
        throughput: picture
            .into_iter()
            .map(|(at, rate)| (at as f64 / 1e6 - moved.requested as f64 / 1e6, rate))
            .collect(),
        ..Outcome::default()
    })
}

/// Bytes in pages that are not zero. Holes are not filled by reading them.
///
/// # Errors
/// A file cannot be read.
pub fn nonzero(files: &[PathBuf]) -> Result<u64> {
    let mut bytes = 0;
    let mut chunk = vec![0; 4 << 20];
    for path in files {
        let file = std::fs::File::open(path).with_context(|| format!("could not open {}", path.display()))?;
        let mut at = 0;
        loop {
            let read = file.read_at(&mut chunk, at)?;
            if read == 0 {
                break;
            }
            let pages = chunk[..read].chunks(PAGE_BYTES);
            bytes +=
                pages.filter(|page| page.iter().any(|byte| *byte != 0)).count() as u64 * PAGE_BYTES as u64;
            at += read as u64;
        }
    }
    Ok(bytes)
}

/// Boots `guest` so that it can be moved in `mode`.
fn boot(mode: Mode, backing: Backing, guest: &Guest, sandbox: &Sandbox) -> Result<Box<dyn Movable>> {
    if mode.is_vmove() {
        vmove::boot(mode, backing, guest, sandbox)
    } else {
        qemu::boot(mode, backing, guest, sandbox)
    }
}

/// A case and all its runs.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The case.
    pub case: Case,
    /// The run with the median of the lost work; `None` when none succeeded.
    #[serde(skip)]
    pub median: Option<Outcome>,
    /// All runs that succeeded.
    pub runs: Vec<Outcome>,
    /// The errors of the runs that failed.
    pub failures: Vec<String>,
}

impl Row {
    /// A case and its runs.
    #[must_use]
    pub fn new(case: Case, results: Vec<anyhow::Result<Outcome>>) -> Self {
        let (mut runs, mut failures) = (Vec::new(), Vec::new());
        for result in results {
            match result {
                Ok(outcome) => runs.push(outcome),
                Err(error) => failures.push(format!("{error:#}")),
            }
        }
        runs.sort_by(|x: &Outcome, y| x.lost_work_ms.total_cmp(&y.lost_work_ms));
        // For an even number of runs, the worse of the two in the middle, so that figures do not flatter.
        let median = runs.get(runs.len() / 2).cloned();
        Self { case, median, runs, failures }
    }
}
