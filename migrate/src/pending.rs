//! Which pages the destination does not have a good copy of: one bit per page of a RAM block.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A set of pages that a peer sent and that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WireSetError(&'static str);

/// Words of a chunk: its 4 KiB of bits stand for 128 MiB of 4 KiB pages. Few in tests, which look at where chunks meet.
const CHUNK_WORDS: usize = if cfg!(test) { 2 } else { 512 };
/// Pages of a chunk.
const CHUNK: u64 = CHUNK_WORDS as u64 * 64;
/// Pages of a part on the wire, at most, unless all of them are in the set: 128 KiB of bits.
const PART: u64 = if cfg!(test) { 2 } else { 32 } * CHUNK;

/// A set of pages of one RAM block. Page numbers count from the start of the block, in pages of its backing.
///
/// Chunks of which no page is in the set, or every page, have no bits: what is done with a set takes the time of what is between, not that of the
/// block. Between STOP and RESUME nothing may take the time of a terabyte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageSet {
    chunks: Vec<Chunk>,
    pages: u64,
    count: u64,
}

/// In the one form that its pages have: two sets are equal if their chunks are.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Chunk {
    Empty,
    /// Every page up to the end of the chunk, or of the block.
    Full,
    /// Some pages and not all, and how many.
    Bits(Box<[u64; CHUNK_WORDS]>, u64),
}

impl PageSet {
    /// The empty set of a block of `pages` pages.
    #[must_use]
    pub fn empty(pages: u64) -> Self {
        Self { chunks: vec![Chunk::Empty; chunks_for(pages)], pages, count: 0 }
    }

    /// The set of all pages of a block.
    #[must_use]
    pub fn full(pages: u64) -> Self {
        Self { chunks: vec![Chunk::Full; chunks_for(pages)], pages, count: pages }
    }

    /// Number of pages of the block (not of the set).
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.pages
    }

    /// Number of pages in the set.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Whether the set is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether `page` is in the set; false beyond the block.
    #[must_use]
    pub fn contains(&self, page: u64) -> bool {
        page < self.pages
            && match &self.chunks[index(page / CHUNK)] {
                Chunk::Empty => false,
                Chunk::Full => true,
                Chunk::Bits(words, _) => words[index(page % CHUNK / 64)] >> (page % 64) & 1 == 1,
            }
    }

    /// Adds a range; what lies beyond the block is left out.
    pub fn insert(&mut self, range: Range<u64>) {
        self.set(range, true);
    }

    /// Removes a range; what lies beyond the block is left out.
    pub fn remove(&mut self, range: Range<u64>) {
        self.set(range, false);
    }

    /// Adds every page of `other`, which must be of the same block.
    pub fn union(&mut self, other: &Self) {
        self.combine(other, |mine, theirs| mine | theirs);
    }

    /// Pages that are in this set and in `other`, which must be of the same block.
    #[must_use]
    pub fn common(&self, other: &Self) -> Self {
        let mut common = self.clone();
        common.combine(other, |mine, theirs| mine & theirs);
        common
    }

    /// Pages that are in this set and not in `other`, which must be of the same block.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let mut rest = self.clone();
        rest.combine(other, |mine, theirs| mine & !theirs);
        rest
    }

    /// Takes everything out and returns it.
    #[must_use]
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Self::empty(self.pages))
    }

    /// The longest runs of pages in the set, ascending.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.runs_in(0..self.pages)
    }

    fn runs_in(&self, within: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = within.start;
        std::iter::from_fn(move || {
            let start = self.next(at, true).filter(|start| *start < within.end)?;
            let end = self.next(start, false).unwrap_or(self.pages).min(within.end);
            at = end;
            Some(start..end)
        })
    }

    /// First page at or after `from` that is (or is not) in the set.
    fn next(&self, from: u64, present: bool) -> Option<u64> {
        let mut page = from;
        while page < self.pages {
            let chunk = page / CHUNK;
            let end = ((chunk + 1) * CHUNK).min(self.pages);
            let found = match &self.chunks[index(chunk)] {
                Chunk::Empty => (!present).then_some(page),
                Chunk::Full => present.then_some(page),
                Chunk::Bits(words, _) => {
                    next_in(&words[..], page % CHUNK, present).map(|at| chunk * CHUNK + at)
                }
            };
            // The bits behind the block are 0: no page.
            match found.filter(|found| *found < end) {
                Some(found) => return Some(found),
                None => page = (chunk + 1) * CHUNK,
            }
        }
        None
    }

    fn pages_of(&self, chunk: usize) -> u64 {
        CHUNK.min(self.pages - chunk as u64 * CHUNK)
    }

    fn set(&mut self, range: Range<u64>, value: bool) {
        let end = range.end.min(self.pages);
        let mut at = range.start;
        while at < end {
            let number = index(at / CHUNK);
            let first = number as u64 * CHUNK;
            let stop = (first + CHUNK).min(end);
            let size = self.pages_of(number);
            let chunk = &mut self.chunks[number];
            let before = chunk.count(size);
            if at == first && stop == first + size {
                *chunk = if value { Chunk::Full } else { Chunk::Empty };
            } else if before != if value { size } else { 0 } {
                let words = chunk.words(size);
                let count = change(words, at - first..stop - first, before, value);
                chunk.settle(count, size);
            }
            self.count = self.count - before + self.chunks[number].count(size);
            at = stop;
        }
    }

    fn combine(&mut self, other: &Self, with: impl Fn(u64, u64) -> u64) {
        for number in 0..self.chunks.len().min(other.chunks.len()) {
            let size = self.pages_of(number);
            let (mine, theirs) = (&mut self.chunks[number], &other.chunks[number]);
            let before = mine.count(size);
            if let (Some(a), Some(b)) = (mine.all(), theirs.all()) {
                *mine = if with(a, b) == 0 { Chunk::Empty } else { Chunk::Full };
            } else {
                let (mut theirs, words) = (theirs.clone(), mine.words(size));
                for (mine, theirs) in words.iter_mut().zip(theirs.words(size).iter()) {
                    *mine = with(*mine, *theirs);
                }
                let count = words.iter().map(|word| u64::from(word.count_ones())).sum();
                mine.settle(count, size);
            }
            self.count = self.count - before + self.chunks[number].count(size);
        }
    }

    /// The form that crosses the wire: runs when they are short, bits when those are shorter.
    #[must_use]
    pub fn encode(&self) -> WireSet {
        self.encode_part(0..self.pages)
    }

    fn encode_part(&self, part: Range<u64>) -> WireSet {
        let words = words_for(part.end - part.start);
        let mut runs = Vec::new();
        let mut last = part.start;
        for run in self.runs_in(part.clone()) {
            runs.push((run.start - last, run.end - run.start));
            last = run.end;
            // A run takes at least two bytes of varint, a word of bits eight.
            if runs.len() * 2 > words * 8 {
                return WireSet::Bits(self.bits(part));
            }
        }
        WireSet::Runs(runs)
    }

    fn bits(&self, part: Range<u64>) -> Vec<u64> {
        let mut words = vec![0; words_for(part.end - part.start)];
        for run in self.runs_in(part.clone()) {
            let mut at = run.start - part.start;
            let end = run.end - part.start;
            while at < end {
                let stop = (at / 64 * 64 + 64).min(end);
                words[index(at / 64)] |= mask(at % 64, stop - at);
                at = stop;
            }
        }
        words
    }

    /// The set in parts, each in the form that is shortest. Pages that are in none are not in the set. A part is no longer than what fits
    /// into a message, however large the block.
    pub fn parts(&self) -> impl Iterator<Item = WirePart> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, true)?;
            let full = self.next(start, false).unwrap_or(self.pages);
            if full - start >= PART {
                at = full;
                return Some(WirePart { first: start, pages: full - start, set: WireSet::All });
            }
            let end = start.saturating_add(PART).min(self.pages);
            at = end;
            Some(WirePart { first: start, pages: end - start, set: self.encode_part(start..end) })
        })
    }

    /// Adds the pages of a part that a peer sent.
    ///
    /// # Errors
    /// [`WireSetError`], when it speaks of pages beyond the block.
    pub fn insert_part(&mut self, part: &WirePart) -> Result<(), WireSetError> {
        part.each_run(self.pages, |run| self.insert(run))
    }

    /// Reads the wire form for a block of `pages` pages.
    ///
    /// # Errors
    /// [`WireSetError`], when it speaks of pages beyond the block or has another number of bits.
    pub fn decode(wire: &WireSet, pages: u64) -> Result<Self, WireSetError> {
        let mut set = Self::empty(pages);
        wire.each_run(pages, |run| set.insert(run))?;
        Ok(set)
    }
}

impl Chunk {
    const fn count(&self, size: u64) -> u64 {
        match self {
            Self::Empty => 0,
            Self::Full => size,
            Self::Bits(_, count) => *count,
        }
    }

    /// What all of its words are, if they are the same.
    const fn all(&self) -> Option<u64> {
        match self {
            Self::Empty => Some(0),
            Self::Full => Some(u64::MAX),
            Self::Bits(..) => None,
        }
    }

    /// Its bits, to be changed; [`Chunk::settle`] follows.
    fn words(&mut self, size: u64) -> &mut [u64; CHUNK_WORDS] {
        let count = self.count(size);
        if !matches!(self, Self::Bits(..)) {
            let mut words = Box::new([0; CHUNK_WORDS]);
            if count > 0 {
                change(&mut words[..], 0..size, 0, true);
            }
            *self = Self::Bits(words, count);
        }
        match self {
            Self::Bits(words, _) => words,
            Self::Empty | Self::Full => unreachable!("it was given bits"),
        }
    }

    fn settle(&mut self, count: u64, size: u64) {
        match (count, self) {
            (0, chunk) => *chunk = Self::Empty,
            (all, chunk) if all == size => *chunk = Self::Full,
            (_, Self::Bits(_, known)) => *known = count,
            _ => {}
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

/// A part of a [`PageSet`] on the wire: of `pages` pages from `first` on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WirePart {
    /// First page of the part.
    pub first: u64,
    /// How many pages it is of.
    pub pages: u64,
    /// Those of them that are in the set, counted from `first`.
    pub set: WireSet,
}

impl WirePart {
    /// Tells of the runs of pages, numbered as those of a block of `pages` pages.
    ///
    /// # Errors
    /// [`WireSetError`], when it speaks of pages beyond the block, or contradicts itself.
    pub fn each_run(&self, pages: u64, mut tell: impl FnMut(Range<u64>)) -> Result<(), WireSetError> {
        match self.first.checked_add(self.pages) {
            Some(end) if end <= pages => {
                self.set.each_run(self.pages, |run| tell(self.first + run.start..self.first + run.end))
            }
            _ => Err(WireSetError("part of a page set lies beyond the RAM block")),
        }
    }

    /// About its length on the wire, in bytes.
    #[must_use]
    pub fn wire_len(&self) -> usize {
        match &self.set {
            WireSet::All => 8,
            WireSet::Runs(runs) => 8 + runs.len() * 4,
            WireSet::Bits(words) => 8 + words.len() * 9,
        }
    }
}

impl WireSet {
    fn each_run(&self, pages: u64, mut tell: impl FnMut(Range<u64>)) -> Result<(), WireSetError> {
        match self {
            Self::All => tell(0..pages),
            Self::Bits(words) => {
                if words.len() != words_for(pages) {
                    return Err(WireSetError("page bitmap has another length than the RAM block"));
                }
                let tail = pages % 64;
                if tail != 0 && words.last().is_some_and(|w| w >> tail != 0) {
                    return Err(WireSetError("page bitmap names pages beyond the RAM block"));
                }
                let mut at = 0;
                while let Some(start) = next_in(words, at, true) {
                    at = next_in(words, start, false).unwrap_or(pages).min(pages);
                    tell(start..at);
                }
            }
            Self::Runs(runs) => {
                let mut at = 0u64;
                for (gap, len) in runs {
                    let start = at.checked_add(*gap).ok_or(WireSetError("page runs overflow"))?;
                    let end = start.checked_add(*len).ok_or(WireSetError("page runs overflow"))?;
                    if end > pages || *len == 0 {
                        return Err(WireSetError("page run is empty or beyond the RAM block"));
                    }
                    tell(start..end);
                    at = end;
                }
            }
        }
        Ok(())
    }
}

/// First bit at or after `from` that is (or is not) set.
fn next_in(words: &[u64], from: u64, present: bool) -> Option<u64> {
    let mut number = index(from / 64);
    let mut skip = from % 64;
    while let Some(word) = words.get(number) {
        let word = if present { *word } else { !*word } >> skip;
        if word != 0 {
            return Some(number as u64 * 64 + skip + u64::from(word.trailing_zeros()));
        }
        (number, skip) = (number + 1, 0);
    }
    None
}

/// Sets or clears bits of which `count` were set; returns how many are.
fn change(words: &mut [u64], range: Range<u64>, mut count: u64, value: bool) -> u64 {
    let mut at = range.start;
    while at < range.end {
        let stop = (at / 64 * 64 + 64).min(range.end);
        let word = &mut words[index(at / 64)];
        let mask = mask(at % 64, stop - at);
        let changed = if value { *word | mask } else { *word & !mask };
        count = count + u64::from(changed.count_ones()) - u64::from(word.count_ones());
        *word = changed;
        at = stop;
    }
    count
}

/// So many bits from the `first` on.
const fn mask(first: u64, bits: u64) -> u64 {
    (u64::MAX >> (64 - bits)) << first
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("a page number of a mapped block fits usize")
}

fn words_for(pages: u64) -> usize {
    index(pages.div_ceil(64))
}

fn chunks_for(pages: u64) -> usize {
    index(pages.div_ceil(CHUNK))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 700;

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
            prop_assert_eq!(&back, &set);
            let mut back = PageSet::empty(PAGES);
            for part in set.parts() {
                back.insert_part(&part).unwrap();
            }
            prop_assert_eq!(back, set);
        }

        #[test]
        fn sets_are_united_intersected_and_subtracted(
            a in proptest::collection::vec((any::<bool>(), 0..PAGES, 0u64..400), 0..9),
            b in proptest::collection::vec((any::<bool>(), 0..PAGES, 0u64..400), 0..9),
        ) {
            let of = |ops: &[(bool, u64, u64)]| {
                let mut set = PageSet::empty(PAGES);
                for (add, start, len) in ops {
                    if *add { set.insert(*start..start + len) } else { set.remove(*start..start + len) }
                }
                set
            };
            let (a, b) = (of(&a), of(&b));
            let mut both = a.clone();
            both.union(&b);
            let (common, rest) = (a.common(&b), a.without(&b));
            for page in 0..PAGES {
                prop_assert_eq!(both.contains(page), a.contains(page) || b.contains(page));
                prop_assert_eq!(common.contains(page), a.contains(page) && b.contains(page));
                prop_assert_eq!(rest.contains(page), a.contains(page) && !b.contains(page));
            }
            prop_assert_eq!(both.count(), common.count() + rest.count() + b.without(&a).count());
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
        assert!(!set.is_empty() && set.count() == 80);
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

    #[test]
    fn all_of_a_large_block_crosses_as_one_part_and_no_part_is_long() {
        let pages = 100 * PART + 5;
        let parts: Vec<_> = PageSet::full(pages).parts().collect();
        assert_eq!(parts, [WirePart { first: 0, pages, set: WireSet::All }]);
        let mut set = PageSet::empty(pages);
        (0..pages).step_by(3).for_each(|page| set.insert(page..page + 1));
        assert!(set.parts().all(|part| part.pages <= PART));
        assert!(set.parts().count() > 90);
    }

    #[test]
    fn a_part_beyond_the_block_is_refused() {
        let mut set = PageSet::empty(PAGES);
        let part = |first, pages| WirePart { first, pages, set: WireSet::All };
        assert!(
            set.insert_part(&part(PAGES - 1, 2)).is_err() && set.insert_part(&part(u64::MAX, 2)).is_err()
        );
        assert!(set.insert_part(&part(PAGES - 1, 1)).is_ok() && set.count() == 1);
    }
}
