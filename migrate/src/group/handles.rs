//! The groups that this process of the daemon knows.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use vmove_node::peer::SessionId;

use super::barrier::Barrier;
use super::record::GroupRecord;

/// All groups of this process.
#[derive(Debug, Default)]
pub(crate) struct Groups(Mutex<BTreeMap<SessionId, GroupHandle>>);

/// What is kept of a group.
#[derive(Debug, Clone)]
pub(crate) struct GroupHandle {
    /// As its journal says, or shall say.
    pub record: watch::Receiver<GroupRecord>,
    /// Where its members wait; nothing once the daemon was started anew.
    pub barrier: Option<Arc<Barrier>>,
    /// Ends what its members are at.
    pub cancel: CancellationToken,
}

impl Groups {
    /// All of them. Never across an `await`.
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<SessionId, GroupHandle>> {
        // Single insertions: a panic leaves nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
