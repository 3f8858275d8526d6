//! How fast a sender of datagrams goes.

use std::time::Duration;

/// A point in time: since any begin that all of one run share, by a clock that never jumps.
pub type Time = Duration;

/// Most time whose bytes may be sent at once: who sleeps wakes up late, and makes up for it.
const BURST_INTERVAL: Duration = Duration::from_millis(10);
/// Losses of a mark, as the median of the hosts, above which the sender slows down.
const TOO_MANY: f64 = 0.02;
/// Losses below which it speeds up again.
const FEW: f64 = 0.005;
/// The lowest rate, as a part of the highest: losses that do not come from the rate do not stop the sender.
const FLOOR: f64 = 0.5;

/// A token bucket whose rate follows the losses.
#[derive(Debug, Clone)]
pub struct Pacer {
    /// Bytes per second at most.
    highest: f64,
    /// Bytes per second now.
    rate: f64,
    /// When the bytes sent so far have left.
    free_at: Time,
    changed: Time,
}

impl Pacer {
    /// At most `rate` bytes per second (at least 1), with all headers.
    #[must_use]
    pub fn new(rate: f64) -> Self {
        let rate = rate.max(1.0);
        Self { highest: rate, rate, free_at: Time::ZERO, changed: Time::ZERO }
    }

    /// Bytes per second now.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// When the next bytes may be sent: `now` or later.
    #[must_use]
    pub fn next(&self, now: Time) -> Time {
        self.free_at.max(now)
    }

    /// Bytes are sent.
    pub fn sent(&mut self, now: Time, bytes: u64) {
        #[allow(clippy::cast_precision_loss)]
        let takes = Duration::from_secs_f64(bytes as f64 / self.rate);
        self.free_at = self.free_at.max(now.saturating_sub(BURST_INTERVAL)) + takes;
    }

    /// The hosts lost this part (median) of what was sent lately.
    pub fn lost(&mut self, now: Time, part: f64) {
        if now.saturating_sub(self.changed) < Duration::from_millis(50) {
            return;
        }
        if part > TOO_MANY {
            self.rate = (self.rate * 0.8).max(self.highest * FLOOR);
            self.changed = now;
        } else if part < FEW && self.rate < self.highest {
            self.rate = (self.rate * 1.1).min(self.highest);
            self.changed = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_holds_however_the_sender_sleeps() {
        for nap in [0, 100, 1500, 7000] {
            let mut pacer = Pacer::new(1e8);
            let (mut now, mut sent) = (Time::from_secs(5), 0_u64);
            let end = now + Duration::from_secs(1);
            while now < end {
                if pacer.next(now) <= now {
                    pacer.sent(now, 64_000);
                    sent += 64_000;
                } else {
                    now = pacer.next(now) + Duration::from_micros(nap);
                }
            }
            assert!((99_000_000..=101_100_000).contains(&sent), "{sent} with naps of {nap} us");
        }
    }

    #[test]
    fn losses_slow_down_to_a_floor_and_it_recovers() {
        let mut pacer = Pacer::new(1e8);
        for n in 0..100 {
            pacer.lost(Duration::from_millis(60 * n), 0.1);
        }
        assert!((pacer.rate() - 5e7).abs() < 1.0, "{}", pacer.rate());
        for n in 100..200 {
            pacer.lost(Duration::from_millis(60 * n), 0.0);
        }
        assert!((pacer.rate() - 1e8).abs() < 1.0, "{}", pacer.rate());
    }
}
