//! `vmove stop`, and what is left to do when a QEMU has ended.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::migrations::Abandoned;
use crate::oom_kills;
use crate::record::VmRecord;
use vmove_qmp::QemuProcess;

use super::{ANSWER_TIMEOUT, Ended, Ending, News, REMEMBERED, Registry, RegistryError, process_of, starting};
use crate::blocking::run_blocking;
use vmove_types::vm::Stopped;

/// QEMU flushes its disks when it quits.
const QUIT_TIMEOUT: Duration = Duration::from_secs(15);
/// The same, where its main loop may wait for memory that never comes.
const STUCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a QEMU has ended that the out-of-memory killer has chosen.
const KILLED_FOR_MEMORY: &str = "killed by the kernel for lack of memory";

impl Registry {
    /// Ends a VM. With `force` also one whose migration has lost its peer: memory that is only there is lost then.
    pub async fn stop(self: &Arc<Self>, name: &str, force: bool) -> Result<Stopped, RegistryError> {
        let _ending = Ending::of(self, name).await;
        let abandoned = if force { self.abandon(name).await? } else { Abandoned::NotHeld };
        let stopped = |how: &str, owed| Ok(Stopped { name: name.to_owned(), how: how.to_owned(), owed });
        let (freed, owed) = match abandoned {
            Abandoned::Removed { owed } => {
                tracing::info!(vm = %name, owed, "the paused copy of a migration was ended on request");
                return stopped("its paused copy was removed", owed);
            }
            Abandoned::Free { owed } => (true, owed),
            // Before the record is looked up: a migration that ends in between may take it away.
            Abandoned::NotHeld => (false, self.not_in_session(name).map(|()| None)?),
        };
        let record = match self.vms.get(name) {
            Ok(record) => record,
            // It ended by itself, and this is the last that is heard of it.
            Err(_) if self.forget_end(name) => {
                return stopped("had ended before", owed);
            }
            Err(error) => return Err(error.into()),
        };
        if record.adopted && !force {
            return Err(RegistryError::Adopted(name.to_owned()));
        }
        // A guest that lacks memory may hold up QEMU's monitor.
        let quit_timeout = if freed { STUCK_TIMEOUT } else { QUIT_TIMEOUT };
        let how = self.end_process(&record, force, quit_timeout).await?;
        self.clean_up(&record).await?;
        self.news.tell(News::Ended { record: record.clone(), why: "on request".to_owned() });
        // What was expected of its end no longer counts.
        self.lock().ended.remove(name);
        tracing::info!(vm = %name, pid = record.pid, how, owed, "VM ended on request");
        stopped(how, owed)
    }

    async fn abandon(&self, name: &str) -> Result<Abandoned, RegistryError> {
        let abandoned = self.migrations.abandon(name).await;
        abandoned.map_err(|source| RegistryError::NotAbandoned { vm: name.to_owned(), source })
    }

    async fn end_process(
        &self,
        record: &VmRecord,
        force: bool,
        quit_timeout: Duration,
    ) -> Result<&'static str, RegistryError> {
        if process_of(record).is_none() {
            return Ok("had ended before");
        }
        let pid = u32::try_from(record.pid).unwrap_or_default();
        let log = vmove_qmp::process::log_in(&record.vm_dir);
        let Ok(process) = QemuProcess::adopt(pid, &log) else { return Ok("had ended before") };
        let client =
            match tokio::time::timeout(ANSWER_TIMEOUT, self.monitors.client(&record.qmp_socket)).await {
                Ok(Ok(client)) => Some(client),
                Ok(Err(_)) | Err(_) => None,
            };
        if let Some(client) = &client {
            // The answer may get lost in QEMU's end: whether it ends is what counts.
            let _ = client.execute_raw("quit", serde_json::Value::Null, quit_timeout).await;
            if tokio::time::timeout(quit_timeout, process.exited()).await.is_ok() {
                return Ok("quit");
            }
        }
        if !force {
            return Err(RegistryError::NoAnswer { vm: record.name.clone(), pid });
        }
        process.quit(None, QUIT_TIMEOUT).await?;
        Ok("killed")
    }

    /// A QEMU has ended by itself, or while no daemon ran.
    pub(super) async fn ended(self: &Arc<Self>, record: &VmRecord) {
        let log = vmove_qmp::process::log_in(&record.vm_dir);
        let (pid, start) = (record.pid, record.pid_start);
        let look =
            move || (vmove_qmp::log::tail(&log).unwrap_or_default(), oom_kills::was_killed(pid, start));
        let (last, killed) = run_blocking(look).await.unwrap_or_default();
        let last = last.lines().next_back().unwrap_or_default();
        let why = killed.then(|| KILLED_FOR_MEMORY.to_owned());
        tracing::warn!(vm = %record.name, pid = record.pid, adopted = record.adopted, why, log = %last, "QEMU has ended");
        metrics::counter!("vmove_qemu_ended_total").increment(1);
        self.remember(record, why);
        if let Err(error) = self.clean_up(record).await {
            tracing::error!(vm = %record.name, %error, "could not clean up after a QEMU that ended");
        }
        let why = self.why_ended(&record.name).unwrap_or_else(|| "by itself".to_owned());
        self.news.tell(News::Ended { record: record.clone(), why });
    }

    fn remember(&self, record: &VmRecord, why: Option<String>) {
        let mut state = self.lock();
        let told =
            |known: &&Ended| (known.record.pid, known.record.pid_start) == (record.pid, record.pid_start);
        let why = why.or_else(|| state.ended.get(&record.name).filter(told)?.why.clone());
        if state.ended.len() >= REMEMBERED {
            state.ended.pop_first();
        }
        state.ended.insert(record.name.clone(), Ended { record: record.clone(), why });
    }

    /// Ends a VM that cannot go on, at once: its monitor may not answer. It is listed as ended, with the reason.
    pub async fn end_because(self: &Arc<Self>, name: &str, why: &str) -> Result<(), RegistryError> {
        let _ending = Ending::of(self, name).await;
        let Ok(record) = self.vms.get(name) else {
            // Who watches it was faster.
            if let Some(ended) = self.lock().ended.get_mut(name) {
                ended.why = Some(why.to_owned());
            }
            return Ok(());
        };
        if let Some(process) = process_of(&record) {
            let pid = process.pid();
            let qemu = QemuProcess::adopt(pid, &vmove_qmp::process::log_in(&record.vm_dir));
            process.kill().map_err(RegistryError::Kill)?;
            if let Ok(qemu) = qemu {
                let _ = tokio::time::timeout(QUIT_TIMEOUT, qemu.exited()).await;
            }
        }
        // Before its record goes: whoever sees it ended sees why.
        self.remember(&record, Some(why.to_owned()));
        self.clean_up(&record).await?;
        self.news.tell(News::Ended { record: record.clone(), why: why.to_owned() });
        tracing::error!(vm = %name, pid = record.pid, %why, "VM was ended");
        Ok(())
    }

    /// Says why VMs that are there are about to end, whoever notices it first.
    pub fn will_end(&self, names: &[String], why: &str) {
        for record in names.iter().filter_map(|name| self.vms.get(name).ok()) {
            self.remember(&record, Some(why.to_owned()));
        }
    }

    /// Why this daemon ended a VM that is no more.
    pub fn why_ended(&self, name: &str) -> Option<String> {
        self.lock().ended.get(name).and_then(|ended| ended.why.clone())
    }

    /// RAM files and record go; the log stays until the name is used again. What we did not make is left alone. The record goes last: a daemon
    /// that is killed meanwhile finds the rest by it.
    async fn clean_up(&self, record: &VmRecord) -> Result<(), RegistryError> {
        self.monitors.forget(&record.qmp_socket).await;
        // The record goes all the same: whatever is left is given back again and again, see `supervise`.
        self.take_back(&record.name).await;
        let (vms, record, memory_dir) = (self.vms.clone(), record.clone(), self.memory_dir().to_owned());
        let work = move || -> Result<(), RegistryError> {
            if !record.adopted {
                remove_files(&record, &memory_dir);
            }
            Ok(vms.remove(&record.name)?)
        };
        run_blocking(work).await?
    }
}

fn remove_files(record: &VmRecord, memory_dir: &Path) {
    starting::remove(&record.qmp_socket);
    // A record of an earlier vmoved may name the memory folder by a symbolic link.
    let ours = |path: &Path| {
        path.starts_with(memory_dir) || path.canonicalize().is_ok_and(|path| path.starts_with(memory_dir))
    };
    for file in record.ram.iter().filter(|file| ours(&file.path)) {
        starting::remove(&file.path);
    }
    for overlay in &record.overlays {
        starting::remove(overlay);
    }
}
