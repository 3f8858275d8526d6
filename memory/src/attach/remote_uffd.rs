//! A userfaultfd made inside QEMU and fetched from there.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::Injector;
use super::lend::lend;
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

/// Where a descriptor can be had that makes userfaultfds without privileges (Linux 6.1).
const DEVICE: &str = "/dev/userfaultfd";
/// What a descriptor of one is called in `/proc`.
const UFFD_LINK: &str = "anon_inode:[userfaultfd]";

/// Creates a userfaultfd for the process's memory, inside the process, and fetches it. It watches nothing yet.
///
/// A process that lacks the right to serve faults of the kernel (it is not root, and `vm.unprivileged_userfaultfd` is 0) makes it by
/// `/dev/userfaultfd`, which is lent to it for this one call.
///
/// # Errors
/// [`MemoryError::Unsupported`], also for such a process on a kernel without that device; [`MemoryError::Remote`]; those of
/// [`Injector::attach`].
pub fn create_uffd(process: &Process, features: UffdFeatures, keep: Keep) -> Result<RemoteUffd> {
    let bits = features.bits()?;
    let mut injector = Injector::attach(process)?;
    let made = make(&mut injector, process);
    let raw = match made {
        Ok(raw) => raw,
        Err(error) => {
            injector.release()?;
            return Err(error);
        }
    };
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

/// By the process itself, or else by the device. Gives the number of the descriptor there.
fn make(injector: &mut Injector, process: &Process) -> Result<u64> {
    let flags = u64::try_from(libc::O_CLOEXEC | libc::O_NONBLOCK).unwrap_or(0);
    match injector.syscall(libc::SYS_userfaultfd, [flags, 0, 0, 0, 0, 0]) {
        Err(MemoryError::Remote { source, .. }) if source.raw_os_error() == Some(libc::EPERM) => {}
        made => return made,
    }
    let device = match File::options().read(true).write(true).open(DEVICE) {
        Ok(device) => device,
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(MemoryError::Unsupported {
                feature: "/dev/userfaultfd (Linux 6.1)",
                consequence: "a QEMU without privileges cannot have its memory watched; run it as root (user in [qemu]), or set \
                              vm.unprivileged_userfaultfd to 1",
            });
        }
        Err(source) => return Err(MemoryError::path("Opening the device", DEVICE, source)),
    };
    lend(injector, process, device.as_fd(), |injector, device| {
        let device = u64::try_from(device).unwrap_or(u64::MAX);
        injector.syscall(libc::SYS_ioctl, [device, USERFAULTFD_IOC_NEW, flags, 0, 0, 0])
    })
}

/// After a restart of the program, fetches again the descriptor that [`create_uffd`] left open in the process. Stops no thread.
///
/// # Errors
/// [`MemoryError::NotUserfaultfd`] if the number stands for something else; [`MemoryError::ProcessGone`].
pub fn reopen_uffd(process: &Process, fd_in_qemu: RawFd) -> Result<RemoteUffd> {
    Ok(RemoteUffd { fd: fetch(process, fd_in_qemu)?, fd_in_qemu: Some(fd_in_qemu) })
}

/// Numbers of all userfaultfds that the process has open.
///
/// # Errors
/// [`MemoryError::Proc`]; [`MemoryError::ProcessGone`].
pub fn uffds_in(process: &Process) -> Result<Vec<RawFd>> {
    let folder = format!("/proc/{}/fd", process.pid());
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(MemoryError::ProcessGone { pid: process.pid() });
        }
        Err(source) => return Err(MemoryError::Proc { path: folder.into(), source }),
    };
    let is_uffd =
        |path: &std::path::Path| fs::read_link(path).is_ok_and(|link| link.as_os_str() == UFFD_LINK);
    let found = entries.flatten().filter(|entry| is_uffd(&entry.path()));
    Ok(found.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
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
    if name.as_os_str() == UFFD_LINK { Ok(fd) } else { Err(not_uffd(name.display().to_string())) }
}
