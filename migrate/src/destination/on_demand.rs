//! Pages by demand alone, for a guest that visits: what it touches is fetched, and as much ahead of it as it goes on to touch.
//!
//! Of a guest at home nothing is known of the pages that it will touch here, so the window of the read-ahead is measured: it doubles while at least
//! half of what was read ahead is touched later, and is halved while less than a quarter is. Pages that were read ahead are not mapped: the guest's
//! first touch of one is a fault that needs no read, and is seen. So a page that is [mapped](vmove_memory::PageState::Mapped) is one that
//! the guest has touched, and no other can have been written.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The window is measured anew after so many pages were read ahead.
const MEASURED_PAGES: u64 = 256;
/// In pages. With one page ahead, at most as much is read in vain as is needed.
const LEAST_WINDOW: u64 = 1;
const FIRST_WINDOW: u64 = 16;
const LARGEST_WINDOW: u64 = 512;

/// Whether pages come by demand alone, and how far ahead. Atomics only: the fault thread uses it.
#[derive(Debug)]
pub(super) struct OnDemand {
    active: AtomicBool,
    window: AtomicU64,
    /// Pages read ahead since the window was last measured, and those of all that were touched since.
    read_ahead: AtomicU64,
    touched: AtomicU64,
    /// A page may have been dropped by its reader while a guest thread waits for it.
    may_be_dropped: AtomicBool,
}

impl Default for OnDemand {
    fn default() -> Self {
        Self {
            active: AtomicBool::new(false),
            window: AtomicU64::new(FIRST_WINDOW),
            read_ahead: AtomicU64::new(0),
            touched: AtomicU64::new(0),
            may_be_dropped: AtomicBool::new(true),
        }
    }
}

impl OnDemand {
    /// From here on pages come by demand alone.
    pub(super) fn begin(&self) {
        self.active.store(true, Ordering::Release);
    }

    /// From here on all are fetched.
    pub(super) fn end(&self) {
        self.active.store(false, Ordering::Release);
    }

    pub(super) fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    /// The pages to read ahead of a fault on `page`, which is within `folio`.
    pub(super) fn ahead(&self, page: u64, folio: &Range<u64>) -> Range<u64> {
        let first = page + 1;
        first..folio.end.min(first.saturating_add(self.window.load(Ordering::Relaxed))).max(first)
    }

    /// So many pages are being read ahead.
    pub(super) fn reads_ahead(&self, pages: u64) {
        let read = self.read_ahead.fetch_add(pages, Ordering::Relaxed) + pages;
        // Of several readers one measures.
        if read < MEASURED_PAGES
            || self.read_ahead.compare_exchange(read, 0, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        let touched = self.touched.swap(0, Ordering::Relaxed);
        let window = self.window.load(Ordering::Relaxed);
        let next = match touched {
            touched if touched * 2 >= read => window * 2,
            touched if touched * 4 < read => window / 2,
            _ => window,
        };
        self.window.store(next.clamp(LEAST_WINDOW, LARGEST_WINDOW), Ordering::Relaxed);
    }

    /// The guest has touched a page that was read ahead.
    pub(super) fn was_touched(&self) {
        self.touched.fetch_add(1, Ordering::Relaxed);
    }

    /// A reader may have dropped a page that somebody waits for.
    pub(super) fn was_dropped(&self) {
        self.may_be_dropped.store(true, Ordering::Release);
    }

    /// Whether that is to be looked at. [`OnDemand::was_dropped`] again if one was found.
    pub(super) fn take_dropped(&self) -> bool {
        self.may_be_dropped.swap(false, Ordering::AcqRel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(demand: &OnDemand) -> u64 {
        let range = demand.ahead(9, &(0..10_000));
        assert_eq!(range.start, 10);
        range.end - range.start
    }

    #[test]
    fn the_window_follows_what_is_touched() {
        let demand = OnDemand::default();
        assert_eq!(window(&demand), FIRST_WINDOW);
        for _ in 0..20 {
            (0..MEASURED_PAGES).for_each(|_| demand.was_touched());
            demand.reads_ahead(MEASURED_PAGES);
        }
        assert_eq!(window(&demand), LARGEST_WINDOW);
        (0..MEASURED_PAGES / 3).for_each(|_| demand.was_touched());
        demand.reads_ahead(MEASURED_PAGES);
        assert_eq!(window(&demand), LARGEST_WINDOW, "between a quarter and a half it stays");
        for _ in 0..20 {
            demand.reads_ahead(MEASURED_PAGES);
        }
        assert_eq!(window(&demand), LEAST_WINDOW);
    }

    #[test]
    fn it_does_not_leave_the_folio() {
        let demand = OnDemand::default();
        assert_eq!(demand.ahead(510, &(0..512)), 511..512);
        assert!(demand.ahead(511, &(0..512)).is_empty());
    }
}
