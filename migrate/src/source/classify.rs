//! Tells pages with content from zero pages, so that only the former are read by the destination.
//!
//! Holes of the RAM file are zero without a look; elsewhere a page is looked at until its first non-zero word. A page that the guest
//! writes after the look is found by the next scan: the scan came before the look.

use std::ops::Range;

use vmove_memory::{ByteRange, Mapping, PageIndex, PageSize};

use crate::pending::PageSet;
use crate::proto::message::WireRun;

/// A batch is handed on when it names this many runs ...
const BATCH_RUNS: usize = 1024;
/// ... or this many bytes to read: the destination reads one batch while the next is being made.
const BATCH_BYTES: u64 = 8 << 20;

/// One RAM block to be classified.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Number of the block in messages.
    pub block: u16,
    /// Our own mapping of it.
    pub mapping: &'a Mapping,
    /// Parts of its file that hold data, ascending.
    pub extents: &'a [ByteRange],
    /// Page size of its backing.
    pub page_size: PageSize,
}

/// What a classification found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Classified {
    /// Pages named.
    pub pages: u64,
    /// Of these, zero pages.
    pub zero: u64,
}

impl Classified {
    /// Pages that are not zero.
    pub const fn content(&self) -> u64 {
        self.pages - self.zero
    }
}

/// Names every page of `set`, in batches, ascending. `emit` returns false to stop early.
pub fn classify(
    subject: Subject<'_>,
    set: &PageSet,
    mut emit: impl FnMut(Vec<WireRun>) -> bool,
) -> Classified {
    let mut batch =
        Batch { block: subject.block, page: subject.page_size.bytes(), runs: Vec::new(), bytes: 0 };
    let mut found = Classified::default();
    for run in set.runs() {
        for (part, in_hole) in split_by_holes(run, subject.extents, subject.page_size) {
            if in_hole {
                found.zero += part.end - part.start;
                found.pages += part.end - part.start;
                batch.push(part, true);
                continue;
            }
            for page in part {
                // Out of range it cannot be; if it were, the page is read as data and refused there.
                let zero = subject.mapping.is_zero(PageIndex(page)).unwrap_or(false);
                found.pages += 1;
                found.zero += u64::from(zero);
                batch.push(page..page + 1, zero);
                if batch.full() && !emit(batch.take()) {
                    return found;
                }
            }
        }
        if batch.full() && !emit(batch.take()) {
            return found;
        }
    }
    if !batch.runs.is_empty() {
        emit(batch.take());
    }
    found
}

struct Batch {
    block: u16,
    page: u64,
    runs: Vec<WireRun>,
    bytes: u64,
}

impl Batch {
    fn push(&mut self, pages: Range<u64>, zero: bool) {
        let len = pages.end - pages.start;
        if !zero {
            self.bytes += len * self.page;
        }
        match self.runs.last_mut() {
            Some(last) if last.zero == zero && last.start + last.len == pages.start => last.len += len,
            _ => self.runs.push(WireRun { block: self.block, start: pages.start, len, zero }),
        }
    }

    fn full(&self) -> bool {
        self.runs.len() >= BATCH_RUNS || self.bytes >= BATCH_BYTES
    }

    fn take(&mut self) -> Vec<WireRun> {
        self.bytes = 0;
        std::mem::take(&mut self.runs)
    }
}

/// Splits a run of pages at the borders of the data extents: (part, whether it is a hole).
fn split_by_holes(
    run: Range<u64>,
    extents: &[ByteRange],
    page: PageSize,
) -> impl Iterator<Item = (Range<u64>, bool)> {
    let page = page.bytes();
    let mut at = run.start;
    let first = extents.partition_point(|e| e.end().0.div_ceil(page) <= run.start);
    let mut rest = extents[first..].iter();
    let mut next = rest.next();
    std::iter::from_fn(move || {
        if at >= run.end {
            return None;
        }
        let Some(extent) = next else {
            let part = at..run.end;
            at = run.end;
            return Some((part, true));
        };
        // A page that is partly in an extent counts as data.
        let start = extent.start.0 / page;
        let end = extent.end().0.div_ceil(page);
        if at < start {
            let part = at..start.min(run.end);
            at = part.end;
            return Some((part, true));
        }
        let part = at..end.min(run.end);
        at = part.end;
        if at >= end {
            next = rest.next();
        }
        Some((part, false))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vmove_memory::{ByteLen, FileOffset};

    use super::*;

    fn extent(start: u64, len: u64) -> ByteRange {
        ByteRange::new(FileOffset(start * 4096), ByteLen(len * 4096))
    }

    proptest! {
        #[test]
        fn holes_and_data_cover_the_run_once(start in 0u64..64, len in 1u64..64, gaps in proptest::collection::vec((1u64..9, 1u64..9), 0..8)) {
            let mut extents = Vec::new();
            let mut at = 0;
            for (gap, len) in gaps {
                extents.push(extent(at + gap, len));
                at += gap + len;
            }
            let is_data = |p: u64| extents.iter().any(|e| e.start.0 <= p * 4096 && p * 4096 < e.end().0);
            let mut seen = start;
            for (part, hole) in split_by_holes(start..start + len, &extents, PageSize::Base4K) {
                prop_assert_eq!(part.start, seen);
                prop_assert!(part.end > part.start);
                for p in part.clone() {
                    prop_assert_eq!(hole, !is_data(p), "page {}", p);
                }
                seen = part.end;
            }
            prop_assert_eq!(seen, start + len);
        }
    }

    #[test]
    fn batches_name_zero_and_data_runs() {
        let mut bytes = vec![0u8; 16 * 4096];
        bytes[5 * 4096 + 4095] = 1;
        bytes[6 * 4096] = 1;
        // On tmpfs, wherever the machine has its folders for temporary files.
        let fd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut writer = std::fs::File::from(fd.try_clone().unwrap());
        std::io::Write::write_all(&mut writer, &bytes).unwrap();
        let file = vmove_memory::RamFile::from_fd(fd, std::path::Path::new("memfd")).unwrap();
        let mapping = file.map().unwrap();
        let extents = [extent(4, 12)];
        let subject = Subject { block: 3, mapping: &mapping, extents: &extents, page_size: PageSize::Base4K };
        let mut runs = Vec::new();
        let found = classify(subject, &PageSet::full(16), |batch| {
            runs.extend(batch);
            true
        });
        assert_eq!(found, Classified { pages: 16, zero: 14 });
        let flat: Vec<_> = runs.iter().map(|r| (r.start, r.len, r.zero)).collect();
        assert_eq!(flat, [(0, 5, true), (5, 2, false), (7, 9, true)]);
    }
}
