//! The right, and the duty, to fetch a page: who gets it, and how it ends.

use std::fmt;
use std::sync::Arc;

use super::core::{PageTable, exchange};
use super::state::{DISCARDED, PageState, SUPERSEDED, WANTED};
use super::sync::Ordering;
use crate::units::{PageIndex, PageRun};

impl PageTable {
    /// Takes an `Absent` or `Stale` page for fetching. Exactly one caller gets the ticket.
    pub fn claim(self: &Arc<Self>, page: PageIndex) -> Option<ReadTicket> {
        self.take(page, 0).then(|| ReadTicket::new(Arc::clone(self), page))
    }

    /// Takes the first claimable page in `within` and the claimable ones that follow it, `max` at most.
    pub fn claim_run(self: &Arc<Self>, within: PageRun, max: u64) -> Option<RunTicket> {
        let mut from = within;
        while let Some(start) = self.find_claimable(from) {
            let end = within.end().0.min(start.0.saturating_add(max));
            let taken = (start.0..end).take_while(|&page| self.take(PageIndex(page), 0)).count() as u64;
            if taken > 0 || max == 0 {
                return (taken > 0).then(|| RunTicket::new(Arc::clone(self), PageRun::new(start, taken)));
            }
            from = PageRun::new(PageIndex(start.0 + 1), within.end().0 - start.0 - 1);
        }
        None
    }

    /// A guest thread waits for this page: says what to do, and makes sure that whoever lands the page knows.
    pub fn want(self: &Arc<Self>, page: PageIndex) -> Want {
        loop {
            let Some(cell) = self.cell(page) else { return Want::Poisoned };
            let old = cell.load(Ordering::Acquire);
            match PageState::of(old) {
                PageState::Absent | PageState::Stale => {
                    if self.take(page, WANTED) {
                        return Want::Fetch(ReadTicket::new(Arc::clone(self), page));
                    }
                }
                PageState::Asked => {
                    // AcqRel: either this comes first and `landed` sees the flag, or we see what `landed` wrote.
                    if exchange(cell, old, old | WANTED) {
                        return Want::OnItsWay;
                    }
                }
                PageState::Landed => return Want::MapNow,
                PageState::Zero => return Want::ZeroNow,
                PageState::Mapped => return Want::MapAgain,
                PageState::Poisoned => return Want::Poisoned,
            }
        }
    }
}

/// What to do about a page a guest thread waits for. From [`PageTable::want`](super::PageTable::want).
#[derive(Debug)]
#[must_use]
pub enum Want {
    /// Yours to fetch; map it when it has landed.
    Fetch(ReadTicket),
    /// Somebody else is fetching it and will learn, when it lands, that a guest thread waits. Nothing to do.
    OnItsWay,
    /// Its bytes are in the file: map it now.
    MapNow,
    /// It is zero: give it memory, then map it now.
    ZeroNow,
    /// It was mapped before. Map it again; if the file has a hole there, it was discarded and is zero now.
    MapAgain,
    /// It can never be had.
    Poisoned,
}

/// What became of a page whose bytes arrived.
#[derive(Debug)]
#[must_use]
pub enum Landing {
    /// The page is `Landed` (or `Zero`). If `wanted`, a guest thread waits: map it now.
    Ready {
        /// A guest thread waits for it.
        wanted: bool,
    },
    /// The source had written to it meanwhile: it is `Stale` again and claimable.
    Superseded {
        /// A guest thread waits for it.
        wanted: bool,
    },
    /// QEMU discarded it meanwhile, so that the bytes just written must go: punch them out of the file (or write
    /// zeros), then call [`ReadTicket::zero`].
    Discarded(ReadTicket),
}

/// One page that its holder is fetching. Dropped without [`landed`](Self::landed), it makes the page `Stale`.
#[must_use]
pub struct ReadTicket {
    /// `None` once the ticket is used up.
    table: Option<Arc<PageTable>>,
    page: PageIndex,
}

/// Consecutive pages that the holder is fetching. Pages not yet landed become `Stale` when it is dropped.
#[must_use]
pub struct RunTicket {
    table: Arc<PageTable>,
    /// What is left of it.
    run: PageRun,
}

impl ReadTicket {
    pub(super) const fn new(table: Arc<PageTable>, page: PageIndex) -> Self {
        Self { table: Some(table), page }
    }

    /// The page.
    #[must_use]
    pub const fn page(&self) -> PageIndex {
        self.page
    }

    /// The final bytes are in the file.
    pub fn landed(self) -> Landing {
        self.finish(PageState::Landed, false)
    }

    /// The page is zero, and the file has a hole or zeros there.
    pub fn zero(self) -> Landing {
        // A discard wants just this, so it is no obstacle.
        self.finish(PageState::Zero, true)
    }

    /// The page can never be had. Returns whether a guest thread waits for it.
    pub fn poison(self) -> bool {
        matches!(self.finish(PageState::Poisoned, true), Landing::Ready { wanted: true })
    }

    fn finish(mut self, to: PageState, discard_is_done: bool) -> Landing {
        let Some(table) = self.table.take() else { return Landing::Ready { wanted: false } };
        let Some(cell) = table.cell(self.page) else { return Landing::Ready { wanted: false } };
        loop {
            let old = cell.load(Ordering::Acquire);
            let wanted = old & WANTED != 0;
            if old & DISCARDED != 0 && !discard_is_done {
                // Newer news is judged when the ticket comes back.
                if exchange(cell, old, old & !DISCARDED) {
                    return Landing::Discarded(Self::new(table, self.page));
                }
            } else if old & SUPERSEDED != 0 && to != PageState::Poisoned {
                if exchange(cell, old, PageState::Stale as u8 | (old & WANTED)) {
                    return Landing::Superseded { wanted };
                }
            } else if exchange(cell, old, to as u8) {
                // The Release in `exchange` pairs with the Acquire in `PageTable::state` and `want`: who sees the
                // new state sees the bytes. Its Acquire pairs with the flag set in `want`: who set it is told here.
                table.tally.fewer(self.page.0, 1);
                return Landing::Ready { wanted };
            }
        }
    }
}

impl Drop for ReadTicket {
    fn drop(&mut self) {
        if let Some(table) = self.table.take() {
            give_up(&table, self.page);
        }
    }
}

impl RunTicket {
    pub(super) const fn new(table: Arc<PageTable>, run: PageRun) -> Self {
        Self { table, run }
    }

    /// The pages still in it.
    #[must_use]
    pub const fn run(&self) -> PageRun {
        self.run
    }

    /// Takes the first page out of it.
    pub fn next_page(&mut self) -> Option<ReadTicket> {
        if self.run.is_empty() {
            return None;
        }
        let page = self.run.start;
        self.run = PageRun::new(PageIndex(page.0 + 1), self.run.len - 1);
        Some(ReadTicket::new(Arc::clone(&self.table), page))
    }

    /// Splits off everything from the `n`-th page on.
    pub fn split_off(&mut self, n: u64) -> Self {
        let n = n.min(self.run.len);
        let rest = PageRun::new(PageIndex(self.run.start.0 + n), self.run.len - n);
        self.run.len = n;
        Self::new(Arc::clone(&self.table), rest)
    }

    /// The final bytes of all its pages are in the file. `tell` is called for each page; pages that are `Ready` and not
    /// wanted need nothing further. Returns whether any page is wanted: then map the whole run.
    pub fn landed(self, tell: impl FnMut(PageIndex, Landing)) -> bool {
        self.finish(ReadTicket::landed, tell)
    }

    /// All its pages are zero, and the file has a hole or zeros there. As [`Self::landed`] otherwise.
    pub fn zero(self, tell: impl FnMut(PageIndex, Landing)) -> bool {
        self.finish(ReadTicket::zero, tell)
    }

    fn finish(
        mut self,
        how: impl Fn(ReadTicket) -> Landing,
        mut tell: impl FnMut(PageIndex, Landing),
    ) -> bool {
        let mut any_wanted = false;
        while let Some(ticket) = self.next_page() {
            let page = ticket.page();
            let landing = how(ticket);
            any_wanted |= matches!(landing, Landing::Ready { wanted: true });
            tell(page, landing);
        }
        any_wanted
    }
}

impl Drop for RunTicket {
    fn drop(&mut self) {
        for page in self.run.pages() {
            give_up(&self.table, page);
        }
    }
}

/// `Asked` to `Stale` (perhaps partly overwritten), or to `Zero` after a discard... which only whoever punches may
/// say, so `Stale` there too: it is fetched again and then discarded. A `WANTED` flag stays for who fetches it then.
fn give_up(table: &PageTable, page: PageIndex) {
    let Some(cell) = table.cell(page) else { return };
    loop {
        let old = cell.load(Ordering::Relaxed);
        if PageState::of(old) != PageState::Asked
            || exchange(cell, old, PageState::Stale as u8 | (old & WANTED))
        {
            return;
        }
    }
}

impl fmt::Debug for ReadTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReadTicket").field(&self.page).finish()
    }
}

impl fmt::Debug for RunTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RunTicket").field(&self.run).finish()
    }
}
