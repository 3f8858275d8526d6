//! Faults on pages that somebody else already fetches: when each began, so that its latency can be recorded.
//!
//! The fault thread notes a fault *before* it asks the page table. Whoever lands the page learns from the table that a thread waits, and
//! then looks here: the note is there, because it was written before the table heard of the fault. Noted after the answer, a page that
//! lands in between would leave its note here for ever, and the latency would be lost (`loom_a_fault_is_recorded_or_taken_back`).

use std::sync::Arc;

use vmove_memory::{PageIndex, PageTable, Want};
use vmove_types::time::Mono;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// More guest threads than this waiting at once are served as well; their latency is not recorded.
const SLOTS: usize = if cfg!(loom) { 2 } else { 256 };

/// A slot that nobody uses.
const FREE: u64 = 0;
/// A slot that is being written or read.
const TAKEN: u64 = 1;

/// A small table of waiting faults: plain atomics, no allocation after the start.
#[derive(Debug)]
pub(crate) struct WaitingFaults {
    slots: Box<[Slot]>,
    /// Slots in use: lets readers skip the search nearly always.
    used: AtomicU64,
}

#[derive(Debug)]
struct Slot {
    /// [`FREE`], [`TAKEN`], or the page's key.
    key: AtomicU64,
    since: AtomicU64,
}

/// What is to be done about a fault.
#[derive(Debug)]
pub(crate) struct Found {
    /// The page table's answer.
    pub want: Want,
    /// The page landed between the note and the table's answer, and the fault's latency was recorded with it.
    pub recorded: bool,
}

fn key(block: usize, page: PageIndex) -> u64 {
    ((block as u64) << 48 | page.0).saturating_add(2)
}

impl Default for WaitingFaults {
    fn default() -> Self {
        let slot = |_| Slot { key: AtomicU64::new(FREE), since: AtomicU64::new(0) };
        Self { slots: (0..SLOTS).map(slot).collect(), used: AtomicU64::new(0) }
    }
}

impl WaitingFaults {
    /// Asks the page table of RAM block `block` what to do about a fault that began at `since`. If somebody else's read will end it, the
    /// fault is noted here, for [`WaitingFaults::served`].
    pub(crate) fn want(&self, table: &Arc<PageTable>, block: usize, page: PageIndex, since: Mono) -> Found {
        let noted = self.note(block, page, since);
        let want = table.want(page);
        let recorded = match (&want, noted) {
            (Want::OnItsWay, _) | (_, None) => false,
            (_, Some(slot)) => !self.take(slot, key(block, page), |_| {}),
        };
        Found { want, recorded }
    }

    /// The page has been mapped: tells `record` when each of those began that waited for it.
    pub(crate) fn served(&self, block: usize, page: PageIndex, mut record: impl FnMut(Mono)) {
        if self.used.load(Ordering::Relaxed) == 0 {
            return;
        }
        for slot in &self.slots {
            self.take(slot, key(block, page), &mut record);
        }
    }

    /// Notes a fault in a free slot, if there is one.
    fn note(&self, block: usize, page: PageIndex, since: Mono) -> Option<&Slot> {
        // Acquire pairs with the Release in `take`: a slot that was just freed is ours alone.
        let is_ours = |slot: &&Slot| {
            slot.key.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let slot = self.slots.iter().find(is_ours)?;
        slot.since.store(since.0, Ordering::Relaxed);
        self.used.fetch_add(1, Ordering::Relaxed);
        slot.key.store(key(block, page), Ordering::Release);
        Some(slot)
    }

    /// Frees a slot if it holds this key. Whether it did.
    fn take(&self, slot: &Slot, key: u64, record: impl FnOnce(Mono)) -> bool {
        let taken = slot.key.compare_exchange(key, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if taken {
            record(Mono(slot.since.load(Ordering::Relaxed)));
            self.used.fetch_sub(1, Ordering::Relaxed);
            slot.key.store(FREE, Ordering::Release);
        }
        taken
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    const PAGE: PageIndex = PageIndex(7);

    #[test]
    fn each_waiter_is_told_once() {
        let waiting = WaitingFaults::default();
        let count = |block, page| {
            let mut told = 0;
            waiting.served(block, page, |_| told += 1);
            told
        };
        waiting.note(0, PAGE, Mono::now());
        waiting.note(1, PAGE, Mono::now());
        waiting.note(0, PAGE, Mono::now());
        assert_eq!(count(0, PageIndex(8)), 0);
        assert_eq!(count(0, PAGE), 2);
        assert_eq!(count(0, PAGE), 0);
        assert_eq!(count(1, PAGE), 1);
    }

    #[test]
    fn a_full_table_loses_figures_not_faults() {
        let waiting = WaitingFaults::default();
        let table = PageTable::anonymous(SLOTS as u64 + 10).unwrap();
        let tickets: Vec<_> = (0..table.pages()).map(|page| table.claim(PageIndex(page)).unwrap()).collect();
        for page in 0..table.pages() {
            let found = waiting.want(&table, 0, PageIndex(page), Mono::now());
            assert!(matches!(found.want, Want::OnItsWay));
        }
        assert_eq!(waiting.used.load(Ordering::Relaxed), SLOTS as u64);
        drop(tickets);
    }

    #[test]
    fn a_fault_that_nobody_else_ends_leaves_no_note() {
        let waiting = WaitingFaults::default();
        let table = PageTable::anonymous(8).unwrap();
        let Found { want: Want::Fetch(ticket), recorded: false } = waiting.want(&table, 0, PAGE, Mono::now())
        else {
            panic!("nobody else fetches it");
        };
        assert_eq!(waiting.used.load(Ordering::Relaxed), 0);
        let _ = ticket.landed();
        let found = waiting.want(&table, 0, PAGE, Mono::now());
        assert!(matches!(found, Found { want: Want::MapNow, recorded: false }));
        assert_eq!(waiting.used.load(Ordering::Relaxed), 0);
    }
}

/// Every interleaving of the fault thread and bulk readers: `./run test loom`.
#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::thread;
    use vmove_memory::{Landing, PageRun, ReadTicket};

    use super::*;

    const PAGE: PageIndex = PageIndex(0);

    struct World {
        table: Arc<PageTable>,
        waiting: WaitingFaults,
        recorded: AtomicU64,
    }

    impl World {
        fn new() -> Arc<Self> {
            let table = PageTable::anonymous(1).expect("memory");
            Arc::new(Self { table, waiting: WaitingFaults::default(), recorded: AtomicU64::new(0) })
        }

        /// A bulk reader: the page's bytes are in the file.
        fn land(&self, ticket: ReadTicket) {
            if matches!(ticket.landed(), Landing::Ready { wanted: true }) {
                self.table.mark_mapped(PageRun::new(PAGE, 1));
                self.waiting.served(0, PAGE, |since| {
                    assert!(since.0 > 0, "read before it was written");
                    self.recorded.fetch_add(1, Ordering::Relaxed);
                });
            }
        }

        /// The fault thread. Returns how many latencies must have been recorded in the end because of it.
        fn fault(&self, since: u64) -> u64 {
            let found = self.waiting.want(&self.table, 0, PAGE, Mono(since));
            u64::from(found.recorded || matches!(found.want, Want::OnItsWay))
        }

        fn assert_settled(&self, expected: u64) {
            assert_eq!(self.recorded.load(Ordering::Relaxed), expected, "latencies recorded");
            assert_eq!(self.waiting.used.load(Ordering::Relaxed), 0, "a slot stays taken");
            let free = |slot: &Slot| slot.key.load(Ordering::Relaxed) == FREE;
            assert!(self.waiting.slots.iter().all(free), "a slot stays taken");
        }
    }

    #[test]
    fn loom_a_fault_is_recorded_or_taken_back() {
        loom::model(|| {
            let world = World::new();
            let ticket = world.table.claim(PAGE).expect("absent");
            let reader = Arc::clone(&world);
            let reader = thread::spawn(move || reader.land(ticket));
            let expected = world.fault(1);
            reader.join().expect("the reader");
            world.assert_settled(expected);
        });
    }

    #[test]
    fn loom_two_faults_on_a_page_are_each_recorded_or_taken_back() {
        loom::model(|| {
            let world = World::new();
            let ticket = world.table.claim(PAGE).expect("absent");
            let reader = Arc::clone(&world);
            let reader = thread::spawn(move || reader.land(ticket));
            let expected = world.fault(1) + world.fault(2);
            reader.join().expect("the reader");
            world.assert_settled(expected);
        });
    }
}
