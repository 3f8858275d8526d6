//! Write protection whose writers wait until it is lifted.
//!
//! - A page of a file that has no page-table entry is protected too, holes of the file included: the kernel leaves a mark in the
//!   place of the entry. A 2 MiB mapping is taken apart first.
//! - A thread that has met the protection may begin to wait after it was lifted, since the kernel looks only at whether the entry
//!   can be written, and a clean page's cannot: whoever lifts must wake those who come late ([`FaultContext::wake`]).
//! - Unregistering lifts it and wakes nobody, unlike with missing pages; closing the descriptor does both.

use super::{FaultContext, Outcome, errno, failed, pointer};
use crate::error::Result;
use crate::units::{ByteLen, Hva};

impl FaultContext {
    /// Write-protects a range that was registered for it: writers wait, in the kernel too, until [`Self::lift`]. About 2 ms per
    /// GiB where huge pages are mapped, 10 ms where 4 KiB pages are. Whoever has pinned a page before writes unseen.
    ///
    /// # Errors
    /// [`MemoryError::Uffd`](crate::MemoryError::Uffd).
    pub fn protect(&self, hva: Hva, len: ByteLen) -> Result<()> {
        let done = self.uffd.write_protect(pointer(hva), len.as_usize());
        done.map_err(|error| failed("WRITEPROTECT", hva, len, &error))
    }

    /// Lets writers in the range go on: [`Outcome::Mapped`], or [`Outcome::Retry`] while an event waits to be read, or
    /// [`Outcome::Gone`].
    ///
    /// # Errors
    /// [`MemoryError::Uffd`](crate::MemoryError::Uffd).
    pub fn lift(&self, hva: Hva, len: ByteLen) -> Result<Outcome> {
        match self.uffd.remove_write_protection(pointer(hva), len.as_usize(), true) {
            Ok(()) => Ok(Outcome::Mapped(len)),
            Err(error) => match errno(&error) {
                Some(libc::EAGAIN) => Ok(Outcome::Retry { done: ByteLen(0) }),
                Some(libc::ESRCH | libc::ENOENT) => Ok(Outcome::Gone),
                _ => Err(failed("WRITEPROTECT", hva, len, &error)),
            },
        }
    }
}
