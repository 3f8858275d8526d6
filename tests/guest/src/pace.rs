//! Keeps a fixed rate of work without ever catching up.
//!
//! Work is done in short periods. A worker that is late by a whole period or more, because its machine was stopped or a
//! page was not there, goes on from now: what it missed stays missed. That makes lost work measurable from outside, as
//! the difference between the work done and the work that the rate calls for.

/// What to do after the work of a period is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// When the next period begins, in nanoseconds of the clock that was given; `None`: at once.
    pub until: Option<u64>,
    /// Time that was given up for good, in nanoseconds.
    pub lost: u64,
}

/// A schedule of equal periods, and the share of work in each.
#[derive(Debug, Clone)]
pub struct Pacer {
    period_ns: u64,
    deadline: u64,
}

impl Pacer {
    /// Periods of `period_ns` nanoseconds; the first one begins at `now`.
    #[must_use]
    pub const fn new(period_ns: u64, now: u64) -> Self {
        Self { period_ns, deadline: now + period_ns }
    }

    /// Called when the work of a period is done. Lateness of less than a period is made up for (else the jitter of
    /// each wake-up would lower the rate); more is lost.
    pub const fn finish(&mut self, now: u64) -> Wait {
        let deadline = self.deadline;
        if now <= deadline {
            self.deadline = deadline + self.period_ns;
            return Wait { until: Some(deadline), lost: 0 };
        }
        let late = now - deadline;
        if late < self.period_ns {
            self.deadline = deadline + self.period_ns;
            return Wait { until: None, lost: 0 };
        }
        self.deadline = now + self.period_ns;
        Wait { until: None, lost: late }
    }

    /// Called in the middle of a period that has no fixed work: `until` is set while the period lasts.
    pub const fn finish_unpaced(&mut self, now: u64) -> Wait {
        let deadline = self.deadline;
        if now < deadline {
            return Wait { until: Some(deadline), lost: 0 };
        }
        self.deadline = now + self.period_ns;
        Wait { until: None, lost: 0 }
    }
}

/// Spreads a rate over periods: whole units now, the rest of a unit later.
#[derive(Debug, Clone)]
pub struct Quota {
    per_second: u64,
    period_ns: u64,
    rest: u64,
}

impl Quota {
    /// `per_second` units in a second, given out in periods of `period_ns` nanoseconds.
    #[must_use]
    pub const fn new(per_second: u64, period_ns: u64) -> Self {
        Self { per_second, period_ns, rest: 0 }
    }

    /// The units of the next period.
    pub const fn take(&mut self) -> u64 {
        let owed = self.per_second * self.period_ns + self.rest;
        self.rest = owed % 1_000_000_000;
        owed / 1_000_000_000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_punctual_worker_keeps_to_the_grid() {
        let mut pacer = Pacer::new(MS, 0);
        assert_eq!(pacer.finish(400_000), Wait { until: Some(MS), lost: 0 });
        // Woken 100 us late, done 500 us later: the grid has not moved.
        assert_eq!(pacer.finish(MS + 600_000), Wait { until: Some(2 * MS), lost: 0 });
    }

    #[test]
    fn a_little_lateness_is_made_up_for() {
        let mut pacer = Pacer::new(MS, 0);
        assert_eq!(pacer.finish(MS + 300_000), Wait { until: None, lost: 0 });
        assert_eq!(pacer.finish(MS + 700_000), Wait { until: Some(2 * MS), lost: 0 });
    }

    #[test]
    fn a_stall_is_lost_and_never_caught_up() {
        let mut pacer = Pacer::new(MS, 0);
        assert_eq!(pacer.finish(250 * MS), Wait { until: None, lost: 249 * MS });
        // One period of work a period of time from here on.
        assert_eq!(pacer.finish(250 * MS + 400_000), Wait { until: Some(251 * MS), lost: 0 });
    }

    #[test]
    fn quotas_add_up_to_the_rate() {
        for rate in [0, 1, 3, 999, 1000, 1001, 100_000, 123_457] {
            let mut quota = Quota::new(rate, MS);
            assert_eq!((0..1000).map(|_| quota.take()).sum::<u64>(), rate);
        }
    }
}
