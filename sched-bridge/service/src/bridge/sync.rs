//! Keeps the view current.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::{Bridge, State, View};
use crate::keys;
use crate::store::{Changes, Part, StoreError, Txn};

/// Pause before the store is tried again.
const PAUSE: Duration = Duration::from_millis(200);
/// After so long without news a shared store has to prove that it would tell.
const QUIET: Duration = Duration::from_secs(5);

impl Bridge {
    /// Reads the store and follows it, forever; the task ends when it is dropped.
    pub async fn follow(self: Arc<Self>) {
        loop {
            let error = match self.follow_once().await {
                Ok(()) => continue,
                Err(error) => error,
            };
            // The embedded store has no history; a write came between reading and watching. Nothing is wrong.
            if matches!(error, StoreError::Compacted { .. }) {
                continue;
            }
            let reason = error.to_string();
            if self.state.borrow().out_of_touch.is_none() {
                tracing::warn!(reason, "out of touch with the store");
            }
            self.state.send_modify(|state| state.out_of_touch = Some(reason));
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn follow_once(&self) -> Result<(), StoreError> {
        let snapshot = self.store.read(Part::AllBut(keys::RECORDS)).await?;
        let mut changes = self.store.watch(snapshot.revision).await?;
        let view = View::of(&snapshot);
        let revision = view.revision();
        *self.view.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(view);
        if self.state.borrow().out_of_touch.is_some() {
            tracing::info!(%revision, store = self.store.name(), "in touch with the store");
        }
        self.state.send_replace(State { revision, out_of_touch: None });
        loop {
            match tokio::time::timeout(QUIET, changes.recv()).await {
                Ok(Some(news)) => self.take_over(&news?),
                Ok(None) => return Ok(()),
                // A connection whose other end lost its power says nothing, forever.
                Err(_) if self.store.is_shared() => {
                    self.store.commit(Txn::default().put(keys::PULSE, "")).await?;
                    match tokio::time::timeout(QUIET, changes.recv()).await {
                        Ok(Some(news)) => self.take_over(&news?),
                        Ok(None) => return Ok(()),
                        Err(_) => return Err(self.silent()),
                    }
                }
                Err(_) => {}
            }
        }
    }

    fn silent(&self) -> StoreError {
        StoreError::Unreachable {
            store: self.store.name(),
            reason: format!("its watch does not tell of a change that was made {QUIET:?} ago"),
            hint: "It is read anew",
        }
    }

    fn take_over(&self, news: &Changes) {
        let revision = {
            let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
            // Copies only while somebody else looks at the old one.
            let view = Arc::make_mut(&mut view);
            view.apply(news);
            view.revision()
        };
        self.state.send_modify(|state| state.revision = revision);
    }
}
