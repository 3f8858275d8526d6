//! Faults on pages that a bulk reader already fetches: when each began, so that its latency can be told.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::Mono;
use crate::latency::Latencies;

/// More guest threads than this waiting at once are served as well; their latency is not recorded.
const SLOTS: usize = 256;

/// A small board of waiting faults: plain atomics, no allocation after the start.
#[derive(Debug)]
pub(super) struct WaitingFaults {
    slots: Box<[Slot]>,
    /// Slots in use: lets readers skip the search nearly always.
    used: AtomicU64,
}

#[derive(Debug, Default)]
struct Slot {
    /// 0: free; 1: being written; otherwise the page's key.
    key: AtomicU64,
    since: AtomicU64,
}

fn key(block: usize, page: u64) -> u64 {
    ((block as u64) << 48 | page).saturating_add(2)
}

impl Default for WaitingFaults {
    fn default() -> Self {
        Self { slots: (0..SLOTS).map(|_| Slot::default()).collect(), used: AtomicU64::new(0) }
    }
}

impl WaitingFaults {
    /// Notes a fault that somebody else's read will end.
    pub(super) fn note(&self, block: usize, page: u64, since: Mono) {
        for slot in &self.slots {
            // Acquire pairs with the Release below: a slot that was just freed is ours alone.
            if slot.key.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                slot.since.store(since.0, Ordering::Relaxed);
                self.used.fetch_add(1, Ordering::Relaxed);
                slot.key.store(key(block, page), Ordering::Release);
                return;
            }
        }
    }

    /// The page has been mapped: records the latency of those who waited for it.
    pub(super) fn served(&self, block: usize, page: u64, into: &Latencies) {
        if self.used.load(Ordering::Relaxed) == 0 {
            return;
        }
        let wanted = key(block, page);
        for slot in &self.slots {
            if slot.key.compare_exchange(wanted, 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                into.record(Mono::now().since(Mono(slot.since.load(Ordering::Relaxed))));
                self.used.fetch_sub(1, Ordering::Relaxed);
                slot.key.store(0, Ordering::Release);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_waiter_is_told_once() {
        let board = WaitingFaults::default();
        let latencies = Latencies::default();
        board.note(0, 7, Mono::now());
        board.note(1, 7, Mono::now());
        board.note(0, 7, Mono::now());
        board.served(0, 8, &latencies);
        assert_eq!(latencies.stats().fetched, 0);
        board.served(0, 7, &latencies);
        board.served(0, 7, &latencies);
        assert_eq!(latencies.stats().fetched, 2);
        board.served(1, 7, &latencies);
        assert_eq!(latencies.stats().fetched, 3);
    }

    #[test]
    fn a_full_board_loses_figures_not_faults() {
        let board = WaitingFaults::default();
        for page in 0..SLOTS as u64 + 10 {
            board.note(0, page, Mono::now());
        }
        assert_eq!(board.used.load(Ordering::Relaxed), SLOTS as u64);
    }
}
