//! Migrations of the past that may be forgotten: the oldest, once nobody can ask for them any more.
//!
//! A journal outlives its session because the peer may come back after hours and ask how it ended, and takes "no such session" for "it
//! never came to be". So only these are forgotten, however many there are:
//!
//! * at the source: the guest has left and its memory is freed, or it is back and the destination knows;
//! * at the destination: the guest never was here, or the source has said that it freed its side.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::engine::Engine;
use crate::history::session_ids;
use crate::ownership::{DestinationState, SourceState};
use crate::records::{DestinationRecord, SourceRecord};
use vmove_node::blocking::spawn_blocking;
use vmove_node::disk::Disk;
use vmove_node::journal::Journal;
use vmove_node::peer::SessionId;

impl Engine {
    /// Removes the oldest migrations beyond [`crate::engine::EngineConfig::keep_migrations`] in a task of its own, unless that is
    /// going on already.
    pub(crate) fn forget_old(self: &Arc<Self>) {
        if self.forgetting.swap(true, Ordering::AcqRel) {
            return;
        }
        let engine = Arc::clone(self);
        // Not waited for: it may be a slow disk.
        drop(spawn_blocking(move || {
            let forgotten = engine.forget_old_now();
            engine.forgetting.store(false, Ordering::Release);
            if forgotten > 0 {
                tracing::info!(
                    forgotten,
                    kept = engine.node.config.keep_migrations,
                    "migrations of the past were forgotten"
                );
            }
        }));
    }

    fn forget_old_now(&self) -> usize {
        let all = session_ids(self.node.disk(), &self.node.config.sessions_dir);
        let old = all.into_iter().skip(self.node.config.keep_migrations);
        let forgotten = old.filter(|id| self.forget(*id)).count();
        if forgotten > 0 {
            self.forget_groups();
        }
        forgotten
    }

    fn forget(&self, id: SessionId) -> bool {
        let dir = self.node.session_dir(id);
        let held = self.lock().get(&id).is_some_and(|handle| handle.progress.borrow().outcome.holds_vm());
        if held || !nobody_asks(self.node.disk(), &dir) {
            return false;
        }
        if let Err(error) = self.node.disk().remove_dir_all(&dir) {
            tracing::warn!(dir = %dir.display(), %error, "could not remove the journal of an old migration");
            return false;
        }
        self.lock().remove(&id);
        true
    }
}

/// What the journals in a session's folder say. One that cannot be read may say anything: it stays. One that never began says nothing.
fn nobody_asks(disk: &dyn Disk, dir: &Path) -> bool {
    let of_source = Journal::<SourceRecord>::read_begun_on(disk, &dir.join("source.jsonl"));
    let of_destination = Journal::<DestinationRecord>::read_begun_on(disk, &dir.join("destination.jsonl"));
    let (Ok(of_source), Ok(of_destination)) = (of_source, of_destination) else { return false };
    let source_over = of_source.is_none_or(|record| match record.state {
        SourceState::Released => record.freed,
        SourceState::Aborted => !record.untold,
        SourceState::Committed => record.freed,
        SourceState::Warm | SourceState::Stopped => false,
    });
    let destination_over = of_destination.is_none_or(|record| match record.state {
        DestinationState::Gone => true,
        DestinationState::Complete => record.released,
        DestinationState::Filling | DestinationState::Loaded | DestinationState::Owner => false,
    });
    source_over && destination_over
}

#[cfg(test)]
pub(crate) mod tests;
