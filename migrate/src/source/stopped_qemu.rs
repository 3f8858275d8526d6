//! The source's QEMU once it has stopped the guest: it holds the memory until all of that is at the destination.

use std::sync::Arc;

use super::aborted::cancel_qemu;
use super::error::SourceError;
use super::memory::SourceMemory;
use super::pause::Pause;
use super::session::Session;
use crate::vmm::Leaving;
use vmove_types::time::Mono;

/// The QEMU that holds the guest's memory.
#[derive(Debug)]
pub(super) enum Kept {
    /// This process has stopped it.
    InMemory(StoppedQemu),
    /// An earlier process of this daemon has: the journal says which it is.
    Journaled,
}

/// A QEMU whose guest was given up.
#[derive(Debug)]
pub(super) struct StoppedQemu {
    pub qemu: Arc<dyn Leaving>,
    /// When it stopped the guest; `None` of one that was paused before.
    pub stopped_at: Option<Mono>,
    /// What its pause has consisted of so far; `None` as above.
    pub pause: Option<Pause>,
}

/// Undoes the stop of a guest that was not given up: QEMU drops its migration, so the guest runs again if it did before.
pub(super) async fn cancel_stop(qemu: &dyn Leaving, memory: &SourceMemory) -> Result<(), SourceError> {
    let back = cancel_qemu(qemu).await;
    memory.end_tracking();
    back
}

impl Kept {
    /// By which it is seen that somebody else has the guest run here again.
    pub(super) fn watch(&self) -> Option<Arc<dyn Leaving>> {
        match self {
            Self::InMemory(stopped) => Some(Arc::clone(&stopped.qemu)),
            Self::Journaled => None,
        }
    }

    /// Lets the guest run again.
    pub(super) async fn bring_guest_back(self, session: &Session) -> Result<(), SourceError> {
        match self {
            Self::InMemory(stopped) => cancel_qemu(&*stopped.qemu).await,
            Self::Journaled => {
                let record = session.journal.record();
                let monitor = session.node.config.vmm.monitor(&record.vm).await;
                let monitor = monitor.map_err(SourceError::Monitor)?;
                let taken_up = monitor.take_up(record.was_running).await;
                cancel_qemu(&*taken_up.map_err(SourceError::qemu("be asked about its migration"))?).await
            }
        }
    }
}
