//! The guest's memory at the source: what the destination still lacks of it, and what the guest has written meanwhile.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::Instant;
use vmove_memory::{
    ByteRange, Mapping, MemoryError, PageIndex, PageRun, PageSize, PageState, PageTable, RamFile,
};

use super::classify::{Classified, Subject, classify};
use super::error::NamingError;
use super::gate::Gate;
use crate::host_cpu::HostCpu;
use vmove_node::blocking::spawn_blocking;

use crate::pending::{PageSet, WireSet};
use crate::proto::message::{BlockInfo, PART_BYTES, WireRun};
use crate::vmm::{During, GuestWrites, MappedFile, Vmm, WriteTracker};
use vmove_node::peer::SessionId;
use vmove_node::record::VmRecord;
use vmove_types::problem::chain;

/// Takes some 5 ms (of 1 GiB pages one is hashed as a whole), and is more than processors cache.
const HASHED_AT_MOST: u64 = 32 << 20;

/// Which 2 MiB parts of a RAM file have memory.
pub(super) fn parts_with_data(file: &RamFile) -> Result<WireSet, MemoryError> {
    let mut parts = PageSet::empty(file.len().0.div_ceil(PART_BYTES));
    for extent in file.data_extents()? {
        parts.insert(extent.start.0 / PART_BYTES..extent.end().0.div_ceil(PART_BYTES));
    }
    Ok(parts.encode())
}

/// One RAM block.
#[derive(Debug)]
pub(super) struct Block {
    pub id: String,
    pub file: RamFile,
    pub mapping: Arc<Mapping>,
}

impl Block {
    fn page_size(&self) -> PageSize {
        self.file.page_size()
    }
}

/// All RAM blocks, and how the guest's writes to them are followed.
#[derive(Debug)]
pub(super) struct SourceMemory {
    pub blocks: Vec<Block>,
    in_qemu: Box<dyn GuestWrites>,
    writes: Mutex<Writes>,
    /// Of a guest that is here for a visit: which pages it has touched. All others are at its home.
    visit: Option<Vec<Arc<PageTable>>>,
    /// What is used of the processors for it.
    pub cpu: Arc<HostCpu>,
}

#[derive(Debug, Default)]
struct Writes {
    tracker: Option<Box<dyn WriteTracker>>,
    /// Pages of each block that the destination has no good copy of.
    pending: Vec<PageSet>,
    /// How many of those may hold something, at most: most of a guest's memory may never have been used. `None`: not counted.
    pending_content: Option<u64>,
    /// Pages that a scan has found written since [`SourceMemory::forget_seen`].
    seen: Vec<PageSet>,
    last_scan: Option<Instant>,
}

impl Writes {
    /// Counts again how much of what is pending may hold something.
    fn count_pending(&mut self, content: &[PageSet]) -> u64 {
        let both = self.pending.iter().zip(content).map(|(pending, content)| pending.common(content).count());
        *self.pending_content.insert(both.sum())
    }

    /// Pages were made pending, some of them perhaps not for the first time.
    fn add_pending(&mut self, pages: u64) {
        self.pending_content = self.pending_content.map(|counted| counted.saturating_add(pages));
    }
}

/// What a scan found.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Scan {
    /// Pages written since the scan before.
    pub dirty_pages: u64,
    /// Pages now pending, those included.
    pub pending_pages: u64,
    /// Time of the scan.
    pub took: Duration,
    /// Time since the scan before (or since arming).
    pub interval: Duration,
}

impl Scan {
    pub(super) fn dirty_per_s(&self) -> f64 {
        if self.interval.is_zero() { 0.0 } else { self.dirty_pages as f64 / self.interval.as_secs_f64() }
    }
}

impl SourceMemory {
    /// Opens the VM's RAM files. The guest does not notice.
    pub(super) fn open(vmm: &dyn Vmm, vm: &VmRecord) -> Result<Self, MemoryError> {
        let mut blocks = Vec::new();
        for ram in &vm.ram {
            let file = RamFile::open(&ram.path)?;
            let mapping = file.map()?;
            blocks.push(Block { id: ram.id.clone(), file, mapping });
        }
        let files: Vec<_> = blocks.iter().map(|b| &b.file).collect();
        let in_qemu = vmm.find_memory(vm, &files)?;
        // What was never sent is pending: at first everything.
        let pending = blocks.iter().map(|b| PageSet::full(b.file.pages())).collect();
        let seen = blocks.iter().map(|b| PageSet::empty(b.file.pages())).collect();
        let writes = Mutex::new(Writes { pending, seen, ..Writes::default() });
        let cpu = Arc::new(HostCpu::new(None, vmm.page_workers()));
        Ok(Self { blocks, in_qemu, writes, visit: None, cpu })
    }

    /// The same, with what is used of the processors counted for a session.
    pub(super) fn counted_in(self, cpu: &Arc<HostCpu>) -> Self {
        Self { cpu: Arc::clone(cpu), ..self }
    }

    /// The same of a guest that came by this visit, and goes home: only what it has touched is sent. `dir`: where the visit's page maps are.
    pub(super) fn open_of_visit(
        vmm: &dyn Vmm,
        vm: &VmRecord,
        dir: &Path,
        visit: SessionId,
    ) -> Result<Self, MemoryError> {
        let mut memory = Self::open(vmm, vm)?;
        let table = |index| PageTable::open(&crate::destination::table_path(dir, visit, index));
        memory.visit = Some((0..memory.blocks.len()).map(table).collect::<Result<_, _>>()?);
        memory.name_all_again();
        Ok(memory)
    }

    /// What the destination may lack if nothing has crossed.
    fn everything(&self, block: usize) -> PageSet {
        let pages = self.blocks[block].file.pages();
        let Some(visit) = &self.visit else { return PageSet::full(pages) };
        let (table, mut touched) = (&visit[block], PageSet::empty(pages));
        let mut at = 0;
        while let Some(start) =
            table.find(PageRun::new(PageIndex(at), pages - at), |s| s == PageState::Mapped)
        {
            let run = table.prefix(PageRun::new(start, pages - start.0), |s| s == PageState::Mapped);
            at = start.0 + run.len.max(1);
            touched.insert(start.0..at);
        }
        touched
    }

    pub(super) fn infos(&self) -> Result<Vec<BlockInfo>, MemoryError> {
        let info = |b: &Block| {
            Ok(BlockInfo {
                id: b.id.clone(),
                size: b.file.len().0,
                page_size: b.page_size().bytes(),
                data: parts_with_data(&b.file)?,
            })
        };
        self.blocks.iter().map(info).collect()
    }

    /// Checks that nobody has shortened a RAM file.
    pub(super) fn check_whole(&self) -> Result<(), MemoryError> {
        self.blocks
            .iter()
            .try_for_each(|block| block.file.check_whole().and_then(|()| block.mapping.check_whole()))
    }

    pub(super) fn total_pages(&self) -> u64 {
        self.blocks.iter().map(|b| b.file.pages()).sum()
    }

    pub(super) fn page_bytes(&self) -> u64 {
        self.blocks.first().map_or(4096, |b| b.page_size().bytes())
    }

    /// Bytes of the files that hold anything: an upper bound of what must cross.
    pub(super) fn content_bytes(&self) -> u64 {
        let of =
            |b: &Block| b.file.data_extents().map_or(b.file.len().0, |e| e.iter().map(|e| e.len.0).sum());
        self.blocks.iter().map(of).sum()
    }

    /// Begins to follow the guest's writes.
    pub(super) fn arm(&self) -> Result<Duration, MemoryError> {
        let begun = Instant::now();
        let mut writes = self.lock();
        let mapped: Vec<_> =
            self.blocks.iter().map(|b| MappedFile { file: &b.file, mapping: &b.mapping }).collect();
        writes.tracker = Some(self.in_qemu.follow(&mapped)?);
        writes.last_scan = Some(Instant::now());
        Ok(begun.elapsed())
    }

    /// Ends it; the guest's memory is as before.
    pub(super) fn end_tracking(&self) {
        let tracker = self.lock().tracker.take();
        if let Some(Err(error)) = tracker.map(WriteTracker::end) {
            tracing::warn!(
                error = chain(&error),
                "writes are still being tracked; that ends with this daemon"
            );
        }
    }

    pub(super) fn is_armed(&self) -> bool {
        self.lock().tracker.is_some()
    }

    /// Adds what was written since the last scan to what is pending, and re-arms. Bytes read after this are as new as the scan; bytes
    /// read before it may be old (hazard: read before re-arm). Without a tracker everything is pending.
    pub(super) fn scan(&self) -> Result<Scan, MemoryError> {
        self.cpu.count(|| self.find_written(During::Rounds))
    }

    /// As [`SourceMemory::scan`], of a guest that is stopped and waits for this.
    pub(super) fn scan_stopped(&self) -> Result<Scan, MemoryError> {
        self.find_written(During::Pause)
    }

    fn find_written(&self, during: During) -> Result<Scan, MemoryError> {
        let begun = Instant::now();
        let mut guard = self.lock();
        let writes = &mut *guard;
        let mut scan =
            Scan { interval: writes.last_scan.map_or(Duration::ZERO, |at| begun - at), ..Scan::default() };
        for (index, block) in self.blocks.iter().enumerate() {
            let Some(tracker) = &mut writes.tracker else {
                writes.pending[index] = self.everything(index);
                writes.pending_content = None;
                continue;
            };
            let (pending, seen) = (&mut writes.pending[index], &mut writes.seen[index]);
            let mut dirty = 0;
            let mut add = |run: PageRun| {
                dirty += run.len;
                pending.insert(run.start.0..run.end().0);
                seen.insert(run.start.0..run.end().0);
            };
            tracker.scan(during, index, &block.file, &mut add)?;
            scan.dirty_pages += dirty;
        }
        writes.add_pending(scan.dirty_pages);
        scan.pending_pages = writes.pending.iter().map(PageSet::count).sum();
        writes.last_scan = Some(begun);
        scan.took = begun.elapsed();
        Ok(scan)
    }

    /// What is pending.
    pub(super) fn pending(&self) -> Vec<PageSet> {
        self.lock().pending.clone()
    }

    /// How many pages are pending and may hold something, at most.
    pub(super) fn pending_pages(&self) -> u64 {
        let writes = self.lock();
        let pending = writes.pending.iter().map(PageSet::count).sum();
        writes.pending_content.map_or(pending, |counted| counted.min(pending))
    }

    /// Takes what is pending: it is about to be sent.
    pub(super) fn take_pending(&self) -> Vec<PageSet> {
        let mut writes = self.lock();
        writes.pending_content = Some(0);
        writes.pending.iter_mut().map(PageSet::take).collect()
    }

    /// Takes the next `pages` pages that are pending and may hold something, from a page of a block on, which is moved behind them.
    /// Fewer at the end of memory: what the guest writes in front of it does not come again.
    pub(super) fn take_content(
        &self,
        pages: u64,
        from: &mut (usize, u64),
    ) -> Result<Vec<PageSet>, MemoryError> {
        let content = self.content()?;
        let mut writes = self.lock();
        let taken = Self::take_next(&mut writes.pending, &content, pages, from);
        writes.count_pending(&content);
        Ok(taken)
    }

    fn take_next(
        pending: &mut [PageSet],
        content: &[PageSet],
        pages: u64,
        from: &mut (usize, u64),
    ) -> Vec<PageSet> {
        let mut left = pages;
        let mut taken: Vec<PageSet> = content.iter().map(|set| PageSet::empty(set.capacity())).collect();
        for (index, pending) in pending.iter_mut().enumerate().skip(from.0) {
            let first = if index == from.0 { from.1 } else { 0 };
            for run in pending.common(&content[index]).runs() {
                let start = run.start.max(first);
                let end = run.end.min(start.saturating_add(left)).max(start);
                taken[index].insert(start..end);
                pending.remove(start..end);
                left -= end - start;
                *from = (index, end);
                if left == 0 {
                    return taken;
                }
            }
        }
        *from = (content.len(), 0);
        taken
    }

    /// From here on [`SourceMemory::seen`] counts.
    pub(super) fn forget_seen(&self) {
        self.lock().seen.iter_mut().for_each(|seen| drop(seen.take()));
    }

    /// Number of pages that scans have found written, each counted once; and of those that are pending and may hold something.
    pub(super) fn seen(&self) -> Result<(u64, u64), MemoryError> {
        let content = self.content()?;
        let mut writes = self.lock();
        let left = writes.count_pending(&content);
        Ok((writes.seen.iter().map(PageSet::count).sum(), left))
    }

    /// Pages of each block that the file has memory for.
    pub(super) fn content(&self) -> Result<Vec<PageSet>, MemoryError> {
        let of = |block: &Block| {
            let mut set = PageSet::empty(block.file.pages());
            for extent in block.file.data_extents()? {
                let run = block.page_size().run_of(extent);
                set.insert(run.start.0..run.end().0);
            }
            Ok(set)
        };
        self.blocks.iter().map(of).collect()
    }

    /// Makes all pages pending.
    pub(super) fn name_all_again(&self) {
        let mut writes = self.lock();
        writes.pending = (0..self.blocks.len()).map(|block| self.everything(block)).collect();
        writes.pending_content = None;
    }

    /// What is not pending: the destination has it as the guest's processors have left it.
    pub(super) fn not_pending(&self) -> Vec<PageSet> {
        let all = |pending: &PageSet| PageSet::full(pending.capacity());
        self.lock().pending.iter().map(|pending| all(pending).without(pending)).collect()
    }

    /// Hashes some of the memory that there is. Returns how many bytes.
    pub(super) fn hash_some(&self) -> Result<u64, MemoryError> {
        self.cpu.count(|| self.hash_content())
    }

    fn hash_content(&self) -> Result<u64, MemoryError> {
        let mut hashed = 0;
        for (block, content) in self.blocks.iter().zip(self.content()?) {
            let page = block.page_size().bytes();
            for index in content.runs().flatten() {
                if hashed >= HASHED_AT_MOST {
                    return Ok(hashed);
                }
                block.mapping.hash(PageIndex(index))?;
                hashed += page;
            }
        }
        Ok(hashed)
    }

    /// Makes pages of a block pending.
    pub(super) fn name_again(&self, block: usize, ranges: &[ByteRange]) {
        let page_size = self.blocks[block].page_size();
        let mut writes = self.lock();
        for range in ranges {
            let run = page_size.run_of(*range);
            writes.pending[block].insert(run.start.0..run.end().0);
            writes.add_pending(run.len);
        }
    }

    /// Names every page of the sets as zero or data, in batches, from a thread of its own; none before the gate is open to it.
    pub(super) fn name_pages(
        self: &Arc<Self>,
        sets: Arc<Vec<PageSet>>,
        gate: Arc<Gate>,
    ) -> (mpsc::Receiver<Vec<WireRun>>, tokio::task::JoinHandle<Result<Classified, NamingError>>) {
        // Enough to keep the destination busy, few enough that a slow one holds us back.
        let (sender, receiver) = mpsc::channel(16);
        let memory = Arc::clone(self);
        let task = spawn_blocking(move || {
            let mut booking = memory.cpu.booking();
            let mut all = Classified::default();
            for (index, (block, set)) in memory.blocks.iter().zip(sets.iter()).enumerate() {
                let extents = block.file.data_extents()?;
                let number = u16::try_from(index).map_err(|_| NamingError::TooManyBlocks)?;
                let mapping = &block.mapping;
                let subject =
                    Subject { block: number, mapping, extents: &extents, page_size: block.page_size() };
                let page_bytes = block.page_size().bytes();
                let found = classify(subject, set, |batch| {
                    let end = batch.last().map_or(0, |run| (run.start + run.len) * page_bytes);
                    booking.book();
                    memory.cpu.rest_until_free(|| sender.is_closed());
                    gate.pass((index, end));
                    hand_on(&sender, batch)
                });
                all.pages += found.pages;
                all.zero += found.zero;
            }
            booking.book();
            Ok(all)
        });
        (receiver, task)
    }

    fn lock(&self) -> MutexGuard<'_, Writes> {
        self.writes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether it is still wanted. Waits only if there is no room: a simulation, which has one thread, has room for all batches.
fn hand_on<T>(sender: &mpsc::Sender<T>, batch: T) -> bool {
    match sender.try_send(batch) {
        Ok(()) => true,
        Err(TrySendError::Full(batch)) => sender.blocking_send(batch).is_ok(),
        Err(TrySendError::Closed(_)) => false,
    }
}
