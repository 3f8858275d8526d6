//! Which pieces of a file have been copied.

use std::sync::atomic::{AtomicU8, Ordering};

use super::FileOffset;
use crate::units::{ByteLen, ByteRange};

/// Bytes copied for one writer: so little that it waits for 20 us or so, so much that one that goes through memory in order waits
/// seldom.
pub(super) const PIECE: usize = 64 << 10;

const PROTECTED: u8 = 0;
const CLAIMED: u8 = 1;
const KEPT: u8 = 2;

/// What came of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// The caller is to copy it.
    Ours,
    /// Another thread copies it, and has not lifted its protection yet.
    Others,
    /// It is in the copy; its protection is lifted, or about to be.
    Kept,
}

/// The pieces of one file.
#[derive(Debug)]
pub(super) struct Pieces {
    states: Box<[AtomicU8]>,
    bytes: ByteLen,
}

impl Pieces {
    pub(super) fn new(bytes: ByteLen) -> Self {
        let count = bytes.as_usize().div_ceil(PIECE);
        Self { states: (0..count).map(|_| AtomicU8::new(PROTECTED)).collect(), bytes }
    }

    pub(super) fn len(&self) -> usize {
        self.states.len()
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes.0
    }

    /// The piece with this byte.
    pub(super) const fn of(offset: FileOffset) -> usize {
        ByteLen(offset.0).as_usize() / PIECE
    }

    pub(super) fn range(&self, piece: usize) -> ByteRange {
        let start = (piece * PIECE) as u64;
        ByteRange::new(FileOffset(start), ByteLen((self.bytes.0 - start).min(PIECE as u64)))
    }

    pub(super) fn claim(&self, piece: usize) -> Claim {
        let claimed =
            self.states[piece].compare_exchange(PROTECTED, CLAIMED, Ordering::AcqRel, Ordering::Acquire);
        match claimed {
            Ok(_) => Claim::Ours,
            Err(CLAIMED) => Claim::Others,
            Err(_) => Claim::Kept,
        }
    }

    pub(super) fn kept(&self, piece: usize) {
        self.states[piece].store(KEPT, Ordering::Release);
    }

    pub(super) fn all_kept(&self) -> bool {
        self.states.iter().all(|state| state.load(Ordering::Acquire) == KEPT)
    }
}
