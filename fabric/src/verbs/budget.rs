//! How much memory may be registered at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::FabricError;

/// Bytes registered so far.
#[derive(Debug, Default)]
pub(super) struct Budget(AtomicU64);

/// A region's part of it, given back when dropped.
#[derive(Debug)]
pub(super) struct Share {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub(super) fn taken(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes a part, if it is there.
    pub(super) fn take(self: &Arc<Self>, bytes: u64, most: Option<u64>) -> Result<Share, FabricError> {
        let most = most.unwrap_or(u64::MAX);
        let fits = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= most);
        match self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => Ok(Share { budget: Arc::clone(self), bytes }),
            Err(taken) => Err(FabricError::Register {
                len: bytes,
                why: format!(
                    "{} MiB are registered, and --max-registered allows {} MiB; raise it, or let migrations wait for each other",
                    taken >> 20,
                    most >> 20
                ),
            }),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_can_be_taken_again() {
        let budget = Arc::new(Budget::default());
        let first = budget.take(60, Some(100)).unwrap();
        let error = budget.take(50, Some(100)).unwrap_err().to_string();
        assert!(error.contains("--max-registered"), "{error}");
        drop(first);
        let _second = budget.take(100, Some(100)).unwrap();
        assert_eq!(budget.taken(), 100);
        assert!(budget.take(u64::MAX, None).is_err(), "more than there are numbers");
    }
}
