//! Many datagrams in one system call.
//!
//! Rules:
//! 1. Headers given to the kernel point to slices borrowed for the whole call, with their lengths; the kernel reads or writes
//!    them during the call and keeps nothing.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most messages in one call.
pub(crate) const BATCH: usize = 32;
/// Room for each message received: as much as segments joined by the kernel can have.
pub(crate) const MESSAGE: usize = 1 << 16;
/// Room for control data: two integers with their headers.
const CONTROL: usize = 64;

/// What one message received is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    /// Bytes of it.
    pub(crate) len: usize,
    /// Length of each datagram that the kernel joined in it, but the last, which may be shorter; `None`: it is one datagram.
    pub(crate) segment: Option<usize>,
    /// Whether it was cut.
    pub(crate) cut: bool,
}

/// Messages from `recvmmsg(2)` without blocking.
#[derive(Debug)]
pub(crate) struct Messages {
    bytes: Vec<u8>,
    control: Vec<[u8; CONTROL]>,
    found: Vec<Message>,
    /// Datagrams that the socket had no room for since it was opened, modulo 2^32, as last reported.
    overflow: u32,
}

impl Messages {
    pub(crate) fn new() -> Self {
        Self {
            bytes: vec![0; BATCH * MESSAGE],
            control: vec![[0; CONTROL]; BATCH],
            found: Vec::with_capacity(BATCH),
            overflow: 0,
        }
    }

    /// Takes what has arrived, at most [`BATCH`] messages. How many.
    pub(crate) fn receive(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.found.clear();
        let mut iov: [libc::iovec; BATCH] =
            [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BATCH];
        // SAFETY: all-zero is a valid `mmsghdr`.
        let mut headers: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
        let places = self.bytes.chunks_exact_mut(MESSAGE).zip(&mut self.control);
        for ((header, iov), (bytes, control)) in headers.iter_mut().zip(&mut iov).zip(places) {
            *iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            header.msg_hdr.msg_iov = iov;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = control.as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = control.len();
        }
        let count = u32::try_from(BATCH).unwrap_or(0);
        // SAFETY: rule 1.
        let got = unsafe {
            libc::recvmmsg(
                fd.as_raw_fd(),
                headers.as_mut_ptr(),
                count,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        let Ok(got) = usize::try_from(got) else {
            return match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                error if error.kind() == io::ErrorKind::Interrupted => Ok(0),
                error => Err(error),
            };
        };
        for (header, control) in headers[..got].iter().zip(&self.control) {
            let len = header.msg_len as usize;
            let control = &control[..header.msg_hdr.msg_controllen.min(CONTROL)];
            let mut message =
                Message { len, segment: None, cut: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0 };
            for (level, kind, value) in Controls(control) {
                match (level, kind) {
                    (libc::SOL_UDP, libc::UDP_GRO) => message.segment = usize::try_from(value).ok(),
                    (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                        self.overflow = u32::from_ne_bytes(value.to_ne_bytes());
                    }
                    _ => {}
                }
            }
            self.found.push(message);
        }
        Ok(got)
    }

    /// What the last [`receive`](Self::receive) found.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (Message, &mut [u8])> {
        let bytes = self.bytes.chunks_exact_mut(MESSAGE);
        self.found.iter().zip(bytes).map(|(message, bytes)| (*message, &mut bytes[..message.len]))
    }

    /// Datagrams that the socket had no room for, modulo 2^32, as reported with the last message.
    pub(crate) fn overflow(&self) -> u32 {
        self.overflow
    }
}

/// Control messages that hold one integer: level, type, value.
struct Controls<'a>(&'a [u8]);

impl Iterator for Controls<'_> {
    type Item = (i32, i32, i32);

    fn next(&mut self) -> Option<Self::Item> {
        const HEADER: usize = 16;
        let integer = |at: usize| Some(i32::from_ne_bytes(self.0.get(at..at + 4)?.try_into().ok()?));
        let len = usize::from_ne_bytes(self.0.get(..8)?.try_into().ok()?);
        if len < HEADER {
            return None;
        }
        let found = (integer(8)?, integer(12)?, integer(HEADER)?);
        self.0 = self.0.get(len.next_multiple_of(8)..).unwrap_or(&[]);
        Some(found)
    }
}

/// `sendmmsg(2)` of at most [`BATCH`] messages on a connected socket, without blocking. How many the socket took.
pub(crate) fn send(fd: BorrowedFd<'_>, messages: &[&[u8]]) -> io::Result<usize> {
    let messages = &messages[..messages.len().min(BATCH)];
    let mut iov: [libc::iovec; BATCH] = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BATCH];
    // SAFETY: all-zero is a valid `mmsghdr`.
    let mut headers: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
    for ((header, iov), bytes) in headers.iter_mut().zip(&mut iov).zip(messages) {
        *iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        header.msg_hdr.msg_iov = iov;
        header.msg_hdr.msg_iovlen = 1;
    }
    let count = u32::try_from(messages.len()).unwrap_or(0);
    // SAFETY: rule 1.
    let sent = unsafe {
        libc::sendmmsg(fd.as_raw_fd(), headers.as_mut_ptr(), count, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}
