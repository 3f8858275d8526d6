//! A guest frozen for a fork or a template, and what is written down of it.

use std::sync::Arc;

use crate::check::{self, GuestRam};
use crate::freeze::{self, Freeze, Frozen};
use crate::record::Member;
use vmove_memory::{Kept, QemuMapping};
use vmove_node::record::VmRecord;
use vmove_types::fork_report::KeepProgress;
use vmove_types::problem::chain;
use vmove_types::time::{Mono, ms};
use vmove_types::vm::Running;

use super::disks::frozen_disks;
use super::{Fork, FrozenOrigin};
use crate::engine::ForkEngine;
use crate::engine::error::ForkError;
use crate::engine::origin::Guest;

impl ForkEngine {
    pub(super) async fn freeze_for(
        self: &Arc<Self>,
        fork: &Fork,
        guest: &Guest,
        ram: Arc<GuestRam>,
        children: Vec<String>,
    ) -> Result<FrozenOrigin, ForkError> {
        let frozen = self.freeze(&fork.id, guest, ram, None, children).await?;
        let ran_on = if fork.request.let_run { self.let_run(guest).await } else { None };
        Ok(FrozenOrigin {
            stopped: frozen.stopped,
            pause_ms: ms(frozen.pause),
            ran_on,
            freeze: Some(frozen.freeze),
            template: frozen.template,
            state: frozen.state,
            disks: frozen_disks(&frozen.journal),
            journal: Some(frozen.journal),
        })
    }

    /// Freezes a guest and notes that its memory is private, if it is then.
    pub(in crate::engine) async fn freeze(
        self: &Arc<Self>,
        id: &str,
        guest: &Guest,
        ram: Arc<GuestRam>,
        name: Option<String>,
        children: Vec<String>,
    ) -> Result<Frozen, ForkError> {
        let journal = self.journals.join(format!("{id}.jsonl"));
        let order = Freeze {
            id,
            vm: &guest.record,
            client: &guest.client,
            facts: &guest.facts,
            ram,
            copy_limit: self.policy.copy_limit_mib.map(|mib| mib << 20),
            memory: self.registry.memory_dir(),
            journal: &journal,
            name,
            children,
            devices: &guest.base.devices,
            disks: &guest.base.disks,
            starter: self.registry.starter(),
            overlay_dir: self.policy.overlay_dir.as_deref(),
        };
        let (members, record, fork) = (Arc::clone(&self.members), guest.record.clone(), id.to_owned());
        let before = members.get(&record);
        let known = before.clone();
        let on_private = move |private: &[QemuMapping]| members.note_private(&record, known, &fork, private);
        let on_kept = |kept: Kept| {
            self.update(id, |p| {
                p.phase = "copy".to_owned();
                p.keep = Some(KeepProgress { pages: kept.by_faults + kept.by_copy, of: kept.pages });
            });
        };
        match freeze::freeze(order, on_private, on_kept).await {
            Ok(frozen) => {
                let steps = &frozen.journal.record().disks;
                if let Err(error) = self.follow_disks(&guest.record.name, &guest.client, steps).await {
                    self.sweep(frozen.journal).await;
                    return Err(error);
                }
                Ok(frozen)
            }
            Err(freeze::Failed { why, journal }) => {
                self.unnote_shared(&guest.record, before);
                if let Some(journal) = journal {
                    self.sweep(*journal).await;
                }
                Err(why.into())
            }
        }
    }

    /// Lets a guest run that was paused when it was frozen. When it did; `None` if it was not paused, or does not run.
    pub(in crate::engine) async fn let_run(&self, guest: &Guest) -> Option<Mono> {
        if guest.facts.status != "paused" {
            return None;
        }
        match self.registry.set_running(&guest.record.name, Running::Running).await {
            Ok(_) => Some(Mono::now()),
            Err(error) => {
                let error = chain(&error);
                tracing::error!(vm = %guest.record.name, error, "a guest stays paused: let it run by `vmove resume`");
                None
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
