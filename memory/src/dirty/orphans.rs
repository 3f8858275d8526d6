//! Registered memory that the file has lost.

use std::sync::Arc;

use crate::error::Result;
use crate::pagemap::Pagemap;
use crate::process::Process;
use crate::ram::Mapping;
use crate::units::{ByteRange, FileOffset, Hva};

/// Finds pages that were pinned through a mapping and no longer belong to its file.
///
/// A device that has pages pinned goes on reading them after the file was punched there (balloon, free-page reporting): it
/// reads what used to be the guest's memory. Whoever punches a file takes the page-table entries of all its mappings away.
/// Pinning fills them in and nothing else does, **as long as nobody touches memory through this mapping**: so it must be
/// one of its own. An entry that is missing then means a page that must be registered afresh.
#[derive(Debug)]
pub struct OrphanWatch {
    mapping: Arc<Mapping>,
    pagemap: Pagemap,
}

impl OrphanWatch {
    /// For a mapping of whose pages some are pinned, and which is used for nothing else.
    ///
    /// # Errors
    /// [`MemoryError::Proc`](crate::MemoryError::Proc).
    pub fn new(mapping: &Arc<Mapping>) -> Result<Self> {
        let us = Process::open(std::process::id())?;
        Ok(Self { mapping: Arc::clone(mapping), pagemap: Pagemap::open(&us)? })
    }

    /// What of `pinned` is orphaned, in order.
    ///
    /// # Errors
    /// [`MemoryError::Proc`](crate::MemoryError::Proc) on kernels before 6.7.
    pub fn orphans(&mut self, pinned: ByteRange) -> Result<Vec<ByteRange>> {
        let base = self.mapping.ptr() as u64;
        let mut found = Vec::new();
        self.pagemap.absent(Hva(base + pinned.start.0), pinned.len, |hva, len| {
            found.push(ByteRange::new(FileOffset(hva.0 - base), len));
        })?;
        Ok(found)
    }
}
