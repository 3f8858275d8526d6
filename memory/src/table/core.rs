//! The table and its transitions.

use std::fmt;
use std::ops::Range;
#[cfg(not(loom))]
use std::path::Path;
use std::sync::Arc;

use super::cells::Cells;
use super::state::{DISCARDED, PageState, STATE, SUPERSEDED, WANTED};
use super::sync::{AtomicU8, Ordering};
use super::tally::Tally;
use crate::error::Result;
use crate::units::{PageIndex, PageRun};

/// The state of every page of one RAM block.
///
/// All methods are wait-free or a short compare-and-swap loop on one byte; none allocates, blocks or makes a system
/// call (except `create`, `open` and `anonymous`), so the fault thread may call them. Page numbers outside the table
/// count as [`PageState::Poisoned`] and are never changed.
pub struct PageTable {
    cells: Cells,
    pub(super) tally: Tally,
}

/// How many pages are in each state. A snapshot taken page by page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// [`PageState::Absent`].
    pub absent: u64,
    /// [`PageState::Stale`].
    pub stale: u64,
    /// [`PageState::Asked`].
    pub asked: u64,
    /// [`PageState::Landed`].
    pub landed: u64,
    /// [`PageState::Zero`].
    pub zero: u64,
    /// [`PageState::Mapped`].
    pub mapped: u64,
    /// [`PageState::Poisoned`].
    pub poisoned: u64,
}

impl Counts {
    /// Pages that still have to be fetched, those on their way included.
    #[must_use]
    pub const fn missing(&self) -> u64 {
        self.absent + self.stale + self.asked
    }
}

impl PageTable {
    /// A new table, all [`PageState::Absent`], in a file that outlives the process.
    ///
    /// # Errors
    /// [`MemoryError::TableNotInMemory`](crate::MemoryError::TableNotInMemory) if `path` is not on tmpfs;
    /// [`MemoryError::Path`](crate::MemoryError::Path), also if the file exists.
    #[cfg(not(loom))]
    pub fn create(path: &Path, pages: u64) -> Result<Arc<Self>> {
        Ok(Self::untouched(Cells::create(path, as_len(pages))?))
    }

    /// The table that an earlier run of the program left. Call [`Self::recover`] next, unless that program still lives.
    ///
    /// # Errors
    /// [`MemoryError::TableFormat`](crate::MemoryError::TableFormat) if the file is something else, and those of
    /// [`Self::create`].
    #[cfg(not(loom))]
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        let cells = Cells::open(path)?;
        let part = |part: Range<u64>| count(slice(&cells, part)).missing();
        let tally = Tally::found(cells.all().len() as u64, part);
        Ok(Arc::new(Self { cells, tally }))
    }

    /// A new table, all [`PageState::Absent`], that ends with the process.
    ///
    /// # Errors
    /// [`MemoryError::System`](crate::MemoryError::System) if there is no memory for it.
    pub fn anonymous(pages: u64) -> Result<Arc<Self>> {
        Ok(Self::untouched(Cells::anonymous(as_len(pages))?))
    }

    fn untouched(cells: Cells) -> Arc<Self> {
        let tally = Tally::untouched(cells.all().len() as u64);
        Arc::new(Self { cells, tally })
    }

    /// Pages that still have to be fetched, those on their way included: `counts().missing()`, without reading the table. While pages are
    /// being marked as stale or outdated it may be more, never less.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.tally.missing()
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.cells.all().len() as u64
    }

    /// Every page.
    #[must_use]
    pub fn all(&self) -> PageRun {
        PageRun::new(PageIndex(0), self.pages())
    }

    /// State of one page. Seeing `Landed`, `Zero` or `Mapped` means that the bytes written before are visible
    /// (this Acquire pairs with the Release in `landed`).
    #[must_use]
    pub fn state(&self, page: PageIndex) -> PageState {
        self.cell(page).map_or(PageState::Poisoned, |cell| PageState::of(cell.load(Ordering::Acquire)))
    }

    /// After a successful `UFFDIO_CONTINUE`: `Landed` and `Zero` become `Mapped`. Returns how many did.
    pub fn mark_mapped(&self, run: PageRun) -> u64 {
        self.each(run, |old| match PageState::of(old) {
            PageState::Landed | PageState::Zero => Some(PageState::Mapped as u8),
            _ => None,
        })
    }

    /// Before the guest runs here: the bytes in the file are old. A page on its way will land as `Stale`.
    /// `Mapped` and `Poisoned` pages stay. Returns how many pages changed.
    pub fn mark_stale(&self, run: PageRun) -> u64 {
        self.each(run, |old| match PageState::of(old) {
            PageState::Absent | PageState::Stale | PageState::Landed | PageState::Zero => {
                Some(PageState::Stale as u8 | (old & WANTED))
            }
            PageState::Asked => Some(old | SUPERSEDED),
            _ => None,
        })
    }

    /// As [`Self::mark_stale`] for pages whose bytes have landed or are on their way: pages that never came stay [`PageState::Absent`], whose
    /// bytes are zero. Takes the time of what has come, not that of the run.
    pub fn mark_outdated(&self, run: PageRun) -> u64 {
        let mut changed = 0;
        let all = clamped(&self.cells, run.start.0..run.start.0.saturating_add(run.len));
        for part in self.tally.touched(all) {
            changed += self.each(PageRun::new(PageIndex(part.start), part.end - part.start), |old| {
                match PageState::of(old) {
                    PageState::Stale | PageState::Landed | PageState::Zero => {
                        Some(PageState::Stale as u8 | (old & WANTED))
                    }
                    PageState::Asked => Some(old | SUPERSEDED),
                    _ => None,
                }
            });
        }
        changed
    }

    /// Before the guest runs here: the bytes were written to the file by the peer itself and are final so far.
    /// `Asked`, `Mapped` and `Poisoned` pages stay. Returns how many pages changed.
    pub fn mark_landed(&self, run: PageRun) -> u64 {
        self.settle(run, PageState::Landed)
    }

    /// The content is zero, and the file has a hole or zeros there. As [`Self::mark_landed`] otherwise.
    pub fn mark_zero(&self, run: PageRun) -> u64 {
        self.settle(run, PageState::Zero)
    }

    /// QEMU discarded the pages (balloon, free-page reporting): whatever is not mapped becomes zero, and a page on
    /// its way is handed back as [`Landing::Discarded`](super::Landing::Discarded). `Mapped` pages stay: the next
    /// fault finds the hole. Returns how many pages changed.
    pub fn mark_discarded(&self, run: PageRun) -> u64 {
        self.each(run, |old| match PageState::of(old) {
            PageState::Absent | PageState::Stale | PageState::Landed => Some(PageState::Zero as u8),
            PageState::Asked => Some(old | DISCARDED),
            _ => None,
        })
    }

    /// The first page of `within` in a state that `wanted` accepts.
    pub fn find(&self, within: PageRun, wanted: impl Fn(PageState) -> bool) -> Option<PageIndex> {
        let cells = self.slice(within);
        let found = cells.iter().position(|cell| wanted(PageState::of(cell.load(Ordering::Acquire))))?;
        Some(PageIndex(within.start.0 + found as u64))
    }

    /// The first `Absent` or `Stale` page of `within`.
    #[must_use]
    pub fn find_claimable(&self, within: PageRun) -> Option<PageIndex> {
        let all = clamped(&self.cells, within.start.0..within.start.0.saturating_add(within.len));
        let mut parts = self.tally.with_missing(all);
        parts.find_map(|part| {
            let run = PageRun::new(PageIndex(part.start), part.end - part.start);
            self.find(run, PageState::is_claimable)
        })
    }

    /// The first page of `within` that a guest thread waits for and nobody is fetching: its ticket was dropped. Reads the whole run.
    #[must_use]
    pub fn find_wanted(&self, within: PageRun) -> Option<PageIndex> {
        let is_wanted = |byte: u8| byte & WANTED != 0 && PageState::of(byte).is_claimable();
        let found = self.slice(within).iter().position(|cell| is_wanted(cell.load(Ordering::Acquire)))?;
        Some(PageIndex(within.start.0 + found as u64))
    }

    /// The longest run from the start of `within` whose pages are all in states that `wanted` accepts.
    pub fn prefix(&self, within: PageRun, wanted: impl Fn(PageState) -> bool) -> PageRun {
        let cells = self.slice(within);
        let len = cells.iter().take_while(|cell| wanted(PageState::of(cell.load(Ordering::Acquire)))).count();
        PageRun::new(within.start, len as u64)
    }

    /// How many pages are in each state. Reads the whole table: 256 KiB per GiB of 4 KiB pages.
    #[must_use]
    pub fn counts(&self) -> Counts {
        count(self.cells.all())
    }

    /// After the program that held the tickets died: `Asked` becomes `Stale`, flags are cleared. Returns how many
    /// pages were on their way. Wake every waiting thread afterwards; it faults again and is served anew.
    ///
    /// `Landed` pages stay: their bytes were written before the state was.
    pub fn recover(&self) -> u64 {
        let asked = self.each(self.all(), |old| {
            (PageState::of(old) == PageState::Asked).then_some(PageState::Stale as u8)
        });
        self.each(self.all(), |old| Some(old & STATE));
        asked
    }

    pub(super) fn cell(&self, page: PageIndex) -> Option<&AtomicU8> {
        self.cells.all().get(usize::try_from(page.0).ok()?)
    }

    /// `Absent` or `Stale` to `Asked`, keeping a `WANTED` flag and adding `flags`.
    pub(super) fn take(&self, page: PageIndex, flags: u8) -> bool {
        let Some(cell) = self.cell(page) else { return false };
        self.tally.touch(page.0);
        let mut old = cell.load(Ordering::Relaxed);
        while PageState::of(old).is_claimable() {
            // AcqRel: what an earlier holder of the ticket wrote to the page is visible to us.
            match cell.compare_exchange(
                old,
                PageState::Asked as u8 | (old & WANTED) | flags,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => old = now,
            }
        }
        false
    }

    fn settle(&self, run: PageRun, state: PageState) -> u64 {
        self.each(run, |old| match PageState::of(old) {
            PageState::Absent | PageState::Stale | PageState::Landed | PageState::Zero => Some(state as u8),
            _ => None,
        })
    }

    /// Applies a transition to each page; `None` leaves it. Counts the pages that changed.
    fn each(&self, run: PageRun, next: impl Fn(u8) -> Option<u8>) -> u64 {
        let all = clamped(&self.cells, run.start.0..run.start.0.saturating_add(run.len));
        Tally::parts(all).map(|part| self.each_of_part(part, &next)).sum()
    }

    fn each_of_part(&self, part: Range<u64>, next: impl Fn(u8) -> Option<u8>) -> u64 {
        let (mut changed, mut fewer) = (0, 0);
        let first = part.start;
        for (page, cell) in (first..).zip(slice(&self.cells, part)) {
            let mut old = cell.load(Ordering::Acquire);
            while let Some(new) = next(old).filter(|&new| new != old) {
                let (was_final, is_final) = (PageState::of(old).is_final(), PageState::of(new).is_final());
                if changed == 0 {
                    self.tally.touch(page);
                }
                if was_final && !is_final {
                    // Before it is missing: the tally is never too small.
                    self.tally.one_more(page);
                }
                // Release: the bytes were written (or the page was mapped) before the state says so.
                match cell.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => {
                        changed += 1;
                        fewer += u32::from(is_final && !was_final);
                        break;
                    }
                    Err(now) => {
                        fewer += u32::from(was_final && !is_final);
                        old = now;
                    }
                }
            }
        }
        self.tally.fewer(first, fewer);
        changed
    }

    fn slice(&self, run: PageRun) -> &[AtomicU8] {
        slice(&self.cells, run.start.0..run.start.0.saturating_add(run.len))
    }
}

/// What tests ask.
#[cfg(test)]
impl PageTable {
    /// True if nothing of the run has to be fetched any more.
    pub(crate) fn all_landed(&self, run: PageRun) -> bool {
        self.find(run, |state| !state.is_final()).is_none()
    }
}

impl fmt::Debug for PageTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageTable").field("pages", &self.pages()).finish_non_exhaustive()
    }
}

fn count(cells: &[AtomicU8]) -> Counts {
    let mut by_state = [0; PageState::ALL.len()];
    for cell in cells {
        by_state[PageState::of(cell.load(Ordering::Relaxed)) as usize] += 1;
    }
    let [absent, stale, asked, landed, zero, mapped, poisoned] = by_state;
    Counts { absent, stale, asked, landed, zero, mapped, poisoned }
}

/// As much of a range as the table has.
fn clamped(cells: &Cells, range: Range<u64>) -> Range<u64> {
    let pages = cells.all().len() as u64;
    range.start.min(pages)..range.end.min(pages)
}

fn slice(cells: &Cells, range: Range<u64>) -> &[AtomicU8] {
    let range = clamped(cells, range);
    &cells.all()[as_len(range.start)..as_len(range.end)]
}

pub(super) fn exchange(cell: &AtomicU8, old: u8, new: u8) -> bool {
    cell.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

fn as_len(pages: u64) -> usize {
    usize::try_from(pages).unwrap_or(usize::MAX)
}
