//! Requests of this side that have not completed.

use crate::endpoint::WrId;
use crate::region::LocalSlice;
use crate::wire::CREDITS;

/// What a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OpKind {
    Read,
    Write,
    Send,
}

/// One request. Kept when it completes, so that its memory serves the next.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) wr: WrId,
    pub(super) kind: OpKind,
    pub(super) bytes: u64,
    /// Where a READ lands. Empty for others.
    pub(super) segments: Vec<LocalSlice>,
    /// A READ of what differs from the bytes here.
    pub(super) changed: bool,
    /// Local memory went away while it was being sent.
    pub(super) local_gone: bool,
    /// Slot number plus a multiple of `SLOTS` that grows with every use.
    tag: u32,
    live: bool,
}

/// The requests in flight. A tag names a slot and how often it was used, so that a second reply to the same
/// request, or one to a request of long ago, is noticed.
#[derive(Debug)]
pub(super) struct Ops {
    slots: Vec<Op>,
    free: Vec<u32>,
    reads: usize,
}

const SLOTS: u32 = 128;
const _: () = assert!(SLOTS as usize == CREDITS);

impl Ops {
    pub(super) fn new() -> Self {
        let op = |tag| Op {
            wr: WrId(0),
            kind: OpKind::Send,
            bytes: 0,
            segments: Vec::new(),
            changed: false,
            local_gone: false,
            tag,
            live: false,
        };
        Self { slots: (0..SLOTS).map(op).collect(), free: (0..SLOTS).rev().collect(), reads: 0 }
    }

    pub(super) fn outstanding(&self) -> usize {
        CREDITS - self.free.len()
    }

    /// READs in flight.
    pub(super) fn reads(&self) -> usize {
        self.reads
    }

    /// Takes a slot; the tag and the slot to fill in. `None` without a credit.
    pub(super) fn start(&mut self, wr: WrId, kind: OpKind) -> Option<(u32, &mut Op)> {
        let index = self.free.pop()?;
        let op = &mut self.slots[index as usize];
        op.segments.clear();
        op.wr = wr;
        op.kind = kind;
        op.bytes = 0;
        op.changed = false;
        op.local_gone = false;
        self.reads += usize::from(kind == OpKind::Read);
        op.tag = op.tag.wrapping_add(SLOTS);
        op.live = true;
        Some((op.tag, op))
    }

    /// The request in flight with this tag, if it is of this kind.
    pub(super) fn get(&mut self, tag: u32, kind: OpKind) -> Option<&mut Op> {
        let op = &mut self.slots[(tag % SLOTS) as usize];
        (op.live && op.tag == tag && op.kind == kind).then_some(op)
    }

    /// Gives the slot of a request in flight back.
    pub(super) fn finish(&mut self, tag: u32) {
        let op = &mut self.slots[(tag % SLOTS) as usize];
        debug_assert!(op.live && op.tag == tag, "finished twice");
        op.live = false;
        self.reads -= usize::from(op.kind == OpKind::Read);
        self.free.push(tag % SLOTS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_good_for_one_completion_of_its_own_kind() {
        let mut ops = Ops::new();
        let (tag, _) = ops.start(WrId(7), OpKind::Read).unwrap();
        assert_eq!(ops.get(tag, OpKind::Read).unwrap().wr, WrId(7));
        assert!(ops.get(tag, OpKind::Write).is_none());
        assert!(ops.get(tag.wrapping_add(SLOTS), OpKind::Read).is_none());
        assert_eq!((ops.reads(), ops.outstanding()), (1, 1));
        ops.finish(tag);
        assert!(ops.get(tag, OpKind::Read).is_none());
        let (again, _) = ops.start(WrId(8), OpKind::Read).unwrap();
        assert_ne!(tag, again);
        assert!(
            ops.get(tag, OpKind::Read).is_none(),
            "a reply that comes late does not hit the next request"
        );
    }

    #[test]
    fn credits_run_out_and_come_back() {
        let mut ops = Ops::new();
        let tags: Vec<u32> =
            (0..CREDITS as u64).map(|n| ops.start(WrId(n), OpKind::Write).unwrap().0).collect();
        assert!(ops.outstanding() == CREDITS && ops.start(WrId(0), OpKind::Send).is_none());
        for tag in tags {
            ops.finish(tag);
        }
        assert_eq!(ops.outstanding(), 0);
    }
}
