//! Noticing that a QEMU has ended.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::record::VmRecord;
use vmove_qmp::QemuProcess;
use vmove_qmp::process::log_in;

use super::{Ending, Registry, identity, past, process_of, run_blocking, starting};

/// How soon a VM that a migration brought is watched, and a migration that let go of a dead one is noticed.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

impl Registry {
    /// Takes up the VMs that an earlier daemon left behind. A QEMU that is gone is reported and cleaned up by its watcher,
    /// once the migrations have been taken up: one of them may hold it.
    /// Starts that were not finished are undone by tasks of their own, which hold the names.
    pub fn readopt(self: &Arc<Self>) {
        for (dir, note) in starting::left(&self.run_dir, &self.vms) {
            // Whoever holds the name is at work in that folder now.
            let Ok(reserved) = self.reserve(&note.name) else { continue };
            tokio::spawn(async move {
                starting::clean(dir, note).await;
                drop(reserved);
            });
        }
        for record in self.vms.list() {
            let alive = process_of(&record).is_some();
            tracing::info!(vm = %record.name, pid = record.pid, alive, "VM of an earlier vmoved");
        }
    }

    /// Watches every VM, also those that migrations bring. Never returns.
    pub async fn supervise(self: Arc<Self>) {
        tokio::join!(self.watch_all(), self.clear_past());
    }

    /// There may be many of their folders: nothing waits for this.
    async fn clear_past(self: &Arc<Self>) {
        loop {
            self.remove_past().await;
            tokio::time::sleep(past::LOOK.min(self.keep_stopped).max(LOOK_AGAIN)).await;
        }
    }

    async fn watch_all(self: &Arc<Self>) {
        loop {
            let records = self.vms.list();
            // Adopted ones have no log of ours.
            let logs: Vec<_> = records
                .iter()
                .filter(|vm| !vm.adopted)
                .map(|vm| (vm.name.clone(), log_in(&vm.vm_dir)))
                .collect();
            let (vms, groups) = (self.vms.clone(), self.starter.groups.clone());
            let looked = move || {
                vms.write_owed();
                groups.sweep();
                logs.iter().for_each(|(vm, log)| cut_log(vm, log));
            };
            let _ = run_blocking(looked).await;
            for record in records {
                self.watch(record);
            }
            self.give_back_ownerless().await;
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Gives back devices whose VM is no more, or never came to be: a daemon was killed in between, or they could not be given back then.
    async fn give_back_ownerless(self: &Arc<Self>) {
        let mut vms: Vec<String> = self.devices.claims().into_iter().map(|claim| claim.vm).collect();
        vms.dedup();
        for vm in vms {
            // Taken by a VM that is there, by a migration or by a start. Held meanwhile, so that no start takes them in between.
            let Ok(_reserved) = self.reserve(&vm) else { continue };
            match self.devices.give_all_back(&vm, Duration::ZERO).await {
                Ok(()) => tracing::warn!(vm, "devices of a VM that is no more are back with the host"),
                Err(error) => tracing::debug!(vm, %error, "a device of a VM that is no more is not back yet"),
            }
        }
    }

    /// Starts a task that waits for the end of this process, unless there is one.
    pub(super) fn watch(self: &Arc<Self>, record: VmRecord) {
        if !self.lock().watched.insert(identity(&record)) {
            return;
        }
        let registry = self.clone();
        tokio::spawn(async move {
            wait_for_end(&record).await;
            registry.settle(&record).await;
            registry.lock().watched.remove(&identity(&record));
        });
    }

    /// The process has ended: cleans up, unless somebody else does.
    async fn settle(self: &Arc<Self>, record: &VmRecord) {
        loop {
            {
                let _ending = Ending::of(self, &record.name).await;
                // The session first: one that is over by now has already removed the record of a VM that moved away. Asked
                // the other way round, it may end between the two questions, and the VM would be taken for one that died.
                let held = self.migrations.of_vm(&record.name).is_some();
                // Moved away, stopped, or replaced by a new life of the same name.
                if !self.vms.get(&record.name).is_ok_and(|now| identity(&now) == identity(record)) {
                    return;
                }
                if !held {
                    return self.ended(record).await;
                }
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

/// Keeps the output of a QEMU from filling the disk.
fn cut_log(vm: &str, log: &Path) {
    match vmove_qmp::log::cut(log) {
        Ok(0) => {}
        Ok(bytes) => {
            tracing::warn!(vm, log = %log.display(), bytes, "QEMU writes much to its log: only the end was kept");
        }
        // It comes with the VM and goes with it.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => tracing::warn!(vm, log = %log.display(), %error, "could not cut a log"),
    }
}

async fn wait_for_end(record: &VmRecord) {
    let pid = u32::try_from(record.pid).unwrap_or_default();
    match QemuProcess::adopt(pid, &log_in(&record.vm_dir)) {
        // Looked at after the process was opened: now it is certainly that one.
        Ok(process) if process_of(record).is_some() => process.exited().await,
        Ok(_) => {}
        Err(why) => {
            // Out of descriptors or threads, or gone.
            while process_of(record).is_some() {
                tracing::warn!(vm = %record.name, %why, "cannot wait for the end of QEMU, looking again");
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
    }
}
