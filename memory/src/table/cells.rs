//! The bytes of a table: in a shared file that outlives the process, or in anonymous memory.
//!
//! Rules that every `unsafe` block here relies on:
//!
//! 1. **Extent.** `base..base + HEADER + len` is one mapping made in this file, readable and writable, and unmapped
//!    only on drop.
//! 2. **Atomics only.** The `len` bytes behind the header are touched only as `AtomicU8`, in every process.
#![allow(unsafe_code)]

use super::sync::AtomicU8;

#[cfg(loom)]
pub(super) struct Cells(Box<[AtomicU8]>);

#[cfg(loom)]
impl Cells {
    pub(super) fn anonymous(len: usize) -> crate::Result<Self> {
        Ok(Self((0..len).map(|_| AtomicU8::new(0)).collect()))
    }

    pub(super) fn all(&self) -> &[AtomicU8] {
        &self.0
    }
}

#[cfg(not(loom))]
pub(super) use real::Cells;

#[cfg(not(loom))]
mod real {
    use std::ffi::c_void;
    use std::fs::{File, OpenOptions};
    use std::io::Read;
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    use std::path::Path;
    use std::ptr::{self, NonNull};
    use std::slice;

    use rustix::fs::fstatfs;
    use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

    use super::AtomicU8;
    use crate::error::{MemoryError, Result};

    const MAGIC: &[u8; 8] = b"vmoveTB1";
    /// Magic, page count (u64, little endian), zeros. A page, so that the cells begin on one.
    const HEADER: usize = 4096;
    const TMPFS_MAGIC: u64 = 0x0102_1994;

    pub(in super::super) struct Cells {
        base: NonNull<u8>,
        len: usize,
    }

    // SAFETY: rule 2: an address range that is only ever used as atomics.
    unsafe impl Send for Cells {}
    // SAFETY: as for Send.
    unsafe impl Sync for Cells {}

    impl Cells {
        pub(in super::super) fn anonymous(len: usize) -> Result<Self> {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: rule 1: a new mapping at an address of the kernel's choice.
            let base = unsafe { mmap_anonymous(ptr::null_mut(), HEADER + len, prot, MapFlags::PRIVATE) }
                .map_err(|source| MemoryError::system("Mapping a page table", source))?;
            Self::at(base, len)
        }

        pub(in super::super) fn create(path: &Path, len: usize) -> Result<Self> {
            let error = |source| MemoryError::path("Creating a page table", path, source);
            let mut options = OpenOptions::new();
            let file =
                options.read(true).write(true).create_new(true).mode(0o600).open(path).map_err(error)?;
            Self::require_memory(&file, path)
                .and_then(|()| {
                    file.set_len((HEADER + len) as u64).map_err(error)?;
                    file.write_all_at(&(len as u64).to_le_bytes(), 8).map_err(error)?;
                    // Last: a file without it was not finished.
                    file.write_all_at(MAGIC, 0).map_err(error)?;
                    Self::map(&file, path, len)
                })
                .inspect_err(|_| drop(std::fs::remove_file(path)))
        }

        pub(in super::super) fn open(path: &Path) -> Result<Self> {
            let error = |source| MemoryError::path("Opening a page table", path, source);
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NOFOLLOW)
                .open(path)
                .map_err(error)?;
            Self::require_memory(&file, path)?;
            let mut header = [0; 16];
            file.read_exact(&mut header).map_err(error)?;
            let format = |found: String| MemoryError::TableFormat { path: path.to_owned(), found };
            if &header[..8] != MAGIC {
                return Err(format(format!("it begins with {:02x?}", &header[..8])));
            }
            let mut pages = [0; 8];
            pages.copy_from_slice(&header[8..]);
            let pages = u64::from_le_bytes(pages);
            let size = file.metadata().map_err(error)?.len();
            match usize::try_from(pages) {
                Ok(len) if pages.checked_add(HEADER as u64) == Some(size) => Self::map(&file, path, len),
                _ => Err(format(format!("{size} bytes for {pages} pages"))),
            }
        }

        fn require_memory(file: &File, path: &Path) -> Result<()> {
            let fs = fstatfs(file).map_err(|source| MemoryError::path("fstatfs", path, source))?;
            if u64::try_from(fs.f_type) == Ok(TMPFS_MAGIC) {
                return Ok(());
            }
            Err(MemoryError::TableNotInMemory { path: path.to_owned() })
        }

        fn map(file: &File, path: &Path, len: usize) -> Result<Self> {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            // Populated, so that the fault thread never waits for a page of the table.
            let flags = MapFlags::SHARED | MapFlags::POPULATE;
            // SAFETY: rule 1: a new mapping at an address of the kernel's choice.
            let base = unsafe { mmap(ptr::null_mut(), HEADER + len, prot, flags, file, 0) }
                .map_err(|source| MemoryError::path("Mapping a page table", path, source))?;
            Self::at(base, len)
        }

        fn at(base: *mut c_void, len: usize) -> Result<Self> {
            let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| {
                MemoryError::system("Mapping a page table", std::io::Error::other("mapped at address 0"))
            })?;
            Ok(Self { base, len })
        }

        pub(in super::super) fn all(&self) -> &[AtomicU8] {
            // SAFETY: rule 1: the header is part of the mapping.
            let first = unsafe { self.base.as_ptr().add(HEADER) }.cast::<AtomicU8>();
            // SAFETY: rules 1 and 2; AtomicU8 has the layout of u8 and any value is valid.
            unsafe { slice::from_raw_parts(first, self.len) }
        }
    }

    impl Drop for Cells {
        fn drop(&mut self) {
            // SAFETY: rule 1: exactly what was mapped; slices of it cannot outlive the value.
            let result = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), HEADER + self.len) };
            if let Err(error) = result {
                tracing::error!(%error, "munmap of a page table failed");
            }
        }
    }
}
