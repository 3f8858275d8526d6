//! The bridge: a view of the store that is kept current, and operations that change the store by compare and swap.
//!
//! Any number of bridges share a store. None of them holds anything that is not in the store, so any may be killed at any time: what
//! was committed is there for the others, and what was not never was.

mod error;
mod grant;
mod moves;
mod nodes;
mod plans;
mod retain;
mod sweep;
mod sync;
#[cfg(test)]
pub(crate) mod tests;
mod view;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

pub use error::BridgeError;
pub use grant::{Ask, Granted, Want};
pub use moves::Arrival;
pub use retain::{RetainError, Retention};
pub use view::{Known, View};

#[cfg(test)]
pub(crate) use tests::Running;

use crate::clock::Clock;
use crate::store::{Committed, Part, Revision, Store, StoreError, Txn};

/// How long an operation tries again when others were faster, or the store does not answer. Tests start etcd in the middle, on
/// machines that may be very busy.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 120 } else { 10 });

/// See the [module](self).
#[derive(Debug)]
pub struct Bridge {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    view: Mutex<Arc<View>>,
    state: watch::Sender<State>,
    patience: Duration,
    sweeper: Mutex<sweep::Sweeper>,
    /// Pulses that were begun, and the last one: its number, and its transaction if it happened.
    pulses: AtomicU64,
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
    /// A bridge that has not read anything yet: [`Bridge::follow`] does.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Arc<Self> {
        let out_of_touch = Some(format!("the store {} has not been read yet", store.name()));
        let (state, _) = watch::channel(State { revision: Revision(0), out_of_touch });
        let sweeper = Mutex::new(sweep::Sweeper::default());
        let (pulses, pulse) = (AtomicU64::new(0), tokio::sync::Mutex::default());
        Arc::new(Self {
            store,
            clock,
            view: Mutex::default(),
            state,
            patience: PATIENCE,
            sweeper,
            pulses,
            pulse,
        })
    }

    /// The store, for those who show its name.
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

    /// What the store holds, as far as is known.
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

    /// Accounting records by key, as they were written, the oldest first. They are not part of the view: there may be very many, and
    /// no decision needs them.
    ///
    /// # Errors
    /// The store does not answer.
    pub async fn records(&self) -> Result<Vec<(String, String)>, BridgeError> {
        let read = self.store.read(Part::Below(crate::keys::RECORDS)).await?;
        Ok(read.entries.into_iter().map(|(key, entry)| (key, entry.value)).collect())
    }

    /// Waits until the view shows a transaction of our own, so that whoever asks next sees it.
    async fn settle(&self, revision: Revision) {
        let mut state = self.state.subscribe();
        let shown = state.wait_for(|state| state.revision >= revision);
        // The store has it. If the watch lags, only the next answer of this bridge is late.
        let _ = tokio::time::timeout(Duration::from_secs(2), shown).await;
    }

    /// Waits until the view is newer than it was, and current.
    async fn news(&self, than: Revision, longest: Duration) {
        let mut state = self.state.subscribe();
        let newer = state.wait_for(|state| state.revision > than && state.out_of_touch.is_none());
        let _ = tokio::time::timeout(longest, newer).await;
    }

    /// Changes something by compare and swap: looks, makes a transaction, and starts over as long as others were faster. An answer
    /// that was lost is looked for in the view: `make` finds what it wanted to do already done.
    async fn change<T>(
        &self,
        mut make: impl FnMut(&View) -> Result<Step<T>, BridgeError>,
    ) -> Result<T, BridgeError> {
        let start = tokio::time::Instant::now();
        loop {
            let view = self.view_when_current(start).await?;
            let (txn, done) = match make(&view) {
                Ok(Step::Done(done)) => return Ok(done),
                Ok(Step::Commit(txn, done)) => (txn, done),
                Err(_) if self.catch_up(&view, start).await? => continue,
                Err(error) => return Err(error),
            };
            if self.commit(txn, &view, start).await? {
                return Ok(done);
            }
        }
    }

    /// Before something is refused: whether the view was behind what other bridges have answered before, and is not any more. A
    /// heartbeat for a lease that another bridge has just given must not be told that there is none.
    async fn catch_up(&self, view: &View, start: tokio::time::Instant) -> Result<bool, BridgeError> {
        if !self.store.is_shared() || start.elapsed() >= self.patience {
            return Ok(false);
        }
        // The pulse comes after everything that was answered before; once it is seen, so is all of that.
        let Some(pulse) = self.pulse().await else {
            // The store is away: whatever was to be refused is asked again when it is back.
            tokio::time::sleep(Duration::from_millis(100)).await;
            return Ok(true);
        };
        self.settle(pulse).await;
        Ok(self.view()?.differs(view))
    }

    /// A pulse that was begun after this was called. All who ask while one is under way share the next.
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

    /// The view as soon as it is current, while patience lasts.
    async fn view_when_current(&self, start: tokio::time::Instant) -> Result<Arc<View>, BridgeError> {
        let mut state = self.state.subscribe();
        let left = self.patience.saturating_sub(start.elapsed());
        let _ = tokio::time::timeout(left, state.wait_for(|state| state.out_of_touch.is_none())).await;
        self.view()
    }

    /// Commits what was made from `view`: true if it happened, false if it is to be made anew.
    async fn commit(&self, txn: Txn, view: &View, start: tokio::time::Instant) -> Result<bool, BridgeError> {
        let over = start.elapsed() >= self.patience;
        match self.store.commit(txn).await {
            Ok(Committed::At(revision)) => {
                self.settle(revision).await;
                Ok(true)
            }
            Ok(Committed::Conflict) if over => Err(BridgeError::Contended { waited: self.patience }),
            Ok(Committed::Conflict) => {
                self.news(view.revision(), Duration::from_millis(500)).await;
                Ok(false)
            }
            // Made anew, it conflicts with itself if it had happened after all.
            Err(StoreError::Unknown { .. } | StoreError::Unreachable { .. }) if !over => {
                tokio::time::sleep(Duration::from_millis(100)).await;
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// What an operation makes of a view.
enum Step<T> {
    /// Nothing has to be changed.
    Done(T),
    /// This has to be committed, and then the operation has come to this.
    Commit(Txn, T),
}
