//! One event that somebody waits for.

use std::{sync::Arc, time::Duration};

use tokio::sync::oneshot;

use super::hooks::{HookId, Hooks};
use crate::{Event, QmpError};

/// The first event that fits, of those read since the expectation was made. Make it *before* sending the command that
/// causes the event; dropping it cancels the wait.
#[derive(Debug)]
#[must_use = "an expectation does nothing unless waited for"]
pub struct Expectation {
    pub(super) name: String,
    pub(super) receiver: oneshot::Receiver<Arc<Event>>,
    pub(super) hooks: Arc<Hooks>,
    pub(super) id: HookId,
}

impl Expectation {
    /// Waits for the event.
    ///
    /// # Errors
    /// [`QmpError::Timeout`] after `deadline`, [`QmpError::Closed`] when the connection ends first.
    pub async fn wait(mut self, deadline: Duration) -> Result<Arc<Event>, QmpError> {
        match tokio::time::timeout(deadline, &mut self.receiver).await {
            Ok(Ok(event)) => Ok(event),
            Ok(Err(_)) => Err(QmpError::Closed { reason: self.hooks.close_reason() }),
            Err(_) => Err(QmpError::Timeout { command: format!("(event {})", self.name), waited: deadline }),
        }
    }
}

impl Drop for Expectation {
    fn drop(&mut self) {
        self.hooks.remove(self.id);
    }
}
