//! How pages are read: small ones as they are, huge ones in parts, and both in parts where they are compared with what is here.
//!
//! A huge page is never all zero when few of its bytes are used, and never all new when few of them were written: its parts that are
//! zero, or that are here already, do not cross. QEMU follows writes by 4 KiB even in huge pages, the kernel by huge page; this makes
//! up for the difference.

use std::sync::atomic::{AtomicU64, Ordering};

use vmove_fabric::{CompletionKind, Endpoint, MAX_SEGMENTS, PostError, ReadSegment, WrId};
use vmove_memory::{ByteLen, ByteRange, FileOffset, PageIndex, PageRun, PageSize, PageState, RunTicket};

use super::block::Block;
use super::error::PageError;

/// Small pages are compared in parts of this length, in bytes: a fingerprint costs little beside it, and little crosses in vain around what has changed.
pub(super) const COMPARED_PART: u64 = 16 << 10;

/// How a run is read: as it is, since small pages that are zero were named and left out before; or a huge page in [`MAX_SEGMENTS`] parts. `old`: it is
/// [worth comparing](has_old_bytes).
pub(super) fn parts(block: &Block, run: PageRun, old: bool) -> impl ExactSizeIterator<Item = ByteRange> {
    let (start, len) = {
        let whole = block.page_size.range_of(run);
        (whole.start.0, whole.len.0)
    };
    let part = match block.page_size {
        PageSize::Base4K if old => COMPARED_PART,
        PageSize::Base4K => len,
        _ if run.len == 1 => len / MAX_SEGMENTS as u64,
        _ => len,
    };
    let count = usize::try_from(len.div_ceil(part)).unwrap_or(0);
    (0..count).map(move |index| {
        let at = index as u64 * part;
        ByteRange::new(FileOffset(start + at), ByteLen(part.min(len - at)))
    })
}

/// Whether the file has an earlier state of a page, which is worth comparing: only huge pages are, but for the round after a head start, and those of
/// a guest that comes home.
pub(super) fn has_old_bytes(block: &Block, page: PageIndex) -> bool {
    compares(block) && block.table.state(page) != PageState::Absent
}

/// Whether pages of this block may have an earlier state that is worth comparing.
fn compares(block: &Block) -> bool {
    block.page_size != PageSize::Base4K || block.is_home
}

/// Claims the first run that can be claimed in `within` and does not leave its part, and whether the file has an earlier state of it.
pub(super) fn claim(block: &Block, within: PageRun, max: u64) -> Option<(RunTicket, bool)> {
    let mut rest = within;
    loop {
        let first = block.table.find_claimable(rest)?;
        // Somebody may claim that page first: then the guess is about another one, and costs or saves a comparison.
        let old = has_old_bytes(block, first);
        let end = block.part_end(first.0).min(rest.end().0);
        if let Some(ticket) = block.table.claim_run(PageRun::new(first, end - first.0), max) {
            return Some((ticket, old));
        }
        rest = PageRun::new(PageIndex(end), rest.end().0 - end);
    }
}

/// Posts a read of one or more runs, whose parts `segments` are. `old`: these runs, if they are worth comparing; then only what is different crosses.
pub(super) fn post<'a>(
    endpoint: &mut dyn Endpoint,
    wr: WrId,
    segments: &[ReadSegment],
    old: Option<impl Iterator<Item = (&'a Block, PageRun)>>,
) -> Result<Result<(), PostError>, PageError> {
    let Some(runs) = old else { return Ok(endpoint.post_read(wr, segments)) };
    for (block, run) in runs {
        // It may be a hole after all, of a page that was zero, say. Should there be no memory for it, this is an error; a load
        // would be a signal.
        block.mapping().populate(run).map_err(|e| block.file_error(e))?;
    }
    Ok(endpoint.post_read_changed(wr, segments))
}

/// Which segments of a read did not cross: bit i stands for the i-th.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeftOut {
    zero: u64,
    same: u64,
}

impl LeftOut {
    /// `None` if what completed is no read.
    pub(super) fn of(kind: &CompletionKind) -> Option<Self> {
        match *kind {
            CompletionKind::Read { zero_mask: zero } => Some(Self { zero, same: 0 }),
            CompletionKind::ReadChanged { zero_mask: zero, same_mask: same } => Some(Self { zero, same }),
            CompletionKind::Write | CompletionKind::Send | CompletionKind::Received(_) => None,
        }
    }

    /// Whether the i-th segment did not cross.
    pub(super) fn has(self, index: usize) -> bool {
        (self.zero | self.same) >> index & 1 == 1
    }

    /// What it says of the segments behind the first `count`.
    fn behind(self, count: u32) -> Self {
        let shift = |mask: u64| mask.checked_shr(count).unwrap_or(0);
        Self { zero: shift(self.zero), same: shift(self.same) }
    }
}

/// Completes the bytes of `run`, whose parts are the first segments of a read, and counts those that crossed. Returns what the read says
/// of the segments behind them.
pub(super) fn complete(
    block: &Block,
    (run, old): (PageRun, bool),
    left_out: LeftOut,
    crossed: &AtomicU64,
) -> Result<LeftOut, PageError> {
    let mut count = 0;
    for (index, range) in parts(block, run, old).enumerate() {
        count += 1;
        if left_out.zero >> index & 1 == 1 {
            clear(block, run, range)?;
        } else if left_out.same >> index & 1 == 0 {
            crossed.fetch_add(range.len.0, Ordering::Relaxed);
        }
    }
    Ok(left_out.behind(count))
}

/// Writes zeros over a part of `run`.
fn clear(block: &Block, run: PageRun, range: ByteRange) -> Result<(), PageError> {
    static ZEROS: [u8; 32 << 10] = [0; 32 << 10];
    // Should there be no memory for it, this is an error; a store would be a signal.
    block.mapping().populate(run).map_err(|e| block.file_error(e))?;
    let mut at = range.start.0;
    while at < range.end().0 {
        let len = (range.end().0 - at).min(ZEROS.len() as u64);
        let zeros = &ZEROS[..usize::try_from(len).unwrap_or(ZEROS.len())];
        block.mapping().copy_in(FileOffset(at), zeros).map_err(|e| block.file_error(e))?;
        at += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_of_the_pieces_of_one_read_follow_each_other() {
        let kind = CompletionKind::ReadChanged { zero_mask: 0b0101, same_mask: 0b1010 };
        let rest = LeftOut::of(&kind).unwrap().behind(2);
        assert_eq!((rest.zero, rest.same), (0b01, 0b10));
        assert_eq!(rest.behind(64).same, 0, "nothing is behind the last");
        assert!(LeftOut::of(&CompletionKind::Write).is_none());
    }
}
