//! Samples the guest's work every millisecond, from outside the guest.
//!
//! During a migration the guest's RAM is in two files. The sampler reads the beacon's page in both and uses the larger count: the
//! page at the destination may not have arrived yet, or may come from an earlier round.

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, bail};
use nix::sys::time::TimeValLike;
use nix::time::{ClockId, ClockNanosleepFlags, clock_gettime, clock_nanosleep};
use vmove_guest::beacon::Beacon;

use crate::beacon::BeaconPage;

/// CLOCK_MONOTONIC, in nanoseconds. All times in this crate use this clock.
#[must_use]
pub fn now() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |time| time.num_nanoseconds().unsigned_abs())
}

/// The guest's counters at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// When they were read, in nanoseconds of [`now`].
    pub at: u64,
    /// Pages rewritten since the guest started.
    pub work: u64,
    /// Periods begun since the guest started.
    pub beats: u64,
}

/// Looks for a RAM file that may not exist yet. It is called every few milliseconds until it returns one.
type Locate = Box<dyn FnMut() -> Option<PathBuf> + Send>;

struct Watched {
    offset: u64,
    pages: Vec<BeaconPage>,
    wanted: Vec<Locate>,
    samples: Vec<Sample>,
    last: Option<Beacon>,
}

/// Samples until it is stopped or dropped.
pub struct Sampler {
    watched: Arc<Mutex<Watched>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    boot: u64,
}

impl std::fmt::Debug for Sampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sampler").field("boot", &self.boot).finish_non_exhaustive()
    }
}

impl Sampler {
    /// Starts sampling `page` every `interval`.
    ///
    /// # Errors
    /// When there is no beacon in it.
    pub fn start(page: BeaconPage, interval: Duration) -> Result<Self> {
        let Some(beacon) = page.read() else { bail!("there is no beacon in this page") };
        let offset = page.offset();
        // Capacity for one minute, so that no sample is delayed by a reallocation.
        let samples = Vec::with_capacity(60_000);
        let mut watched = Watched { offset, pages: vec![page], wanted: Vec::new(), samples, last: None };
        // The first sample is taken at once.
        watched.take(beacon.boot);
        let watched = Arc::new(Mutex::new(watched));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let (watched, stop) = (Arc::clone(&watched), Arc::clone(&stop));
            std::thread::Builder::new().name("sampler".into()).spawn(move || {
                crate::priority::be_punctual();
                sample(&watched, &stop, interval, beacon.boot);
            })?
        };
        Ok(Self { watched, stop, thread: Some(thread), boot: beacon.boot })
    }

    /// Watches another RAM file as well, as soon as `locate` finds it.
    pub fn also(&self, locate: impl FnMut() -> Option<PathBuf> + Send + 'static) {
        lock(&self.watched).wanted.push(Box::new(locate));
    }

    /// The newest beacon: that of the file with the larger count. For verdicts and progress.
    #[must_use]
    pub fn last(&self) -> Option<Beacon> {
        lock(&self.watched).last.clone()
    }

    /// The newest counters.
    #[must_use]
    pub fn newest(&self) -> Option<Sample> {
        lock(&self.watched).samples.last().copied()
    }

    /// All samples so far.
    #[must_use]
    pub fn series(&self) -> Series {
        Series { samples: lock(&self.watched).samples.clone() }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(watched: &Mutex<Watched>) -> std::sync::MutexGuard<'_, Watched> {
    watched.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sample(watched: &Mutex<Watched>, stop: &AtomicBool, interval: Duration, boot: u64) {
    let step = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX);
    let mut next = now();
    let mut tick = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        let mut watched = lock(watched);
        if tick.is_multiple_of(4) && !watched.wanted.is_empty() {
            watched.look_for_files();
        }
        if tick.is_multiple_of(16) {
            // A deleted RAM file is closed, so that its memory can be freed.
            watched.pages.retain(BeaconPage::has_name);
        }
        watched.take(boot);
        drop(watched);
        tick += 1;
        // Late ticks are skipped, not repeated.
        next = (next + step).max(now());
        let until = nix::sys::time::TimeSpec::nanoseconds(i64::try_from(next).unwrap_or(i64::MAX));
        let _ = clock_nanosleep(ClockId::CLOCK_MONOTONIC, ClockNanosleepFlags::TIMER_ABSTIME, &until);
    }
}

impl Watched {
    fn look_for_files(&mut self) {
        let mut still_wanted = Vec::new();
        for mut locate in self.wanted.drain(..) {
            match locate().and_then(|path| File::open(path).ok()) {
                Some(file) => self.pages.push(BeaconPage::at(file, self.offset)),
                None => still_wanted.push(locate),
            }
        }
        self.wanted = still_wanted;
    }

    fn take(&mut self, boot: u64) {
        let newest = self
            .pages
            .iter()
            .filter_map(BeaconPage::read)
            .filter(|beacon| beacon.boot == boot)
            .max_by_key(|beacon| (beacon.work, beacon.beats, beacon.uptime_ms));
        let at = now();
        if let Some(beacon) = newest {
            // If only an outdated page can be read (the newer one is gone, the other one not there yet), the count does not go back.
            let before = self.samples.last().map_or((0, 0), |s| (s.work, s.beats));
            let (work, beats) = (beacon.work.max(before.0), beacon.beats.max(before.1));
            self.samples.push(Sample { at, work, beats });
            self.last = Some(beacon);
        }
    }
}

/// The counter that measures the guest's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// Pages rewritten.
    Work,
    /// Periods begun, for a guest that rewrites nothing.
    Beats,
}

impl Sample {
    /// The counter for `measure`.
    #[must_use]
    pub const fn value(&self, measure: Measure) -> u64 {
        match measure {
            Measure::Work => self.work,
            Measure::Beats => self.beats,
        }
    }
}

/// Counters over time.
#[derive(Debug, Clone, Default)]
pub struct Series {
    /// Sorted by time.
    pub samples: Vec<Sample>,
}

/// The guest's work in a period of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Loss {
    /// Work not done, in milliseconds of full-rate work.
    pub lost_ms: f64,
    /// When the guest was back at its full rate, in nanoseconds of [`now`].
    pub full_rate_at: u64,
    /// Whether it was back before the series ended.
    pub recovered: bool,
}

#[expect(clippy::cast_precision_loss, reason = "counts and nanoseconds of minutes are below 2^53")]
impl Series {
    /// Units of work per second between two moments; `None` if there are no samples of both.
    #[must_use]
    pub fn rate(&self, measure: Measure, from: u64, to: u64) -> Option<f64> {
        let (first, last) = (self.at(from)?, self.at(to)?);
        let span = last.at.checked_sub(first.at).filter(|s| *s > 0)?;
        Some((last.value(measure) - first.value(measure)) as f64 * 1e9 / span as f64)
    }

    /// The last sample at or before `at`.
    #[must_use]
    pub fn at(&self, at: u64) -> Option<&Sample> {
        let index = self.samples.partition_point(|s| s.at <= at);
        index.checked_sub(1).and_then(|i| self.samples.get(i))
    }

    /// Work lost from `start` until the guest runs at full rate again. The return to full rate is searched from `ended` on (the end of
    /// the migration, or the resumption of the guest).
    ///
    /// The guest is at full rate at a moment if it does at least 97 % of `full_rate` in the quarter of a second after it. It never
    /// catches up, so the loss is the work at `full_rate` since `start`, minus the work that was done.
    #[must_use]
    pub fn loss(&self, measure: Measure, full_rate: f64, start: u64, ended: u64) -> Option<Loss> {
        const WINDOW: u64 = 250_000_000;
        const FULL: f64 = 0.97;
        let first = self.at(start)?;
        let end = self.samples.last()?.at;
        let mut at = ended;
        let recovered = loop {
            if at + WINDOW > end {
                break false;
            }
            if self.rate(measure, at, at + WINDOW)? >= FULL * full_rate {
                break true;
            }
            at += 1_000_000;
        };
        let until = self.at(if recovered { at } else { end })?;
        let done = (until.value(measure) - first.value(measure)) as f64;
        let owed = (until.at - first.at) as f64 / 1e9 * full_rate;
        Some(Loss { lost_ms: (owed - done) / full_rate * 1e3, full_rate_at: until.at, recovered })
    }

    /// Rates in whole buckets of `bucket` nanoseconds between `from` and `to`: (middle of the bucket, units in a second).
    #[must_use]
    pub fn throughput(&self, measure: Measure, from: u64, to: u64, bucket: u64) -> Vec<(u64, f64)> {
        (from..to)
            .step_by(usize::try_from(bucket.max(1)).unwrap_or(usize::MAX))
            .filter(|at| at + bucket <= to)
            .filter_map(|at| {
                let (first, last) = (self.at(at)?, self.at(at + bucket)?);
                // Divided by the length of the bucket: during a stall, both ends are the same sample.
                let done = last.value(measure) - first.value(measure);
                Some((at + bucket / 2, done as f64 * 1e9 / bucket as f64))
            })
            .collect()
    }

    /// The longest time in which the guest did no work between two moments, in nanoseconds.
    #[must_use]
    pub fn longest_stall(&self, measure: Measure, from: u64, to: u64) -> u64 {
        let mut longest = 0;
        let mut since: Option<Sample> = None;
        for sample in self.samples.iter().filter(|s| (from..=to).contains(&s.at)) {
            match since {
                Some(last) if last.value(measure) == sample.value(measure) => {
                    longest = longest.max(sample.at - last.at);
                }
                _ => since = Some(*sample),
            }
        }
        longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// A guest with 100 units per millisecond. It stands still from 1000 to 1040 ms and runs at half rate until 1140 ms.
    fn series() -> Series {
        let mut work = 0;
        let samples = (0..3000)
            .map(|ms| {
                work += match ms {
                    1000..1040 => 0,
                    1040..1140 => 50,
                    _ => 100,
                };
                Sample { at: ms * MS, work, beats: ms }
            })
            .collect();
        Series { samples }
    }

    #[test]
    fn lost_work_adds_stalls_and_slowness() {
        let series = series();
        let rate = series.rate(Measure::Work, 0, 900 * MS).expect("a rate");
        assert!((rate - 100_000.0).abs() < 1.0, "{rate}");
        let loss = series.loss(Measure::Work, rate, 990 * MS, 1050 * MS).expect("a loss");
        assert!(loss.recovered);
        // 40 ms of stall and 100 ms at half rate. Full rate is found a little early, because 97 % of a window suffice.
        assert!((loss.lost_ms - 90.0).abs() < 8.0, "{loss:?}");
        assert!(loss.full_rate_at >= 1120 * MS, "{loss:?}");
    }

    #[test]
    fn a_guest_that_never_recovers_is_told() {
        let mut series = series();
        series.samples.truncate(1100);
        assert!(!series.loss(Measure::Work, 100_000.0, 990 * MS, 1050 * MS).expect("a loss").recovered);
    }

    #[test]
    fn a_stall_and_its_throughput_are_seen() {
        let series = series();
        assert_eq!(series.longest_stall(Measure::Work, 0, 3000 * MS), 40 * MS);
        let throughput = series.throughput(Measure::Work, 900 * MS, 1100 * MS, 10 * MS);
        assert_eq!(throughput.len(), 20);
        // What is left of a bucket at the end would look like a guest that stops.
        let cut = series.throughput(Measure::Work, 900 * MS, 1105 * MS, 10 * MS);
        assert_eq!(cut, throughput);
        assert!(
            throughput[1].1 > 99_000.0 && throughput[11].1 < 1.0 && throughput[16].1 < 51_000.0,
            "{throughput:?}"
        );
    }
}
