//! An endpoint that answers on a thread of its own.

use std::sync::{Arc, Mutex, PoisonError};

use crate::counters::{Counters, CountersHandle};
use crate::error::FabricError;
use crate::thread::SchedOutcome;

/// A connection that is being served. Dropping it closes the connection and joins the thread, if there is one.
#[derive(Debug)]
pub struct ServeHandle {
    counters: CountersHandle,
    state: Arc<ServeState>,
    stop: Option<Box<dyn StopServing>>,
}

/// Ends the serving of one connection: called once, returns when no thread touches the connection any more.
pub(crate) trait StopServing: Send + Sync + std::fmt::Debug {
    fn stop(self: Box<Self>);
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
}

impl ServeState {
    pub(crate) fn started(&self, sched: SchedOutcome) {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).sched = Some(sched);
    }

    /// The connection ended: by an orderly close (`None`), or not.
    pub(crate) fn finished(&self, error: Option<FabricError>) {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        outcome.finished = true;
        outcome.error = error.map(Arc::new);
    }
}

impl ServeHandle {
    pub(crate) fn new(
        counters: CountersHandle,
        state: Arc<ServeState>,
        stop: Option<Box<dyn StopServing>>,
    ) -> Self {
        Self { counters, state, stop }
    }

    /// What went over the connection so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters.read()
    }

    /// The same, readable after the handle is gone.
    #[must_use]
    pub fn counters_handle(&self) -> CountersHandle {
        self.counters.clone()
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

    /// How far the thread got the scheduling it was asked to take; `None` before it ran, or without a thread.
    #[must_use]
    pub fn sched(&self) -> Option<SchedOutcome> {
        self.state.outcome.lock().unwrap_or_else(PoisonError::into_inner).sched
    }
}

impl Drop for ServeHandle {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            stop.stop();
        }
    }
}
