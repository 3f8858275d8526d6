//! `vmove adopt`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use vmove_types::Backing;

use crate::layout;
use crate::record::{RamFileRecord, VmRecord};
use vmove_memory::{PageSize, Process, RamFile, find_mappings};
use vmove_qmp::inspect::{self, BlockerKind, VmFacts};
use vmove_qmp::{Client, CommandLine};

use super::run::texts;
use super::{Registry, RegistryError};
use crate::blocking::run_blocking;
use vmove_types::vm::{AdoptRequest, VmDetail};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// What was found out about a QEMU that somebody else started.
#[derive(Debug)]
pub(crate) struct Found {
    pub pid: u32,
    pub pid_start: u64,
    pub backing: Backing,
    pub ram: Vec<RamFileRecord>,
    pub command_line: Vec<String>,
}

impl Registry {
    /// Takes in a QEMU that somebody else started. Nothing of it is changed.
    pub async fn adopt(self: &Arc<Self>, request: AdoptRequest) -> Result<VmDetail, RegistryError> {
        let reserved = self.reserve(&request.name)?;
        self.not_here_already(&request.qmp)?;
        let client = Client::connect(&request.qmp, CONNECT_TIMEOUT).await?;
        let facts = inspect::facts(&client, client.peer_pid().unwrap_or(0), None).await?;
        let blockers = blockers(&facts);
        if !blockers.is_empty() {
            return Err(RegistryError::NotMovable(blockers));
        }
        let socket = request.qmp.clone();
        let found = run_blocking(move || examine(&facts, &socket)).await??;
        let other = self.vms.list().into_iter().find(|r| u32::try_from(r.pid) == Ok(found.pid));
        if let Some(other) = other {
            return Err(taken(found.pid, &other.name));
        }
        let layout =
            layout::of_vm(&self.run_dir, self.memory_dir(), &request.name, found.backing, &self.confinement);
        let mut line = CommandLine::parse(found.command_line.iter().map(Into::into).collect())?;
        let own = line.take_host_devices()?;
        let devices = line.seated(own)?;
        line.derive_destination(&layout)?;
        let command_line = if devices.is_empty() { found.command_line } else { texts(&line)? };
        let vm_dir = layout.vm_dir.clone();
        run_blocking(move || crate::files::make_private_dir(&vm_dir))
            .await?
            .map_err(|source| RegistryError::Folder { path: layout.vm_dir.clone(), source })?;
        let record = VmRecord {
            name: request.name.clone(),
            pid: i32::try_from(found.pid).unwrap_or_default(),
            pid_start: found.pid_start,
            qmp_socket: request.qmp,
            vm_dir: layout.vm_dir,
            backing: found.backing,
            command_line,
            environment: Vec::new(),
            ram: found.ram,
            overlays: Vec::new(),
            devices,
            adopted: true,
            libvirt: None,
            session: None,
        };
        self.monitors.insert(&record.qmp_socket, client).await;
        let entered = match self.take_in(&record).await {
            Ok(()) => self.enter(record.clone()).await,
            Err(error) => Err(error),
        };
        if let Err(error) = entered {
            self.monitors.forget(&record.qmp_socket).await;
            let _ = self.devices.forget(&record.name).await;
            let vm_dir = record.vm_dir.clone();
            let _ = run_blocking(move || std::fs::remove_dir(vm_dir)).await;
            return Err(error);
        }
        tracing::info!(vm = %record.name, pid = record.pid, memory = %record.backing, "VM adopted");
        drop(reserved);
        self.show(&record.name).await
    }

    /// Notes the devices that an adopted VM has.
    async fn take_in(&self, record: &VmRecord) -> Result<(), RegistryError> {
        for device in &record.devices {
            self.devices.take_in(&record.name, &device.request).await?;
        }
        Ok(())
    }

    /// Lets go of an adopted VM: it runs on, unknown to us.
    pub async fn forget(self: &Arc<Self>, name: &str) -> Result<(), RegistryError> {
        // Before the record is looked up: a migration that ends in between may take it away.
        self.not_at_work(name)?;
        let record = self.vms.get(name)?;
        if !record.adopted {
            return Err(RegistryError::NotAdopted(name.to_owned()));
        }
        self.devices.forget(name).await?;
        let (vms, name) = (self.vms.clone(), name.to_owned());
        run_blocking(move || vms.remove(&name)).await??;
        self.monitors.forget(&record.qmp_socket).await;
        let vm_dir = record.vm_dir.clone();
        // Ours, and empty of anything that QEMU uses.
        let _ = run_blocking(move || std::fs::remove_dir_all(vm_dir)).await?;
        tracing::info!(vm = %record.name, pid = record.pid, "VM released");
        Ok(())
    }

    fn not_here_already(&self, socket: &Path) -> Result<(), RegistryError> {
        match self.vms.list().into_iter().find(|r| r.qmp_socket == socket) {
            None => Ok(()),
            Some(other) => Err(taken(u32::try_from(other.pid).unwrap_or_default(), &other.name)),
        }
    }
}

fn taken(pid: u32, name: &str) -> RegistryError {
    RegistryError::KnownQemu { pid, vm: name.to_owned() }
}

/// What can never be mended while this QEMU runs. The rest is for `vmove check`, at the time of the move.
fn blockers(facts: &VmFacts) -> Vec<String> {
    let lasting = |kind: BlockerKind| matches!(kind, BlockerKind::Ram);
    facts.blockers().into_iter().filter(|b| b.fatal && lasting(b.kind)).map(|b| b.message).collect()
}

fn never(why: impl Into<String>) -> RegistryError {
    RegistryError::NotMovable(vec![why.into()])
}

/// Process, RAM files and command line, from outside QEMU.
pub(crate) fn examine(facts: &VmFacts, socket: &Path) -> Result<Found, RegistryError> {
    let mut files = Vec::new();
    let mut ram = Vec::new();
    for fact in &facts.ram {
        let (Some(id), Some(path)) = (&fact.id, &fact.path) else { continue };
        let file = RamFile::open(Path::new(path)).map_err(|e| never(vmove_types::problem::chain(&e)))?;
        ram.push(RamFileRecord { id: id.clone(), path: path.into(), size: fact.size });
        files.push(file);
    }
    let backing = same_backing(&files)?;
    let refs: Vec<&RamFile> = files.iter().collect();
    let process = qemu_process(facts.pid, &refs)?;
    let mut line = CommandLine::from_proc(process.pid())?;
    // The destination gets a monitor of its own.
    line.remove_monitor(socket)?;
    let words =
        line.to_argv().into_iter().map(std::ffi::OsString::into_string).collect::<Result<Vec<_>, _>>();
    let command_line = words.map_err(RegistryError::NotUtf8)?;
    Ok(Found { pid: process.pid(), pid_start: process.start_time(), backing, ram, command_line })
}

fn same_backing(files: &[RamFile]) -> Result<Backing, RegistryError> {
    let kind = |file: &RamFile| match file.page_size() {
        PageSize::Base4K => Backing::Thp,
        PageSize::Huge2M => Backing::Hugetlb2M,
        PageSize::Huge1G => Backing::Hugetlb1G,
    };
    let first = files.first().map(kind).ok_or_else(|| never("It has no RAM in named files"))?;
    match files.iter().map(kind).find(|k| *k != first) {
        None => Ok(first),
        Some(other) => {
            Err(never(format!("Expected all RAM files on one kind of memory, found {first} and {other}")))
        }
    }
}

/// The process that maps all RAM files, shared. The monitor's peer, normally; a launcher (libvirt) may have opened the
/// socket and passed it on, so otherwise every process is looked at.
fn qemu_process(peer: u32, files: &[&RamFile]) -> Result<Process, RegistryError> {
    if let Some(process) = maps_all(peer, files) {
        return Ok(process);
    }
    let entries = std::fs::read_dir("/proc").map_err(|e| never(format!("Could not list processes: {e}")))?;
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
    let us = std::process::id();
    let mut found: Vec<Process> =
        pids.filter(|pid| *pid != us).filter_map(|pid| maps_all(pid, files)).collect();
    match (found.pop(), found.len()) {
        (Some(process), 0) => Ok(process),
        (None, _) => {
            Err(never("No process maps the RAM files that its monitor names: were they replaced or removed?"))
        }
        (Some(a), n) => Err(never(format!(
            "Expected one process to map its RAM files, found {} (pid {} among them)",
            n + 1,
            a.pid()
        ))),
    }
}

fn maps_all(pid: u32, files: &[&RamFile]) -> Option<Process> {
    let process = Process::open(pid).ok()?;
    let mappings = find_mappings(&process, files).ok()?;
    let all = (0..files.len()).all(|i| mappings.iter().any(|m| m.file_index == i && m.shared));
    (all && !files.is_empty()).then_some(process)
}
