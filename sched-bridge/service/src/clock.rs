//! Three clocks, each for what it is good at.
//!
//! * `monotonic` does not jump and stands still while the machine sleeps: it measures how long a bridge has heard nothing from a
//!   holder. A lease ends only after a bridge was awake, and in touch with the store, for the whole time.
//! * `boot` does not jump and goes on while the machine sleeps; all processes since one boot share it: it measures how long something
//!   was held, for accounting.
//! * `wall` can jump either way. It is written into records for people, and measures only across reboots.

use std::fmt;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The clocks of a machine.
pub trait Clock: fmt::Debug + Send + Sync {
    /// `CLOCK_MONOTONIC`. Unit: milliseconds.
    fn monotonic_ms(&self) -> u64;
    /// The moment on the other two clocks.
    fn stamp(&self) -> Stamp;
}

/// A moment, as a machine knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Stamp {
    /// Which boot of which machine `boot_ms` counts from (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// `CLOCK_BOOTTIME`. Unit: milliseconds.
    pub boot_ms: u64,
    /// Time of day. Unit: milliseconds since 1970-01-01 00:00 UTC.
    pub wall_ms: u64,
}

impl Stamp {
    /// Time from `self` to `later`: by the boot clock where both are of one boot, which no clock jump can falsify. Otherwise by
    /// the time of day, never negative and at most `limit_ms`, so that a jump cannot put years onto somebody's account. Says
    /// whether it is exact. Unit: milliseconds.
    #[must_use]
    pub fn until(&self, later: &Self, limit_ms: u64) -> (u64, bool) {
        if self.boot_id == later.boot_id {
            (later.boot_ms.saturating_sub(self.boot_ms), true)
        } else {
            (later.wall_ms.saturating_sub(self.wall_ms).min(limit_ms), false)
        }
    }
}

/// The clocks of this machine.
#[derive(Debug)]
pub struct SystemClock {
    boot_id: String,
}

impl SystemClock {
    /// Reads which boot this is.
    #[must_use]
    pub fn new() -> Self {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self { boot_id: boot_id.trim().to_owned() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn monotonic_ms(&self) -> u64 {
        read(ClockId::Monotonic)
    }

    fn stamp(&self) -> Stamp {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Stamp {
            boot_id: self.boot_id.clone(),
            boot_ms: read(ClockId::Boottime),
            wall_ms: u64::try_from(wall.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

fn read(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    let (seconds, nanos) = (u64::try_from(now.tv_sec).unwrap_or(0), u64::try_from(now.tv_nsec).unwrap_or(0));
    seconds * 1000 + nanos / 1_000_000
}

/// Clocks that a test sets as it likes.
#[derive(Debug)]
pub struct ManualClock(Mutex<(u64, Stamp)>);

impl ManualClock {
    /// Clocks of a machine that was just booted, at a time of day of 10^12 ms.
    #[must_use]
    pub fn new() -> Self {
        let stamp = Stamp { boot_id: "first".to_owned(), boot_ms: 0, wall_ms: 1_000_000_000_000 };
        Self(Mutex::new((0, stamp)))
    }

    /// Lets time pass, on all clocks. Unit: milliseconds.
    pub fn pass(&self, ms: u64) {
        self.change(|monotonic, stamp| {
            *monotonic += ms;
            stamp.boot_ms += ms;
            stamp.wall_ms += ms;
        });
    }

    /// Changes the clocks: monotonic, and the others.
    pub fn change(&self, change: impl FnOnce(&mut u64, &mut Stamp)) {
        let mut now = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (monotonic, stamp) = &mut *now;
        change(monotonic, stamp);
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for ManualClock {
    fn monotonic_ms(&self) -> u64 {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).0
    }

    fn stamp(&self) -> Stamp {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).1.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_of_the_time_of_day_is_not_seen_within_a_boot_and_bounded_across() {
        let early = Stamp { boot_id: "a".into(), boot_ms: 1000, wall_ms: 5_000_000 };
        let jumped = Stamp { boot_id: "a".into(), boot_ms: 3000, wall_ms: 9_999_999_999 };
        assert_eq!(early.until(&jumped, 60_000), (2000, true));
        let other = Stamp { boot_id: "b".into(), ..jumped };
        assert_eq!(early.until(&other, 60_000), (60_000, false));
        assert_eq!(other.until(&early, 60_000), (0, false), "backwards");
    }

    #[test]
    fn the_clocks_of_this_machine_advance() {
        let clock = SystemClock::new();
        let (before, stamp) = (clock.monotonic_ms(), clock.stamp());
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert!(clock.monotonic_ms() >= before + 4);
        assert!(stamp.until(&clock.stamp(), 0).0 >= 4);
        assert!(!stamp.boot_id.is_empty());
    }
}
