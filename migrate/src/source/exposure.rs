//! The guest's memory as the destination may read it: registered with the fabric of the session's page connections.
//!
//! Where registering pins memory (verbs), only those parts are registered that have any, in pieces, while the guest runs. The
//! registration has a mapping of its own, through which nothing else is done: so a page that QEMU gave back to the host after it was
//! pinned is found by its missing page-table entry, and its piece is registered afresh (hazard: pinned registered memory). What is
//! registered for on-demand paging needs no such look.
//! Rounds begin when the first pieces are registered; [`super::registering`] does the rest.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmove_fabric::{Access, Fabric, FabricError, FabricKind};
use vmove_memory::{ByteLen, ByteRange, FileOffset, Mapping, MemoryError, OrphanWatch, RamFile};

use super::gate::{Place, THE_END};
use super::memory::SourceMemory;

use crate::proto::message::{BlockRegions, PART_BYTES, RegionPart, Regions};
use vmove_node::region::GuestRegion;

/// Memory registered at once: what is given back to the host makes one such piece be registered again.
const PIECE: u64 = 64 << 20;
/// Registrations of one RAM block, at most: of a large block pieces are larger.
const MOST_PIECES: u64 = 1024;
/// Registered before anything is read, and then twice as much each time up to the most.
pub(super) const FIRST_STEP: u64 = 4 * PIECE;
pub(super) const MOST_IN_A_STEP: u64 = 64 * PIECE;

/// Why memory could not be made readable.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExposeError {
    #[error(transparent)]
    Fabric(#[from] FabricError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Task(#[from] tokio::task::JoinError),
}

/// All RAM blocks.
#[derive(Debug)]
pub(super) struct Exposure {
    fabric: Arc<dyn Fabric>,
    blocks: Vec<Exposed>,
}

/// One RAM block.
#[derive(Debug)]
struct Exposed {
    mapping: Arc<Mapping>,
    /// In order.
    pieces: Vec<GuestRegion>,
    /// Still to be registered for the first time, in order.
    todo: VecDeque<ByteRange>,
    /// Where registering pins.
    watch: Option<OrphanWatch>,
}

/// Pieces of one RAM block that are to be registered.
struct Step {
    block: usize,
    mapping: Arc<Mapping>,
    pieces: Vec<ByteRange>,
}

impl Exposure {
    /// Makes memory ready to be registered. Where that pins nothing, it is registered.
    pub(super) fn open(memory: &SourceMemory, fabric: Arc<dyn Fabric>) -> Result<Self, ExposeError> {
        let pins = fabric.kind() == FabricKind::Verbs;
        let mut blocks = Vec::new();
        for block in &memory.blocks {
            let mapping = if pins { block.file.map()? } else { block.mapping.clone() };
            let watch = if pins { Some(OrphanWatch::new(&mapping)?) } else { None };
            let todo = if pins { pieces(&block.file, &with_memory(&block.file)?) } else { Vec::new() };
            let whole = if pins { Vec::new() } else { vec![block.file.range()] };
            let pieces = GuestRegion::register_all(&*fabric, &mapping, &whole, Access::REMOTE_READ)?;
            blocks.push(Exposed { mapping, pieces, todo: todo.into(), watch });
        }
        Ok(Self { fabric, blocks })
    }

    /// Whether it is registered with this fabric.
    pub(super) fn is_with(&self, fabric: &Arc<dyn Fabric>) -> bool {
        Arc::ptr_eq(&self.fabric, fabric)
    }

    /// Whether what is registered is pinned, so that it may have become other memory than the file's.
    pub(super) fn pins(&self) -> bool {
        self.blocks.iter().any(|block| block.watch.is_some())
    }

    /// The next pieces to register, of about so many bytes; at least one, if there is any.
    fn next_step(&self, bytes: u64) -> Vec<Step> {
        let mut left = bytes;
        let mut steps = Vec::new();
        for (number, block) in self.blocks.iter().enumerate() {
            let fits = |piece: &&ByteRange| {
                let fits = left > 0;
                left = left.saturating_sub(piece.len.0);
                fits
            };
            let pieces: Vec<ByteRange> = block.todo.iter().take_while(fits).copied().collect();
            if !pieces.is_empty() {
                steps.push(Step { block: number, mapping: Arc::clone(&block.mapping), pieces });
            }
        }
        steps
    }

    /// Takes in what was made of the last step's pieces of one block.
    fn take_in(&mut self, block: usize, made: Vec<GuestRegion>) {
        let block = &mut self.blocks[block];
        block.todo.drain(..made.len());
        block.pieces.extend(made);
        block.pieces.sort_by_key(|piece| piece.range().start.0);
    }

    /// Memory before this place that had memory at first is registered.
    pub(super) fn frontier(&self) -> Place {
        let first = |(number, block): (usize, &Exposed)| Some((number, block.todo.front()?.start.0));
        self.blocks.iter().enumerate().find_map(first).unwrap_or(THE_END)
    }

    /// What the destination needs to read it. `update`: over the page connections that it has.
    pub(super) fn regions(&self, update: bool) -> Regions {
        let part = |piece: &GuestRegion| RegionPart { start: piece.range().start.0, region: piece.remote() };
        let block =
            |block: &Exposed| BlockRegions { parts: block.pieces.iter().map(part).collect::<Vec<_>>() };
        Regions { fabric: self.fabric.kind(), update, blocks: self.blocks.iter().map(block).collect() }
    }

    /// Registers afresh what has other memory than when it was registered, and what has memory only now. Whether anything did: then
    /// the destination must be told before it reads again. What the file has lost is pending again: it may have been named after that
    /// and read from the memory that it had before. To be called before pages are named, after the scan that found them: what changes
    /// later is found by the next scan. No read may be under way.
    pub(super) fn refresh(&mut self, memory: &SourceMemory) -> Result<bool, ExposeError> {
        let (mut changed, mut lost_bytes) = (false, 0);
        for (index, (exposed, block)) in self.blocks.iter_mut().zip(&memory.blocks).enumerate() {
            let Some(watch) = &mut exposed.watch else { continue };
            let before = exposed.pieces.len();
            exposed.pieces.retain(|piece| {
                if !piece.pins() {
                    return true;
                }
                // A kernel that cannot tell: then all of it may have changed.
                let lost = watch.orphans(piece.range()).unwrap_or_else(|_| vec![piece.range()]);
                memory.name_again(index, &lost);
                lost_bytes += lost.iter().map(|range| range.len.0).sum::<u64>();
                lost.is_empty()
            });
            let mut missing = with_memory(&block.file)?;
            for taken in exposed.pieces.iter().map(GuestRegion::range).chain(exposed.todo.iter().copied()) {
                missing = without(&missing, taken);
            }
            changed |= exposed.pieces.len() < before || !missing.is_empty();
            let fabric = &*self.fabric;
            let parts = pieces(&block.file, &missing);
            exposed.pieces.extend(GuestRegion::register_all(
                fabric,
                &exposed.mapping,
                &parts,
                Access::REMOTE_READ,
            )?);
            exposed.pieces.sort_by_key(|piece| piece.range().start.0);
        }
        if lost_bytes > 0 {
            tracing::info!(
                lost_bytes,
                "registered memory was given back to the host, and what holds it is registered afresh"
            );
        }
        Ok(changed)
    }
}

pub(super) fn lock(exposure: &Mutex<Exposure>) -> MutexGuard<'_, Exposure> {
    exposure.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers the next pieces. Whoever looks at what is registered meanwhile does not wait for it.
pub(super) fn register_next(exposure: &Mutex<Exposure>, bytes: u64) -> Result<(), ExposeError> {
    let (fabric, steps) = {
        let exposure = lock(exposure);
        (Arc::clone(&exposure.fabric), exposure.next_step(bytes))
    };
    for step in steps {
        let made = GuestRegion::register_all(&*fabric, &step.mapping, &step.pieces, Access::REMOTE_READ)?;
        lock(exposure).take_in(step.block, made);
    }
    Ok(())
}

/// The parts of a file, of 2 MiB or a page that is larger, that have memory; in order.
fn with_memory(file: &RamFile) -> Result<Vec<ByteRange>, ExposeError> {
    let unit = PART_BYTES.max(file.page_size().bytes());
    let mut parts: Vec<ByteRange> = Vec::new();
    for extent in file.data_extents()? {
        let start = extent.start.0 / unit * unit;
        let end = extent.end().0.next_multiple_of(unit).min(file.len().0);
        match parts.last_mut() {
            Some(last) if last.end().0 >= start => last.len = ByteLen(end.max(last.end().0) - last.start.0),
            _ => parts.push(ByteRange::new(FileOffset(start), ByteLen(end - start))),
        }
    }
    Ok(parts)
}

/// The same, cut into pieces that are registered one by one.
fn pieces(file: &RamFile, parts: &[ByteRange]) -> Vec<ByteRange> {
    // No page is cut.
    let piece = PIECE.max(file.page_size().bytes()).max((file.len().0 / MOST_PIECES).next_power_of_two());
    cut(piece, parts)
}

fn cut(piece: u64, parts: &[ByteRange]) -> Vec<ByteRange> {
    let cut = |part: &ByteRange| {
        let (start, end) = (part.start.0, part.end().0);
        let starts = (start..end).step_by(usize::try_from(piece).unwrap_or(usize::MAX));
        starts.map(move |at| ByteRange::new(FileOffset(at), ByteLen(piece.min(end - at)))).collect::<Vec<_>>()
    };
    parts.iter().flat_map(cut).collect()
}

/// `parts` without `taken`.
fn without(parts: &[ByteRange], taken: ByteRange) -> Vec<ByteRange> {
    let keep = |part: &ByteRange| {
        let before = part.start.0..part.end().0.min(taken.start.0);
        let behind = part.start.0.max(taken.end().0)..part.end().0;
        [before, behind].into_iter().filter(|r| r.start < r.end)
    };
    let range = |r: std::ops::Range<u64>| ByteRange::new(FileOffset(r.start), ByteLen(r.end - r.start));
    parts.iter().flat_map(keep).map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> ByteRange {
        ByteRange::new(FileOffset(start), ByteLen(end - start))
    }

    #[test]
    fn pieces_cover_the_parts_and_are_bounded() {
        let parts = [range(0, PIECE * 2 + PART_BYTES), range(PIECE * 4, PIECE * 4 + PART_BYTES)];
        let cut = cut(PIECE, &parts);
        assert_eq!(cut.len(), 4);
        assert_eq!(cut.iter().map(|c| c.len.0).sum::<u64>(), parts.iter().map(|p| p.len.0).sum::<u64>());
        assert!(cut.iter().all(|c| c.len.0 <= PIECE));
    }

    #[test]
    fn what_is_taken_out_is_not_left() {
        assert_eq!(without(&[range(0, 10)], range(3, 5)), [range(0, 3), range(5, 10)]);
        assert_eq!(without(&[range(0, 10)], range(0, 10)), []);
        assert_eq!(without(&[range(0, 4), range(6, 10)], range(4, 7)), [range(0, 4), range(7, 10)]);
    }
}
