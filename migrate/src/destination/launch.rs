//! Starting the destination QEMU and taking its page faults, before the source is stopped.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vmove_memory::{PageRun, RamFile};
use vmove_qmp::RunLayout;
use vmove_qmp::disks::ExportOrder;

use super::disk_wires;
use super::error::LaunchError;
use super::guest_memory::GuestMemory;
use super::homecoming;
use crate::vmm::{ArrivingMonitor, Attached, QemuHandle, TakeHomeError, Vmm};
use vmove_node::disk::Disk;
use vmove_node::record::VmRecord;
use vmove_types::time::Mono;

/// Time for a QEMU to open its monitor: a large guest on a busy host, hugetlbfs reservation included.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(60);
/// And for each GiB of memory that it locks before that.
const LOCK_TIMEOUT_PER_GIB: Duration = Duration::from_secs(1);

/// A destination QEMU, paused, its faults ours.
#[derive(Debug)]
pub(super) struct Launched {
    pub process: Arc<dyn QemuHandle>,
    pub pid_start: u64,
    pub monitor: Arc<dyn ArrivingMonitor>,
    pub attached: Option<Attached>,
    pub fault_fd: i32,
    /// Pages that QEMU had mapped before its faults were ours: (block, run). It may have written to them.
    pub touched: Vec<(usize, PageRun)>,
}

/// What a QEMU needs to be started; owned, since the work is done in a task of its own.
#[derive(Debug)]
pub(super) struct LaunchOrder {
    pub vmm: Arc<dyn Vmm>,
    pub command: Vec<OsString>,
    pub layout: RunLayout,
    pub memory: Arc<GuestMemory>,
    /// Name of the VM.
    pub vm: String,
    /// QEMU locks its memory as it starts.
    pub locked: bool,
    /// Images of the disks that move: the source writes to them.
    pub images: Vec<ExportOrder>,
    /// A QEMU of libvirt's, which waits already.
    pub waits: Option<VmRecord>,
    /// Of a guest that comes home: what QEMU is started with in the place of its memory.
    pub stand_ins: Vec<RamFile>,
    /// The paths of its RAM files.
    pub ram: Vec<PathBuf>,
    pub disk: Arc<dyn Disk>,
    /// Told as soon as there is a process: it must be ended if anything fails afterwards.
    pub started: tokio::sync::oneshot::Sender<Arc<dyn QemuHandle>>,
}

/// Starts QEMU, prepares it for device state, attaches.
pub(super) async fn launch(order: LaunchOrder) -> Result<Launched, LaunchError> {
    let LaunchOrder {
        vmm,
        command,
        layout,
        memory,
        vm,
        locked,
        images,
        waits,
        stand_ins,
        ram,
        disk,
        started,
    } = order;
    let disks = disk_wires::socket(&layout);
    let RunLayout { vm_dir, qmp_socket, .. } = layout;
    let gib = memory.blocks.iter().map(|b| b.file.len().0).sum::<u64>() >> 30;
    let limit = MONITOR_TIMEOUT
        + if locked { LOCK_TIMEOUT_PER_GIB * u32::try_from(gib).unwrap_or(u32::MAX) } else { Duration::ZERO };
    let begun = Mono::now();
    let process = match &waits {
        Some(record) => vmm.adopt(record)?,
        None => vmm.start(&vm, &command, &vm_dir)?,
    };
    // The session may have ended meanwhile; then it has dropped the receiver and nobody else knows of this QEMU.
    if started.send(Arc::clone(&process)).is_err() {
        let _ = process.kill().await;
        return Err(LaunchError::SessionEnded);
    }
    let monitor = process.make_ready(&qmp_socket, limit).await?;
    let listens = Mono::now();
    let comes_home = !stand_ins.is_empty();
    if comes_home {
        monitor.take_home(process.pid(), &stand_ins, &memory.files()).await?;
        homecoming::settle(&*disk, &ram).map_err(TakeHomeError::Rename)?;
    }
    if !images.is_empty() {
        monitor.export_disks(&disks, &images).await.map_err(LaunchError::Exports)?;
    }
    let of = Arc::clone(&process);
    let taking = vmove_node::blocking::spawn_blocking(move || {
        let mut taken = vmm.take_faults(&*of, &memory.files(), locked)?;
        if locked {
            // It has touched everything, so that does not tell what it has written. But nothing has landed yet.
            memory.wipe()?;
        }
        if waits.is_some() {
            // libvirt may have had it allocate all. All that it holds comes from the source.
            memory.empty()?;
            taken.touched.clear();
        }
        Ok::<_, LaunchError>(taken)
    });
    let taken = taking.await??;
    if comes_home && !taken.touched.is_empty() {
        return Err(LaunchError::TouchedHome);
    }
    tracing::info!(
        pid = process.pid(),
        listens_ms = listens.ms_since(begun).round(),
        ready_ms = Mono::now().ms_since(begun).round(),
        "QEMU is ready for the guest"
    );
    Ok(Launched {
        pid_start: process.start_time(),
        process,
        monitor,
        attached: taken.attached,
        fault_fd: taken.fault_fd,
        touched: taken.touched,
    })
}
