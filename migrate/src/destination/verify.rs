//! `--verify`: a hash of every page as it was when the guest stopped, taken on both sides.
//!
//! Here a page is hashed after its last byte landed and before it is mapped into QEMU: from then on the guest may change it. Two
//! threads may hash the same page; whoever is first to store has hashed before either mapped it, so the stored hash is right.

use std::sync::atomic::{AtomicU64, Ordering};

use vmove_memory::{Mapping, PageIndex, PageRun, RamFile};

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
            slot.store(hash, Ordering::Release);
        }
    }

    /// Compares a part with the source's hashes; returns how many pages differ.
    pub(super) fn differing(&self, block: usize, start: u64, theirs: &[u64]) -> u64 {
        let ours = |page| self.slot(block, page).map_or(0, |s| s.load(Ordering::Acquire));
        (start..).zip(theirs).filter(|(page, hash)| ours(*page) != **hash).count() as u64
    }

    fn slot(&self, block: usize, page: u64) -> Option<&AtomicU64> {
        self.blocks.get(block)?.get(usize::try_from(page).ok()?)
    }
}

/// Hash of one page as both sides compute it: 1 for a page of zeros (a hole is not looked at, which would fill it), otherwise its
/// XXH3, at least 2. 0 stays free for "not taken yet".
pub(crate) fn page_hash(mapping: &Mapping, page: PageIndex) -> u64 {
    match (mapping.is_zero(page), mapping.hash(page)) {
        (Ok(true), _) => ZERO_PAGE,
        (_, Ok(hash)) => hash.max(2),
        _ => 0,
    }
}

/// See [`page_hash`].
pub(crate) const ZERO_PAGE: u64 = 1;
