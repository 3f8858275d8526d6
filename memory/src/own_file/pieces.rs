//! Memory cut into pieces, and which pages of a piece are the process's own.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::{PART, PrivatePart};
use crate::attach::MappingHints;
use crate::error::{MemoryError, Result};
use crate::qemu_mapping::QemuMapping;
use crate::units::{ByteLen, FileOffset, Hva, PageSize};

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

/// How many mappings the kernel allows a process (`vm.max_map_count`, Documentation/admin-guide/sysctl/vm.rst).
const MAX_MAPPINGS: &str = "/proc/sys/vm/max_map_count";
/// The kernel's own default.
const USUAL_MAX_MAPPINGS: u64 = 65_530;
/// The part of these that pieces may take. QEMU has its own, and an attempt that was cut off has left some.
const PIECES_SHARE: u64 = 4;

/// How long pieces are.
#[derive(Clone, Copy, Debug)]
pub(super) enum PieceSize {
    /// 2 MiB, or as many huge pages as are needed so that there are at most so many pieces of them in all. The kernel does not join mappings of
    /// hugetlbfs that lie beside each other, so each piece stays a mapping of its own, and with too many the move would fail half-way.
    AtMost(u64),
    /// The same for all.
    #[cfg(test)]
    #[cfg_attr(loom, expect(dead_code, reason = "no process is moved there"))]
    Bytes(u64),
}

impl PieceSize {
    /// As this kernel allows.
    pub(super) fn allowed() -> Self {
        let told = std::fs::read_to_string(MAX_MAPPINGS).ok().and_then(|text| text.trim().parse().ok());
        Self::AtMost(told.unwrap_or(USUAL_MAX_MAPPINGS) / PIECES_SHARE)
    }

    /// Bytes of a piece of this part.
    fn of(self, part: &PrivatePart, all: &[PrivatePart]) -> u64 {
        let most = match self {
            Self::AtMost(most) => most,
            #[cfg(test)]
            Self::Bytes(bytes) => return bytes,
        };
        let page = part.at.page_size;
        if page == PageSize::Base4K {
            return PART;
        }
        // Each part may end in the middle of a piece.
        let huge = || all.iter().filter(|other| other.at.page_size != PageSize::Base4K);
        let pieces = most.saturating_sub(2 * huge().count() as u64).max(1);
        let bytes: u64 = huge().map(|other| other.at.len.0).sum();
        bytes.div_ceil(pieces).next_multiple_of(page.bytes()).max(page.bytes())
    }
}

/// Pieces beside each other.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) whole: QemuMapping,
    pub(super) pieces: Vec<QemuMapping>,
    pub(super) hints: MappingHints,
    pub(super) filled: bool,
}

/// Parts, cut at addresses where pieces begin.
pub(super) fn batches(parts: &[PrivatePart], size: PieceSize) -> Vec<Batch> {
    parts.iter().flat_map(|part| cut(part, size.of(part, parts))).collect()
}

/// A part in pieces of `size` bytes.
fn cut(part: &PrivatePart, size: u64) -> Vec<Batch> {
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
        let cut = |part: PrivatePart| batches(&[part], PieceSize::AtMost(1000));
        let all: Vec<QemuMapping> = cut(part.clone()).into_iter().flat_map(|batch| batch.pieces).collect();
        let mut at = part.at.hva;
        for piece in &all {
            assert_eq!(piece.hva, at);
            assert_eq!(part.at.to_file(at), Some(piece.file_offset));
            at = piece.end();
        }
        assert_eq!(at, part.at.end());
        assert!(all[1..].iter().all(|piece| piece.hva.0.is_multiple_of(2 << 20)));
        for batch in cut(part) {
            assert_eq!(batch.whole.hva, batch.pieces[0].hva);
            assert_eq!(Some(batch.whole.end()), batch.pieces.last().map(|piece| piece.end()));
        }
        assert_eq!(count(&[self::part(0x7f00_0000_0000, 3 << 30, PageSize::Huge1G)], 1000), 3);
    }

    fn count(parts: &[PrivatePart], most: u64) -> u64 {
        batches(parts, PieceSize::AtMost(most)).iter().map(|batch| batch.pieces.len() as u64).sum()
    }

    #[test]
    fn a_large_guest_on_huge_pages_has_no_more_mappings_than_the_kernel_allows() {
        let most = USUAL_MAX_MAPPINGS / PIECES_SHARE;
        // A TiB has 524,288 pages of 2 MiB.
        let halves = [0x10_0000_0000, 0x1f0_0020_0000].map(|hva| part(hva, 512 << 30, PageSize::Huge2M));
        assert!(count(&halves, most) <= most, "{}", count(&halves, most));
        assert!(batches(&halves, PieceSize::AtMost(most)).iter().all(|batch| {
            batch
                .pieces
                .iter()
                .all(|piece| piece.hva.0.is_multiple_of(2 << 20) && piece.len.0 % (2 << 20) == 0)
        }));
        // Few pages are moved one by one, and the kernel joins mappings of small ones.
        assert_eq!(count(&[part(0x4000_0000, 1 << 30, PageSize::Huge2M)], most), 512);
        assert_eq!(count(&[part(0x4000_0000, 1 << 40, PageSize::Base4K)], most), 1 << 19);
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
