//! The only place where guest memory is handed to a fabric.
//!
//! Rule 1 (lifetime): the mapping stays mapped, at one address, as long as any [`Region`] made from it is alive: a
//! [`GuestRegion`] holds both and drops the region first. Whoever clones the region out of it keeps the [`GuestRegion`] as well; a
//! region of [`register_kept`] holds the mapping itself.
#![allow(unsafe_code)]

use std::num::NonZero;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use vmove_fabric::{Access, Fabric, FabricError, LocalSlice, MemoryArea, Region, RemoteRegion};
use vmove_memory::{ByteLen, ByteRange, FileOffset, Mapping};

/// Threads that register at a time: the kernel pins pages at some gigabytes a second each.
const THREADS: usize = 4;

/// A part of a RAM file registered with a fabric: the region keeps the mapping.
///
/// # Errors
/// The fabric's answer.
pub fn register_kept(
    fabric: &dyn Fabric,
    mapping: Arc<Mapping>,
    part: ByteRange,
    access: Access,
) -> Result<Region, FabricError> {
    let (first, _, len) = inside(&mapping, part);
    // SAFETY: rule 1: `mapping` is held here until the region made below holds it, or is gone.
    let area = unsafe { MemoryArea::new(first, len) };
    let region = fabric.register(area, access)?;
    let what = "a region that nobody else has yet";
    region.keeping(mapping).ok_or(FabricError::Unsupported { what })
}

/// Address, start and length of what of `part` lies inside the mapping; the rest is left out: an empty region is refused by the
/// fabric.
fn inside(mapping: &Mapping, part: ByteRange) -> (NonNull<u8>, u64, u64) {
    let end = part.end().0.min(mapping.len().0);
    let start = part.start.0.min(end);
    let first = mapping.ptr().wrapping_add(usize::try_from(start).unwrap_or(usize::MAX));
    (NonNull::new(first).unwrap_or(NonNull::dangling()), start, end - start)
}

/// A part of a RAM block registered with a fabric.
#[derive(Debug, Clone)]
pub struct GuestRegion {
    // Order matters: fields drop in order of declaration.
    region: Region,
    mapping: Arc<Mapping>,
    start: u64,
}

impl GuestRegion {
    /// Registers a part of a RAM block, which must lie inside the mapping.
    ///
    /// # Errors
    /// The fabric's answer.
    pub fn register(
        fabric: &dyn Fabric,
        mapping: &Arc<Mapping>,
        part: ByteRange,
        access: Access,
    ) -> Result<Self, FabricError> {
        let (first, start, len) = inside(mapping, part);
        // SAFETY: rule 1: the value made below keeps the mapping until after the region is dropped.
        let area = unsafe { MemoryArea::new(first, len) };
        Ok(Self { region: fabric.register(area, access)?, mapping: Arc::clone(mapping), start })
    }

    /// Registers several parts, a few at a time.
    ///
    /// # Errors
    /// The fabric's answer to the first that failed; none is left registered then.
    pub fn register_all(
        fabric: &dyn Fabric,
        mapping: &Arc<Mapping>,
        parts: &[ByteRange],
        access: Access,
    ) -> Result<Vec<Self>, FabricError> {
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(THREADS);
        if parts.len() < 2 || threads < 2 {
            return parts.iter().map(|part| Self::register(fabric, mapping, *part, access)).collect();
        }
        let next = AtomicUsize::new(0);
        let made = Mutex::new(Vec::new());
        let work = || {
            while let Some(index) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|i| *i < parts.len()) {
                let result = Self::register(fabric, mapping, parts[index], access);
                if result.is_err() {
                    next.store(parts.len(), Ordering::Relaxed);
                }
                made.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
            }
        };
        std::thread::scope(|scope| (0..threads.min(parts.len())).for_each(|_| drop(scope.spawn(work))));
        let mut made = made.into_inner().unwrap_or_else(PoisonError::into_inner);
        made.sort_by_key(|(index, _)| *index);
        made.into_iter().map(|(_, result)| result).collect()
    }

    /// Which part of the block it is.
    #[must_use]
    pub fn range(&self) -> ByteRange {
        ByteRange::new(FileOffset(self.start), ByteLen(self.region.len()))
    }

    /// See [`Region::pins`].
    #[must_use]
    pub fn pins(&self) -> bool {
        self.region.pins()
    }

    /// What a peer needs to read it.
    #[must_use]
    pub fn remote(&self) -> RemoteRegion {
        self.region.remote()
    }

    /// `len` bytes at `offset` of the block as the target of a read, if they lie inside.
    #[must_use]
    pub fn local(&self, offset: u64, len: u32) -> Option<LocalSlice> {
        self.region.local(offset.checked_sub(self.start)?, len)
    }

    /// The memory itself.
    #[must_use]
    pub const fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}
