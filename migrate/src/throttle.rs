//! `--bandwidth`: a token bucket that all bulk readers of a session share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vmove_types::spec::Bandwidth;
use vmove_types::time::Mono;

/// Niceness of threads that copy pages while the guest runs beside them. Four of them at 5 leave a guest thread on two processors
/// more than 80 % of one; at 10 they were starved for 5 ms at a time by anything else on the host.
pub const BULK_NICE: i8 = 5;

/// Longest burst, as time at the full rate.
const BURST: Duration = Duration::from_millis(10);

/// Spaces bulk reads so that their sum stays below a rate.
///
/// Lock-free: it keeps the moment at which the next byte may go ("virtual scheduling", as in the generic cell rate algorithm,
/// ITU-T I.371), and each reader moves it on.
#[derive(Debug)]
pub struct Throttle {
    bytes_per_s: Option<u64>,
    next: AtomicU64,
}

impl Throttle {
    /// A bucket for `limit`, or one that never holds anything back.
    #[must_use]
    pub fn new(limit: Option<Bandwidth>) -> Self {
        Self { bytes_per_s: limit.map(|b| b.0.max(1)), next: AtomicU64::new(0) }
    }

    /// Books `bytes` and returns how long to wait before they may be asked for.
    pub fn book(&self, bytes: u64) -> Duration {
        let Some(rate) = self.bytes_per_s else { return Duration::ZERO };
        let now = Mono::now().0;
        let cost = u64::try_from(u128::from(bytes) * 1_000_000_000 / u128::from(rate)).unwrap_or(u64::MAX);
        let burst = u64::try_from(BURST.as_nanos()).unwrap_or(0);
        let mut next = self.next.load(Ordering::Relaxed);
        loop {
            // Unused time is not saved up beyond one burst.
            let from = next.max(now.saturating_sub(burst));
            // Relaxed: the value itself is all that is shared.
            match self.next.compare_exchange_weak(
                next,
                from.saturating_add(cost),
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Duration::from_nanos(from.saturating_sub(now)),
                Err(seen) => next = seen,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_limit_never_waits() {
        let t = Throttle::new(None);
        assert_eq!(t.book(u64::MAX), Duration::ZERO);
    }

    #[test]
    fn the_waits_add_up_to_the_rate() {
        let t = Throttle::new(Some(Bandwidth(100 << 20)));
        let mut last = Duration::ZERO;
        for _ in 0..100 {
            last = t.book(1 << 20);
        }
        // 100 MiB at 100 MiB/s: the last one waits for about a second, less the burst.
        assert!((Duration::from_millis(900)..Duration::from_millis(1000)).contains(&last), "{last:?}");
    }
}
