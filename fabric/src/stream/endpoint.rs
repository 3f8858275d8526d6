//! READs, WRITEs and messages over a byte stream.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::inbox::{Context, Inbox};
use super::ops::{OpKind, Ops};
use super::outbox::{Outbox, SCRATCH, Sent};
use super::transport::Transport;
use super::urgency::Urgency;
use crate::address::{Class, FabricKind};
use crate::connection::{BackEnd, Connection, Done};
use crate::counters::CountersHandle;
use crate::endpoint::{Completion, CompletionKind, MAX_MESSAGE, ReadSegment, WrId, WriteSegment};
use crate::error::{FabricError, PostError};
use crate::region::{LocalSlice, RemoteSlice};
use crate::socket::Socket;
use crate::sys::{self, net::Scatter};
use crate::table::{Participant, RegionTable};
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

/// A connection over a byte stream.
pub(crate) type StreamEndpoint = Connection<Stream>;

/// The back end of a [`StreamEndpoint`].
#[derive(Debug)]
pub(crate) struct Stream {
    kind: FabricKind,
    class: Class,
    transport: Transport,
    participant: Participant,
    ops: Ops,
    outbox: Outbox,
    inbox: Inbox,
    sent: Vec<Sent>,
    /// For fingerprints: the guest does not know it, so it cannot make memory whose change goes unnoticed.
    seed: u64,
    scratch: Box<[u8]>,
    counters: CountersHandle,
    tuning: Tuning,
    urgency: Arc<Urgency>,
}

const FULL: PostError = PostError::Full { capacity: CREDITS };

/// What became of one attempt to receive.
enum Received {
    /// Bytes; whether there may be more at once.
    Some(usize, bool),
    Nothing,
    End,
}

impl StreamEndpoint {
    /// A connection of `kind` over a transport that is ready to carry frames.
    pub(crate) fn over(
        kind: FabricKind,
        class: Class,
        transport: Transport,
        table: &Arc<RegionTable>,
        tuning: Tuning,
        urgency: &Arc<Urgency>,
    ) -> Result<Self, FabricError> {
        Ok(Self::new(Stream {
            kind,
            class,
            transport,
            participant: table.join()?,
            ops: Ops::new(),
            outbox: Outbox::new(),
            inbox: Inbox::new(),
            sent: Vec::with_capacity(CREDITS),
            seed: sys::net::random().map_err(FabricError::io("draw a random number"))?,
            scratch: vec![0; SCRATCH].into_boxed_slice(),
            counters: CountersHandle::default(),
            tuning,
            urgency: Arc::clone(urgency),
        }))
    }
}

impl Stream {
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
    fn send_some(&mut self, done: &mut Done) -> Result<(), FabricError> {
        let mut budget = self.tuning.budget;
        if self.class == Class::Urgent && !self.outbox.is_empty() {
            self.urgency.mark();
        }
        self.set_limits();
        while !self.outbox.is_empty() && budget > 0 {
            let section = self.participant.enter();
            let totals = self.counters.totals();
            let result = self.outbox.send(&mut self.transport, &section, totals, &mut self.sent);
            drop(section);
            self.complete_sent(done);
            match result {
                Ok(bytes) => budget = budget.saturating_sub(bytes.max(1)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(self.lost(error)),
            }
        }
        match self.transport.flush(self.counters.totals()) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(self.lost(error)),
            _ => Ok(()),
        }
    }

    fn complete_sent(&mut self, done: &mut Done) {
        for sent in self.sent.drain(..) {
            match sent {
                Sent::Message { tag } => {
                    let Some(op) = self.ops.get(tag, OpKind::Send) else { continue };
                    done.push_back(Completion { wr: op.wr, kind: CompletionKind::Send, status: Ok(()) });
                    self.ops.finish(tag);
                    self.counters.totals().sends.add(1);
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
    fn receive_some(&mut self, done: &mut Done) -> Result<(), FabricError> {
        let mut budget = self.tuning.budget;
        self.set_limits();
        loop {
            match self.receive_once(budget > 0, done)? {
                Received::Some(bytes, more) => {
                    budget = budget.saturating_sub(bytes);
                    let enough = !more || budget == 0 || !done.is_empty();
                    // What the transport holds back does not make the socket readable: take all of it (it is not
                    // much), or complete something, so that the caller polls again before it waits.
                    if enough && (!self.transport.has_unread() || !done.is_empty()) {
                        return Ok(());
                    }
                }
                Received::Nothing => return Ok(()),
                Received::End => return Err(self.ended()),
            }
        }
    }

    fn receive_once(&mut self, more: bool, done: &mut Done) -> Result<Received, FabricError> {
        let section = self.participant.enter();
        let totals = self.counters.totals();
        let mut context =
            Context { section: &section, ops: &mut self.ops, outbox: &mut self.outbox, done, totals };
        let needed = self.inbox.parse(&mut context)?;
        let to = self.inbox.places(needed, context.ops.reads() > 0, &section);
        let room = to.bytes();
        let result = self.transport.receive(&to, more, totals);
        let received = match result {
            Ok(0) => Received::End,
            Ok(bytes) => {
                self.inbox.received(needed, bytes);
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
}

fn describe(head: &mut Vec<u8>, remote: RemoteSlice, local: LocalSlice) {
    head.extend(Descriptor { rkey: remote.rkey, addr: remote.addr, len: local.len }.encode());
}

impl BackEnd for Stream {
    fn kind(&self) -> FabricKind {
        self.kind
    }

    fn class(&self) -> Class {
        self.class
    }

    fn participant(&mut self) -> &mut Participant {
        &mut self.participant
    }

    fn socket(&self) -> &Socket {
        self.transport.socket()
    }

    fn counters(&self) -> &CountersHandle {
        &self.counters
    }

    fn outstanding(&self) -> usize {
        self.ops.outstanding()
    }

    fn read(
        &mut self,
        wr: WrId,
        segments: &[ReadSegment],
        bytes: u64,
        changed: bool,
    ) -> Result<(), PostError> {
        let (tag, op) = self.ops.start(wr, OpKind::Read).ok_or(FULL)?;
        op.bytes = bytes;
        op.changed = changed;
        op.segments.extend(segments.iter().map(|segment| segment.local));
        let section = changed.then(|| self.participant.enter());
        let (seed, scratch) = (self.seed, &mut self.scratch);
        self.outbox.request(|head| {
            let count = u8::try_from(segments.len()).unwrap_or(u8::MAX);
            if changed {
                head.extend(Header::ChangedRequest { tag, segments: count, seed }.encode());
            } else {
                head.extend(Header::ReadRequest { tag, segments: count }.encode());
            }
            for segment in segments {
                describe(head, segment.remote, segment.local);
            }
            for segment in segments.iter().filter(|_| changed) {
                // Registered when it was checked. Should it have gone since, the reply fails for that.
                let piece = section.as_ref().and_then(|section| section.local(&segment.local));
                let known = piece.map_or(0, |piece| piece.fingerprint(seed, scratch));
                head.extend(known.to_le_bytes());
            }
        });
        Ok(())
    }

    fn write(&mut self, wr: WrId, segments: &[WriteSegment], bytes: u64) -> Result<(), PostError> {
        let (tag, op) = self.ops.start(wr, OpKind::Write).ok_or(FULL)?;
        op.bytes = bytes;
        self.outbox.write(tag, segments.iter().map(|segment| segment.local), |head| {
            let count = u8::try_from(segments.len()).unwrap_or(u8::MAX);
            head.extend(Header::WriteRequest { tag, segments: count, len: bytes }.encode());
            for segment in segments {
                describe(head, segment.remote, segment.local);
            }
        });
        Ok(())
    }

    fn send(&mut self, wr: WrId, message: &[u8]) -> Result<(), PostError> {
        let too_long = PostError::Length { found: message.len() as u64, max: MAX_MESSAGE as u64 };
        let len = u32::try_from(message.len()).map_err(|_| too_long)?;
        let (tag, _) = self.ops.start(wr, OpKind::Send).ok_or(FULL)?;
        self.outbox.message(tag, |head| {
            head.extend(Header::Message { len }.encode());
            head.extend(message);
        });
        Ok(())
    }

    fn flush(&mut self, done: &mut Done) -> Result<(), FabricError> {
        self.send_some(done)
    }

    /// Receiving goes on whatever becomes of sending: neither side ever waits for the other to take in what it sends
    /// before it takes in what the other sends, and what a peer sent before it went away still arrives.
    fn progress(&mut self, done: &mut Done) -> Result<(), FabricError> {
        let before = self.send_some(done);
        if let Err(error) = self.receive_some(done) {
            // The kernel tells the reason once: here, if sending met it first.
            return Err(match (before, error) {
                (Err(first @ FabricError::PeerGone { .. }), FabricError::PeerClosed { .. }) => first,
                (_, error) => error,
            });
        }
        let after = if self.outbox.is_empty() { Ok(()) } else { self.send_some(done) };
        // If something arrived, the next call fails here again, and by and by nothing arrives any more.
        if done.is_empty() { before.and(after) } else { Ok(()) }
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.transport.socket().as_fd()
    }

    fn wants_write(&self) -> bool {
        !self.outbox.is_empty() || self.transport.has_unsent()
    }

    fn wait(&mut self, _: &mut Done, timeout: Option<Duration>) -> Result<(), FabricError> {
        let spin = if self.ops.outstanding() > 0 { self.tuning.spin } else { Duration::ZERO };
        let result = sys::net::spin(self.wait_fd(), self.wants_write(), spin.min(timeout.unwrap_or(spin)))
            .and_then(|ready| {
                if ready { Ok(()) } else { sys::net::wait(self.wait_fd(), self.wants_write(), timeout) }
            });
        result.map_err(FabricError::io("wait for the connection"))
    }

    fn hang_up(&mut self) {
        self.transport.close(self.counters.totals());
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
