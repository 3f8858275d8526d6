//! Something that several tasks see and wait for.
//!
//! As tokio's `watch`, but those who wait are woken in the order in which they began to: `watch` draws lots among them, and a simulated
//! schedule would not come out the same twice.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

#[derive(Debug)]
pub(super) struct Board<T> {
    seen: Mutex<T>,
    changed: Notify,
}

impl<T> Board<T> {
    pub(super) fn new(value: T) -> Self {
        Self { seen: Mutex::new(value), changed: Notify::new() }
    }

    /// As it is now. Held over no `await`.
    pub(super) fn look(&self) -> MutexGuard<'_, T> {
        // A panic while it is held leaves it as it was, or one change further.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes it, and has those look who wait.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let made = change(&mut self.look());
        self.changed.notify_waiters();
        made
    }

    /// Waits until there is something to be found. Cancel-safe.
    pub(super) async fn find<R>(&self, find: impl Fn(&T) -> Option<R>) -> R {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From now on no change is missed.
            changed.as_mut().enable();
            let found = find(&self.look());
            if let Some(found) = found {
                return found;
            }
            changed.await;
        }
    }
}
