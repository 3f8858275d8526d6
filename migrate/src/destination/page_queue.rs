//! What the bulk readers have to do, in the order in which it should be done.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

/// A run of pages of one block, named by the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NamedPages {
    /// Which block.
    pub block: usize,
    /// The pages.
    pub pages: Range<u64>,
    /// They are zero: nothing is read.
    pub zero: bool,
}

/// First in, first out. Shared by the control task, which fills it, and the bulk readers; never touched by the fault thread.
#[derive(Debug, Default)]
pub(super) struct PageQueue {
    state: Mutex<State>,
    changed: Condvar,
    idle: Notify,
}

#[derive(Debug, Default)]
struct State {
    items: VecDeque<NamedPages>,
    /// Pages put in and not yet reported as done.
    unfinished: u64,
    closed: bool,
}

impl PageQueue {
    /// Adds work.
    pub(super) fn push(&self, work: impl IntoIterator<Item = NamedPages>) {
        let mut state = self.lock();
        for item in work {
            state.unfinished += item.pages.end - item.pages.start;
            state.items.push_back(item);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Takes the next run, at most `most` pages of it; zero runs are given whole.
    pub(super) fn take(&self, most: u64) -> Option<NamedPages> {
        let mut state = self.lock();
        let front = state.items.front_mut()?;
        if !front.zero && front.pages.end - front.pages.start > most {
            let pages = front.pages.start..front.pages.start + most;
            front.pages.start = pages.end;
            return Some(NamedPages { block: front.block, pages, zero: false });
        }
        state.items.pop_front()
    }

    /// Reports pages as done.
    pub(super) fn done(&self, pages: u64) {
        let mut state = self.lock();
        state.unfinished = state.unfinished.saturating_sub(pages);
        if state.unfinished == 0 {
            self.idle.notify_waiters();
        }
    }

    /// Whether everything put in has been done.
    pub(super) fn is_idle(&self) -> bool {
        self.lock().unfinished == 0
    }

    /// Waits until everything put in has been done.
    pub(super) async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.is_idle() {
                return;
            }
            idle.await;
        }
    }

    /// Blocks until there may be work, or for `limit`, which is asked for when nothing can be told any more that this would miss.
    pub(super) fn wait(&self, limit: impl FnOnce() -> Duration) {
        let state = self.lock();
        if state.items.is_empty() && !state.closed {
            // A wait that ends early or late costs one look around.
            let _ = self.changed.wait_timeout(state, limit());
        }
    }

    /// Has every reader that waits look around.
    pub(super) fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Wakes every reader, now and from now on.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(pages: Range<u64>, zero: bool) -> NamedPages {
        NamedPages { block: 0, pages, zero }
    }

    #[test]
    fn long_runs_are_split_and_zero_runs_are_not() {
        let queue = PageQueue::default();
        queue.push([work(0..10, false), work(10..1000, true)]);
        assert_eq!(queue.take(8), Some(work(0..8, false)));
        assert_eq!(queue.take(8), Some(work(8..10, false)));
        assert_eq!(queue.take(8), Some(work(10..1000, true)));
        assert_eq!(queue.take(8), None);
    }

    #[tokio::test]
    async fn it_is_idle_when_all_pages_are_done_not_when_all_are_taken() {
        let queue = PageQueue::default();
        queue.push([work(0..10, false)]);
        while queue.take(3).is_some() {}
        queue.done(9);
        let waited = tokio::time::timeout(Duration::from_millis(10), queue.idle()).await;
        assert!(waited.is_err(), "one page is not done");
        queue.done(1);
        queue.idle().await;
    }
}
