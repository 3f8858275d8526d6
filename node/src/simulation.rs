//! A process of the daemon that exists only in a simulation (`tests/sim`), beside others in one real process: its tasks take turns on one
//! thread, its ids follow from a seed, and it can be killed.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::{AbortHandle, JoinHandle};
use uuid::Uuid;

/// Handles of tasks that have ended are dropped when there are more than this.
const MANY_TASKS: usize = 256;

tokio::task_local! {
    static CURRENT: Process;
}

/// One process.
#[derive(Debug, Clone)]
pub struct Process(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    /// State of SplitMix64.
    ids: u64,
    tasks: Vec<AbortHandle>,
    killed: bool,
}

impl Process {
    /// A process whose ids follow from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(Inner { ids: seed, tasks: Vec::new(), killed: false })))
    }

    /// Starts a task of this process. Whatever that starts by [`task::spawn`](crate::task::spawn) belongs to it, too.
    pub fn spawn<F>(&self, work: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let task = tokio::spawn(CURRENT.scope(self.clone(), work));
        let mut inner = self.lock();
        if inner.killed {
            task.abort();
        }
        if inner.tasks.len() >= MANY_TASKS {
            inner.tasks.retain(|task| !task.is_finished());
        }
        inner.tasks.push(task.abort_handle());
        task
    }

    /// None of its tasks goes on, but for the one that runs now: that ends where it waits next.
    pub fn kill(&self) {
        let tasks = {
            let mut inner = self.lock();
            inner.killed = true;
            std::mem::take(&mut inner.tasks)
        };
        tasks.iter().for_each(AbortHandle::abort);
    }

    /// The next id of its sequence, version 4.
    pub(crate) fn uuid(&self) -> Uuid {
        let mut inner = self.lock();
        let bytes = (u128::from(inner.next()) << 64 | u128::from(inner.next())).to_le_bytes();
        uuid::Builder::from_random_bytes(bytes).into_uuid()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    const fn next(&mut self) -> u64 {
        self.ids = self.ids.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let state = (self.ids ^ (self.ids >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^ (state >> 31)
    }
}

/// The process that the running task belongs to; none outside of simulations.
pub(crate) fn current() -> Option<Process> {
    CURRENT.try_with(Process::clone).ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_killed_process_does_nothing_more_and_others_go_on() {
        let counted = Arc::new(Mutex::new([0, 0]));
        let count = |which: usize| {
            let counted = Arc::clone(&counted);
            async move {
                // By a task of a task, as sessions do.
                let counting = crate::task::spawn(async move {
                    loop {
                        tokio::time::sleep(Duration::from_secs(1)).await;
                        counted.lock().unwrap()[which] += 1;
                    }
                });
                let _ = counting.await;
            }
        };
        let (one, other) = (Process::new(1), Process::new(2));
        drop(one.spawn(count(0)));
        drop(other.spawn(count(1)));
        tokio::time::sleep(Duration::from_millis(2500)).await;
        one.kill();
        drop(one.spawn(count(0)));
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(*counted.lock().unwrap(), [2, 4]);
    }

    #[tokio::test]
    async fn ids_follow_from_the_seed_within_a_process_only() {
        let ids = |seed| Process::new(seed).spawn(async { [crate::chance::uuid(), crate::chance::uuid()] });
        let (a, again, b) = (ids(7).await.unwrap(), ids(7).await.unwrap(), ids(8).await.unwrap());
        assert_eq!(a, again);
        assert_ne!(a[0], a[1]);
        assert_ne!(a, b);
        assert_ne!(crate::chance::uuid(), crate::chance::uuid());
    }
}
