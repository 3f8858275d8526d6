//! How fast a disk is copied.

use std::collections::VecDeque;
use std::time::Duration;

use vmove_types::time::Mono;

/// Over which time: copies come in bursts, and rest for [the guest](crate::giving_way).
const OVER: Duration = Duration::from_secs(4);
/// Looks of that time, at least, so that nothing is kept for ever where somebody looks all the time.
const LOOKS: usize = 64;

/// The rate over the last seconds.
#[derive(Debug, Default)]
pub(crate) struct CopyRate {
    /// When it was looked, and how many bytes were dealt with then. The first is older than the time, or the first of all.
    looks: VecDeque<(Mono, u64)>,
}

impl CopyRate {
    /// So many bytes are dealt with now.
    pub(crate) fn look(&mut self, now: Mono, done: u64) {
        let is_due = |(last, _): &(Mono, u64)| now.since(*last) * u32::try_from(LOOKS).unwrap_or(1) >= OVER;
        if self.looks.back().is_none_or(is_due) {
            self.looks.push_back((now, done));
        }
        while self.looks.get(1).is_some_and(|(second, _)| now.since(*second) >= OVER) {
            self.looks.pop_front();
        }
    }

    /// In bytes per second; 0 before the second look.
    pub(crate) fn bytes_per_s(&self) -> f64 {
        let (Some((first, before)), Some((last, done))) = (self.looks.front(), self.looks.back()) else {
            return 0.0;
        };
        let seconds = last.since(*first).as_secs_f64();
        if seconds > 0.0 { done.saturating_sub(*before) as f64 / seconds } else { 0.0 }
    }

    /// Milliseconds until so many bytes more are dealt with; nothing while none are.
    pub(crate) fn eta_ms(&self, left: u64) -> Option<f64> {
        let rate = self.bytes_per_s();
        (rate > 0.0).then(|| left as f64 / rate * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rest_does_not_make_the_rate_nothing() {
        let mut rate = CopyRate::default();
        assert_eq!((rate.bytes_per_s(), rate.eta_ms(1)), (0.0, None));
        let mut done = 0;
        for tenth in 0..100_u64 {
            rate.look(Mono(tenth * 100_000_000), done);
            // It rests for a fifth of the time.
            done += if tenth % 10 < 8 { 1000 } else { 0 };
        }
        let now = rate.bytes_per_s();
        assert!((7500.0..=8500.0).contains(&now), "{now}");
        assert!(rate.eta_ms(8000).is_some_and(|ms| (900.0..1100.0).contains(&ms)));
        assert!(rate.looks.len() < LOOKS);
        // It has stopped, and that is seen after the time.
        rate.look(Mono(20_000_000_000), done);
        rate.look(Mono(24_100_000_000), done);
        assert_eq!(rate.eta_ms(1), None);
    }
}
