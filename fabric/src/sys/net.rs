//! Vectored, non-blocking socket calls on registered memory, socket options, `poll(2)`, random bytes.
//!
//! Rules:
//! 1. A [`Gather`] or [`Scatter`] holds only ranges that stay valid for its lifetime: slices it borrows, and
//!    [`Piece`]s. The kernel reads or writes them during the call and keeps nothing.
//! 2. [`Iov`] has the layout of `struct iovec` (checked below), so a slice of them can be given to the kernel.
//! 3. Other pointers given to the kernel are to locals of the stated size that live across the call.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::memory::Piece;

/// Most ranges in one call (`UIO_MAXIOV`).
pub(crate) const MAX_IOV: usize = 1024;

/// One range, as the kernel takes it. Addresses are plain numbers so that a buffer of them can be kept and sent
/// between threads; they mean something only inside a `Gather` or `Scatter`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Iov {
    base: usize,
    len: usize,
}

const _: () = assert!(size_of::<Iov>() == size_of::<libc::iovec>());
const _: () = assert!(align_of::<Iov>() == align_of::<libc::iovec>());
const _: () = assert!(std::mem::offset_of!(Iov, len) == std::mem::offset_of!(libc::iovec, iov_len));

impl Iov {
    /// A range of another process.
    pub(crate) fn remote(addr: u64, len: usize) -> Self {
        Self { base: super::memory::to_usize(addr), len }
    }
}

/// Ranges to send from.
#[derive(Debug)]
pub(crate) struct Gather<'a> {
    iov: &'a mut Vec<Iov>,
    bytes: usize,
    limit: usize,
    count: usize,
}

impl<'a> Gather<'a> {
    /// Collects into `iov`, whose content is dropped, at most `limit` bytes in at most `count` ranges.
    pub(crate) fn new(iov: &'a mut Vec<Iov>, limit: usize, count: usize) -> Self {
        iov.clear();
        Self { iov, bytes: 0, limit, count: count.min(MAX_IOV) }
    }

    /// Whether nothing more fits.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes >= self.limit || self.iov.len() >= self.count
    }

    /// How many bytes were collected.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds as much of `bytes` as fits.
    pub(crate) fn push_bytes(&mut self, bytes: &'a [u8]) {
        self.push(bytes.as_ptr().expose_provenance(), bytes.len());
    }

    /// Adds as much of `piece` as fits.
    pub(crate) fn push_piece(&mut self, piece: Piece<'a>) {
        self.push(piece.addr(), piece.len());
    }

    fn push(&mut self, base: usize, len: usize) {
        let len = len.min(self.limit - self.bytes);
        if len > 0 && self.iov.len() < self.count {
            self.iov.push(Iov { base, len });
            self.bytes += len;
        }
    }

    pub(super) fn iov(&self) -> &[Iov] {
        self.iov
    }

    /// `sendmsg(2)` without blocking. How many bytes the socket took.
    pub(crate) fn send(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let header = message(self.iov);
        // SAFETY: rules 1 and 2.
        let sent = unsafe {
            libc::sendmsg(fd.as_raw_fd(), &raw const header, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
        };
        length(sent)
    }

    /// Whether some of the memory is behind the end of its file: what was copied out of it is worth nothing.
    pub(crate) fn is_broken(&self) -> bool {
        self.iov.iter().any(|iov| vmove_guard::is_broken(iov.base, iov.len))
    }

    /// Copies bytes out, leaving out the first `skip`, as many as fit `to`, for transports that must transform
    /// them. How many.
    pub(crate) fn copy_to(&self, skip: usize, to: &mut [u8]) -> usize {
        let (mut skip, mut at) = (skip, 0);
        for iov in self.iov.iter() {
            if skip >= iov.len {
                skip -= iov.len;
                continue;
            }
            // SAFETY: rule 1: every range is valid for `'a`.
            let piece = unsafe { Piece::new(iov.base, iov.len) };
            at += piece.skip(skip).copy_to(&mut to[at..]);
            skip = 0;
            if at == to.len() {
                break;
            }
        }
        at
    }
}

/// Ranges to receive into.
#[derive(Debug)]
pub(crate) struct Scatter<'a> {
    iov: &'a mut Vec<Iov>,
    bytes: usize,
    limit: usize,
    borrows: PhantomData<&'a mut [u8]>,
}

impl<'a> Scatter<'a> {
    /// Collects into `iov`, whose content is dropped, at most `limit` bytes.
    pub(crate) fn new(iov: &'a mut Vec<Iov>, limit: usize) -> Self {
        iov.clear();
        Self { iov, bytes: 0, limit, borrows: PhantomData }
    }

    /// Whether nothing more fits.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes >= self.limit || self.iov.len() >= MAX_IOV
    }

    /// How many bytes were collected.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds `bytes`, whatever the limit.
    pub(crate) fn push_bytes(&mut self, bytes: &'a mut [u8]) {
        if !bytes.is_empty() && self.iov.len() < MAX_IOV {
            self.iov.push(Iov { base: bytes.as_mut_ptr().expose_provenance(), len: bytes.len() });
            self.bytes += bytes.len();
        }
    }

    /// Adds as much of `piece` as fits.
    pub(crate) fn push_piece(&mut self, piece: Piece<'a>) {
        let len = piece.len().min(self.limit.saturating_sub(self.bytes));
        if len > 0 && self.iov.len() < MAX_IOV {
            self.iov.push(Iov { base: piece.addr(), len });
            self.bytes += len;
        }
    }

    pub(super) fn iov(&self) -> &[Iov] {
        self.iov
    }

    /// `recvmsg(2)` without blocking. How many bytes arrived; 0 at the end of the stream.
    pub(crate) fn recv(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let mut header = message(self.iov);
        // SAFETY: rules 1 and 2.
        let received = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) };
        length(received)
    }

    /// Whether some of the memory is behind the end of its file: what was copied there is lost.
    pub(crate) fn is_broken(&self) -> bool {
        self.iov.iter().any(|iov| vmove_guard::is_broken(iov.base, iov.len))
    }

    /// Copies `from` in, leaving out the first `skip` bytes of the ranges. How many bytes fitted.
    pub(crate) fn copy_from(&self, skip: usize, from: &[u8]) -> usize {
        let (mut skip, mut at) = (skip, 0);
        for iov in self.iov.iter() {
            if skip >= iov.len {
                skip -= iov.len;
                continue;
            }
            // SAFETY: rule 1: every range is valid for `'a`.
            let piece = unsafe { Piece::new(iov.base, iov.len) };
            at += piece.skip(skip).copy_from(&from[at..]);
            skip = 0;
            if at == from.len() {
                break;
            }
        }
        at
    }
}

fn message(iov: &[Iov]) -> libc::msghdr {
    // SAFETY: all-zero is a valid `msghdr`: no name, no control data.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = iov.as_ptr().cast_mut().cast();
    header.msg_iovlen = iov.len();
    header
}

fn length(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// `setsockopt(2)` with an integer.
pub(crate) fn set_option(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let len = libc::socklen_t::try_from(size_of_val(&value)).map_err(io::Error::other)?;
    // SAFETY: rule 3.
    let result = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// `getsockopt(2)` of an integer.
pub(crate) fn get_option(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut len = libc::socklen_t::try_from(size_of_val(&value)).map_err(io::Error::other)?;
    // SAFETY: rule 3.
    let result =
        unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut len) };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// `tcp_info.tcpi_min_rtt`: the shortest round trip that the kernel has seen on a TCP connection. `None`: none yet, or a kernel that does
/// not tell (before 4.6).
pub(crate) fn shortest_round_trip(fd: BorrowedFd<'_>) -> io::Result<Option<Duration>> {
    /// Where it is in `struct tcp_info` of `linux/tcp.h`, which only ever grows at its end; libc's has an older one.
    const AT: usize = 148;
    let mut info = [0_u8; AT + size_of::<u32>()];
    let mut len = libc::socklen_t::try_from(info.len()).map_err(io::Error::other)?;
    // SAFETY: rule 3.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let is_whole = usize::try_from(len).is_ok_and(|len| len == info.len());
    let mut us = [0; size_of::<u32>()];
    us.copy_from_slice(&info[AT..]);
    let us = u32::from_ne_bytes(us);
    // The kernel begins with all ones.
    Ok((is_whole && us != 0 && us != u32::MAX).then(|| Duration::from_micros(us.into())))
}

/// The process at the other end of a Unix socket, as it was when it connected; 0 if this process cannot see it.
pub(crate) fn peer_pid(fd: BorrowedFd<'_>) -> io::Result<i32> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = libc::socklen_t::try_from(size_of_val(&found)).map_err(io::Error::other)?;
    // SAFETY: rule 3.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if result == 0 { Ok(found.pid) } else { Err(io::Error::last_os_error()) }
}

/// Waits until `fd` is readable (or writable, if `write`), has an error, or `timeout` passes. Interrupted waits end
/// early.
pub(crate) fn wait(fd: BorrowedFd<'_>, write: bool, timeout: Option<Duration>) -> io::Result<()> {
    poll(fd, write, timeout).map(drop)
}

/// Waits until `fd` is readable, has an error, or `timeout` passes. Whether one of the first two: an interrupted wait ends early.
pub(crate) fn is_ready(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    poll(fd, false, Some(timeout))
}

/// Asks again and again for `time` whether a [`wait`] would end. Whether it would.
pub(crate) fn spin(fd: BorrowedFd<'_>, write: bool, time: Duration) -> io::Result<bool> {
    if time.is_zero() {
        return Ok(false);
    }
    let begin = Instant::now();
    while begin.elapsed() < time {
        if poll(fd, write, Some(Duration::ZERO))? {
            return Ok(true);
        }
        std::hint::spin_loop();
    }
    Ok(false)
}

fn poll(fd: BorrowedFd<'_>, write: bool, timeout: Option<Duration>) -> io::Result<bool> {
    let events = if write { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    let time = timeout.map(|timeout| libc::timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: rule 3.
    let result = unsafe { libc::ppoll(&raw mut poll, 1, time, std::ptr::null()) };
    if result >= 0 {
        return Ok(result > 0);
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::Interrupted => Ok(false),
        error => Err(error),
    }
}

/// Unpredictable bytes from the kernel.
pub(crate) fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    // SAFETY: rule 3.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if length(got)? != bytes.len() {
        return Err(io::Error::other("getrandom gave too few bytes"));
    }
    Ok(u64::from_ne_bytes(bytes))
}
