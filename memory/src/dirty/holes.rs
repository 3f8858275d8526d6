//! Memory that went away.

use std::sync::Arc;

use crate::error::Result;
use crate::pagemap::Pagemap;
use crate::process::Process;
use crate::ram::{Mapping, RamFile};
use crate::units::{ByteLen, ByteRange, FileOffset, Hva};

/// Finds memory that was given back to the host, whether or not new memory took its place since.
///
/// A guest that gives memory back (balloon, free-page reporting, virtio-mem) makes pages zero without writing to them,
/// and `PAGEMAP_SCAN` may not report it: to a copy made earlier the old bytes would look valid. Looking for holes in the
/// file is not enough, for one touch of a punched range gives it memory again, 2 MiB at a time.
///
/// So this watches our own mapping of the file. It has a page-table entry for all memory the file has; whoever punches
/// the file takes these entries away, and only we bring them back. The kernel may take entries away for other reasons:
/// then memory is reported that did not change.
///
/// It also reports which parts of a memory region that was registered with a network adapter have become orphans.
#[derive(Debug)]
pub struct HoleWatch {
    mapping: Arc<Mapping>,
    pagemap: Pagemap,
    /// Where we had no entries after the last look, in order.
    absent: Vec<ByteRange>,
}

/// What a look found; both in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Had memory at the last look and has none now: zero.
    pub holes: Vec<ByteRange>,
    /// Lost its memory and has other memory now: to be read again.
    pub replaced: Vec<ByteRange>,
}

impl HoleWatch {
    /// Begins to watch. Do this before the first bytes are read.
    ///
    /// # Errors
    /// Those of [`RamFile::data_extents`] and [`Mapping::populate`]; [`MemoryError::Proc`](crate::MemoryError::Proc) on
    /// kernels before 6.7.
    pub fn new(file: &RamFile, mapping: &Arc<Mapping>) -> Result<Self> {
        let us = Process::open(std::process::id())?;
        let mut watch =
            Self { mapping: Arc::clone(mapping), pagemap: Pagemap::open(&us)?, absent: vec![file.range()] };
        watch.look(file)?;
        Ok(watch)
    }

    /// What lost its memory since the last look. Call it once per round: after the scan, before bytes are read.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn look(&mut self, file: &RamFile) -> Result<Dropped> {
        self.look_among(&file.data_extents()?)
    }

    /// As [`Self::look`], where these parts of the file had memory a moment ago.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn look_among(&mut self, data: &[ByteRange]) -> Result<Dropped> {
        // After the parts were asked for: what was punched in between is found as replaced, which makes it be read again.
        let absent = self.without_entry()?;
        let lost = subtract(&absent, &self.absent);
        // What is punched from here on has an entry, which it then loses, and is found next time.
        let (holes, filled) = (subtract(&absent, data), intersect(&absent, data));
        for range in &filled {
            self.mapping.populate_read(*range)?;
        }
        let dropped = Dropped { holes: intersect(&lost, &holes), replaced: intersect(&lost, &filled) };
        self.absent = holes;
        Ok(dropped)
    }

    fn without_entry(&mut self) -> Result<Vec<ByteRange>> {
        let base = self.mapping.ptr() as u64;
        let mut found: Vec<ByteRange> = Vec::new();
        self.pagemap.absent(Hva(base), self.mapping.len(), |hva, len| {
            let offset = FileOffset(hva.0 - base);
            match found.last_mut() {
                Some(last) if last.end() == offset => last.len.0 += len.0,
                _ => found.push(ByteRange::new(offset, len)),
            }
        })?;
        Ok(found)
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

/// What is in both; both in order and without overlaps.
fn intersect(a: &[ByteRange], b: &[ByteRange]) -> Vec<ByteRange> {
    let (mut i, mut j, mut both) = (0, 0, Vec::new());
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        both.extend(x.intersection(*y));
        if x.end() <= y.end() {
            i += 1;
        } else {
            j += 1;
        }
    }
    both
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

    fn covered(ranges: &[ByteRange], len: usize) -> Vec<bool> {
        let mut covered = vec![false; len];
        for at in ranges.iter().flat_map(|r| r.as_range()) {
            covered[usize::try_from(at).expect("small")] = true;
        }
        covered
    }

    proptest! {
        #[test]
        fn sets_of_ranges_behave_as_sets(bits in prop::collection::vec(any::<(bool, bool)>(), 0..60)) {
            let (a, b): (Vec<bool>, Vec<bool>) = bits.iter().copied().unzip();
            let (a_ranges, b_ranges) = (extents(&a), extents(&b));
            let difference: Vec<bool> = bits.iter().map(|(a, b)| *a && !*b).collect();
            let common: Vec<bool> = bits.iter().map(|(a, b)| *a && *b).collect();
            prop_assert_eq!(covered(&subtract(&a_ranges, &b_ranges), bits.len()), difference);
            prop_assert_eq!(covered(&intersect(&a_ranges, &b_ranges), bits.len()), common);
        }
    }
}
