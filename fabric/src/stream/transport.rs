//! The socket under an endpoint.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;

use super::tls::TlsSocket;
use crate::counters::Totals;
use crate::socket::{Socket, retry};
use crate::sys::net::{Gather, Scatter};

/// Moves bytes without ever blocking.
#[derive(Debug)]
pub(crate) enum Transport {
    Plain(PlainSocket),
    Tls(Box<TlsSocket>),
}

impl Transport {
    /// Bytes as they are.
    pub(crate) fn plain(socket: Socket) -> Self {
        Self::Plain(PlainSocket { socket })
    }

    /// TLS, whose handshake is over; `tls` may hold bytes that were received already.
    pub(crate) fn tls(socket: Socket, tls: rustls::Connection) -> Self {
        Self::Tls(Box::new(TlsSocket::new(socket, tls)))
    }

    /// Sends a prefix of `from`; how many bytes of it. `WouldBlock` if none can be taken now.
    pub(crate) fn send(&mut self, from: &Gather<'_>, totals: &Totals) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.send(from, totals),
            Self::Tls(socket) => socket.send(from, totals),
        }
    }

    /// Receives into `to`; how many bytes, 0 at the end of the stream. `WouldBlock` if there are none now. Fewer
    /// than `to` has room for means that there are no more now. Without `more` only what the transport holds back is
    /// received, and nothing is taken from the socket.
    pub(crate) fn receive(&mut self, to: &Scatter<'_>, more: bool, totals: &Totals) -> io::Result<usize> {
        match self {
            Self::Plain(_) if !more => Err(io::ErrorKind::WouldBlock.into()),
            Self::Plain(socket) => socket.receive(to, totals),
            Self::Tls(socket) => socket.receive(to, more, totals),
        }
    }

    /// Sends what an earlier [`send`](Self::send) took and could not yet give to the socket.
    pub(crate) fn flush(&mut self, totals: &Totals) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Tls(socket) => socket.flush(totals),
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

    /// Announces the end of our data to the peer, as far as this is possible without blocking.
    pub(crate) fn close(&mut self, totals: &Totals) {
        if let Self::Tls(socket) = self {
            socket.close(totals);
        }
        let _ = self.socket().shutdown(Shutdown::Write);
    }
}

/// Bytes as they are.
#[derive(Debug)]
pub(crate) struct PlainSocket {
    pub(crate) socket: Socket,
}

impl PlainSocket {
    fn send(&self, from: &Gather<'_>, totals: &Totals) -> io::Result<usize> {
        let sent = retry(|| from.send(self.socket.as_fd()))?;
        totals.bytes_sent.add(sent as u64);
        Ok(sent)
    }

    fn receive(&self, to: &Scatter<'_>, totals: &Totals) -> io::Result<usize> {
        let received = retry(|| to.recv(self.socket.as_fd()))?;
        totals.bytes_received.add(received as u64);
        Ok(received)
    }
}
