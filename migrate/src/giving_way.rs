//! How fast the disks of a guest are copied while it uses them: as fast as leaves the guest's own requests the share of their pace that it is to
//! keep.
//!
//! QEMU does the guest's requests and the copy in one thread, and both wait for the same storage. How much slower that makes the guest is
//! measured: every now and then the copy rests for a moment, and what a request takes then is compared with what one took before. The loss is
//! taken to be proportional to the rate of the copy, and the next rate follows from that.
//!
//! ```text
//! copy, at some rate | settle | rest: what requests take alone | copy, at the next rate ...
//! ```
//!
//! A guest that waits for its disks for a smaller part of its time than it may lose cannot lose more than that: then the copy does not rest, and goes
//! as fast as it can.

use std::time::Duration;

use vmove_qmp::disks::DiskCounters;
use vmove_types::disk::DiskPace;
use vmove_types::disk_latency::{DiskIo, GaveWay, IoLatency};
use vmove_types::time::Mono;

/// A copy is judged after this time at first, and again after each change of its rate.
const COPY_LEAST: Duration = Duration::from_millis(400);
/// And after this time once its rate is right: rests take time. Also where the guest makes few requests.
const COPY_MOST: Duration = Duration::from_millis(3200);
/// QEMU may copy so many bytes at once before it looks how fast it may: at a low rate a copy comes in such bursts, and of these there must be some in
/// what is judged.
const BURST: f64 = (16 << 20) as f64;
/// For QEMU to end what it has begun to copy: nothing more came for so long.
const SETTLE: Duration = Duration::from_millis(100);
/// How long a copy rests, and how long with all that is waited for at most: a last burst, requests that the guest made before, few requests.
const REST: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(2000));
/// Of fewer requests little can be said.
const FEW: u64 = 8;
/// Bytes per second of all copies while they rest. Not nothing: a daemon that is killed then leaves them so.
const REST_SPEED: u64 = 1 << 20;
/// Bytes per second of all copies, however little is left for the guest then: a copy must end.
const SLOWEST: u64 = 16 << 20;
/// Bounds of one change of the rate.
const CHANGE: (f64, f64) = (0.25, 2.0);
/// With a change within these bounds, the rate was right.
const RIGHT: (f64, f64) = (0.8, 1.25);
/// What is aimed at is a little less than the loss that is allowed.
const MARGIN: f64 = 0.9;

/// Requests of a guest that are done, and what they took together.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Requests {
    reads: Kind,
    writes: Kind,
    flushes: Kind,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Kind {
    count: u64,
    ms: f64,
}

impl Requests {
    /// Of all disks, from one count to another. Disks of which QEMU tells nothing are left out.
    pub(crate) fn between(then: &[Option<DiskCounters>], now: &[Option<DiskCounters>]) -> Self {
        let pairs = then.iter().zip(now);
        Self::of(pairs.map(|(then, now)| now.as_ref()?.since(then.as_ref()?)))
    }

    /// Of all disks.
    pub(crate) fn of(disks: impl IntoIterator<Item = Option<DiskIo>>) -> Self {
        let mut sum = Self::default();
        for io in disks.into_iter().flatten() {
            sum.reads.add(io.reads.as_ref());
            sum.writes.add(io.writes.as_ref());
            sum.flushes.add(io.flushes.as_ref());
        }
        sum
    }

    fn since(self, earlier: Self) -> Self {
        Self {
            reads: self.reads.since(earlier.reads),
            writes: self.writes.since(earlier.writes),
            flushes: self.flushes.since(earlier.flushes),
        }
    }

    const fn kinds(self) -> [Kind; 3] {
        [self.reads, self.writes, self.flushes]
    }

    fn count(self) -> u64 {
        self.kinds().iter().map(|kind| kind.count).sum()
    }

    /// How long all of them took together, in milliseconds.
    fn ms(self) -> f64 {
        self.kinds().iter().map(|kind| kind.ms).sum()
    }
}

impl Kind {
    fn add(&mut self, io: Option<&IoLatency>) {
        if let Some(io) = io {
            self.count += io.requests;
            self.ms += io.mean_ms * io.requests as f64;
        }
    }

    fn since(self, earlier: Self) -> Self {
        Self { count: self.count.saturating_sub(earlier.count), ms: (self.ms - earlier.ms).max(0.0) }
    }
}

/// What one request of each kind takes alone, in milliseconds; `None` where that is not known.
#[derive(Debug, Clone, Copy, Default)]
struct Alone([Option<f64>; 3]);

impl Alone {
    fn learn(&mut self, rest: Requests) {
        for (known, kind) in self.0.iter_mut().zip(rest.kinds()).filter(|(_, kind)| kind.count > 0) {
            let mean = kind.ms / kind.count as f64;
            // Half of what was known before: single rests are short.
            *known = Some(known.map_or(mean, |known| f64::midpoint(known, mean)));
        }
    }

    /// How much longer these requests took than they would have alone, in milliseconds. Kinds that are not known count as no longer; nothing if none
    /// is known.
    fn longer_ms(self, done: Requests) -> Option<f64> {
        let longer = |(alone, kind): (Option<f64>, Kind)| {
            alone.map(|alone| (kind.ms - alone * kind.count as f64).max(0.0))
        };
        self.0.into_iter().zip(done.kinds()).filter_map(longer).reduce(|sum, one| sum + one)
    }
}

/// The copies that have not reached their end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Copying {
    /// How many.
    pub(crate) copies: usize,
    /// Bytes that they have dealt with.
    pub(crate) bytes: u64,
    /// What the guest writes counts there, too: it waits for both disks.
    pub(crate) guest_writes_both: bool,
}

/// What there is at a moment.
#[derive(Debug, Clone, Copy)]
struct Mark {
    at: Mono,
    done: Requests,
    copying: Copying,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Copying,
    /// The copy is to rest, and what has begun comes to its end. Before that, in `copy`, it did not. Since when.
    Settling {
        copy: Window,
        since: Mono,
    },
    Resting {
        copy: Window,
        since: Mono,
    },
}

/// What was done from one mark to the next.
#[derive(Debug, Clone, Copy)]
struct Window {
    took: Duration,
    done: Requests,
    /// Bytes that were copied.
    copied: u64,
    /// Of so many disks.
    copies: usize,
    guest_writes_both: bool,
}

impl Window {
    /// Whether copies went on, as far as can be seen.
    const fn went_on(self) -> bool {
        self.copied > 0 && !self.guest_writes_both
    }

    /// What a request took.
    fn mean(self) -> Duration {
        Duration::from_secs_f64(self.done.ms() / 1e3 / self.done.count().max(1) as f64)
    }

    /// Bytes per second.
    fn rate(self) -> f64 {
        self.copied as f64 / self.took.as_secs_f64().max(1e-3)
    }

    /// The share of the time that requests took; more than 1 if several were under way at a time.
    fn busy(self) -> f64 {
        self.done.ms() / (self.took.as_secs_f64() * 1e3).max(1.0)
    }

    /// The share of its pace that a guest has lost that makes one request after the other, or some at a time: what it waited longer, by all the time
    /// that it had.
    fn loss(self, alone: Alone) -> Option<f64> {
        let all = (self.took.as_secs_f64() * 1e3).max(self.done.ms()).max(1.0);
        Some((alone.longer_ms(self.done)? / all).min(1.0))
    }
}

/// Finds the rate of the copies of a guest's disks.
#[derive(Debug)]
pub(crate) struct GivingWay {
    /// The share of its pace that the guest may lose.
    may_lose: f64,
    /// Bytes per second that the copies get at most, whatever the guest does.
    bandwidth: Option<u64>,
    /// Bytes per second of all copies; `None`: as fast as they can.
    limit: Option<u64>,
    alone: Alone,
    stage: Stage,
    /// Nothing before the first look: counters may have begun long before.
    since: Option<Mark>,
    /// How long the copy goes on until it is judged.
    stretch: Duration,
    told: Told,
}

/// For the report.
#[derive(Debug, Default)]
struct Told {
    /// Seconds that were judged, and what the guest lost of them.
    judged: f64,
    lost: f64,
    /// How long copies were slower than they could be.
    held: Duration,
}

impl GivingWay {
    /// Begins with the copies. `keep`: per cent of its pace that the guest is to keep; 0: nothing is measured.
    pub(crate) fn new(keep: DiskPace, bandwidth: Option<u64>) -> Self {
        Self {
            may_lose: 1.0 - f64::from(keep.percent()) / 100.0,
            bandwidth: bandwidth.filter(|bandwidth| *bandwidth > 0),
            limit: None,
            alone: Alone::default(),
            stage: Stage::Copying,
            since: None,
            stretch: COPY_LEAST,
            told: Told::default(),
        }
    }

    /// What all copies together may take at present, in bytes per second; `None`: all that they can.
    pub(crate) fn speed(&self) -> Option<u64> {
        let rests = (!matches!(self.stage, Stage::Copying)).then_some(REST_SPEED);
        [self.bandwidth, self.limit, rests].into_iter().flatten().min()
    }

    /// Whether copies are slower than they could be, for the guest's sake.
    pub(crate) fn holds_back(&self) -> bool {
        self.limit.is_some_and(|limit| self.bandwidth.is_none_or(|bandwidth| limit < bandwidth))
    }

    /// Takes note of what was done by now: the guest's requests, and bytes by the copies, both counted from any moment.
    pub(crate) fn look(&mut self, now: Mono, done: Requests, copying: Copying) {
        if self.may_lose >= 1.0 {
            return;
        }
        let mark = Mark { at: now, done, copying };
        // Of others nothing that was counted before tells.
        let Some(since) = self.since.filter(|since| since.copying.copies == copying.copies) else {
            self.since = Some(mark);
            self.stage = Stage::Copying;
            return;
        };
        let window = Window {
            took: now.since(since.at),
            done: done.since(since.done),
            copied: copying.bytes.saturating_sub(since.copying.bytes),
            copies: copying.copies,
            guest_writes_both: copying.guest_writes_both,
        };
        if let Some(next) = self.next(now, window) {
            if !matches!(self.stage, Stage::Copying) || self.holds_back() {
                self.told.held += window.took;
            }
            self.stage = next;
            self.since = Some(mark);
        }
    }

    /// What follows after such a window; nothing if it goes on.
    fn next(&mut self, now: Mono, window: Window) -> Option<Stage> {
        let (took, few) = (window.took, window.done.count() < FEW);
        let may_go_on = |since: Mono| now.since(since) < REST.1;
        match self.stage {
            Stage::Copying if took < self.least(window.copies) || (few && took < COPY_MOST) => None,
            Stage::Copying => Some(self.after_copying(now, window)),
            // Another burst.
            Stage::Settling { copy, since } if window.went_on() && may_go_on(since) => {
                Some(Stage::Settling { copy, since })
            }
            // What the guest has asked for before is not alone.
            Stage::Settling { copy, since } if took < SETTLE.max(copy.mean()) && may_go_on(since) => None,
            Stage::Settling { copy, since } => Some(Stage::Resting { copy, since }),
            Stage::Resting { copy, since } if window.went_on() && may_go_on(since) => {
                Some(Stage::Settling { copy, since })
            }
            Stage::Resting { since, .. } if took < REST.0 || (few && may_go_on(since)) => None,
            Stage::Resting { copy, .. } => {
                if !window.went_on() {
                    self.alone.learn(window.done);
                }
                self.judge(copy);
                Some(Stage::Copying)
            }
        }
    }

    /// How long copies go on at least until they are judged: as long as there are two bursts of each in it.
    fn least(&self, copies: usize) -> Duration {
        let bursts = 2.0 * BURST * copies.max(1) as f64;
        let two = self.limit.map_or(Duration::ZERO, |limit| Duration::from_secs_f64(bursts / limit as f64));
        self.stretch.max(two)
    }

    fn after_copying(&mut self, now: Mono, copy: Window) -> Stage {
        if copy.busy() > self.may_lose {
            return Stage::Settling { copy, since: now };
        }
        // However much longer its requests take than alone, it cannot lose more than what they take.
        self.change(copy.rate(), CHANGE.1);
        self.stretch = COPY_LEAST;
        Stage::Copying
    }

    /// Finds the next rate by what requests took in this window.
    fn judge(&mut self, copy: Window) {
        let Some(loss) = copy.loss(self.alone) else { return };
        let seconds = copy.took.as_secs_f64();
        self.told.judged += seconds;
        self.told.lost += loss * seconds;
        let factor = (MARGIN * self.may_lose / loss.max(0.01)).clamp(CHANGE.0, CHANGE.1);
        let is_right = (RIGHT.0..=RIGHT.1).contains(&factor);
        // Rather a little too slow than too fast.
        if factor < 1.0 || !is_right {
            self.change(copy.rate(), factor);
        }
        let is_settled = is_right || self.limit.is_none();
        self.stretch = if is_settled { (self.stretch * 2).min(COPY_MOST) } else { COPY_LEAST };
    }

    /// Changes the rate of a copy that was at `rate`.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate, not negative; casts saturate"
    )]
    fn change(&mut self, rate: f64, factor: f64) {
        let limit = self.limit.map(|limit| limit as f64);
        // Holes are passed over at any rate, and limits do not count them.
        let from = limit.map_or(rate, |limit| limit.min(rate));
        self.limit = match limit {
            None if factor >= 1.0 => None,
            // It is no faster without.
            Some(limit) if factor >= 1.0 && rate < limit / CHANGE.1 => None,
            Some(limit) if factor >= 1.0 => Some(limit * factor),
            _ => Some((from * factor).max(SLOWEST as f64)),
        }
        .map(|limit| limit as u64);
    }

    /// What there is to tell; nothing if the guest made hardly any requests, so that nothing was measured.
    pub(crate) fn told(&self) -> Option<GaveWay> {
        let Told { judged, lost, held } = &self.told;
        (*judged > 0.0)
            .then(|| GaveWay { kept_pace: 1.0 - lost / judged, held_back_ms: held.as_secs_f64() * 1e3 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that makes one request after the other, and does something else between them.
    #[derive(Clone, Copy)]
    struct Guest {
        /// What a request takes alone, and how much else is done then, in milliseconds.
        alone_ms: f64,
        between_ms: f64,
        /// A request takes so many times as long while bytes are copied.
        slower: f64,
        /// Bytes per second of a copy without a limit.
        fastest: f64,
    }

    /// What came of the second half of a copy: the share of its pace that the guest kept, and bytes per second.
    struct Copied {
        kept: f64,
        rate: f64,
        pace: GivingWay,
    }

    const TICK_MS: u64 = 10;

    const fn one(bytes: u64) -> Copying {
        Copying { copies: 1, bytes, guest_writes_both: false }
    }

    /// As QEMU copies: a burst, and then a sleep as long as the limit asks for.
    #[derive(Default)]
    struct Copier {
        burst_from_ms: u64,
        in_burst: f64,
        sleeps_until_ms: u64,
        speed: Option<u64>,
        copied: f64,
    }

    impl Copier {
        fn set_speed(&mut self, now_ms: u64, speed: Option<u64>) {
            let is_faster = speed.is_none_or(|new| self.speed.is_some_and(|old| new > old));
            self.speed = speed;
            if is_faster {
                self.sleeps_until_ms = self.sleeps_until_ms.min(now_ms.max(self.next_burst_ms()));
            }
        }

        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time")]
        fn next_burst_ms(&self) -> u64 {
            self.burst_from_ms + self.speed.map_or(0, |speed| (BURST / speed as f64 * 1e3) as u64)
        }

        /// Whether it copies in this tick.
        fn tick(&mut self, now_ms: u64, fastest: f64) -> bool {
            if now_ms < self.sleeps_until_ms {
                return false;
            }
            if self.in_burst == 0.0 {
                self.burst_from_ms = now_ms;
            }
            let bytes = fastest * TICK_MS as f64 / 1e3;
            self.copied += bytes;
            self.in_burst += bytes;
            if self.in_burst >= BURST {
                self.in_burst = 0.0;
                self.sleeps_until_ms = self.next_burst_ms();
            }
            true
        }
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts, not negative")]
    fn copy(guest: Guest, keep: u8, seconds: u64) -> Copied {
        let mut pace = GivingWay::new(keep.try_into().unwrap(), None);
        let (mut copier, mut made, mut ms, mut half) = (Copier::default(), 1e6, 1e7, (0.0, 0.0));
        for tick in 0..seconds * 1000 / TICK_MS {
            let now_ms = tick * TICK_MS;
            let slower = if copier.tick(now_ms, guest.fastest) { guest.slower } else { 1.0 };
            let request_ms = guest.alone_ms * slower;
            let requests = TICK_MS as f64 / (request_ms + guest.between_ms);
            made += requests;
            ms += requests * request_ms;
            if now_ms == seconds * 500 {
                half = (made, copier.copied);
            }
            if now_ms.is_multiple_of(100) {
                let done = Requests { reads: Kind { count: made as u64, ms }, ..Requests::default() };
                pace.look(Mono(now_ms * 1_000_000), done, one(copier.copied as u64));
                copier.set_speed(now_ms, pace.speed());
            }
        }
        let undisturbed = seconds as f64 * 500.0 / (guest.alone_ms + guest.between_ms);
        let rate = (copier.copied - half.1) / (seconds as f64 / 2.0);
        Copied { kept: (made - half.0) / undisturbed, rate, pace }
    }

    /// At full speed it keeps a quarter.
    const BUSY: Guest = Guest { alone_ms: 0.5, between_ms: 0.0, slower: 4.0, fastest: 3e8 };

    #[test]
    fn a_busy_guest_keeps_its_share_and_the_copy_goes_on() {
        let Copied { kept, rate, pace } = copy(BUSY, 75, 60);
        assert!((0.75..0.9).contains(&kept) && rate > 4e7, "{kept} {rate}");
        let told = pace.told().expect("it was measured");
        assert!(pace.holds_back() && told.held_back_ms > 30_000.0, "{told:?}");
        assert!((told.kept_pace - kept).abs() < 0.15, "{told:?} {kept}");
        let Copied { kept, rate: faster, .. } = copy(BUSY, 50, 60);
        assert!((0.5..0.7).contains(&kept) && faster > rate * 1.3, "{kept} {faster}");
    }

    #[test]
    fn a_guest_on_slow_storage_keeps_its_share_though_it_makes_few_requests() {
        // Of 3 requests in 0.4 s nothing can be said; all of the time it waits for them.
        let guest = Guest { alone_ms: 12.0, slower: 10.0, fastest: 1.5e8, ..BUSY };
        let Copied { kept, rate, pace } = copy(guest, 75, 90);
        assert!(kept > 0.7 && rate >= SLOWEST as f64 * 0.7, "{kept} {rate}");
        assert!(pace.told().is_some_and(|told| told.kept_pace > 0.5), "{:?}", pace.told());
    }

    #[test]
    fn a_guest_that_cannot_lose_its_share_has_its_disks_copied_at_full_speed() {
        // Held up by nothing.
        let Copied { rate, pace, .. } = copy(Guest { slower: 1.05, ..BUSY }, 75, 60);
        assert!(!pace.holds_back() && rate > 2.5e8, "{rate}: some of the time it rests");
        // It waits for a tenth of its time at most, and so the copy does not even rest.
        let Copied { rate, kept, pace } = copy(Guest { between_ms: 20.0, ..BUSY }, 75, 60);
        assert!(rate > 2.99e8 && kept > 0.9 && pace.told().is_none(), "{rate} {kept}");
        let idle = Guest { between_ms: 1e6, ..BUSY };
        let Copied { rate, pace, .. } = copy(idle, 75, 60);
        assert!(rate > 2.99e8 && pace.told().is_none(), "{rate}");
    }

    #[test]
    fn who_wants_no_pace_gets_none() {
        let Copied { rate, pace, .. } = copy(BUSY, 0, 10);
        assert!(rate > 2.99e8 && pace.told().is_none() && !pace.holds_back(), "{rate}");
    }

    #[test]
    fn a_copy_goes_on_however_slow_it_makes_the_guest() {
        let Copied { rate, .. } = copy(Guest { slower: 1000.0, ..BUSY }, 75, 60);
        assert!(rate > SLOWEST as f64 * 0.6, "{rate}");
    }

    #[test]
    fn bandwidth_holds_whatever_the_guest_does() {
        let speed = |bandwidth| GivingWay::new(DiskPace::default(), Some(bandwidth)).speed();
        assert_eq!((speed(5), speed(0)), (Some(5), None), "0 is no limit");
        let mut pace = GivingWay::new(DiskPace::default(), Some(SLOWEST / 2));
        pace.limit = Some(SLOWEST);
        assert_eq!((pace.speed(), pace.holds_back()), (Some(SLOWEST / 2), false));
    }

    #[test]
    fn what_is_judged_has_bursts_of_each_copy_in_it() {
        let mut pace = GivingWay::new(DiskPace::default(), None);
        assert_eq!(pace.least(4), COPY_LEAST);
        pace.limit = Some(SLOWEST);
        assert_eq!(pace.least(4), Duration::from_secs(8));
    }

    #[test]
    fn other_copies_are_looked_at_anew() {
        let mut pace = GivingWay::new(DiskPace::default(), None);
        let busy = |look: u64| Requests {
            reads: Kind { count: look * 50, ms: look as f64 * 100.0 },
            ..Requests::default()
        };
        for look in 0..6 {
            pace.look(Mono(look * 100_000_000), busy(look), Copying { copies: 2, ..one(look << 24) });
        }
        assert_eq!(pace.speed(), Some(REST_SPEED));
        // One has come to its end in the rest: what the other had copied by then is no rate.
        pace.look(Mono(600_000_000), busy(6), one(1 << 24));
        assert_eq!(pace.speed(), None);
    }

    #[test]
    fn what_the_guest_writes_to_both_disks_is_no_copy_that_goes_on() {
        let window = |guest_writes_both| Window {
            took: SETTLE,
            done: Requests::default(),
            copied: 4096,
            copies: 1,
            guest_writes_both,
        };
        assert!(window(false).went_on() && !window(true).went_on());
    }

    #[test]
    fn a_copy_is_let_go_when_the_guest_rests() {
        let mut pace = GivingWay::new(DiskPace::default(), None);
        pace.limit = Some(SLOWEST);
        let mut copied = 0;
        for look in 0..300 {
            copied += pace.speed().unwrap_or(300_000_000).min(300_000_000) / 10;
            pace.look(Mono(look * 100_000_000), Requests::default(), one(copied));
        }
        assert_eq!(pace.speed(), None);
    }
}
