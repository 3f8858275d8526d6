//! The one clock of this crate.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// A moment of `CLOCK_MONOTONIC` of this host.
///
/// Unit: nanoseconds since an unspecified start (boot, on Linux); comparable between processes of one host, never
/// between hosts. Resolution is the clock's, about 1 ns on x86-64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MonotonicNanos(pub u64);

impl MonotonicNanos {
    /// The present moment.
    #[must_use]
    pub fn now() -> Self {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        // Monotonic time is never negative and u64 nanoseconds last 584 years.
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
        Self(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }

    /// Time from `earlier` to `self`; zero if `earlier` is in fact later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for MonotonicNanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}s", self.0 / 1_000_000_000, self.0 % 1_000_000_000 / 1_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goes_forward_and_never_underflows() {
        let first = MonotonicNanos::now();
        let second = MonotonicNanos::now();
        assert!(second >= first);
        assert_eq!(first.since(MonotonicNanos(first.0 + 5)), Duration::ZERO);
        assert_eq!(MonotonicNanos(7).since(MonotonicNanos(2)), Duration::from_nanos(5));
        assert_eq!(MonotonicNanos(1_500_000_000).to_string(), "1.500000s");
    }
}
