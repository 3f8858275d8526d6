//! One RAM block's file on tmpfs or hugetlbfs.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, fstatfs, seek};
use rustix::io::Errno;

use super::Mapping;
use super::probe::HoleProbe;
use crate::error::{MemoryError, Result};
use crate::units::{ByteLen, ByteRange, FileOffset, PageSize};

const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The file behind one RAM block of a guest.
///
/// Its length is taken when it is opened; guest RAM does not change its size.
#[derive(Debug)]
pub struct RamFile {
    file: File,
    path: PathBuf,
    len: ByteLen,
    page_size: PageSize,
    dev: u64,
    inode: u64,
    probe: OnceLock<Option<HoleProbe>>,
}

impl RamFile {
    /// Opens an existing RAM file for reading and writing.
    ///
    /// # Errors
    /// [`MemoryError::Path`] if it cannot be opened, [`MemoryError::UnsupportedFilesystem`] if it is neither on
    /// tmpfs nor on hugetlbfs.
    pub fn open(path: &Path) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|source| MemoryError::path("Opening the RAM file", path, source))?;
        Self::new(file, path.to_owned())
    }

    /// Takes a descriptor that is open for reading and writing. `path` is used in messages only.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_fd(fd: OwnedFd, path: &Path) -> Result<Self> {
        Self::new(File::from(fd), path.to_owned())
    }

    fn new(file: File, path: PathBuf) -> Result<Self> {
        let meta = file.metadata().map_err(|source| MemoryError::path("stat", &path, source))?;
        let fs = fstatfs(&file).map_err(|source| MemoryError::path("fstatfs", &path, source))?;
        let fs_type = u64::try_from(fs.f_type).unwrap_or_default();
        let page_size = match (fs_type, u64::try_from(fs.f_bsize).unwrap_or_default()) {
            (TMPFS_MAGIC, _) => PageSize::Base4K,
            (HUGETLBFS_MAGIC, 0x20_0000) => PageSize::Huge2M,
            (HUGETLBFS_MAGIC, 0x4000_0000) => PageSize::Huge1G,
            _ => return Err(MemoryError::UnsupportedFilesystem { path, fs_type }),
        };
        let probe = OnceLock::new();
        Ok(Self {
            len: ByteLen(meta.len()),
            dev: meta.dev(),
            inode: meta.ino(),
            file,
            path,
            page_size,
            probe,
        })
    }

    /// The path it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length.
    #[must_use]
    pub const fn len(&self) -> ByteLen {
        self.len
    }

    /// True if it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len.0 == 0
    }

    /// Granularity of faults on it.
    #[must_use]
    pub const fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// Number of pages of [`Self::page_size`].
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.page_size.pages_in(self.len)
    }

    /// The whole file.
    #[must_use]
    pub const fn range(&self) -> ByteRange {
        ByteRange { start: FileOffset(0), len: self.len }
    }

    /// Device and inode: what names it in `/proc/PID/maps`.
    #[must_use]
    pub const fn identity(&self) -> (u64, u64) {
        (self.dev, self.inode)
    }

    /// Its descriptor.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Maps all of it shared into this process. The mapping keeps the memory alive by itself.
    ///
    /// # Errors
    /// [`MemoryError::System`] if the kernel refuses, for example for lack of address space or huge pages.
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
    /// [`MemoryError::Path`] if the file system cannot tell.
    pub fn data_extents(&self) -> Result<Vec<ByteRange>> {
        if self.page_size != PageSize::Base4K {
            return self.probe(self.range());
        }
        let mut extents = Vec::new();
        let mut at = 0;
        while let Some(start) = self.seek_to(SeekFrom::Data(at))? {
            let end = self.seek_to(SeekFrom::Hole(start))?.unwrap_or(self.len.0).min(self.len.0);
            if end > start {
                extents.push(ByteRange::new(FileOffset(start), ByteLen(end - start)));
            }
            at = end.max(start + 1);
        }
        Ok(extents)
    }

    /// True if no byte of the range has memory.
    ///
    /// # Errors
    /// As [`Self::data_extents`].
    pub fn is_hole(&self, range: ByteRange) -> Result<bool> {
        if self.page_size != PageSize::Base4K {
            self.check(range)?;
            return Ok(self.probe(self.page_size.range_of(self.page_size.run_of(range)))?.is_empty());
        }
        Ok(self.seek_to(SeekFrom::Data(range.start.0))?.is_none_or(|data| data >= range.end().0))
    }

    /// Frees the memory of a range, which then reads as zero. Whoever has it mapped loses their page-table entries;
    /// where a userfaultfd watches, the next touch faults as missing.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`], [`MemoryError::Path`].
    pub fn punch(&self, range: ByteRange) -> Result<()> {
        self.check(range)?;
        if range.is_empty() {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, range.start.0, range.len.0)
            .map_err(|source| MemoryError::path("Punching a hole", &self.path, source))
    }

    /// Gives memory to the holes of a range (fallocate(2)); what is there stays. No mapping is locked meanwhile, as it is when a touch
    /// of a huge page has the kernel clear it.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`]; [`MemoryError::Path`], with `ENOSPC` when there is no memory or no huge page left.
    pub fn allocate(&self, range: ByteRange) -> Result<()> {
        self.check(range)?;
        if range.is_empty() {
            return Ok(());
        }
        fallocate(&self.file, FallocateFlags::empty(), range.start.0, range.len.0)
            .map_err(|source| MemoryError::path("Giving memory to", &self.path, source))
    }

    /// Memory that the file has now, in bytes.
    ///
    /// # Errors
    /// [`MemoryError::Path`].
    pub fn allocated_bytes(&self) -> Result<ByteLen> {
        let meta = self.file.metadata().map_err(|source| MemoryError::path("stat", &self.path, source))?;
        Ok(ByteLen(meta.blocks() * 512))
    }

    pub(crate) fn check(&self, range: ByteRange) -> Result<()> {
        check_range(range, self.len)
    }

    fn probe(&self, within: ByteRange) -> Result<Vec<ByteRange>> {
        let probe = self.probe.get_or_init(|| {
            let probe = HoleProbe::new(self);
            probe
                .inspect_err(|error| tracing::warn!(path = %self.path.display(), %error, "holes cannot be told from data"))
                .ok()
        });
        probe.as_ref().map_or_else(|| Ok(vec![within]), |probe| probe.data_extents(within))
    }

    fn seek_to(&self, to: SeekFrom) -> Result<Option<u64>> {
        match seek(&self.file, to) {
            Ok(at) => Ok(Some(at)),
            Err(Errno::NXIO) => Ok(None),
            Err(source) => Err(MemoryError::path("Looking for holes", &self.path, source)),
        }
    }
}

pub(super) fn check_range(range: ByteRange, file_len: ByteLen) -> Result<()> {
    match range.start.0.checked_add(range.len.0) {
        Some(end) if end <= file_len.0 => Ok(()),
        _ => Err(MemoryError::OutOfRange { offset: range.start, len: range.len, file_len }),
    }
}
