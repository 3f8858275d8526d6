//! Starting the destination QEMU and taking its page faults, before the source is stopped.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vmove_memory::{
    FaultContext, Keep, PageRun, Process, UffdFeatures, create_uffd, discard_in_qemu, find_mappings,
    reopen_uffd, touched_in_qemu,
};
use vmove_qmp::Client;
use vmove_qmp::process::{QemuProcess, log_in};
use vmove_qmp::switchover::{Destination, DestinationOptions, Inbound, StateSender};

use super::guest::{Attached, GuestMemory};
use crate::clock::Mono;

/// Time for a QEMU to open its monitor: a large guest on a busy host, hugetlbfs reservation included.
const START: Duration = Duration::from_secs(60);
/// And for each GiB of memory that it locks before that.
const LOCK_PER_GIB: Duration = Duration::from_secs(1);

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
    pub vm_dir: PathBuf,
    pub qmp_socket: PathBuf,
    pub memory: Arc<GuestMemory>,
    /// QEMU locks its memory as it starts.
    pub locked: bool,
    /// Told as soon as there is a process: it must be ended if anything fails afterwards.
    pub started: tokio::sync::oneshot::Sender<QemuProcess>,
}

/// Starts QEMU, prepares it for device state, attaches.
pub(super) async fn launch(order: LaunchOrder) -> Result<Launched, String> {
    let LaunchOrder { command, vm_dir, qmp_socket, memory, locked, started } = order;
    let gib = memory.blocks.iter().map(|b| b.file.len().0).sum::<u64>() >> 30;
    let limit =
        START + if locked { LOCK_PER_GIB * u32::try_from(gib).unwrap_or(u32::MAX) } else { Duration::ZERO };
    let begun = Mono::now();
    let process = QemuProcess::spawn(&command, &vm_dir, &log_in(&vm_dir)).map_err(|e| chain(&e))?;
    // The session may have ended meanwhile; then it has dropped the receiver and nobody else knows of this QEMU.
    if started.send(process.clone()).is_err() {
        let _ = process.kill().await;
        return Err("the session ended while QEMU was being started".to_owned());
    }
    let client = process.wait_qmp(&qmp_socket, limit).await.map_err(|e| chain(&e))?;
    let monitor = Mono::now();
    let destination =
        Destination::prepare(&client, &DestinationOptions::default()).await.map_err(|e| chain(&e))?;
    let (state, theirs) = StateSender::pair().map_err(|e| chain(&e))?;
    destination.listen(Inbound::Fd(theirs)).await.map_err(|e| chain(&e))?;
    let listens = Mono::now();
    let pid = process.pid();
    let taken = tokio::task::spawn_blocking(move || take_faults(pid, &memory, locked))
        .await
        .map_err(|e| e.to_string())??;
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
fn take_faults(pid: u32, memory: &GuestMemory, locked: bool) -> Result<Taken, String> {
    let process = Process::open(pid).map_err(|e| chain(&e))?;
    let files: Vec<_> = memory.blocks.iter().map(|b| &b.file).collect();
    let mappings = find_mappings(&process, &files).map_err(|e| chain(&e))?;
    for (index, block) in memory.blocks.iter().enumerate() {
        let mapped: u64 = mappings.iter().filter(|m| m.file_index == index).map(|m| m.len.0).sum();
        if mapped != block.file.len().0 {
            return Err(format!(
                "QEMU maps {mapped} of the {} bytes of {}: expected the whole file once",
                block.file.len().0,
                block.file.path().display()
            ));
        }
    }
    let remote = create_uffd(&process, UffdFeatures::Faults, Keep::InQemu).map_err(|e| chain(&e))?;
    let fault_fd = remote.fd_in_qemu.ok_or("the fault descriptor did not stay open in QEMU")?;
    let context = FaultContext::new(remote);
    context.register(&mappings).map_err(|e| chain(&e))?;
    let mut touched = Vec::new();
    if !locked {
        touched_in_qemu(&process, &mappings, |block, run| touched.push((block, run)))
            .map_err(|e| chain(&e))?;
    }
    discard_in_qemu(&process, &mappings, Some(&context)).map_err(|e| chain(&e))?;
    if locked {
        // It has touched everything, so that does not tell what it has written. But nothing has landed yet.
        memory.wipe().map_err(|e| chain(&e))?;
    }
    Ok((process.start_time(), Attached { process, context, mappings }, fault_fd, touched))
}

/// Takes the faults of a QEMU again whose descriptor an earlier process of this daemon left open in it.
pub(super) fn retake_faults(
    pid: u32,
    pid_start: u64,
    fault_fd: i32,
    memory: &GuestMemory,
) -> Result<Attached, String> {
    let process = Process::reopen(pid, pid_start).map_err(|e| chain(&e))?;
    let files: Vec<_> = memory.blocks.iter().map(|b| &b.file).collect();
    let mappings = find_mappings(&process, &files).map_err(|e| chain(&e))?;
    let context = FaultContext::new(reopen_uffd(&process, fault_fd).map_err(|e| chain(&e))?);
    // Whoever waits was reported to a process that is no more: all fault again.
    for mapping in &mappings {
        context.wake(mapping.hva, mapping.len).map_err(|e| chain(&e))?;
    }
    Ok(Attached { process, context, mappings })
}

/// An error with its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
