//! Three clocks, each for one purpose.
//!
//! * `monotonic` does not jump, and stands still while the machine sleeps. It measures how long a lease has had no heartbeat: a lease
//!   ends only after a bridge was running, and in touch with the store, for its whole time to live.
//! * `boot` does not jump, and runs while the machine sleeps. All processes since one boot share it. It measures for accounting how
//!   long something was leased.
//! * `wall` can jump either way. It is written into records for people, and measures only across reboots.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The clocks of a machine.
pub trait Clock: fmt::Debug + Send + Sync {
    /// `CLOCK_MONOTONIC`. Unit: milliseconds.
    fn monotonic_ms(&self) -> u64;
    /// Now, on the other two clocks.
    fn stamp(&self) -> Stamp;
}

/// A moment on the clocks of one machine.
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
    /// Time from `self` to `later`, and whether it is exact. Unit: milliseconds. Within one boot it is exact, by the boot clock.
    /// Otherwise it is the difference of the times of day, not below 0 and at most `limit_ms`, so that a jump of the clock cannot
    /// charge years to an account.
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
    /// The clocks since this boot.
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
