//! Requests that begin a migration: those that say how much the guest is to read at the destination are decided first.

use std::sync::Arc;

use crate::engine::{Engine, EngineError, New, busy};
use crate::may_visit;
use crate::source;
use crate::visiting::awaits_known_event;
use vmove_node::peer::{PeerTarget, SessionId};
use vmove_node::record::VmRecord;
use vmove_types::choice::{Choice, ReadsFrom};
use vmove_types::go_home::GoHome;
use vmove_types::spec::{MigrationSpec, Visit};

impl Engine {
    /// Starts a migration from this node.
    ///
    /// # Errors
    /// [`EngineError`]; nothing was changed then.
    pub async fn start(
        self: &Arc<Self>,
        vm: &str,
        to: PeerTarget,
        spec: MigrationSpec,
    ) -> Result<SessionId, EngineError> {
        let (spec, choice) = self.settle(vm, &to, spec).await?;
        self.start_settled(vm, to, spec, choice)
    }

    /// Decides how a guest goes by what it is to read there, if the options say how much: watches it for 0.3 s, and changes nothing. Returns the
    /// options for [`Engine::start_settled`].
    ///
    /// # Errors
    /// [`EngineError::Stays`] if it reads from afar in less time than it takes to go there.
    pub async fn settle(
        self: &Arc<Self>,
        vm: &str,
        to: &PeerTarget,
        spec: MigrationSpec,
    ) -> Result<(MigrationSpec, Option<Choice>), EngineError> {
        spec.validate().map_err(EngineError::BadSpec)?;
        let Some(bytes) = spec.reads_bytes else { return Ok((spec, None)) };
        awaits_known_event(&spec)?;
        let record = self.node.vms.get(vm)?;
        let at_work = busy(&self.lock(), vm, None);
        if let Some(session) = at_work {
            return Err(EngineError::Busy { vm: vm.to_owned(), session });
        }
        let no_visit = self.why_no_visit(&record, &spec);
        let chosen = source::choose(&self.node, &record, (&to.name, &spec), bytes, no_visit.as_deref()).await;
        let choice =
            chosen.map_err(|error| EngineError::NotWatched { vm: vm.to_owned(), source: Box::new(error) })?;
        let spec = MigrationSpec { reads_bytes: None, reads_near_bytes_per_s: None, ..spec };
        let spec = match choice.choice {
            ReadsFrom::Stay => {
                return Err(EngineError::Stays { vm: vm.to_owned(), choice: Box::new(choice) });
            }
            ReadsFrom::Visit => MigrationSpec { visit: Visit::Go, ..spec },
            // It is moved for good, and nothing takes it home.
            ReadsFrom::Migrate => MigrationSpec { go_home: GoHome::default(), ..spec },
        };
        Ok((spec, Some(choice)))
    }

    /// Why a guest could not go for a visit, if the options ask for the fastest way.
    pub(crate) fn why_no_visit(&self, vm: &VmRecord, spec: &MigrationSpec) -> Option<String> {
        spec.reads_bytes?;
        may_visit::in_the_way(&self.node, vm, spec).err().map(|error| error.to_string())
    }

    /// Starts a migration whose way is settled: by its options, or by `choice`, which is told in its report.
    ///
    /// # Errors
    /// [`EngineError`]; nothing was changed then.
    pub fn start_settled(
        self: &Arc<Self>,
        vm: &str,
        to: PeerTarget,
        spec: MigrationSpec,
        choice: Option<Choice>,
    ) -> Result<SessionId, EngineError> {
        let vm = self.node.vms.get(vm)?;
        let id = SessionId::random();
        let new = self.with_visit(New { id, vm, to, spec, group: None, member: None, home: None, choice })?;
        self.begin_keeping(new)?;
        Ok(id)
    }
}
