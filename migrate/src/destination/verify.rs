//! `--verify`: a hash of every page as it was when the guest stopped, taken on both sides.
//!
//! Here a page is hashed after its last byte landed and before it is mapped into QEMU: from then on the guest may change it. Two
//! threads may hash the same page; whoever is first to store has hashed before either mapped it, so the stored hash is right.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vmove_memory::{Mapping, PageIndex, PageRun, RamFile};

use crate::page_hash::{GIVEN_BACK, ZERO_PAGE, page_hash};
use crate::proto::message::Hashes;

/// Hashes of the source's side, as they come.
#[derive(Debug, Default)]
pub(super) struct SourceHashes {
    parts: Vec<Hashes>,
    /// There are no more.
    whole: bool,
}

impl SourceHashes {
    pub(super) fn add(&mut self, part: Hashes) {
        self.parts.push(part);
    }

    pub(super) const fn end(&mut self) {
        self.whole = true;
    }

    pub(super) const fn are_whole(&self) -> bool {
        self.whole
    }

    pub(super) fn parts(&self) -> &[Hashes] {
        &self.parts
    }
}

/// How long an event of the kernel is waited for when a page looks lost. QEMU makes it a few microseconds after the hole, if it gets a
/// processor.
const EVENT_WAIT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy)]
struct Differing {
    block: usize,
    page: u64,
    ours: u64,
}

/// Hashes of this side; 0 means "not taken yet".
#[derive(Debug)]
pub(super) struct PageHashes {
    blocks: Vec<Box<[AtomicU64]>>,
}

impl PageHashes {
    pub(super) fn new(pages: impl Iterator<Item = u64>) -> Self {
        let block = |pages| (0..pages).map(|_| AtomicU64::new(0)).collect();
        Self { blocks: pages.map(block).collect() }
    }

    /// Hashes pages that are about to be mapped.
    pub(super) fn take(&self, block: usize, mapping: &Mapping, run: PageRun) {
        for page in run.pages() {
            let Some(slot) = self.slot(block, page.0) else { return };
            if slot.load(Ordering::Acquire) == 0 {
                let hash = page_hash(mapping, page);
                // Release: stored before the page is mapped by whoever stored it.
                let _ = slot.compare_exchange(0, hash, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }

    /// The guest gives these back to the host: what they were may be gone before it is hashed. They are not compared.
    pub(super) fn give_up(&self, block: usize, run: PageRun) {
        for page in run.pages() {
            let Some(slot) = self.slot(block, page.0) else { return };
            slot.store(GIVEN_BACK, Ordering::Release);
        }
    }

    /// Hashes what was never mapped: pages that stayed zero.
    pub(super) fn take_rest(&self, block: usize, file: &RamFile, mapping: &Mapping) {
        let extents = file.data_extents().unwrap_or_default();
        let page_bytes = file.page_size().bytes();
        let Some(slots) = self.blocks.get(block) else { return };
        for (page, slot) in (0u64..).zip(slots) {
            if slot.load(Ordering::Acquire) != 0 {
                continue;
            }
            let at = page * page_bytes;
            let next = extents.partition_point(|e| e.end().0 <= at);
            let in_hole = extents.get(next).is_none_or(|e| e.start.0 >= at + page_bytes);
            // Looking at a hole would fill it.
            let hash = if in_hole { ZERO_PAGE } else { page_hash(mapping, PageIndex(page)) };
            // Not over what was given up meanwhile.
            let _ = slot.compare_exchange(0, hash, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Compares with the source's hashes; returns how many pages differ.
    ///
    /// A thread of QEMU that gives memory back first makes the hole in the file, then tells the kernel, from whom the event comes that
    /// [gives a page up](Self::give_up). A page that was hashed between the two looks like lost bytes. So pages that are zero here, and
    /// only here, are waited for: not longer than [`EVENT_WAIT`], and meanwhile the guest runs.
    pub(super) fn differing(&self, theirs: &[Hashes]) -> u64 {
        let begun = Instant::now();
        loop {
            let pages: Vec<_> = theirs.iter().flat_map(|part| self.differing_in(part)).collect();
            let Some(&Differing { block, page, ours }) = pages.first() else { return 0 };
            let count = pages.len() as u64;
            if pages.iter().all(|page| page.ours != ZERO_PAGE) || begun.elapsed() > EVENT_WAIT {
                tracing::error!(
                    count,
                    block,
                    page,
                    ours,
                    "pages differ from the source's; the first is named"
                );
                return count;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn differing_in(&self, part: &Hashes) -> impl Iterator<Item = Differing> {
        let block = usize::from(part.block);
        (part.start..).zip(&part.hashes).filter_map(move |(page, theirs)| {
            let ours = self.slot(block, page).map_or(0, |slot| slot.load(Ordering::Acquire));
            (ours != *theirs && ours != GIVEN_BACK).then_some(Differing { block, page, ours })
        })
    }

    fn slot(&self, block: usize, page: u64) -> Option<&AtomicU64> {
        self.blocks.get(block)?.get(usize::try_from(page).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_guest_gave_back_is_not_compared_and_all_else_is() {
        let hashes = PageHashes::new([4].into_iter());
        hashes.blocks[0][0].store(7, Ordering::Relaxed);
        hashes.blocks[0][1].store(8, Ordering::Relaxed);
        hashes.give_up(0, PageRun::new(PageIndex(1), 2));
        let differing =
            |theirs: [u64; 4]| hashes.differing(&[Hashes { block: 0, start: 0, hashes: theirs.to_vec() }]);
        // Page 0 differs, 1 and 2 were given back, page 3 was never taken.
        assert_eq!(differing([9, 9, 9, 9]), 2);
        assert_eq!(differing([7, 8, ZERO_PAGE, 9]), 1);
        // More than the block has, as a peer may name it, is ignored.
        hashes.give_up(0, PageRun::new(PageIndex(3), 9));
        assert_eq!(differing([7, 1, 1, 1]), 0);
    }

    /// The hole is there before the event.
    #[test]
    fn a_page_whose_hole_is_seen_before_its_event_is_waited_for() {
        let hashes = PageHashes::new([2].into_iter());
        for slot in &hashes.blocks[0] {
            slot.store(ZERO_PAGE, Ordering::Relaxed);
        }
        let theirs = |hashes: [u64; 2]| [Hashes { block: 0, start: 0, hashes: hashes.to_vec() }];
        std::thread::scope(|scope| {
            let compared = scope.spawn(|| hashes.differing(&theirs([ZERO_PAGE, 7])));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!compared.is_finished(), "it did not wait");
            hashes.give_up(0, PageRun::new(PageIndex(1), 1));
            assert_eq!(compared.join().expect("compared"), 0);
        });
        // What no event explains is told.
        let begun = Instant::now();
        assert_eq!(hashes.differing(&theirs([7, 7])), 1);
        assert!(begun.elapsed() > EVENT_WAIT);
    }
}
