//! Forks that an earlier life of the daemon did not finish.

use std::path::Path;

use vmove_clone::check::Way;
use vmove_clone::parent::{self, Undone};
use vmove_clone::record::{ForkPhase, ForkRecord};
use vmove_clone::template::Template;
use vmove_migrate::journal::Journal;
use vmove_qmp::Client;

use super::Forks;
use super::freeze::note_private;
use crate::server::registry::process_of;

impl Forks {
    /// Brings parents back and removes what never became a child. Call this before anybody can ask for a fork.
    pub async fn recover(&self) {
        // First: QEMUs whose disks are elsewhere may not answer before.
        self.recover_disks().await;
        let entries = std::fs::read_dir(&self.journals).into_iter().flatten().flatten();
        let paths = entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "jsonl"));
        for path in paths {
            match Journal::<ForkRecord>::open(&path) {
                Ok(journal) => self.take_up(journal).await,
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "a fork's journal cannot be read");
                }
            }
        }
        self.recover_hosted().await;
    }

    async fn take_up(&self, mut journal: Journal<ForkRecord>) {
        let record = journal.record().clone();
        tracing::warn!(fork = %record.id, vm = %record.vm.name, phase = ?record.phase, "taking up a fork of an earlier vmoved");
        if process_of(&record.vm).is_some() && record.phase != ForkPhase::Complete {
            if let Err(why) = self.bring_back(&record, &mut journal).await {
                tracing::error!(fork = %record.id, vm = %record.vm.name, %why, "the parent of a fork could not be brought back");
                return;
            }
        }
        self.end_those_that_never_ran(&record.children).await;
        if !(record.keep && Template::open(&record.template).is_ok()) {
            if let Err(error) = parent::tidy(&record) {
                tracing::warn!(fork = %record.id, %error, "something of a fork is left");
            }
        }
        let _ = std::fs::remove_file(journal.path());
    }

    async fn bring_back(&self, record: &ForkRecord, journal: &mut Journal<ForkRecord>) -> Result<(), String> {
        let client = self.registry.monitors.client(&record.vm.qmp_socket).await.map_err(|e| e.to_string())?;
        // Noted before the guest may run: private memory that nobody knows of could not be found again.
        let before = self.members.get(&record.vm);
        let expected = before.clone().filter(|m| m.fork == record.id);
        if expected.is_none() && record.way == Way::Remapped {
            note_private(&self.members, &record.vm, before.clone(), &record.id, &record.mappings)
                .map_err(|e| e.to_string())?;
        }
        let how = parent::undo(journal, &client).await.map_err(|e| e.to_string())?;
        self.follow_disks(&record.vm.name, &client, &record.disks).await.map_err(|e| e.message)?;
        if how == Undone::Shared && record.way == Way::Remapped {
            match before.filter(|m| m.fork != record.id) {
                Some(member) => self.members.put(&member),
                None => self.members.remove(&record.vm.name),
            }
            .map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Children that were registered and then not set running.
    pub(super) async fn end_those_that_never_ran(&self, children: &[String]) {
        for name in children {
            let Ok(child) = self.registry.vms.get(name) else { continue };
            let Ok(client) = self.registry.monitors.client(&child.qmp_socket).await else { continue };
            let asked = client
                .execute_raw("query-status", serde_json::Value::Null, std::time::Duration::from_secs(5))
                .await;
            let running =
                asked.is_ok_and(|s| s.get("running").and_then(serde_json::Value::as_bool) == Some(true));
            if running {
                continue;
            }
            tracing::warn!(child = %name, "ending a child that never ran");
            if let Err(problem) = self.registry.stop(name, true).await {
                tracing::error!(child = %name, %problem, "could not end a child that never ran");
            }
        }
    }

    /// After a fork that failed and was undone in this life.
    pub(super) async fn sweep_journal(&self, path: &Path, client: &Client) {
        let Ok(journal) = Journal::<ForkRecord>::open(path) else { return };
        let record = journal.record();
        if let Err(problem) = self.follow_disks(&record.vm.name, client, &record.disks).await {
            // The next life tries again.
            tracing::error!(fork = %record.id, %problem, "which disks a VM has could not be written down");
            return;
        }
        if record.phase != ForkPhase::Complete {
            // The parent was not brought back: the next life tries again.
            return;
        }
        if let Err(error) = parent::tidy(record) {
            tracing::warn!(fork = %record.id, %error, "something of a fork is left");
        }
        let _ = std::fs::remove_file(path);
    }
}
