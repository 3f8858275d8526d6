//! Requests about visits: a guest goes, comes home, or stays.

use std::ffi::OsStr;
use std::sync::Arc;

use crate::engine::{Engine, EngineError, Handle, New};
use crate::group::journals;
use crate::kept_memory;
use crate::may_visit;
use crate::ownership::{DestinationState, SourceState};
use crate::proto::message::Home;
use crate::records::DestinationRecord;
use crate::turning::{self, Turn};
use crate::visits::VisitStand;
use tokio_util::sync::CancellationToken;
use vmove_node::disk::remove_files;
use vmove_node::journal::Journal;
use vmove_node::layout::memory_dir;
use vmove_node::peer::SessionId;
use vmove_qmp::known_events;
use vmove_types::Backing;
use vmove_types::go_home::GoHome;
use vmove_types::progress::{Role, VISIT};
use vmove_types::spec::{MigrationSpec, Mode, Visit};

/// A migration that has ended becomes no visit.
const ENDED: &str =
    "it has ended: all of the guest's memory has followed it, or the guest stayed where it was";

/// A guest that is here for a visit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisitHere {
    /// The VM.
    pub vm: String,
    /// The node that it came from.
    pub home: String,
    /// Where that is reached, if it has said so: `host:port`.
    pub home_address: Option<String>,
    /// What takes the guest home by itself.
    pub go_home: GoHome,
    /// When the visit was taken here: RFC 3339, UTC.
    pub began_at: Option<String>,
}

/// An event that no QEMU has would never come.
pub(crate) fn awaits_known_event(spec: &MigrationSpec) -> Result<(), EngineError> {
    let Some(event) = &spec.go_home.on_event else { return Ok(()) };
    if known_events().contains(&event.name) {
        return Ok(());
    }
    Err(EngineError::BadSpec(format!(
        "visit: expected a QMP event that takes the guest home, such as VSERPORT_CHANGE, WATCHDOG or BLOCK_JOB_COMPLETED, found {}, which QEMU does not have",
        event.name
    )))
}

impl Engine {
    /// What a session of a guest that goes for a visit, or comes home, has beside what others have.
    pub(crate) fn with_visit(&self, new: New) -> Result<New, EngineError> {
        let mut new = new;
        match new.spec.visit {
            Visit::No => return Ok(new),
            Visit::Go => {
                awaits_known_event(&new.spec)?;
                may_visit::in_the_way(&self.node, &new.vm, &new.spec)?;
                let path = new.vm.ram.first().map(|ram| ram.path.clone()).unwrap_or_default();
                let kept = kept_memory::keep_memory_at_home(new.id, new.vm);
                new.vm = kept.map_err(|source| EngineError::Io { path, source })?;
            }
            Visit::Back => {
                let record = self.visit_of(&new.vm.name, new.vm.session.as_deref())?;
                let home = &record.prepare.source;
                if *home != new.to.name {
                    return Err(EngineError::BadSpec(format!(
                        "visit: expected {home}, which is the home of {:?}, found {}; give {home} an address in the configuration of this node, and name it",
                        new.vm.name, new.to.name
                    )));
                }
                new.home = Some(Home { visit: record.id, token: record.prepare.token });
            }
        }
        new.spec.mode = Mode::Postcopy.into();
        Ok(new)
    }

    /// Begins a session whose guest's memory may have been kept for it.
    pub(crate) fn begin_keeping(self: &Arc<Self>, new: New) -> Result<(), EngineError> {
        let kept = new.vm.clone();
        let begun = self.begin_all(vec![new], &CancellationToken::new());
        if begun.is_err() {
            kept_memory::let_memory_go(self.node.disk(), &kept);
        }
        begun
    }

    /// A VM that is here for a visit: the migration that brought it, and its home.
    #[must_use]
    pub fn visitor(&self, vm: &str) -> Option<(SessionId, String)> {
        let visits = |h: &Handle| {
            let progress = h.progress.borrow();
            let is_it = h.vm == vm && h.role == Role::Destination && h.is_running();
            (is_it && progress.mode.as_deref() == Some(VISIT)).then(|| progress.peer.clone())
        };
        self.lock().iter().find_map(|(id, handle)| Some((*id, visits(handle)?)))
    }

    /// The visits to here that something ends by itself, and whether their guests are on their way home.
    #[must_use]
    pub fn visits_that_end(&self) -> Vec<(SessionId, bool)> {
        let sessions = self.lock();
        let leaves =
            |vm: &str| sessions.values().any(|h| h.vm == vm && h.role == Role::Source && h.is_running());
        let ends = |h: &Handle| {
            h.role == Role::Destination && h.is_running() && h.progress.borrow().going_home.is_some()
        };
        sessions.iter().filter(|(_, h)| ends(h)).map(|(id, h)| (*id, leaves(&h.vm))).collect()
    }

    /// What is known of a visit to here, from its journal. `None` if it is none, or the guest is to stay.
    #[must_use]
    pub fn visit(&self, id: SessionId) -> Option<VisitHere> {
        let path = self.node.destination_journal(id);
        let record = Journal::<DestinationRecord>::read_on(self.node.disk(), &path).ok()?;
        if !record.is_visit() {
            return None;
        }
        Some(VisitHere {
            vm: record.prepare.vm,
            home: record.prepare.source,
            home_address: record.home_address,
            go_home: record.prepare.spec.go_home,
            began_at: record.began_at,
        })
    }

    /// The visit by which a VM is here.
    #[must_use]
    pub fn visit_by(&self, vm: &str) -> Option<VisitHere> {
        self.visitor(vm).and_then(|(id, _)| self.visit(id))
    }

    /// A guest could not be taken home by itself: `vmove status` says why.
    pub fn was_not_taken_home(&self, visit: SessionId, why: String) {
        self.node.visits.tell_not_home(visit, why);
    }

    /// Removes memory that was to be kept for a session that never began, or that needs none any more: this daemon was killed before it could.
    pub(crate) fn remove_kept_in_vain(&self) {
        let folder = memory_dir(&self.node.config.memory_dir, Backing::Thp);
        for entry in self.node.disk().list(&folder).unwrap_or_default() {
            let Some(id) = kept_memory::session_of(&entry.name) else { continue };
            let needed = match journals::read(self.node.disk(), &self.node.config.sessions_dir, id) {
                Ok(Some(r)) => {
                    let names_it =
                        r.vm.ram.iter().any(|ram| ram.path.file_name() == Some(OsStr::new(&entry.name)));
                    names_it && !r.freed && !matches!(r.state, SourceState::Aborted | SourceState::Released)
                }
                Ok(None) => false,
                // Nobody knows.
                Err(_) => true,
            };
            if !needed {
                let path = folder.join(&entry.name);
                tracing::info!(path = %path.display(), "removing memory that was kept for a migration that does not need it");
                remove_files(self.node.disk(), [path]);
            }
        }
    }

    /// The visit by which a VM is here.
    fn visit_of(&self, vm: &str, session: Option<&str>) -> Result<DestinationRecord, EngineError> {
        let not = |why: &str| EngineError::NotVisiting { vm: vm.to_owned(), why: why.to_owned() };
        let id: Option<SessionId> = session.and_then(|id| id.parse().ok().map(SessionId));
        let id = id.ok_or_else(|| not("all of its memory is here; `vmove migrate` moves it"))?;
        let path = self.node.destination_journal(id);
        let record = Journal::<DestinationRecord>::read_on(self.node.disk(), &path)
            .map_err(|source| EngineError::Io { path, source })?;
        if record.is_visit() { Ok(record) } else { Err(not("it came to stay")) }
    }

    /// Has a guest that came for a visit stay: the rest of its memory is fetched. Returns when its session was told.
    ///
    /// # Errors
    /// [`EngineError::UnknownSession`], [`EngineError::NotVisiting`].
    pub fn stay(&self, id: &str) -> Result<(), EngineError> {
        let id = self.resolve(id)?;
        let not = |why: &str| EngineError::NotVisiting { vm: id.to_string(), why: why.to_owned() };
        let path = self.node.destination_journal(id);
        let record = Journal::<DestinationRecord>::read_begun_on(self.node.disk(), &path)
            .map_err(|source| EngineError::Io { path, source })?;
        let record =
            record.ok_or_else(|| not("no guest has come here by it; run this where the guest is"))?;
        if !record.is_visit() || !record.state.may_run() {
            return Err(not("the guest is not here, or came to stay"));
        }
        // Under the lock under which a session that takes it home is entered: of the two, one is refused.
        let sessions = self.lock();
        if sessions.values().any(|h| {
            h.vm == record.prepare.vm && h.role == Role::Source && h.progress.borrow().outcome.holds_vm()
        }) {
            return Err(not("it is on its way home"));
        }
        self.node.visits.tell(id, VisitStand::Stays);
        drop(sessions);
        Ok(())
    }

    /// Has a guest that a migration brings here be on a visit instead: its home keeps its memory, and no more is fetched than it touches. Returns when it
    /// is one, which is not before the hand-over.
    ///
    /// # Errors
    /// [`EngineError::UnknownSession`], [`EngineError::NotTurned`], [`EngineError::BadSpec`].
    pub async fn turn_into_visit(&self, id: &str, go_home: GoHome) -> Result<(), EngineError> {
        let id = self.resolve(id)?;
        let record = self.to_turn(id, &go_home)?;
        let not = |why: String| EngineError::NotTurned { vm: record.prepare.vm.clone(), why };
        let progress = self.lock().get(&id).map(|handle| handle.progress.clone());
        let mut progress = progress.ok_or_else(|| not(ENDED.to_owned()))?;
        let mut turn = self.node.visits.turning.ask(id, go_home);
        let ended = progress.wait_for(|p| p.outcome.is_end());
        tokio::select! {
            biased;
            answer = turning::answered(&mut turn) => match answer {
                Turn::Turned => Ok(()),
                Turn::Refused(why) => Err(not(why)),
                Turn::No | Turn::Asked(_) => Err(not(ENDED.to_owned())),
            },
            _ = ended => Err(not(ENDED.to_owned())),
        }
    }

    /// The record of a migration that may become a visit, as far as this side knows.
    fn to_turn(&self, id: SessionId, go_home: &GoHome) -> Result<DestinationRecord, EngineError> {
        let path = self.node.destination_journal(id);
        let record = Journal::<DestinationRecord>::read_begun_on(self.node.disk(), &path)
            .map_err(|source| EngineError::Io { path, source })?;
        let not = |vm: &str, why: &str| EngineError::NotTurned { vm: vm.to_owned(), why: why.to_owned() };
        let record = record.ok_or_else(|| {
            not(&id.to_string(), "it has brought no guest here; ask on the node that the guest goes to")
        })?;
        let vm = &record.prepare.vm;
        if record.is_visit() {
            return Err(not(vm, "it is one already"));
        }
        if record.abandoned || matches!(record.state, DestinationState::Complete | DestinationState::Gone) {
            return Err(not(vm, ENDED));
        }
        let others = [
            (record.prepare.libvirt.is_some(), "libvirt moves the guest"),
            (record.prepare.in_group, "the guest moves with others"),
            (!record.prepare.moved.is_empty(), "disks of the guest move along"),
            (!record.prepare.devices.is_empty(), "the guest owned devices"),
            (record.stays, "it was a visit, and its guest was told to stay"),
        ];
        if let Some((_, why)) = others.iter().find(|(is, _)| *is) {
            return Err(not(vm, why));
        }
        let spec = MigrationSpec { go_home: go_home.clone(), ..record.prepare.spec.clone() }.of_visit();
        spec.validate().map_err(EngineError::BadSpec)?;
        awaits_known_event(&spec)?;
        Ok(record)
    }
}
