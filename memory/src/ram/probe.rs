//! Finding holes where the file system does not tell: hugetlbfs knows no `SEEK_HOLE`.
//!
//! A mapping of its own is registered for minor faults, and `UFFDIO_CONTINUE` is tried on each page: it maps what the
//! file has and refuses where the file has nothing. Nobody ever touches the mapping, and no memory is allocated.

use std::fmt;

use super::file::{HoleFinder, RamFile};
use super::mapping::Mapping;
use crate::error::Result;
use crate::uffd::{FaultContext, Outcome};
use crate::units::{ByteLen, ByteRange, FileOffset, Hva};

pub(super) struct HoleProbe {
    context: FaultContext,
    mapping: Mapping,
}

impl HoleProbe {
    pub(super) fn new(file: &RamFile) -> Result<Self> {
        let mapping = Mapping::untouched(file)?;
        let context = FaultContext::local()?;
        context.register_minor(Hva(mapping.ptr() as u64), mapping.len())?;
        Ok(Self { context, mapping })
    }
}

impl HoleFinder for HoleProbe {
    fn data_extents(&self, within: ByteRange) -> Result<Vec<ByteRange>> {
        let page = self.mapping.page_size();
        let base = Hva(self.mapping.ptr() as u64);
        let mut extents: Vec<ByteRange> = Vec::new();
        let mut at = within.start;
        while at < within.end() {
            let left = ByteLen(within.end().0 - at.0);
            let done = match self.context.continue_range(base.add(ByteLen(at.0)), left, page)? {
                Outcome::Hole { done } => done,
                Outcome::Mapped(_) | Outcome::AlreadyMapped => left,
                // Nobody discards from this mapping, and it is ours: take it for data.
                Outcome::Retry { .. } | Outcome::Gone => left,
            };
            match extents.last_mut() {
                Some(last) if last.end() == at => last.len.0 += done.0,
                _ if done.0 > 0 => extents.push(ByteRange::new(at, done)),
                _ => {}
            }
            at = FileOffset(at.0 + done.0 + if done < left { page.bytes() } else { 0 });
        }
        Ok(extents)
    }
}

impl fmt::Debug for HoleProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoleProbe").field("len", &self.mapping.len()).finish_non_exhaustive()
    }
}
