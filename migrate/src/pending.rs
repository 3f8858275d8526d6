//! Which pages the destination does not have a good copy of: one bit per page of a RAM block.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A set of pages that a peer sent and that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WireSetError(&'static str);

/// A set of pages of one RAM block. Page numbers count from the start of the block, in pages of its backing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageSet {
    words: Vec<u64>,
    pages: u64,
}

impl PageSet {
    /// The empty set of a block of `pages` pages.
    #[must_use]
    pub fn empty(pages: u64) -> Self {
        Self { words: vec![0; words_for(pages)], pages }
    }

    /// The set of all pages of a block.
    #[must_use]
    pub fn full(pages: u64) -> Self {
        let mut set = Self::empty(pages);
        set.insert(0..pages);
        set
    }

    /// Number of pages of the block (not of the set).
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.pages
    }

    /// Number of pages in the set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|w| *w == 0)
    }

    /// Whether `page` is in the set; false beyond the block.
    #[must_use]
    pub fn contains(&self, page: u64) -> bool {
        page < self.pages && self.words[index(page)] >> (page % 64) & 1 == 1
    }

    /// Adds a range; what lies beyond the block is left out.
    pub fn insert(&mut self, range: Range<u64>) {
        self.for_words(range, |word, mask| *word |= mask);
    }

    /// Removes a range; what lies beyond the block is left out.
    pub fn remove(&mut self, range: Range<u64>) {
        self.for_words(range, |word, mask| *word &= !mask);
    }

    /// Adds every page of `other`, which must be of the same block.
    pub fn union(&mut self, other: &Self) {
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            *mine |= theirs;
        }
    }

    /// Pages that are in this set and in `other`, which must be of the same block.
    #[must_use]
    pub fn common(&self, other: &Self) -> Self {
        let words = self.words.iter().zip(&other.words).map(|(mine, theirs)| mine & theirs).collect();
        Self { words, pages: self.pages }
    }

    /// Takes everything out and returns it.
    #[must_use]
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Self::empty(self.pages))
    }

    /// The longest runs of pages in the set, ascending.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, true)?;
            let end = self.next(start, false).unwrap_or(self.pages);
            at = end;
            Some(start..end)
        })
    }

    /// First page at or after `from` that is (or is not) in the set.
    fn next(&self, from: u64, present: bool) -> Option<u64> {
        let mut page = from;
        while page < self.pages {
            let word = self.words[index(page)];
            let word = if present { word } else { !word } >> (page % 64);
            if word != 0 {
                let found = page + u64::from(word.trailing_zeros());
                return (found < self.pages).then_some(found);
            }
            page = (page / 64 + 1) * 64;
        }
        None
    }

    fn for_words(&mut self, range: Range<u64>, mut change: impl FnMut(&mut u64, u64)) {
        let end = range.end.min(self.pages);
        let mut page = range.start;
        while page < end {
            let in_word = page % 64;
            let take = (64 - in_word).min(end - page);
            let mask = if take == 64 { u64::MAX } else { ((1 << take) - 1) << in_word };
            change(&mut self.words[index(page)], mask);
            page += take;
        }
    }

    /// The form that crosses the wire: runs when they are short, bits when those are shorter.
    #[must_use]
    pub fn encode(&self) -> WireSet {
        let mut runs = Vec::new();
        let mut last = 0;
        for run in self.runs() {
            runs.push((run.start - last, run.end - run.start));
            last = run.end;
            // A run takes at least two bytes of varint, a word of bits eight.
            if runs.len() * 2 > self.words.len() * 8 {
                return WireSet::Bits(self.words.clone());
            }
        }
        WireSet::Runs(runs)
    }

    /// Reads the wire form for a block of `pages` pages.
    ///
    /// # Errors
    /// [`WireSetError`], when it speaks of pages beyond the block or has another number of bits.
    pub fn decode(wire: &WireSet, pages: u64) -> Result<Self, WireSetError> {
        match wire {
            WireSet::All => Ok(Self::full(pages)),
            WireSet::Bits(words) => {
                if words.len() != words_for(pages) {
                    return Err(WireSetError("page bitmap has another length than the RAM block"));
                }
                let tail = pages % 64;
                if tail != 0 && words.last().is_some_and(|w| w >> tail != 0) {
                    return Err(WireSetError("page bitmap names pages beyond the RAM block"));
                }
                Ok(Self { words: words.clone(), pages })
            }
            WireSet::Runs(runs) => {
                let mut set = Self::empty(pages);
                let mut at = 0u64;
                for (gap, len) in runs {
                    let start = at.checked_add(*gap).ok_or(WireSetError("page runs overflow"))?;
                    let end = start.checked_add(*len).ok_or(WireSetError("page runs overflow"))?;
                    if end > pages || *len == 0 {
                        return Err(WireSetError("page run is empty or beyond the RAM block"));
                    }
                    set.insert(start..end);
                    at = end;
                }
                Ok(set)
            }
        }
    }
}

/// A [`PageSet`] on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WireSet {
    /// Every page of the block.
    All,
    /// (gap since the end of the last run, length), ascending.
    Runs(Vec<(u64, u64)>),
    /// One bit per page, least significant first.
    Bits(Vec<u64>),
}

fn index(page: u64) -> usize {
    usize::try_from(page / 64).expect("a page number of a mapped block fits usize")
}

fn words_for(pages: u64) -> usize {
    index(pages.div_ceil(64) * 64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 300;

    proptest! {
        #[test]
        fn it_is_a_set(ops in proptest::collection::vec((any::<bool>(), 0..PAGES, 0u64..150), 0..40)) {
            let mut set = PageSet::empty(PAGES);
            let mut model = BTreeSet::new();
            for (add, start, len) in ops {
                let range = start..start + len;
                if add {
                    set.insert(range.clone());
                    model.extend(range.filter(|p| *p < PAGES));
                } else {
                    set.remove(range.clone());
                    model.retain(|p| !range.contains(p));
                }
            }
            prop_assert_eq!(set.count(), model.len() as u64);
            let pages: BTreeSet<u64> = set.runs().flatten().collect();
            prop_assert_eq!(&pages, &model);
            prop_assert!((0..PAGES + 70).all(|p| set.contains(p) == model.contains(&p)));
            let back = PageSet::decode(&set.encode(), PAGES).unwrap();
            prop_assert_eq!(back, set);
        }

        #[test]
        fn foreign_sets_never_panic(runs in proptest::collection::vec(any::<(u64, u64)>(), 0..8), bits in proptest::collection::vec(any::<u64>(), 0..8)) {
            for wire in [WireSet::Runs(runs), WireSet::Bits(bits)] {
                if let Ok(set) = PageSet::decode(&wire, PAGES) {
                    prop_assert!(set.runs().all(|r| r.end <= PAGES));
                }
            }
        }
    }

    #[test]
    fn runs_join_over_word_borders() {
        let mut set = PageSet::empty(200);
        set.insert(60..140);
        assert!(set.runs().eq(std::iter::once(60..140)));
        assert!(PageSet::full(200).runs().eq(std::iter::once(0..200)));
    }

    #[test]
    fn many_short_runs_cross_as_bits() {
        let mut set = PageSet::empty(6400);
        for p in (0..6400).step_by(2) {
            set.insert(p..p + 1);
        }
        assert!(matches!(set.encode(), WireSet::Bits(_)));
    }
}
