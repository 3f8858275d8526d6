//! The one clock of a node.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// A moment of `CLOCK_MONOTONIC` of this host.
///
/// Unit: nanoseconds since an unspecified start (boot, on Linux); comparable between processes of one host, never
/// between hosts. Resolution is the clock's, about 1 ns on x86-64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Mono(pub u64);

impl Mono {
    /// The present moment.
    #[must_use]
    pub fn now() -> Self {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        // Monotonic time is never negative and u64 nanoseconds last 584 years.
        Self(time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs())
    }

    /// Time from `earlier` to `self`; zero if `earlier` is in fact later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Milliseconds from `earlier` to `self`; zero if `earlier` is in fact later.
    #[must_use]
    pub fn ms_since(self, earlier: Self) -> f64 {
        ms(self.since(earlier))
    }
}

impl fmt::Display for Mono {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}s", self.0 / 1_000_000_000, self.0 % 1_000_000_000 / 1_000)
    }
}

/// A duration in milliseconds.
#[must_use]
pub fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goes_forward_and_never_underflows() {
        let first = Mono::now();
        let second = Mono::now();
        assert!(second >= first);
        assert_eq!(first.since(Mono(first.0 + 5)), Duration::ZERO);
        assert_eq!(Mono(7).since(Mono(2)), Duration::from_nanos(5));
        assert_eq!(Mono(1_500_000_000).to_string(), "1.500000s");
    }
}
