//! One thread of the guest: its share of the pages, its part of the version table, its slot in the beacon.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::Release};

use vmove_guest::beacon::place;
use vmove_guest::config::{Config, Rate};
use vmove_guest::order::Pass;
use vmove_guest::pace::{Pacer, Quota};
use vmove_guest::pattern::{self, BadWord, Damage, FILLED, WORDS};
use vmove_guest::table;

use crate::memory::Region;
use crate::sys;

/// Rewrites between two looks at the clock when there is no fixed rate.
const MAX_RATE_BATCH: u64 = 64;
/// After so many errors a thread stays silent on the console; they are still counted.
const LINES: u64 = 8;

/// What all threads share.
#[derive(Debug, Clone, Copy)]
pub struct Shared {
    pub beacon: &'static [AtomicU64; WORDS],
    pub pages: Region,
    pub boot: u64,
}

impl Shared {
    pub fn set(&self, at: usize, value: u64) {
        self.beacon[at].store(value, Relaxed);
    }
}

#[derive(Debug)]
pub struct Worker {
    id: usize,
    shared: Shared,
    config: Config,
    /// Pages that this thread rewrites.
    hot: Range<u32>,
    /// Pages that this thread only reads.
    cold: Range<u32>,
    /// Versions of the hot pages.
    table: Vec<u64>,
    /// Passes completed: foretells every version.
    passes: u32,
    pass: Pass,
    /// Where the verifier is, among hot and then cold pages.
    verify_at: u32,
    counts: Counts,
}

/// What the slot in the beacon must hold; kept here as well, to notice a beacon that went stale.
#[derive(Debug, Default)]
struct Counts {
    work: u64,
    verified: u64,
    errors: u64,
    beats: u64,
    lost_ns: u64,
}

/// An equal share of `range` for one of `threads`.
fn share(range: Range<u32>, thread: usize, threads: usize) -> Range<u32> {
    let len = u64::from(range.end - range.start);
    // Never beyond range.end, so the conversion cannot fail.
    let cut = |t: usize| range.start + u32::try_from(len * t as u64 / threads as u64).unwrap_or(u32::MAX);
    cut(thread)..cut(thread + 1)
}

impl Worker {
    /// Fills the thread's share of the pages.
    pub fn fill(id: usize, shared: Shared, config: &Config) -> Self {
        let threads = config.threads as usize;
        let hot = share(0..config.working_pages(), id, threads);
        let cold = share(config.working_pages()..config.working_pages() + config.cold_pages(), id, threads);
        let mut table = Vec::with_capacity(hot.len());
        for page in hot.clone().chain(cold.clone()) {
            pattern::fill(&mut shared.pages.page(page), page, FILLED);
            if hot.contains(&page) {
                table.push(table::entry(page, FILLED));
            }
            shared.beacon[place::FILLED].fetch_add(1, Relaxed);
        }
        let pass = Pass::new(config.order, hot.end - hot.start, shared.boot ^ id as u64, 0);
        Self {
            id,
            shared,
            config: config.clone(),
            hot,
            cold,
            table,
            passes: 0,
            pass,
            verify_at: 0,
            counts: Counts::default(),
        }
    }

    /// Works until the machine ends.
    pub fn run(mut self) -> ! {
        sys::stay_on_cpu(self.id);
        let threads = u64::from(self.config.threads);
        let period_ns = u64::from(self.config.period_us) * 1000;
        let mut verify = Quota::new(u64::from(self.config.verify) / threads, period_ns);
        let mut pacer = Pacer::new(period_ns, sys::now());
        match self.config.rate {
            Rate::PagesPerSecond(rate) => {
                let mut rewrite = Quota::new(u64::from(rate) / threads, period_ns);
                loop {
                    self.beat();
                    self.rewrite(rewrite.take());
                    self.verify(verify.take());
                    let wait = pacer.finish(sys::now());
                    self.counts.lost_ns += wait.lost;
                    if let Some(until) = wait.until {
                        sys::sleep_until(until);
                    }
                }
            }
            Rate::Max => loop {
                self.beat();
                self.verify(verify.take());
                loop {
                    self.rewrite(MAX_RATE_BATCH);
                    let wait = pacer.finish_unpaced(sys::now());
                    self.counts.lost_ns += wait.lost;
                    if wait.until.is_none() {
                        break;
                    }
                }
            },
        }
    }

    fn slot(&self, field: usize) -> usize {
        place::THREADS_START + self.id * place::SLOT + field
    }

    /// Begins a period: says so in the beacon, after making sure that the beacon is still ours.
    fn beat(&mut self) {
        let slot = |field| self.shared.beacon[self.slot(field)].load(Relaxed);
        let (work, beats) = (slot(place::SLOT_WORK), slot(place::SLOT_BEATS));
        let stale = work != self.counts.work || beats != self.counts.beats;
        if stale {
            let bad = BadWord { index: self.slot(0), expected: self.counts.work, found: work };
            self.report(Damage::BeaconStale, 0, bad, 0, None);
        }
        self.counts.beats += 1;
        self.shared.set(self.slot(place::SLOT_WORK), self.counts.work);
        self.shared.set(self.slot(place::SLOT_BEATS), self.counts.beats);
        self.shared.set(self.slot(place::SLOT_VERIFIED), self.counts.verified);
        self.shared.set(self.slot(place::SLOT_ERRORS), self.counts.errors);
        self.shared.set(self.slot(place::SLOT_PASSES), u64::from(self.passes));
        self.shared.set(self.slot(place::SLOT_LOST_NS), self.counts.lost_ns);
        if self.id == 0 {
            self.shared.set(place::UPTIME_MS, sys::now() / 1_000_000);
        }
    }

    fn rewrite(&mut self, count: u64) {
        if self.hot.is_empty() {
            return;
        }
        let work_slot = self.slot(place::SLOT_WORK);
        for _ in 0..count {
            let index = loop {
                if let Some(index) = self.pass.next() {
                    break index;
                }
                self.passes += 1;
                let (order, pages) = (self.config.order, self.hot.end - self.hot.start);
                self.pass =
                    Pass::new(order, pages, self.shared.boot ^ self.id as u64, u64::from(self.passes));
            };
            self.visit(index);
            self.counts.work += 1;
            self.shared.set(work_slot, self.counts.work);
        }
    }

    /// Checks the table's entry and the page, then rewrites both to the next version.
    #[inline]
    fn visit(&mut self, index: u32) {
        let page = self.hot.start + index;
        let foretold = FILLED + self.passes;
        let entry = self.table[index as usize];
        if let Err(damage) = table::version(entry, page, foretold) {
            let bad = BadWord { index: index as usize, expected: table::entry(page, foretold), found: entry };
            self.report(damage, page, bad, foretold, None);
        }
        let mut words = self.shared.pages.page(page);
        if let Err(bad) = pattern::visit(&mut words, page, foretold) {
            self.bad_page(page, foretold, bad);
            // Made good, so that each damage is counted once.
            pattern::fill(&mut words, page, foretold + 1);
        }
        self.table[index as usize] = table::entry(page, foretold + 1);
    }

    /// Checks the next `count` pages in full: hot ones by the table, cold ones by their first version.
    fn verify(&mut self, count: u64) {
        let (hot, cold) = (self.hot.end - self.hot.start, self.cold.end - self.cold.start);
        if hot + cold == 0 {
            return;
        }
        for _ in 0..count {
            let index = self.verify_at;
            self.verify_at = (self.verify_at + 1) % (hot + cold);
            let (page, version) = if index < hot {
                match self.current_version(index) {
                    Some(version) => (self.hot.start + index, version),
                    None => continue,
                }
            } else {
                (self.cold.start + index - hot, FILLED)
            };
            let mut words = self.shared.pages.page(page);
            if let Err(bad) = pattern::check_all(&words, page, version) {
                self.bad_page(page, version, bad);
                pattern::fill(&mut words, page, version);
            }
            self.counts.verified += 1;
        }
    }

    /// The version of hot page `index` in the middle of a pass, which has visited it or not. A broken entry is reported
    /// and left for the visit to mend.
    fn current_version(&mut self, index: u32) -> Option<u32> {
        let (page, before) = (self.hot.start + index, FILLED + self.passes);
        let entry = self.table[index as usize];
        let version =
            table::version(entry, page, before).or_else(|_| table::version(entry, page, before + 1));
        version
            .map_err(|damage| {
                let bad =
                    BadWord { index: index as usize, expected: table::entry(page, before), found: entry };
                self.report(damage, page, bad, before, None);
            })
            .ok()
    }

    #[cold]
    fn bad_page(&mut self, page: u32, version: u32, bad: BadWord) {
        let (damage, seems) = pattern::diagnose(&self.shared.pages.page(page), page, version);
        self.report(damage, page, bad, version, seems);
    }

    #[cold]
    fn report(&mut self, damage: Damage, page: u32, bad: BadWord, version: u32, seems: Option<u32>) {
        self.counts.errors += 1;
        self.shared.set(self.slot(place::SLOT_ERRORS), self.counts.errors);
        let uptime_ms = sys::now() / 1_000_000;
        let beacon = self.shared.beacon;
        // One thread is first; the kind is what it claims with, and what the host looks at.
        let first =
            beacon[place::BAD_UPTIME_MS].compare_exchange(0, uptime_ms.max(1), Relaxed, Relaxed).is_ok();
        if first {
            self.shared.set(place::BAD_PAGE, u64::from(page));
            self.shared.set(place::BAD_INDEX, bad.index as u64);
            self.shared.set(place::BAD_EXPECTED, bad.expected);
            self.shared.set(place::BAD_FOUND, bad.found);
            self.shared.set(place::BAD_VERSION, u64::from(version));
            self.shared.set(place::BAD_SEEMS, u64::from(seems.unwrap_or(0)));
            self.shared.set(place::BAD_THREAD, self.id as u64);
            beacon[place::BAD_KIND].store(damage as u64, Release);
        }
        if self.counts.errors <= LINES {
            println!(
                "VMOVE-GUEST FAIL {damage:?} page={page} word={} version={version} seems={} expected={:#018x} \
                 found={:#018x} thread={} uptime_ms={uptime_ms}",
                bad.index,
                seems.unwrap_or(0),
                bad.expected,
                bad.found,
                self.id
            );
        }
    }
}
