//! Keeps the view current: reads the store, then applies every change.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::{Bridge, State, View};
use crate::keys;
use crate::metrics;
use crate::store::{Changes, KeyRange, StoreError, Txn};

/// Between two attempts to reach the store.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// A shared store that sends no change for so long is tested by a change of our own.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(5);

impl Bridge {
    /// Keeps the view current until the task is dropped.
    pub async fn follow(self: Arc<Self>) {
        loop {
            let error = match self.follow_once().await {
                Ok(()) => continue,
                Err(error) => error,
            };
            // The embedded store has no history: there was a commit between reading and watching. Nothing is wrong.
            if matches!(error, StoreError::Compacted { .. }) {
                continue;
            }
            let reason = error.to_string();
            if self.state.borrow().out_of_touch.is_none() {
                tracing::warn!(reason, "out of touch with the store");
            }
            self.state.send_modify(|state| state.out_of_touch = Some(reason));
            metrics::set_store_reachable(false);
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    /// Waits until the store has been read for the first time, but no longer than this.
    pub async fn until_in_touch(&self, longest: Duration) {
        let mut state = self.state.subscribe();
        let _ = tokio::time::timeout(longest, state.wait_for(|state| state.out_of_touch.is_none())).await;
    }

    async fn follow_once(&self) -> Result<(), StoreError> {
        let snapshot = self.store.read(KeyRange::AllBut(keys::RECORDS)).await?;
        let mut watch = self.store.watch(snapshot.revision).await?;
        let view = View::of(&snapshot);
        let revision = view.revision();
        metrics::set_leases(view.leases().len());
        *self.view.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(view);
        if self.state.borrow().out_of_touch.is_some() {
            tracing::info!(%revision, store = self.store.name(), "in touch with the store");
        }
        self.state.send_replace(State { revision, out_of_touch: None });
        metrics::set_store_reachable(true);
        loop {
            match tokio::time::timeout(SILENCE_TIMEOUT, watch.recv()).await {
                Ok(Some(changes)) => self.apply(&changes?),
                Ok(None) => return Ok(()),
                // A connection to a machine that lost its power stays silent forever.
                Err(_) if self.store.is_shared() => {
                    self.store.commit(Txn::default().put(keys::PULSE, "")).await?;
                    match tokio::time::timeout(SILENCE_TIMEOUT, watch.recv()).await {
                        Ok(Some(changes)) => self.apply(&changes?),
                        Ok(None) => return Ok(()),
                        Err(_) => return Err(self.silence()),
                    }
                }
                Err(_) => {}
            }
        }
    }

    fn silence(&self) -> StoreError {
        StoreError::Unreachable {
            store: self.store.name(),
            reason: format!("its watch has not shown a change made {SILENCE_TIMEOUT:?} ago"),
            hint: "It is being read again",
        }
    }

    fn apply(&self, changes: &Changes) {
        let (revision, leases) = {
            let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
            // Copied only while somebody uses the old one.
            let view = Arc::make_mut(&mut view);
            view.apply(changes);
            (view.revision(), view.leases().len())
        };
        metrics::set_leases(leases);
        self.state.send_modify(|state| state.revision = revision);
    }
}
