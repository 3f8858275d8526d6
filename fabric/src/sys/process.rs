//! Memory of another process, by `process_vm_readv(2)` and `process_vm_writev(2)`.
//!
//! Rules:
//! 1. The local ranges are those of a [`Gather`] or [`Scatter`], valid for the call.
//! 2. The remote ranges are registered memory of the process that the kernel names as the peer of a connection, looked
//!    up in that peer's table inside a section. Should the peer be this very process, that is memory whose owner
//!    allowed peers to use it.
#![allow(unsafe_code)]

use std::io;

use super::net::{Gather, Iov, Scatter};

/// Copies from the process's memory. How many bytes; less than asked if the rest cannot be accessed.
pub(crate) fn read(pid: i32, from: &[Iov], to: &Scatter<'_>) -> io::Result<usize> {
    let to = to.iov();
    // SAFETY: rules 1 and 2; `Iov` has the layout of `struct iovec`.
    let copied = unsafe {
        libc::process_vm_readv(
            pid,
            to.as_ptr().cast(),
            to.len() as libc::c_ulong,
            from.as_ptr().cast(),
            from.len() as libc::c_ulong,
            0,
        )
    };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

/// Copies into the process's memory. How many bytes; less than given if the rest cannot be accessed.
pub(crate) fn write(pid: i32, from: &Gather<'_>, to: &[Iov]) -> io::Result<usize> {
    let from = from.iov();
    // SAFETY: rules 1 and 2; `Iov` has the layout of `struct iovec`.
    let copied = unsafe {
        libc::process_vm_writev(
            pid,
            from.as_ptr().cast(),
            from.len() as libc::c_ulong,
            to.as_ptr().cast(),
            to.len() as libc::c_ulong,
            0,
        )
    };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

/// One word of the process's memory.
pub(crate) fn read_word(pid: i32, at: u64) -> io::Result<u64> {
    let mut word = [0; 8];
    let mut iov = Vec::new();
    let mut to = Scatter::new(&mut iov, word.len());
    to.push_bytes(&mut word);
    match read(pid, &[Iov::remote(at, 8)], &to)? {
        8 => Ok(u64::from_ne_bytes(word)),
        short => Err(io::Error::other(format!("{short} bytes of a word could be read"))),
    }
}
