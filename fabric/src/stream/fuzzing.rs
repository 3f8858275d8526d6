//! Bytes of a peer on a connection that has requests under way.
//!
//! Rules (for the `unsafe` in this file):
//! 1. The memory of a region is leaked: it is valid for ever.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use super::inbox::{Context, Inbox};
use super::ops::{OpKind, Ops};
use super::outbox::Outbox;
use crate::connection::Done;
use crate::counters::CountersHandle;
use crate::error::FabricError;
use crate::region::LocalSlice;
use crate::table::RegionTable;
use crate::wire::{Descriptor, HEADER_LEN, Header, Trailer};
use crate::{Access, MemoryArea, Region, WrId};

/// Stands in the input for the key of the memory that may be read and written.
pub const KEY: [u8; 8] = *b"the-key!";
/// Bytes of that memory, and of what READs land in.
const LEN: u32 = 8192;

/// A table with a region that the peer may use, and one for READs of this side.
struct Memory {
    table: Arc<RegionTable>,
    shared: Region,
    target: Region,
}

impl Memory {
    fn new() -> Result<Self, FabricError> {
        let table = RegionTable::private()?;
        let area = || {
            let bytes: &'static mut [u8] = vec![0; LEN as usize].leak();
            // SAFETY: rule 1.
            unsafe { MemoryArea::new(NonNull::from(bytes).cast(), u64::from(LEN)) }
        };
        let both = Access { remote_read: true, remote_write: true };
        let (shared, target) = (table.register(area(), both)?, table.register(area(), Access::LOCAL)?);
        Ok(Self { table, shared, target })
    }

    fn slice(&self, offset: u64, len: u32) -> LocalSlice {
        self.target.local(offset, len).expect("inside")
    }
}

thread_local! {
    /// Made once: it costs more than an input.
    static MEMORY: Memory = Memory::new().expect("memory for regions");
}

/// A peer's byte stream. Outstanding are a READ of two segments (tag 128), one of what has changed (129) and a WRITE (130).
pub fn frames(bytes: &[u8]) {
    MEMORY.with(|memory| {
        let mut bytes = bytes.to_vec();
        let key = memory.shared.remote().rkey.to_le_bytes();
        let mut at = 0;
        while let Some(found) = bytes[at..].windows(KEY.len()).position(|window| window == KEY) {
            bytes[at + found..at + found + KEY.len()].copy_from_slice(&key);
            at += found + KEY.len();
        }
        // An error ends the connection.
        drop(receive(memory, &bytes));
    });
}

fn receive(memory: &Memory, mut bytes: &[u8]) -> Result<(), FabricError> {
    let mut participant = memory.table.join()?;
    let (mut ops, mut outbox, mut inbox) = (Ops::new(), Outbox::new(), Inbox::new());
    for (kind, changed) in [(OpKind::Read, false), (OpKind::Read, true), (OpKind::Write, false)] {
        if let Some((_, op)) = ops.start(WrId(1), kind) {
            op.changed = changed;
            op.bytes = 2 * 4096;
            if kind == OpKind::Read {
                op.segments = vec![memory.slice(0, 4096), memory.slice(4096, 4096)];
            }
        }
    }
    inbox.set_limit(64 << 10);
    let (counters, mut done) = (CountersHandle::default(), Done::new());
    loop {
        let section = participant.enter();
        let totals = counters.totals();
        let mut context =
            Context { section: &section, ops: &mut ops, outbox: &mut outbox, done: &mut done, totals };
        let needed = inbox.parse(&mut context)?;
        let taken = inbox.put(needed, context.ops.reads() > 0, &section, bytes);
        if taken == 0 {
            assert!(bytes.is_empty(), "bytes have come and are not taken");
            return Ok(());
        }
        bytes = &bytes[taken..];
    }
}

/// Valid input of [`frames`].
#[must_use]
pub fn frames_seeds() -> Vec<Vec<u8>> {
    let segment = Descriptor { rkey: u64::from_le_bytes(KEY), addr: 64, len: 32 }.encode();
    let ok = Ok(());
    let frame = |header: Header, rest: &[&[u8]]| {
        let head: [u8; HEADER_LEN] = header.encode();
        [&[&head[..]], rest].concat().concat()
    };
    let trailer = |tag| Trailer { tag, status: ok }.encode();
    let page = [7; 4096];
    vec![
        frame(Header::ReadRequest { tag: 1, segments: 2 }, &[&segment, &segment]),
        frame(Header::ChangedRequest { tag: 1, segments: 1, seed: 3 }, &[&segment, &[5; 16]]),
        frame(Header::WriteRequest { tag: 1, segments: 1, len: 32 }, &[&segment, &[9; 32]]),
        frame(Header::ReadReply { tag: 128, status: ok, zero_mask: 1, len: 4096 }, &[&page, &trailer(128)]),
        frame(Header::ReadReply { tag: 128, status: ok, zero_mask: 3, len: 0 }, &[]),
        frame(
            Header::ChangedReply { tag: 129, status: ok, zero_mask: 1, len: 0 },
            &[&2_u64.to_le_bytes(), &trailer(129)],
        ),
        frame(Header::WriteReply { tag: 130, status: ok }, &[]),
        frame(Header::Message { len: 5 }, &[b"hello"]),
    ]
}
