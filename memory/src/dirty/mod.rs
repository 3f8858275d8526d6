//! Which pages a guest wrote, by asynchronous write protection and `PAGEMAP_SCAN`.

use std::time::Duration;

use crate::error::{MemoryError, Result};
use crate::process::Process;
use crate::ram::{QemuMapping, RamFile};
use crate::units::{ByteRange, PageRun};

/// Why dirty tracking is not possible on this host.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// The kernel lacks something.
    #[error(
        "This kernel lacks {missing} (Linux 6.7 has it): full post-copy is possible, pre-copy and hybrid are not"
    )]
    Kernel {
        /// What.
        missing: &'static str,
    },
}

/// What one scan found and cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanStats {
    /// Pages written since the last scan.
    pub pages: u64,
    /// Runs of them.
    pub runs: u64,
    /// Time of the scan, callbacks excluded.
    pub took: Duration,
}

/// Tracks which pages of a process's RAM are written.
#[derive(Debug)]
pub struct DirtyTracker {
    _private: (),
}

impl DirtyTracker {
    /// Asks the running kernel.
    ///
    /// # Errors
    /// [`Unsupported`] names what is missing.
    pub fn supported() -> Result<(), Unsupported> {
        todo!()
    }

    /// Write-protects the mappings. From now on every first write to a page is recorded.
    ///
    /// # Errors
    /// Not yet written.
    pub fn arm(_process: &Process, _mappings: &[QemuMapping]) -> Result<Self> {
        todo!()
    }

    /// Reports the pages of file `file_index` written since the last scan (or since arming) and re-arms them in one step.
    /// **Read their bytes after this, never before.**
    ///
    /// # Errors
    /// Not yet written.
    pub fn scan_and_rearm(
        &mut self,
        _file_index: usize,
        _dirty: impl FnMut(PageRun),
    ) -> Result<ScanStats, MemoryError> {
        todo!()
    }

    /// Ends tracking.
    ///
    /// # Errors
    /// Not yet written.
    pub fn disarm(self) -> Result<()> {
        todo!()
    }
}

/// Finds ranges that became holes, which `PAGEMAP_SCAN` may not report.
#[derive(Debug, Default)]
pub struct HoleWatch {
    data: Vec<ByteRange>,
}

impl HoleWatch {
    /// Remembers where the file has data now.
    ///
    /// # Errors
    /// Those of [`RamFile::data_extents`].
    pub fn new(file: &RamFile) -> Result<Self> {
        Ok(Self { data: file.data_extents()? })
    }

    /// Ranges that had data at the last look and have none now; they read as zero.
    ///
    /// # Errors
    /// Those of [`RamFile::data_extents`].
    pub fn became_holes(&mut self, _file: &RamFile) -> Result<Vec<ByteRange>> {
        todo!()
    }
}
