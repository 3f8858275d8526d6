//! One RAM block's file on tmpfs or hugetlbfs.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, fstatfs, seek};
use rustix::io::Errno;

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
    pub(super) hole_finder: OnceLock<Option<Box<dyn HoleFinder>>>,
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
        Ok(Self {
            len: ByteLen(meta.len()),
            dev: meta.dev(),
            inode: meta.ino(),
            file,
            path,
            page_size,
            hole_finder: OnceLock::new(),
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

    /// Checks that the file still has the length with which it was opened.
    ///
    /// # Errors
    /// [`MemoryError::Shortened`], [`MemoryError::Path`].
    pub fn check_whole(&self) -> Result<()> {
        let meta = self.file.metadata().map_err(|source| MemoryError::path("stat", &self.path, source))?;
        if meta.len() < self.len.0 {
            let (path, found) = (self.path.clone(), ByteLen(meta.len()));
            return Err(MemoryError::Shortened { path, expected: self.len, found });
        }
        Ok(())
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

    /// The next data or hole; `None` if there is none behind.
    pub(super) fn seek_to(&self, to: SeekFrom) -> Result<Option<u64>> {
        match seek(&self.file, to) {
            Ok(at) => Ok(Some(at)),
            Err(Errno::NXIO) => Ok(None),
            Err(source) => Err(MemoryError::path("Looking for holes", &self.path, source)),
        }
    }
}

/// Finds holes where the file system does not tell.
pub(super) trait HoleFinder: std::fmt::Debug + Send + Sync {
    /// The parts of `within` that have memory.
    fn data_extents(&self, within: ByteRange) -> Result<Vec<ByteRange>>;
}

pub(super) fn check_range(range: ByteRange, file_len: ByteLen) -> Result<()> {
    match range.start.0.checked_add(range.len.0) {
        Some(end) if end <= file_len.0 => Ok(()),
        _ => Err(MemoryError::OutOfRange { offset: range.start, len: range.len, file_len }),
    }
}
