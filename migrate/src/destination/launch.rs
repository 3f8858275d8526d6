//! Starting the destination QEMU and taking its page faults, before the source is stopped.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use vmove_memory::{
    FaultContext, Keep, MemoryError, PageRun, Process, UffdFeatures, create_uffd, discard_in_qemu,
    find_mappings, reopen_uffd, touched_in_qemu,
};
use vmove_node::control_groups::ControlGroups;
use vmove_qmp::process::{QemuProcess, log_in};
use vmove_qmp::switchover::{Destination, DestinationOptions, Inbound, StateSender};
use vmove_qmp::{Client, RunLayout};

use super::error::LaunchError;
use super::guest_memory::{Attached, GuestMemory};
use vmove_types::time::Mono;

/// Time for a QEMU to open its monitor: a large guest on a busy host, hugetlbfs reservation included.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(60);
/// And for each GiB of memory that it locks before that.
const LOCK_TIMEOUT_PER_GIB: Duration = Duration::from_secs(1);

/// A destination QEMU, paused, its faults ours.
#[derive(Debug)]
pub(super) struct Launched {
    pub process: QemuProcess,
    pub pid_start: u64,
    pub client: Client,
    pub destination: Destination,
    /// Our end of its device-state stream.
    pub state: StateSender,
    pub attached: Attached,
    pub fault_fd: i32,
    /// Pages that QEMU had mapped before its faults were ours: (block, run). It may have written to them.
    pub touched: Vec<(usize, PageRun)>,
}

/// What a QEMU needs to be started; owned, since the work is done in a task of its own.
#[derive(Debug)]
pub(super) struct LaunchOrder {
    pub command: Vec<OsString>,
    pub layout: RunLayout,
    pub memory: Arc<GuestMemory>,
    /// Name of the VM.
    pub vm: String,
    /// Where it gets a control group.
    pub groups: Arc<ControlGroups>,
    /// QEMU locks its memory as it starts.
    pub locked: bool,
    /// Told as soon as there is a process: it must be ended if anything fails afterwards.
    pub started: tokio::sync::oneshot::Sender<QemuProcess>,
}

/// Starts QEMU, prepares it for device state, attaches.
pub(super) async fn launch(order: LaunchOrder) -> Result<Launched, LaunchError> {
    let LaunchOrder { command, layout, memory, vm, groups, locked, started } = order;
    let RunLayout { vm_dir, qmp_socket, confinement, .. } = layout;
    let gib = memory.blocks.iter().map(|b| b.file.len().0).sum::<u64>() >> 30;
    let limit = MONITOR_TIMEOUT
        + if locked { LOCK_TIMEOUT_PER_GIB * u32::try_from(gib).unwrap_or(u32::MAX) } else { Duration::ZERO };
    let begun = Mono::now();
    let group = groups.make(&vm);
    let log = log_in(&vm_dir);
    let process = QemuProcess::spawn_in(&command, &vm_dir, &log, &confinement, group.as_deref())?;
    // The session may have ended meanwhile; then it has dropped the receiver and nobody else knows of this QEMU.
    if started.send(process.clone()).is_err() {
        let _ = process.kill().await;
        return Err(LaunchError::SessionEnded);
    }
    let client = process.wait_qmp(&qmp_socket, limit).await?;
    let monitor = Mono::now();
    let destination = Destination::prepare(&client, &DestinationOptions::default()).await?;
    let (state, theirs) = StateSender::pair()?;
    destination.listen(Inbound::Fd(theirs)).await?;
    let listens = Mono::now();
    let pid = process.pid();
    let taken = vmove_node::blocking::spawn_blocking(move || take_faults(pid, &memory, locked)).await??;
    let (pid_start, attached, fault_fd, touched) = taken;
    tracing::info!(
        pid,
        monitor_ms = monitor.ms_since(begun).round(),
        listens_ms = listens.ms_since(begun).round(),
        ready_ms = Mono::now().ms_since(begun).round(),
        "QEMU is ready for the guest"
    );
    Ok(Launched { process, pid_start, client, destination, state, attached, fault_fd, touched })
}

type Taken = (u64, Attached, i32, Vec<(usize, PageRun)>);

/// Registers QEMU's mappings, and drops the page-table entries it had before: those would never fault (hazard: stale mappings).
fn take_faults(pid: u32, memory: &GuestMemory, locked: bool) -> Result<Taken, LaunchError> {
    let process = Process::open(pid)?;
    let files: Vec<_> = memory.blocks.iter().map(|b| &b.file).collect();
    let mappings = find_mappings(&process, &files)?;
    for (index, block) in memory.blocks.iter().enumerate() {
        let mapped: u64 = mappings.iter().filter(|m| m.file_index == index).map(|m| m.len.0).sum();
        if mapped != block.file.len().0 {
            return Err(LaunchError::NotMappedOnce {
                path: block.file.path().to_owned(),
                mapped,
                len: block.file.len().0,
            });
        }
    }
    let remote = create_uffd(&process, UffdFeatures::Faults, Keep::InQemu)?;
    let fault_fd = remote.fd_in_qemu.ok_or(LaunchError::NoFaultDescriptor)?;
    let context = FaultContext::new(remote);
    context.register(&mappings)?;
    let mut touched = Vec::new();
    if !locked {
        touched_in_qemu(&process, &mappings, |block, run| touched.push((block, run)))?;
    }
    discard_in_qemu(&process, &mappings, Some(&context))?;
    if locked {
        // It has touched everything, so that does not tell what it has written. But nothing has landed yet.
        memory.wipe()?;
    }
    Ok((process.start_time(), Attached { process, context, mappings }, fault_fd, touched))
}

/// Takes the faults of a QEMU again whose descriptor an earlier process of this daemon left open in it.
pub(super) fn retake_faults(
    pid: u32,
    pid_start: u64,
    fault_fd: i32,
    memory: &GuestMemory,
) -> Result<Attached, MemoryError> {
    let process = Process::reopen(pid, pid_start)?;
    let files: Vec<_> = memory.blocks.iter().map(|b| &b.file).collect();
    let mappings = find_mappings(&process, &files)?;
    let context = FaultContext::new(reopen_uffd(&process, fault_fd)?);
    // Whoever waits was reported to a process that is no more: all fault again.
    for mapping in &mappings {
        context.wake(mapping.hva, mapping.len)?;
    }
    Ok(Attached { process, context, mappings })
}
