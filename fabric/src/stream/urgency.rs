//! Bulk connections give way while urgent ones are busy.
//!
//! A kernel that does not preempt itself runs a system call to its end before it lets a waiting real-time thread have the
//! processor, and copying half a megabyte takes it 100 us. So while urgent requests come and go, the bulk connections
//! of the same fabric make smaller calls; otherwise larger ones, which move more per second.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long after the last sign of urgent work bulk goes on giving way.
const GIVE_WAY_INTERVAL: Duration = Duration::from_millis(2);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// When urgent connections of a fabric were last busy.
#[derive(Debug, Default)]
pub(crate) struct Urgency {
    /// Nanoseconds since the process's first use of this; 0: never.
    last: AtomicU64,
}

impl Urgency {
    /// An urgent connection has something to do.
    pub(crate) fn mark(&self) {
        // A hint: no other memory depends on it.
        self.last.store(now().max(1), Ordering::Relaxed);
    }

    /// Whether one had just now.
    pub(crate) fn is_recent(&self) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        last != 0
            && now().saturating_sub(last) < u64::try_from(GIVE_WAY_INTERVAL.as_nanos()).unwrap_or(u64::MAX)
    }
}

fn now() -> u64 {
    u64::try_from(START.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lingers_and_ends() {
        let urgency = Urgency::default();
        assert!(!urgency.is_recent());
        urgency.mark();
        assert!(urgency.is_recent());
        std::thread::sleep(GIVE_WAY_INTERVAL * 2);
        assert!(!urgency.is_recent());
    }
}
