//! The guest's pages and its beacon, as mapped memory.
//!
//! The working set must not be touched through references: a migration changes the bytes under the program's feet
//! (that it does so invisibly is what the program checks), so every access is a volatile one that the compiler may
//! neither leave out nor repeat.
//!
//! Rules that the `unsafe` blocks below rest on:
//! 1. A [`Region`] owns a private anonymous mapping that lives as long as the program: it is never unmapped.
//! 2. A [`Page`] is made only from a page number that was checked against the region's length, and word numbers are
//!    masked to the page.
//! 3. Each page is used by one thread at a time: threads get disjoint ranges of page numbers from `main`.
#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::AtomicU64;

use vmove_guest::pattern::{PAGE_BYTES, WORDS, Words};

/// Pages of anonymous memory, zeroed, until the program ends.
#[derive(Debug, Clone, Copy)]
pub struct Region {
    start: *mut u64,
    pages: u32,
}

// SAFETY: rules 1 and 3: the memory stays, and no two threads use the same page.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `pages` pages, with the kernel's huge pages when `huge`: emulated page walks are shorter with them, and
    /// filling takes one fault for 2 MiB.
    pub fn map(pages: u32, huge: bool) -> io::Result<Self> {
        // A huge page needs an aligned start; 2 MiB more than asked for always hold one.
        const HUGE: usize = 2 << 20;
        let bytes = pages as usize * PAGE_BYTES;
        // SAFETY: a new private mapping at an address that the kernel chooses.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes + HUGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = start.map_addr(|a| a.next_multiple_of(HUGE));
        // SAFETY: rule 1: advice for a part of our own mapping. Its failure costs time only.
        unsafe {
            libc::madvise(start, bytes, if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE })
        };
        Ok(Self { start: start.cast(), pages })
    }

    /// Page `index`.
    ///
    /// # Panics
    /// Beyond the last page.
    #[inline]
    pub fn page(&self, index: u32) -> Page {
        assert!(index < self.pages, "page {index} of {}", self.pages);
        // SAFETY: rule 2: within the mapping.
        Page(unsafe { self.start.add(index as usize * WORDS) })
    }

    /// The first page as words that may be read by anyone at any time.
    pub fn as_atomics(&self) -> &'static [AtomicU64; WORDS] {
        assert!(self.pages > 0, "an empty region has no page");
        let page = self.start.cast::<[AtomicU64; WORDS]>();
        // SAFETY: rule 1: lives as long as the program; atomics may be shared.
        unsafe { &*page }
    }
}

/// One page of a [`Region`].
#[derive(Debug)]
pub struct Page(*mut u64);

impl Words for Page {
    #[inline]
    fn get(&self, index: usize) -> u64 {
        // SAFETY: rule 2.
        let word = unsafe { self.0.add(index & (WORDS - 1)) };
        // SAFETY: rules 1 and 3.
        unsafe { word.read_volatile() }
    }

    #[inline]
    fn set(&mut self, index: usize, value: u64) {
        // SAFETY: rule 2.
        let word = unsafe { self.0.add(index & (WORDS - 1)) };
        // SAFETY: rules 1 and 3.
        unsafe { word.write_volatile(value) }
    }
}
