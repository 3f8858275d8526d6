//! Frames that have come to the destination's tap before the guest.
//!
//! The network floods what it knows no place for to all taps, and the kernel keeps up to a thousand frames of each. On a long move nothing would be
//! left of that room for the frames that the guest is to have.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::MAX_FRAME;
use crate::taps::open_in;

/// More than the kernel keeps, so that this ends on a network that never falls silent.
const MOST: usize = 10_000;

/// Takes the frames off a tap of a QEMU whose guest does not run. How many those were.
///
/// # Errors
/// The process or its descriptors cannot be had.
pub(super) fn take_away(pid: u32, interface: &str) -> io::Result<usize> {
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    let pidfd = pidfd_open(process, PidfdFlags::empty())?;
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let of_tap = open_in(&folder).into_iter().filter(|(_, name)| name == interface);
    let mut taken = 0;
    for (number, _) in of_tap {
        let fd = pidfd_getfd(pidfd.as_fd(), number, PidfdGetfdFlags::empty())?;
        // QEMU makes it so. Otherwise we would wait for frames.
        if rustix::fs::fcntl_getfl(&fd)?.contains(OFlags::NONBLOCK) {
            taken += take_all(&fd);
        }
    }
    Ok(taken)
}

fn take_all(fd: &OwnedFd) -> usize {
    let mut room = vec![0; MAX_FRAME];
    (0..MOST).take_while(|_| rustix::io::read(fd, &mut room[..]).is_ok_and(|length| length > 0)).count()
}
