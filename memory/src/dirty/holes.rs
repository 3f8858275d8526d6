//! Memory that went away.

use crate::error::Result;
use crate::ram::RamFile;
use crate::units::{ByteLen, ByteRange, FileOffset};

/// Finds ranges of a file that became holes.
///
/// A guest that gives memory back (balloon, free-page reporting, virtio-mem) makes pages zero without writing to them.
/// Where a whole 2 MiB goes at once, `PAGEMAP_SCAN` of many kernels sees no page-table entries, and reports nothing: to
/// a copy made earlier the old bytes would look valid. The file system knows.
///
/// Look once per round, after the scan; memory that comes back between two looks is reported by the scan as written.
#[derive(Debug)]
pub struct HoleWatch {
    data: Vec<ByteRange>,
}

impl HoleWatch {
    /// Remembers where the file has data now. Do this before the first bytes are read.
    ///
    /// # Errors
    /// Those of [`RamFile::data_extents`].
    pub fn new(file: &RamFile) -> Result<Self> {
        Ok(Self { data: file.data_extents()? })
    }

    /// Ranges that had data at the last look and have none now; they read as zero. In order.
    ///
    /// # Errors
    /// Those of [`RamFile::data_extents`].
    pub fn became_holes(&mut self, file: &RamFile) -> Result<Vec<ByteRange>> {
        let now = file.data_extents()?;
        let gone = subtract(&self.data, &now);
        self.data = now;
        Ok(gone)
    }

    /// Where the file had data at the last look, in order.
    #[must_use]
    pub fn data(&self) -> &[ByteRange] {
        &self.data
    }
}

/// What is in `all` and not in `taken`; both in order and without overlaps.
fn subtract(all: &[ByteRange], taken: &[ByteRange]) -> Vec<ByteRange> {
    let mut rest = Vec::new();
    let mut taken = taken.iter().peekable();
    for range in all {
        let mut from = range.start.0;
        while let Some(cut) = taken.peek() {
            if cut.start >= range.end() {
                break;
            }
            if cut.start.0 > from {
                rest.push(ByteRange::new(FileOffset(from), ByteLen(cut.start.0 - from)));
            }
            from = from.max(cut.end().0);
            if cut.end() > range.end() {
                break;
            }
            taken.next();
        }
        if from < range.end().0 {
            rest.push(ByteRange::new(FileOffset(from), ByteLen(range.end().0 - from)));
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn extents(bits: &[bool]) -> Vec<ByteRange> {
        let mut found: Vec<ByteRange> = Vec::new();
        for (at, _) in bits.iter().enumerate().filter(|(_, set)| **set) {
            let at = at as u64;
            match found.last_mut() {
                Some(last) if last.end().0 == at => last.len.0 += 1,
                _ => found.push(ByteRange::new(FileOffset(at), ByteLen(1))),
            }
        }
        found
    }

    proptest! {
        #[test]
        fn subtraction_is_byte_wise(bits in prop::collection::vec(any::<(bool, bool)>(), 0..60)) {
            let (a, b): (Vec<bool>, Vec<bool>) = bits.iter().copied().unzip();
            let expected: Vec<bool> = bits.iter().map(|(a, b)| *a && !*b).collect();
            let covered = |ranges: &[ByteRange]| {
                let mut covered = vec![false; bits.len()];
                for at in ranges.iter().flat_map(|r| r.as_range()) {
                    covered[usize::try_from(at).expect("small")] = true;
                }
                covered
            };
            prop_assert_eq!(covered(&subtract(&extents(&a), &extents(&b))), expected);
        }
    }
}
