//! TLS under an endpoint. Payload is copied once into and once out of buffers of ours, since encryption needs a
//! place that nobody else writes to.

use std::io::{self, BufRead, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use crate::counters::Totals;
use crate::socket::{Socket, retry};
use crate::sys::net::{Gather, Iov, Scatter};

/// Plaintext encrypted at a time: the size of one TLS record.
const RECORD: usize = 16 * 1024;
/// Ciphertext received at a time.
const INPUT: usize = 256 * 1024;
/// Plaintext that one call encrypts before it lets the caller do something else.
const SEND_LIMIT: usize = 16 * RECORD;

/// An established TLS connection.
pub(crate) struct TlsSocket {
    socket: Socket,
    tls: rustls::Connection,
    plain: Box<[u8]>,
    /// Ciphertext received and not yet given to `tls`: `input[start..end]`.
    input: Box<[u8]>,
    start: usize,
    end: usize,
    /// The peer closed the socket.
    eof: bool,
    /// Plaintext may be waiting inside `tls`.
    unread: bool,
    iov: Vec<Iov>,
}

impl std::fmt::Debug for TlsSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsSocket").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl TlsSocket {
    /// `tls` has finished its handshake on `socket`.
    pub(crate) fn new(socket: Socket, mut tls: rustls::Connection) -> Self {
        // `send` bounds what is buffered; a limit in there would only make short writes.
        tls.set_buffer_limit(None);
        Self {
            socket,
            tls,
            plain: vec![0; RECORD].into_boxed_slice(),
            input: vec![0; INPUT].into_boxed_slice(),
            start: 0,
            end: 0,
            eof: false,
            unread: true,
            iov: Vec::new(),
        }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.tls.wants_write()
    }

    pub(super) fn has_unread(&self) -> bool {
        self.unread || self.start < self.end
    }

    pub(super) fn send(&mut self, from: &Gather<'_>, totals: &Totals) -> io::Result<usize> {
        self.flush(totals)?;
        let mut sent = 0;
        while sent < from.bytes().min(SEND_LIMIT) {
            let len = from.copy_to(sent, &mut self.plain);
            if from.is_broken() {
                // As the kernel answers who sends such memory itself.
                return if sent > 0 { Ok(sent) } else { Err(io::Error::from_raw_os_error(libc::EFAULT)) };
            }
            self.tls.writer().write_all(&self.plain[..len])?;
            sent += len;
        }
        // All records in one call: one each would wake the peer for each, and leave the kernel small packets.
        match self.flush(totals) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(sent),
            other => other.map(|()| sent),
        }
    }

    /// Gives ciphertext to the socket. `WouldBlock` if some is left.
    pub(super) fn flush(&mut self, totals: &Totals) -> io::Result<()> {
        while self.tls.wants_write() {
            let mut out = Out { fd: self.socket.as_fd(), iov: &mut self.iov };
            let sent = retry(|| self.tls.write_tls(&mut out))?;
            totals.bytes_sent.add(sent as u64);
        }
        Ok(())
    }

    pub(super) fn receive(&mut self, to: &Scatter<'_>, more: bool, totals: &Totals) -> io::Result<usize> {
        let mut received = 0;
        loop {
            let end_of_stream = self.take_plain(to, &mut received)?;
            if end_of_stream || received == to.bytes() {
                return Ok(received);
            }
            match self.take_cipher(more, totals) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && received > 0 => {
                    return Ok(received);
                }
                other => other?,
            }
        }
    }

    /// Moves decrypted bytes to where they go. Returns whether there is no more to be had now: the peer has announced the
    /// end of its data, or the memory for the next bytes is not there.
    fn take_plain(&mut self, to: &Scatter<'_>, received: &mut usize) -> io::Result<bool> {
        let mut reader = self.tls.reader();
        while *received < to.bytes() {
            match reader.fill_buf() {
                Ok([]) => return Ok(true),
                Ok(bytes) => {
                    let copied = to.copy_from(*received, bytes);
                    if to.is_broken() {
                        // As the kernel answers who receives into such memory; what came before it counts.
                        let fault = || io::Error::from_raw_os_error(libc::EFAULT);
                        return if *received > 0 { Ok(true) } else { Err(fault()) };
                    }
                    reader.consume(copied);
                    *received += copied;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.unread = false;
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Gives received ciphertext to `tls`, and receives `more` if there is none.
    fn take_cipher(&mut self, more: bool, totals: &Totals) -> io::Result<()> {
        if self.start == self.end && !more {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if self.start == self.end && !self.eof {
            self.start = 0;
            self.end = 0;
            let mut to = Scatter::new(&mut self.iov, INPUT);
            to.push_bytes(&mut self.input);
            self.end = retry(|| to.recv(self.socket.as_fd()))?;
            self.eof = self.end == 0;
            totals.bytes_received.add(self.end as u64);
        }
        // A read of 0 bytes tells `tls` that the stream ended; it then reports whether that was announced.
        let mut from = &self.input[self.start..self.end];
        let before = from.len();
        self.tls.read_tls(&mut from as &mut dyn Read)?;
        self.start += before - from.len();
        self.tls.process_new_packets().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        self.unread = true;
        Ok(())
    }

    /// Announces the end, if that can be done now.
    pub(super) fn close(&mut self, totals: &Totals) {
        self.tls.send_close_notify();
        let _ = self.flush(totals);
    }
}

/// Where `tls` puts ciphertext.
struct Out<'a> {
    fd: BorrowedFd<'a>,
    iov: &'a mut Vec<Iov>,
}

impl Write for Out<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[io::IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        let mut from = Gather::new(self.iov, usize::MAX, usize::MAX);
        for slice in slices {
            from.push_bytes(slice);
        }
        from.send(self.fd)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
