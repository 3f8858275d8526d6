//! How many pages a guest writes in a time, each counted once, as far as two looks at it tell.

use std::time::Duration;

/// Looks whose counts differ by less than this are of a guest that has written all that it writes.
const ALL_WRITTEN: f64 = 1.03;
/// And by more than this, of one that never came back to a page.
const NEVER_AGAIN: f64 = 2.95;

/// A guest that writes at random to `reach` bytes: it comes back to a page the more often, the more of them it has written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Writes {
    /// Bytes per second of pages, as long as each is a new one.
    pub bytes_per_s: f64,
    /// Bytes that it writes in the end.
    pub reach: f64,
}

impl Writes {
    /// A guest that writes nothing.
    pub const NONE: Self = Self { bytes_per_s: 0.0, reach: 0.0 };

    /// From the bytes that were written after a time, and after three times that time, of `content` bytes that there are.
    #[must_use]
    pub fn seen(after: Duration, first: f64, thrice: f64, content: f64) -> Self {
        let seconds = after.as_secs_f64();
        if thrice <= 0.0 || seconds <= 0.0 {
            return Self::NONE;
        }
        let ratio = if first > 0.0 { thrice / first } else { NEVER_AGAIN };
        let most = content.max(thrice);
        // With x = rate * after / reach, the counts are reach * (1 - e^-x) and reach * (1 - e^-3x): their ratio is 1 + y + y^2 for y = e^-x.
        let y = (((4.0 * ratio.max(ALL_WRITTEN) - 3.0).sqrt() - 1.0) / 2.0).clamp(0.01, 0.99);
        let reach = thrice / (1.0 - y.powi(3));
        if ratio >= NEVER_AGAIN || reach > most {
            // Any of what there is, at the rate at which it has written so much of that.
            let share = (thrice / most).min(0.99);
            return Self { bytes_per_s: -(1.0 - share).ln() * most / (3.0 * seconds), reach: most };
        }
        Self { bytes_per_s: -y.ln() * reach / seconds, reach }
    }

    /// Bytes of pages that it has written after so many milliseconds.
    #[must_use]
    pub fn after_ms(self, ms: f64) -> f64 {
        if self.reach <= 0.0 {
            return 0.0;
        }
        self.reach * -(-self.bytes_per_s * ms.max(0.0) / 1e3 / self.reach).exp_m1()
    }

    /// The same guest at another rate.
    #[must_use]
    pub const fn at(self, bytes_per_s: f64) -> Self {
        Self { bytes_per_s, ..self }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LOOK: Duration = Duration::from_millis(100);

    #[test]
    fn a_guest_is_known_by_two_looks() {
        let guest = Writes { bytes_per_s: 4e8, reach: 6.4e7 };
        let seen = Writes::seen(LOOK, guest.after_ms(100.0), guest.after_ms(300.0), 1e9);
        assert!((seen.bytes_per_s / guest.bytes_per_s - 1.0).abs() < 1e-6, "{seen:?}");
        assert!((seen.reach / guest.reach - 1.0).abs() < 1e-6, "{seen:?}");
    }

    #[test]
    fn looks_that_say_little_are_not_taken_for_more() {
        assert_eq!(Writes::seen(LOOK, 0.0, 0.0, 1e9), Writes::NONE);
        // It went on to new pages all the time.
        let steady = Writes::seen(LOOK, 1e7, 3e7, 1e9);
        assert!((steady.bytes_per_s / 1e8 - 1.0).abs() < 0.02 && steady.reach >= 1e9, "{steady:?}");
        // It had written everything by the first look.
        let small = Writes::seen(LOOK, 6.4e7, 6.4e7, 1e9);
        assert!((small.after_ms(10_000.0) / 6.4e7 - 1.0).abs() < 0.05, "{small:?}");
    }

    proptest! {
        /// More time, more pages; and never more than there are.
        #[test]
        fn pages_only_become_more(rate in 0.0..1e10, reach in 0.0..1e12, a in 0.0..1e6, b in 0.0..1e6) {
            let writes = Writes { bytes_per_s: rate, reach };
            let (short, long) = (writes.after_ms(f64::min(a, b)), writes.after_ms(f64::max(a, b)));
            prop_assert!(0.0 <= short && short <= long && long <= reach);
            prop_assert!(writes.at(2.0 * rate).after_ms(a) >= writes.after_ms(a));
        }

        /// Whatever was seen, the guest it stands for would show it again, or no more than there is.
        #[test]
        fn what_was_seen_is_what_is_believed(first in 0.0..1e9, more in 0.0..2.0) {
            let thrice = first * (1.0 + more);
            let seen = Writes::seen(LOOK, first, thrice, 1e9_f64.max(thrice));
            prop_assert!(seen.after_ms(300.0) <= thrice * 1.1 + 1.0, "{:?}", seen);
            prop_assert!(seen.after_ms(300.0) >= thrice * 0.9 - 1.0, "{:?}", seen);
        }
    }
}
