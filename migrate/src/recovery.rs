//! Sessions that an earlier process of this daemon left behind, or that have given up, are taken up where their journals say that they
//! stand.
//!
//! Guests that run here and lack pages come first: they may be frozen until somebody fetches those. Nothing that may take long (a QEMU
//! whose monitor hangs, one that is to be ended) is waited for: each session is settled by a task of its own, and holds its VM meanwhile.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::mpsc;
use tracing::Instrument as _;

use crate::destination;
use crate::engine::{ARRIVALS, Engine, EngineError, Handle, session_span};
use crate::group::journals;
use crate::group::resuming::{ResumePlace, places};
use crate::history::{homeward, may_have_moved, session_ids, unreadable};
use crate::kept_memory::let_memory_go;
use crate::owed;
use crate::ownership::{DestinationState, SourceEvent, SourceState};
use crate::proto::message::Complete;
use crate::publish::Publisher;
use crate::records::{DestinationRecord, SourceRecord};
use crate::source;
use vmove_node::journal::Journal;
use vmove_node::peer::{SessionId, Token};
use vmove_node::store::HeldName;
use vmove_node::task::spawn;
use vmove_types::problem::chain;
use vmove_types::progress::{GuestPlace, Role};
use vmove_types::report::VisitEnd;

/// Between looks whether a name is free.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Such looks: for ten seconds.
const HOLD_TRIES: usize = 200;

impl Engine {
    /// Takes up guests that are ours and lack pages, then those that wait for the commit. Call this before anything else, and the listener
    /// next: their sources dial.
    pub fn resume_owners(self: &Arc<Self>) {
        let mut loaded = Vec::new();
        for id in session_ids(self.node.disk(), &self.node.config.sessions_dir) {
            let path = self.node.destination_journal(id);
            match Journal::<DestinationRecord>::open_begun_on(self.node.disk(), &path) {
                Ok(Some(journal)) if journal.record().is_visit_of_owner() => self.resume_visit(journal),
                Ok(Some(mut journal)) => match journal.record().state {
                    DestinationState::Owner if journal.record().abandoned => {}
                    DestinationState::Owner
                        if journal.record().vm.as_ref().is_some_and(|vm| self.node.was_ended(vm)) =>
                    {
                        tracing::info!(migration = %id, "its VM has ended before that could be written down");
                        destination::remove_ended(&self.node, journal.record());
                        if journal.update_owing(|r| r.abandoned = true).is_err() {
                            drop(owed::write_later(journal));
                        }
                    }
                    DestinationState::Owner => self.adopt(journal),
                    DestinationState::Loaded => loaded.push(journal),
                    DestinationState::Filling if self.may_run_by_libvirt(journal.record()) => {
                        loaded.push(journal);
                    }
                    _ => {}
                },
                Ok(None) => {}
                Err(error) => {
                    let about = Journal::<DestinationRecord>::read_older_on(self.node.disk(), &path);
                    let about = about.map(|r| (r.prepare.vm, r.prepare.source));
                    self.enter_unreadable(id, &path, Role::Destination, about, &error);
                }
            }
        }
        loaded.into_iter().for_each(|journal| self.adopt(journal));
    }

    /// Takes up the visit of a guest that is ours, unless it has ended before that could be written down.
    fn resume_visit(self: &Arc<Self>, journal: Journal<DestinationRecord>) {
        match self.visit_end(journal.record()) {
            Some(end) => self.end_visit(journal, end),
            None => self.adopt(journal),
        }
    }

    /// How the visit by which a guest came here has ended, if it has.
    fn visit_end(&self, r: &DestinationRecord) -> Option<VisitEnd> {
        let vm = r.vm.as_ref()?;
        let homeward = homeward(self.node.disk(), &self.node.config.sessions_dir, r.id).map(|r| r.state);
        let has_ended = self.node.was_ended(vm) || self.node.config.vmm.has_ended(vm);
        match homeward {
            Some(SourceState::Released) => Some(VisitEnd::Home),
            Some(SourceState::Committed) if has_ended => Some(VisitEnd::Home),
            _ if has_ended => Some(VisitEnd::Ended),
            _ => None,
        }
    }

    /// Writes down that a visit has ended. Its home is answered from the journal.
    fn end_visit(&self, mut journal: Journal<DestinationRecord>, end: VisitEnd) {
        tracing::info!(migration = %journal.record().id, ?end, "a visit has ended before that could be written down");
        destination::remove_ended(&self.node, journal.record());
        destination::tidy(&self.node, journal.record());
        let figures = Complete { visit: Some(end), ..Complete::default() };
        let change = |r: &mut DestinationRecord| {
            r.complete = Some(Box::new(figures));
            r.enter(DestinationState::Complete);
        };
        if journal.update_owing(change).is_err() {
            drop(owed::write_later(journal));
        }
    }

    /// Takes up every other session. Returns as soon as each has its task.
    pub fn resume_others(self: &Arc<Self>) {
        let ids = session_ids(self.node.disk(), &self.node.config.sessions_dir);
        let mut removing = Vec::new();
        for id in &ids {
            // Before its journal is opened: its task writes to that.
            if self.lock().contains_key(id) {
                continue;
            }
            let path = self.node.destination_journal(*id);
            // What cannot be read was entered before.
            let Ok(Some(journal)) = Journal::<DestinationRecord>::open_begun_on(self.node.disk(), &path)
            else {
                continue;
            };
            if journal.record().state == DestinationState::Gone {
                destination::end_if_stuck(&self.node, journal.record());
            }
            match journal.record().state {
                DestinationState::Filling => removing.push(spawn(Arc::clone(self).discard(journal))),
                // Killed before everything was removed, or something could not be. Not while one that came later holds the VM: what is here may be
                // its own.
                DestinationState::Gone if journal.record().to_remove => {
                    if !self.is_held(&journal.record().prepare.vm) {
                        removing.push(spawn(Arc::clone(self).discard(journal)));
                    }
                }
                _ => self.tidy(journal.record()),
            }
        }
        let mut sources = Vec::new();
        for id in ids {
            // Begun since this daemon answers.
            if self.lock().get(&id).is_some_and(|known| known.role == Role::Source) {
                continue;
            }
            let path = self.node.session_dir(id).join("source.jsonl");
            match journals::open(self.node.disk(), &self.node.config.sessions_dir, id) {
                Ok(Some(journal))
                    if matches!(journal.record().state, SourceState::Warm | SourceState::Stopped)
                        && self.node.was_ended(&journal.record().vm) =>
                {
                    session_span(id, "source").in_scope(|| self.call_off(journal));
                }
                Ok(Some(journal)) => {
                    let publisher = self.enter_source(journal.record());
                    sources.extend(publisher.map(|publisher| (journal, publisher)));
                }
                Ok(None) => {}
                Err(error) => {
                    let about = Journal::<SourceRecord>::read_older_on(self.node.disk(), &path)
                        .map(|r| (r.vm.name, r.to.name));
                    self.enter_unreadable(id, &path, Role::Source, about, &error);
                }
            }
        }
        self.remove_kept_in_vain();
        self.settle_sources(sources);
        self.resume_groups();
        let engine = Arc::clone(self);
        spawn(async move {
            for removed in removing {
                // One that panicked has said so.
                let _ = removed.await;
            }
            // Sources dial; a source that is told "no such session" believes it.
            engine.recovered.store(true, Ordering::Release);
            engine.forget_old();
        });
    }

    /// Of a guest that had not been given away, and was ended here.
    fn call_off(&self, mut journal: Journal<SourceRecord>) {
        let Ok(next) = journal.record().state.step(SourceEvent::GiveUp) else { return };
        let change = |r: &mut SourceRecord| {
            r.enter(next);
            r.to_resume = false;
        };
        let_memory_go(self.node.disk(), &journal.record().vm);
        let owed = journal.update_owing(change).is_err();
        let record = journal.record().clone();
        tracing::info!(vm = record.vm.name, "an operator ended this VM before that could be written down");
        let written = owed.then(|| owed::write_later(journal));
        if record.untold {
            source::tell_later(&self.node, record, written);
        }
    }

    /// Lists a session of which nobody knows where it stands. `about`: VM and peer, if an older line names them.
    fn enter_unreadable(
        &self,
        id: SessionId,
        path: &Path,
        role: Role,
        about: Option<(String, String)>,
        error: &std::io::Error,
    ) {
        let span = session_span(id, if role == Role::Source { "source" } else { "destination" });
        span.in_scope(|| tracing::error!(path = %path.display(), %error, "a journal cannot be read: nothing is done with this migration"));
        let listed = unreadable(id, path, role, about, error);
        let (publisher, progress) = Publisher::taken_up(&listed.id, &listed.vm, role, &listed.peer, None);
        self.register(id, &listed.vm, role, Token::default(), (progress, publisher.abandon()), None);
        publisher.finish(listed.outcome);
    }

    /// Enters a session from here that has something to do, so that it holds its VM.
    fn enter_source(&self, r: &SourceRecord) -> Option<Publisher> {
        match r.state {
            // Or an operator has freed what was left here of a guest that was given away.
            SourceState::Released | SourceState::Committed if r.freed => {
                if r.state == SourceState::Released {
                    source::guard(&self.node, r);
                }
                return None;
            }
            SourceState::Aborted if !self.is_to_be_put_back(r) => {
                // Killed before it could let a guest of libvirt's go on, whose memory it held.
                if r.vm.libvirt.is_some()
                    && r.to_resume
                    && !may_have_moved(self.node.disk(), &self.node.config.sessions_dir, &r.vm, r.id)
                {
                    source::let_domain_on(&self.node, r);
                }
                if r.untold {
                    source::tell_later(&self.node, r.clone(), None);
                }
                return None;
            }
            _ => {}
        }
        let (id, began_at) = (r.id.to_string(), r.report.began_at.clone());
        let (publisher, progress) = Publisher::taken_up(&id, &r.vm.name, Role::Source, &r.to.name, began_at);
        publisher.update(|p| p.group = r.group.map(|group| group.to_string()));
        self.register(r.id, &r.vm.name, Role::Source, r.token, (progress, publisher.abandon()), None);
        Some(publisher)
    }

    /// Those that moved in one group wait for each other's devices, as before.
    fn settle_sources(self: &Arc<Self>, sources: Vec<(Journal<SourceRecord>, Publisher)>) {
        let mut counts = BTreeMap::<SessionId, usize>::new();
        let groups = sources.iter().filter_map(|(journal, _)| journal.record().group);
        groups.for_each(|group| *counts.entry(group).or_default() += 1);
        let mut free: BTreeMap<_, _> =
            counts.into_iter().map(|(group, count)| (group, places(count))).collect();
        for (journal, publisher) in sources {
            let resume = journal.record().group.and_then(|group| free.get_mut(&group)?.pop());
            let span = session_span(journal.record().id, "source");
            spawn(Arc::clone(self).settle_source(journal, publisher, resume).instrument(span));
        }
    }

    async fn settle_source(
        self: Arc<Self>,
        journal: Journal<SourceRecord>,
        publisher: Publisher,
        resume: Option<Arc<ResumePlace>>,
    ) {
        let r = journal.record().clone();
        let stopped = r.state != SourceState::Aborted || r.to_resume && self.is_stopped(&r).await;
        let has_copies = r.to_resume && !r.disks.is_empty() && !r.spec.disks_after;
        if !stopped && !r.owes_devices() && !has_copies {
            if r.untold {
                source::tell_later(&self.node, r.clone(), None);
            }
            // The journal answers for it.
            self.lock().remove(&r.id);
            return;
        }
        tracing::info!(vm = r.vm.name, state = %r.state, "taking up a migration from here");
        if r.vm.libvirt.is_some() && !matches!(r.state, SourceState::Aborted | SourceState::Released) {
            return source::take_up_domain(Arc::clone(&self.node), journal, publisher).await;
        }
        if matches!(r.state, SourceState::Committed | SourceState::Released) {
            return source::go_on(Arc::clone(&self.node), journal, publisher, resume).await;
        }
        if may_have_moved(self.node.disk(), &self.node.config.sessions_dir, &r.vm, r.id) {
            let why = "Another migration has given this guest away, or its journal cannot be read: it is not resumed here";
            return publisher.fail(why, GuestPlace::PausedAtSource, false);
        }
        match source::put_back(Arc::clone(&self.node), journal, &publisher, stopped, resume.as_deref()).await
        {
            Ok(()) => publisher.fail(
                publisher.with_missing(
                    "The daemon was started anew before the hand-over: the guest goes on at the source",
                ),
                GuestPlace::Source,
                false,
            ),
            Err(error) => publisher.fail(
                format!("The guest did not resume at the source: {}", chain(&error)),
                GuestPlace::PausedAtSource,
                false,
            ),
        }
    }

    /// Whether the guest of a session that was called off may not have been brought back, because the daemon was killed in between; one that was
    /// paused before cannot be moved again as QEMU has left it. A guest
    /// that another session gave away is stopped too, and must stay so: it runs at that destination.
    fn is_to_be_put_back(&self, r: &SourceRecord) -> bool {
        let Ok(vm) = self.node.vms.get(&r.vm.name) else { return false };
        let same = (vm.pid, vm.pid_start) == (r.vm.pid, r.vm.pid_start);
        same && (r.to_resume || r.owes_devices())
            && !may_have_moved(self.node.disk(), &self.node.config.sessions_dir, &r.vm, r.id)
    }

    /// Whether QEMU is stopped as only we do it.
    async fn is_stopped(&self, r: &SourceRecord) -> bool {
        let Ok(monitor) = self.node.config.vmm.monitor(&r.vm).await else { return false };
        let status = monitor.run_state(Duration::from_secs(5)).await;
        // `paused` alone may be an operator's wish of later; these two are ours. But a guest whose disks move is stopped when that begins.
        let for_disks = r.to_resume && r.was_running && !r.disks.is_empty() && !r.spec.disks_after;
        status.is_ok_and(|status| match status.as_str() {
            "postmigrate" | "finish-migrate" => true,
            "paused" => for_disks,
            _ => false,
        })
    }

    /// Of a session that has ended, or that an operator has ended.
    fn tidy(&self, r: &DestinationRecord) {
        if r.state == DestinationState::Complete {
            destination::enter_again(&self.node, r);
        }
        destination::tidy(&self.node, r);
    }

    /// libvirt was let go on, and its QEMU has not ended: the guest may be this side's.
    fn may_run_by_libvirt(&self, r: &DestinationRecord) -> bool {
        r.let_go && r.vm.as_ref().is_some_and(|vm| !self.node.config.vmm.has_ended(vm))
    }

    /// Holds a name as soon as nobody else does. `None` if somebody goes on holding it.
    async fn hold_soon(&self, vm: &str) -> Option<HeldName> {
        for _ in 0..HOLD_TRIES {
            if let Some(held) = self.node.vms.hold_name(vm) {
                return Some(held);
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        None
    }

    async fn discard(self: Arc<Self>, journal: Journal<DestinationRecord>) {
        let r = journal.record();
        // No VM of its name may be started meanwhile: its files and its record would be taken for what is left.
        let held = self.hold_soon(&r.prepare.vm).await;
        if held.is_none() {
            tracing::warn!(
                migration = %r.id, vm = r.prepare.vm,
                "what is left of a migration to here is not removed yet: its VM's name is taken; `vmove recover` removes it"
            );
            return;
        }
        let span = session_span(r.id, "destination");
        span.in_scope(|| {
            tracing::info!(
                vm = r.prepare.vm,
                "removing what is left of a migration to here that never owned the guest"
            );
        });
        destination::discard(&self.node, journal).instrument(span).await;
    }

    /// Takes up a session in Loaded or Owner.
    fn adopt(self: &Arc<Self>, journal: Journal<DestinationRecord>) {
        let r = journal.record();
        let span = session_span(r.id, "destination");
        span.in_scope(
            || tracing::info!(vm = r.prepare.vm, state = %r.state, "taking up a migration to here"),
        );
        if r.state == DestinationState::Owner {
            destination::enter_again(&self.node, r);
        }
        let (id, p, began_at) = (r.id.to_string(), &r.prepare, r.began_at.clone());
        let (publisher, progress) = Publisher::taken_up(&id, &p.vm, Role::Destination, &p.source, began_at);
        let (sender, arrivals) = mpsc::channel(ARRIVALS);
        let ends = (progress, publisher.abandon());
        self.register(r.id, &r.prepare.vm, Role::Destination, r.prepare.token, ends, Some(sender));
        let adopted = destination::adopt(Arc::clone(&self.node), journal, publisher, arrivals);
        spawn(adopted.instrument(span));
    }

    /// `vmove recover`: tries again what a session gave up on, on the side that owns the guest.
    ///
    /// # Errors
    /// [`EngineError::UnknownSession`], [`EngineError::NothingToRecover`], or that the journal cannot be read.
    pub async fn recover(self: &Arc<Self>, id: &str) -> Result<(), EngineError> {
        let id = self.resolve(id)?;
        let running = self.lock().get(&id).is_some_and(Handle::is_running);
        if running {
            return Err(EngineError::NothingToRecover(id, "still at work".to_owned()));
        }
        let dir = self.node.session_dir(id);
        let path = dir.join("source.jsonl");
        let unusable = |path: &Path| {
            let path = path.to_owned();
            move |source| EngineError::Io { path, source }
        };
        if let Some(journal) =
            journals::open(self.node.disk(), &self.node.config.sessions_dir, id).map_err(unusable(&path))?
        {
            return self.recover_source(id, journal).await;
        }
        let path = dir.join("destination.jsonl");
        let journal =
            Journal::<DestinationRecord>::open_on(self.node.disk(), &path).map_err(unusable(&path))?;
        match journal.record().state {
            DestinationState::Gone => {
                Err(EngineError::NothingToRecover(id, "gone: the guest is at the source".to_owned()))
            }
            DestinationState::Complete => Err(EngineError::NothingToRecover(id, "complete".to_owned())),
            DestinationState::Owner if journal.record().abandoned => {
                Err(EngineError::NothingToRecover(id, "ended by an operator".to_owned()))
            }
            DestinationState::Filling => {
                Arc::clone(self).discard(journal).await;
                Ok(())
            }
            DestinationState::Loaded | DestinationState::Owner => {
                self.adopt(journal);
                Ok(())
            }
        }
    }

    /// The session by which a VM leaves.
    fn source_at_work(&self, vm: &str) -> Option<SessionId> {
        let sessions = self.lock();
        let leaves = |handle: &Handle| handle.vm == vm && handle.role == Role::Source && handle.is_running();
        sessions.iter().find(|(_, handle)| leaves(handle)).map(|(id, _)| *id)
    }

    async fn recover_source(
        self: &Arc<Self>,
        id: SessionId,
        journal: Journal<SourceRecord>,
    ) -> Result<(), EngineError> {
        let r = journal.record();
        if let Some(disk) = self.node.disk_moves.of(&r.vm.name) {
            return Err(EngineError::DiskMoves { vm: r.vm.name.clone(), disk });
        }
        if matches!(r.state, SourceState::Released | SourceState::Committed) && r.freed {
            return Err(EngineError::NothingToRecover(id, "complete".to_owned()));
        }
        let left = self.is_to_be_put_back(r) && (r.owes_devices() || self.is_stopped(r).await);
        if r.state == SourceState::Aborted && !left {
            let why = "called off, and the guest is back at the source";
            return Err(EngineError::NothingToRecover(id, why.to_owned()));
        }
        let may_resume = !matches!(r.state, SourceState::Committed | SourceState::Released);
        if let Some(session) = self.source_at_work(&r.vm.name).filter(|_| may_resume) {
            // What has stopped the guest is that migration.
            return Err(EngineError::Busy { vm: r.vm.name.clone(), session });
        }
        if let Some(publisher) = self.enter_source(r) {
            let span = session_span(id, "source");
            spawn(Arc::clone(self).settle_source(journal, publisher, None).instrument(span));
        }
        Ok(())
    }
}
