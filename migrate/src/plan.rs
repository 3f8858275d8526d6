//! When pre-copy rounds end, and which mode `auto` takes: arithmetic only.

use std::time::Duration;

use vmove_types::spec::Mode;
use vmove_types::units::{format_bytes, format_rate};

/// A round must shrink what is left below this part of what it began with, or it does not pay.
const PAYS: f64 = 0.75;
/// What is left crosses in less time than the device state does anyway (about 5 to 10 ms): no round can shorten the pause.
const SMALL_MS: f64 = 4.0;
/// Rounds cost guest time (write-protection faults); past this number something is odd.
const MAX_ROUNDS: u32 = 30;
/// `precopy` has promised not to fall back: it goes on trying while the guest may calm down.
const MAX_STUBBORN_ROUNDS: u32 = 60;

/// A round, and what it leaves if it shrinks nothing, in rounds.
const ROUND_AND_REST: f64 = 2.5;

/// Rounds after which pre-copy says that it does not converge.
const ROUNDS_TO_TELL: u32 = 2;

/// A guest that was watched for a while goes on writing other pages at that rate for at most this many times as long.
const BELIEVED: f64 = 4.0;

/// What is known after a round and its scan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Standing {
    /// Rounds done.
    pub rounds: u32,
    /// Bytes that crossed in the last round: of huge pages less than their size, if parts were zero or there already.
    pub last_bytes: u64,
    /// Bytes that are dirty now.
    pub left_bytes: u64,
    /// Measured page payload per second of the link.
    pub link_bytes_per_s: f64,
}

impl Standing {
    /// How long what is left will take, in milliseconds.
    #[must_use]
    pub fn left_ms(&self) -> f64 {
        if self.left_bytes == 0 { 0.0 } else { self.left_bytes as f64 / self.link_bytes_per_s.max(1.0) * 1e3 }
    }
}

/// What to do next.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// Another round.
    Round,
    /// Stop the guest. Why.
    Stop(String),
    /// `precopy` cannot keep its promise. Why.
    GiveUp(String),
}

/// Decides after a round.
#[must_use]
pub fn next(mode: Mode, max_downtime_ms: f64, s: Standing) -> Next {
    let left_ms = s.left_ms();
    let pays = (s.left_bytes as f64) < PAYS * s.last_bytes as f64;
    let fits = left_ms <= max_downtime_ms;
    let left = format!(
        "{} left, {left_ms:.1} ms at {}",
        format_bytes(s.left_bytes),
        format_rate(s.link_bytes_per_s)
    );
    if left_ms <= SMALL_MS.min(max_downtime_ms) {
        return Next::Stop(format!("{left}: less than the device state takes"));
    }
    match mode {
        Mode::Postcopy => Next::Stop("post-copy has no rounds".to_owned()),
        Mode::Hybrid if !pays => Next::Stop(format!("{left}: another round would not shrink it")),
        Mode::Hybrid if s.rounds >= MAX_ROUNDS => Next::Stop(format!("{left} after {MAX_ROUNDS} rounds")),
        Mode::Precopy if fits && (!pays || s.rounds >= MAX_ROUNDS) => Next::Stop(format!(
            "{left}: within the limit of {max_downtime_ms} ms, and another round would not shrink it"
        )),
        Mode::Precopy if s.rounds >= MAX_STUBBORN_ROUNDS => Next::GiveUp(format!(
            "does not converge: {left} after {} rounds, allowed are {max_downtime_ms} ms; use --mode hybrid, or --max-downtime {:.0}ms",
            s.rounds,
            left_ms.ceil() + 1.0
        )),
        Mode::Hybrid | Mode::Precopy => Next::Round,
    }
}

/// What is told of pre-copy that goes on though its last round gained nothing and what is left takes longer than is allowed. It may still
/// end if the guest calms down.
#[must_use]
pub fn not_converging(max_downtime_ms: f64, s: Standing) -> Option<String> {
    let left_ms = s.left_ms();
    let pays = (s.left_bytes as f64) < PAYS * s.last_bytes as f64;
    (s.rounds >= ROUNDS_TO_TELL && !pays && left_ms > max_downtime_ms).then(|| {
        format!(
            "does not converge: {} left after {} rounds, which take {left_ms:.0} ms, and {max_downtime_ms} ms are allowed. \
             It is tried for {MAX_STUBBORN_ROUNDS} rounds, in case the guest calms down; --mode hybrid or --max-downtime {:.0}ms would end it",
            format_bytes(s.left_bytes),
            s.rounds,
            left_ms.ceil() + 1.0
        )
    })
}

/// Whether pre-copy stops the guest for all that is left rather than begin with a round. It does if that is allowed, and if most
/// of what a round would send would be written again: then the round costs its time and gains nothing. Says why.
///
/// `dirty_bytes` are of the pages that the guest wrote in the time `watched`, each counted once. A guest returns to pages that it
/// has written, so it is believed to write others like this for at most [`BELIEVED`] times as long as it was watched.
#[must_use]
pub fn stop_at_once(
    max_downtime_ms: f64,
    left: Standing,
    dirty_bytes: u64,
    watched: Duration,
) -> Option<String> {
    let left_ms = left.left_ms();
    let longer = (left_ms / (watched.as_secs_f64() * 1e3).max(1.0)).min(BELIEVED);
    let again = dirty_bytes as f64 * longer;
    let pays = again < PAYS * left.left_bytes as f64;
    (left_ms <= max_downtime_ms && !pays).then(|| {
        format!(
            "{} left, {left_ms:.1} ms at {}: within the limit of {max_downtime_ms} ms, and most of it would be written again before it has crossed ({} in {:.0} ms)",
            format_bytes(left.left_bytes),
            format_rate(left.link_bytes_per_s),
            format_bytes(dirty_bytes),
            watched.as_secs_f64() * 1e3
        )
    })
}

/// Whether a guest is without its devices for a shorter time if memory is sent ahead and compared when they have left, and why. Rates: bytes per second.
#[must_use]
pub fn head_start(link_bytes_per_s: f64, compared_bytes_per_s: f64) -> (bool, String) {
    let pays = link_bytes_per_s < PAYS * compared_bytes_per_s;
    let (link, compared) = (format_rate(link_bytes_per_s), format_rate(compared_bytes_per_s));
    let why = if pays {
        format!("memory crosses at {link}, and is compared at {compared}")
    } else {
        format!("memory crosses at {link}, and comparing it, at {compared}, would save little of that")
    };
    (pays, why)
}

/// Whether a round shrinks what is left of a guest that dirties so many bytes in a second.
#[must_use]
pub fn could_shrink(dirty_bytes_per_s: f64, link_bytes_per_s: f64) -> bool {
    dirty_bytes_per_s < PAYS * link_bytes_per_s
}

/// What is done when the time for more rounds is over.
#[derive(Debug, Clone, PartialEq)]
pub enum Hurry {
    /// The guest is stopped. Why.
    Stop(String),
    /// The guest is stopped, and what is left follows it: pre-copy turns hybrid. Why.
    Turn(String),
}

/// Whether a goal's time is up: another round takes longer than there is, together with what it leaves, which may be as much and comes slower when the
/// guest waits for it. So what is left crosses now. `None`: there is time, or pre-copy is what the operator wants, and what is left does not fit the
/// pause. Times: milliseconds, for pages until the end, and for pages in the pause.
#[must_use]
pub fn hurry(mode: Mode, may_turn: bool, (left_ms, in_pause_ms): (f64, f64), s: Standing) -> Option<Hurry> {
    let round_ms = s.left_ms();
    if round_ms * ROUND_AND_REST + SMALL_MS <= left_ms {
        return None;
    }
    let why = format!(
        "{} left, {round_ms:.1} ms at {}: another round would take more time than the goal leaves",
        format_bytes(s.left_bytes),
        format_rate(s.link_bytes_per_s)
    );
    match mode {
        Mode::Hybrid => Some(Hurry::Stop(why)),
        Mode::Precopy if round_ms <= in_pause_ms => Some(Hurry::Stop(why)),
        Mode::Precopy if may_turn => Some(Hurry::Turn(format!("{why}; the rest follows the guest"))),
        Mode::Precopy | Mode::Postcopy => None,
    }
}

/// How the rate of a link is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkKnown {
    /// By what crossed in this migration.
    Measured,
    /// By what the last migration to the same node measured.
    Before {
        /// How long that is ago.
        ago: Duration,
    },
    /// By what several migrations to the same node measured, the middle of that.
    Usual {
        /// How many.
        migrations: usize,
    },
    /// By `vmove fabric check`: no migration to that node has measured it.
    Tried {
        /// How long that is ago.
        ago: Duration,
    },
    /// It is the limit that the operator set (`--bandwidth`).
    Limit,
    /// It is not.
    Assumed,
}

/// The rate of a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Page payload per second.
    pub bytes_per_s: f64,
    /// How that is known.
    pub known: LinkKnown,
}

impl Link {
    /// In words.
    pub(crate) fn told(self) -> String {
        let rate = format_rate(self.bytes_per_s);
        match self.known {
            LinkKnown::Measured => format!("link moves {rate}"),
            LinkKnown::Before { ago } => {
                format!("link moved {rate} in the last migration to this node, {} ago", age(ago))
            }
            LinkKnown::Usual { migrations } => {
                format!("link moved {rate}, the middle of the last {migrations} migrations to this node")
            }
            LinkKnown::Tried { ago } => {
                format!("link moved {rate} in `vmove fabric check`, {} ago", age(ago))
            }
            LinkKnown::Limit => format!("link may be used for {rate}"),
            LinkKnown::Assumed => format!("link is not measured, {rate} assumed"),
        }
    }
}

/// What `auto` knows when it chooses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outlook {
    /// Guest memory with content, in bytes.
    pub content_bytes: u64,
    /// Bytes per second that the guest dirties, over the sample.
    pub dirty_bytes_per_s: f64,
    /// What moves the memory.
    pub link: Link,
    /// The operator's limit.
    pub max_downtime_ms: f64,
    /// The kernel can track writes.
    pub can_track: bool,
}

/// Chooses a mode and says why.
///
/// The model is that of Clark et al. (NSDI 2005): while the guest dirties at a part `r` of the link's rate, what is left
/// shrinks by `r` each round. At `r` near 1 rounds are wasted and only post-copy is bounded.
#[must_use]
pub fn choose(o: Outlook) -> (Mode, String) {
    if !o.can_track {
        return (
            Mode::Postcopy,
            "this kernel cannot track writes (PAGEMAP_SCAN, Linux 6.7): post-copy is what remains".to_owned(),
        );
    }
    let link = o.link.bytes_per_s.max(1.0);
    let r = o.dirty_bytes_per_s / link;
    let facts = format!("guest dirties {}, {}", format_rate(o.dirty_bytes_per_s), o.link.told());
    let full_ms = o.content_bytes as f64 / link * 1e3;
    // After three rounds what is left is content * r^3; the pause must hold it.
    let left_ms = full_ms * r.powi(3);
    if r <= 0.25 && left_ms <= 0.5 * o.max_downtime_ms {
        let why = format!(
            "{facts}: pre-copy leaves about {left_ms:.1} ms to send in the pause, and a lost peer cannot hurt the guest"
        );
        (Mode::Precopy, why)
    } else if r < 0.9 {
        (
            Mode::Hybrid,
            format!(
                "{facts}: rounds shrink what is left by {:.0} % each, the rest follows the guest",
                (1.0 - r) * 100.0
            ),
        )
    } else {
        (Mode::Postcopy, format!("{facts}: rounds would never catch up"))
    }
}

/// A past time for people: `3 min`.
fn age(ago: Duration) -> String {
    match ago.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min", seconds / 60),
        seconds @ 3600..86_400 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LINK: f64 = 2e9;

    fn at(rounds: u32, last_bytes: u64, left_bytes: u64) -> Standing {
        Standing { rounds, last_bytes, left_bytes, link_bytes_per_s: LINK }
    }

    #[test]
    fn a_shrinking_guest_gets_rounds_until_little_is_left() {
        assert_eq!(next(Mode::Hybrid, 300.0, at(1, 600 << 20, 100 << 20)), Next::Round);
        assert!(matches!(next(Mode::Hybrid, 300.0, at(3, 20 << 20, 2 << 20)), Next::Stop(_)));
    }

    #[test]
    fn a_head_start_pays_where_memory_is_compared_faster_than_it_crosses() {
        let (pays, why) = head_start(1.25e9, 10e9);
        assert!(pays && why == "memory crosses at 1.16 GiB/s, and is compared at 9.31 GiB/s", "{why}");
        let (pays, why) = head_start(12.5e9, 10e9);
        assert!(!pays && why.contains("would save little"), "{why}");
    }

    #[test]
    fn hybrid_stops_when_a_round_does_not_pay() {
        let Next::Stop(why) = next(Mode::Hybrid, 300.0, at(1, 512 << 20, 500 << 20)) else {
            panic!("wanted a stop")
        };
        assert!(why.contains("would not shrink"), "{why}");
    }

    #[test]
    fn a_guest_that_dirties_as_fast_as_the_link_gets_no_more_rounds() {
        assert!(could_shrink(0.4e9, LINK) && could_shrink(0.0, LINK));
        assert!(!could_shrink(0.9 * LINK, LINK) && !could_shrink(3.0 * LINK, LINK));
    }

    #[test]
    fn precopy_keeps_its_promise_or_gives_up() {
        // 400 MB take 200 ms: within 300 ms, and no round helps.
        assert!(matches!(next(Mode::Precopy, 300.0, at(4, 400_000_000, 400_000_000)), Next::Stop(_)));
        assert_eq!(next(Mode::Precopy, 100.0, at(4, 400_000_000, 400_000_000)), Next::Round);
        let Next::GiveUp(why) = next(Mode::Precopy, 100.0, at(60, 400_000_000, 400_000_000)) else {
            panic!("wanted an end")
        };
        assert!(why.contains("--max-downtime 201ms"), "{why}");
    }

    #[test]
    fn precopy_tells_of_rounds_in_vain_after_two_of_them() {
        let told = not_converging(100.0, at(2, 400_000_000, 400_000_000)).expect("it is told");
        assert!(told.contains("does not converge") && told.contains("--max-downtime 201ms"), "{told}");
        assert_eq!(not_converging(100.0, at(1, 400_000_000, 400_000_000)), None, "too early");
        assert_eq!(not_converging(300.0, at(2, 400_000_000, 400_000_000)), None, "it is allowed");
        assert_eq!(not_converging(100.0, at(2, 800_000_000, 400_000_000)), None, "it shrinks");
    }

    #[test]
    fn rounds_end_when_the_time_of_a_goal_is_up() {
        // 400 MB take 200 ms, and the next round would leave as much.
        let s = at(3, 400_000_000, 400_000_000);
        let turns = |mode, may_turn, left_ms, in_pause| hurry(mode, may_turn, (left_ms, in_pause), s);
        assert_eq!(turns(Mode::Hybrid, false, 600.0, 10.0), None, "there is time");
        assert!(matches!(turns(Mode::Hybrid, false, 300.0, 10.0), Some(Hurry::Stop(_))));
        assert!(matches!(turns(Mode::Precopy, true, 300.0, 10.0), Some(Hurry::Turn(_))));
        assert!(
            matches!(turns(Mode::Precopy, true, 300.0, 250.0), Some(Hurry::Stop(_))),
            "it fits the pause"
        );
        assert_eq!(turns(Mode::Precopy, false, 300.0, 10.0), None, "nobody has asked for hybrid");
    }

    #[test]
    fn auto_says_how_it_knows_the_link() {
        let told = |known| Link { bytes_per_s: 1e9, known }.told();
        assert!(told(LinkKnown::Measured).contains("moves 953.67 MiB/s"));
        let hours = Duration::from_secs(3 * 3600 + 59);
        assert!(
            told(LinkKnown::Before { ago: hours }).ends_with("in the last migration to this node, 3 h ago")
        );
        assert!(told(LinkKnown::Tried { ago: hours }).ends_with("in `vmove fabric check`, 3 h ago"));
        assert!(told(LinkKnown::Assumed).contains("assumed"));
    }

    #[test]
    fn a_round_that_would_gain_nothing_is_not_begun() {
        let ms = Duration::from_millis;
        let stops = |limit, left, dirty, watched| stop_at_once(limit, at(0, 0, left), dirty, watched);
        // 400 MB take 200 ms. All of them were written while it was watched, or many of them in half the time.
        let why = stops(300.0, 400_000_000, 400_000_000, ms(100)).expect("it stops");
        assert!(why.contains("within the limit") && why.contains("written again"), "{why}");
        assert!(stops(300.0, 400_000_000, 160_000_000, ms(100)).is_some());
        // Not allowed to stand still so long; writes little.
        assert!(stops(100.0, 400_000_000, 400_000_000, ms(100)).is_none());
        assert!(stops(300.0, 400_000_000, 140_000_000, ms(100)).is_none());
        // Little is left, and crosses while little of it is written.
        assert!(stops(300.0, 40_000_000, 40_000_000, ms(1000)).is_none());
        // 64 GB: what was seen in 100 ms says nothing about the half minute that a round takes.
        assert!(stops(60_000.0, 64_000_000_000, 300_000_000, ms(100)).is_none());
    }

    #[test]
    fn auto_follows_the_ratio() {
        let o = |dirty: f64, can_track| Outlook {
            content_bytes: 1 << 30,
            dirty_bytes_per_s: dirty,
            link: Link { bytes_per_s: LINK, known: LinkKnown::Measured },
            max_downtime_ms: 300.0,
            can_track,
        };
        assert_eq!(choose(o(0.0, true)).0, Mode::Precopy);
        assert_eq!(choose(o(0.3 * LINK, true)).0, Mode::Hybrid);
        assert_eq!(choose(o(3.0 * LINK, true)).0, Mode::Postcopy);
        let (mode, why) = choose(o(0.0, false));
        assert_eq!(mode, Mode::Postcopy);
        assert!(why.contains("PAGEMAP_SCAN"));
    }

    proptest! {
        /// Whatever a guest does, the rounds end.
        #[test]
        fn rounds_always_end(precopy in any::<bool>(), lefts in proptest::collection::vec(0u64..1 << 40, 61)) {
            let mode = if precopy { Mode::Precopy } else { Mode::Hybrid };
            let mut last = 1 << 40;
            let ended = lefts.iter().zip(1..).any(|(left, rounds)| {
                let n = next(mode, 50.0, at(rounds, last, *left));
                last = *left;
                n != Next::Round
            });
            prop_assert!(ended);
        }
    }
}
