//! One connection: posting work, polling completions.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use bytes::Bytes;

use crate::address::{Class, FabricKind};
use crate::counters::{Counters, CountersHandle};
use crate::error::{FabricError, PostError, RemoteStatus};
use crate::region::{LocalSlice, RemoteSlice};
use crate::serve::ServeHandle;
use crate::thread::ThreadOptions;

/// Most segments in one READ or WRITE.
pub const MAX_SEGMENTS: usize = 64;
/// Most bytes that one READ or WRITE moves, over all its segments.
pub const MAX_TRANSFER: u64 = 1 << 30;
/// Most bytes in one message.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// A number of the caller's own that comes back with the completion. The fabric does not interpret it and
/// does not require it to be unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct WrId(pub u64);

/// One contiguous piece of a READ: as many bytes as `local` is long come from `remote`.
#[derive(Debug, Clone, Copy)]
pub struct ReadSegment {
    /// Where the bytes are.
    pub remote: RemoteSlice,
    /// Where they go. The region must live until the completion is polled, or the request fails with
    /// [`RemoteStatus::LocalGone`].
    pub local: LocalSlice,
}

/// One contiguous piece of a WRITE: as many bytes as `local` is long go to `remote`.
#[derive(Debug, Clone, Copy)]
pub struct WriteSegment {
    /// Where the bytes are.
    pub local: LocalSlice,
    /// Where they go.
    pub remote: RemoteSlice,
}

/// What came of a work request, or a message of the peer.
#[derive(Debug, Clone)]
pub struct Completion {
    /// The number given when the request was posted; `WrId(0)` for [`CompletionKind::Received`].
    pub wr: WrId,
    /// What was asked for.
    pub kind: CompletionKind,
    /// Whether it was done. On failure the target memory of a READ holds anything.
    pub status: Result<(), RemoteStatus>,
}

/// Which kind of work a [`Completion`] ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CompletionKind {
    /// Bytes of the peer are in local memory.
    Read {
        /// Bit i set: the i-th segment was all zero bytes at the peer, was **not** transferred, and local
        /// memory was **not** touched: it is for the caller to make it zero. Back ends that cannot know
        /// (local, verbs) always give 0 and transfer everything.
        zero_mask: u64,
    },
    /// Bytes of the peer are in local memory: the answer to [`Endpoint::post_read_changed`] of a back end that can compare.
    ReadChanged {
        /// As for [`CompletionKind::Read`].
        zero_mask: u64,
        /// Bit i set: the i-th segment's bytes at the peer were those in local memory; it was **not** transferred.
        same_mask: u64,
    },
    /// Local bytes are in the peer's memory.
    Write,
    /// The message has left; that the peer read it is known only from an answer of its own.
    Send,
    /// A message of the peer.
    Received(Bytes),
}

/// Where [`Endpoint::poll`] puts what it found. Keep it and pass it again: it does not allocate once warm.
#[derive(Debug)]
pub struct Completions {
    items: Vec<Completion>,
    limit: usize,
}

impl Completions {
    /// Room for at most `limit` completions per poll (at least 1).
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        let limit = limit.max(1);
        Self { items: Vec::with_capacity(limit), limit }
    }

    /// What the last poll found, oldest first.
    pub fn iter(&self) -> std::slice::Iter<'_, Completion> {
        self.items.iter()
    }

    /// Takes out what the last poll found, oldest first.
    pub fn drain(&mut self) -> std::vec::Drain<'_, Completion> {
        self.items.drain(..)
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Whether a back end must stop adding.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.items.len() >= self.limit
    }

    pub(crate) fn clear(&mut self) {
        self.items.clear();
    }

    pub(crate) fn push(&mut self, completion: Completion) {
        self.items.push(completion);
    }
}

impl Default for Completions {
    fn default() -> Self {
        Self::with_limit(64)
    }
}

impl<'a> IntoIterator for &'a Completions {
    type Item = &'a Completion;
    type IntoIter = std::slice::Iter<'a, Completion>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// One connection, owned by one thread.
///
/// Both sides may post READ, WRITE and messages at any time. A side answers the peer's READs and WRITEs only
/// while it polls (tcp), so a side that has nothing else to do should be given to [`Endpoint::serve`].
///
/// Dropping an endpoint closes the connection; what was posted and has not left may be lost.
///
/// Order: a message arrives after the bytes of every WRITE posted before it, and a READ sees them. Nothing
/// else is ordered; in particular completions of different requests come in any order.
pub trait Endpoint: Send + std::fmt::Debug {
    /// The back end.
    fn kind(&self) -> FabricKind;

    /// What the connection was opened for.
    fn class(&self) -> Class;

    /// Queues a READ of 1 to [`MAX_SEGMENTS`] segments. One completion ends it.
    ///
    /// # Errors
    /// See [`PostError`]; nothing was queued.
    fn post_read(&mut self, wr: WrId, segments: &[ReadSegment]) -> Result<(), PostError>;

    /// As [`post_read`](Self::post_read), for memory that holds an earlier state of the peer's: segments whose bytes are the
    /// same on both sides need not be transferred. Local memory must not change until the completion. A back end that
    /// cannot compare (local, verbs) transfers everything and completes with [`CompletionKind::Read`].
    ///
    /// The comparison is of 128-bit fingerprints (XXH3, seeded with a random number of this connection).
    ///
    /// # Errors
    /// See [`PostError`]; nothing was queued.
    fn post_read_changed(&mut self, wr: WrId, segments: &[ReadSegment]) -> Result<(), PostError> {
        self.post_read(wr, segments)
    }

    /// Queues a WRITE of 1 to [`MAX_SEGMENTS`] segments. One completion ends it, when the bytes are in the
    /// peer's memory.
    ///
    /// # Errors
    /// See [`PostError`]; nothing was queued.
    fn post_write(&mut self, wr: WrId, segments: &[WriteSegment]) -> Result<(), PostError>;

    /// Queues a message of at most [`MAX_MESSAGE`] bytes. The bytes are copied.
    ///
    /// # Errors
    /// See [`PostError`]; nothing was queued.
    fn post_send(&mut self, wr: WrId, message: &[u8]) -> Result<(), PostError>;

    /// Hands everything posted so far to the transport, as far as it takes it now; [`poll`](Self::poll) goes
    /// on with the rest. Never blocks.
    ///
    /// # Errors
    /// The connection failed.
    fn flush(&mut self) -> Result<(), FabricError>;

    /// Makes progress: sends, receives, answers the peer, and puts what completed into `out` (whose former
    /// content is dropped). Never blocks, and returns after a bounded amount of work. The number of completions.
    ///
    /// Before waiting for [`wait_fd`](Self::wait_fd) poll until this returns 0.
    ///
    /// # Errors
    /// The connection failed. Completions found before the failure are delivered first, by an earlier call.
    fn poll(&mut self, out: &mut Completions) -> Result<usize, FabricError>;

    /// Readable when [`poll`](Self::poll) has something to do. Wait for `POLLIN`, and for `POLLOUT` too while
    /// [`wants_write`](Self::wants_write).
    fn wait_fd(&self) -> BorrowedFd<'_>;

    /// Whether something waits for room in the transport. Changes with every call that posts, flushes or polls.
    fn wants_write(&self) -> bool;

    /// Sleeps until [`poll`](Self::poll) has something to do, or for `timeout` (`None`: for ever). May return
    /// early.
    ///
    /// # Errors
    /// The wait itself failed.
    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), FabricError>;

    /// The shortest time that a message and its answer have taken on the way, as the transport knows it; `None` if it does not.
    fn round_trip(&self) -> Option<Duration> {
        None
    }

    /// Work requests posted and not completed.
    fn outstanding(&self) -> usize;

    /// Work requests that may be outstanding at once.
    fn capacity(&self) -> usize;

    /// What went over this connection so far.
    fn counters(&self) -> Counters {
        self.counters_handle().read()
    }

    /// The same, to be read from other threads while this one works.
    fn counters_handle(&self) -> CountersHandle;

    /// Answers the peer until the handle is dropped or the peer closes. A back end whose peer needs no answers
    /// (verbs, local) only holds the connection open. A message of the peer ends the connection with an error,
    /// since nobody would read it.
    ///
    /// # Errors
    /// The thread could not be started.
    fn serve(self: Box<Self>, options: ThreadOptions) -> Result<ServeHandle, FabricError>;
}
