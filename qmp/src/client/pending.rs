//! Commands sent and not answered yet.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use vmove_types::time::Mono;

use serde_json::Value;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::Instant,
};

use crate::QmpError;

/// In-band commands in flight. QEMU queues 8 and then stops reading, which would also hold up out-of-band commands.
const IN_BAND: usize = 7;

type Answer = (Result<Value, QmpError>, Mono);

/// Replies awaited, by id.
#[derive(Debug)]
pub(crate) struct Pending {
    table: Mutex<Table>,
    in_band: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Table {
    waiting: HashMap<u64, Waiting>,
    closed: Option<String>,
}

#[derive(Debug)]
struct Waiting {
    command: String,
    answer: oneshot::Sender<Answer>,
    /// Given back with the reply, not when the caller stops waiting: QEMU is still at it.
    _permit: Option<OwnedSemaphorePermit>,
}

impl Default for Pending {
    fn default() -> Self {
        Self { table: Mutex::default(), in_band: Arc::new(Semaphore::new(IN_BAND)) }
    }
}

impl Pending {
    /// A place among the in-band commands.
    pub(crate) async fn in_band(&self) -> OwnedSemaphorePermit {
        // The semaphore is never closed.
        #[allow(clippy::expect_used, reason = "nothing closes this semaphore")]
        self.in_band.clone().acquire_owned().await.expect("semaphore is never closed")
    }

    pub(crate) fn register(
        &self,
        id: u64,
        command: &str,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Result<Reply, QmpError> {
        let (answer, receiver) = oneshot::channel();
        let mut table = self.lock();
        if let Some(reason) = &table.closed {
            return Err(QmpError::Closed { reason: reason.clone() });
        }
        table.waiting.insert(id, Waiting { command: command.to_owned(), answer, _permit: permit });
        Ok(Reply { command: command.to_owned(), receiver })
    }

    /// Gives the reply to whoever waits. False if the id is not ours (or answered already).
    pub(crate) fn answer(
        &self,
        id: u64,
        at: Mono,
        result: impl FnOnce(&str) -> Result<Value, QmpError>,
    ) -> bool {
        let Some(waiting) = self.lock().waiting.remove(&id) else {
            return false;
        };
        // A caller that stopped waiting has dropped its end.
        let _ = waiting.answer.send((result(&waiting.command), at));
        true
    }

    /// Fails everyone, and all who come later.
    pub(crate) fn close(&self, reason: &str) {
        let waiting = {
            let mut table = self.lock();
            table.closed.get_or_insert_with(|| reason.to_owned());
            std::mem::take(&mut table.waiting)
        };
        let now = Mono::now();
        for waiting in waiting.into_values() {
            let _ = waiting.answer.send((Err(QmpError::Closed { reason: reason.to_owned() }), now));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reply that will come.
#[derive(Debug)]
pub(crate) struct Reply {
    command: String,
    receiver: oneshot::Receiver<Answer>,
}

impl Reply {
    /// Waits until `until`; `deadline` is what an error reports.
    pub(crate) async fn wait(self, until: Instant, deadline: Duration) -> Result<Value, QmpError> {
        self.wait_timed(until, deadline).await.map(|(value, _)| value)
    }

    /// As [`Reply::wait`], with the time at which the reply was read.
    pub(crate) async fn wait_timed(
        self,
        until: Instant,
        deadline: Duration,
    ) -> Result<(Value, Mono), QmpError> {
        match tokio::time::timeout_at(until, self.receiver).await {
            Ok(Ok((result, at))) => result.map(|value| (value, at)),
            Ok(Err(_)) => Err(QmpError::Closed { reason: "the client was dropped".to_owned() }),
            Err(_) => Err(QmpError::Timeout { command: self.command, waited: deadline }),
        }
    }
}
