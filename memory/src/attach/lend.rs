//! A descriptor of ours, given to another process for some injected calls.
//!
//! A QEMU without privileges may not call `userfaultfd(2)` for faults of the kernel, but whoever holds a descriptor of
//! `/dev/userfaultfd` may. So it is sent to the process over a socket pair made inside it, used, and closed again: the process never holds
//! it while code of its own runs. QMP's `add-fd` would do too, but a QEMU 7.2 closes what it got so only once its guest runs.
//!
//! If we die in between, the process keeps a page and two or three descriptors that it does not know of.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::Injector;
use crate::error::{MemoryError, Result};
use crate::process::Process;

/// Bytes of memory for the calls' arguments, made and removed again.
const SCRATCH: u64 = 4096;
/// Where in it things are: the two descriptors of the pair, `struct msghdr`, `struct iovec`, the byte received, the control message.
const PAIR: u64 = 0;
const MSGHDR: u64 = 64;
const IOVEC: u64 = 128;
const BYTE: u64 = 192;
const CONTROL: u64 = 256;
/// Of a control message with one descriptor (`CMSG_SPACE(4)`): length, level, type, descriptor, padding.
const CONTROL_LEN: u64 = 24;
/// `struct msghdr`: name, name length, iovec, its count, control, its length, flags; 8 bytes each with padding.
const MSGHDR_LEN: usize = 56;

/// Has the process hold `fd` while `work` runs, which is given its number there.
pub(super) fn lend<T>(
    injector: &mut Injector,
    process: &Process,
    fd: BorrowedFd<'_>,
    work: impl FnOnce(&mut Injector, RawFd) -> Result<T>,
) -> Result<T> {
    let protection = number(libc::PROT_READ | libc::PROT_WRITE);
    let flags = number(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let at = injector.syscall(libc::SYS_mmap, [0, SCRATCH, protection, flags, u64::MAX, 0])?;
    let done = over_pair(injector, process, at, fd, work);
    let unmapped = injector.syscall(libc::SYS_munmap, [at, SCRATCH, 0, 0, 0, 0]);
    let done = done?;
    unmapped?;
    Ok(done)
}

/// Makes the socket pair and closes it again.
fn over_pair<T>(
    injector: &mut Injector,
    process: &Process,
    at: u64,
    fd: BorrowedFd<'_>,
    work: impl FnOnce(&mut Injector, RawFd) -> Result<T>,
) -> Result<T> {
    let kind = number(libc::SOCK_STREAM | libc::SOCK_CLOEXEC);
    injector.syscall(libc::SYS_socketpair, [number(libc::AF_UNIX), kind, 0, at + PAIR, 0, 0])?;
    let memory = Scratch::open(process, at)?;
    let (ours, theirs) = (memory.read_fd(PAIR)?, memory.read_fd(PAIR + 4)?);
    let done = send(process, ours, fd).and_then(|()| receive(injector, &memory, theirs)).and_then(|held| {
        let done = work(injector, held);
        let closed = close(injector, held);
        done.and_then(|done| closed.map(|()| done))
    });
    let closed = close(injector, ours).and(close(injector, theirs));
    let done = done?;
    closed?;
    Ok(done)
}

/// Sends `fd` through the process's end `ours` of the pair, which we fetch for it.
fn send(process: &Process, ours: RawFd, fd: BorrowedFd<'_>) -> Result<()> {
    let end = match pidfd_getfd(process.pidfd(), ours, PidfdGetfdFlags::empty()) {
        Ok(end) => UnixStream::from(end),
        Err(rustix::io::Errno::SRCH) => return Err(MemoryError::ProcessGone { pid: process.pid() }),
        Err(source) => return Err(MemoryError::system("pidfd_getfd", source)),
    };
    let fds = [fd];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(end.as_fd(), &[IoSlice::new(&[1])], &mut control, SendFlags::NOSIGNAL)
        .map(drop)
        .map_err(|source| MemoryError::system("Sending a descriptor", source))
}

/// Has the process receive what was sent. Gives the number of the descriptor there.
fn receive(injector: &mut Injector, memory: &Scratch, theirs: RawFd) -> Result<RawFd> {
    let (iovec, control) = (memory.at + IOVEC, memory.at + CONTROL);
    memory.write(IOVEC, &words(&[memory.at + BYTE, 1]))?;
    memory.write(MSGHDR, &words(&[0, 0, iovec, 1, control, CONTROL_LEN, 0]))?;
    let flags = number(libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT);
    injector.syscall(libc::SYS_recvmsg, [word(theirs), memory.at + MSGHDR, flags, 0, 0, 0])?;
    memory.read_rights()
}

fn close(injector: &mut Injector, fd: RawFd) -> Result<()> {
    injector.syscall(libc::SYS_close, [word(fd), 0, 0, 0, 0, 0]).map(drop)
}

/// The page of the process in which the arguments are.
struct Scratch {
    memory: File,
    at: u64,
    pid: u32,
}

impl Scratch {
    fn open(process: &Process, at: u64) -> Result<Self> {
        let path = process.path("mem");
        let memory = File::options().read(true).write(true).open(&path);
        let memory = memory.map_err(|source| MemoryError::Proc { path, source })?;
        Ok(Self { memory, at, pid: process.pid() })
    }

    fn failed(&self, source: io::Error) -> MemoryError {
        MemoryError::Proc { path: format!("/proc/{}/mem", self.pid).into(), source }
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.memory.write_all_at(bytes, self.at + offset).map_err(|e| self.failed(e))
    }

    fn read_fd(&self, offset: u64) -> Result<RawFd> {
        let mut bytes = [0; 4];
        self.memory.read_exact_at(&mut bytes, self.at + offset).map_err(|e| self.failed(e))?;
        Ok(RawFd::from_ne_bytes(bytes))
    }

    /// The descriptor of the control message that was received.
    fn read_rights(&self) -> Result<RawFd> {
        let mut head = [0; 16];
        self.memory.read_exact_at(&mut head, self.at + CONTROL).map_err(|e| self.failed(e))?;
        let expected =
            [&20_u64.to_ne_bytes()[..], &libc::SOL_SOCKET.to_ne_bytes(), &libc::SCM_RIGHTS.to_ne_bytes()];
        if head[..] != expected.concat() {
            // As where the process is at its limit of open files.
            let why = "the process did not receive the descriptor: it may have as many open files as it is allowed to";
            return Err(MemoryError::system("Lending a descriptor", io::Error::other(why)));
        }
        self.read_fd(CONTROL + 16)
    }
}

fn words(values: &[u64]) -> Vec<u8> {
    debug_assert!(values.len() * 8 <= MSGHDR_LEN);
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn number(value: i32) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

fn word(fd: RawFd) -> u64 {
    number(fd)
}
