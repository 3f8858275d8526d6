//! The slowest faults of a session: what each of them waited for.
//!
//! The fault thread has a list of its own and gives it away when it ends, so that it shares nothing. Bulk readers, which end the faults on
//! pages that they were reading anyway, share one.

use std::sync::{Mutex, PoisonError};

use vmove_memory::{FileOffset, PageIndex};
use vmove_types::report::SlowFault;
use vmove_types::time::Mono;

use super::block::Block;

/// As many are kept.
const KEPT: usize = 10;

/// A fault that has been answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answered {
    pub block: usize,
    pub page: PageIndex,
    /// When the kernel's message was read.
    pub since: Mono,
    /// When its own read was handed to the fabric. `None`: another one brought the page.
    pub asked: Option<Mono>,
    /// When the page had arrived: before `since` if it was there.
    pub arrived: Mono,
    pub mapped: Mono,
}

impl Answered {
    fn took(&self) -> std::time::Duration {
        self.mapped.since(self.since)
    }

    fn report(&self, begun: Mono, blocks: &[Block]) -> SlowFault {
        let us = |from: Mono, to: Mono| to.since(from).as_secs_f64() * 1e6;
        let asked = self.asked.unwrap_or(self.since);
        let arrived = self.arrived.max(asked);
        let of = blocks.get(self.block);
        let name = of.and_then(|block| block.file.path().file_name());
        SlowFault {
            at_ms: self.since.ms_since(begun),
            block: name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
            offset: of.map_or(FileOffset(0), |block| block.page_size.offset_of(self.page)).0,
            total_us: us(self.since, self.mapped),
            asked_us: us(self.since, asked),
            read_us: us(asked, arrived),
            map_us: us(arrived, self.mapped),
            own_read: self.asked.is_some(),
        }
    }
}

/// The slowest of those that it was told of. It allocates nothing after it was made.
#[derive(Debug, Clone)]
pub(super) struct Slowest(Vec<Answered>);

impl Default for Slowest {
    fn default() -> Self {
        Self(Vec::with_capacity(KEPT))
    }
}

impl Slowest {
    /// Keeps it if it is one of the slowest.
    pub(super) fn note(&mut self, fault: Answered) {
        if self.0.len() < KEPT {
            self.0.push(fault);
            return;
        }
        if let Some(least) = self.0.iter_mut().min_by_key(|kept| kept.took())
            && least.took() < fault.took()
        {
            *least = fault;
        }
    }
}

/// Those of all threads.
#[derive(Debug, Default)]
pub(super) struct SlowFaults(Mutex<Slowest>);

impl SlowFaults {
    /// A bulk reader has ended a fault. Not for the fault thread: others hold the lock.
    pub(super) fn note(&self, fault: Answered) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).note(fault);
    }

    /// The fault thread ends.
    pub(super) fn merge(&self, list: &mut Slowest) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.0.drain(..).for_each(|fault| all.note(fault));
    }

    /// For the report, slowest first. Faults could be answered from `begun` on.
    pub(super) fn report(&self, begun: Mono, blocks: &[Block]) -> Vec<SlowFault> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner).0.clone();
        all.sort_by_key(|fault| std::cmp::Reverse(fault.took()));
        all.iter().map(|fault| fault.report(begun, blocks)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(page: u64, took: u64) -> Answered {
        let since = Mono(1_000_000);
        Answered {
            block: 0,
            page: PageIndex(page),
            since,
            asked: Some(Mono(since.0 + took / 4)),
            arrived: Mono(since.0 + took / 2),
            mapped: Mono(since.0 + took),
        }
    }

    #[test]
    fn the_slowest_are_kept_whoever_has_ended_them() {
        let all = SlowFaults::default();
        let mut own = Slowest::default();
        for page in 0..100 {
            // 1..=100 us, in an order that is neither up nor down.
            let took = (page * 37 % 100 + 1) * 1000;
            if page % 2 == 0 { own.note(fault(page, took)) } else { all.note(fault(page, took)) }
        }
        assert_eq!(own.0.capacity(), KEPT, "it has allocated");
        all.merge(&mut own);
        let told = all.report(Mono(0), &[]);
        let totals: Vec<f64> = told.iter().map(|fault| fault.total_us).collect();
        assert_eq!(totals, [100.0, 99.0, 98.0, 97.0, 96.0, 95.0, 94.0, 93.0, 92.0, 91.0]);
        let first = &told[0];
        assert_eq!((first.asked_us, first.read_us, first.map_us, first.at_ms), (25.0, 25.0, 50.0, 1.0));
    }

    #[test]
    fn a_page_that_was_there_or_came_by_another_read_has_no_time_to_be_asked_for() {
        let there = Answered { asked: None, arrived: Mono(5), ..fault(1, 8000) };
        let told = there.report(Mono(0), &[]);
        assert_eq!((told.asked_us, told.read_us, told.map_us, told.own_read), (0.0, 0.0, 8.0, false));
        let another = Answered { asked: None, ..fault(1, 8000) };
        let told = another.report(Mono(0), &[]);
        assert_eq!((told.asked_us, told.read_us, told.map_us), (0.0, 4.0, 4.0));
    }
}
