//! A RAM file mapped, and which parts of it have memory.

use std::sync::Arc;

use rustix::fs::SeekFrom;

use super::file::{HoleFinder, RamFile};
use super::mapping::Mapping;
use super::probe::HoleProbe;
use crate::error::Result;
use crate::units::{ByteLen, ByteRange, FileOffset, PageSize};

impl RamFile {
    /// Maps all of it shared into this process. The mapping keeps the memory alive by itself.
    ///
    /// # Errors
    /// [`MemoryError::System`](crate::MemoryError::System) if the kernel refuses, for example for lack of address space or huge pages.
    pub fn map(&self) -> Result<Arc<Mapping>> {
        Mapping::new(self).map(Arc::new)
    }

    /// The parts that have memory, in order; the rest are holes, which read as zero.
    ///
    /// Granularity is the file system's: a 2 MiB folio of which one byte was written is all data. With a writer at
    /// work the answer is a snapshot taken piece by piece. On hugetlbfs, which cannot tell, it is found by a userfaultfd
    /// of ours; without the right to one, everything counts as data.
    ///
    /// # Errors
    /// [`MemoryError::Path`](crate::MemoryError::Path) if the file system cannot tell;
    /// [`MemoryError::Shortened`](crate::MemoryError::Shortened).
    pub fn data_extents(&self) -> Result<Vec<ByteRange>> {
        if self.page_size() != PageSize::Base4K {
            return self.probe(self.range());
        }
        let mut extents = Vec::new();
        let mut at = 0;
        while let Some(start) = self.seek_to(SeekFrom::Data(at))? {
            let end = self.seek_to(SeekFrom::Hole(start))?.unwrap_or(self.len().0).min(self.len().0);
            if end > start {
                extents.push(ByteRange::new(FileOffset(start), ByteLen(end - start)));
            }
            at = end.max(start + 1);
        }
        // What is behind the end now would pass for a hole.
        self.check_whole()?;
        Ok(extents)
    }

    /// True if no byte of the range has memory.
    ///
    /// # Errors
    /// As [`Self::data_extents`].
    pub fn is_hole(&self, range: ByteRange) -> Result<bool> {
        if self.page_size() != PageSize::Base4K {
            self.check(range)?;
            return Ok(self.probe(self.page_size().range_of(self.page_size().run_of(range)))?.is_empty());
        }
        let data = self.seek_to(SeekFrom::Data(range.start.0))?;
        self.check_whole()?;
        Ok(data.is_none_or(|data| data >= range.end().0))
    }

    fn probe(&self, within: ByteRange) -> Result<Vec<ByteRange>> {
        let probe = self.hole_finder.get_or_init(|| {
            let probe = HoleProbe::new(self);
            probe
                .map(|probe| Box::new(probe) as Box<dyn HoleFinder>)
                .inspect_err(|error| tracing::warn!(path = %self.path().display(), %error, "holes cannot be told from data"))
                .ok()
        });
        probe.as_ref().map_or_else(|| Ok(vec![within]), |probe| probe.data_extents(within))
    }
}
