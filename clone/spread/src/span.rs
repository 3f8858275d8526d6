//! Runs of numbered pieces.

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

    /// The same, for a set.
    pub(crate) fn range(self) -> std::ops::Range<u64> {
        self.first.into()..self.end().into()
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn spans_hold_the_numbers_that_were_joined(numbers in prop::collection::btree_set(0..300_u32, 0..200)) {
            let joined = spans(numbers.iter().copied());
            prop_assert!(joined.windows(2).all(|pair| pair[0].end() < pair[1].first), "as few as can be");
            let found: BTreeSet<u32> = joined.into_iter().flat_map(Span::numbers).collect();
            prop_assert_eq!(found, numbers);
        }
    }
}
