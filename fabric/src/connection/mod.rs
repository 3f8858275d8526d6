//! A connection as its user sees it, whichever back end moves the bytes: requests are checked before they are queued,
//! completions are kept until they are polled, and the first failure ends the connection and is told once.

mod serving;

use std::collections::VecDeque;
use std::fmt::Debug;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Duration;

use crate::address::{Class, FabricKind};
use crate::counters::CountersHandle;
use crate::endpoint::{
    Completion, CompletionKind, Completions, Endpoint, MAX_MESSAGE, MAX_SEGMENTS, MAX_TRANSFER, ReadSegment,
    WrId, WriteSegment,
};
use crate::error::{FabricError, PostError, RemoteStatus};
use crate::region::LocalSlice;
use crate::serve::ServeHandle;
use crate::socket::Socket;
use crate::sys;
use crate::table::{Need, Participant};
use crate::thread::ThreadOptions;
use crate::wire::CREDITS;

/// Completions that wait for the next poll, oldest first.
pub(crate) type Done = VecDeque<Completion>;

/// What moves the bytes of a [`Connection`]. It is asked for nothing any more once it has failed.
pub(crate) trait BackEnd: Send + Debug + 'static {
    fn kind(&self) -> FabricKind;

    fn class(&self) -> Class;

    /// Its right to use registered memory.
    fn participant(&mut self) -> &mut Participant;

    /// The socket whose end is the connection's end, on both sides.
    fn socket(&self) -> &Socket;

    fn counters(&self) -> &CountersHandle;

    /// Requests that were queued and have not completed.
    fn outstanding(&self) -> usize;

    /// Queues a READ that was checked, of `bytes` in all; `changed`: see [`Endpoint::post_read_changed`].
    fn read(
        &mut self,
        wr: WrId,
        segments: &[ReadSegment],
        bytes: u64,
        changed: bool,
    ) -> Result<(), PostError>;

    /// Queues a WRITE that was checked, of `bytes` in all.
    fn write(&mut self, wr: WrId, segments: &[WriteSegment], bytes: u64) -> Result<(), PostError>;

    /// Queues a message that was checked.
    fn send(&mut self, wr: WrId, message: &[u8]) -> Result<(), PostError>;

    /// See [`Endpoint::flush`].
    fn flush(&mut self, done: &mut Done) -> Result<(), FabricError>;

    /// Sends, receives and answers, a bounded amount of it. An error ends the connection; what completed before counts.
    fn progress(&mut self, done: &mut Done) -> Result<(), FabricError>;

    /// See [`Endpoint::wait_fd`].
    fn wait_fd(&self) -> BorrowedFd<'_>;

    /// See [`Endpoint::wants_write`].
    fn wants_write(&self) -> bool;

    /// See [`Endpoint::wait`]; nothing has completed.
    fn wait(&mut self, done: &mut Done, timeout: Option<Duration>) -> Result<(), FabricError>;

    /// The connection has failed.
    fn cut(&mut self) {
        let _ = self.socket().shutdown(std::net::Shutdown::Both);
    }

    /// The connection is closed from this side, after the last flush.
    fn hang_up(&mut self) {}
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Connection<B: BackEnd> {
    pub(crate) back: B,
    done: Done,
    /// The connection has ended; holds the reason until a poll has reported it.
    failure: Option<FabricError>,
    dead: bool,
}

impl<B: BackEnd> Connection<B> {
    pub(crate) fn new(back: B) -> Self {
        Self { back, done: VecDeque::with_capacity(CREDITS), failure: None, dead: false }
    }

    /// What every READ and WRITE must fulfil. The number of bytes.
    fn check(&mut self, slices: impl ExactSizeIterator<Item = LocalSlice>) -> Result<u64, PostError> {
        if self.dead {
            return Err(PostError::Dead);
        }
        let found = slices.len();
        if !(1..=MAX_SEGMENTS).contains(&found) {
            return Err(PostError::Segments { found, max: MAX_SEGMENTS });
        }
        self.check_credit()?;
        let section = self.back.participant().enter();
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

    fn check_credit(&self) -> Result<(), PostError> {
        if self.back.outstanding() < CREDITS { Ok(()) } else { Err(PostError::Full { capacity: CREDITS }) }
    }

    fn die(&mut self, mut error: FabricError) {
        let all = self.back.outstanding();
        if let FabricError::PeerClosed { outstanding }
        | FabricError::PeerGone { outstanding, .. }
        | FabricError::PathLost { outstanding, .. } = &mut error
        {
            *outstanding = all.max(*outstanding);
        }
        self.dead = true;
        self.failure = Some(error);
        self.back.cut();
    }
}

impl<B: BackEnd> Endpoint for Connection<B> {
    fn kind(&self) -> FabricKind {
        self.back.kind()
    }

    fn class(&self) -> Class {
        self.back.class()
    }

    fn post_read(&mut self, wr: WrId, segments: &[ReadSegment]) -> Result<(), PostError> {
        let bytes = self.check(segments.iter().map(|segment| segment.local))?;
        self.back.read(wr, segments, bytes, false)
    }

    fn post_read_changed(&mut self, wr: WrId, segments: &[ReadSegment]) -> Result<(), PostError> {
        let bytes = self.check(segments.iter().map(|segment| segment.local))?;
        self.back.read(wr, segments, bytes, true)
    }

    fn post_write(&mut self, wr: WrId, segments: &[WriteSegment]) -> Result<(), PostError> {
        let bytes = self.check(segments.iter().map(|segment| segment.local))?;
        self.back.write(wr, segments, bytes)
    }

    fn post_send(&mut self, wr: WrId, message: &[u8]) -> Result<(), PostError> {
        if self.dead {
            return Err(PostError::Dead);
        }
        if message.len() > MAX_MESSAGE {
            return Err(PostError::Length { found: message.len() as u64, max: MAX_MESSAGE as u64 });
        }
        self.check_credit()?;
        self.back.send(wr, message)
    }

    fn flush(&mut self) -> Result<(), FabricError> {
        if self.dead {
            return Ok(()); // poll says why
        }
        self.back.flush(&mut self.done)
    }

    fn poll(&mut self, out: &mut Completions) -> Result<usize, FabricError> {
        out.clear();
        if !self.dead
            && self.done.is_empty()
            && let Err(error) = self.back.progress(&mut self.done)
        {
            self.die(error);
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
        self.back.wait_fd()
    }

    fn wants_write(&self) -> bool {
        !self.dead && self.back.wants_write()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), FabricError> {
        if self.dead || !self.done.is_empty() {
            return Ok(());
        }
        self.back.wait(&mut self.done, timeout)
    }

    fn round_trip(&self) -> Option<Duration> {
        match self.back.socket() {
            Socket::Tcp(socket) => sys::net::shortest_round_trip(socket.as_fd()).ok().flatten(),
            Socket::Unix(_) => None,
        }
    }

    fn outstanding(&self) -> usize {
        self.back.outstanding()
    }

    fn capacity(&self) -> usize {
        CREDITS
    }

    fn counters_handle(&self) -> CountersHandle {
        self.back.counters().clone()
    }

    /// Where a device or the peer's process moves the bytes, the thread only sleeps as long as the connection lasts.
    fn serve(self: Box<Self>, options: ThreadOptions) -> Result<ServeHandle, FabricError> {
        let socket = self.back.socket().try_clone();
        serving::serve(*self, socket, options)
    }
}

impl<B: BackEnd> Drop for Connection<B> {
    fn drop(&mut self) {
        if !self.dead {
            let _ = self.back.flush(&mut self.done);
            self.back.hang_up();
        }
    }
}

/// The completion of a READ or WRITE of `bytes` that this side or its device has done itself, counted.
pub(crate) fn one_sided(
    counters: &CountersHandle,
    (wr, need, bytes): (WrId, Need, u64),
    status: Result<(), RemoteStatus>,
) -> Completion {
    let totals = counters.totals();
    let moved = if status.is_ok() { bytes } else { 0 };
    let kind = match need {
        Need::Read => {
            totals.reads.add(1);
            totals.read_bytes.add(moved);
            totals.bytes_received.add(moved);
            CompletionKind::Read { zero_mask: 0 }
        }
        Need::Write => {
            totals.writes.add(1);
            totals.written_bytes.add(moved);
            totals.bytes_sent.add(moved);
            CompletionKind::Write
        }
    };
    Completion { wr, kind, status }
}
