//! Callbacks that the reader runs for each event, before anyone else hears of it.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::Event;

/// Names one callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HookId(u64);

/// What a callback wants after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Call me again.
    Yes,
    /// I am done.
    No,
}

type Callback = Box<dyn FnMut(&Arc<Event>) -> Keep + Send>;

/// The callbacks of one connection.
#[derive(Default)]
pub(crate) struct Hooks {
    next: AtomicU64,
    /// A std mutex: held for the callbacks of one event, never across an await.
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    callbacks: Vec<(HookId, Callback)>,
    /// Set once, when the connection has ended: later hooks are dropped at once, so that their waiters see the end.
    closed: Option<String>,
}

impl Hooks {
    pub(crate) fn add(&self, callback: impl FnMut(&Arc<Event>) -> Keep + Send + 'static) -> HookId {
        let id = HookId(self.next.fetch_add(1, Ordering::Relaxed));
        let mut list = self.lock();
        if list.closed.is_none() {
            list.callbacks.push((id, Box::new(callback)));
        }
        id
    }

    pub(crate) fn remove(&self, id: HookId) {
        self.lock().callbacks.retain(|(other, _)| *other != id);
    }

    pub(crate) fn run(&self, event: &Arc<Event>) {
        self.lock().callbacks.retain_mut(|(_, callback)| callback(event) == Keep::Yes);
    }

    /// Ends all hooks: their captured senders are dropped, which wakes whoever waits.
    pub(crate) fn close(&self, reason: &str) {
        let ended = {
            let mut list = self.lock();
            list.closed.get_or_insert_with(|| reason.to_owned());
            std::mem::take(&mut list.callbacks)
        };
        drop(ended);
    }

    pub(crate) fn close_reason(&self) -> String {
        self.lock().closed.clone().unwrap_or_else(|| "the connection was given up".to_owned())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, List> {
        // A callback that panicked poisons the lock; the list itself is whole.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks").field("callbacks", &self.lock().callbacks.len()).finish_non_exhaustive()
    }
}
