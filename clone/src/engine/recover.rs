//! Forks that an earlier life of the daemon did not finish.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::check::Way;
use crate::freeze::{self, Undone};
use crate::record::{ForkPhase, ForkRecord};
use crate::template::Template;
use vmove_node::journal::Journal;

use super::error::ForkError;
use super::promote::Forked;
use super::unreadable::Unreadable;
use super::{Claim, ForkEngine};
use vmove_node::registry::process_of;

/// Between the first two tries to bring a parent back; each wait is twice as long as the one before.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Longest wait between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Between looks whether a VM may be held.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// A fork that failed is answered so much later at most, for what it made to be gone by then.
const SWEEP_PATIENCE: Duration = Duration::from_secs(3);

impl ForkEngine {
    /// Brings parents back and removes what never became a child. Call this before anybody can ask for a fork. Returns as soon as each
    /// fork has its task, which holds its VMs: one whose monitor hangs is in nobody else's way.
    pub async fn recover(self: &Arc<Self>) {
        // Before any node or guest can ask about them.
        self.recover_tickets();
        // First: QEMUs whose disks are elsewhere may not answer before.
        self.recover_disks().await;
        self.resume_stopped().await;
        let entries = std::fs::read_dir(&self.journals).into_iter().flatten().flatten();
        let paths = entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "jsonl"));
        for path in paths {
            match Journal::<ForkRecord>::open_begun(&path) {
                Ok(Some(journal)) => {
                    let held = self.hold_vms_of(&journal);
                    tokio::spawn(self.clone().take_up_until_done(journal, held));
                }
                // Nothing was done yet.
                Ok(None) => drop(std::fs::remove_file(&path)),
                Err(error) => self.enter_unreadable(Unreadable::journal(path, &error)),
            }
        }
        self.recover_hosted();
        // Once these hold their VMs.
        self.recover_devices();
    }

    /// Keeps other forks away from VMs.
    pub(super) fn hold<'a>(self: &Arc<Self>, names: impl Iterator<Item = &'a String>) -> Vec<Claim> {
        names.filter_map(|name| self.claim(name).ok()).collect()
    }

    /// Keeps other forks away from the VMs of this one.
    fn hold_vms_of(self: &Arc<Self>, journal: &Journal<ForkRecord>) -> Vec<Claim> {
        let record = journal.record();
        self.hold(record.children.iter().chain([&record.vm.name]))
    }

    /// Takes up a fork. Its VMs are held as soon as this returns.
    pub(super) fn take_up_held(
        self: Arc<Self>,
        mut journal: Journal<ForkRecord>,
    ) -> impl Future<Output = Result<(), ForkError>> + Send {
        let held = self.hold_vms_of(&journal);
        async move {
            let taken_up = self.take_up(&mut journal).await;
            drop(held);
            taken_up
        }
    }

    /// Takes up a fork again and again, until its parent is back or has ended. `held`: its VMs; none while whoever began the fork holds
    /// them.
    async fn take_up_until_done(self: Arc<Self>, mut journal: Journal<ForkRecord>, mut held: Vec<Claim>) {
        let parent = journal.record().vm.name.clone();
        let mut wait = FIRST_WAIT;
        while let Err(error) = self.take_up(&mut journal).await {
            tracing::error!(fork = %journal.record().id, vm = %parent, why = %error.message(), next_try_s = wait.as_secs(),
                "the parent of a fork could not be brought back");
            let next = Instant::now() + wait;
            while held.is_empty() {
                tokio::time::sleep(LOOK_AGAIN).await;
                held.extend(self.claim(&parent));
            }
            tokio::time::sleep_until(next).await;
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    async fn take_up(&self, journal: &mut Journal<ForkRecord>) -> Result<(), ForkError> {
        let record = journal.record().clone();
        tracing::warn!(fork = %record.id, vm = %record.vm.name, phase = record.phase.word(), "taking up a fork that was broken off");
        if self.registry.migrations().moved().contains_key(&(record.vm.pid, record.vm.pid_start)) {
            // It runs there: here it must stay stopped.
            tracing::error!(fork = %record.id, vm = %record.vm.name, "the parent of a fork was given away: it is not brought back");
            return Ok(());
        }
        if process_of(&record.vm).is_some()
            && let Err(error) = self.bring_back(&record, journal).await
            // Nobody needs to be brought back if it has ended meanwhile.
            && process_of(&record.vm).is_some()
        {
            return Err(error);
        }
        self.end_those_that_never_ran(&record.id, &record.children).await;
        if !(record.keep && Template::open(&record.template).is_ok())
            && let Err(error) = freeze::tidy(&record)
        {
            tracing::warn!(fork = %record.id, %error, "something of a fork is left");
        }
        self.until_written(&record.vm.name).await;
        self.rehome_after_broken_off(&record).await;
        let _ = std::fs::remove_file(journal.path());
        Ok(())
    }

    /// A parent whose fork was broken off when its memory was private already: it is to be as it was.
    async fn rehome_after_broken_off(&self, record: &ForkRecord) {
        let Ok(vm) = self.registry.vms().get(&record.vm.name) else { return };
        if record.way != Way::Remapped || (vm.pid, vm.pid_start) != (record.vm.pid, record.vm.pid_start) {
            return;
        }
        if let Ok((client, facts)) = self.registry.inspect(&vm).await {
            // What failed is logged, and tried again when the guest is next forked or moved.
            let _ = self.rehome_after_fork(&record.id, &Forked { record: vm, client, facts }).await;
        }
    }

    async fn bring_back(
        &self,
        record: &ForkRecord,
        journal: &mut Journal<ForkRecord>,
    ) -> Result<(), ForkError> {
        let client = self.registry.monitor(&record.vm).await?;
        if record.phase == ForkPhase::Complete {
            // The guest was brought back, its record perhaps not.
            return self.follow_disks(&record.vm.name, &client, &record.disks).await;
        }
        // Noted before the guest may run: private memory that nobody knows of could not be found again.
        let before = self.members.get(&record.vm);
        let expected = before.clone().filter(|m| m.fork == record.id);
        if expected.is_none() && record.way == Way::Remapped {
            self.members.note_private(&record.vm, before.clone(), &record.id, &record.mappings)?;
        }
        let how = freeze::undo(journal, &client).await?;
        self.follow_disks(&record.vm.name, &client, &record.disks).await?;
        if how == Undone::Shared && record.way == Way::Remapped {
            match before.filter(|m| m.fork != record.id) {
                Some(member) => self.members.put(&member),
                None => self.members.remove(&record.vm.name),
            }?;
        }
        Ok(())
    }

    /// Children of a fork that were registered and then not set running.
    pub(super) async fn end_those_that_never_ran(&self, fork: &str, children: &[String]) {
        for name in children {
            let Ok(child) = self.registry.vms().get(name) else { continue };
            // A VM of this name that came later is another one. One that never ran has not been forked itself.
            if self.members.get(&child).is_none_or(|member| member.fork != fork) {
                continue;
            }
            let Ok(client) = self.registry.monitors().client(&child.qmp_socket).await else { continue };
            let asked = client
                .execute_raw("query-status", serde_json::Value::Null, std::time::Duration::from_secs(5))
                .await;
            let running =
                asked.is_ok_and(|s| s.get("running").and_then(serde_json::Value::as_bool) == Some(true));
            if running {
                continue;
            }
            tracing::warn!(child = %name, "ending a child that never ran");
            if let Err(error) = self.registry.stop(name, true).await {
                tracing::error!(child = %name, %error, "could not end a child that never ran");
            }
        }
    }

    /// After a fork that failed in this life: what is not undone is undone, and what it made is removed. Where that takes long, it goes on
    /// after this returns.
    pub(super) async fn sweep(self: &Arc<Self>, journal: Journal<ForkRecord>) {
        let fork = journal.record().id.clone();
        let sweeping = tokio::spawn(self.clone().take_up_until_done(journal, Vec::new()));
        if tokio::time::timeout(SWEEP_PATIENCE, sweeping).await.is_err() {
            tracing::warn!(%fork, "a fork that failed is not undone yet: that goes on");
        }
    }
}
