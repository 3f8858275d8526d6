//! Whether it pays to compare huge pages with what the destination has of them already.

use std::sync::atomic::{AtomicU64, Ordering};

use vmove_fabric::{CompletionKind, MAX_SEGMENTS};

/// After this many parts that were compared ...
const TRIAL: u64 = 1024;
/// ... at least one in so many must have been the same, or comparing costs more than it saves.
const WORTH: u64 = 4;

/// Whether comparing pays for this guest. A guest that writes all over its huge pages gains nothing by it.
#[derive(Debug, Default)]
pub(super) struct Comparing {
    compared: AtomicU64,
    same: AtomicU64,
}

impl Comparing {
    pub(super) fn pays(&self) -> bool {
        let compared = self.compared.load(Ordering::Relaxed);
        compared < TRIAL || self.same.load(Ordering::Relaxed) * WORTH >= compared
    }

    /// Takes note of a read's result.
    pub(super) fn note(&self, kind: &CompletionKind) {
        if let CompletionKind::ReadChanged { same_mask, .. } = kind {
            self.compared.fetch_add(MAX_SEGMENTS as u64, Ordering::Relaxed);
            self.same.fetch_add(u64::from(same_mask.count_ones()), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(same: u32) -> CompletionKind {
        let same_mask = if same == 64 { u64::MAX } else { (1 << same) - 1 };
        CompletionKind::ReadChanged { zero_mask: 0, same_mask }
    }

    #[test]
    fn comparing_goes_on_while_a_quarter_is_the_same() {
        let comparing = Comparing::default();
        for _ in 0..TRIAL / 64 - 1 {
            comparing.note(&answer(0));
        }
        assert!(comparing.pays(), "too early to tell");
        comparing.note(&answer(0));
        assert!(!comparing.pays());
        let comparing = Comparing::default();
        for _ in 0..100 {
            comparing.note(&answer(16));
            assert!(comparing.pays());
        }
        comparing.note(&answer(0));
        assert!(!comparing.pays());
    }
}
