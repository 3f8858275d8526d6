//! Our own shared mapping of a RAM file.
//!
//! There is no `&[u8]` to guest memory anywhere: the guest, its QEMU and the network write to it while we look.
//!
//! Rules that every `unsafe` block here relies on:
//!
//! 1. **Extent.** `base..base + len` is one `MAP_SHARED`, readable and writable mapping made by [`Mapping::new`],
//!    and it stays mapped until the value is dropped. Every access is checked against `len` first.
//! 2. **No references.** Memory is touched through raw pointers only, never through a Rust reference, so other
//!    writers break no promise of ours. What is read may be torn between old and new bytes; callers that need a
//!    whole page order their reads (scan first, then read) or read while the guest is stopped.
//! 3. **Truncation.** Somebody may shorten a RAM file while it is mapped. Then zeros take the place of what is touched
//!    ([`vmove_guard`]), and every access asks afterwards whether that has happened.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use xxhash_rust::xxh3::xxh3_64;

use vmove_guard::Guard;

use super::file::{RamFile, check_range};
use crate::error::{MemoryError, Result};
use crate::units::{ByteLen, ByteRange, FileOffset, PageIndex, PageRun, PageSize};

/// Largest piece that is hashed or zeroed at once; also the smallest page size.
const PIECE: usize = 4096;

/// A whole RAM file, mapped shared into this process.
///
/// **Reading a hole through it allocates memory in the file.** Ask [`RamFile::data_extents`] first where that
/// matters.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: ByteLen,
    page_size: PageSize,
    /// For messages.
    path: PathBuf,
    /// Until the mapping is unmapped.
    guard: Option<Guard>,
}

// SAFETY: rule 2: the value is an address range; all access goes through raw pointers and is safe from any thread.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn new(file: &RamFile) -> Result<Self> {
        let mapping = Self::untouched(file)?;
        if mapping.page_size == PageSize::Base4K {
            // Without it a tmpfs mounted huge=advise gives 4 KiB pages to what we write. A refusal costs speed only.
            if let Err(source) = mapping.advise(file.range(), Advice::LinuxHugepage) {
                tracing::warn!(path = %file.path().display(), %source, "RAM file will have 4 KiB pages");
            }
        }
        Ok(mapping)
    }

    /// A mapping that reserves nothing, for one that is only looked at.
    pub(super) fn untouched(file: &RamFile) -> Result<Self> {
        let len = file.len();
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // Huge pages are reserved by QEMU's mapping.
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: rule 1: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe { mmap(ptr::null_mut(), len.as_usize(), prot, flags, file.fd(), 0) }
            .map_err(|source| MemoryError::path("Mapping the RAM file", file.path(), source))?;
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| {
            MemoryError::path(
                "Mapping the RAM file",
                file.path(),
                std::io::Error::other("mapped at address 0"),
            )
        })?;
        let (page_size, path) = (file.page_size(), file.path().to_owned());
        let mut mapping = Self { base, len, page_size, path, guard: None };
        let page_bytes = ByteLen(page_size.bytes()).as_usize();
        // SAFETY: rules 1 and 2: the whole mapping; the guard is dropped before it is unmapped.
        let guard = unsafe { Guard::new(base.as_ptr(), len.as_usize(), page_bytes) };
        mapping.guard = Some(guard.map_err(|source| MemoryError::path("Guarding", file.path(), source))?);
        Ok(mapping)
    }

    /// First address, in this process. Valid for [`Self::len`] bytes as long as the mapping lives. Other processes
    /// write to this memory: do not make a reference from it.
    #[must_use]
    pub const fn ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> ByteLen {
        self.len
    }

    /// True if it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len.0 == 0
    }

    /// Granularity of [`PageIndex`] here.
    #[must_use]
    pub const fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// Copies guest bytes to `out`. May allocate in the file (see the type).
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn copy_out(&self, from: FileOffset, out: &mut [u8]) -> Result<()> {
        let source = self.at(from, out.len())?;
        // SAFETY: rules 1 and 2; `out` is ours alone and cannot overlap a mapping it does not come from.
        unsafe { ptr::copy_nonoverlapping(source, out.as_mut_ptr(), out.len()) };
        self.check_whole()
    }

    /// Copies `bytes` into guest memory. The range should have been populated, since running out of memory inside
    /// a store is a signal, not an error.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn copy_in(&self, to: FileOffset, bytes: &[u8]) -> Result<()> {
        let target = self.at(to, bytes.len())?;
        // SAFETY: rules 1 and 2; `bytes` cannot overlap a mapping that no reference points into.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
        self.check_whole()
    }

    /// Copies a range of another file's mapping to the same place here, which should have been populated.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn copy_from(&self, source: &Self, range: ByteRange) -> Result<()> {
        let len = range.len.as_usize();
        let (from, to) = (source.at(range.start, len)?, self.at(range.start, len)?);
        // SAFETY: rules 1 and 2; two mappings do not overlap, and one does not overlap itself at the same place without being equal,
        // which `ptr::copy` allows.
        unsafe { ptr::copy(from, to, len) };
        source.check_whole()?;
        self.check_whole()
    }

    /// True if every byte of the page is zero. Stops at the first that is not. May allocate (see the type).
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn is_zero(&self, page: PageIndex) -> Result<bool> {
        self.is_zero_range(self.page_size.range_of(PageRun::new(page, 1)))
    }

    /// True if every byte of the range, which must begin and end at a multiple of 64, is zero.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`], also for a range that is not aligned.
    pub fn is_zero_range(&self, range: ByteRange) -> Result<bool> {
        if !range.start.0.is_multiple_of(64) || !range.len.0.is_multiple_of(64) {
            return Err(self.out_of_range(range));
        }
        let first = self.at(range.start, range.len.as_usize())?.cast::<u64>();
        for line in (0..range.len.as_usize() / 8).step_by(8) {
            // Eight words at once: one branch per cache line.
            let mut any = 0;
            for word in line..line + 8 {
                // SAFETY: rule 1: inside the range just checked, and aligned since the mapping is page-aligned.
                let word = unsafe { first.add(word) };
                // SAFETY: rule 2; the memory is valid and aligned for an atomic of this size.
                any |= unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Relaxed);
            }
            if any != 0 {
                return Ok(false);
            }
        }
        self.check_whole()?;
        Ok(true)
    }

    /// XXH3 of one page's bytes. Pages larger than 4 KiB are hashed as the hash of the hashes of their 4 KiB parts.
    /// May allocate (see the type).
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn hash(&self, page: PageIndex) -> Result<u64> {
        let range = self.page_size.range_of(PageRun::new(page, 1));
        let mut piece = [0; PIECE];
        let mut chain = 0;
        for at in range.as_range().step_by(PIECE) {
            self.copy_out(FileOffset(at), &mut piece)?;
            let hash = xxh3_64(&piece);
            if range.len.0 == PIECE as u64 {
                return Ok(hash);
            }
            let mut pair = [0; 16];
            pair[..8].copy_from_slice(&u64::to_le_bytes(chain));
            pair[8..].copy_from_slice(&hash.to_le_bytes());
            chain = xxh3_64(&pair);
        }
        Ok(chain)
    }

    /// Writes zeros over the pages. Allocates; [`RamFile::punch`] frees instead.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn zero(&self, run: PageRun) -> Result<()> {
        let range = self.page_size.range_of(run);
        let target = self.at(range.start, range.len.as_usize())?;
        // SAFETY: rules 1 and 2.
        unsafe { ptr::write_bytes(target, 0, range.len.as_usize()) };
        self.check_whole()
    }

    /// Gives every page of the run memory and maps it here (`MADV_POPULATE_WRITE`); bytes are kept, holes read as
    /// zero. Afterwards writing there raises no fault, and `UFFDIO_CONTINUE` finds the page.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`]; [`MemoryError::System`] with `ENOMEM` or `EFAULT`/`EHWPOISON` when memory or huge
    /// pages have run out.
    pub fn populate(&self, run: PageRun) -> Result<()> {
        self.advise(self.page_size.range_of(run), Advice::LinuxPopulateWrite)
            .map_err(|source| MemoryError::system("MADV_POPULATE_WRITE on guest RAM", source))?;
        // Where zeros are, the file has got nothing.
        self.check_whole()
    }

    /// Maps here what the file has in the range (`MADV_POPULATE_READ`), so that reading it raises no fault. Gives memory
    /// to holes.
    ///
    /// # Errors
    /// As [`Self::populate`]; [`MemoryError::Broken`] for `EFAULT`, with which the kernel says that the file has no such page.
    pub fn populate_read(&self, range: ByteRange) -> Result<()> {
        self.advise(range, Advice::LinuxPopulateRead).map_err(|source| match source.raw_os_error() {
            Some(libc::EFAULT) => MemoryError::Broken { path: self.path.clone() },
            _ => MemoryError::system("MADV_POPULATE_READ on guest RAM", source),
        })
    }

    /// Drops our own page-table entries for the range; the file keeps its bytes.
    ///
    /// # Errors
    /// [`MemoryError::System`].
    pub fn forget(&self, range: ByteRange) -> Result<()> {
        self.advise(range, Advice::LinuxDontNeed)
            .map_err(|source| MemoryError::system("MADV_DONTNEED on guest RAM", source))
    }

    fn advise(&self, range: ByteRange, advice: Advice) -> Result<(), std::io::Error> {
        let start = self.at(range.start, range.len.as_usize()).map_err(std::io::Error::other)?;
        // SAFETY: rules 1 and 3: the range is ours, and none of the advices used drops bytes of a shared mapping.
        unsafe { madvise(start.cast::<c_void>(), range.len.as_usize(), advice) }?;
        Ok(())
    }

    /// Checks that no page was missing when it was touched, here or by whoever has the address. To be asked after each access: zeros
    /// may have taken the place of what was read.
    ///
    /// # Errors
    /// [`MemoryError::Broken`].
    pub fn check_whole(&self) -> Result<()> {
        if self.guard.as_ref().is_some_and(Guard::is_broken) {
            return Err(MemoryError::Broken { path: self.path.clone() });
        }
        Ok(())
    }

    fn at(&self, offset: FileOffset, len: usize) -> Result<*mut u8> {
        let range = ByteRange::new(offset, ByteLen(len as u64));
        check_range(range, self.len)?;
        let offset = ByteLen(offset.0).as_usize();
        // SAFETY: rule 1: at most one past the end of the mapping.
        Ok(unsafe { self.base.as_ptr().add(offset) })
    }

    const fn out_of_range(&self, range: ByteRange) -> MemoryError {
        MemoryError::OutOfRange { offset: range.start, len: range.len, file_len: self.len }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: rule 1: exactly what `new` mapped, and nothing can use it any more.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), self.len.as_usize()) } {
            tracing::error!(%error, "munmap of guest RAM failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dir: &tempfile::TempDir, len: u64) -> RamFile {
        let path = dir.path().join("ram");
        std::fs::File::create(&path).and_then(|f| f.set_len(len)).expect("create");
        RamFile::open(&path).expect("open")
    }

    #[test]
    fn bytes_go_in_and_out_and_ranges_are_checked() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let file = file(&dir, 8 * 4096);
        let map = file.map().expect("map");
        assert!(map.is_zero(PageIndex(3)).expect("in range"));
        map.copy_in(FileOffset(3 * 4096 + 4088), &[0, 0, 0, 0, 0, 0, 0, 1]).expect("in range");
        assert!(!map.is_zero(PageIndex(3)).expect("in range"));
        assert!(map.is_zero(PageIndex(4)).expect("in range"));
        let mut out = [9; 8];
        map.copy_out(FileOffset(3 * 4096 + 4088), &mut out).expect("in range");
        assert_eq!(out, [0, 0, 0, 0, 0, 0, 0, 1]);
        assert!(matches!(
            map.copy_in(FileOffset(8 * 4096 - 1), &[0; 2]),
            Err(MemoryError::OutOfRange { .. })
        ));
        assert!(matches!(map.is_zero(PageIndex(8)), Err(MemoryError::OutOfRange { .. })));
        assert!(matches!(map.is_zero(PageIndex(u64::MAX >> 12)), Err(MemoryError::OutOfRange { .. })));
        map.zero(PageRun::new(PageIndex(3), 1)).expect("in range");
        assert!(map.is_zero(PageIndex(3)).expect("in range"));
    }

    #[test]
    fn holes_and_extents_follow_writes_and_punches() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let file = file(&dir, 8 << 20);
        let map = file.map().expect("map");
        assert!(file.data_extents().expect("extents").is_empty());
        assert!(file.is_hole(file.range()).expect("hole"));
        map.populate(PageRun::new(PageIndex(512), 512)).expect("populate");
        let expected = ByteRange::new(FileOffset(2 << 20), ByteLen::mib(2));
        assert_eq!(file.data_extents().expect("extents"), [expected]);
        assert_eq!(file.allocated_bytes().expect("stat"), ByteLen::mib(2));
        file.punch(expected).expect("punch");
        assert!(file.data_extents().expect("extents").is_empty());
    }

    #[test]
    fn a_file_that_is_shortened_is_told_and_nobody_dies() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let file = file(&dir, 8 * 4096);
        let map = file.map().expect("map");
        map.copy_in(FileOffset(6 * 4096), &[7; 4096]).expect("in range");
        let other = std::fs::OpenOptions::new().write(true).open(file.path()).expect("open");
        other.set_len(4 * 4096).expect("shorten");
        let named = |error: MemoryError| {
            let text = error.to_string();
            assert!(text.contains(&*file.path().to_string_lossy()), "{text}");
            error
        };
        assert!(matches!(named(file.data_extents().unwrap_err()), MemoryError::Shortened { .. }));
        assert!(matches!(named(file.is_hole(file.range()).unwrap_err()), MemoryError::Shortened { .. }));
        map.check_whole().expect("nobody has touched it");
        // Zeros, but not the guest's.
        assert!(matches!(named(map.is_zero(PageIndex(6)).unwrap_err()), MemoryError::Broken { .. }));
        for result in [
            map.copy_out(FileOffset(6 * 4096), &mut [0; 8]),
            map.copy_in(FileOffset(7 * 4096), &[1]),
            map.hash(PageIndex(5)).map(drop),
            map.zero(PageRun::new(PageIndex(5), 1)),
            map.check_whole(),
        ] {
            assert!(matches!(result, Err(MemoryError::Broken { .. })), "{result:?}");
        }
    }

    #[test]
    fn equal_pages_have_equal_hashes() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let file = file(&dir, 4 * 4096);
        let map = file.map().expect("map");
        map.copy_in(FileOffset(4096), b"guest").expect("in range");
        map.copy_in(FileOffset(8192), b"guest").expect("in range");
        let hash = |page| map.hash(PageIndex(page)).expect("in range");
        assert_eq!(hash(1), hash(2));
        assert_ne!(hash(0), hash(1));
        assert_eq!(
            hash(1),
            xxh3_64(&{
                let mut page = [0; 4096];
                page[..5].copy_from_slice(b"guest");
                page
            })
        );
    }

    #[test]
    fn a_file_on_a_disk_is_refused_by_name() {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).expect("temp file");
        let error = RamFile::open(file.path()).expect_err("not tmpfs");
        assert!(error.to_string().contains("tmpfs"), "{error}");
    }
}
