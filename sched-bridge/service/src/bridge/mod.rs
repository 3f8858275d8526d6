//! The bridge: a current view of the store, and operations that change the store by compare and swap.
//!
//! Any number of bridges share a store. A bridge keeps nothing that is not in the store, so any bridge may be killed at any time: the
//! others find everything that it committed, and nothing else.

mod checkpoints;
mod error;
mod grant;
mod moves;
mod nodes;
mod plans;
mod resize;
mod retention;
#[cfg(test)]
mod share_tests;
mod sweep;
mod sync;
#[cfg(test)]
pub(crate) mod tests;
mod transactions;
mod view;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

pub use error::BridgeError;
pub use grant::{GrantRequest, Granted, Wanted};
pub use moves::Arrival;
pub use resize::GrowRequest;
pub(crate) use resize::resident;
pub use retention::{Retention, RetentionError};
pub use sweep::{Known, LeasedOn, Listing};
pub use view::{LeaseEntry, View};

use crate::clock::Clock;
use crate::store::{Committed, KeyRange, Revision, Store, StoreError, Txn};

/// For so long an operation is repeated while other bridges are faster or the store does not answer. Tests restart etcd meanwhile, on
/// machines that may be busy.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 120 } else { 10 });
/// Between two attempts while the store does not answer.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// For so long an operation waits for the view to show its own transaction.
const SHOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// For so long an operation that met a conflict waits for the view to show the other transaction.
const CONFLICT_TIMEOUT: Duration = Duration::from_millis(500);

/// A bridge. See the [module](self).
#[derive(Debug)]
pub struct Bridge {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    view: Mutex<Arc<View>>,
    state: watch::Sender<State>,
    sweeper: Mutex<sweep::Sweeper>,
    /// Number of pulses begun.
    pulses: AtomicU64,
    /// The last pulse: its number, and its revision if it was committed.
    pulse: tokio::sync::Mutex<(u64, Option<Revision>)>,
}

/// Whether the view is current.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Revision of the view.
    pub revision: Revision,
    /// Why the view is not current, if it is not.
    pub out_of_touch: Option<String>,
}

impl Bridge {
    /// A bridge with an empty view: [`Bridge::follow`] reads the store.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Arc<Self> {
        let out_of_touch = Some(format!("the store {} has not been read yet", store.name()));
        let (state, _) = watch::channel(State { revision: Revision(0), out_of_touch });
        Arc::new(Self {
            store,
            clock,
            view: Mutex::default(),
            state,
            sweeper: Mutex::default(),
            pulses: AtomicU64::new(0),
            pulse: tokio::sync::Mutex::default(),
        })
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The clocks.
    #[must_use]
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Whether the view is current.
    #[must_use]
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// The current view.
    ///
    /// # Errors
    /// The store cannot be reached, so that the view may be old.
    pub fn view(&self) -> Result<Arc<View>, BridgeError> {
        if let Some(reason) = &self.state.borrow().out_of_touch {
            return Err(BridgeError::OutOfTouch { reason: reason.clone() });
        }
        Ok(self.view_even_if_old())
    }

    fn view_even_if_old(&self) -> Arc<View> {
        Arc::clone(&self.view.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until the view is current.
    ///
    /// # Errors
    /// The store did not answer within `timeout`.
    pub async fn wait_until_current(&self, timeout: Duration) -> Result<Arc<View>, BridgeError> {
        let mut state = self.state.subscribe();
        let current = state.wait_for(|state| state.out_of_touch.is_none());
        let _ = tokio::time::timeout(timeout, current).await;
        self.view()
    }

    /// Accounting records by key, as they were written, the oldest first. They are not part of the view: there may be very many, and
    /// no decision needs them.
    ///
    /// # Errors
    /// The store does not answer.
    pub async fn records(&self) -> Result<Vec<(String, String)>, BridgeError> {
        let read = self.store.read(KeyRange::Prefix(crate::keys::RECORDS)).await?;
        Ok(read.entries.into_iter().map(|(key, entry)| (key, entry.value)).collect())
    }

    /// Changes the store by compare and swap: makes a transaction from the view and commits it, again from a newer view as long as
    /// other bridges are faster. If the answer to a commit was lost, `make` finds in the next view that everything is done.
    async fn change<T>(
        &self,
        mut make: impl FnMut(&View) -> Result<Attempt<T>, BridgeError>,
    ) -> Result<T, BridgeError> {
        let start = Instant::now();
        loop {
            let view = self.view_since(start).await?;
            let (txn, result) = match make(&view) {
                Ok(Attempt::Done(result)) => return Ok(result),
                Ok(Attempt::Commit(txn, result)) => (txn, result),
                Err(_) if self.catch_up(&view, start).await? => continue,
                Err(error) => return Err(error),
            };
            if self.commit(txn, &view, start).await? {
                return Ok(result);
            }
        }
    }

    /// The view as soon as it is current, for an operation that began at `start`.
    async fn view_since(&self, start: Instant) -> Result<Arc<View>, BridgeError> {
        self.wait_until_current(OPERATION_TIMEOUT.saturating_sub(start.elapsed())).await
    }

    /// Commits what was made from `view`. False: it was not committed, and is to be made again from a newer view.
    async fn commit(&self, txn: Txn, view: &View, start: Instant) -> Result<bool, BridgeError> {
        let timed_out = start.elapsed() >= OPERATION_TIMEOUT;
        match self.store.commit(txn).await {
            Ok(Committed::At(revision)) => {
                self.wait_until_shown(revision).await;
                Ok(true)
            }
            Ok(Committed::Conflict) if timed_out => Err(BridgeError::Contended { waited: OPERATION_TIMEOUT }),
            Ok(Committed::Conflict) => {
                self.wait_until_newer(view.revision()).await;
                Ok(false)
            }
            // If it was committed after all, the next attempt conflicts with it and finds it done.
            Err(StoreError::Unknown { .. } | StoreError::Unreachable { .. }) if !timed_out => {
                tokio::time::sleep(RETRY_INTERVAL).await;
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until the view shows a transaction of this bridge, so that its next answer includes it.
    async fn wait_until_shown(&self, revision: Revision) {
        let mut state = self.state.subscribe();
        let shown = state.wait_for(|state| state.revision >= revision);
        // It is committed in any case. If the watch lags, only the next answer of this bridge is late.
        let _ = tokio::time::timeout(SHOWN_TIMEOUT, shown).await;
    }

    /// Waits until the view is current and newer than a revision.
    async fn wait_until_newer(&self, than: Revision) {
        let mut state = self.state.subscribe();
        let newer = state.wait_for(|state| state.revision > than && state.out_of_touch.is_none());
        let _ = tokio::time::timeout(CONFLICT_TIMEOUT, newer).await;
    }

    /// Before an operation is refused: makes sure that the view contains whatever other bridges have answered before. True if it did
    /// not, so that the operation is to be tried again. Otherwise a heartbeat for a lease that another bridge has just granted could
    /// be refused.
    async fn catch_up(&self, view: &View, start: Instant) -> Result<bool, BridgeError> {
        if !self.store.is_shared() || start.elapsed() >= OPERATION_TIMEOUT {
            return Ok(false);
        }
        // The pulse is committed after everything that was answered before. A view that shows it shows all of that.
        let Some(pulse) = self.pulse().await else {
            // The store does not answer: the operation is tried again until it does.
            tokio::time::sleep(RETRY_INTERVAL).await;
            return Ok(true);
        };
        self.wait_until_shown(pulse).await;
        Ok(self.view()?.differs(view))
    }

    /// Commits a pulse, a transaction that changes nothing of interest. Callers that come while one is under way share the next.
    async fn pulse(&self) -> Option<Revision> {
        let begun = self.pulses.load(Ordering::SeqCst);
        let mut last = self.pulse.lock().await;
        if last.0 <= begun {
            let number = self.pulses.fetch_add(1, Ordering::SeqCst) + 1;
            let committed = self.store.commit(Txn::default().put(crate::keys::PULSE, "")).await;
            let revision = match committed {
                Ok(Committed::At(revision)) => Some(revision),
                _ => None,
            };
            *last = (number, revision);
        }
        last.1
    }
}

/// What an operation makes from a view.
enum Attempt<T> {
    /// Nothing has to be changed.
    Done(T),
    /// This transaction has to be committed; then this is the result.
    Commit(Txn, T),
}
