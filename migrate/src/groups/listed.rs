//! What is shown of a group.

use std::collections::HashMap;

use crate::engine::{Engine, EngineError};
use crate::group::handles::GroupHandle;
use crate::group::record::{GroupRecord, GroupState};
use crate::history::snapshot;
use vmove_node::peer::SessionId;
use vmove_types::group::{GroupOutcome, GroupProgress};
use vmove_types::progress::{Outcome, Progress, Role};

impl Engine {
    /// A group now. `id` may be any unambiguous prefix. May read the disk.
    ///
    /// # Errors
    /// [`EngineError::UnknownGroup`].
    pub fn group(&self, id: &str) -> Result<GroupProgress, EngineError> {
        let (_, handle) = self.find_group(id)?;
        Ok(self.show_group(&handle))
    }

    /// All groups that this node remembers: those at work first, then newest first. May read the disk.
    #[must_use]
    pub fn groups(&self) -> Vec<GroupProgress> {
        let handles: Vec<GroupHandle> = self.groups.lock().values().cloned().collect();
        let mut all: Vec<GroupProgress> = handles.iter().map(|handle| self.show_group(handle)).collect();
        // Of one that followed the others, the last counts.
        let order: HashMap<String, usize> =
            self.sessions().into_iter().enumerate().map(|(place, session)| (session.id, place)).collect();
        let newest =
            |group: &GroupProgress| group.members.iter().filter_map(|m| order.get(&m.id)).min().copied();
        all.sort_by_key(|group| (group.outcome.is_end(), newest(group).unwrap_or(usize::MAX)));
        all
    }

    fn show_group(&self, handle: &GroupHandle) -> GroupProgress {
        let record = handle.record.borrow().clone();
        let members: Vec<Progress> = record
            .members
            .iter()
            .filter_map(|member| {
                let id = member.last_session();
                let begun = || Progress::begun(id.to_string(), &member.vm, Role::Source, &member.to.name);
                // Of a group of the past, a member may be forgotten.
                self.session_now(id).or_else(|| (!record.over).then(begun))
            })
            .collect();
        let (gate, waiting_for) = match &handle.barrier {
            Some(barrier) if record.state == GroupState::Gathering => barrier.waits(),
            _ => (None, Vec::new()),
        };
        let outcome = outcome(&record, &members);
        GroupProgress { id: record.id.to_string(), members, gate, waiting_for, outcome }
    }

    /// A session from here, of the past too; nothing if it has not begun.
    pub(super) fn session_now(&self, id: SessionId) -> Option<Progress> {
        let known = self.lock().get(&id).map(|handle| handle.progress.borrow().clone());
        known.or_else(|| snapshot(self.node.disk(), id, &self.node.config.sessions_dir))
    }
}

fn outcome(record: &GroupRecord, members: &[Progress]) -> GroupOutcome {
    match (record.state, record.over) {
        (GroupState::Decided, false) => GroupOutcome::Decided,
        (GroupState::Gathering | GroupState::CalledOff, false) => GroupOutcome::Gathering,
        (GroupState::Decided, true) => match &record.incomplete {
            // An operator may have mended it since.
            Some(error) if !members.iter().all(|member| matches!(member.outcome, Outcome::Done { .. })) => {
                GroupOutcome::Incomplete { error: error.clone() }
            }
            _ => GroupOutcome::Done { report: Box::new(record.report.clone()) },
        },
        (GroupState::Gathering | GroupState::CalledOff, true) => {
            let off = record.off.as_ref();
            GroupOutcome::CalledOff {
                error: off.map_or_else(|| "called off".to_owned(), |off| off.told()),
                cancelled: off.is_some_and(|off| off.cancelled),
                refused: off.is_some_and(|off| off.refused),
            }
        }
    }
}
