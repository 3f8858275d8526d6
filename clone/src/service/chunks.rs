//! What of a template is there: one state for each 4 KiB, in plain atomics. Shared by the thread that receives and the one that
//! answers faults; neither ever waits for the other.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::CloneError;

/// Bytes of a chunk: a page.
pub const CHUNK: u64 = 4096;

/// It is zero: nothing arrives.
const ZERO: u8 = 0;
/// It has not arrived, and nobody asked for it.
const MISSING: u8 = 1;
/// It was asked for, and whoever did waits for [`Chunks::arrivals`].
const WANTED: u8 = 2;
/// It is there, and its checksum was right.
const WHOLE: u8 = 3;

/// The states of all chunks of a template that is on its way.
#[derive(Debug)]
pub struct Chunks {
    regions: Box<[Box<[AtomicU8]>]>,
    arrivals: OwnedFd,
}

/// What a chunk that is needed now is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// It has not arrived: the caller is the first to need it, and must ask for it.
    Ask,
    /// It was asked for.
    Wait,
    /// It is there.
    Whole,
    /// It is zero.
    Zero,
}

impl Chunks {
    /// Regions of these lengths (bytes), all zero but for `travelling`: region, first chunk, number of chunks.
    ///
    /// # Errors
    /// [`CloneError::Task`] without a descriptor to spare, or for chunks outside of their region.
    pub fn new(
        lens: &[u64],
        travelling: impl IntoIterator<Item = (u16, u32, u32)>,
    ) -> Result<Self, CloneError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let arrivals = event.map_err(|e| CloneError::Task(format!("no event descriptor: {e}")))?;
        let zeros = |len: &u64| (0..len.div_ceil(CHUNK)).map(|_| AtomicU8::new(ZERO)).collect();
        let regions: Box<[Box<[AtomicU8]>]> = lens.iter().map(zeros).collect();
        for (region, first, count) in travelling {
            let first = first as usize;
            let cells = regions.get(usize::from(region)).and_then(|r| r.get(first..first + count as usize));
            let outside = || CloneError::Task(format!("chunks outside of region {region} of a template"));
            cells.ok_or_else(outside)?.iter().for_each(|cell| cell.store(MISSING, Ordering::Relaxed));
        }
        Ok(Self { regions, arrivals })
    }

    /// The chunk at `offset` (bytes) of a region is there and verified, and nobody writes to it any more.
    pub fn landed(&self, region: u16, offset: u64) {
        let Some(cell) = self.cell(usize::from(region), offset / CHUNK) else { return };
        // Release: whoever sees it finds the bytes.
        if cell.swap(WHOLE, Ordering::AcqRel) == WANTED {
            self.ring();
        }
    }

    /// Readable when a chunk has arrived that was asked for, or [`Self::ring`] was called.
    pub(super) fn arrivals(&self) -> BorrowedFd<'_> {
        self.arrivals.as_fd()
    }

    /// Wakes who waits for arrivals.
    pub(super) fn ring(&self) {
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&self.arrivals, &1_u64.to_ne_bytes());
    }

    /// From now on the descriptor tells of what comes later.
    pub(super) fn heard(&self) {
        let _ = rustix::io::read(&self.arrivals, &mut [0_u8; 8]);
    }

    /// A chunk is needed now. `None`: there is no such chunk.
    pub(super) fn need(&self, region: usize, chunk: u64) -> Option<Need> {
        let cell = self.cell(region, chunk)?;
        let asked = cell.compare_exchange(MISSING, WANTED, Ordering::AcqRel, Ordering::Acquire);
        Some(match asked {
            Ok(_) => Need::Ask,
            Err(WANTED) => Need::Wait,
            Err(WHOLE) => Need::Whole,
            Err(_) => Need::Zero,
        })
    }

    /// It could not be asked for after all.
    pub(super) fn not_asked(&self, region: usize, chunk: u64) {
        if let Some(cell) = self.cell(region, chunk) {
            let _ = cell.compare_exchange(WANTED, MISSING, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// How many chunks from `within.start` on, which is whole or zero, are the same as that one.
    pub(super) fn alike(&self, region: usize, within: Range<u64>) -> u64 {
        let Some(first) = self.cell(region, within.start) else { return 0 };
        let first = first.load(Ordering::Acquire);
        // Acquire: what is found to be whole is mapped next.
        let same =
            |chunk: &u64| self.cell(region, *chunk).is_some_and(|c| c.load(Ordering::Acquire) == first);
        within.take_while(same).count() as u64
    }

    fn cell(&self, region: usize, chunk: u64) -> Option<&AtomicU8> {
        self.regions.get(region)?.get(usize::try_from(chunk).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_asked_for_once_and_tells_of_its_arrival_once() {
        let chunks = Chunks::new(&[8 * CHUNK, 4 * CHUNK], [(0, 2, 4), (1, 0, 1)]).unwrap();
        assert_eq!(chunks.need(0, 1), Some(Need::Zero));
        assert_eq!((chunks.need(0, 8), chunks.need(2, 0)), (None, None));
        assert_eq!((chunks.need(0, 3), chunks.need(0, 3)), (Some(Need::Ask), Some(Need::Wait)));
        chunks.not_asked(0, 3);
        assert_eq!(chunks.need(0, 3), Some(Need::Ask));
        let told = || rustix::io::read(chunks.arrivals(), &mut [0_u8; 8]).is_ok();
        chunks.landed(0, 2 * CHUNK);
        assert!(!told(), "nobody waits for it");
        chunks.landed(0, 3 * CHUNK);
        assert!(told());
        chunks.landed(0, 3 * CHUNK);
        assert!(!told());
        assert_eq!(chunks.need(0, 3), Some(Need::Whole));
        assert_eq!(chunks.alike(0, 2..8), 2);
        assert_eq!(chunks.alike(0, 6..8), 2);
        assert_eq!(chunks.alike(0, 0..1), 1);
        Chunks::new(&[CHUNK], [(0, 0, 2)]).unwrap_err();
    }
}
