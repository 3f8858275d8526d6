//! Giving the guest's memory its pages before the guest needs them.
//!
//! The first touch of a page of a RAM file costs its clearing: 0.1 to 0.2 ms for a 2 MiB folio, and ten times that on a virtual machine
//! whose hypervisor has taken the memory back. In pre-copy rounds nobody waits for it. A guest that faults waits for the whole folio of
//! its 4 KiB page. So for post-copy it is done while the guest still runs at the source: what the source has memory for gets memory here.
//!
//! A page of 1 GiB takes 0.1 s to 3 s to clear, and in a page fault it is cleared with the process's memory map locked: no thread that
//! maps or unmaps anything goes on, and the source hears nothing. So such pages are given in every mode, through the file, before the first is read.
//!
//! A QEMU that locks its memory (`-overcommit mem-lock=on`) touches all of it as it starts, before it has asked for huge pages. So all of it is
//! given before QEMU starts, in every mode.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::oneshot;
use vmove_fabric::{Sched, ThreadOptions};
use vmove_memory::{MemoryError, PageIndex, PageRun};

use super::block::Block;
use super::error::PopulateError;
use super::guest_memory::GuestMemory;
use crate::host_cpu::{Booking, HostCpu};
use crate::pending::{PageSet, WireSet};
use crate::proto::message::{BlockInfo, PART_BYTES};
use crate::throttle::BULK_NICE;
use crate::vmm::PageWorkers;

/// Work on a thread of its own. It ends soon when this is dropped; memory that has been given stays.
#[derive(Debug)]
pub(super) struct Populating {
    stop: Arc<AtomicBool>,
    ended: oneshot::Receiver<Result<(), PopulateError>>,
}

impl Drop for Populating {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Populating {
    /// How it ended. Cancel-safe; not to be called again after that.
    pub(super) async fn ended(&mut self) -> Result<(), PopulateError> {
        (&mut self.ended).await.unwrap_or(Err(PopulateError::Ended))
    }
}

/// Begins, from a thread of its own. `all`: what the source has no memory for, too.
pub(super) fn start(
    memory: &Arc<GuestMemory>,
    blocks: &[BlockInfo],
    held: &[WireSet],
    all: bool,
    workers: PageWorkers,
) -> Result<Populating, PopulateError> {
    let parts = |(b, held): (&BlockInfo, &WireSet)| match b.size.div_ceil(PART_BYTES) {
        parts if all => Ok(PageSet::full(parts)),
        parts => PageSet::decode(held, parts)
            .map_err(|source| PopulateError::PageSet { block: b.id.clone(), source }),
    };
    let sets = blocks.iter().zip(held).map(parts).collect::<Result<Vec<_>, _>>()?;
    let stop = Arc::new(AtomicBool::new(false));
    let (memory, stopped) = (Arc::clone(memory), Arc::clone(&stop));
    let (done, ended) = oneshot::channel();
    if workers == PageWorkers::Turns {
        let _ = done.send(populate(&memory, &sets, &stopped));
        return Ok(Populating { stop, ended });
    }
    let options =
        ThreadOptions { sched: Sched::Normal { nice: BULK_NICE }, ..ThreadOptions::bulk("vmove-populate") };
    options
        .spawn(move |_| {
            // The session may have ended.
            let _ = done.send(populate(&memory, &sets, &stopped));
        })
        .map_err(PopulateError::Thread)?;
    Ok(Populating { stop, ended })
}

fn populate(memory: &GuestMemory, sets: &[PageSet], stop: &AtomicBool) -> Result<(), PopulateError> {
    let mut pace = Pace { booking: memory.cpu.booking(), cpu: &memory.cpu, stop };
    for (block, set) in memory.blocks.iter().zip(sets) {
        if block.must_be_given() {
            give(block, &mut pace)?;
            continue;
        }
        let per_part = (PART_BYTES / block.page_size.bytes()).max(1);
        for part in set.runs().flatten() {
            if pace.is_over() {
                return Ok(());
            }
            let start = part * PART_BYTES / block.page_size.bytes();
            let len = per_part.min(block.pages().saturating_sub(start));
            if len > 0 {
                block
                    .mapping()
                    .populate(PageRun::new(PageIndex(start), len))
                    .map_err(|e| file_error(block, e))?;
            }
        }
    }
    Ok(())
}

/// The share of the processors that is to be kept, between two pieces of work.
struct Pace<'a> {
    booking: Booking<'a>,
    cpu: &'a HostCpu,
    stop: &'a AtomicBool,
}

impl Pace<'_> {
    /// Books the last piece, and rests if it must. Whether there is to be no other one.
    fn is_over(&mut self) -> bool {
        let is_over = || self.stop.load(Ordering::Relaxed);
        self.booking.book();
        self.cpu.rest_until_free(is_over);
        is_over()
    }
}

/// All pages: one that the guest begins to use while it moves must be there too.
fn give(block: &Block, pace: &mut Pace<'_>) -> Result<(), PopulateError> {
    for page in 0..block.pages() {
        if pace.is_over() {
            return Ok(());
        }
        let range = block.page_size.range_of(PageRun::new(PageIndex(page), 1));
        block.file.allocate(range).map_err(|e| file_error(block, e))?;
    }
    Ok(())
}

fn file_error(block: &Block, source: MemoryError) -> PopulateError {
    PopulateError::File { path: block.file.path().to_owned(), source }
}
