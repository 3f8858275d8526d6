//! Ways out of a session whose peer never comes back: an operator ends the VM here, or has the copy that is left at the source run again.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::Instrument as _;

use crate::destination;
use crate::engine::{Engine, EngineError, session_span};
use crate::group::journals;
use crate::kept_memory;
use crate::owed;
use crate::ownership::{DestinationState, SourceEvent, SourceState};
use crate::publish::{Abandon, Publisher};
use crate::records::{DestinationRecord, SourceRecord};
use crate::source;
use vmove_node::files::cannot_write;
use vmove_node::journal::Journal;
use vmove_node::migrations::{AbandonError, Abandoned};
use vmove_node::peer::SessionId;
use vmove_types::problem::chain;
use vmove_types::progress::{GuestPlace, Outcome, Progress, Role};

/// A session that waits ends as soon as it is told; one in Loaded ends its QEMU first.
const END_TIMEOUT: Duration = Duration::from_secs(15);

/// How a session has come to wait no longer.
#[derive(Debug, PartialEq, Eq)]
enum Waited {
    /// It has ended.
    Ended,
    /// Nothing is left to do but to write its journal.
    Owes,
}

/// The session that holds a VM.
struct Holder {
    id: SessionId,
    role: Role,
    progress: watch::Receiver<Progress>,
    abandon: Abandon,
}

impl Engine {
    /// Ends the session that holds a VM, if its peer is lost or it failed. The guest is not touched, except that a copy which never ran
    /// is removed. What the peer asks later is answered from the journal.
    ///
    /// # Errors
    /// [`AbandonError`]; the session holds its VM as before.
    pub async fn abandon(&self, vm: &str) -> Result<Abandoned, AbandonError> {
        let Some(holder) = self.holder(vm) else { return Ok(Abandoned::NotHeld) };
        let id = holder.id;
        // On its way home it is held by that, as by any migration.
        if holder.role == Role::Destination && self.visitor(vm).is_some() {
            // Its session hears of its end, and has its home free the rest.
            return Ok(Abandoned::Free { owed: None });
        }
        if holder.end_waiting().await? == Waited::Owes {
            // It writes its journal itself, and holds the name until then.
            let owed = holder.progress.borrow().unwritten.clone();
            tracing::warn!(migration = %id, vm, owed, "a VM is ended before the journal of its migration is written");
            let here = self.node.vms.has(vm);
            return Ok(if here { Abandoned::Free { owed } } else { Abandoned::Removed { owed } });
        }
        let left = match holder.role {
            Role::Source => self.abandon_source(id),
            Role::Destination => self.abandon_destination(id).await,
        };
        let left = left.map_err(|(path, source)| AbandonError::Journal { path, source })?;
        // From now on the journal answers for it.
        self.lock().remove(&id);
        tracing::warn!(migration = %id, vm, "migration ended by an operator");
        Ok(left)
    }

    /// Whether a session that is known to this process holds the VM.
    pub(crate) fn is_held(&self, vm: &str) -> bool {
        self.holder(vm).is_some()
    }

    fn holder(&self, vm: &str) -> Option<Holder> {
        let sessions = self.lock();
        let holding = sessions.iter().filter(|(_, h)| h.vm == vm && h.progress.borrow().outcome.holds_vm());
        // A guest that leaves while it visits is held by two sessions: the one by which it leaves decides; of several that tried, the one at work.
        let (id, handle) = holding.max_by_key(|(_, h)| (h.role == Role::Source, h.is_running()))?;
        Some(Holder {
            id: *id,
            role: handle.role,
            progress: handle.progress.clone(),
            abandon: handle.abandon.clone(),
        })
    }

    fn abandon_source(&self, id: SessionId) -> Result<Abandoned, (std::path::PathBuf, std::io::Error)> {
        let path = self.node.session_dir(id).join("source.jsonl");
        let journal = self.open_source(id).map_err(|error| (path, error))?;
        let (state, vm) = (journal.record().state, journal.record().vm.clone());
        // Safe without its line: a daemon started anew finds neither QEMU nor the VM's record.
        let owed = write_or_owe(journal, |r| match state.step(SourceEvent::GiveUp) {
            Ok(SourceState::Aborted) => {
                r.enter(SourceState::Aborted);
                r.to_resume = false;
            }
            // The guest was given away: what is here is a copy.
            _ => r.freed = true,
        });
        if vm.libvirt.is_none() && kept_memory::is_kept(&vm) {
            kept_memory::let_memory_go(self.node.disk(), &vm);
            if state == SourceState::Committed && !self.node.config.vmm.is_there(&vm) {
                // Of a guest that visits another node, nothing but its memory was here.
                return Ok(Abandoned::Removed { owed });
            }
        }
        Ok(Abandoned::Free { owed })
    }

    fn open_source(&self, id: SessionId) -> std::io::Result<Journal<SourceRecord>> {
        let opened = journals::open(self.node.disk(), &self.node.config.sessions_dir, id)?;
        opened.ok_or_else(|| std::io::ErrorKind::NotFound.into())
    }

    async fn abandon_destination(
        &self,
        id: SessionId,
    ) -> Result<Abandoned, (std::path::PathBuf, std::io::Error)> {
        let path = self.node.destination_journal(id);
        let journal = match Journal::<DestinationRecord>::open_on(self.node.disk(), &path) {
            Ok(journal) => journal,
            Err(error) => return Err((path, error)),
        };
        if !journal.record().state.may_run() {
            if journal.record().state != DestinationState::Gone {
                destination::discard(&self.node, journal).await;
            }
            return Ok(Abandoned::Removed { owed: None });
        }
        let record = journal.record().clone();
        // As at the source.
        let owed = write_or_owe(journal, |r| r.abandoned = true);
        if let (Some(vm), Err(_)) = (&record.vm, self.node.vms.get(&record.prepare.vm)) {
            // It was never resumed here: whoever ends it finds it by its record.
            if let Err(error) = self.node.vms.put_owing(vm.clone()) {
                tracing::warn!(
                    vm = vm.name,
                    error = chain(&error),
                    "could not record a VM that is to be ended"
                );
            }
        }
        destination::tidy(&self.node, &record);
        Ok(Abandoned::Free { owed })
    }

    /// Has the guest's copy at the source run again. The caller knows that the guest has ended at the destination: what it did there is
    /// lost, and it must not run twice. Gives what was lost, in words for the operator.
    ///
    /// # Errors
    /// [`EngineError::UnknownSession`], [`EngineError::NotReclaimable`], or that the journal cannot be written.
    pub async fn reclaim(self: &Arc<Self>, id: &str) -> Result<String, EngineError> {
        let id = self.resolve(id)?;
        let path = self.node.session_dir(id).join("source.jsonl");
        let read = journals::read(self.node.disk(), &self.node.config.sessions_dir, id);
        let Some(record) = read.map_err(|source| EngineError::Io { path: path.clone(), source })? else {
            return Err(EngineError::NotReclaimable(id, "the guest did not come from this node"));
        };
        let has_qemu = record.vm.libvirt.is_some() || self.node.config.vmm.is_there(&record.vm);
        if kept_memory::is_kept(&record.vm) && !has_qemu {
            let why = "the guest left for a visit, and nothing but its memory is here";
            return Err(EngineError::NotReclaimable(id, why));
        }
        if record.home.is_some() {
            let why = "the guest was here for a visit, and what it had not touched was at its home only";
            return Err(EngineError::NotReclaimable(id, why));
        }
        if record.state != SourceState::Committed || record.freed {
            let why = match record.state {
                SourceState::Aborted => "the guest is here",
                SourceState::Warm | SourceState::Stopped => {
                    "it has not handed the guest over: `vmove cancel` it"
                }
                SourceState::Committed | SourceState::Released => "the copy here is gone",
            };
            return Err(EngineError::NotReclaimable(id, why));
        }
        let vm = record.vm.name.clone();
        if let Some(holder) = self.holder(&vm).filter(|holder| holder.id == id)
            && holder.end_waiting().await? == Waited::Owes
        {
            return Err(AbandonError::AtWork { migration: id.to_string() }.into());
        }
        let unusable = |source| EngineError::Io { path: path.clone(), source };
        let mut journal = self.open_source(id).map_err(unusable)?;
        let Ok(next) = journal.record().state.step(SourceEvent::Reclaim) else {
            return Err(EngineError::NotReclaimable(id, "it ended meanwhile"));
        };
        journal.update(|r| r.enter(next)).map_err(unusable)?;
        let span = session_span(id, "source");
        span.in_scope(|| tracing::warn!(vm, "an operator has the guest's copy at the source run again"));
        let began_at = record.report.began_at.clone();
        let (publisher, progress) =
            Publisher::taken_up(&id.to_string(), &vm, Role::Source, &record.to.name, began_at);
        self.register(id, &vm, Role::Source, record.token, (progress, publisher.abandon()), None);
        if let Err(error) =
            source::put_back(Arc::clone(&self.node), journal, &publisher, true, None).instrument(span).await
        {
            let error = chain(&error);
            publisher.fail(&error, GuestPlace::PausedAtSource, false);
            return Err(EngineError::NotResumed(id, error));
        }
        let lost = format!(
            "{vm:?} goes on here as it was when it was stopped for {}: what it did there since, and wrote to its disks, is not in this copy",
            record.to.name
        );
        publisher.fail(&lost, GuestPlace::Source, true);
        Ok(lost)
    }
}

impl Holder {
    /// Ends the session's task, which it has only while it waits for its peer, unless that only waits for a disk.
    async fn end_waiting(&self) -> Result<Waited, AbandonError> {
        let at_work = || AbandonError::AtWork { migration: self.id.to_string() };
        let outcome = self.progress.borrow().outcome.clone();
        match outcome {
            _ if self.abandon.only_owes() => return Ok(Waited::Owes),
            Outcome::Running => return Err(at_work()),
            Outcome::Reconnecting { .. } => self.abandon.ask(),
            Outcome::Done { .. } | Outcome::Refused { .. } | Outcome::Failed { .. } => {
                return Ok(Waited::Ended);
            }
        }
        let mut progress = self.progress.clone();
        let ended = async {
            // Between two attempts nobody listens: it is asked again.
            while !progress.borrow_and_update().outcome.is_end() {
                if self.abandon.only_owes() {
                    return Waited::Owes;
                }
                let _ = timeout(Duration::from_millis(100), progress.changed()).await;
                self.abandon.ask();
            }
            Waited::Ended
        };
        timeout(END_TIMEOUT, ended).await.map_err(|_| at_work())
    }
}

/// Writes a line that need not be there. If it cannot be written, it is tried again, and the answer is what people are told.
fn write_or_owe<R>(mut journal: Journal<R>, change: impl FnOnce(&mut R)) -> Option<String>
where
    R: Serialize + DeserializeOwned + Clone + Send + 'static,
{
    let error = journal.update_owing(change).err()?;
    let told = cannot_write(journal.path(), &error.to_string(), SystemTime::now());
    drop(owed::write_later(journal));
    Some(told)
}
