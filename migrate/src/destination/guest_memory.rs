//! The guest's memory at the destination: files, page states, what of it QEMU maps.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use vmove_memory::{
    ByteLen, ByteRange, Collapsed, FaultContext, Hva, Landing, MemoryError, Outcome, PageIndex, PageRun,
    PageSize, PageState, QemuMapping, RamFile, map_folio,
};

use super::block::{Block, FOLIO};
use super::comparing::Comparing;
use super::error::PageError;
use super::on_demand::OnDemand;
use super::slow_faults::{Answered, SlowFaults};
use super::verify::PageHashes;
use crate::host_cpu::HostCpu;
use crate::vmm::Attached;
use crate::waiting_faults::WaitingFaults;
use vmove_node::latency::Latencies;
use vmove_types::report::SlowFault;
use vmove_types::time::Mono;

/// Mapping a folio that is one takes 3 to 20 us. After more than this, even on a machine whose processors are all busy, it had to be
/// gathered from small pages first.
const SLOW_FOLIO: Duration = Duration::from_millis(2);

/// All RAM blocks of the guest.
#[derive(Debug)]
pub(super) struct GuestMemory {
    pub blocks: Vec<Block>,
    attached: OnceLock<Attached>,
    /// The final set was applied: the states of pages are exact, so faults may be answered and landed pages mapped.
    serving: AtomicBool,
    /// For the thread that waits until faults may be served.
    begun: (Mutex<()>, Condvar),
    pub landed_bytes: AtomicU64,
    /// What is used of the processors for it.
    pub cpu: HostCpu,
    pub latencies: Latencies,
    pub slow_faults: SlowFaults,
    /// When faults could be answered.
    served_since: OnceLock<Mono>,
    pub waiting: WaitingFaults,
    pub hashes: Option<PageHashes>,
    pub comparing: Comparing,
    /// Of a guest that visits.
    pub demand: OnDemand,
    /// Whole folios can be mapped at a stroke. Given up for good when the kernel has to move memory for it: that is slower.
    whole_folios: AtomicBool,
}

/// What is special to the thread that maps.
pub(super) trait Events {
    /// The kernel maps nothing because QEMU is giving memory back (`EAGAIN` of `UFFDIO_CONTINUE`): QEMU goes on when the event has been
    /// read that says so. Called again and again until the page can be mapped.
    fn pending(&mut self) -> Result<(), PageError>;

    /// A fault has been answered.
    fn answered(&mut self, fault: Answered);
}

/// The fault thread reads events. It never waits for who uses this, so the wait ends.
#[derive(Debug)]
pub(super) struct ReadElsewhere<'a> {
    slow_faults: &'a SlowFaults,
    waited: u32,
}

impl<'a> ReadElsewhere<'a> {
    /// For a thread that maps this memory and is not the fault thread.
    pub(super) const fn of(memory: &'a GuestMemory) -> Self {
        Self { slow_faults: &memory.slow_faults, waited: 0 }
    }
}

impl Events for ReadElsewhere<'_> {
    fn pending(&mut self) -> Result<(), PageError> {
        step_aside(&mut self.waited);
        Ok(())
    }

    fn answered(&mut self, fault: Answered) {
        self.slow_faults.note(fault);
    }
}

/// Leaves the processor to others, for longer if it has been done often.
pub(super) fn step_aside(waited: &mut u32) {
    *waited += 1;
    if *waited > 20 {
        std::thread::sleep(Duration::from_micros(50));
    }
    std::thread::yield_now();
}

impl GuestMemory {
    pub(super) fn new(blocks: Vec<Block>, verify: bool, latencies: Latencies, cpu: HostCpu) -> Self {
        let hashes = verify.then(|| PageHashes::new(blocks.iter().map(Block::pages)));
        Self {
            blocks,
            attached: OnceLock::new(),
            serving: AtomicBool::new(false),
            begun: (Mutex::new(()), Condvar::new()),
            landed_bytes: AtomicU64::new(0),
            cpu,
            latencies,
            slow_faults: SlowFaults::default(),
            served_since: OnceLock::new(),
            waiting: WaitingFaults::default(),
            comparing: Comparing::default(),
            demand: OnDemand::default(),
            // A page must be hashed before the guest can change it, and a folio is mapped as a whole.
            whole_folios: AtomicBool::new(hashes.is_none()),
            hashes,
        }
    }

    /// Opens the page tables' file names below a folder.
    pub(super) fn table_path(dir: &Path, id: impl std::fmt::Display, block: usize) -> std::path::PathBuf {
        dir.join(format!("{id}-{block}.pages"))
    }

    /// Makes the files zero again: nothing has landed, QEMU has written to some pages and can touch none any more.
    pub(super) fn wipe(&self) -> Result<(), MemoryError> {
        for block in &self.blocks {
            for page in 0..block.pages() {
                if !block.mapping().is_zero(PageIndex(page))? {
                    block.mapping().zero(PageRun::new(PageIndex(page), 1))?;
                }
            }
        }
        Ok(())
    }

    /// The same at once where no page was set aside for the file, which huge pages are.
    pub(super) fn empty(&self) -> Result<(), MemoryError> {
        if self.blocks.iter().any(|block| block.page_size != PageSize::Base4K) {
            return self.wipe();
        }
        let all = |block: &Block| ByteRange { start: vmove_memory::FileOffset(0), len: block.file.len() };
        self.blocks.iter().try_for_each(|block| block.file.punch(all(block)))
    }

    /// The RAM files, by number of their blocks.
    pub(super) fn files(&self) -> Vec<&RamFile> {
        self.blocks.iter().map(|block| &block.file).collect()
    }

    pub(super) fn attach(&self, attached: Attached) {
        // Attached once in the life of a session's process; a second time would be a bug that the first context hides.
        debug_assert!(self.attached.get().is_none(), "attached twice");
        let _ = self.attached.set(attached);
        self.wake();
    }

    pub(super) fn attached(&self) -> Option<&Attached> {
        self.attached.get()
    }

    /// The final set has been applied: from here on pages are claimed, served and mapped.
    pub(super) fn begin_serving(&self) {
        self.served_since.get_or_init(Mono::now);
        self.serving.store(true, Ordering::Release);
        self.wake();
    }

    /// The slowest faults, for the report.
    pub(super) fn slowest_faults(&self) -> Vec<SlowFault> {
        let begun = self.served_since.get().copied().unwrap_or_default();
        self.slow_faults.report(begun, &self.blocks)
    }

    /// Sleeps until faults may be served: the final set is known and QEMU's memory is attached. `None` if `given_up` is true before that,
    /// of which [`wake`](Self::wake) tells. QEMU starts meanwhile, perhaps on the only processor that is free: nothing is polled.
    pub(super) fn wait_until_served(&self, given_up: impl Fn() -> bool) -> Option<&Attached> {
        let (lock, changed) = &self.begun;
        let served = || self.attached().filter(|_| self.is_serving());
        let guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = changed.wait_while(guard, |()| !given_up() && served().is_none());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        served().filter(|_| !given_up())
    }

    /// Has whoever waits for the first faults look again.
    pub(super) fn wake(&self) {
        // With the lock held once: who has looked, and does not sleep yet, would miss it.
        drop(self.begun.0.lock().unwrap_or_else(PoisonError::into_inner));
        self.begun.1.notify_all();
    }

    pub(super) fn is_serving(&self) -> bool {
        self.serving.load(Ordering::Acquire)
    }

    /// Pages still to be fetched, as the tables have counted them. Once serving it is 0 only if every page is here.
    pub(super) fn left(&self) -> u64 {
        self.blocks.iter().map(|block| block.table.missing()).sum()
    }

    /// Which page an address in QEMU belongs to.
    pub(super) fn locate(&self, hva: Hva) -> Option<(usize, u64)> {
        let mapping = self.attached()?.mappings.iter().find(|m| m.hva <= hva && hva < m.end())?;
        let block = self.blocks.get(mapping.file_index)?;
        Some((mapping.file_index, block.page_size.index_of(mapping.to_file(hva)?).0))
    }

    /// QEMU gives memory back to the host. What was there is not to be fetched, and cannot be compared.
    pub(super) fn discarded(&self, hva: Hva, len: ByteLen) {
        let Some((block, page)) = self.locate(hva) else { return };
        let of = &self.blocks[block];
        let run = PageRun::new(PageIndex(page), len.0.div_ceil(of.page_size.bytes()));
        if let Some(hashes) = &self.hashes {
            hashes.give_up(block, run);
        }
        of.table.mark_discarded(run);
        if self.demand.is_active() {
            // It is zero here now, and is not at home: it goes there as what was touched does. A fault on it finds the hole.
            of.table.mark_mapped(run);
        }
    }

    /// Tells the table that a page's bytes have landed; maps it if a thread waits for it.
    pub(super) fn landed(
        &self,
        block: usize,
        page: PageIndex,
        landing: Landing,
        events: &mut dyn Events,
    ) -> Result<bool, PageError> {
        match landing {
            Landing::Ready { wanted } => {
                if wanted {
                    let arrived = Mono::now();
                    self.map(block, PageRun::new(page, 1), events)?;
                    let mapped = Mono::now();
                    self.waiting.served(block, page, |since| {
                        self.latencies.record(mapped.since(since));
                        events.answered(Answered { block, page, since, asked: None, arrived, mapped });
                    });
                }
                Ok(true)
            }
            Landing::Superseded { .. } => Ok(false),
            Landing::Discarded(ticket) => {
                let run = PageRun::new(page, 1);
                let of = &self.blocks[block];
                of.mapping().zero(run).map_err(|e| of.file_error(e))?;
                let landed = self.landed(block, page, ticket.zero(), events);
                if self.demand.is_active() {
                    of.table.mark_mapped(run);
                }
                landed
            }
        }
    }

    /// Maps pages whose bytes are final into QEMU, and wakes who waits for them.
    ///
    /// With `--verify` each page is hashed first: after this call the guest may change it.
    pub(super) fn map(&self, block: usize, run: PageRun, events: &mut dyn Events) -> Result<(), PageError> {
        let Some(attached) = self.attached() else { return Ok(()) };
        let of = &self.blocks[block];
        if let Some(hashes) = &self.hashes {
            hashes.take(block, of.mapping(), run);
        }
        let bytes = of.page_size.range_of(run);
        if self.demand.is_active() {
            // Before it can be written: who goes home with what was touched must not miss it.
            of.table.mark_mapped(run);
        }
        for mapping in attached.mappings.iter().filter(|m| m.file_index == block) {
            if let Some(part) = mapping.file_range().intersection(bytes) {
                self.map_part(of, &attached.context, mapping, part, events)?;
            }
        }
        of.table.mark_mapped(run);
        Ok(())
    }

    fn map_part(
        &self,
        of: &Block,
        context: &FaultContext,
        mapping: &QemuMapping,
        part: ByteRange,
        events: &mut dyn Events,
    ) -> Result<(), PageError> {
        let Some(mut hva) = mapping.to_hva(part.start) else { return Ok(()) };
        let mut left = part.len;
        while left.0 > 0 {
            let outcome = context.continue_range(hva, left, of.page_size).map_err(PageError::Map)?;
            let done = match outcome {
                Outcome::Mapped(_) | Outcome::AlreadyMapped => return Ok(()),
                Outcome::Gone => return Err(PageError::QemuGone),
                Outcome::Hole { done } => {
                    let at = mapping.to_file(hva.add(done)).unwrap_or(part.start);
                    let page = PageRun::new(of.page_size.index_of(at), 1);
                    of.mapping().populate(page).map_err(|e| of.file_error(e))?;
                    done
                }
                Outcome::Retry { done } => {
                    events.pending()?;
                    done
                }
            };
            hva = hva.add(done);
            left = ByteLen(left.0 - done.0);
        }
        Ok(())
    }

    /// Maps everything of a range that has landed.
    pub(super) fn map_landed(
        &self,
        block: usize,
        within: Range<u64>,
        events: &mut dyn Events,
    ) -> Result<(), PageError> {
        let table = &self.blocks[block].table;
        let mut at = within.start;
        while at < within.end {
            let rest = PageRun::new(PageIndex(at), within.end - at);
            let Some(start) = table.find(rest, |s| s == PageState::Landed) else { break };
            let run = table.prefix(PageRun::new(start, within.end - start.0), |s| s == PageState::Landed);
            // Somebody else may have mapped it since it was found.
            if run.len > 0 {
                self.map(block, run, events)?;
            }
            at = start.0 + run.len.max(1);
        }
        Ok(())
    }

    /// Maps those 2 MiB folios around `pages` that have landed to the last page, at 3 us each instead of the 110 us of page after page,
    /// and by one huge page-table entry. Where that cannot be, what has landed of `pages`.
    pub(super) fn map_folios(
        &self,
        block: usize,
        pages: Range<u64>,
        events: &mut dyn Events,
    ) -> Result<(), PageError> {
        let of = &self.blocks[block];
        if of.page_size != PageSize::Base4K || !self.whole_folios.load(Ordering::Relaxed) {
            return self.map_landed(block, pages, events);
        }
        let mut at = pages.start;
        while at < pages.end {
            let folio = of.folio(at);
            at = folio.end;
            let run = PageRun::new(PageIndex(folio.start), folio.end - folio.start);
            let there = |s| matches!(s, PageState::Landed | PageState::Zero | PageState::Mapped);
            if of.table.prefix(run, there).len == run.len && !self.map_folio(block, run)? {
                self.map_landed(block, folio, events)?;
            }
        }
        Ok(())
    }

    /// Whether it could be done.
    fn map_folio(&self, block: usize, run: PageRun) -> Result<bool, PageError> {
        let Some(attached) = self.attached() else { return Ok(false) };
        let bytes = self.blocks[block].page_size.range_of(run);
        let inside =
            |m: &&QemuMapping| m.file_index == block && m.file_range().intersection(bytes) == Some(bytes);
        let mapping = attached.mappings.iter().find(inside).filter(|m| m.fits_huge_pages());
        let hva = mapping.and_then(|m| m.to_hva(bytes.start)).filter(|_| bytes.len.0 == FOLIO);
        let Some(hva) = hva else { return Ok(false) };
        let begun = std::time::Instant::now();
        let mapped = map_folio(&attached.process, &attached.context, hva).map_err(PageError::Map)?;
        if mapped != Collapsed::Done || begun.elapsed() > SLOW_FOLIO {
            self.whole_folios.store(false, Ordering::Relaxed);
        }
        if mapped == Collapsed::Done {
            self.blocks[block].table.mark_mapped(run);
        }
        Ok(mapped == Collapsed::Done)
    }

    /// Pages were named as zero by the source. `claim`: others may be fetching pages of the run meanwhile.
    ///
    /// Only pages whose file bytes may be something else are written.
    pub(super) fn zero(&self, block: usize, pages: Range<u64>, claim: bool) -> Result<(), PageError> {
        let of = &self.blocks[block];
        let mut at = pages.start;
        while at < pages.end {
            let rest = PageRun::new(PageIndex(at), pages.end - at);
            let blank = of.table.prefix(rest, |s| matches!(s, PageState::Absent | PageState::Zero));
            let run = if blank.len > 0 {
                blank
            } else {
                let run = of.table.prefix(rest, |s| !matches!(s, PageState::Absent | PageState::Zero));
                if !claim && run.len > 0 {
                    of.mapping().zero(run).map_err(|e| of.file_error(e))?;
                }
                run
            };
            if claim {
                self.zero_claimed(block, run, blank.len > 0)?;
            } else {
                of.table.mark_zero(run);
            }
            at += run.len.max(1);
        }
        Ok(())
    }

    fn zero_claimed(&self, block: usize, run: PageRun, blank: bool) -> Result<(), PageError> {
        let of = &self.blocks[block];
        while let Some(ticket) = of.table.claim_run(run, run.len) {
            if !blank {
                of.mapping().zero(ticket.run()).map_err(|e| of.file_error(e))?;
            }
            let mut result = Ok(());
            ticket.zero(|page, landing| {
                if let Err(e) = self.landed(block, page, landing, &mut ReadElsewhere::of(self)) {
                    result = Err(e);
                }
            });
            result?;
        }
        Ok(())
    }
}
