//! `vmove list` and `vmove show`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::files::cannot_write;
use crate::record::VmRecord;
use crate::store::DamagedRecord;
use serde_json::Value;
use tokio::task::JoinSet;
use vmove_memory::{RamFile, find_mappings, huge_mapped};
use vmove_qmp::Client;

use super::{ANSWER_TIMEOUT, Ended, Registry, RegistryError, process_of};
use crate::blocking::run_blocking;
use vmove_types::device::VmDevice;
use vmove_types::progress::{Outcome, Progress, Role};
use vmove_types::proxmox::MONITORS;
use vmove_types::units::to_f64;
use vmove_types::vm::{DeviceInfo, RamFileInfo, VmDetail, VmSummary};

impl Registry {
    /// All VMs, those that ended by themselves last.
    pub async fn list(self: &Arc<Self>) -> Vec<VmSummary> {
        let mut asking = JoinSet::new();
        let records = self.vms.list();
        for record in &records {
            let (registry, record) = (self.clone(), record.clone());
            asking.spawn(async move { registry.summary(&record).await.0 });
        }
        let mut all: Vec<VmSummary> = asking.join_all().await;
        let ended = self.lock().ended.values().cloned().collect::<Vec<_>>();
        // One that is being ended is there once.
        let gone = |ended: &&Ended| records.iter().all(|record| record.name != ended.record.name);
        all.extend(ended.iter().filter(gone).map(ended_summary));
        all.extend(self.vms.damaged().iter().map(damaged_summary));
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Everything about one VM.
    pub async fn show(self: &Arc<Self>, name: &str) -> Result<VmDetail, RegistryError> {
        let known = self.vms.get(name);
        let (record, (summary, client)) = match known {
            Ok(record) => (record.clone(), self.summary(&record).await),
            Err(error) => {
                let ended = self.lock().ended.get(name).cloned().ok_or(error)?;
                let summary = ended_summary(&ended);
                (ended.record, (summary, None))
            }
        };
        let consoles = match &client {
            Some(client) => consoles(client).await,
            None => BTreeMap::new(),
        };
        let looked_at = record.clone();
        let (ram, huge_share) = run_blocking(move || memory(&looked_at)).await?;
        let log = vmove_qmp::process::log_in(&record.vm_dir);
        Ok(VmDetail {
            progress: self.migrations.of_vm(name),
            summary,
            qemu: client.map(|c| qemu_words(&c)),
            qmp: record.qmp_socket,
            log: (!record.adopted).then_some(log),
            dir: record.vm_dir,
            consoles,
            control_group: self.starter.groups.of(name),
            ram,
            huge_share,
            pinned: None,
            not_pinned: None,
            notes: Vec::new(),
            command_line: record.command_line,
            environment: record.environment.into_iter().collect(),
        })
    }

    /// The short form, with the monitor if it could be asked.
    async fn summary(&self, record: &VmRecord) -> (VmSummary, Option<Client>) {
        if process_of(record).is_none_or(|process| process.is_ending()) {
            return (summary(record, "ended".to_owned(), None), None);
        }
        let session = self.migrations.of_vm(&record.name);
        let client =
            match tokio::time::timeout(ANSWER_TIMEOUT, self.monitors.client(&record.qmp_socket)).await {
                Ok(Ok(client)) => Some(client),
                Ok(Err(error)) => {
                    tracing::debug!(vm = %record.name, %error, "monitor cannot be asked");
                    None
                }
                Err(_) => None,
            };
        let told = match &client {
            Some(client) => client.execute_raw("query-status", Value::Null, ANSWER_TIMEOUT).await.ok(),
            None => None,
        };
        let word = told.as_ref().and_then(|t| t.get("status")).and_then(Value::as_str);
        let status = match (word, &session) {
            (Some(word), _) => word.to_owned(),
            (None, Some(_)) => "migrating".to_owned(),
            (None, None) => "unknown".to_owned(),
        };
        let unwritten =
            self.vms.owed(&record.name).map(|owed| cannot_write(&owed.path, &owed.error, owed.since));
        let waiting = session.as_ref().and_then(waiting).or(unwritten);
        let devices = self.devices_of(record);
        (VmSummary { waiting, devices, ..summary(record, status, session.map(|s| s.id)) }, client)
    }

    /// The devices of a VM, and whether it has each of them now.
    fn devices_of(&self, record: &VmRecord) -> Vec<DeviceInfo> {
        let claims = if record.devices.is_empty() { Vec::new() } else { self.devices.of_vm(&record.name) };
        let held = |device: &VmDevice| {
            claims.iter().any(|claim| claim.held && claim.request.role == device.request.role)
        };
        record
            .devices
            .iter()
            .map(|device| DeviceInfo { held: held(device), device: device.clone() })
            .collect()
    }
}

/// What is told of a VM in this state.
pub(crate) fn summary(record: &VmRecord, status: String, migration: Option<String>) -> VmSummary {
    let of_proxmox = record.qmp_socket.starts_with(MONITORS);
    VmSummary {
        name: record.name.clone(),
        pid: record.pid,
        status,
        memory: record.backing,
        memory_bytes: record.ram.iter().map(|r| r.size).sum(),
        adopted: record.adopted,
        libvirt: record.libvirt.is_some() && !of_proxmox,
        proxmox: of_proxmox,
        devices: Vec::new(),
        lease: None,
        migration,
        waiting: None,
        why: None,
    }
}

/// What a VM waits for whose migration has lost the other side, or cannot write its journal.
fn waiting(session: &Progress) -> Option<String> {
    if session.unwritten.is_some() {
        return session.unwritten.clone();
    }
    let what = match session.role {
        Role::Source => "its destination",
        Role::Destination => "pages from",
    };
    let peer = &session.peer;
    match &session.outcome {
        Outcome::Reconnecting { since, .. } => {
            let since = SystemTime::UNIX_EPOCH + Duration::from_secs(*since);
            let since = humantime::format_rfc3339_seconds(since);
            Some(format!("waiting for {what} {peer} (lost since {since})"))
        }
        Outcome::Failed { .. } => Some(format!("lacks {what} {peer}: see `vmove status {}`", session.id)),
        Outcome::Running | Outcome::Done { .. } | Outcome::Refused { .. } => None,
    }
}

fn ended_summary(ended: &Ended) -> VmSummary {
    VmSummary { why: ended.why.clone(), ..summary(&ended.record, "ended".to_owned(), None) }
}

/// A VM of which there is only a file that cannot be read.
fn damaged_summary(damaged: &DamagedRecord) -> VmSummary {
    VmSummary {
        name: damaged.name.clone(),
        pid: 0,
        status: format!("unknown, see {}", damaged.path.display()),
        memory: vmove_types::Backing::Thp,
        memory_bytes: 0,
        adopted: false,
        libvirt: false,
        proxmox: false,
        devices: Vec::new(),
        lease: None,
        migration: None,
        waiting: None,
        why: None,
    }
}

/// Character devices with a place in the file system or on the network.
async fn consoles(client: &Client) -> BTreeMap<String, String> {
    let Ok(reply) = client.execute_raw("query-chardev", Value::Null, ANSWER_TIMEOUT).await else {
        return BTreeMap::new();
    };
    let own = client.path().display().to_string();
    let devices = reply.as_array().map(Vec::as_slice).unwrap_or_default();
    devices
        .iter()
        .filter_map(|d| Some((d.get("label")?.as_str()?, d.get("filename")?.as_str()?)))
        .map(|(label, name)| (label.to_owned(), console_place(name)))
        .filter(|(label, name)| {
            let reachable = ["unix:", "pty:", "tcp:", "telnet:", "file:"].iter().any(|p| name.starts_with(p));
            reachable && !name.contains(&own) && !label.starts_with("compat_monitor")
        })
        .collect()
}

/// `disconnected:unix:/x/console.sock,server=on` is reached at `unix:/x/console.sock`.
fn console_place(name: &str) -> String {
    let name = name.strip_prefix("disconnected:").unwrap_or(name);
    // QEMU appends its own options, and where a connected client comes from.
    let name = name.split_once(",server").map_or(name, |(place, _)| place);
    name.split_once(" <-> ").map_or(name, |(place, _)| place).to_owned()
}

/// `10.0.2 (Debian 1:10.0.2+ds-2)`.
fn qemu_words(client: &Client) -> String {
    let package = client.version().package.trim();
    let package = package.trim_start_matches('(').trim_end_matches(')');
    if package.is_empty() {
        client.version().to_string()
    } else {
        format!("{} ({package})", client.version())
    }
}

/// What the RAM files hold, and how much of guest memory QEMU maps by huge pages.
fn memory(record: &VmRecord) -> (Vec<RamFileInfo>, Option<f64>) {
    let mut infos = Vec::new();
    let mut files = Vec::new();
    for file in &record.ram {
        let opened = RamFile::open(&file.path).ok();
        let allocated = opened.as_ref().and_then(|f| f.allocated_bytes().ok()).map(|b| b.0);
        infos.push(RamFileInfo { id: file.id.clone(), path: file.path.clone(), size: file.size, allocated });
        files.extend(opened);
    }
    (infos, huge_share(record, &files))
}

fn huge_share(record: &VmRecord, files: &[RamFile]) -> Option<f64> {
    let process = process_of(record)?;
    let refs: Vec<&RamFile> = files.iter().collect();
    let mappings = find_mappings(&process, &refs).ok()?;
    let (mut huge, mut all) = (0, 0);
    for mapping in &mappings {
        huge += huge_mapped(&process, mapping.hva, mapping.len).ok()?.0;
        all += mapping.len.0;
    }
    (all > 0).then(|| to_f64(huge) / to_f64(all))
}

#[cfg(test)]
mod tests {
    use super::console_place;

    #[test]
    fn a_console_is_named_by_where_to_connect() {
        assert_eq!(console_place("disconnected:unix:/x/a b,c.sock,server=on"), "unix:/x/a b,c.sock");
        assert_eq!(console_place("unix:/x/c.sock,server=on"), "unix:/x/c.sock");
        assert_eq!(console_place("pty:/dev/pts/3"), "pty:/dev/pts/3");
    }
}
