//! Sets of numbered pieces.

use serde::{Deserialize, Serialize};

/// Consecutive numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Span {
    /// The first.
    pub first: u32,
    /// How many.
    pub count: u32,
}

impl Span {
    /// One past the last; at most `u32::MAX`.
    #[must_use]
    pub fn end(self) -> u32 {
        self.first.saturating_add(self.count)
    }

    /// The numbers, the lowest first.
    pub fn numbers(self) -> std::ops::Range<u32> {
        self.first..self.end()
    }
}

/// Joins ascending numbers into spans.
pub(crate) fn spans(numbers: impl IntoIterator<Item = u32>) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for number in numbers {
        match spans.last_mut() {
            Some(last) if last.end() == number => last.count += 1,
            _ => spans.push(Span { first: number, count: 1 }),
        }
    }
    spans
}

/// A set of numbers below a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bits {
    words: Vec<u64>,
    limit: u32,
    count: u32,
}

impl Bits {
    pub(crate) fn new(limit: u32) -> Self {
        Self { words: vec![0; limit.div_ceil(64) as usize], limit, count: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.count
    }

    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    pub(crate) fn is_full(&self) -> bool {
        self.count == self.limit
    }

    pub(crate) fn get(&self, number: u32) -> bool {
        number < self.limit && self.words[(number / 64) as usize] & (1 << (number % 64)) != 0
    }

    /// Whether it was not there before.
    pub(crate) fn insert(&mut self, number: u32) -> bool {
        if number >= self.limit || self.get(number) {
            return false;
        }
        self.words[(number / 64) as usize] |= 1 << (number % 64);
        self.count += 1;
        true
    }

    /// Whether it was there.
    pub(crate) fn remove(&mut self, number: u32) -> bool {
        if !self.get(number) {
            return false;
        }
        self.words[(number / 64) as usize] &= !(1 << (number % 64));
        self.count -= 1;
        true
    }

    /// Whether all of them are there.
    pub(crate) fn all(&self, span: Span) -> bool {
        span.numbers().all(|number| self.get(number))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bits_agree_with_a_set(steps in prop::collection::vec((0..300_u32, any::<bool>()), 0..400)) {
            let (mut bits, mut set) = (Bits::new(257), BTreeSet::new());
            for (number, insert) in steps {
                if insert {
                    prop_assert_eq!(bits.insert(number), number < 257 && set.insert(number));
                } else {
                    prop_assert_eq!(bits.remove(number), set.remove(&number));
                }
            }
            prop_assert_eq!(bits.len() as usize, set.len());
            prop_assert_eq!(bits.is_full(), set.len() == 257);
            let joined: Vec<u32> = spans(set.iter().copied()).into_iter().flat_map(Span::numbers).collect();
            prop_assert_eq!(joined, set.into_iter().collect::<Vec<_>>());
        }
    }
}
