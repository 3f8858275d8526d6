//! Memory mappings that hold one value made of atomics, private or shared with other processes.
//!
//! Rules:
//! 1. A mapping holds one `T: Shareable`, is at least as large and aligned, and lives as long as the [`Mapped`].
//! 2. A mapping that came from a peer is of a memfd that can no longer shrink (sealed), so no access faults.
//! 3. A mapping that came from a peer is read-only and wrapped so that only loads are made.
#![allow(unsafe_code)]
// Loom's atomics cannot lie in a mapping.
#![cfg_attr(loom, allow(dead_code))]

use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// A type that may live in memory that several processes map.
///
/// # Safety
/// All its fields are atomics: any bit pattern is valid, all-zero included, and concurrent writes are no race.
pub(crate) unsafe trait Shareable: Sync {}

/// One `T` in a mapping of its own.
#[derive(Debug)]
pub(crate) struct Mapped<T: Shareable> {
    at: NonNull<T>,
    owns: PhantomData<T>,
}

// SAFETY: rule 1: the mapping is owned, and `T: Sync` is only handed out by shared reference.
unsafe impl<T: Shareable> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Shareable> Sync for Mapped<T> {}

/// Seals that keep a peer from pulling the memory away.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

impl<T: Shareable> Mapped<T> {
    /// A zeroed `T` that only this process sees.
    pub(crate) fn private() -> io::Result<Self> {
        Self::map(libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    /// A zeroed `T` and a descriptor with which others can [`open`](Self::open) it.
    pub(crate) fn shared(name: &std::ffi::CStr) -> io::Result<(Self, OwnedFd)> {
        // SAFETY: the name is a terminated string.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let len = i64::try_from(size_of::<T>()).map_err(io::Error::other)?;
        // SAFETY: plain call on a descriptor of ours.
        check(unsafe { libc::ftruncate(fd.as_raw_fd(), len) })?;
        // SAFETY: plain call on a descriptor of ours.
        check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS) })?;
        let mapped = Self::map(libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd.as_raw_fd())?;
        Ok((mapped, fd))
    }

    /// Maps a peer's `T` for reading.
    ///
    /// # Errors
    /// The descriptor is not a sealed memfd of the right size.
    pub(crate) fn open(fd: BorrowedFd<'_>) -> io::Result<Self> {
        // SAFETY: plain call on a descriptor that is open.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the descriptor is not a sealed memfd"));
        }
        // SAFETY: all-zero is a valid `stat`.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is a local that outlives the call.
        check(unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) })?;
        if usize::try_from(stat.st_size) != Ok(size_of::<T>()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the shared table has {} bytes; expected {}", stat.st_size, size_of::<T>()),
            ));
        }
        Self::map(libc::PROT_READ, libc::MAP_SHARED, fd.as_raw_fd())
    }

    fn map(prot: libc::c_int, flags: libc::c_int, fd: libc::c_int) -> io::Result<Self> {
        const { assert!(align_of::<T>() <= 4096, "a mapping is aligned to a page") };
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), size_of::<T>(), prot, flags, fd, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = NonNull::new(at.cast::<T>()).ok_or_else(|| io::Error::other("mmap gave address 0"))?;
        Ok(Self { at, owns: PhantomData })
    }
}

impl<T: Shareable> Deref for Mapped<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: rules 1 to 3; any content is a valid `T` by `Shareable`.
        unsafe { self.at.as_ref() }
    }
}

impl<T: Shareable> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: rule 1: the mapping is ours and, being dropped, has no references left.
        unsafe { libc::munmap(self.at.as_ptr().cast(), size_of::<T>()) };
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
