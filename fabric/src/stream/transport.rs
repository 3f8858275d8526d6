//! The socket under an endpoint.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use super::tls::TlsSocket;
use crate::counters::Cells;
use crate::sys::net::{Gather, Scatter};

/// Moves bytes without ever blocking.
#[derive(Debug)]
pub(crate) enum Transport {
    Plain(PlainSocket),
    Tls(Box<TlsSocket>),
}

impl Transport {
    /// Sends a prefix of `from`; how many bytes of it. `WouldBlock` if none can be taken now.
    pub(crate) fn send(&mut self, from: &Gather<'_>, cells: &Cells) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.send(from, cells),
            Self::Tls(socket) => socket.send(from, cells),
        }
    }

    /// Receives into `to`; how many bytes, 0 at the end of the stream. `WouldBlock` if there are none now. Fewer
    /// than `to` has room for means that there are no more now. Without `more` only what the transport holds back is
    /// received, and nothing is taken from the socket.
    pub(crate) fn receive(&mut self, to: &Scatter<'_>, more: bool, cells: &Cells) -> io::Result<usize> {
        match self {
            Self::Plain(_) if !more => Err(io::ErrorKind::WouldBlock.into()),
            Self::Plain(socket) => socket.receive(to, cells),
            Self::Tls(socket) => socket.receive(to, more, cells),
        }
    }

    /// Sends what an earlier [`send`](Self::send) took and could not yet give to the socket.
    pub(crate) fn flush(&mut self, cells: &Cells) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Tls(socket) => socket.flush(cells),
        }
    }

    /// Whether [`flush`](Self::flush) has something to do.
    pub(crate) fn has_unsent(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(socket) => socket.has_unsent(),
        }
    }

    /// Whether bytes can be received that the socket's readiness does not show.
    pub(crate) fn has_unread(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(socket) => socket.has_unread(),
        }
    }

    /// The socket.
    pub(crate) fn socket(&self) -> &Socket {
        match self {
            Self::Plain(socket) => &socket.socket,
            Self::Tls(socket) => socket.socket(),
        }
    }

    /// Says that nothing more will come, as far as that can be said without blocking.
    pub(crate) fn close(&mut self, cells: &Cells) {
        if let Self::Tls(socket) = self {
            socket.close(cells);
        }
        let _ = self.socket().shutdown(Shutdown::Write);
    }
}

/// A stream socket of either family.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    pub(crate) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Tcp(socket) => socket.shutdown(how),
            Self::Unix(socket) => socket.shutdown(how),
        }
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(socket) => Self::Tcp(socket.try_clone()?),
            Self::Unix(socket) => Self::Unix(socket.try_clone()?),
        })
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(socket) => socket.as_fd(),
            Self::Unix(socket) => socket.as_fd(),
        }
    }
}

/// Bytes as they are.
#[derive(Debug)]
pub(crate) struct PlainSocket {
    pub(crate) socket: Socket,
}

impl PlainSocket {
    fn send(&self, from: &Gather<'_>, cells: &Cells) -> io::Result<usize> {
        let sent = retry(|| from.send(self.socket.as_fd()))?;
        cells.bytes_sent.add(sent as u64);
        Ok(sent)
    }

    fn receive(&self, to: &Scatter<'_>, cells: &Cells) -> io::Result<usize> {
        let received = retry(|| to.recv(self.socket.as_fd()))?;
        cells.bytes_received.add(received as u64);
        Ok(received)
    }
}

/// Calls again when a signal came.
pub(super) fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
