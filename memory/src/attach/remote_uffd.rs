//! A userfaultfd made inside QEMU and fetched from there.

use std::os::fd::{OwnedFd, RawFd};

use crate::error::Result;
use crate::process::Process;
use crate::ram::QemuMapping;
use crate::uffd::{FaultContext, UffdFeatures};

/// Whether QEMU keeps its own descriptor of a userfaultfd made in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Kept: the context outlives us. If we die, a faulting guest freezes until [`reopen_uffd`].
    InQemu,
    /// Closed again: the context ends with us, and what it watched is unregistered. For dirty tracking, where a
    /// guest must go on when we die.
    OursOnly,
}

/// A userfaultfd that watches QEMU's memory.
#[derive(Debug)]
pub struct RemoteUffd {
    /// Our descriptor.
    pub fd: OwnedFd,
    /// QEMU's descriptor of the same context, `None` if it was closed there.
    pub fd_in_qemu: Option<RawFd>,
}

/// Creates a userfaultfd in the process and fetches it.
///
/// # Errors
/// Not yet written.
pub fn create_uffd(_process: &Process, _features: UffdFeatures, _keep: Keep) -> Result<RemoteUffd> {
    todo!()
}

/// Fetches again, in a new life of the program, what [`create_uffd`] left open in the process.
///
/// # Errors
/// Not yet written.
pub fn reopen_uffd(_process: &Process, _fd_in_qemu: RawFd) -> Result<RemoteUffd> {
    todo!()
}

/// Closes QEMU's descriptor and ours, which unregisters everything the context watched.
///
/// # Errors
/// Not yet written.
pub fn close_in_qemu(_process: &Process, _uffd: RemoteUffd) -> Result<()> {
    todo!()
}

/// Drops every page-table entry QEMU has for the mappings, so that each page faults on its next touch. The files
/// keep their bytes. With `context`, its events are drained meanwhile and all waiting threads are woken at the end.
///
/// # Errors
/// Not yet written.
pub fn discard_in_qemu(
    _process: &Process,
    _mappings: &[QemuMapping],
    _context: Option<&FaultContext>,
) -> Result<()> {
    todo!()
}
