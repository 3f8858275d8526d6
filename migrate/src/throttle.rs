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

    /// How long to wait until the next read may begin. Several readers that ask at once may all begin: what they book is waited for afterwards.
    pub fn free_in(&self) -> Duration {
        if self.bytes_per_s.is_none() {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.next.load(Ordering::Relaxed).saturating_sub(Mono::now().0))
    }

    /// Of what was booked, `bytes` did not cross after all.
    pub fn give_back(&self, bytes: u64) {
        let Some(rate) = self.bytes_per_s else { return };
        let cost = cost(bytes, rate);
        // Relaxed: the value itself is all that is shared.
        let _ = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| Some(next.saturating_sub(cost)));
    }

    /// Books `bytes` that have been asked for.
    pub fn book(&self, bytes: u64) {
        let Some(rate) = self.bytes_per_s else { return };
        let now = Mono::now().0;
        let cost = cost(bytes, rate);
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
                Ok(_) => return,
                Err(seen) => next = seen,
            }
        }
    }
}

/// Nanoseconds that so many bytes take.
fn cost(bytes: u64, bytes_per_s: u64) -> u64 {
    u64::try_from(u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_limit_never_waits() {
        let t = Throttle::new(None);
        t.book(u64::MAX);
        assert_eq!(t.free_in(), Duration::ZERO);
    }

    #[test]
    fn the_waits_add_up_to_the_rate() {
        let t = Throttle::new(Some(Bandwidth(100 << 20)));
        for _ in 0..100 {
            t.book(1 << 20);
        }
        // 100 MiB at 100 MiB/s: the next one waits for about a second, less the burst.
        assert!((Duration::from_millis(900)..Duration::from_millis(1000)).contains(&t.free_in()));
    }

    #[test]
    fn a_low_rate_is_kept_however_large_a_read_is() {
        let t = Throttle::new(Some(Bandwidth(1 << 20)));
        assert_eq!(t.free_in(), Duration::ZERO);
        t.book(4 << 20);
        assert!((Duration::from_millis(3900)..Duration::from_millis(4000)).contains(&t.free_in()));
    }
}
