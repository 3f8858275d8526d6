//! How fast this machine's time stamp counter runs.
//!
//! An emulated guest uses the host's counter as its clock and measures the counter's speed while it boots. On a busy machine the
//! result is wrong by a factor of up to four, and the guest's clock stays wrong: a guest that should write 100,000 pages per second
//! wrote 420,000. So tests tell guests the speed.
//!
//! Rule that the `unsafe` block below rests on: every x86-64 processor has the counter, and Linux lets programs read it.
#![allow(unsafe_code)]

use std::sync::OnceLock;
use std::time::Duration;

use crate::sampler::now;

/// The counter's speed in kHz. Takes 50 ms the first time.
#[must_use]
pub fn khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(|| {
        let (from, ticks_from) = reading();
        std::thread::sleep(Duration::from_millis(50));
        let (to, ticks_to) = reading();
        let (ticks, nanoseconds) = (u128::from(ticks_to - ticks_from), u128::from(to - from));
        u64::try_from(ticks * 1_000_000 / nanoseconds).unwrap_or(0)
    })
}

/// The clock and the counter at one moment: the fastest of many readings, because it was interrupted least.
fn reading() -> (u64, u64) {
    let one = || {
        let before = now();
        // SAFETY: the module's rule.
        let ticks = unsafe { std::arch::x86_64::_rdtsc() };
        let after = now();
        (after - before, (before + (after - before) / 2, ticks))
    };
    let best = (0..100).map(|_| one()).min_by_key(|(took, _)| *took);
    best.map_or((0, 0), |(_, reading)| reading)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_runs_at_the_speed_of_a_processor() {
        let khz = khz();
        assert!((500_000..10_000_000).contains(&khz), "{khz} kHz");
        let (from, ticks_from) = reading();
        std::thread::sleep(Duration::from_millis(20));
        let (to, ticks_to) = reading();
        let foretold = u128::from(to - from) * u128::from(khz) / 1_000_000;
        let error = foretold.abs_diff(u128::from(ticks_to - ticks_from));
        assert!(error * 1000 < foretold, "off by {error} of {foretold} ticks");
    }
}
