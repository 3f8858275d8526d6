//! How fast the disks of a guest are copied while it uses them: as fast as leaves the guest's own requests the share of their pace that it is to
//! keep.
//!
//! QEMU does the guest's requests and the copy in one thread, and both wait for the same storage. How much slower that makes the requests is
//! measured: every now and then the copy rests for a moment, and what a request takes then is compared with what one took before. The loss is
//! taken to be proportional to the rate of the copy, and the next rate follows from that.
//!
//! ```text
//! copy, at some rate | settle | rest: what requests take alone | copy, at the next rate ...
//! ```
//!
//! A guest that makes hardly any requests is not measured, and its disks are copied as fast as they can be.

use std::time::Duration;

use vmove_qmp::disks::DiskCounters;
use vmove_types::disk_latency::{DiskIo, GaveWay, IoLatency};
use vmove_types::time::Mono;

/// A copy is judged after this time at first, and again after each change of its rate.
const COPY_LEAST: Duration = Duration::from_millis(400);
/// And after this time once its rate is right: rests take time.
const COPY_MOST: Duration = Duration::from_millis(3200);
/// For QEMU to end what it has begun to copy.
const SETTLE: Duration = Duration::from_millis(100);
/// How long a copy rests, and how long at most if the guest makes few requests meanwhile.
const REST: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(400));
/// Of fewer requests nothing can be said.
const FEW: u64 = 8;
/// Bytes per second of all copies while they rest. Not nothing: a daemon that is killed then leaves them so.
const REST_SPEED: u64 = 1 << 20;
/// Bytes per second of all copies, however little is left for the guest then: a copy must end.
pub(crate) const SLOWEST: u64 = 16 << 20;
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
        }
        sum
    }

    fn since(self, earlier: Self) -> Self {
        Self { reads: self.reads.since(earlier.reads), writes: self.writes.since(earlier.writes) }
    }

    fn count(self) -> u64 {
        self.reads.count + self.writes.count
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

/// What one request takes alone, in milliseconds; `None` where that is not known.
#[derive(Debug, Clone, Copy, Default)]
struct Alone {
    read: Option<f64>,
    write: Option<f64>,
}

impl Alone {
    fn learn(&mut self, rest: Requests) {
        for (known, kind) in [(&mut self.read, rest.reads), (&mut self.write, rest.writes)] {
            if kind.count > 0 {
                let mean = kind.ms / kind.count as f64;
                // Half of what was known before: single rests are short.
                *known = Some(known.map_or(mean, |known| f64::midpoint(known, mean)));
            }
        }
    }

    /// What these requests would have taken alone, and what they took, in milliseconds: those of which both is known.
    fn compare(self, done: Requests) -> (f64, f64) {
        let pairs = [(self.read, done.reads), (self.write, done.writes)];
        let known = pairs.into_iter().filter_map(|(alone, kind)| alone.map(|alone| (alone, kind)));
        known.fold((0.0, 0.0), |(alone, took), (one, kind)| (alone + one * kind.count as f64, took + kind.ms))
    }
}

/// What there is at a moment.
#[derive(Debug, Clone, Copy)]
struct Mark {
    at: Mono,
    done: Requests,
    copied: u64,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Copying,
    /// The copy rests since `since`; before that, in `copy`, it did not.
    Settling {
        copy: Window,
    },
    Resting {
        copy: Window,
    },
}

/// What was done from one mark to the next.
#[derive(Debug, Clone, Copy)]
struct Window {
    done: Requests,
    /// Bytes per second.
    rate: f64,
}

/// Finds the rate of the copies of a guest's disks.
#[derive(Debug)]
pub(crate) struct GivingWay {
    /// The share of its pace that the guest is to keep.
    keep: f64,
    /// Bytes per second of all copies; `None`: as fast as they can.
    limit: Option<u64>,
    alone: Alone,
    stage: Stage,
    since: Mark,
    /// How long the copy goes on until it is judged.
    stretch: Duration,
    told: Told,
}

/// For the report.
#[derive(Debug, Default)]
struct Told {
    /// What requests would have taken alone, and what they took, in milliseconds.
    alone_ms: f64,
    took_ms: f64,
    /// How long copies were slower than they could be.
    held: Duration,
}

impl GivingWay {
    /// Begins with the copies. `keep`: per cent of its pace that the guest is to keep.
    pub(crate) fn new(keep: u8, now: Mono) -> Self {
        Self {
            keep: f64::from(keep) / 100.0,
            limit: None,
            alone: Alone::default(),
            stage: Stage::Copying,
            since: Mark { at: now, done: Requests::default(), copied: 0 },
            stretch: COPY_LEAST,
            told: Told::default(),
        }
    }

    /// What all copies together may take at present, in bytes per second; `None`: all that they can.
    pub(crate) fn speed(&self) -> Option<u64> {
        match self.stage {
            Stage::Copying => self.limit,
            Stage::Settling { .. } | Stage::Resting { .. } => Some(REST_SPEED),
        }
    }

    /// Whether copies are slower than they could be, for the guest's sake.
    pub(crate) fn holds_back(&self) -> bool {
        self.limit.is_some()
    }

    /// Takes note of what was done by now: the guest's requests, and bytes by the copies, both from when they began.
    pub(crate) fn look(&mut self, now: Mono, done: Requests, copied: u64) {
        if self.keep <= 0.0 {
            return;
        }
        let took = now.since(self.since.at);
        let window = Window {
            done: done.since(self.since.done),
            rate: copied.saturating_sub(self.since.copied) as f64 / took.as_secs_f64().max(1e-3),
        };
        let next = match self.stage {
            Stage::Copying if took < self.stretch => return,
            Stage::Copying => {
                self.told.held += if self.limit.is_some() { took } else { Duration::ZERO };
                self.after_copying(window)
            }
            Stage::Settling { .. } if took < SETTLE => return,
            Stage::Settling { copy } => {
                self.told.held += took;
                Stage::Resting { copy }
            }
            Stage::Resting { .. } if took < REST.0 || (window.done.count() < FEW && took < REST.1) => return,
            Stage::Resting { copy } => {
                self.told.held += took;
                self.alone.learn(window.done);
                self.judge(copy);
                Stage::Copying
            }
        };
        self.stage = next;
        self.since = Mark { at: now, done, copied };
    }

    fn after_copying(&mut self, copy: Window) -> Stage {
        if copy.done.count() >= FEW {
            return Stage::Settling { copy };
        }
        // Nobody is in a hurry here but the copy.
        self.change(copy.rate, CHANGE.1);
        self.stretch = COPY_LEAST;
        Stage::Copying
    }

    /// Finds the next rate by what requests took in this window.
    fn judge(&mut self, copy: Window) {
        let (alone, took) = self.alone.compare(copy.done);
        if took <= 0.0 {
            return;
        }
        self.told.alone_ms += alone;
        self.told.took_ms += took;
        let loss = (1.0 - alone / took).max(0.01);
        let factor = (MARGIN * (1.0 - self.keep) / loss).clamp(CHANGE.0, CHANGE.1);
        let is_right = (RIGHT.0..=RIGHT.1).contains(&factor);
        // Rather a little too slow than too fast.
        if factor < 1.0 || !is_right {
            self.change(copy.rate, factor);
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
        let Told { alone_ms, took_ms, held } = &self.told;
        (*took_ms > 0.0).then(|| GaveWay {
            kept_pace: (alone_ms / took_ms).min(1.0),
            held_back_ms: held.as_secs_f64() * 1e3,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that makes one request after the other, each of `alone_ms` and longer by `slower` for each 100 MB/s of the copy.
    struct Guest {
        alone_ms: f64,
        slower: f64,
        /// What the copy reaches without a limit.
        fastest: f64,
    }

    /// What came of a copy.
    struct Copied {
        kept: f64,
        rate: f64,
        pace: GivingWay,
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts, not negative")]
    fn copy(guest: &Guest, keep: u8, seconds: u64) -> Copied {
        let mut pace = GivingWay::new(keep, Mono(0));
        let (mut done, mut copied, mut made) = (Requests::default(), 0.0, 0.0);
        let mut ended = (0.0, 0.0);
        let looks = seconds * 10;
        for look in 1..=looks {
            let rate = pace.speed().map_or(guest.fastest, |speed| (speed as f64).min(guest.fastest));
            let each = guest.alone_ms * (1.0 + guest.slower * rate / 1e8);
            made += 100.0 / each;
            let new = made as u64 - done.reads.count;
            done.reads.count += new;
            done.reads.ms += new as f64 * each;
            copied += rate / 10.0;
            if look == looks / 2 {
                ended = (made, copied);
            }
            pace.look(Mono(look * 100_000_000), done, copied as u64);
        }
        let half = seconds as f64 / 2.0;
        Copied {
            kept: (made - ended.0) / (half * 1e3 / guest.alone_ms),
            rate: (copied - ended.1) / half,
            pace,
        }
    }

    #[test]
    fn a_busy_guest_keeps_its_share_and_the_copy_goes_on() {
        // At full speed it would keep a quarter.
        let guest = Guest { alone_ms: 0.5, slower: 1.0, fastest: 3e8 };
        let Copied { kept, rate, pace } = copy(&guest, 75, 40);
        assert!((0.75..0.85).contains(&kept), "{kept}");
        assert!(rate > 2e7, "{rate}");
        let told = pace.told().expect("it was measured");
        assert!(pace.holds_back() && told.held_back_ms > 30_000.0 && told.kept_pace > 0.6, "{told:?}");
        let Copied { kept, rate: faster, .. } = copy(&guest, 50, 40);
        assert!((0.5..0.65).contains(&kept) && faster > rate * 1.5, "{kept} {faster}");
    }

    #[test]
    fn a_guest_that_is_not_held_up_has_its_disks_copied_at_full_speed() {
        let guest = Guest { alone_ms: 0.5, slower: 0.02, fastest: 3e8 };
        let Copied { rate, pace, .. } = copy(&guest, 75, 40);
        assert!(!pace.holds_back() && rate > 2.7e8, "{rate}: some of the time it rests");
        // Hardly any requests: no rest, either.
        let idle = Guest { alone_ms: 90.0, slower: 1.0, fastest: 3e8 };
        let Copied { rate, pace, .. } = copy(&idle, 75, 40);
        assert!(rate > 2.99e8 && pace.told().is_none(), "{rate}");
    }

    #[test]
    fn who_wants_no_pace_gets_none() {
        let guest = Guest { alone_ms: 0.5, slower: 1.0, fastest: 3e8 };
        let Copied { rate, pace, .. } = copy(&guest, 0, 10);
        assert!(rate > 2.99e8 && pace.told().is_none() && !pace.holds_back(), "{rate}");
    }

    #[test]
    fn a_copy_goes_on_however_slow_it_makes_the_guest() {
        let guest = Guest { alone_ms: 0.5, slower: 100.0, fastest: 3e8 };
        let Copied { rate, .. } = copy(&guest, 75, 40);
        assert!(rate > SLOWEST as f64 * 0.7, "{rate}");
    }

    #[test]
    fn a_copy_is_let_go_when_the_guest_rests() {
        let mut pace = GivingWay::new(75, Mono(0));
        let busy = |count: u64, ms: f64| Requests { reads: Kind { count, ms }, writes: Kind::default() };
        let mut at = 0;
        let mut look = |pace: &mut GivingWay, done, copied| {
            at += 400_000_000;
            pace.look(Mono(at), done, copied);
        };
        look(&mut pace, busy(100, 200.0), 120_000_000);
        assert_eq!(pace.speed(), Some(REST_SPEED));
        look(&mut pace, busy(200, 250.0), 120_000_000);
        look(&mut pace, busy(300, 300.0), 120_000_000);
        let slow = pace.speed().expect("it is held back");
        assert!(slow < 300_000_000 && slow > SLOWEST, "{slow}");
        let mut copied = 120_000_000;
        for _ in 0..10 {
            copied += pace.speed().unwrap_or(300_000_000).min(300_000_000) * 2 / 5;
            look(&mut pace, busy(300, 300.0), copied);
        }
        assert_eq!(pace.speed(), None);
    }
}
