//! `--host-cpu`: what a migration's own threads use of this host's processors for copying in the background, and how much of them they may use.
//!
//! Threads book the processor time that they have used. If there is a share to be kept, and it is overdrawn, they rest before they begin anything new, until
//! a whole [`BURST`] may be used again: work in bursts moves large reads, and a byte of many small ones costs several times as much.
//! What the guest waits for is not held back and not counted: page faults never come here, and in the switchover all is [let go](HostCpu::let_go).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::vmm::PageWorkers;
use vmove_types::report::CpuUse;
use vmove_types::time::Mono;

/// Processor time that is used in one go.
const BURST: Duration = Duration::from_millis(20);
/// Of the share that is to be kept, so much is used: reads that are under way when it is used up land all the same.
const USED: f64 = 0.95;
/// How often who rests looks around.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// A share of the processors of one host.
///
/// Lock-free, like [`Throttle`](crate::throttle::Throttle): it keeps the moment at which what was used is paid for.
#[derive(Debug)]
struct Share {
    /// Nanoseconds of processor time that may be used in a nanosecond.
    rate: f64,
    /// 0: nothing was used so far.
    paid_at: AtomicU64,
    /// It was overdrawn, and there is no whole burst yet.
    resting: AtomicBool,
}

impl Share {
    fn new(percent: u64, processors: u32) -> Self {
        let rate = USED * percent.max(1) as f64 / 100.0 * f64::from(processors.max(1));
        Self { rate, paid_at: AtomicU64::new(0), resting: AtomicBool::new(false) }
    }

    /// In how many nanoseconds so much may be used.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time; casts saturate")]
    fn takes(&self, cpu_ns: u64) -> u64 {
        (cpu_ns as f64 / self.rate) as u64
    }

    fn burst(&self) -> u64 {
        self.takes(u64::try_from(BURST.as_nanos()).unwrap_or(u64::MAX))
    }

    fn book(&self, cpu_ns: u64, now: u64) {
        let takes = self.takes(cpu_ns);
        let paid_at = |was: u64| {
            // Nothing is saved up before the first work, nor more than a burst later.
            let from = if was == 0 { now } else { was.max(now.saturating_sub(self.burst())) };
            from.saturating_add(takes)
        };
        // Relaxed here and below: the values themselves are all that is shared.
        let was = self.paid_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |was| Some(paid_at(was)));
        if was.is_ok_and(|was| paid_at(was) > now) {
            self.resting.store(true, Ordering::Relaxed);
        }
    }

    /// How long to rest before something new is begun.
    fn free_in(&self, now: impl FnOnce() -> u64) -> Duration {
        if !self.resting.load(Ordering::Relaxed) {
            return Duration::ZERO;
        }
        let free_at = self.paid_at.load(Ordering::Relaxed).saturating_add(self.burst());
        let rest = free_at.saturating_sub(now());
        if rest == 0 {
            self.resting.store(false, Ordering::Relaxed);
        }
        Duration::from_nanos(rest)
    }
}

/// Processor time that one side of a migration uses for copying in the background.
#[derive(Debug)]
pub(crate) struct HostCpu {
    /// A simulation must not depend on how fast the machine is.
    is_measured: bool,
    processors: u32,
    /// That this side may use.
    share: Option<Share>,
    percent: Option<u64>,
    /// Of the peer's host, as it tells. It reads nothing by itself, so it is held back here.
    peer: OnceLock<Share>,
    peer_used_ns: AtomicU64,
    used_ns: AtomicU64,
    /// When that began; 0: it has not.
    began: AtomicU64,
    /// The guest waits for whatever is done.
    let_go: Mutex<bool>,
    is_let_go: AtomicBool,
    changed: Condvar,
}

/// What a thread has booked of its own processor time.
#[derive(Debug)]
pub(crate) struct Booking<'a> {
    cpu: &'a HostCpu,
    booked_ns: u64,
}

impl HostCpu {
    /// For a migration that may use `percent` of all processors, or as much as it can.
    pub(crate) fn new(percent: Option<u64>, workers: PageWorkers) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let processors = u32::try_from(processors).unwrap_or(u32::MAX);
        let is_measured = workers == PageWorkers::Threads;
        let percent = percent.filter(|_| is_measured);
        Self {
            is_measured,
            processors,
            share: percent.map(|percent| Share::new(percent, processors)),
            percent,
            peer: OnceLock::new(),
            peer_used_ns: AtomicU64::new(0),
            used_ns: AtomicU64::new(0),
            began: AtomicU64::new(0),
            let_go: Mutex::new(false),
            is_let_go: AtomicBool::new(false),
            changed: Condvar::new(),
        }
    }

    /// Whether a share is to be kept.
    pub(crate) const fn is_shared(&self) -> bool {
        self.share.is_some()
    }

    /// How many processors there are.
    pub(crate) const fn processors(&self) -> u32 {
        self.processors
    }

    /// Processor time used so far, in nanoseconds.
    pub(crate) fn used_ns(&self) -> u64 {
        self.used_ns.load(Ordering::Relaxed)
    }

    /// Books what threads have used.
    pub(crate) fn book(&self, cpu_ns: u64) {
        if !self.is_measured || cpu_ns == 0 || self.is_let_go.load(Ordering::Relaxed) {
            return;
        }
        let now = Mono::now().0;
        let _ = self.began.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        self.used_ns.fetch_add(cpu_ns, Ordering::Relaxed);
        if let Some(share) = &self.share {
            share.book(cpu_ns, now);
        }
    }

    /// The peer has used so much in all, of so many processors.
    pub(crate) fn peer_has_used(&self, cpu_ns: u64, processors: u32) {
        let Some(percent) = self.percent else { return };
        let before = self.peer_used_ns.fetch_max(cpu_ns, Ordering::Relaxed);
        let more = cpu_ns.saturating_sub(before);
        if more > 0 && !self.is_let_go.load(Ordering::Relaxed) {
            self.peer.get_or_init(|| Share::new(percent, processors)).book(more, Mono::now().0);
        }
    }

    /// Begins to book the calling thread's work.
    pub(crate) fn booking(&self) -> Booking<'_> {
        Booking { cpu: self, booked_ns: if self.is_measured { thread_ns() } else { 0 } }
    }

    /// Books a piece of work.
    pub(crate) fn count<T>(&self, work: impl FnOnce() -> T) -> T {
        let mut booking = self.booking();
        let done = work();
        booking.book();
        done
    }

    /// How long to rest before something new is begun.
    pub(crate) fn free_in(&self) -> Duration {
        if self.share.is_none() || self.is_let_go.load(Ordering::Relaxed) {
            return Duration::ZERO;
        }
        let free_in = |share: &Share| share.free_in(|| Mono::now().0);
        let own = self.share.as_ref().map_or(Duration::ZERO, free_in);
        own.max(self.peer.get().map_or(Duration::ZERO, free_in))
    }

    /// Rests for so long, unless the guest waits meanwhile.
    pub(crate) fn rest(&self, longest: Duration) {
        let let_go = self.let_go.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_timeout_while(let_go, longest, |let_go| !*let_go));
    }

    /// Rests until something new may be begun, or until nobody wants it any more.
    pub(crate) fn rest_until_free(&self, is_over: impl Fn() -> bool) {
        loop {
            let rest = self.free_in();
            if rest.is_zero() || is_over() {
                return;
            }
            self.rest(rest.min(LOOK_INTERVAL));
        }
    }

    /// From here on the guest waits for what is done: nothing is held back, or counted.
    pub(crate) fn let_go(&self) {
        self.set_let_go(true);
    }

    /// The guest waits no more.
    pub(crate) fn hold(&self) {
        self.set_let_go(false);
    }

    fn set_let_go(&self, is: bool) {
        *self.let_go.lock().unwrap_or_else(PoisonError::into_inner) = is;
        self.is_let_go.store(is, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// What was used so far; `None` if nothing is known of that.
    pub(crate) fn used(&self) -> Option<CpuUse> {
        let began = self.began.load(Ordering::Relaxed);
        if !self.is_measured {
            return None;
        }
        let cpu_ms = self.used_ns() as f64 / 1e6;
        let whole_ms = if began == 0 { 0.0 } else { Mono::now().ms_since(Mono(began)) };
        let all_ms = whole_ms * f64::from(self.processors);
        let percent = if all_ms > 0.0 { (cpu_ms / all_ms * 100.0).min(100.0) } else { 0.0 };
        Some(CpuUse { cpu_ms, percent, processors: self.processors })
    }
}

impl Booking<'_> {
    /// Books what the calling thread has used since this was made, or since the last time.
    pub(crate) fn book(&mut self) {
        if self.cpu.is_measured {
            let now = thread_ns();
            self.cpu.book(now.saturating_sub(self.booked_ns));
            self.booked_ns = now;
        }
    }
}

/// Processor time that the calling thread has used.
fn thread_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    part(time.tv_sec) * 1_000_000_000 + part(time.tv_nsec)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Works for so long, in pieces as they are given over and over: how much was used, and the lengths of the bursts.
    fn run(share: &Share, pieces: &[u64], whole_ns: u64) -> (u64, Vec<u64>) {
        let (mut now, mut used, mut burst) = (1_000_000_000, 0, 0);
        let (end, mut bursts) = (now + whole_ns, Vec::new());
        let mut pieces = pieces.iter().cycle();
        while now < end {
            let rest = u64::try_from(share.free_in(|| now).as_nanos()).unwrap();
            if rest > 0 {
                if burst > 0 {
                    bursts.push(std::mem::take(&mut burst));
                }
                now += rest;
                continue;
            }
            let piece = *pieces.next().unwrap();
            now += piece;
            share.book(piece, now);
            used += piece;
            burst += piece;
        }
        (used, bursts)
    }

    proptest! {
        #[test]
        fn the_share_is_kept_by_uneven_work_and_in_bursts(
            percent in 1_u64..=40, processors in 1_u32..=2, pieces in proptest::collection::vec(10_000_u64..3_000_000, 1..20),
        ) {
            let share = Share::new(percent, processors);
            let whole = 200_000_000_000;
            let (used, bursts) = run(&share, &pieces, whole);
            let part = used as f64 / (whole as f64 * f64::from(processors)) * 100.0 / percent as f64;
            prop_assert!((0.96 * USED..1.02 * USED).contains(&part), "{part} of {percent} %");
            // But for the first, which nothing was saved up for.
            for burst in &bursts[1..] {
                prop_assert!(*burst >= 19_900_000, "{burst} ns");
            }
        }
    }

    #[test]
    fn what_was_not_used_is_not_saved_up() {
        let share = Share::new(10, 1);
        share.book(1_000_000, 1_000_000_000);
        // A minute later there is one burst, not six seconds.
        let later = 61_000_000_000;
        assert_eq!(share.free_in(|| later), Duration::ZERO);
        share.book(19_000_000, later);
        assert_eq!(share.free_in(|| later), Duration::ZERO);
        share.book(2_000_000, later);
        let rest = share.free_in(|| later);
        assert!((Duration::from_millis(216)..Duration::from_millis(226)).contains(&rest), "{rest:?}");
    }

    #[test]
    fn without_a_share_nothing_rests_and_all_is_counted() {
        let cpu = HostCpu::new(None, PageWorkers::Threads);
        cpu.book(5_000_000);
        assert_eq!((cpu.free_in(), cpu.used_ns()), (Duration::ZERO, 5_000_000));
        let simulated = HostCpu::new(Some(1), PageWorkers::Turns);
        simulated.book(u64::MAX);
        assert_eq!((simulated.free_in(), simulated.used()), (Duration::ZERO, None));
    }

    #[test]
    fn either_host_holds_work_back_and_a_guest_that_waits_does_not() {
        let cpu = HostCpu::new(Some(1), PageWorkers::Threads);
        cpu.peer_has_used(50_000_000, 1);
        // 50 ms of one processor of the peer's, and a burst more.
        assert!(cpu.free_in() > Duration::from_secs(6), "{:?}", cpu.free_in());
        std::thread::scope(|scope| {
            let begun = Mono::now();
            let rests = scope.spawn(|| cpu.rest(Duration::from_secs(20)));
            std::thread::sleep(Duration::from_millis(20));
            cpu.let_go();
            rests.join().unwrap();
            assert!(Mono::now().ms_since(begun) < 10_000.0);
        });
        assert_eq!(cpu.free_in(), Duration::ZERO);
        cpu.book(1_000_000_000);
        assert_eq!(cpu.used_ns(), 0);
        cpu.hold();
        assert!(cpu.free_in() > Duration::from_secs(6));
        // Told twice is used once.
        cpu.peer_has_used(50_000_000, 1);
        assert!(cpu.free_in() < Duration::from_secs(8), "{:?}", cpu.free_in());
    }

    #[test]
    fn a_thread_books_its_work_and_not_its_sleep() {
        let cpu = HostCpu::new(None, PageWorkers::Threads);
        let begun = thread_ns();
        cpu.count(|| {
            std::thread::sleep(Duration::from_millis(30));
            while thread_ns() < begun + 10_000_000 {
                std::hint::spin_loop();
            }
        });
        assert!((9_000_000..15_000_000).contains(&cpu.used_ns()), "{}", cpu.used_ns());
        let used = cpu.used().unwrap();
        assert!(used.cpu_ms > 9.0 && used.percent > 0.0 && used.processors > 0, "{used:?}");
    }
}
