//! What of the source's memory can be read over the page connections of one attempt, and where it lands.
//!
//! Memory is known by parts (2 MiB, or a page that is larger): each has the source's key and a registration of ours. Readers and the
//! fault thread look parts up without a lock; keys may change between rounds, when the source has registered a part afresh.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use vmove_fabric::{Access, Fabric, FabricKind, ReadSegment, RemoteSlice};
use vmove_memory::{ByteLen, ByteRange, FileOffset};

use super::block::Block;
use super::error::RegionsError;
use super::guest_memory::GuestMemory;
use crate::proto::message::{BlockRegions, PART_BYTES, Regions};
use vmove_node::region::GuestRegion;

/// All RAM blocks.
#[derive(Debug)]
pub(super) struct RemoteMemory {
    kind: FabricKind,
    blocks: Vec<RemoteBlock>,
}

#[derive(Debug)]
struct RemoteBlock {
    unit: u64,
    /// The source's address of the block's first byte, as its fabric counts.
    base: AtomicU64,
    /// By part; 0: cannot be read (no fabric gives out this key).
    keys: Box<[AtomicU64]>,
    locals: Box<[OnceLock<GuestRegion>]>,
}

impl RemoteMemory {
    /// Nothing can be read yet.
    pub(super) fn new(memory: &GuestMemory, kind: FabricKind) -> Self {
        let block = |block: &Block| {
            let unit = PART_BYTES.max(block.page_size.bytes());
            let parts = block.file.len().0.div_ceil(unit);
            RemoteBlock {
                unit,
                base: AtomicU64::new(0),
                keys: (0..parts).map(|_| AtomicU64::new(0)).collect(),
                locals: (0..parts).map(|_| OnceLock::new()).collect(),
            }
        };
        Self { kind, blocks: memory.blocks.iter().map(block).collect() }
    }

    pub(super) fn kind(&self) -> FabricKind {
        self.kind
    }

    /// Takes in what the source says, and registers memory of ours for it.
    pub(super) fn update(
        &self,
        memory: &GuestMemory,
        fabric: &dyn Fabric,
        regions: &Regions,
    ) -> Result<(), RegionsError> {
        for ((reach, block), theirs) in self.blocks.iter().zip(&memory.blocks).zip(&regions.blocks) {
            reach.update(block, fabric, theirs)?;
        }
        Ok(())
    }

    /// A read of `range`, which lies in one part; `None` if the source did not say how.
    pub(super) fn segment(&self, block: usize, range: ByteRange) -> Option<ReadSegment> {
        let reach = self.blocks.get(block)?;
        let part = usize::try_from(range.start.0 / reach.unit).ok()?;
        let rkey = reach.keys.get(part)?.load(Ordering::Acquire);
        if rkey == 0 {
            return None;
        }
        let local = reach.locals.get(part)?.get()?.local(range.start.0, u32::try_from(range.len.0).ok()?)?;
        let addr = reach.base.load(Ordering::Relaxed).wrapping_add(range.start.0);
        Some(ReadSegment { remote: RemoteSlice { addr, rkey }, local })
    }
}

impl RemoteBlock {
    fn update(&self, block: &Block, fabric: &dyn Fabric, theirs: &BlockRegions) -> Result<(), RegionsError> {
        let mut now = vec![0; self.keys.len()];
        let mut new: Vec<ByteRange> = Vec::new();
        for part in &theirs.parts {
            let end = part.start.checked_add(part.region.len).filter(|end| *end <= block.file.len().0);
            let (Some(end), true) = (end, part.start % self.unit == 0) else {
                return Err(RegionsError::Outside(part.start));
            };
            self.base.store(part.region.addr.wrapping_sub(part.start), Ordering::Relaxed);
            for index in part.start / self.unit..end.div_ceil(self.unit) {
                let at = usize::try_from(index).map_err(|_| RegionsError::Outside(index))?;
                now[at] = part.region.rkey;
                if self.locals[at].get().is_none() {
                    let start = index * self.unit;
                    let until = (start + self.unit).min(end);
                    match new.last_mut() {
                        Some(last) if last.end().0 == start && start != part.start => {
                            last.len.0 += until - start;
                        }
                        _ => new.push(ByteRange::new(FileOffset(start), ByteLen(until - start))),
                    }
                }
            }
        }
        let made = GuestRegion::register_all(fabric, block.mapping_shared(), &new, Access::LOCAL)?;
        for region in made {
            let range = region.range();
            for index in range.start.0 / self.unit..range.end().0.div_ceil(self.unit) {
                let at = usize::try_from(index).map_err(|_| RegionsError::Outside(index))?;
                // Nobody else sets it: updates come one after the other.
                let _ = self.locals[at].set(region.clone());
            }
        }
        for (key, now) in self.keys.iter().zip(now) {
            // Release: whoever sees the key finds base and registration.
            key.store(now, Ordering::Release);
        }
        Ok(())
    }
}
