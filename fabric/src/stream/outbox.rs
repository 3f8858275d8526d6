//! Frames on their way out.
//!
//! Two queues feed the wire by turns: what this side posted, in order, and replies to the peer. A frame that has
//! begun is finished before another begins; several are given to the socket in one call.

use std::collections::VecDeque;
use std::io;

use super::transport::Transport;
use crate::counters::Totals;
use crate::endpoint::MAX_SEGMENTS;
use crate::error::RemoteStatus;
use crate::region::LocalSlice;
use crate::sys::net::{Gather, Iov, MAX_IOV};
use crate::table::Section;
use crate::wire::{CREDITS, Header, TRAILER_LEN, Trailer};

/// Segments up to this length are looked through for zeros before they are sent.
const ZERO_CHECK_MAX: u32 = 2 << 20;
/// Takes the place of memory that went away after its length was announced.
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
/// Bytes copied at once when a fingerprint is taken: they stay in the processor's first cache.
pub(super) const SCRATCH: usize = 16 * 1024;

/// One frame.
#[derive(Debug, Default)]
pub(super) struct Frame {
    /// Header, and whatever of the frame is not registered memory.
    head: Vec<u8>,
    /// Registered memory that follows.
    payload: Vec<LocalSlice>,
    /// Fingerprints that the peer has of the payload's segments, and the seed.
    expected: Vec<u128>,
    seed: u64,
    role: Role,
    /// Set when some of the payload was no longer there.
    failed: Option<RemoteStatus>,
    cursor: Cursor,
    trailer: Option<[u8; TRAILER_LEN]>,
}

/// What a frame is to its sender.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Asks for memory of the peer: completes by its reply.
    #[default]
    Request,
    /// Carries a WRITE: completes by its reply too, but not well if its memory was gone.
    Write { tag: u32 },
    /// A message: completes when it has left.
    Message { tag: u32 },
    /// Answers a READ of the peer. Its header is made when its turn comes. `changed`: only what differs from what the peer has.
    ReadReply { tag: u32, status: Result<(), RemoteStatus>, changed: bool },
    /// Answers a WRITE of the peer.
    WriteReply,
}

/// How much of a frame has been sent.
#[derive(Debug, Default, Clone, Copy)]
struct Cursor {
    head: usize,
    segment: usize,
    in_segment: u32,
    trailer: usize,
}

/// A frame that has left and that something waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    Message {
        tag: u32,
    },
    /// A WRITE whose local memory went away.
    BrokenWrite {
        tag: u32,
    },
}

/// Everything that waits to be sent.
#[derive(Debug)]
pub(super) struct Outbox {
    posted: VecDeque<Frame>,
    replies: VecDeque<Frame>,
    /// Frames whose order is settled; the first may be partly sent.
    wire: VecDeque<Frame>,
    wire_bytes: u64,
    replies_next: bool,
    /// Replies that have not left.
    owed: usize,
    spare: Vec<Frame>,
    iov: Vec<Iov>,
    scratch: Box<[u8]>,
    /// Bytes per system call.
    limit: usize,
}

impl Outbox {
    pub(super) fn new() -> Self {
        Self {
            posted: VecDeque::new(),
            replies: VecDeque::new(),
            wire: VecDeque::new(),
            wire_bytes: 0,
            replies_next: false,
            owed: 0,
            spare: Vec::new(),
            iov: Vec::with_capacity(MAX_IOV),
            scratch: vec![0; SCRATCH].into_boxed_slice(),
            limit: 0,
        }
    }

    /// Bytes per system call from now on.
    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.wire.is_empty() && self.posted.is_empty() && self.replies.is_empty()
    }

    /// Whether the peer has used all the credits it may have.
    pub(super) fn owes_too_much(&self) -> bool {
        self.owed >= CREDITS
    }

    /// Queues a READ request. `head` writes the whole frame.
    pub(super) fn request(&mut self, head: impl FnOnce(&mut Vec<u8>)) {
        let mut frame = self.fresh(Role::Request);
        head(&mut frame.head);
        self.posted.push_back(frame);
    }

    /// Queues a WRITE: what `head` writes, then the memory.
    pub(super) fn write(
        &mut self,
        tag: u32,
        payload: impl Iterator<Item = LocalSlice>,
        head: impl FnOnce(&mut Vec<u8>),
    ) {
        let mut frame = self.fresh(Role::Write { tag });
        head(&mut frame.head);
        frame.payload.extend(payload);
        self.posted.push_back(frame);
    }

    /// Queues a message.
    pub(super) fn message(&mut self, tag: u32, head: impl FnOnce(&mut Vec<u8>)) {
        let mut frame = self.fresh(Role::Message { tag });
        head(&mut frame.head);
        self.posted.push_back(frame);
    }

    /// Queues the answer to a READ of the peer: memory, or a refusal (`payload` is then ignored).
    pub(super) fn read_reply(&mut self, tag: u32, status: Result<(), RemoteStatus>, payload: &[LocalSlice]) {
        let mut frame = self.fresh(Role::ReadReply { tag, status, changed: false });
        if status.is_ok() {
            frame.payload.extend_from_slice(payload);
        }
        self.owed += 1;
        self.replies.push_back(frame);
    }

    /// The same for what differs from `expected`, one fingerprint for each piece of `payload`.
    pub(super) fn changed_reply(
        &mut self,
        tag: u32,
        status: Result<(), RemoteStatus>,
        payload: &[LocalSlice],
        seed: u64,
        expected: impl Iterator<Item = u128>,
    ) {
        let mut frame = self.fresh(Role::ReadReply { tag, status, changed: true });
        if status.is_ok() {
            frame.payload.extend_from_slice(payload);
            frame.expected.extend(expected);
            frame.seed = seed;
        }
        self.owed += 1;
        self.replies.push_back(frame);
    }

    /// Queues the answer to a WRITE of the peer.
    pub(super) fn write_reply(&mut self, tag: u32, status: Result<(), RemoteStatus>) {
        let mut frame = self.fresh(Role::WriteReply);
        frame.head.extend(Header::WriteReply { tag, status }.encode());
        self.owed += 1;
        self.replies.push_back(frame);
    }

    fn fresh(&mut self, role: Role) -> Frame {
        let mut frame = self.spare.pop().unwrap_or_default();
        frame.head.clear();
        frame.payload.clear();
        frame.expected.clear();
        Frame { role, failed: None, cursor: Cursor::default(), trailer: None, ..frame }
    }

    /// One system call's worth. Frames that left and matter are added to `sent`. How many bytes went out.
    pub(super) fn send(
        &mut self,
        transport: &mut Transport,
        section: &Section<'_>,
        totals: &Totals,
        sent: &mut Vec<Sent>,
    ) -> io::Result<usize> {
        self.settle(section, totals);
        let result = self.send_gathered(transport, section, totals, usize::MAX);
        let bytes = match result {
            // Some memory is not there. One range at a time finds which.
            Err(error) if is_fault(&error) => self.send_past_fault(transport, section, totals)?,
            other => other?,
        };
        self.advance(bytes, sent);
        Ok(bytes)
    }

    /// Decides which frames come next, until there is enough for one call.
    fn settle(&mut self, section: &Section<'_>, totals: &Totals) {
        let (mut bytes, mut ranges) = (self.wire_bytes, self.wire.len());
        while bytes < self.limit as u64 && ranges < MAX_IOV {
            let from_replies = self.posted.is_empty() || (self.replies_next && !self.replies.is_empty());
            let next = if from_replies { self.replies.pop_front() } else { self.posted.pop_front() };
            let Some(mut frame) = next else { break };
            self.replies_next = !from_replies;
            frame.seal(section, totals, &mut self.scratch);
            bytes += frame.left();
            ranges += 2 + frame.payload.len();
            self.wire.push_back(frame);
        }
        self.wire_bytes = bytes;
    }

    fn send_gathered(
        &mut self,
        transport: &mut Transport,
        section: &Section<'_>,
        totals: &Totals,
        ranges: usize,
    ) -> io::Result<usize> {
        // Before anything borrows the frames: look what has gone away since the last call.
        for frame in &mut self.wire {
            frame.check(section);
        }
        let mut gather = Gather::new(&mut self.iov, self.limit, ranges);
        for frame in &self.wire {
            if gather.is_full() {
                break;
            }
            frame.gather(&mut gather, section);
        }
        if gather.bytes() == 0 { Ok(0) } else { transport.send(&gather, totals) }
    }

    fn send_past_fault(
        &mut self,
        transport: &mut Transport,
        section: &Section<'_>,
        totals: &Totals,
    ) -> io::Result<usize> {
        let result = self.send_gathered(transport, section, totals, 1);
        match (result, self.wire.front_mut()) {
            (Err(error), Some(frame)) if is_fault(&error) => {
                frame.fail(RemoteStatus::Fault);
                self.send_gathered(transport, section, totals, 1)
            }
            (result, _) => result,
        }
    }

    fn advance(&mut self, mut bytes: usize, sent: &mut Vec<Sent>) {
        self.wire_bytes -= bytes as u64;
        while let Some(frame) = self.wire.front_mut() {
            frame.advance(&mut bytes);
            if frame.left() > 0 {
                break;
            }
            match frame.role {
                Role::Message { tag } => sent.push(Sent::Message { tag }),
                Role::Write { tag } if frame.failed.is_some() => sent.push(Sent::BrokenWrite { tag }),
                Role::ReadReply { .. } | Role::WriteReply => self.owed -= 1,
                Role::Request | Role::Write { .. } => {}
            }
            if let Some(frame) = self.wire.pop_front() {
                self.spare.push(frame);
            }
        }
    }
}

fn is_fault(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EFAULT)
}

impl Frame {
    /// Makes what could not be made before the frame's turn: which segments are zero, or what the peer has already, is looked
    /// up just before they would be sent.
    fn seal(&mut self, section: &Section<'_>, totals: &Totals, scratch: &mut [u8]) {
        let Role::ReadReply { tag, status, changed } = self.role else { return };
        let mut status = status;
        let (mut zero_mask, mut same_mask) = (0, 0);
        let mut index = 0;
        let (expected, seed) = (&self.expected, self.seed);
        self.payload.retain(|slice| {
            let bit = 1_u64 << (index % MAX_SEGMENTS);
            let known = expected.get(index).copied();
            index += 1;
            let Some(piece) = section.local(slice) else {
                status = Err(RemoteStatus::BadKey);
                return true;
            };
            let zero = slice.len <= ZERO_CHECK_MAX && piece.is_zero();
            zero_mask |= if zero { bit } else { 0 };
            let same = !zero && known.is_some_and(|known| known == piece.fingerprint(seed, scratch));
            same_mask |= if same { bit } else { 0 };
            if piece.is_broken() {
                status = Err(RemoteStatus::Fault);
            }
            !zero && !same
        });
        if status.is_err() {
            self.payload.clear();
            (zero_mask, same_mask) = (0, 0);
            totals.refused.add(1);
        } else {
            totals.reads_served.add(1);
            totals.zero_segments.add(u64::from(zero_mask.count_ones()));
            totals.same_segments.add(u64::from(same_mask.count_ones()));
        }
        let len = self.payload.iter().map(|slice| u64::from(slice.len)).sum();
        if changed {
            self.head.extend(Header::ChangedReply { tag, status, zero_mask, len }.encode());
            self.head.extend(same_mask.to_le_bytes());
        } else {
            self.head.extend(Header::ReadReply { tag, status, zero_mask, len }.encode());
        }
        if len > 0 {
            self.trailer = Some(Trailer { tag, status: Ok(()) }.encode());
        }
    }

    /// The rest of the payload will be zeros, and the trailer says so.
    fn fail(&mut self, status: RemoteStatus) {
        self.failed = Some(status);
        if let Role::ReadReply { tag, .. } = self.role {
            self.trailer = Some(Trailer { tag, status: Err(status) }.encode());
        }
    }

    /// Notices memory that was deregistered, or whose file was shortened.
    fn check(&mut self, section: &Section<'_>) {
        if self.failed.is_some() {
            return;
        }
        let refusal =
            self.payload[self.cursor.segment..].iter().find_map(|slice| match section.local(slice) {
                None => Some(RemoteStatus::BadKey),
                // The kernel would send zeros that have taken the place of what is gone.
                Some(piece) => piece.is_broken().then_some(RemoteStatus::Fault),
            });
        if let Some(refusal) = refusal {
            self.fail(refusal);
        }
    }

    /// Adds what has not been sent, as far as it fits. [`check`](Self::check) has been called in this section.
    fn gather<'a>(&'a self, to: &mut Gather<'a>, section: &'a Section<'_>) {
        to.push_bytes(&self.head[self.cursor.head..]);
        let mut skip = self.cursor.in_segment;
        for slice in &self.payload[self.cursor.segment..] {
            if to.is_full() {
                return;
            }
            match section.local(slice).filter(|_| self.failed.is_none()) {
                Some(piece) => to.push_piece(piece.skip(skip as usize)),
                None => {
                    let mut left = (slice.len - skip) as usize;
                    while left > 0 && !to.is_full() {
                        let len = left.min(ZEROS.len());
                        to.push_bytes(&ZEROS[..len]);
                        left -= len;
                    }
                }
            }
            skip = 0;
        }
        if let Some(trailer) = &self.trailer {
            to.push_bytes(&trailer[self.cursor.trailer..]);
        }
    }

    /// Bytes that have not been sent.
    fn left(&self) -> u64 {
        let payload: u64 = self.payload[self.cursor.segment..].iter().map(|slice| u64::from(slice.len)).sum();
        let trailer = self.trailer.map_or(0, |trailer| trailer.len() - self.cursor.trailer);
        (self.head.len() - self.cursor.head + trailer) as u64 + payload - u64::from(self.cursor.in_segment)
    }

    /// Marks up to `bytes` bytes as sent, and takes them off.
    fn advance(&mut self, bytes: &mut usize) {
        let mut take = |most: usize| {
            let taken = most.min(*bytes);
            *bytes -= taken;
            taken
        };
        self.cursor.head += take(self.head.len() - self.cursor.head);
        while let Some(slice) = self.payload.get(self.cursor.segment) {
            let left = slice.len - self.cursor.in_segment;
            let taken = take(left as usize);
            if taken < left as usize {
                self.cursor.in_segment += u32::try_from(taken).unwrap_or(left);
                return;
            }
            self.cursor.segment += 1;
            self.cursor.in_segment = 0;
        }
        if let Some(trailer) = &self.trailer {
            self.cursor.trailer += take(trailer.len() - self.cursor.trailer);
        }
    }
}
