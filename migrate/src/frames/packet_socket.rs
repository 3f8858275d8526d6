//! Packet sockets (packet(7)) of one interface, with the header that says what a card would have to do with a frame.
//!
//! Rule for all calls below: pointers given to the kernel are to locals of the stated size, which live across the call.
#![allow(unsafe_code)]

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::io::unix::AsyncFd;

use super::{HEADER, MAX_FRAME};

/// Frames that the kernel keeps until they are read, in bytes. It may allow less.
const KERNEL_KEEPS: libc::c_int = 4 << 20;
/// Room for what the kernel says beside a frame: its time.
const BESIDE: usize = 64;

#[allow(clippy::cast_possible_truncation)] // 17 and 3
const FAMILY: libc::sa_family_t = libc::AF_PACKET as libc::sa_family_t;
#[allow(clippy::cast_possible_truncation)]
const ALL_PROTOCOLS: u16 = libc::ETH_P_ALL as u16;

#[allow(clippy::cast_possible_truncation)] // of types of a few bytes
const fn length_of<T>() -> libc::socklen_t {
    size_of::<T>() as libc::socklen_t
}

/// Which frames a socket is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// It gives a copy of what goes out by the interface: into the guest, if that is a tap.
    Copies,
    /// What is sent by it goes out by the interface.
    Sends,
}

/// A socket of one interface.
#[derive(Debug)]
pub(super) struct PacketSocket(AsyncFd<OwnedFd>);

/// A frame, with its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    /// When it came.
    pub at: SystemTime,
    /// Header and frame.
    pub bytes: Vec<u8>,
}

fn result(returned: libc::c_int) -> io::Result<libc::c_int> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(returned) }
}

impl PacketSocket {
    /// Of the interface of this name, in the network namespace of the calling thread.
    ///
    /// # Errors
    /// There is no such interface, or this process may not open packet sockets.
    pub(super) fn open(interface: &str, way: Way) -> io::Result<Self> {
        let name = std::ffi::CString::new(interface)?;
        // SAFETY: the name ends with a zero, and lives across the call.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        if index == 0 {
            return Err(io::Error::last_os_error());
        }
        // Without a protocol nothing comes in until it is bound.
        let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: takes no pointers.
        let raw = result(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })?;
        // SAFETY: it was just made, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        set(&fd, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
        if way == Way::Copies {
            set(&fd, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
            set(&fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, KERNEL_KEEPS)
                .or_else(|_| set(&fd, libc::SOL_SOCKET, libc::SO_RCVBUF, KERNEL_KEEPS))?;
        }
        // SAFETY: all zeros is a valid address of this kind.
        let mut address: libc::sockaddr_ll = unsafe { zeroed() };
        address.sll_family = FAMILY;
        address.sll_ifindex = index.cast_signed();
        address.sll_protocol = match way {
            Way::Copies => ALL_PROTOCOLS.to_be(),
            Way::Sends => 0,
        };
        let length = length_of::<libc::sockaddr_ll>();
        // SAFETY: the address is a local of that length.
        result(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) })?;
        // SAFETY: an `OwnedFd` is the same open descriptor until it is dropped, and this one is not given away.
        Ok(Self(unsafe { AsyncFd::register(fd) }?))
    }

    /// The next frame that goes out by the interface. Cancel-safe.
    pub(super) async fn next(&self, room: &mut Vec<u8>) -> io::Result<Frame> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|fd| receive(fd.get_ref(), room)) {
                Ok(Ok(Some(frame))) => return Ok(frame),
                Ok(Ok(None)) | Err(_) => {}
                Ok(Err(error)) => return Err(error),
            }
        }
    }

    /// A frame that is there already, if one is.
    pub(super) fn waiting(&self, room: &mut Vec<u8>) -> Option<Frame> {
        loop {
            match receive(self.0.get_ref(), room) {
                Ok(Some(frame)) => return Some(frame),
                Ok(None) => {}
                Err(_) => return None,
            }
        }
    }

    /// Sends a frame with its header out by the interface. Cancel-safe.
    pub(super) async fn send(&self, frame: &[u8]) -> io::Result<()> {
        loop {
            let mut ready = self.0.writable().await?;
            let sent = ready.try_io(|fd| {
                // SAFETY: the slice lives across the call.
                let sent = unsafe { libc::send(fd.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
                if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            });
            if let Ok(sent) = sent {
                return sent;
            }
        }
    }
}

fn set(fd: &OwnedFd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let length = length_of::<libc::c_int>();
    // SAFETY: the value is a local of that length.
    let set = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, (&raw const value).cast(), length) };
    result(set).map(drop)
}

/// Reads one. `None`: one that does not go out by the interface, or is longer than any frame is.
fn receive(fd: &OwnedFd, room: &mut Vec<u8>) -> io::Result<Option<Frame>> {
    room.resize(MAX_FRAME, 0);
    // SAFETY: all zeros is a valid address of this kind.
    let mut from: libc::sockaddr_ll = unsafe { zeroed() };
    // SAFETY: all zeros is a message of nothing.
    let mut message: libc::msghdr = unsafe { zeroed() };
    let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    // As control messages are aligned.
    let mut beside = [0_u64; BESIDE / 8];
    message.msg_name = (&raw mut from).cast();
    message.msg_namelen = length_of::<libc::sockaddr_ll>();
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = beside.as_mut_ptr().cast();
    message.msg_controllen = BESIDE;
    // SAFETY: all that the message names are locals of the lengths that it says, and live across the call.
    let length = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, 0) };
    let Ok(length) = usize::try_from(length) else { return Err(io::Error::last_os_error()) };
    let whole = message.msg_flags & libc::MSG_TRUNC == 0 && length > HEADER;
    if from.sll_pkttype != libc::PACKET_OUTGOING || !whole {
        return Ok(None);
    }
    Ok(Some(Frame { at: time_in(&message), bytes: room[..length].to_vec() }))
}

/// When the kernel had a frame, by what it says beside it; now, if it does not say.
fn time_in(message: &libc::msghdr) -> SystemTime {
    // SAFETY: the kernel has filled in the message, whose control buffer is still there.
    let mut at = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !at.is_null() {
        // SAFETY: it is within that buffer, as CMSG_FIRSTHDR and CMSG_NXTHDR find it.
        let header = unsafe { at.read_unaligned() };
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_TIMESTAMPNS {
            // SAFETY: it is within that buffer.
            let data = unsafe { libc::CMSG_DATA(at) };
            // SAFETY: the data of this message are a timespec.
            let time = unsafe { data.cast::<libc::timespec>().read_unaligned() };
            let (seconds, nanos) = (time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs());
            return UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_nanos(nanos);
        }
        // SAFETY: as above.
        at = unsafe { libc::CMSG_NXTHDR(message, at) };
    }
    SystemTime::now()
}
