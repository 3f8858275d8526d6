//! What is known of a whole table without reading it: how many pages are missing, and in which parts; which parts nobody has touched.
//!
//! A table has 256 MiB for a guest of 1 TiB. To read it takes a tenth of a second, which nobody may spend between STOP and RESUME.
//!
//! These words order nothing but themselves, so they are the real atomics under loom too: the bytes of the table are what its model is about.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Pages that share a word: 2 MiB of 4 KiB pages.
const PART: u64 = 512;
/// A page of the part may be something else than `Absent`.
const TOUCHED: u32 = 1 << 31;

/// See the module.
#[derive(Debug)]
pub(super) struct Tally {
    /// Never less than there are.
    missing: AtomicU64,
    /// The same for each part, and [`TOUCHED`].
    parts: Box<[AtomicU32]>,
}

impl Tally {
    /// Of a new table, in which every page is `Absent`.
    pub(super) fn untouched(pages: u64) -> Self {
        let of = |part: u64| AtomicU32::new(small(PART.min(pages - part * PART)));
        Self { missing: AtomicU64::new(pages), parts: (0..pages.div_ceil(PART)).map(of).collect() }
    }

    /// Of a table that was found, `missing` of whose pages in a range are missing.
    pub(super) fn found(pages: u64, missing: impl Fn(Range<u64>) -> u64) -> Self {
        let tally = Self::untouched(pages);
        let mut all = 0;
        for (start, word) in (0..).step_by(512).zip(&tally.parts) {
            let of_part = missing(start..(start + PART).min(pages));
            word.store(small(of_part) | TOUCHED, Ordering::Relaxed);
            all += of_part;
        }
        tally.missing.store(all, Ordering::Release);
        tally
    }

    /// Pages that still have to be fetched. While some are being marked as outdated it may be more than there are, never less: who sees 0
    /// sees every byte (this Acquire pairs with the Release in [`Self::fewer`]).
    pub(super) fn missing(&self) -> u64 {
        self.missing.load(Ordering::Acquire)
    }

    /// Called before a page becomes missing that may.
    pub(super) fn one_more(&self, page: u64) {
        if let Some(part) = self.part(page) {
            part.fetch_add(1, Ordering::AcqRel);
        }
        self.missing.fetch_add(1, Ordering::AcqRel);
    }

    /// Called after pages of the part of `page` have become final, or have turned out not to become missing.
    pub(super) fn fewer(&self, page: u64, pages: u32) {
        if pages == 0 {
            return;
        }
        if let Some(part) = self.part(page) {
            part.fetch_sub(pages, Ordering::AcqRel);
        }
        self.missing.fetch_sub(u64::from(pages), Ordering::AcqRel);
    }

    /// Called before a page of the part becomes something else than `Absent`.
    pub(super) fn touch(&self, page: u64) {
        if let Some(part) = self.part(page)
            && part.load(Ordering::Relaxed) & TOUCHED == 0
        {
            part.fetch_or(TOUCHED, Ordering::AcqRel);
        }
    }

    /// The parts of a range of pages.
    pub(super) fn parts(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            let start = at;
            at = (start / PART + 1).saturating_mul(PART).min(range.end);
            (start < range.end).then_some(start..at)
        })
    }

    /// Those in which a page may be something else than `Absent`.
    pub(super) fn touched(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.those(range, |word| word & TOUCHED != 0)
    }

    /// Those in which a page may be missing.
    pub(super) fn with_missing(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.those(range, |word| word & !TOUCHED != 0)
    }

    fn those(
        &self,
        range: Range<u64>,
        wanted: impl Fn(u32) -> bool + 'static,
    ) -> impl Iterator<Item = Range<u64>> + '_ {
        Self::parts(range).filter(move |part| {
            self.part(part.start).is_some_and(|word| wanted(word.load(Ordering::Acquire)))
        })
    }

    fn part(&self, page: u64) -> Option<&AtomicU32> {
        self.parts.get(usize::try_from(page / PART).ok()?)
    }
}

/// Pages of one part.
fn small(pages: u64) -> u32 {
    u32::try_from(pages).unwrap_or(!TOUCHED)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn parts_are_known_to_be_touched_and_to_lack_pages() {
        let pages = 9 * PART + 7;
        let tally = Tally::untouched(pages);
        assert_eq!((tally.missing(), tally.touched(0..pages).count()), (pages, 0));
        assert_eq!(tally.with_missing(0..pages).count(), 10);
        tally.touch(3 * PART + 7);
        tally.fewer(9 * PART, 7);
        assert!(tally.touched(0..pages).eq(std::iter::once(3 * PART..4 * PART)));
        assert!(tally.with_missing(8 * PART + 1..pages).eq(std::iter::once(8 * PART + 1..9 * PART)));
        tally.one_more(9 * PART + 6);
        assert_eq!((tally.missing(), tally.with_missing(9 * PART..pages).count()), (pages - 6, 1));
        let found = Tally::found(1000, |part| u64::from(part.contains(&999)));
        assert_eq!((found.missing(), found.touched(0..1000).count()), (1, 2));
        assert!(found.with_missing(0..1000).eq(std::iter::once(512..1000)));
    }
}
