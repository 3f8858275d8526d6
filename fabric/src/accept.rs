//! What back ends that listen do alike: they wait for a peer that greets as it should, and for its first bytes.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::error::FabricError;
use crate::sys;

/// How long a peer that connected may take to greet. Others wait meanwhile.
pub(crate) const GREETING_TIMEOUT: Duration = Duration::from_secs(1);

/// Takes connections from a listening socket that does not block until `greet` makes something of one.
pub(crate) fn accept<S, T>(
    listening: BorrowedFd<'_>,
    timeout: Duration,
    accept: impl Fn() -> io::Result<S>,
    greet: impl Fn(S) -> Option<T>,
) -> Result<T, FabricError> {
    let deadline = Instant::now() + timeout;
    loop {
        match accept().map(&greet) {
            Ok(Some(greeted)) => return Ok(greeted),
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(FabricError::timeout("a peer to connect", timeout));
                }
                sys::net::wait(listening, false, Some(left))
                    .map_err(FabricError::io("wait for a connection"))?;
            }
            // The peer went away before it was accepted.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(source) => return Err(FabricError::Io { operation: "accept a connection", source }),
        }
    }
}

/// Waits until something can be read, or the other side has closed.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] after `deadline`.
pub(crate) fn wait_readable(stream: BorrowedFd<'_>, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if sys::net::is_ready(stream, left)? {
            return Ok(());
        }
    }
}

/// Exactly `len` bytes, and none beyond: what follows is the endpoint's.
///
/// # Errors
/// [`io::ErrorKind::UnexpectedEof`]; [`io::ErrorKind::TimedOut`] after `deadline`.
pub(crate) fn read_exactly<S: AsFd>(stream: &S, len: usize, deadline: Instant) -> io::Result<Vec<u8>>
where
    for<'a> &'a S: Read,
{
    let mut reader = stream;
    let mut bytes = vec![0; len];
    let mut at = 0;
    while at < len {
        wait_readable(stream.as_fd(), deadline)?;
        match reader.read(&mut bytes[at..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => at += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes)
}
