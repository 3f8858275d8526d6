//! Memory cut into pieces, and which pages of a piece are the process's own.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::{PrivatePart, piece_bytes};
use crate::attach::MappingHints;
use crate::error::{MemoryError, Result};
use crate::qemu_mapping::QemuMapping;
use crate::units::{ByteLen, FileOffset, Hva};

/// Pieces that are moved while one thread is held.
const BATCH: usize = 8;
const PAGE: u64 = 4096;

// Bits of an entry of `/proc/PID/pagemap`.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// Of a file, or of shared anonymous memory: not the process's own.
const FILE: u64 = 1 << 61;
/// Where a swapped page is, or which page is present; zeros for those who may not know.
const PLACE: u64 = (1 << 55) - 1;
/// What the kernel puts where a page without memory is write-protected: the last kind of swap, 31, with the mark for write protection.
/// Another kernel may number it otherwise: then such a page counts as the process's own, which costs time and loses nothing, since no
/// swapped page looks like this.
const MARK: u64 = 31 | (1 << 5);

/// Pieces beside each other.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) whole: QemuMapping,
    pub(super) pieces: Vec<QemuMapping>,
    pub(super) hints: MappingHints,
    pub(super) filled: bool,
}

/// A part, cut at addresses where huge pages begin.
pub(super) fn batches(part: &PrivatePart) -> Vec<Batch> {
    let size = piece_bytes(part.at.page_size);
    let mut pieces = Vec::new();
    let mut at = part.at.hva;
    while at < part.at.end() {
        let end = ((at.0 / size + 1) * size).min(part.at.end().0);
        let file_offset = FileOffset(part.at.file_offset.0 + (at.0 - part.at.hva.0));
        pieces.push(QemuMapping { hva: at, len: ByteLen(end - at.0), file_offset, ..part.at });
        at = Hva(end);
    }
    let batch = |pieces: &[QemuMapping]| {
        let len = ByteLen(pieces.iter().map(|piece| piece.len.0).sum());
        let (pieces, hints) = (pieces.to_vec(), part.hints.clone());
        Batch { whole: QemuMapping { len, ..pieces[0] }, pieces, hints, filled: part.filled }
    };
    pieces.chunks(BATCH).map(batch).collect()
}

/// Runs of pages of a write-protected piece that the process has written since its mapping became private.
pub(super) fn own_runs(pagemap: &File, piece: &QemuMapping) -> Result<Vec<(Hva, ByteLen)>> {
    let step = piece.page_size.bytes();
    let mut runs: Vec<(Hva, ByteLen)> = Vec::new();
    let mut entries = vec![0; ByteLen(piece.len.0.min(2 << 20) / PAGE * 8).as_usize()];
    let mut at = piece.hva;
    while at < piece.end() {
        let bytes = entries.len().min(ByteLen((piece.end().0 - at.0) / PAGE * 8).as_usize());
        let entries = &mut entries[..bytes];
        pagemap
            .read_exact_at(entries, at.0 / PAGE * 8)
            .map_err(|source| MemoryError::Proc { path: "/proc/PID/pagemap".into(), source })?;
        for (number, entry) in (0..).zip(entries.chunks_exact(8)) {
            let hva = Hva(at.0 + number * PAGE);
            if (hva.0 - piece.hva.0).is_multiple_of(step)
                && is_own(u64::from_ne_bytes(entry.try_into().unwrap_or_default()))
            {
                add(&mut runs, hva, ByteLen(step));
            }
        }
        at.0 += bytes as u64 / 8 * PAGE;
    }
    Ok(runs)
}

fn add(runs: &mut Vec<(Hva, ByteLen)>, hva: Hva, len: ByteLen) {
    match runs.last_mut() {
        Some((start, so_far)) if start.add(*so_far) == hva => so_far.0 += len.0,
        _ => runs.push((hva, len)),
    }
}

const fn is_own(entry: u64) -> bool {
    if entry & PRESENT != 0 {
        return entry & FILE == 0;
    }
    entry & SWAPPED != 0 && entry & PLACE != MARK
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::units::PageSize;

    fn part(hva: u64, len: u64, page_size: PageSize) -> PrivatePart {
        let at = QemuMapping {
            hva: Hva(hva),
            len: ByteLen(len),
            file_offset: FileOffset(0),
            file_index: 0,
            page_size,
            shared: false,
        };
        PrivatePart { at, hints: MappingHints::default(), filled: true }
    }

    #[test]
    fn pieces_begin_where_huge_pages_do_and_cover_everything_once() {
        let part = part(0x7f00_0010_3000, (40 << 20) + 0x5000, PageSize::Base4K);
        let all: Vec<QemuMapping> = batches(&part).into_iter().flat_map(|batch| batch.pieces).collect();
        let mut at = part.at.hva;
        for piece in &all {
            assert_eq!(piece.hva, at);
            assert_eq!(part.at.to_file(at), Some(piece.file_offset));
            at = piece.end();
        }
        assert_eq!(at, part.at.end());
        assert!(all[1..].iter().all(|piece| piece.hva.0.is_multiple_of(2 << 20)));
        for batch in batches(&part) {
            assert_eq!(batch.whole.hva, batch.pieces[0].hva);
            assert_eq!(Some(batch.whole.end()), batch.pieces.last().map(|piece| piece.end()));
        }
        assert_eq!(batches(&part_of_gigabytes()).iter().map(|b| b.pieces.len()).sum::<usize>(), 3);
    }

    fn part_of_gigabytes() -> PrivatePart {
        part(0x7f00_0000_0000, 3 << 30, PageSize::Huge1G)
    }

    #[test]
    fn a_mark_is_told_from_a_page_that_is_swapped() {
        assert!(is_own(PRESENT | 0x1234));
        assert!(!is_own(PRESENT | FILE | 0x1234));
        assert!(is_own(SWAPPED | (77 << 5) | 2), "the third swap");
        assert!(!is_own(SWAPPED | MARK | (1 << 57)));
        assert!(is_own(SWAPPED), "who may not see where a page is takes it for one's own");
        assert!(!is_own(0));
    }
}
