//! Memory that the hypervisor has not taken back.
//!
//! On a virtual machine whose hypervisor takes free pages back (free page reporting), the first touch of a page that was
//! free for two seconds takes ten times as long as on a real machine: 0.4 instead of 5 GB/s were measured. The destination allocates
//! such memory, so each mode would show the speed of the hypervisor. A ballast holds touched memory and frees it just before the
//! move begins, so that the destination gets the memory that was freed last.
//!
//! Rule that the `unsafe` blocks below rest on: a [`Ballast`] owns a private anonymous mapping that nothing else refers to.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;

use anyhow::{Context, Result};

/// Holds touched memory until it is dropped.
#[derive(Debug)]
pub struct Ballast {
    start: NonNull<libc::c_void>,
    bytes: usize,
}

impl Ballast {
    /// Allocates and touches `bytes` of ordinary memory, in huge pages where possible.
    ///
    /// # Errors
    /// When there is too little memory.
    pub fn take(bytes: u64) -> Result<Self> {
        Self::map(bytes, 0)
    }

    /// Touches `bytes` of the pool of 2 MiB pages and returns them to the pool, where they stay.
    ///
    /// # Errors
    /// When the pool is too small.
    pub fn warm_huge_pages(bytes: u64) -> Result<()> {
        Self::map(bytes, libc::MAP_HUGETLB).map(drop)
    }

    fn map(bytes: u64, flags: libc::c_int) -> Result<Self> {
        let bytes = usize::try_from(bytes)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
                -1,
                0,
            )
        };
        let start = NonNull::new(start).filter(|start| start.as_ptr() != libc::MAP_FAILED);
        let ballast = Self { start: start.ok_or_else(io::Error::last_os_error)?, bytes };
        ballast.advise(libc::MADV_HUGEPAGE).ok();
        ballast
            .advise(libc::MADV_POPULATE_WRITE)
            .with_context(|| format!("could not take {} MiB of memory", bytes >> 20))?;
        Ok(ballast)
    }

    fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the module's rule: advice for our own mapping.
        let done = unsafe { libc::madvise(self.start.as_ptr(), self.bytes, advice) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        // SAFETY: the module's rule: nobody refers to it.
        unsafe { libc::munmap(self.start.as_ptr(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ballast_is_taken_and_refused() {
        drop(Ballast::take(8 << 20).expect("8 MiB"));
        Ballast::take(1 << 50).expect_err("a pebibyte");
    }
}
