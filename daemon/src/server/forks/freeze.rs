//! A guest frozen for a fork or a template, and what is written down of it.

use std::sync::Arc;

use vmove_clone::CloneError;
use vmove_clone::check::{self, GuestRam};
use vmove_clone::parent::{self, Freeze, Frozen};
use vmove_clone::record::{Member, Members};
use vmove_clone::report::KeepProgress;
use vmove_memory::{Kept, QemuMapping};
use vmove_migrate::clock::ms;
use vmove_migrate::vm::VmRecord;

use super::Forks;
use super::create::{Parent, Ready};
use super::disks::frozen_disks;
use super::problem::clone_problem;
use crate::api::problem::Problem;

impl Forks {
    pub(super) async fn freeze_for(
        self: &Arc<Self>,
        id: &str,
        parent: &Parent,
        ram: Arc<GuestRam>,
        children: Vec<String>,
    ) -> Result<Ready, Problem> {
        let frozen = self.freeze(id, parent, ram, None, children).await?;
        Ok(Ready {
            pause_ms: ms(frozen.pause),
            freeze: Some(frozen.freeze),
            template: frozen.template,
            state: frozen.state,
            disks: frozen_disks(&frozen.journal),
            journal: Some(frozen.journal),
        })
    }

    /// Freezes a guest and notes that its memory is private, if it is then.
    pub(super) async fn freeze(
        &self,
        id: &str,
        parent: &Parent,
        ram: Arc<GuestRam>,
        name: Option<String>,
        children: Vec<String>,
    ) -> Result<Frozen, Problem> {
        let journal = self.journals.join(format!("{id}.jsonl"));
        let order = Freeze {
            id,
            vm: &parent.record,
            client: &parent.client,
            facts: &parent.facts,
            ram,
            copy_limit: self.policy.copy_limit_mib.map(|mib| mib << 20),
            memory: &self.registry.memory_dir,
            journal: &journal,
            name,
            children,
            disks: &parent.base.disks,
            overlay_dir: self.policy.overlay_dir.as_deref(),
        };
        let (members, record, fork) = (Arc::clone(&self.members), parent.record.clone(), id.to_owned());
        let before = members.get(&record);
        let known = before.clone();
        let on_private =
            move |private: &[QemuMapping]| note_private(&members, &record, known, &fork, private);
        let on_kept = |kept: Kept| {
            self.update(id, |p| {
                p.phase = "copy".to_owned();
                p.keep = Some(KeepProgress { pages: kept.by_faults + kept.by_copy, of: kept.pages });
            });
        };
        match parent::freeze(order, on_private, on_kept).await {
            Ok(frozen) => {
                let steps = &frozen.journal.record().disks;
                self.follow_disks(&parent.record.name, &parent.client, steps).await?;
                Ok(frozen)
            }
            Err(error) => {
                self.unnote_shared(&parent.record, before);
                self.sweep_journal(&journal, &parent.client).await;
                Err(clone_problem(&error))
            }
        }
    }

    /// After a fork that failed: memory that did not become private is not said to be.
    fn unnote_shared(&self, record: &VmRecord, before: Option<Member>) {
        if check::is_private(record).unwrap_or(true) {
            return;
        }
        let done = match before {
            Some(member) => self.members.put(&member),
            None => self.members.remove(&record.name),
        };
        if let Err(error) = done {
            tracing::error!(vm = %record.name, %error, "a VM counts as forked and is not");
        }
    }
}

/// Writes down that a guest's memory is private, and where it is mapped.
pub(super) fn note_private(
    members: &Members,
    record: &VmRecord,
    before: Option<Member>,
    fork: &str,
    private: &[QemuMapping],
) -> Result<(), CloneError> {
    let (parent, index) = before.map_or((None, 0), |m| (m.parent, m.index));
    members.put(&Member {
        vm: record.name.clone(),
        pid: record.pid,
        pid_start: record.pid_start,
        parent,
        index,
        fork: fork.to_owned(),
        node: None,
        private: private.to_vec(),
    })
}
