//! READs and WRITEs in the memory of a process of this host, and messages to it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use super::handshake::{Hello, Opening};
use super::peer::PeerProcess;
use crate::connection::{BackEnd, Connection, Done, one_sided};
use crate::counters::CountersHandle;
use crate::error::{FabricError, PostError, RemoteStatus};
use crate::region::{LocalSlice, RemoteSlice};
use crate::socket::Socket;
use crate::stream::{StreamEndpoint, Transport, Tuning};
use crate::sys;
use crate::sys::net::{Gather, Iov, Scatter};
use crate::table::{Need, Participant, PeerTable, PeerUser, PeerWatch, RegionTable, Section};
use crate::wire::CREDITS;
use crate::{Class, Completions, Endpoint, FabricKind, MAX_SEGMENTS, ReadSegment, WrId, WriteSegment};

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
    bytes: u64,
    segments: Vec<(LocalSlice, RemoteSlice)>,
}

/// A connection to a process of this host.
pub(super) type LocalEndpoint = Connection<Local>;

/// The back end of a [`LocalEndpoint`].
#[derive(Debug)]
pub(super) struct Local {
    /// Carries messages, and shows when the peer has closed or exited.
    messages: StreamEndpoint,
    received: Completions,
    participant: Participant,
    peer: Arc<PeerProcess>,
    /// Makes deregistration wait for the peer.
    _watch: PeerWatch,
    queue: VecDeque<Work>,
    spare: Vec<Vec<(LocalSlice, RemoteSlice)>>,
    local: Vec<Iov>,
    remote: Vec<Iov>,
    counters: CountersHandle,
}

/// How far a chunk got.
enum Chunk {
    Moved(usize),
    Refused(RemoteStatus),
}

impl LocalEndpoint {
    /// The connection between two sides that have exchanged their hellos.
    pub(super) fn met(
        stream: UnixStream,
        class: Class,
        opening: Opening,
        hello: &Hello,
        table: PeerTable,
        regions: &Arc<RegionTable>,
    ) -> Result<Self, FabricError> {
        let pid = sys::net::peer_pid(stream.as_fd()).map_err(FabricError::io("ask who the peer is"))?;
        let peer = Arc::new(PeerProcess::new(pid, hello, table)?);
        opening.watch.meet(Arc::<PeerProcess>::clone(&peer));
        let transport = Transport::plain(Socket::Unix(stream));
        let messages =
            StreamEndpoint::over(FabricKind::Local, class, transport, regions, MESSAGES, &Arc::default())?;
        Ok(Self::new(Local {
            counters: messages.counters_handle(),
            messages,
            received: Completions::default(),
            participant: opening.participant,
            peer,
            _watch: opening.watch,
            queue: VecDeque::with_capacity(CREDITS),
            spare: Vec::new(),
            local: Vec::with_capacity(MAX_SEGMENTS),
            remote: Vec::with_capacity(MAX_SEGMENTS),
        }))
    }

    /// Whether this side may read the peer's memory.
    pub(super) fn probe(&self) -> Result<(), FabricError> {
        self.back.peer.probe()
    }
}

impl Local {
    /// Does what was posted, in order, until the budget is used.
    fn work(&mut self, done: &mut Done) -> Result<(), FabricError> {
        let mut budget = BUDGET;
        while budget > 0 && done.len() < CREDITS {
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
                    let Transfer { wr, need, bytes, .. } = transfer;
                    let status = self.transfer(&transfer)?;
                    budget = budget.saturating_sub(bytes);
                    done.push_back(one_sided(&self.counters, (wr, need, bytes), status));
                    self.spare.push(transfer.segments);
                }
            }
        }
        Ok(())
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
                    Ok(()) => {
                        let moved = sys::process::read(self.peer.pid(), &self.remote, &to);
                        // Zeros have taken the place of memory that is gone: what came there is lost.
                        if moved.is_ok() && to.is_broken() {
                            return Ok(Chunk::Refused(RemoteStatus::Fault));
                        }
                        moved
                    }
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
                    Ok(()) if from.is_broken() => return Ok(Chunk::Refused(RemoteStatus::Fault)),
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

    fn post(
        &mut self,
        wr: WrId,
        need: Need,
        bytes: u64,
        segments: impl Iterator<Item = (LocalSlice, RemoteSlice)>,
    ) {
        let mut kept = self.spare.pop().unwrap_or_default();
        kept.clear();
        kept.extend(segments);
        self.queue.push_back(Work::Transfer(Transfer { wr, need, bytes, segments: kept }));
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

impl BackEnd for Local {
    fn kind(&self) -> FabricKind {
        FabricKind::Local
    }

    fn class(&self) -> Class {
        self.messages.class()
    }

    fn participant(&mut self) -> &mut Participant {
        &mut self.participant
    }

    fn socket(&self) -> &Socket {
        self.messages.back.socket()
    }

    fn counters(&self) -> &CountersHandle {
        &self.counters
    }

    fn outstanding(&self) -> usize {
        self.queue.len() + self.messages.outstanding()
    }

    /// All of it is copied: nothing crosses a network, so nothing is compared.
    fn read(&mut self, wr: WrId, segments: &[ReadSegment], bytes: u64, _: bool) -> Result<(), PostError> {
        self.post(wr, Need::Read, bytes, segments.iter().map(|segment| (segment.local, segment.remote)));
        Ok(())
    }

    fn write(&mut self, wr: WrId, segments: &[WriteSegment], bytes: u64) -> Result<(), PostError> {
        self.post(wr, Need::Write, bytes, segments.iter().map(|segment| (segment.local, segment.remote)));
        Ok(())
    }

    fn send(&mut self, wr: WrId, message: &[u8]) -> Result<(), PostError> {
        self.queue.push_back(Work::Send { wr, message: message.to_vec() });
        Ok(())
    }

    fn flush(&mut self, _: &mut Done) -> Result<(), FabricError> {
        // Transfers are this thread's own work and are done by `poll`; messages before them can leave now.
        while let Some(Work::Send { wr, message }) = self.queue.front() {
            if self.messages.post_send(*wr, message).is_err() {
                break; // poll says why
            }
            self.queue.pop_front();
        }
        self.messages.flush()
    }

    /// Works, and takes in messages: those that a peer sent before it went away too.
    fn progress(&mut self, done: &mut Done) -> Result<(), FabricError> {
        let worked = self.work(done);
        loop {
            let heard = self.messages.poll(&mut self.received);
            done.extend(self.received.drain());
            match heard {
                Ok(found) if found > 0 && worked.is_err() => {}
                other => return worked.and(other.map(drop)),
            }
        }
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.messages.wait_fd()
    }

    fn wants_write(&self) -> bool {
        self.messages.wants_write()
    }

    fn wait(&mut self, _: &mut Done, timeout: Option<Duration>) -> Result<(), FabricError> {
        if self.queue.is_empty() { self.messages.wait(timeout) } else { Ok(()) }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        // The peer's transfers end here, not when it hears of it: memory may go away next.
        self.participant.close();
        self.peer.wait_quiet();
    }
}
