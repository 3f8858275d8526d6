//! Forks that an earlier life of the daemon did not finish.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;

use crate::check::Way;
use crate::freeze::{self, Undone};
use crate::record::{ForkPhase, ForkRecord};
use crate::template::Template;
use vmove_node::journal::Journal;
use vmove_qmp::Client;

use super::error::ForkError;
use super::unreadable::Unreadable;
use super::{Claim, ForkEngine};
use vmove_node::registry::process_of;

impl ForkEngine {
    /// Brings parents back and removes what never became a child. Call this before anybody can ask for a fork. Returns as soon as each
    /// fork has its task, which holds its VMs: one whose monitor hangs is in nobody else's way.
    pub async fn recover(self: &Arc<Self>) {
        // First: QEMUs whose disks are elsewhere may not answer before.
        self.recover_disks().await;
        let entries = std::fs::read_dir(&self.journals).into_iter().flatten().flatten();
        let paths = entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "jsonl"));
        for path in paths {
            match Journal::<ForkRecord>::open_begun(&path) {
                Ok(Some(journal)) => {
                    let taken_up = self.clone().take_up_held(journal);
                    tokio::spawn(async move {
                        if let Err(error) = taken_up.await {
                            tracing::error!(why = %error.message(), "the parent of a fork could not be brought back");
                        }
                    });
                }
                // Nothing was done yet.
                Ok(None) => drop(std::fs::remove_file(&path)),
                Err(error) => self.enter_unreadable(Unreadable::journal(path, &error)),
            }
        }
        self.recover_hosted();
    }

    /// Keeps other forks away from VMs.
    pub(super) fn hold<'a>(self: &Arc<Self>, names: impl Iterator<Item = &'a String>) -> Vec<Claim> {
        names.filter_map(|name| self.claim(name).ok()).collect()
    }

    /// Takes up a fork. Its VMs are held as soon as this returns.
    pub(super) fn take_up_held(
        self: Arc<Self>,
        journal: Journal<ForkRecord>,
    ) -> impl Future<Output = Result<(), ForkError>> + Send {
        let record = journal.record();
        let held = self.hold(record.children.iter().chain([&record.vm.name]));
        async move {
            let taken_up = self.take_up(journal).await;
            drop(held);
            taken_up
        }
    }

    async fn take_up(&self, mut journal: Journal<ForkRecord>) -> Result<(), ForkError> {
        let record = journal.record().clone();
        tracing::warn!(fork = %record.id, vm = %record.vm.name, phase = record.phase.word(), "taking up a fork of an earlier vmoved");
        if self.registry.migrations().moved().contains_key(&(record.vm.pid, record.vm.pid_start)) {
            // It runs there: here it must stay stopped.
            tracing::error!(fork = %record.id, vm = %record.vm.name, "the parent of a fork was given away: it is not brought back");
            return Ok(());
        }
        if process_of(&record.vm).is_some() && record.phase != ForkPhase::Complete {
            self.bring_back(&record, &mut journal).await?;
        }
        self.end_those_that_never_ran(&record.children).await;
        if !(record.keep && Template::open(&record.template).is_ok())
            && let Err(error) = freeze::tidy(&record)
        {
            tracing::warn!(fork = %record.id, %error, "something of a fork is left");
        }
        self.until_written(&record.vm.name).await;
        let _ = std::fs::remove_file(journal.path());
        Ok(())
    }

    async fn bring_back(
        &self,
        record: &ForkRecord,
        journal: &mut Journal<ForkRecord>,
    ) -> Result<(), ForkError> {
        let client = self.registry.monitor(&record.vm).await?;
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

    /// Children that were registered and then not set running.
    pub(super) async fn end_those_that_never_ran(&self, children: &[String]) {
        for name in children {
            let Ok(child) = self.registry.vms().get(name) else { continue };
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

    /// After a fork that failed and was undone in this life.
    pub(super) async fn sweep(&self, journal: &Path, record: &ForkRecord, client: &Client) {
        if let Err(error) = self.follow_disks(&record.vm.name, client, &record.disks).await {
            // The next life tries again.
            tracing::error!(fork = %record.id, why = %error.message(), "which disks a VM has could not be written down");
            return;
        }
        if let Err(error) = freeze::tidy(record) {
            tracing::warn!(fork = %record.id, %error, "something of a fork is left");
        }
        if self.registry.vms().owed(&record.vm.name).is_some() {
            // Which disks the VM has is known by the journal alone: the next life looks again.
            return;
        }
        // Its last line may not say that it was undone, where there was no room: this needs none.
        let _ = std::fs::remove_file(journal);
    }
}
