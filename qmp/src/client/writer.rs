//! Writing command lines, whole and in order, without waiting.
//!
//! Whoever sends a command writes it into the socket at once. Only what the socket does not take (a QEMU that does not
//! read) is queued for the writer task. Sending never awaits, so a caller that is cancelled cannot leave half a line.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::{net::UnixStream, sync::Notify};

use super::Shared;

#[derive(Debug)]
pub(crate) struct Writer {
    stream: Arc<UnixStream>,
    /// Lines not written yet, the first one perhaps in part.
    queue: Mutex<VecDeque<Line>>,
    more: Notify,
}

#[derive(Debug)]
struct Line {
    bytes: Vec<u8>,
    written: usize,
    /// Travels with the first byte.
    fd: Option<OwnedFd>,
}

impl Writer {
    pub(crate) fn new(stream: Arc<UnixStream>) -> Self {
        Self { stream, queue: Mutex::default(), more: Notify::new() }
    }

    /// Writes `bytes`, or queues what cannot be written now. Errors surface as the end of the connection, in the reader.
    pub(crate) fn send(&self, bytes: Vec<u8>, fd: Option<OwnedFd>) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.push_back(Line { bytes, written: 0, fd });
        if self.drain(&mut queue).is_ok_and(|all| !all) {
            self.more.notify_one();
        }
    }

    /// Writes as much as fits. `Ok(true)` when the queue is empty.
    fn drain(&self, queue: &mut VecDeque<Line>) -> io::Result<bool> {
        while let Some(line) = queue.front_mut() {
            match self.write(line) {
                Ok(()) if line.written == line.bytes.len() => drop(queue.pop_front()),
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // The stream is dead: the reader will see it, and say so.
                    queue.clear();
                    return Err(error);
                }
            }
        }
        Ok(true)
    }

    fn write(&self, line: &mut Line) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds;
        if let Some(fd) = &line.fd {
            fds = [fd.as_fd()];
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let data = [IoSlice::new(&line.bytes[line.written..])];
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let count = rustix::net::sendmsg(&*self.stream, &data, &mut control, flags)?;
        line.written += count;
        line.fd = None;
        Ok(())
    }
}

/// The task that writes what senders could not.
pub(super) async fn run(shared: Arc<Shared>) {
    let writer = &shared.writer;
    loop {
        writer.more.notified().await;
        // Through tokio, so that its readiness is cleared while the socket is full: this returns when all is written.
        let written = writer
            .stream
            .async_io(tokio::io::Interest::WRITABLE, || {
                let mut queue = writer.queue.lock().unwrap_or_else(PoisonError::into_inner);
                if writer.drain(&mut queue)? { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
            })
            .await;
        if written.is_err() {
            return;
        }
    }
}
