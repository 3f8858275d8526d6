//! Bytes on their way in.
//!
//! Headers, descriptors and messages go through a staging buffer. Payload goes straight to its place: while a frame
//! has payload to come, the place is what is given to the kernel. As long as READs are outstanding, no more than the
//! next header is taken into the staging buffer, so that the payload behind it need not be copied out of there.

use bytes::{Bytes, BytesMut};

use super::ops::{OpKind, Ops};
use super::outbox::Outbox;
use crate::connection::Done;
use crate::counters::Totals;
use crate::endpoint::{Completion, CompletionKind, MAX_SEGMENTS, WrId};
use crate::error::{FabricError, RemoteStatus};
use crate::region::LocalSlice;
use crate::sys::memory::Piece;
use crate::sys::net::{Iov, Scatter};
use crate::table::{Need, Section};
use crate::wire::{
    DESCRIPTOR_LEN, DecodeError, FINGERPRINT_LEN, HEADER_LEN, Header, SAME_MASK_LEN, TRAILER_LEN, Trailer,
    decode_descriptor, part,
};

const STAGE: usize = 64 * 1024;
/// Where refused payload goes.
const SINK: usize = 64 * 1024;
const _: () = assert!(STAGE >= HEADER_LEN + MAX_SEGMENTS * (DESCRIPTOR_LEN + FINGERPRINT_LEN));

/// What an arriving frame may change.
pub(super) struct Context<'a, 's> {
    pub(super) section: &'a Section<'s>,
    pub(super) ops: &'a mut Ops,
    pub(super) outbox: &'a mut Outbox,
    pub(super) done: &'a mut Done,
    pub(super) totals: &'a Totals,
}

/// The receiving half of a connection.
#[derive(Debug)]
pub(super) struct Inbox {
    stage: Box<[u8]>,
    start: usize,
    end: usize,
    state: State,
    payload: Payload,
    sink: Box<[u8]>,
    iov: Vec<Iov>,
    /// Bytes per system call.
    limit: usize,
}

/// What comes next.
#[derive(Debug)]
enum State {
    Header,
    /// [`Payload`] of a reply or request.
    Payload(Carrier),
    /// The end of a read reply.
    Trailer(ReadReply),
    /// A message; how much is missing.
    Message(BytesMut, usize),
}

#[derive(Debug, Clone, Copy)]
enum Carrier {
    ReadReply(ReadReply),
    WriteRequest { tag: u32 },
}

#[derive(Debug, Clone, Copy)]
struct ReadReply {
    tag: u32,
    zero_mask: u64,
    /// Of an answer to a request for what has changed.
    same_mask: Option<u64>,
}

impl ReadReply {
    fn completion(self) -> CompletionKind {
        let zero_mask = self.zero_mask;
        match self.same_mask {
            None => CompletionKind::Read { zero_mask },
            Some(same_mask) => CompletionKind::ReadChanged { zero_mask, same_mask },
        }
    }
}

/// Where payload goes.
#[derive(Debug, Default)]
struct Payload {
    targets: Vec<LocalSlice>,
    at: usize,
    in_target: u32,
    left: u64,
    /// Refused, or its target went away: what is left goes to the sink.
    refused: Option<RemoteStatus>,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self {
            stage: vec![0; STAGE].into_boxed_slice(),
            start: 0,
            end: 0,
            state: State::Header,
            payload: Payload { targets: Vec::with_capacity(MAX_SEGMENTS), ..Payload::default() },
            sink: vec![0; SINK].into_boxed_slice(),
            iov: Vec::with_capacity(MAX_SEGMENTS + 1),
            limit: 0,
        }
    }

    /// Bytes per system call from now on.
    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Whether the stream may end here.
    pub(super) fn is_between_frames(&self) -> bool {
        matches!(self.state, State::Header) && self.start == self.end
    }

    /// Handles everything that is staged. Returns how many bytes the next step needs in the stage; 0 when it needs
    /// payload.
    pub(super) fn parse(&mut self, cx: &mut Context<'_, '_>) -> Result<usize, FabricError> {
        loop {
            let missing = match self.state {
                State::Header => self.parse_header(cx)?,
                State::Payload(carrier) => self.parse_payload(carrier, cx),
                State::Trailer(reply) => self.parse_trailer(reply, cx)?,
                State::Message(..) => self.parse_message(cx),
            };
            if let Some(missing) = missing {
                return Ok(missing);
            }
        }
    }

    /// Where the next bytes go: the payload's place and the stage behind it, or the stage alone. `needed` is what
    /// [`parse`](Self::parse) returned in the same section.
    pub(super) fn places<'a>(
        &'a mut self,
        needed: usize,
        reads_outstanding: bool,
        section: &'a Section<'_>,
    ) -> Scatter<'a> {
        let mut to = Scatter::new(&mut self.iov, self.limit);
        if needed == 0 {
            // Nothing is staged, or it would have been taken as payload. (And so the stage is empty.)
            self.payload.add_targets(&mut to, &mut self.sink, section);
            if self.payload.left == to.bytes() as u64 {
                // All of it: then also what ends it and the header behind it.
                to.push_bytes(&mut self.stage[..TRAILER_LEN + HEADER_LEN]);
            }
            return to;
        }
        let have = self.end - self.start;
        if self.end + (needed - have) > self.stage.len() || have == 0 {
            self.stage.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, have);
        }
        let most = if reads_outstanding { self.end + (needed - have) } else { self.stage.len() };
        to.push_bytes(&mut self.stage[self.end..most]);
        to
    }

    /// Takes note of bytes received into what [`places`](Self::places) gave.
    pub(super) fn received(&mut self, needed: usize, bytes: usize) {
        let mut staged = bytes;
        if needed == 0 {
            let payload = self.payload.left.min(bytes as u64);
            self.payload.advance(payload);
            staged -= crate::sys::memory::to_usize(payload);
            (self.start, self.end) = (0, 0);
        }
        self.end += staged;
    }

    /// Takes bytes as if the socket had given them; payload goes by way of the stage. How many were taken.
    #[cfg(feature = "fuzzing")]
    pub(super) fn put(&mut self, needed: usize, reads: bool, section: &Section<'_>, bytes: &[u8]) -> usize {
        let room = self.places(needed, reads, section).bytes();
        if needed == 0 {
            (self.start, self.end) = (0, 0);
        }
        let len = bytes.len().min(room).min(self.stage.len() - self.end);
        self.stage[self.end..self.end + len].copy_from_slice(&bytes[..len]);
        self.end += len;
        len
    }

    /// The kernel could not write to the payload's place.
    pub(super) fn fault(&mut self) -> bool {
        let first = self.payload.refused.is_none() && matches!(self.state, State::Payload(_));
        self.payload.refused = Some(RemoteStatus::Fault);
        first
    }

    fn staged(&self) -> &[u8] {
        &self.stage[self.start..self.end]
    }

    /// The next `N` staged bytes, if at least `N` are staged. They stay staged.
    fn peek<const N: usize>(&self) -> Option<[u8; N]> {
        self.staged().first_chunk().copied()
    }

    fn parse_header(&mut self, cx: &mut Context<'_, '_>) -> Result<Option<usize>, FabricError> {
        let Some(bytes) = self.peek::<HEADER_LEN>() else { return Ok(Some(HEADER_LEN)) };
        let header = Header::decode(&bytes).map_err(malformed)?;
        let whole = HEADER_LEN + behind_header(header);
        if self.staged().len() < whole {
            return Ok(Some(whole));
        }
        let asks = matches!(
            header,
            Header::ReadRequest { .. } | Header::ChangedRequest { .. } | Header::WriteRequest { .. }
        );
        if asks && cx.outbox.owes_too_much() {
            return Err(FabricError::protocol("more requests outstanding than the peer has credits for"));
        }
        match header {
            Header::ReadRequest { tag, segments } => {
                let (_, status) = self.grant(segments, Need::Read, cx)?;
                cx.outbox.read_reply(tag, status, &self.payload.targets);
            }
            Header::ChangedRequest { tag, segments, seed } => {
                let (_, status) = self.grant(segments, Need::Read, cx)?;
                let len = usize::from(segments) * FINGERPRINT_LEN;
                let (known, _) = self.stage[self.start..self.end].split_at(len);
                let known =
                    known.chunks_exact(FINGERPRINT_LEN).map(|bytes| u128::from_le_bytes(part(bytes, 0)));
                cx.outbox.changed_reply(tag, status, &self.payload.targets, seed, known);
                self.start += len;
            }
            Header::WriteRequest { tag, segments, len } => {
                let (sum, status) = self.grant(segments, Need::Write, cx)?;
                if sum != len {
                    return Err(FabricError::protocol(format!(
                        "a WRITE of {len} bytes with segments of {sum} bytes"
                    )));
                }
                self.payload.begin(len, status.err());
                self.state = State::Payload(Carrier::WriteRequest { tag });
            }
            Header::ReadReply { tag, status, zero_mask, len } => {
                self.start += HEADER_LEN;
                self.begin_read_reply(ReadReply { tag, zero_mask, same_mask: None }, status, len, cx)?;
            }
            Header::ChangedReply { tag, status, zero_mask, len } => {
                self.start += HEADER_LEN;
                let same = u64::from_le_bytes(part(self.staged(), 0));
                self.start += SAME_MASK_LEN;
                self.begin_read_reply(ReadReply { tag, zero_mask, same_mask: Some(same) }, status, len, cx)?;
            }
            Header::WriteReply { tag, status } => {
                self.start += HEADER_LEN;
                let op = cx.ops.get(tag, OpKind::Write).ok_or_else(unasked)?;
                let status = if op.local_gone { Err(RemoteStatus::LocalGone) } else { status };
                cx.totals.writes.add(1);
                if status.is_ok() {
                    cx.totals.written_bytes.add(op.bytes);
                }
                cx.done.push_back(Completion { wr: op.wr, kind: CompletionKind::Write, status });
                cx.ops.finish(tag);
            }
            Header::Message { len } => {
                self.start += HEADER_LEN;
                self.state = State::Message(BytesMut::with_capacity(len as usize), len as usize);
            }
        }
        Ok(None)
    }

    /// Takes header and descriptors off the stage and looks up what they name; the memory is in
    /// `payload.targets` unless the request is refused. Also the sum of the lengths.
    fn grant(
        &mut self,
        segments: u8,
        need: Need,
        cx: &Context<'_, '_>,
    ) -> Result<(u64, Result<(), RemoteStatus>), FabricError> {
        self.start += HEADER_LEN;
        self.payload.targets.clear();
        let (mut sum, mut status) = (0, Ok(()));
        for _ in 0..segments {
            let bytes = self.peek().ok_or_else(|| FabricError::protocol("a request without its segments"))?;
            self.start += DESCRIPTOR_LEN;
            let wanted = decode_descriptor(&bytes).map_err(malformed)?;
            sum += u64::from(wanted.len);
            match cx.section.grant(wanted.rkey, wanted.addr, wanted.len, need) {
                Ok(slice) => self.payload.targets.push(slice),
                Err(refusal) => status = status.and(Err(refusal)),
            }
        }
        if sum > crate::endpoint::MAX_TRANSFER {
            return Err(malformed(DecodeError::Length(sum)));
        }
        Ok((sum, status))
    }

    fn begin_read_reply(
        &mut self,
        reply: ReadReply,
        status: Result<(), RemoteStatus>,
        len: u64,
        cx: &mut Context<'_, '_>,
    ) -> Result<(), FabricError> {
        let op = cx.ops.get(reply.tag, OpKind::Read).ok_or_else(unasked)?;
        if op.changed != reply.same_mask.is_some() {
            return Err(unasked());
        }
        let (zero, same) = (reply.zero_mask, reply.same_mask.unwrap_or(0));
        let left_out = zero | same;
        let count = op.segments.len();
        let outside = left_out.checked_shr(u32::try_from(count).unwrap_or(64)).unwrap_or(0);
        std::mem::swap(&mut self.payload.targets, &mut op.segments);
        if left_out != 0 {
            let mut index = 0;
            self.payload.targets.retain(|_| {
                index += 1;
                left_out & (1 << (index - 1)) == 0
            });
        }
        let expected: u64 = self.payload.targets.iter().map(|slice| u64::from(slice.len)).sum();
        if status.is_ok() && (len != expected || outside != 0 || zero & same != 0) {
            return Err(FabricError::protocol(format!(
                "a READ reply of {len} bytes where {expected} were asked for (zero mask {zero:#x}, same mask {same:#x})"
            )));
        }
        if len == 0 {
            complete_read(reply, status, 0, cx);
        } else {
            self.payload.begin(len, None);
            self.state = State::Payload(Carrier::ReadReply(reply));
        }
        Ok(())
    }

    /// Copies payload that came into the stage to its place.
    fn parse_payload(&mut self, carrier: Carrier, cx: &mut Context<'_, '_>) -> Option<usize> {
        let staged = &self.stage[self.start..self.end];
        let copied = self.payload.take(staged, cx.section);
        self.start += copied;
        if self.payload.left > 0 {
            return Some(0);
        }
        match carrier {
            Carrier::ReadReply(reply) => self.state = State::Trailer(reply),
            Carrier::WriteRequest { tag } => {
                let lost = self.payload.is_lost(cx.section).then_some(RemoteStatus::Fault);
                let status = self.payload.refused.or(lost).map_or(Ok(()), Err);
                let cell = if status.is_ok() { &cx.totals.writes_served } else { &cx.totals.refused };
                cell.add(1);
                cx.outbox.write_reply(tag, status);
                self.state = State::Header;
            }
        }
        None
    }

    fn parse_trailer(
        &mut self,
        reply: ReadReply,
        cx: &mut Context<'_, '_>,
    ) -> Result<Option<usize>, FabricError> {
        let Some(bytes) = self.peek::<TRAILER_LEN>() else { return Ok(Some(TRAILER_LEN)) };
        self.start += TRAILER_LEN;
        let trailer = Trailer::decode(&bytes).map_err(malformed)?;
        if trailer.tag != reply.tag {
            return Err(FabricError::protocol("a trailer of another reply"));
        }
        let lost = self.payload.refused.is_some() || self.payload.is_lost(cx.section);
        let local = if lost { Err(RemoteStatus::LocalGone) } else { Ok(()) };
        let bytes = self.payload.targets.iter().map(|slice| u64::from(slice.len)).sum();
        complete_read(reply, trailer.status.and(local), bytes, cx);
        self.state = State::Header;
        Ok(None)
    }

    fn parse_message(&mut self, cx: &mut Context<'_, '_>) -> Option<usize> {
        let State::Message(body, missing) = &mut self.state else { return None };
        let staged = &self.stage[self.start..self.end];
        let taken = staged.len().min(*missing);
        body.extend_from_slice(&staged[..taken]);
        self.start += taken;
        *missing -= taken;
        if *missing > 0 {
            return Some((*missing).min(STAGE));
        }
        let body: Bytes = std::mem::take(body).freeze();
        cx.totals.messages.add(1);
        cx.done.push_back(Completion { wr: WrId(0), kind: CompletionKind::Received(body), status: Ok(()) });
        self.state = State::Header;
        None
    }
}

fn complete_read(reply: ReadReply, status: Result<(), RemoteStatus>, bytes: u64, cx: &mut Context<'_, '_>) {
    let Some(op) = cx.ops.get(reply.tag, OpKind::Read) else { return };
    cx.totals.reads.add(1);
    if status.is_ok() {
        cx.totals.read_bytes.add(bytes);
    }
    cx.done.push_back(Completion { wr: op.wr, kind: reply.completion(), status });
    cx.ops.finish(reply.tag);
}

/// Bytes behind a header that are handled together with it.
fn behind_header(header: Header) -> usize {
    match header {
        Header::ReadRequest { segments, .. } | Header::WriteRequest { segments, .. } => {
            usize::from(segments) * DESCRIPTOR_LEN
        }
        Header::ChangedRequest { segments, .. } => usize::from(segments) * (DESCRIPTOR_LEN + FINGERPRINT_LEN),
        Header::ChangedReply { .. } => SAME_MASK_LEN,
        Header::ReadReply { .. } | Header::WriteReply { .. } | Header::Message { .. } => 0,
    }
}

fn unasked() -> FabricError {
    FabricError::protocol("a reply to a request that is not outstanding")
}

fn malformed(error: DecodeError) -> FabricError {
    FabricError::protocol(error.to_string())
}

impl Payload {
    fn begin(&mut self, left: u64, refused: Option<RemoteStatus>) {
        (self.at, self.in_target, self.left, self.refused) = (0, 0, left, refused);
    }

    /// Whether some of its places were behind the end of their file, and zeros have taken them: what came there is lost.
    fn is_lost(&self, section: &Section<'_>) -> bool {
        self.targets.iter().filter_map(|target| section.local(target)).any(Piece::is_broken)
    }

    /// Copies the beginning of `from` to where it goes. How many bytes.
    fn take(&mut self, from: &[u8], section: &Section<'_>) -> usize {
        let mut taken = 0;
        while self.left > 0 && taken < from.len() {
            let mut chunk = (self.left).min((from.len() - taken) as u64);
            if self.refused.is_none() {
                match self.targets.get(self.at).and_then(|target| section.local(target)) {
                    Some(piece) => {
                        let copied = piece.skip(self.in_target as usize).copy_from(&from[taken..]);
                        chunk = chunk.min(copied as u64);
                    }
                    None => self.refused = Some(RemoteStatus::BadKey),
                }
            }
            self.advance(chunk);
            taken += crate::sys::memory::to_usize(chunk);
        }
        taken
    }

    /// Adds the places of what is left, as far as they fit.
    fn add_targets<'a>(&mut self, to: &mut Scatter<'a>, sink: &'a mut [u8], section: &'a Section<'_>) {
        let targets = self.targets.get(self.at..).unwrap_or_default();
        if self.refused.is_none() {
            let mut skip = self.in_target;
            for target in targets {
                let Some(piece) = section.local(target) else {
                    self.refused = Some(RemoteStatus::BadKey);
                    break;
                };
                to.push_piece(piece.skip(skip as usize));
                skip = 0;
                if to.is_full() {
                    break;
                }
            }
        }
        // What was added before a dead target was found is alive and is received first.
        if to.bytes() == 0 {
            let most = self.left.min(sink.len() as u64);
            to.push_bytes(&mut sink[..crate::sys::memory::to_usize(most)]);
        }
    }

    /// Marks `bytes` bytes, at most what is left, as received.
    fn advance(&mut self, bytes: u64) {
        self.left -= bytes;
        let mut bytes = bytes;
        while let Some(target) = self.targets.get(self.at) {
            let here = u64::from(target.len - self.in_target);
            if bytes < here {
                self.in_target += u32::try_from(bytes).unwrap_or(0);
                return;
            }
            bytes -= here;
            self.at += 1;
            self.in_target = 0;
        }
    }
}
