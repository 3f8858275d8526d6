//! A connection to a process of this host.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use super::handshake::{Hello, Opening};
use super::peer::PeerProcess;
use crate::counters::CountersHandle;
use crate::error::{FabricError, PostError, RemoteStatus};
use crate::region::{LocalSlice, RemoteSlice};
use crate::serve::ServeHandle;
use crate::stream::{self, PlainSocket, Socket, StreamEndpoint, Transport, Tuning};
use crate::sys;
use crate::sys::net::{Gather, Iov, Scatter};
use crate::table::{Need, Participant, PeerTable, RegionTable, Section, Watcher};
use crate::thread::ThreadOptions;
use crate::wire::CREDITS;
use crate::{
    Class, Completion, CompletionKind, Completions, Endpoint, FabricKind, MAX_MESSAGE, MAX_SEGMENTS,
    MAX_TRANSFER, ReadSegment, WrId, WriteSegment,
};

/// Bytes per system call: deregistration waits for one, and so does the rest of this thread.
const CHUNK: usize = 1 << 20;
/// Bytes after which a poll returns.
const BUDGET: u64 = 2 << 20;
const MESSAGES: Tuning =
    Tuning { chunk: 64 << 10, polite_chunk: 64 << 10, budget: 256 << 10, spin: Duration::ZERO };

/// Work that waits for its turn. Everything goes in the order of posting, so a message follows the bytes of the WRITEs
/// before it.
#[derive(Debug)]
enum Work {
    Transfer(Transfer),
    Send { wr: WrId, message: Vec<u8> },
}

/// One READ or WRITE.
#[derive(Debug)]
struct Transfer {
    wr: WrId,
    need: Need,
    segments: Vec<(LocalSlice, RemoteSlice)>,
}

/// See [`Endpoint`].
#[derive(Debug)]
pub(super) struct LocalEndpoint {
    /// Messages, and the news that the peer is gone.
    messages: StreamEndpoint,
    received: Completions,
    participant: Participant,
    peer: Arc<PeerProcess>,
    queue: VecDeque<Work>,
    done: VecDeque<Completion>,
    spare: Vec<Vec<(LocalSlice, RemoteSlice)>>,
    local: Vec<Iov>,
    remote: Vec<Iov>,
    counters: CountersHandle,
    failure: Option<FabricError>,
    dead: bool,
}

/// How far a chunk got.
enum Chunk {
    Moved(usize),
    Refused(RemoteStatus),
}

impl LocalEndpoint {
    pub(super) fn new(
        stream: UnixStream,
        class: Class,
        opening: Opening,
        hello: &Hello,
        table: PeerTable,
        regions: &Arc<RegionTable>,
    ) -> Result<Self, FabricError> {
        let pid = sys::net::peer_pid(stream.as_fd()).map_err(FabricError::io("ask who the peer is"))?;
        let peer = Arc::new(PeerProcess::new(pid, hello, table)?);
        let watcher: Arc<dyn Watcher> = Arc::<PeerProcess>::clone(&peer);
        regions.watch(&watcher);
        let transport = Transport::Plain(PlainSocket { socket: Socket::Unix(stream) });
        let messages =
            StreamEndpoint::new(FabricKind::Local, class, transport, regions, MESSAGES, &Arc::default())?;
        Ok(Self {
            counters: messages.counters_handle(),
            messages,
            received: Completions::default(),
            participant: opening.participant,
            peer,
            queue: VecDeque::with_capacity(CREDITS),
            done: VecDeque::with_capacity(CREDITS),
            spare: Vec::new(),
            local: Vec::with_capacity(MAX_SEGMENTS),
            remote: Vec::with_capacity(MAX_SEGMENTS),
            failure: None,
            dead: false,
        })
    }

    /// Whether this side may read the peer's memory.
    pub(super) fn probe(&self) -> Result<(), FabricError> {
        self.peer.probe()
    }

    /// Does what was posted, in order, until the budget is used.
    fn work(&mut self) -> Result<(), FabricError> {
        let mut budget = BUDGET;
        while budget > 0 && self.done.len() < CREDITS {
            match self.queue.pop_front() {
                None => break,
                Some(Work::Send { wr, message }) => match self.messages.post_send(wr, &message) {
                    Ok(()) => {}
                    Err(PostError::Full { .. }) => {
                        self.queue.push_front(Work::Send { wr, message });
                        break;
                    }
                    Err(_) => return Err(FabricError::PeerClosed { outstanding: self.outstanding() }),
                },
                Some(Work::Transfer(transfer)) => {
                    let bytes = transfer.bytes();
                    let status = self.transfer(&transfer)?;
                    budget = budget.saturating_sub(bytes);
                    self.complete(transfer, bytes, status);
                }
            }
        }
        Ok(())
    }

    fn complete(&mut self, transfer: Transfer, bytes: u64, status: Result<(), RemoteStatus>) {
        let cells = self.counters.cells();
        let moved = if status.is_ok() { bytes } else { 0 };
        let kind = match transfer.need {
            Need::Read => {
                cells.reads.add(1);
                cells.read_bytes.add(moved);
                cells.bytes_received.add(moved);
                CompletionKind::Read { zero_mask: 0 }
            }
            Need::Write => {
                cells.writes.add(1);
                cells.written_bytes.add(moved);
                cells.bytes_sent.add(moved);
                CompletionKind::Write
            }
        };
        self.done.push_back(Completion { wr: transfer.wr, kind, status });
        self.spare.push(transfer.segments);
    }

    /// Moves the bytes of one request.
    fn transfer(&mut self, transfer: &Transfer) -> Result<Result<(), RemoteStatus>, FabricError> {
        // All of it is looked up before any of it is moved, as a responder would.
        if let Err(refusal) = self.check(transfer) {
            return Ok(Err(refusal));
        }
        let (mut segment, mut in_segment) = (0, 0);
        while segment < transfer.segments.len() {
            match self.chunk(transfer, segment, in_segment)? {
                Chunk::Refused(status) => return Ok(Err(status)),
                Chunk::Moved(mut bytes) => {
                    while let Some((local, _)) = transfer.segments.get(segment) {
                        let left = local.len as usize - in_segment;
                        if bytes < left {
                            in_segment += bytes;
                            break;
                        }
                        bytes -= left;
                        segment += 1;
                        in_segment = 0;
                    }
                }
            }
        }
        Ok(Ok(()))
    }

    fn check(&mut self, transfer: &Transfer) -> Result<(), RemoteStatus> {
        let _section = self.participant.enter();
        for (local, remote) in &transfer.segments {
            self.peer.table().resolve(remote.rkey, remote.addr, local.len, transfer.need)?;
        }
        Ok(())
    }

    /// One system call's worth, from a place inside the request. Neither side's regions go away during it: their
    /// deregistration waits for the section to end.
    fn chunk(
        &mut self,
        transfer: &Transfer,
        segment: usize,
        in_segment: usize,
    ) -> Result<Chunk, FabricError> {
        let section = self.participant.enter();
        if !self.peer.is_open() {
            return Err(FabricError::PeerClosed {
                outstanding: self.messages.outstanding() + self.queue.len() + 1,
            });
        }
        let rest = &transfer.segments[segment..];
        let moved = match transfer.need {
            Need::Read => {
                let mut to = Scatter::new(&mut self.local, CHUNK);
                let found = pieces(rest, in_segment, &section, |piece| to.push_piece(piece));
                let from =
                    remote_ranges(&mut self.remote, rest, in_segment, to.bytes(), transfer.need, &self.peer);
                match found.and(from) {
                    Err(refusal) => return Ok(Chunk::Refused(refusal)),
                    Ok(()) => sys::process::read(self.peer.pid(), &self.remote, &to),
                }
            }
            Need::Write => {
                let mut from = Gather::new(&mut self.local, CHUNK, usize::MAX);
                let found = pieces(rest, in_segment, &section, |piece| from.push_piece(piece));
                let to = remote_ranges(
                    &mut self.remote,
                    rest,
                    in_segment,
                    from.bytes(),
                    transfer.need,
                    &self.peer,
                );
                match found.and(to) {
                    Err(refusal) => return Ok(Chunk::Refused(refusal)),
                    Ok(()) => sys::process::write(self.peer.pid(), &from, &self.remote),
                }
            }
        };
        let outstanding = self.messages.outstanding() + self.queue.len() + 1;
        match moved {
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                Ok(Chunk::Refused(RemoteStatus::Fault))
            }
            Err(error) => Err(self.peer.failed(error, outstanding)),
            Ok(0) => Ok(Chunk::Refused(RemoteStatus::Fault)),
            // If the process has ended, another may have got its number before the call.
            Ok(_) if !self.peer.is_running() => Err(FabricError::PeerClosed { outstanding }),
            Ok(bytes) => Ok(Chunk::Moved(bytes)),
        }
    }

    /// Works, and takes in messages: those that a peer sent before it went away too.
    fn progress(&mut self) {
        let mut failure = self.work().err();
        loop {
            let result = self.messages.poll(&mut self.received);
            self.done.extend(self.received.drain());
            match result {
                Err(error) => failure = failure.or(Some(error)),
                Ok(found) if found > 0 && failure.is_some() => continue,
                Ok(_) => {}
            }
            break;
        }
        if let Some(error) = failure {
            self.die(error);
        }
    }

    fn die(&mut self, mut error: FabricError) {
        let all = self.outstanding();
        if let FabricError::PeerClosed { outstanding } | FabricError::PeerGone { outstanding, .. } =
            &mut error
        {
            *outstanding = all.max(*outstanding);
        }
        self.dead = true;
        self.failure.get_or_insert(error);
        let _ = self.messages.socket().shutdown(std::net::Shutdown::Both);
    }

    fn post(
        &mut self,
        wr: WrId,
        need: Need,
        segments: impl ExactSizeIterator<Item = (LocalSlice, RemoteSlice)>,
    ) -> Result<(), PostError> {
        if self.dead {
            return Err(PostError::Dead);
        }
        let found = segments.len();
        if !(1..=MAX_SEGMENTS).contains(&found) {
            return Err(PostError::Segments { found, max: MAX_SEGMENTS });
        }
        if self.outstanding() >= CREDITS {
            return Err(PostError::Full { capacity: CREDITS });
        }
        let mut kept = self.spare.pop().unwrap_or_default();
        kept.clear();
        kept.extend(segments);
        let transfer = Transfer { wr, need, segments: kept };
        if let Err(error) = self.check_local(&transfer) {
            self.spare.push(transfer.segments);
            return Err(error);
        }
        self.queue.push_back(Work::Transfer(transfer));
        Ok(())
    }

    fn check_local(&mut self, transfer: &Transfer) -> Result<(), PostError> {
        let section = self.participant.enter();
        if let Some(segment) = transfer.segments.iter().position(|(local, _)| section.local(local).is_none())
        {
            return Err(PostError::NotRegistered { segment });
        }
        let found = transfer.bytes();
        if found > MAX_TRANSFER {
            return Err(PostError::Length { found, max: MAX_TRANSFER });
        }
        Ok(())
    }
}

impl Transfer {
    fn bytes(&self) -> u64 {
        self.segments.iter().map(|(local, _)| u64::from(local.len)).sum()
    }
}

/// Gives the local memory of the segments, from a place inside the first.
fn pieces<'s>(
    segments: &[(LocalSlice, RemoteSlice)],
    mut skip: usize,
    section: &'s Section<'_>,
    mut push: impl FnMut(sys::memory::Piece<'s>),
) -> Result<(), RemoteStatus> {
    for (local, _) in segments {
        push(section.local(local).ok_or(RemoteStatus::LocalGone)?.skip(skip));
        skip = 0;
    }
    Ok(())
}

/// Puts the remote ranges of the next `bytes` bytes into `to`.
fn remote_ranges(
    to: &mut Vec<Iov>,
    segments: &[(LocalSlice, RemoteSlice)],
    mut skip: usize,
    mut bytes: usize,
    need: Need,
    peer: &PeerProcess,
) -> Result<(), RemoteStatus> {
    to.clear();
    for (local, remote) in segments {
        if bytes == 0 {
            break;
        }
        let at = peer.table().resolve(remote.rkey, remote.addr, local.len, need)?;
        let len = (local.len as usize - skip).min(bytes);
        to.push(Iov::remote(at + skip as u64, len));
        bytes -= len;
        skip = 0;
    }
    Ok(())
}

impl Endpoint for LocalEndpoint {
    fn kind(&self) -> FabricKind {
        FabricKind::Local
    }

    fn class(&self) -> Class {
        self.messages.class()
    }

    fn post_read(&mut self, wr: WrId, segments: &[ReadSegment]) -> Result<(), PostError> {
        self.post(wr, Need::Read, segments.iter().map(|segment| (segment.local, segment.remote)))
    }

    fn post_write(&mut self, wr: WrId, segments: &[WriteSegment]) -> Result<(), PostError> {
        self.post(wr, Need::Write, segments.iter().map(|segment| (segment.local, segment.remote)))
    }

    fn post_send(&mut self, wr: WrId, message: &[u8]) -> Result<(), PostError> {
        if self.dead {
            return Err(PostError::Dead);
        }
        if message.len() > MAX_MESSAGE {
            return Err(PostError::Length { found: message.len() as u64, max: MAX_MESSAGE as u64 });
        }
        if self.outstanding() >= CREDITS {
            return Err(PostError::Full { capacity: CREDITS });
        }
        self.queue.push_back(Work::Send { wr, message: message.to_vec() });
        Ok(())
    }

    fn flush(&mut self) -> Result<(), FabricError> {
        // Transfers are this thread's own work and are done by `poll`; messages before them can leave now.
        while let Some(Work::Send { wr, message }) = self.queue.front() {
            if self.messages.post_send(*wr, message).is_err() {
                break; // poll says why
            }
            self.queue.pop_front();
        }
        self.messages.flush()
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
            let outstanding = self.outstanding();
            return Err(self.failure.take().unwrap_or(FabricError::PeerClosed { outstanding }));
        }
        Ok(out.len())
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.messages.wait_fd()
    }

    fn wants_write(&self) -> bool {
        !self.dead && self.messages.wants_write()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), FabricError> {
        if self.dead || !self.done.is_empty() || !self.queue.is_empty() {
            return Ok(());
        }
        self.messages.wait(timeout)
    }

    fn outstanding(&self) -> usize {
        self.queue.len() + self.messages.outstanding()
    }

    fn capacity(&self) -> usize {
        CREDITS
    }

    fn counters_handle(&self) -> CountersHandle {
        self.counters.clone()
    }

    fn serve(self: Box<Self>, options: ThreadOptions) -> Result<ServeHandle, FabricError> {
        let socket = self.messages.socket().try_clone();
        stream::serve(*self, socket, options)
    }
}

impl Drop for LocalEndpoint {
    fn drop(&mut self) {
        let _ = self.flush();
        // The peer's transfers end here, not when it hears of it: memory may go away next.
        self.participant.close_door();
        self.peer.wait_quiet();
    }
}
