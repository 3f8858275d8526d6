//! A userfaultfd made inside QEMU and fetched from there.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::Injector;
use crate::error::{MemoryError, Result};
use crate::process::Process;
use crate::sys::{USERFAULTFD_IOC_NEW, uffd_api};
use crate::uffd::{RemoteUffd, UffdFeatures};

/// Whether QEMU keeps its own descriptor of a userfaultfd made in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Kept: the context outlives us. If we die, a guest that faults freezes until [`reopen_uffd`], rather than read
    /// what happens to be in the file. For page service.
    InQemu,
    /// Closed again: the context ends with us, and what it watched is unregistered. For dirty tracking, where the
    /// guest must go on, and another tracker be possible, when we die.
    OursOnly,
}

/// Creates a userfaultfd for the process's memory, inside the process, and fetches it. It watches nothing yet.
///
/// # Errors
/// [`MemoryError::Unsupported`]; [`MemoryError::Remote`] with `EPERM` if the process lacks the right to serve faults
/// of the kernel (it is not root, and `vm.unprivileged_userfaultfd` is 0): use [`create_uffd_from_device`]; those of
/// [`Injector::attach`].
pub fn create_uffd(process: &Process, features: UffdFeatures, keep: Keep) -> Result<RemoteUffd> {
    create(process, features, keep, |injector, flags| {
        injector.syscall(libc::SYS_userfaultfd, [flags, 0, 0, 0, 0, 0])
    })
}

/// As [`create_uffd`], from a descriptor of `/dev/userfaultfd` that the process was given (QMP `add-fd`): for a QEMU
/// that runs without privileges.
///
/// # Errors
/// As [`create_uffd`].
pub fn create_uffd_from_device(
    process: &Process,
    device_in_qemu: RawFd,
    features: UffdFeatures,
    keep: Keep,
) -> Result<RemoteUffd> {
    create(process, features, keep, |injector, flags| {
        let fd = u64::try_from(device_in_qemu).unwrap_or(u64::MAX);
        injector.syscall(libc::SYS_ioctl, [fd, USERFAULTFD_IOC_NEW, flags, 0, 0, 0])
    })
}

fn create(
    process: &Process,
    features: UffdFeatures,
    keep: Keep,
    make: impl FnOnce(&mut Injector, u64) -> Result<u64>,
) -> Result<RemoteUffd> {
    let bits = features.bits()?;
    let mut injector = Injector::attach(process)?;
    let flags = u64::try_from(libc::O_CLOEXEC | libc::O_NONBLOCK).unwrap_or(0);
    let raw = make(&mut injector, flags)?;
    let fd_in_qemu = RawFd::try_from(raw).unwrap_or(-1);
    let fetched = fetch(process, fd_in_qemu).and_then(|fd| {
        uffd_api(fd.as_fd(), bits).map_err(|source| MemoryError::system("UFFDIO_API", source))?;
        Ok(fd)
    });
    if keep == Keep::OursOnly || fetched.is_err() {
        injector.syscall(libc::SYS_close, [raw, 0, 0, 0, 0, 0])?;
    }
    injector.release()?;
    Ok(RemoteUffd { fd: fetched?, fd_in_qemu: (keep == Keep::InQemu).then_some(fd_in_qemu) })
}

/// After a restart of the program, fetches again the descriptor that [`create_uffd`] left open in the process. Stops no thread.
///
/// # Errors
/// [`MemoryError::NotUserfaultfd`] if the number stands for something else; [`MemoryError::ProcessGone`].
pub fn reopen_uffd(process: &Process, fd_in_qemu: RawFd) -> Result<RemoteUffd> {
    Ok(RemoteUffd { fd: fetch(process, fd_in_qemu)?, fd_in_qemu: Some(fd_in_qemu) })
}

/// Closes QEMU's descriptor and ours, which unregisters everything the context watched. Waiting threads go on and see
/// whatever the file holds.
///
/// # Errors
/// Those of [`Injector::attach`]; [`MemoryError::Remote`].
pub fn close_in_qemu(process: &Process, uffd: RemoteUffd) -> Result<()> {
    if let Some(fd) = uffd.fd_in_qemu {
        // Another life of ours may have closed it: the number could stand for a file of QEMU's by now.
        drop(fetch(process, fd)?);
        let fd = u64::try_from(fd).unwrap_or(u64::MAX);
        let mut injector = Injector::attach(process)?;
        injector.syscall(libc::SYS_close, [fd, 0, 0, 0, 0, 0])?;
        injector.release()?;
    }
    drop(uffd.fd);
    Ok(())
}

/// `pidfd_getfd`, with a check of what it is.
fn fetch(process: &Process, fd_in_qemu: RawFd) -> Result<OwnedFd> {
    let not_uffd = |found: String| MemoryError::NotUserfaultfd { pid: process.pid(), fd: fd_in_qemu, found };
    let fd = match pidfd_getfd(process.pidfd(), fd_in_qemu, PidfdGetfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH) => return Err(MemoryError::ProcessGone { pid: process.pid() }),
        Err(rustix::io::Errno::BADF) => return Err(not_uffd("not open".to_owned())),
        Err(source) => return Err(MemoryError::system("pidfd_getfd", source)),
    };
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let name = fs::read_link(&link).map_err(|source| MemoryError::Proc { path: link.into(), source })?;
    if name.as_os_str() == "anon_inode:[userfaultfd]" {
        Ok(fd)
    } else {
        Err(not_uffd(name.display().to_string()))
    }
}
