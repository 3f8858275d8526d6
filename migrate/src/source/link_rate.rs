//! How fast the link to a destination is: measured by what crosses it, or remembered from the last migration to there.

use std::time::Duration;

use crate::past::{By, Measured};
use crate::plan::{Link, LinkKnown};
use crate::proto::message::RoundDone;
use vmove_types::spec::Bandwidth;

/// A smaller round says more about how long a round takes to begin than about the link.
const LEAST_ROUND: u64 = 4 << 20;
/// So much must have crossed in such rounds.
const LEAST_BYTES: u64 = 8 << 20;
/// And for so long, unless [`AMPLE_BYTES`] have crossed.
const LEAST_TIME: Duration = Duration::from_millis(10);
const AMPLE_BYTES: u64 = 64 << 20;
/// What took so long in all is a measurement, however little it is: the link is slow.
const LONG_TIME: Duration = Duration::from_secs(1);
/// Of the limit of a migration: a rate above this says nothing about the link.
const HELD_BACK: f64 = 0.8;
/// Of a link of which nothing is known. Unit: bytes per second.
const UNKNOWN: f64 = 1e9;

/// What has crossed, and how long that took.
#[derive(Debug, Clone, Copy, Default)]
struct Crossed {
    bytes: u64,
    micros: u64,
}

impl Crossed {
    fn add(&mut self, done: &RoundDone) {
        self.bytes += done.bytes;
        self.micros += done.micros;
    }

    fn for_at_least(self, time: Duration) -> bool {
        u128::from(self.micros) >= time.as_micros()
    }

    fn per_second(self) -> f64 {
        self.bytes as f64 / self.micros.max(1) as f64 * 1e6
    }
}

/// The rounds of a migration, as a measurement of its link.
#[derive(Debug, Default)]
pub(super) struct LinkRate {
    all: Crossed,
    large: Crossed,
}

impl LinkRate {
    /// Counts a round.
    pub(super) fn add(&mut self, done: &RoundDone) {
        self.all.add(done);
        if done.bytes >= LEAST_ROUND {
            self.large.add(done);
        }
    }

    /// Page payload of all of them, in bytes.
    pub(super) const fn bytes(&self) -> u64 {
        self.all.bytes
    }

    /// Page payload per second, once enough has crossed to say so.
    pub(super) fn measured(&self) -> Option<f64> {
        let large = self.large;
        let enough =
            large.bytes >= AMPLE_BYTES || large.bytes >= LEAST_BYTES && large.for_at_least(LEAST_TIME);
        let slow = self.all.bytes > 0 && self.all.for_at_least(LONG_TIME);
        enough.then(|| large.per_second()).or_else(|| slow.then(|| self.all.per_second()))
    }

    /// What this migration can count on. `before`: what is remembered of the link to this node.
    pub(super) fn link(&self, limit: Option<Bandwidth>, before: Option<&Measured>) -> Link {
        let remembered = before.and_then(|one| Some((one.link_bytes_per_s?, one)));
        let (bytes_per_s, known) = match (self.measured(), remembered) {
            (Some(rate), _) => (rate, LinkKnown::Measured),
            (None, Some((rate, one))) if one.by == By::FabricCheck => {
                (rate, LinkKnown::Tried { ago: one.ago() })
            }
            (None, Some((rate, one))) => (rate, LinkKnown::Before { ago: one.ago() }),
            (None, None) => (UNKNOWN, LinkKnown::Assumed),
        };
        match limit {
            // What a busy host makes of a limit is a little less.
            Some(limit) if HELD_BACK * limit.0 as f64 <= bytes_per_s => {
                Link { bytes_per_s: limit.0 as f64, known: LinkKnown::Limit }
            }
            _ => Link { bytes_per_s, known },
        }
    }

    /// What a later migration to this node may count on: nothing, if too little crossed or a limit held it back.
    pub(super) fn to_remember(&self, limit: Option<Bandwidth>) -> Option<f64> {
        let free = |rate: &f64| limit.is_none_or(|limit| *rate < HELD_BACK * limit.0 as f64);
        self.measured().filter(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(all: &[(u64, u64)]) -> LinkRate {
        let mut rate = LinkRate::default();
        for (bytes, micros) in all {
            rate.add(&RoundDone { round: 1, bytes: *bytes, micros: *micros });
        }
        rate
    }

    #[test]
    fn a_small_sample_measures_nothing() {
        // 1 MiB in 0.4 s, while the destination started its QEMU: this was taken for a link of 2.6 MB/s.
        let small = rounds(&[(1 << 20, 400_000)]);
        assert_eq!(small.measured(), None);
        assert_eq!(small.link(None, None), Link { bytes_per_s: UNKNOWN, known: LinkKnown::Assumed });
        let before = |by| Measured { link_bytes_per_s: Some(3e9), ..Measured::now("b", "tcp", by) };
        let known = |by| small.link(None, Some(&before(by)));
        let ago = Duration::ZERO;
        assert_eq!(known(By::Migration), Link { bytes_per_s: 3e9, known: LinkKnown::Before { ago } });
        assert_eq!(known(By::FabricCheck), Link { bytes_per_s: 3e9, known: LinkKnown::Tried { ago } });
        // Enough bytes in too short a time, and too few of them in time.
        assert_eq!(rounds(&[(8 << 20, 2_000)]).measured(), None);
        assert_eq!(rounds(&[(4 << 20, 20_000)]).measured(), None);
    }

    #[test]
    fn rounds_that_only_begin_do_not_slow_a_link_down() {
        let rate = rounds(&[(1 << 20, 400_000), (2 << 20, 50_000), (64 << 20, 50_000)]).measured();
        assert!(rate.is_some_and(|rate| rate > 1.3e9), "{rate:?}");
    }

    #[test]
    fn a_slow_link_is_known_by_the_time_it_takes() {
        let rate = rounds(&[(1 << 20, 1_000_000), (1 << 20, 1_000_000)]).measured();
        assert!(rate.is_some_and(|rate| (rate - 1_048_576.0).abs() < 1.0), "{rate:?}");
    }

    #[test]
    fn a_limit_is_known_and_not_taken_for_the_link() {
        let limit = Some(Bandwidth(300 << 20));
        let limit_rate = (300_u64 << 20) as f64;
        // A burst was faster than the limit.
        let held_back = rounds(&[(64 << 20, 50_000)]);
        assert_eq!(held_back.link(limit, None), Link { bytes_per_s: limit_rate, known: LinkKnown::Limit });
        assert_eq!(held_back.to_remember(limit), None);
        // And a busy host a little slower.
        let nearly = rounds(&[(64 << 20, 230_000)]);
        assert_eq!(nearly.link(limit, None), Link { bytes_per_s: limit_rate, known: LinkKnown::Limit });
        // Nothing was measured.
        assert_eq!(rounds(&[]).link(limit, None).bytes_per_s, limit_rate);
        // The link is slower.
        let slower = rounds(&[(64 << 20, 640_000)]);
        assert_eq!(slower.link(limit, None).known, LinkKnown::Measured);
        assert!(slower.to_remember(limit).is_some());
    }
}
