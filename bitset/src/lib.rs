//! A set of numbers below a limit, one bit for each: pages of a RAM block, pieces of a template.
//!
//! ```
//! use vmove_bitset::BitSet;
//!
//! let mut missing = BitSet::full(1000);
//! missing.remove_range(0..256);
//! assert!(missing.remove(300_u32) && !missing.remove(300_u32));
//! assert_eq!(missing.len(), 743);
//! assert_eq!(missing.runs().collect::<Vec<_>>(), [256..300, 301..1000]);
//! ```

use std::ops::Range;

/// See the crate. How many numbers it holds is counted as it changes, so [`len`](Self::len) costs nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BitSet {
    /// Bit `n % 64` of word `n / 64` stands for `n`; bits from the limit on are 0.
    words: Vec<u64>,
    limit: u64,
    len: u64,
}

impl BitSet {
    /// The empty set of numbers below `limit`.
    #[must_use]
    pub fn empty(limit: u64) -> Self {
        Self { words: vec![0; words_for(limit)], limit, len: 0 }
    }

    /// The set of all numbers below `limit`.
    #[must_use]
    pub fn full(limit: u64) -> Self {
        let mut set = Self::empty(limit);
        set.insert_range(0..limit);
        set
    }

    /// The set with these words, least significant bit first. `None` if there are more or fewer of them than the limit needs, or
    /// if they have numbers beyond it.
    #[must_use]
    pub fn from_words(words: Vec<u64>, limit: u64) -> Option<Self> {
        let tail = limit % 64;
        let beyond = tail != 0 && words.last().is_some_and(|word| word >> tail != 0);
        let len = words.iter().map(|word| u64::from(word.count_ones())).sum();
        (words.len() == words_for(limit) && !beyond).then_some(Self { words, limit, len })
    }

    /// One bit per number, least significant first.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// All numbers are below this.
    #[must_use]
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// How many numbers are in the set.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether no number is in the set.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether every number below the limit is in the set.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        self.len == self.limit
    }

    /// Whether a number is in the set; false from the limit on.
    #[must_use]
    pub fn contains(&self, number: impl Into<u64>) -> bool {
        let number = number.into();
        number < self.limit && self.words[index(number)] >> (number % 64) & 1 == 1
    }

    /// Whether all numbers of a range are in the set; true of an empty range.
    #[must_use]
    pub fn contains_all(&self, range: Range<u64>) -> bool {
        range.is_empty()
            || (self.contains(range.start)
                && self.next(range.start, false).unwrap_or(self.limit) >= range.end)
    }

    /// Adds a number. Whether it was not there before; false from the limit on.
    pub fn insert(&mut self, number: impl Into<u64>) -> bool {
        let (number, before) = (number.into(), self.len);
        self.insert_range(number..number.saturating_add(1));
        self.len != before
    }

    /// Removes a number. Whether it was there.
    pub fn remove(&mut self, number: impl Into<u64>) -> bool {
        let (number, before) = (number.into(), self.len);
        self.remove_range(number..number.saturating_add(1));
        self.len != before
    }

    /// Adds a range; what lies beyond the limit is left out.
    pub fn insert_range(&mut self, range: Range<u64>) {
        self.change(range, |word, mask| word | mask);
    }

    /// Removes a range; what lies beyond the limit is left out.
    pub fn remove_range(&mut self, range: Range<u64>) {
        self.change(range, |word, mask| word & !mask);
    }

    /// Adds every number of `other` that is below this one's limit.
    pub fn union(&mut self, other: &Self) {
        other.runs().for_each(|run| self.insert_range(run));
    }

    /// Numbers that are in this set and in `other`.
    #[must_use]
    pub fn common(&self, other: &Self) -> Self {
        let mut words: Vec<u64> =
            self.words.iter().zip(&other.words).map(|(mine, theirs)| mine & theirs).collect();
        words.resize(self.words.len(), 0);
        let len = words.iter().map(|word| u64::from(word.count_ones())).sum();
        Self { words, limit: self.limit, len }
    }

    /// Takes everything out and returns it.
    #[must_use]
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Self::empty(self.limit))
    }

    /// The longest runs of numbers in the set, ascending.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, true)?;
            let end = self.next(start, false).unwrap_or(self.limit);
            at = end;
            Some(start..end)
        })
    }

    /// First number at or after `from` that is (or is not) in the set.
    fn next(&self, from: u64, present: bool) -> Option<u64> {
        let mut number = from;
        while number < self.limit {
            let word = self.words[index(number)];
            let word = if present { word } else { !word } >> (number % 64);
            if word != 0 {
                let found = number + u64::from(word.trailing_zeros());
                return (found < self.limit).then_some(found);
            }
            number = (number / 64 + 1) * 64;
        }
        None
    }

    /// Replaces each word of a range: `new` is given the word and the bits of it that are in the range.
    fn change(&mut self, range: Range<u64>, new: impl Fn(u64, u64) -> u64) {
        let end = range.end.min(self.limit);
        let mut number = range.start;
        while number < end {
            let first = number % 64;
            let count = (64 - first).min(end - number);
            let mask = u64::MAX >> (64 - count) << first;
            let word = &mut self.words[index(number)];
            let changed = new(*word, mask);
            self.len = self.len + u64::from(changed.count_ones()) - u64::from(word.count_ones());
            *word = changed;
            number += count;
        }
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number / 64).expect("a set that fits memory has fewer words than usize can number")
}

fn words_for(limit: u64) -> usize {
    index(limit) + usize::from(!limit.is_multiple_of(64))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const LIMIT: u64 = 300;

    proptest! {
        #[test]
        fn it_is_a_set(steps in prop::collection::vec((any::<bool>(), 0..LIMIT + 20, 0..150_u64), 0..60)) {
            let (mut set, mut model) = (BitSet::empty(LIMIT), BTreeSet::new());
            for (add, start, len) in steps {
                let range = start..start + len;
                match (add, len) {
                    (true, 1) => prop_assert_eq!(set.insert(start), start < LIMIT && model.insert(start)),
                    (false, 1) => prop_assert_eq!(set.remove(start), model.remove(&start)),
                    (true, _) => {
                        set.insert_range(range.clone());
                        model.extend(range.clone().filter(|number| *number < LIMIT));
                    }
                    (false, _) => {
                        set.remove_range(range.clone());
                        model.retain(|number| !range.contains(number));
                    }
                }
                prop_assert_eq!(set.contains_all(range.clone()), range.clone().all(|number| model.contains(&number)));
            }
            prop_assert_eq!(set.len(), model.len() as u64);
            prop_assert_eq!((set.is_empty(), set.is_full()), (model.is_empty(), model.len() as u64 == LIMIT));
            let numbers: BTreeSet<u64> = set.runs().flatten().collect();
            prop_assert_eq!(&numbers, &model);
            prop_assert!((0..LIMIT + 70).all(|number| set.contains(number) == model.contains(&number)));
            prop_assert_eq!(BitSet::from_words(set.words().to_vec(), LIMIT), Some(set));
        }

        #[test]
        fn unions_and_what_is_common(a in prop::collection::btree_set(0..LIMIT, 0..200), b in prop::collection::btree_set(0..LIMIT, 0..200)) {
            let of = |numbers: &BTreeSet<u64>| {
                let mut set = BitSet::empty(LIMIT);
                numbers.iter().for_each(|number| assert!(set.insert(*number)));
                set
            };
            let (mut mine, theirs) = (of(&a), of(&b));
            prop_assert_eq!(mine.common(&theirs), of(&a.intersection(&b).copied().collect()));
            mine.union(&theirs);
            let both = of(&a.union(&b).copied().collect());
            prop_assert_eq!(&mine, &both);
            prop_assert_eq!(mine.take(), both);
            prop_assert!(mine.is_empty() && mine == BitSet::empty(LIMIT));
        }
    }

    #[test]
    fn words_that_do_not_fit_the_limit_are_no_set() {
        assert_eq!(BitSet::from_words(vec![1 << 36], 37).map(|set| set.len()), Some(1));
        assert_eq!(BitSet::from_words(vec![1 << 37], 37), None);
        assert_eq!(BitSet::from_words(vec![0, 0], 64), None);
        assert_eq!(BitSet::from_words(vec![u64::MAX], 64), Some(BitSet::full(64)));
        assert_eq!(BitSet::from_words(vec![], 0), Some(BitSet::empty(0)));
    }
}
