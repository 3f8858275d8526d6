//! What was posted: what waits for room in the device's send queue, and what the device has.
//!
//! The device ends the work requests of one queue pair in the order in which it got them, so of the pieces of one
//! request only the last must be told. Pieces between two that are told are a *group*; a group belongs to one request.

use std::collections::VecDeque;

use super::raw::Post;
use crate::endpoint::WrId;
use crate::region::{LocalSlice, RemoteSlice};
use crate::table::Need;

/// Number of pieces after which a long request reports a completion, so that there is room again before it ends.
const GROUP: usize = 32;

/// Work in the order in which it was posted.
#[derive(Debug)]
enum Work {
    Transfer(Transfer),
    Send { wr: WrId, message: Vec<u8> },
}

/// A READ or WRITE that is not yet with the device in full.
#[derive(Debug)]
struct Transfer {
    wr: WrId,
    need: Need,
    segments: Vec<(LocalSlice, RemoteSlice)>,
    bytes: u64,
    /// The next piece: index of its segment, and bytes of that segment that the device has.
    at: usize,
    within: u32,
}

/// A request of which the device has everything, or did have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ending {
    pub(super) wr: WrId,
    pub(super) need: Need,
    pub(super) bytes: u64,
}

/// Pieces that end together.
#[derive(Debug)]
struct Group {
    id: u64,
    pieces: usize,
    ending: Ending,
    /// Whether the request ends with it.
    last: bool,
    /// Of the request, if it ends with this group; else the request is still the first in line.
    segments: Vec<(LocalSlice, RemoteSlice)>,
}

/// Why nothing (more) was taken from the queue.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Nothing waits, or what waits has to wait for room or for WRITEs to end.
    Nothing,
    /// The first in line is a message, and may go.
    Message,
    /// The local memory of the first in line is not registered any more. `started`: the device has a part of it.
    LocalGone { started: bool },
    /// The first in line names a key that no device has. The device has nothing of it.
    BadKey,
}

/// See the module.
#[derive(Debug)]
pub(super) struct SendQueue {
    waiting: VecDeque<Work>,
    groups: VecDeque<Group>,
    /// Pieces that the device has, and how many it takes.
    pieces: usize,
    depth: usize,
    /// Longest piece in bytes.
    longest: u64,
    /// WRITEs posted before the first in line that have not ended.
    writes: usize,
    /// Requests that wait or are with the device.
    open: usize,
    next_id: u64,
    spare: Vec<Vec<(LocalSlice, RemoteSlice)>>,
}

impl SendQueue {
    pub(super) fn new(depth: usize, longest: u32) -> Self {
        Self {
            waiting: VecDeque::new(),
            groups: VecDeque::new(),
            pieces: 0,
            depth,
            // A piece's length must fit beside a whole segment's.
            longest: u64::from(longest.min(1 << 30)),
            writes: 0,
            open: 0,
            next_id: 1,
            spare: Vec::new(),
        }
    }

    /// Requests that have not ended, messages included.
    pub(super) fn open(&self) -> usize {
        self.open
    }

    /// Whether something waits for room.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether the device has something.
    pub(super) fn is_busy(&self) -> bool {
        self.pieces > 0
    }

    /// Queues a READ or WRITE of `bytes` in all.
    pub(super) fn push(
        &mut self,
        wr: WrId,
        need: Need,
        bytes: u64,
        segments: impl Iterator<Item = (LocalSlice, RemoteSlice)>,
    ) {
        let mut kept = self.spare.pop().unwrap_or_default();
        kept.clear();
        kept.extend(segments);
        self.open += 1;
        let transfer = Transfer { wr, need, segments: kept, bytes, at: 0, within: 0 };
        self.waiting.push_back(Work::Transfer(transfer));
    }

    pub(super) fn push_message(&mut self, wr: WrId, message: Vec<u8>) {
        self.open += 1;
        self.waiting.push_back(Work::Send { wr, message });
    }

    /// Takes the message that [`Stop::Message`] announced.
    pub(super) fn pop_message(&mut self) -> Option<(WrId, Vec<u8>)> {
        match self.waiting.pop_front()? {
            Work::Send { wr, message } => {
                self.open -= 1;
                Some((wr, message))
            }
            other @ Work::Transfer(_) => {
                self.waiting.push_front(other);
                None
            }
        }
    }

    /// Puts a message back that could not leave.
    pub(super) fn unpop_message(&mut self, wr: WrId, message: Vec<u8>) {
        self.open += 1;
        self.waiting.push_front(Work::Send { wr, message });
    }

    /// Gives up the first in line.
    pub(super) fn pop_failed(&mut self) -> Option<Ending> {
        match self.waiting.pop_front()? {
            Work::Transfer(transfer) => {
                let ending = Ending { wr: transfer.wr, need: transfer.need, bytes: transfer.bytes };
                self.open -= 1;
                self.spare.push(transfer.segments);
                Some(ending)
            }
            other @ Work::Send { .. } => {
                self.waiting.push_front(other);
                None
            }
        }
    }

    /// Adds pieces for the device to `posts`, as many as it has room for. `key` gives the device's key for local memory
    /// that is registered.
    pub(super) fn fill(&mut self, posts: &mut Vec<Post>, key: impl Fn(&LocalSlice) -> Option<u32>) -> Stop {
        loop {
            let transfer = match self.waiting.front_mut() {
                None => return Stop::Nothing,
                Some(Work::Send { .. }) if self.writes == 0 => return Stop::Message,
                Some(Work::Send { .. }) => return Stop::Nothing,
                Some(Work::Transfer(transfer)) => transfer,
            };
            let ending = Ending { wr: transfer.wr, need: transfer.need, bytes: transfer.bytes };
            let started = transfer.is_started();
            if !started && transfer.segments.iter().any(|(_, remote)| u32::try_from(remote.rkey).is_err()) {
                return Stop::BadKey;
            }
            let mut in_group = 0;
            while transfer.at < transfer.segments.len() && in_group < GROUP && self.pieces < self.depth {
                let (local, remote) = transfer.segments[transfer.at];
                let (Some(lkey), Ok(rkey)) = (key(&local), u32::try_from(remote.rkey)) else {
                    return Stop::LocalGone { started: started || in_group > 0 };
                };
                let skip = u64::from(transfer.within);
                posts.push(Post {
                    id: self.next_id,
                    need: transfer.need,
                    local: local.addr as u64 + skip,
                    lkey,
                    len: transfer.take_piece(self.longest),
                    remote: remote.addr.wrapping_add(skip),
                    rkey,
                    signalled: false,
                });
                in_group += 1;
                self.pieces += 1;
            }
            if in_group == 0 {
                return Stop::Nothing;
            }
            if let Some(post) = posts.last_mut() {
                post.signalled = true;
            }
            let last = transfer.at == transfer.segments.len();
            let segments = if last { std::mem::take(&mut transfer.segments) } else { Vec::new() };
            self.groups.push_back(Group { id: self.next_id, pieces: in_group, ending, last, segments });
            self.next_id += 1;
            if last {
                if ending.need == Need::Write {
                    self.writes += 1;
                }
                self.waiting.pop_front();
            }
        }
    }

    /// The group with this id has ended. The request, if that has ended with it (or failed); `None` otherwise.
    pub(super) fn end(&mut self, id: u64, failed: bool) -> Option<Ending> {
        if self.groups.front()?.id != id {
            return None;
        }
        let group = self.groups.pop_front()?;
        self.pieces -= group.pieces;
        if !group.last && !failed {
            return None;
        }
        self.open -= 1;
        if group.last && group.ending.need == Need::Write {
            self.writes -= 1;
        }
        self.spare.push(group.segments);
        Some(group.ending)
    }

    /// The oldest group that the device has, if local memory of its request is not registered any more.
    pub(super) fn first_lost(&self, key: impl Fn(&LocalSlice) -> Option<u32>) -> Option<u64> {
        let group = self.groups.front()?;
        let segments = match self.waiting.front() {
            Some(Work::Transfer(transfer)) if !group.last => &transfer.segments,
            _ => &group.segments,
        };
        segments.iter().any(|(local, _)| key(local).is_none()).then_some(group.id)
    }
}

impl Transfer {
    /// Whether the device has a part of it.
    fn is_started(&self) -> bool {
        self.at > 0 || self.within > 0
    }

    /// Length of the next piece, which counts as taken: what is left of a segment and of those that go on where it ends,
    /// on both sides.
    fn take_piece(&mut self, longest: u64) -> u32 {
        let (first, _) = self.segments[self.at];
        let left = u64::from(first.len - self.within);
        if left > longest {
            let taken = u32::try_from(longest).unwrap_or(first.len);
            self.within += taken;
            return taken;
        }
        let mut len = left;
        loop {
            let (local, remote) = self.segments[self.at];
            (self.at, self.within) = (self.at + 1, 0);
            let Some((next_local, next_remote)) = self.segments.get(self.at) else { break };
            let goes_on = next_local.key == local.key
                && next_remote.rkey == remote.rkey
                && next_local.addr as u64 == local.addr as u64 + u64::from(local.len)
                && Some(next_remote.addr) == remote.addr.checked_add(u64::from(local.len));
            if !goes_on || len + u64::from(next_local.len) > longest {
                break;
            }
            len += u64::from(next_local.len);
        }
        u32::try_from(len).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests;
