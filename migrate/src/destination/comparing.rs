//! Whether it pays to compare pages with what the destination has of them already: huge pages of which it has an earlier state, and all pages of a
//! round after a head start.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vmove_fabric::CompletionKind;

/// After this many parts that were compared ...
const TRIAL: u64 = 1024;
/// ... at least one in so many must have been the same, or comparing costs more than it saves.
const WORTH: u64 = 4;

/// Whether comparing pays for this guest. A guest that writes all over its huge pages gains nothing by it.
#[derive(Debug, Default)]
pub(super) struct Comparing {
    /// All pages of the present round are compared, small ones, too.
    all: AtomicBool,
    compared: AtomicU64,
    same: AtomicU64,
}

impl Comparing {
    /// A round begins. Nothing is being read.
    pub(super) fn begin_round(&self, all: bool) {
        self.all.store(all, Ordering::Relaxed);
    }

    /// Whether all pages of the present round are compared.
    pub(super) fn all(&self) -> bool {
        self.all.load(Ordering::Relaxed)
    }

    pub(super) fn pays(&self) -> bool {
        let compared = self.compared.load(Ordering::Relaxed);
        self.all() || compared < TRIAL || self.same.load(Ordering::Relaxed) * WORTH >= compared
    }

    /// Takes note of the result of a read of so many parts. A round that is compared as a whole says nothing of other rounds.
    pub(super) fn note(&self, kind: &CompletionKind, parts: usize) {
        if let CompletionKind::ReadChanged { same_mask, .. } = kind
            && !self.all()
        {
            self.compared.fetch_add(parts as u64, Ordering::Relaxed);
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
            comparing.note(&answer(0), 64);
        }
        assert!(comparing.pays(), "too early to tell");
        comparing.note(&answer(0), 64);
        assert!(!comparing.pays());
        let comparing = Comparing::default();
        for _ in 0..100 {
            comparing.note(&answer(16), 64);
            assert!(comparing.pays());
        }
        comparing.note(&answer(0), 64);
        assert!(!comparing.pays());
        // The source says that it pays for a whole round.
        comparing.begin_round(true);
        comparing.note(&answer(64), 64);
        assert!(comparing.pays());
        comparing.begin_round(false);
        assert!(!comparing.pays());
    }
}
