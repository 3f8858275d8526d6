//! Faults of a guest, and mapping pages in answer to them. The only user of the `userfaultfd` crate.
//!
//! What userfaultfd asks of a server, as far as it is not in the manual page:
//!
//! - While an event other than a fault waits to be read, requests fail with `EAGAIN`: read events, then go on
//!   ([`Outcome::Retry`]).
//! - A page that is mapped already (`EEXIST`) is a success, but its waiters must be woken: done here.
//! - Waking without mapping is no answer on shared memory: the thread faults again, and KVM may map more than was
//!   meant. Map with [`FaultContext::continue_range`].
//! - When the last descriptor of a context is closed, everything it watched is unregistered, and a guest would read
//!   whatever the file holds. So QEMU keeps one ([`Keep::InQemu`](crate::Keep)).
//! - On a private mapping of a file, `MISSING` alone is not enough: a page that the file has, or has in part, is mapped without an
//!   event. With `MINOR` both raise one, and `CONTINUE` maps the file's page so that a write copies it.
//! - A page mapped once may fault again, for the kernel may drop page-table entries of shared memory whenever it likes
//!   (khugepaged does, before it maps a huge page).
//!
//! Rules that every `unsafe` block here relies on:
//!
//! 1. **Descriptors.** The `Uffd` owns our descriptor and nothing else does.
//! 2. **Foreign addresses.** Addresses given to a userfaultfd are QEMU's; in this process they are numbers only.
#![allow(unsafe_code)]

mod events;
mod features;
mod protect;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use userfaultfd::{Error as UffdError, RegisterMode, Uffd};

pub use events::{EventBatch, FaultKind, UffdEvent};
pub use features::UffdFeatures;

use crate::error::{MemoryError, Result};
use crate::qemu_mapping::QemuMapping;
use crate::sys;
use crate::units::{ByteLen, Hva, PageSize};

/// Bit of `UFFDIO_CONTINUE` in the set of requests that a registered range takes.
const CAN_CONTINUE: u64 = 1 << 7;
const CAN_WRITE_PROTECT: u64 = 1 << 6;

/// How an attempt to map pages ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// All of the range is mapped now, this many bytes of it newly. Waiting threads were woken.
    Mapped(ByteLen),
    /// All of it had been mapped before. Waiting threads were woken.
    AlreadyMapped,
    /// The file has a hole at `hva + done`: give it memory ([`Mapping::populate`](crate::Mapping::populate)), then
    /// go on from there.
    Hole {
        /// Bytes that are mapped.
        done: ByteLen,
    },
    /// An event waits to be read: read events, then go on from `hva + done`.
    Retry {
        /// Bytes that are mapped.
        done: ByteLen,
    },
    /// QEMU has exited, or has no watched memory there any more.
    Gone,
}

/// A userfaultfd that watches QEMU's memory.
#[derive(Debug)]
pub struct RemoteUffd {
    /// Our descriptor.
    pub fd: OwnedFd,
    /// QEMU's descriptor of the same context, `None` if it was closed there.
    pub fd_in_qemu: Option<RawFd>,
}

/// The page faults of one QEMU. Any number of threads may use it at once.
///
/// Requests concern QEMU's address space. `read_events`, `continue_range` and `wake` neither allocate nor wait (the
/// kernel may wait for a lock on QEMU's address space for as long as QEMU itself is in `mmap` or the like).
#[derive(Debug)]
pub struct FaultContext {
    uffd: Uffd,
    fd_in_qemu: Option<RawFd>,
}

impl FaultContext {
    /// Takes a userfaultfd made with [`UffdFeatures::Faults`].
    #[must_use]
    pub fn new(remote: RemoteUffd) -> Self {
        // SAFETY: rule 1: the descriptor moves from its owner to the Uffd.
        let uffd = unsafe { Uffd::from_raw_fd(remote.fd.into_raw_fd()) };
        Self { uffd, fd_in_qemu: remote.fd_in_qemu }
    }

    /// For memory of this process. Serves no faults of the kernel, and needs no rights.
    pub(crate) fn local() -> Result<Self> {
        let uffd = features::local(UffdFeatures::Faults.bits()?)?;
        Ok(Self { uffd, fd_in_qemu: None })
    }

    /// Watches a range for minor faults only.
    pub(crate) fn register_minor(&self, hva: Hva, len: ByteLen) -> Result<()> {
        match self.uffd.register_with_mode(pointer(hva), len.as_usize(), RegisterMode::MINOR) {
            Ok(_) => Ok(()),
            Err(error) => Err(failed("REGISTER", hva, len, &error)),
        }
    }

    /// Number of the descriptor that QEMU holds; to be written down for
    /// [`reopen_uffd`](crate::reopen_uffd).
    #[must_use]
    pub const fn fd_in_qemu(&self) -> Option<RawFd> {
        self.fd_in_qemu
    }

    /// The descriptors, for example to close them with [`close_in_qemu`](crate::close_in_qemu). Ours is a copy: this stays in use.
    ///
    /// # Errors
    /// [`MemoryError::System`] if we have no descriptor to spare.
    pub fn to_remote(&self) -> Result<RemoteUffd> {
        let fd = self.as_fd().try_clone_to_owned();
        let fd = fd.map_err(|source| MemoryError::system("Duplicating a userfaultfd", source))?;
        Ok(RemoteUffd { fd, fd_in_qemu: self.fd_in_qemu })
    }

    /// Begins to watch the mappings for minor and missing faults. Pages that QEMU has page-table entries for do not
    /// fault; see [`discard_in_qemu`](crate::discard_in_qemu).
    ///
    /// # Errors
    /// [`MemoryError::RangeBusy`] if another userfaultfd watches; [`MemoryError::Uffd`]. Nothing is watched then.
    pub fn register(&self, mappings: &[QemuMapping]) -> Result<()> {
        self.register_all(mappings, RegisterMode::MINOR | RegisterMode::MISSING, CAN_CONTINUE)
    }

    /// Ends watching; waiting threads go on and see whatever the file holds. Mappings that no longer exist are fine.
    ///
    /// # Errors
    /// [`MemoryError::Uffd`].
    pub fn unregister(&self, mappings: &[QemuMapping]) -> Result<()> {
        mappings.iter().try_for_each(|m| match self.uffd.unregister(pointer(m.hva), m.len.as_usize()) {
            Ok(()) => Ok(()),
            // ESRCH, ENOMEM: the address space is going or gone. EINVAL, ENOENT: there is no mapping, or another one.
            Err(error) => match errno(&error) {
                Some(libc::ESRCH | libc::ENOMEM | libc::EINVAL | libc::ENOENT) => Ok(()),
                _ => Err(failed("UNREGISTER", m.hva, m.len, &error)),
            },
        })
    }

    /// Write-protects nothing yet, but makes [`sys::pagemap_scan`] and [`Self::protect`] able to.
    pub(crate) fn register_write_protection(&self, mappings: &[QemuMapping]) -> Result<()> {
        self.register_all(mappings, RegisterMode::WRITE_PROTECT, CAN_WRITE_PROTECT)
    }

    fn register_all(&self, mappings: &[QemuMapping], mode: RegisterMode, needed: u64) -> Result<()> {
        for (i, m) in mappings.iter().enumerate() {
            let result = match self.uffd.register_with_mode(pointer(m.hva), m.len.as_usize(), mode) {
                Ok(can) if can.bits() & needed != 0 => continue,
                Ok(_) => Err(MemoryError::Unsupported {
                    feature: "a request on this kind of memory",
                    consequence: "its pages can be neither served nor tracked",
                }),
                Err(error) if errno(&error) == Some(libc::EBUSY) => {
                    Err(MemoryError::RangeBusy { hva: m.hva, len: m.len })
                }
                Err(error) => Err(failed("REGISTER", m.hva, m.len, &error)),
            };
            // The failed one too: it may be registered in part.
            self.unregister(&mappings[..=i]).unwrap_or_else(|error| tracing::warn!(%error, "undoing"));
            return result;
        }
        Ok(())
    }

    /// Reads the pending events, without waiting and without allocating. Returns the number of events, which are then in
    /// `out`.
    ///
    /// # Errors
    /// [`MemoryError::Uffd`]; [`MemoryError::UnexpectedEvent`]: the events before it are in `out`.
    pub fn read_events(&self, out: &mut EventBatch) -> Result<usize> {
        out.events.clear();
        let read = self.uffd.read_events(&mut out.buffer);
        for event in read.map_err(|error| failed("READ", Hva(0), ByteLen(0), &error))? {
            let event = event.map_err(|error| MemoryError::UnexpectedEvent(error.to_string()))?;
            out.events.push(events::translate(&event)?);
        }
        Ok(out.events.len())
    }

    /// Maps the pages of a range, whose bytes the file has, and wakes the threads that wait for them. Pages that are
    /// mapped already are skipped. `hva` and `len` must be multiples of `page`, the mapping's page size.
    ///
    /// # Errors
    /// [`MemoryError::Uffd`] for what no [`Outcome`] describes.
    pub fn continue_range(&self, hva: Hva, len: ByteLen, page: PageSize) -> Result<Outcome> {
        self.place(hva, len, page, "CONTINUE", |at, left| {
            self.uffd.r#continue(pointer(at), left.as_usize(), true).map_err(|error| Refused::of(&error))
        })
    }

    /// Answers a fault at `hva`: maps that page, whose bytes the file has, and those that follow, up to `len` bytes or the first that is
    /// mapped already. One request to the kernel, however much is mapped; threads that wait in what was mapped are woken.
    ///
    /// # Errors
    /// As [`Self::continue_range`].
    pub fn continue_ahead(&self, hva: Hva, len: ByteLen, page: PageSize) -> Result<Outcome> {
        let done = self.uffd.r#continue(pointer(hva), len.as_usize(), true);
        self.answered(hva, len, page, "CONTINUE", done.map_err(|error| Refused::of(&error)))
    }

    /// The same with pages of zeros, whatever the file holds there. For private mappings only: in a shared one the file would get
    /// them. Not on hugetlbfs.
    ///
    /// # Errors
    /// As [`Self::continue_range`].
    pub fn zero_ahead(&self, hva: Hva, len: ByteLen, page: PageSize) -> Result<Outcome> {
        // SAFETY: rule 2; the kernel refuses pages that are mapped.
        let done = unsafe { self.uffd.zeropage(pointer(hva), len.as_usize(), true) };
        // Of what was mapped in part nothing is told: the next attempt finds the page mapped.
        let done = done.map(|bytes| bytes as u64).map_err(|error| Refused::of(&error));
        self.answered(hva, len, page, "ZEROPAGE", done)
    }

    fn answered(
        &self,
        hva: Hva,
        len: ByteLen,
        page: PageSize,
        request: &'static str,
        done: Result<u64, Refused>,
    ) -> Result<Outcome> {
        match done {
            Ok(bytes) => Ok(Outcome::Mapped(ByteLen(bytes))),
            Err(Refused(libc::EEXIST)) => {
                self.wake(hva, ByteLen(page.bytes()))?;
                Ok(Outcome::AlreadyMapped)
            }
            Err(Refused(libc::EAGAIN)) => Ok(Outcome::Retry { done: ByteLen(0) }),
            Err(Refused(libc::EFAULT)) => Ok(Outcome::Hole { done: ByteLen(0) }),
            Err(Refused(libc::ESRCH | libc::ENOENT)) => Ok(Outcome::Gone),
            Err(Refused(other)) => {
                let source = io::Error::from_raw_os_error(other);
                Err(MemoryError::Uffd { request, hva, len, source })
            }
        }
    }

    /// Makes touching the range an error for QEMU (`SIGBUS`; a machine check for a KVM guest), and wakes.
    ///
    /// # Errors
    /// [`MemoryError::Uffd`], with `EINVAL` on kernels before 6.6.
    pub fn poison(&self, hva: Hva, len: ByteLen, page: PageSize) -> Result<Outcome> {
        self.place(hva, len, page, "POISON", |at, left| {
            sys::uffd_poison(self.as_fd(), at, left)
                .map_err(|error| Refused(error.raw_os_error().unwrap_or(libc::EIO)))
        })
    }

    /// Wakes threads that wait in the range; each faults again if its page is still not mapped. For a new life of the
    /// program, whose predecessor read events and died.
    ///
    /// # Errors
    /// [`MemoryError::Uffd`].
    pub fn wake(&self, hva: Hva, len: ByteLen) -> Result<()> {
        self.uffd.wake(pointer(hva), len.as_usize()).map_err(|error| failed("WAKE", hva, len, &error))
    }

    /// The descriptor, readable when events wait.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    /// Applies `request` to what is left of the range until nothing is.
    fn place(
        &self,
        hva: Hva,
        len: ByteLen,
        page: PageSize,
        name: &'static str,
        request: impl Fn(Hva, ByteLen) -> Result<u64, Refused>,
    ) -> Result<Outcome> {
        let (mut done, mut newly) = (ByteLen(0), ByteLen(0));
        let mut skipped = false;
        let outcome = loop {
            if done >= len {
                break if newly.0 > 0 { Outcome::Mapped(newly) } else { Outcome::AlreadyMapped };
            }
            let at = hva.add(done);
            match request(at, ByteLen(len.0 - done.0)) {
                Ok(bytes) => {
                    done.0 += bytes;
                    newly.0 += bytes;
                }
                Err(Refused(libc::EEXIST)) => {
                    skipped = true;
                    done.0 += page.bytes();
                }
                Err(Refused(libc::EAGAIN)) => break Outcome::Retry { done },
                Err(Refused(libc::EFAULT)) => break Outcome::Hole { done },
                Err(Refused(libc::ESRCH | libc::ENOENT)) => return Ok(Outcome::Gone),
                Err(Refused(other)) => {
                    let source = io::Error::from_raw_os_error(other);
                    return Err(MemoryError::Uffd { request: name, hva: at, len, source });
                }
            }
        };
        // The kernel wakes for the pages it maps, not for those it found mapped.
        if skipped {
            self.wake(hva, ByteLen(done.0.min(len.0)))?;
        }
        Ok(outcome)
    }
}

/// An errno.
#[derive(Clone, Copy)]
struct Refused(i32);

impl Refused {
    fn of(error: &UffdError) -> Self {
        Self(errno(error).unwrap_or(libc::EIO))
    }
}

fn errno(error: &UffdError) -> Option<i32> {
    match error {
        UffdError::SystemError(errno) | UffdError::CopyFailed(errno) | UffdError::ZeropageFailed(errno) => {
            Some(*errno as i32)
        }
        _ => None,
    }
}

fn failed(request: &'static str, hva: Hva, len: ByteLen, error: &UffdError) -> MemoryError {
    let source =
        errno(error).map_or_else(|| io::Error::other(error.to_string()), io::Error::from_raw_os_error);
    MemoryError::Uffd { request, hva, len, source }
}

const fn pointer(hva: Hva) -> *mut c_void {
    std::ptr::without_provenance_mut(hva_as_usize(hva))
}

const fn hva_as_usize(hva: Hva) -> usize {
    ByteLen(hva.0).as_usize()
}
