//! An endpoint that answers on a thread of its own.

use std::net::Shutdown;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::counters::{Counters, CountersHandle};
use crate::error::FabricError;
use crate::socket::Socket;
use crate::thread::{SchedOutcome, ThreadClock};

/// A connection that is being served. Dropping it closes the connection and joins the thread.
#[derive(Debug)]
pub struct ServeHandle {
    counters: CountersHandle,
    state: Arc<ServeState>,
    how: Serving,
}

/// Who answers.
#[derive(Debug)]
enum Serving {
    /// A thread. Shutting down the connection's socket ends it.
    Thread { socket: Socket, thread: Option<JoinHandle<()>> },
    /// Nobody has to: dropping what is held closes the connection.
    #[cfg(feature = "simulation")]
    Held { _connection: Box<dyn std::any::Any + Send + Sync> },
}

/// What the serving thread leaves for the handle.
#[derive(Debug, Default)]
pub(crate) struct ServeState {
    outcome: Mutex<Outcome>,
}

#[derive(Debug, Default)]
struct Outcome {
    finished: bool,
    error: Option<Arc<FabricError>>,
    sched: Option<SchedOutcome>,
    /// Of the thread, once it runs.
    clock: Option<ThreadClock>,
    /// Processor time that it had used when it ended, in nanoseconds.
    used_ns: u64,
}

impl ServeState {
    /// The calling thread answers from here on; with the scheduling that it got, unless it got none.
    pub(crate) fn started(&self, sched: Option<SchedOutcome>) {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        outcome.clock = Some(ThreadClock::of_this_thread());
        outcome.sched = sched;
    }

    /// The connection ended: by an orderly close (`None`), or not.
    pub(crate) fn finished(&self, error: Option<FabricError>) {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        outcome.finished = true;
        outcome.used_ns = outcome.clock.and_then(ThreadClock::used_ns).unwrap_or_default();
        outcome.error = error.map(Arc::new);
    }
}

impl ServeHandle {
    pub(crate) fn new(
        counters: CountersHandle,
        state: Arc<ServeState>,
        socket: Socket,
        thread: JoinHandle<()>,
    ) -> Self {
        Self { counters, state, how: Serving::Thread { socket, thread: Some(thread) } }
    }

    /// Of a back end whose peer needs no answers: the connection is open as long as this is held.
    #[cfg(feature = "simulation")]
    pub(crate) fn holding(counters: CountersHandle, connection: impl std::any::Any + Send + Sync) -> Self {
        let how = Serving::Held { _connection: Box::new(connection) };
        Self { counters, state: Arc::default(), how }
    }

    /// What went over the connection so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters.read()
    }

    /// The same, readable after the handle was dropped.
    #[must_use]
    pub fn counters_handle(&self) -> CountersHandle {
        self.counters.clone()
    }

    /// Processor time that answering has used so far, in nanoseconds. The thread that answers has no part in this.
    #[must_use]
    pub fn cpu_ns(&self) -> u64 {
        let outcome = self.state.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if outcome.finished {
            return outcome.used_ns;
        }
        outcome.clock.and_then(ThreadClock::used_ns).unwrap_or_default()
    }

    /// Whether the connection has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.state.outcome.lock().unwrap_or_else(PoisonError::into_inner).finished
    }

    /// Why the connection ended, if the peer did not simply close it.
    #[must_use]
    pub fn error(&self) -> Option<Arc<FabricError>> {
        self.state.outcome.lock().unwrap_or_else(PoisonError::into_inner).error.clone()
    }

    /// How far the thread got the scheduling it was asked to take; `None` before it ran.
    #[must_use]
    pub fn sched(&self) -> Option<SchedOutcome> {
        self.state.outcome.lock().unwrap_or_else(PoisonError::into_inner).sched
    }
}

impl Drop for ServeHandle {
    fn drop(&mut self) {
        #[cfg_attr(not(feature = "simulation"), expect(irrefutable_let_patterns, reason = "one of one"))]
        if let Serving::Thread { socket, thread } = &mut self.how {
            let _ = socket.shutdown(Shutdown::Both);
            if let Some(thread) = thread.take() {
                let _ = thread.join();
            }
        }
    }
}
