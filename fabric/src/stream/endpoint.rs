//! A connection over a byte stream.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::inbox::{Context, Inbox};
use super::ops::{OpKind, Ops};
use super::outbox::{Outbox, SCRATCH, Sent};
use super::serving;
use super::transport::{Socket, Transport};
use super::urgency::Urgency;
use crate::address::{Class, FabricKind};
use crate::counters::CountersHandle;
use crate::endpoint::{
    Completion, CompletionKind, Completions, Endpoint, MAX_MESSAGE, MAX_SEGMENTS, MAX_TRANSFER, ReadSegment,
    WrId, WriteSegment,
};
use crate::error::{FabricError, PostError};
use crate::region::{LocalSlice, RemoteSlice};
use crate::serve::ServeHandle;
use crate::sys::{self, net::Scatter};
use crate::table::{Participant, RegionTable};
use crate::thread::ThreadOptions;
use crate::wire::{CREDITS, Descriptor, Header};

/// How much is done at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tuning {
    /// Bytes per system call.
    pub(crate) chunk: usize,
    /// The same while urgent connections are busy.
    pub(crate) polite_chunk: usize,
    /// Bytes per poll in each direction.
    pub(crate) budget: usize,
    /// How long a wait for outstanding work spins before it sleeps.
    pub(crate) spin: Duration,
}

/// See [`Endpoint`].
#[derive(Debug)]
pub(crate) struct StreamEndpoint {
    kind: FabricKind,
    class: Class,
    transport: Transport,
    participant: Participant,
    ops: Ops,
    outbox: Outbox,
    inbox: Inbox,
    /// Completions that wait for the next poll.
    done: VecDeque<Completion>,
    sent: Vec<Sent>,
    /// For fingerprints: the guest does not know it, so it cannot make memory whose change goes unnoticed.
    seed: u64,
    scratch: Box<[u8]>,
    counters: CountersHandle,
    tuning: Tuning,
    urgency: Arc<Urgency>,
    /// The connection is over; the reason until a poll has reported it.
    failure: Option<FabricError>,
    dead: bool,
}

/// What became of one attempt to receive.
enum Received {
    /// Bytes; whether there may be more at once.
    Some(usize, bool),
    Nothing,
    End,
}

impl StreamEndpoint {
    pub(crate) fn new(
        kind: FabricKind,
        class: Class,
        transport: Transport,
        table: &Arc<RegionTable>,
        tuning: Tuning,
        urgency: &Arc<Urgency>,
    ) -> Result<Self, FabricError> {
        Ok(Self {
            kind,
            class,
            transport,
            participant: table.join()?,
            ops: Ops::new(),
            outbox: Outbox::new(),
            inbox: Inbox::new(),
            done: VecDeque::with_capacity(CREDITS),
            sent: Vec::with_capacity(CREDITS),
            seed: sys::net::random().map_err(FabricError::io("draw a random number"))?,
            scratch: vec![0; SCRATCH].into_boxed_slice(),
            counters: CountersHandle::default(),
            tuning,
            urgency: Arc::clone(urgency),
            failure: None,
            dead: false,
        })
    }

    /// The socket under the connection.
    pub(crate) fn socket(&self) -> &Socket {
        self.transport.socket()
    }

    /// Decides how much to do at a time.
    fn set_limits(&mut self) {
        let chunk = match self.class {
            Class::Bulk if self.urgency.is_recent() => self.tuning.polite_chunk,
            _ => self.tuning.chunk,
        };
        self.outbox.set_limit(chunk);
        self.inbox.set_limit(chunk);
    }

    /// Sends until the socket takes no more, nothing is left, or the budget is used.
    fn send_some(&mut self) -> Result<(), FabricError> {
        let mut budget = self.tuning.budget;
        if self.class == Class::Urgent && !self.outbox.is_empty() {
            self.urgency.mark();
        }
        self.set_limits();
        while !self.outbox.is_empty() && budget > 0 {
            let section = self.participant.enter();
            let cells = self.counters.cells();
            let result = self.outbox.send(&mut self.transport, &section, cells, &mut self.sent);
            drop(section);
            self.complete_sent();
            match result {
                Ok(bytes) => budget = budget.saturating_sub(bytes.max(1)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(self.lost(error)),
            }
        }
        match self.transport.flush(self.counters.cells()) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(self.lost(error)),
            _ => Ok(()),
        }
    }

    fn complete_sent(&mut self) {
        for sent in self.sent.drain(..) {
            match sent {
                Sent::Message { tag } => {
                    let Some(op) = self.ops.get(tag, OpKind::Send) else { continue };
                    self.done.push_back(Completion { wr: op.wr, kind: CompletionKind::Send, status: Ok(()) });
                    self.ops.finish(tag);
                    self.counters.cells().sends.add(1);
                }
                Sent::BrokenWrite { tag } => {
                    if let Some(op) = self.ops.get(tag, OpKind::Write) {
                        op.local_gone = true;
                    }
                }
            }
        }
    }

    /// Receives until there is nothing more, something completed, or the budget is used.
    fn receive_some(&mut self) -> Result<(), FabricError> {
        let mut budget = self.tuning.budget;
        self.set_limits();
        loop {
            match self.receive_once(budget > 0)? {
                Received::Some(bytes, more) => {
                    budget = budget.saturating_sub(bytes);
                    let enough = !more || budget == 0 || !self.done.is_empty();
                    // What the transport holds back does not make the socket readable: take all of it (it is not
                    // much), or complete something, so that the caller polls again before it waits.
                    if enough && (!self.transport.has_unread() || !self.done.is_empty()) {
                        return Ok(());
                    }
                }
                Received::Nothing => return Ok(()),
                Received::End => return Err(self.ended()),
            }
        }
    }

    fn receive_once(&mut self, more: bool) -> Result<Received, FabricError> {
        let section = self.participant.enter();
        let cells = self.counters.cells();
        let mut context = Context {
            section: &section,
            ops: &mut self.ops,
            outbox: &mut self.outbox,
            done: &mut self.done,
            cells,
        };
        let needed = self.inbox.parse(&mut context)?;
        let to = self.inbox.places(needed, self.ops.reads() > 0, &section);
        let room = to.bytes();
        let result = self.transport.receive(&to, more, cells);
        let received = match result {
            Ok(0) => Received::End,
            Ok(bytes) => {
                self.inbox.received(needed, bytes);
                let mut context = Context {
                    section: &section,
                    ops: &mut self.ops,
                    outbox: &mut self.outbox,
                    done: &mut self.done,
                    cells,
                };
                self.inbox.parse(&mut context)?;
                Received::Some(bytes, bytes == room)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Received::Nothing,
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) && self.inbox.fault() => {
                Received::Some(0, true)
            }
            Err(error) => {
                drop(section);
                return Err(self.lost(error));
            }
        };
        Ok(received)
    }

    /// Sends and receives. Receiving goes on whatever becomes of sending: neither side ever waits for the other to
    /// take in what it sends before it takes in what the other sends, and what a peer sent before it went away
    /// still arrives.
    fn progress(&mut self) {
        let before = self.send_some();
        if let Err(error) = self.receive_some() {
            // The kernel tells the reason once: here, if sending met it first.
            let error = match (before, error) {
                (Err(first @ FabricError::PeerGone { .. }), FabricError::PeerClosed { .. }) => first,
                (_, error) => error,
            };
            self.die(error);
            return;
        }
        let after = if self.outbox.is_empty() { Ok(()) } else { self.send_some() };
        // If something arrived, the next call fails here again, and by and by nothing arrives any more.
        if let (Err(error), true) = (before.and(after), self.done.is_empty()) {
            self.die(error);
        }
    }

    /// The peer closed the stream.
    fn ended(&self) -> FabricError {
        if self.inbox.is_between_frames() {
            FabricError::PeerClosed { outstanding: self.ops.outstanding() }
        } else {
            self.lost(io::Error::new(io::ErrorKind::UnexpectedEof, "the stream ended inside a frame"))
        }
    }

    fn lost(&self, source: io::Error) -> FabricError {
        match source.downcast::<rustls::Error>() {
            Ok(error) => FabricError::Tls(error),
            Err(source) => FabricError::PeerGone { outstanding: self.ops.outstanding(), source },
        }
    }

    /// The connection is over.
    fn die(&mut self, error: FabricError) {
        self.dead = true;
        self.failure.get_or_insert(error);
        let _ = self.transport.socket().shutdown(std::net::Shutdown::Both);
    }

    fn report(&mut self) -> FabricError {
        self.failure.take().unwrap_or(FabricError::PeerClosed { outstanding: self.ops.outstanding() })
    }

    /// What every READ and WRITE must fulfil. The number of bytes.
    fn check_post(
        &mut self,
        count: usize,
        slices: impl Iterator<Item = LocalSlice>,
    ) -> Result<u64, PostError> {
        if self.dead {
            return Err(PostError::Dead);
        }
        if !(1..=MAX_SEGMENTS).contains(&count) {
            return Err(PostError::Segments { found: count, max: MAX_SEGMENTS });
        }
        if self.ops.is_full() {
            return Err(PostError::Full { capacity: CREDITS });
        }
        let section = self.participant.enter();
        let mut bytes = 0;
        for (segment, slice) in slices.enumerate() {
            if section.local(&slice).is_none() {
                return Err(PostError::NotRegistered { segment });
            }
            bytes += u64::from(slice.len);
        }
        if bytes > MAX_TRANSFER {
            return Err(PostError::Length { found: bytes, max: MAX_TRANSFER });
        }
        Ok(bytes)
    }
}

fn describe(head: &mut Vec<u8>, remote: RemoteSlice, local: LocalSlice) {
    head.extend(Descriptor { rkey: remote.rkey, addr: remote.addr, len: local.len }.encode());
}

impl Endpoint for StreamEndpoint {
    fn kind(&self) -> FabricKind {
        self.kind
    }

    fn class(&self) -> Class {
        self.class
    }

    fn post_read(&mut self, wr: WrId, segments: &[ReadSegment]) -> Result<(), PostError> {
        let bytes = self.check_post(segments.len(), segments.iter().map(|segment| segment.local))?;
        let full = PostError::Full { capacity: CREDITS };
        let (tag, op) = self.ops.start(wr, OpKind::Read).ok_or(full)?;
        op.bytes = bytes;
        op.segments.extend(segments.iter().map(|segment| segment.local));
        self.outbox.request(|head| {
            let segments_count = u8::try_from(segments.len()).unwrap_or(u8::MAX);
            head.extend(Header::ReadRequest { tag, segments: segments_count }.encode());
            for segment in segments {
                describe(head, segment.remote, segment.local);
            }
        });
        Ok(())
    }

    fn post_read_changed(&mut self, wr: WrId, segments: &[ReadSegment]) -> Result<(), PostError> {
        let bytes = self.check_post(segments.len(), segments.iter().map(|segment| segment.local))?;
        let full = PostError::Full { capacity: CREDITS };
        let section = self.participant.enter();
        let (tag, op) = self.ops.start(wr, OpKind::Read).ok_or(full)?;
        op.bytes = bytes;
        op.changed = true;
        op.segments.extend(segments.iter().map(|segment| segment.local));
        let (seed, scratch) = (self.seed, &mut self.scratch);
        self.outbox.request(|head| {
            let segments_count = u8::try_from(segments.len()).unwrap_or(u8::MAX);
            head.extend(Header::ChangedRequest { tag, segments: segments_count, seed }.encode());
            for segment in segments {
                describe(head, segment.remote, segment.local);
            }
            for segment in segments {
                // Registered when it was checked. Should it have gone since, the reply fails for that.
                let piece = section.local(&segment.local);
                let known = piece.map_or(0, |piece| piece.fingerprint(seed, scratch));
                head.extend(known.to_le_bytes());
            }
        });
        Ok(())
    }

    fn post_write(&mut self, wr: WrId, segments: &[WriteSegment]) -> Result<(), PostError> {
        let len = self.check_post(segments.len(), segments.iter().map(|segment| segment.local))?;
        let full = PostError::Full { capacity: CREDITS };
        let (tag, op) = self.ops.start(wr, OpKind::Write).ok_or(full)?;
        op.bytes = len;
        self.outbox.write(tag, segments.iter().map(|segment| segment.local), |head| {
            let segments_count = u8::try_from(segments.len()).unwrap_or(u8::MAX);
            head.extend(Header::WriteRequest { tag, segments: segments_count, len }.encode());
            for segment in segments {
                describe(head, segment.remote, segment.local);
            }
        });
        Ok(())
    }

    fn post_send(&mut self, wr: WrId, message: &[u8]) -> Result<(), PostError> {
        if self.dead {
            return Err(PostError::Dead);
        }
        let too_long = PostError::Length { found: message.len() as u64, max: MAX_MESSAGE as u64 };
        let len = u32::try_from(message.len()).map_err(|_| too_long.clone())?;
        if message.len() > MAX_MESSAGE {
            return Err(too_long);
        }
        let (tag, _) = self.ops.start(wr, OpKind::Send).ok_or(PostError::Full { capacity: CREDITS })?;
        self.outbox.message(tag, |head| {
            head.extend(Header::Message { len }.encode());
            head.extend(message);
        });
        Ok(())
    }

    fn flush(&mut self) -> Result<(), FabricError> {
        if self.dead {
            return Err(self.report());
        }
        self.send_some()
    }

    fn poll(&mut self, out: &mut Completions) -> Result<usize, FabricError> {
        out.clear();
        if !self.dead && self.done.is_empty() {
            self.progress();
        }
        while !out.is_full() {
            let Some(completion) = self.done.pop_front() else { break };
            out.push(completion);
        }
        if out.is_empty() && self.dead {
            return Err(self.report());
        }
        Ok(out.len())
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.transport.socket().as_fd()
    }

    fn wants_write(&self) -> bool {
        !self.dead && (!self.outbox.is_empty() || self.transport.has_unsent())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), FabricError> {
        if !self.done.is_empty() || self.dead {
            return Ok(());
        }
        let failed = FabricError::io("wait for the connection");
        let spin = if self.ops.outstanding() > 0 { self.tuning.spin } else { Duration::ZERO };
        let result = sys::net::spin(self.wait_fd(), self.wants_write(), spin.min(timeout.unwrap_or(spin)))
            .and_then(|ready| {
                if ready { Ok(()) } else { sys::net::wait(self.wait_fd(), self.wants_write(), timeout) }
            });
        result.map_err(failed)
    }

    fn outstanding(&self) -> usize {
        self.ops.outstanding()
    }

    fn capacity(&self) -> usize {
        CREDITS
    }

    fn counters_handle(&self) -> CountersHandle {
        self.counters.clone()
    }

    fn serve(self: Box<Self>, options: ThreadOptions) -> Result<ServeHandle, FabricError> {
        let socket = self.socket().try_clone();
        serving::serve(*self, socket, options)
    }
}

impl Drop for StreamEndpoint {
    fn drop(&mut self) {
        if self.dead {
            return;
        }
        let _ = self.send_some();
        self.transport.close(self.counters.cells());
        // Closing a socket that holds unread bytes resets the connection, and what was sent last might not arrive.
        let mut sink = [0; 16 * 1024];
        let mut iov = Vec::new();
        for _ in 0..64 {
            let mut to = Scatter::new(&mut iov, sink.len());
            to.push_bytes(&mut sink);
            if !matches!(to.recv(self.transport.socket().as_fd()), Ok(received) if received > 0) {
                break;
            }
        }
    }
}
