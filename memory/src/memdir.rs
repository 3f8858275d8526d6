//! Directories that hold RAM files.

use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::ram::RamFile;
use crate::units::{Backing, ByteLen};

/// A directory on a file system of the right kind.
#[derive(Debug)]
pub struct MemoryDir {
    path: PathBuf,
    backing: Backing,
}

impl MemoryDir {
    /// Makes the directory, and mounts tmpfs `huge=advise` or hugetlbfs on it unless that is there already.
    ///
    /// # Errors
    /// Not yet written.
    pub fn prepare(_path: &Path, _backing: Backing) -> Result<Self> {
        todo!()
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its kind.
    #[must_use]
    pub const fn backing(&self) -> Backing {
        self.backing
    }

    /// Creates a RAM file of `len` bytes, all of it a hole.
    ///
    /// # Errors
    /// Not yet written.
    pub fn create_ram_file(&self, _name: &str, _len: ByteLen) -> Result<RamFile> {
        todo!()
    }

    /// Memory that files here can still take: free huge pages, or the host's available memory.
    ///
    /// # Errors
    /// Not yet written.
    pub fn free(&self) -> Result<ByteLen> {
        todo!()
    }

    /// Unmounts what [`Self::prepare`] mounted, if it is empty.
    ///
    /// # Errors
    /// Not yet written.
    pub fn unmount(self) -> Result<()> {
        todo!()
    }
}
