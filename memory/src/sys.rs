//! Kernel requests that neither std nor rustix nor the userfaultfd crate has, as safe functions.
//!
//! Rules that every `unsafe` block here relies on:
//!
//! 1. **Buffers.** Each request gets pointers to live values of the exact layout the kernel expects (sizes and request
//!    numbers are checked at compile time), borrowed for the call. Addresses of *other* processes are plain numbers
//!    to the kernel and are never dereferenced here.
//! 2. **Descriptors.** A descriptor is borrowed for the call; one that the kernel returns is owned by nobody else.
#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::units::{ByteLen, Hva};

const fn iowr(group: u8, number: u8, size: usize) -> libc::c_ulong {
    (3 << 30) | ((size as libc::c_ulong) << 16) | ((group as libc::c_ulong) << 8) | number as libc::c_ulong
}

const UFFDIO_API: libc::c_ulong = iowr(0xaa, 0x3f, size_of::<UffdApi>());
const UFFDIO_POISON: libc::c_ulong = iowr(0xaa, 0x08, size_of::<UffdPoison>());
const PAGEMAP_SCAN: libc::c_ulong = iowr(b'f', 16, size_of::<ScanArg>());
/// `USERFAULTFD_IOC_NEW`, for `/dev/userfaultfd`.
pub(crate) const USERFAULTFD_IOC_NEW: u64 = 0xaa00;

const _: () = assert!(UFFDIO_API == 0xc018_aa3f);
const _: () = assert!(UFFDIO_POISON == 0xc020_aa08);
const _: () = assert!(PAGEMAP_SCAN == 0xc060_6610);

/// `struct uffdio_api`
#[repr(C)]
struct UffdApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_poison`
#[repr(C)]
struct UffdPoison {
    start: u64,
    len: u64,
    mode: u64,
    updated: i64,
}

/// `struct pm_scan_arg`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ScanArg {
    pub size: u64,
    pub flags: u64,
    pub start: u64,
    pub end: u64,
    pub walk_end: u64,
    pub vec: u64,
    pub vec_len: u64,
    pub max_pages: u64,
    pub category_inverted: u64,
    pub category_mask: u64,
    pub category_anyof_mask: u64,
    pub return_mask: u64,
}

/// `struct page_region`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageRegion {
    pub start: u64,
    pub end: u64,
    pub categories: u64,
}

/// `UFFDIO_API`: settles the features of a new userfaultfd.
pub(crate) fn uffd_api(fd: BorrowedFd<'_>, features: u64) -> io::Result<()> {
    let mut api = UffdApi { api: 0xaa, features, ioctls: 0 };
    // SAFETY: rules 1 and 2.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut api) }.into())?;
    Ok(())
}

/// `UFFDIO_POISON`. Returns how many bytes were marked.
pub(crate) fn uffd_poison(fd: BorrowedFd<'_>, hva: Hva, len: ByteLen) -> io::Result<u64> {
    let mut poison = UffdPoison { start: hva.0, len: len.0, mode: 0, updated: 0 };
    // SAFETY: rules 1 and 2.
    let result = check(unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_POISON, &raw mut poison) }.into());
    match (result, u64::try_from(poison.updated)) {
        (Err(error), Ok(0) | Err(_)) => Err(error),
        (_, updated) => Ok(updated.unwrap_or(0)),
    }
}

/// `PAGEMAP_SCAN`. Fills `regions` and returns how many; `arg.walk_end` says how far it came.
pub(crate) fn pagemap_scan(
    pagemap: BorrowedFd<'_>,
    arg: &mut ScanArg,
    regions: &mut [PageRegion],
) -> io::Result<usize> {
    arg.size = size_of::<ScanArg>() as u64;
    arg.vec = if regions.is_empty() { 0 } else { regions.as_mut_ptr() as u64 };
    arg.vec_len = regions.len() as u64;
    // SAFETY: rules 1 and 2; the kernel writes at most `vec_len` elements at `vec`.
    let found =
        check(unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, std::ptr::from_mut(arg)) }.into())?;
    Ok(usize::try_from(found).unwrap_or(0).min(regions.len()))
}

/// `process_madvise(2)` for one range of another process.
pub(crate) fn process_madvise(pidfd: BorrowedFd<'_>, hva: Hva, len: ByteLen, advice: i32) -> io::Result<u64> {
    let iov = libc::iovec { iov_base: hva.0 as *mut libc::c_void, iov_len: len.as_usize() };
    // SAFETY: rules 1 and 2; the advice concerns the other process only.
    let result = unsafe {
        libc::syscall(libc::SYS_process_madvise, pidfd.as_raw_fd(), &raw const iov, 1_usize, advice, 0_u32)
    };
    check(result).map(|n| u64::try_from(n).unwrap_or(0))
}

/// `madvise(2)` for no bytes at all: an error only if the kernel does not know the advice.
pub(crate) fn madvise_nothing(advice: i32) -> io::Result<()> {
    // SAFETY: rule 1: nothing is dereferenced, and no byte concerned.
    check(unsafe { libc::madvise(std::ptr::null_mut(), 0, advice) }.into()).map(drop)
}

fn check(result: i64) -> io::Result<i64> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
