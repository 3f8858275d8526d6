//! Real QEMUs, by their monitors and by the kernel.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value};
use tokio::task::AbortHandle;
use vmove_memory::{
    ByteLen, DirtyTracker, FaultContext, Keep, MemoryDir, MemoryError, Process, RamFile, UffdFeatures,
    create_uffd, discard_in_qemu, find_mappings, is_shared_whole, reopen_uffd, touched_in_qemu,
};
use vmove_qmp::agent::ExecRequest;
use vmove_qmp::cmdline::with_devices;
use vmove_qmp::confine::{Confinement, allow_locked_memory};
use vmove_qmp::hotplug::{HotplugError, Port, Seat, UnplugLimits};
use vmove_qmp::inspect::{HostQemu, InspectHostError, VmFacts, find_program};
use vmove_qmp::process::{ProcessError, QemuProcess, log_in};
use vmove_qmp::switchover::{
    Destination, DestinationOptions, Hold, Inbound, Outbound, Source, SourceOptions, StateReceiver,
    StateSender, SwitchoverError, relay,
};
use vmove_qmp::{Client, QmpError};
use vmove_types::Backing;
use vmove_types::time::Mono;
use vmove_types::vm::Running;

use super::alive::lives;
use super::announcing::Announcing;
use super::libvirt::{Arriving, LeavingDomain, OfLibvirt, was_told_to_run};
use super::writes::{InQemu, QemuHasEnded};
use super::{
    ArrivingMonitor, Attached, DeviceMonitor, FaultsError, GuestWrites, Halt, InGuestError, Leaving,
    LeavingMonitor, NotReady, QemuHandle, Ran, TakeHomeError, TakenFaults, Tap, TapsError, Vmm, fence,
    stand_in,
};
use crate::kept_memory::is_kept;
use vmove_node::domains::Domains;
use vmove_node::monitors::Monitors;
use vmove_node::peer::BoxedStream;
use vmove_node::record::VmRecord;
use vmove_node::starter::Starter;

/// Loading half a MiB of device state takes milliseconds; a page it needs may have to be fetched meanwhile.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);
/// `cont` takes disks over, which may have to wait for a lock on a slow file server.
const RESUME_TIMEOUT: Duration = Duration::from_secs(30);

/// Those of this host.
#[derive(Debug)]
pub struct Qemu {
    monitors: Arc<Monitors>,
    starter: Starter,
    confinement: Confinement,
    domains: Arc<Domains>,
}

impl Qemu {
    /// Monitors, and how QEMUs are started: shared with the rest of the daemon. They get these rights.
    #[must_use]
    pub const fn new(
        monitors: Arc<Monitors>,
        starter: Starter,
        confinement: Confinement,
        domains: Arc<Domains>,
    ) -> Self {
        Self { monitors, starter, confinement, domains }
    }
}

fn process_of(vm: &VmRecord) -> Result<Process, MemoryError> {
    Process::reopen(vm.pid.unsigned_abs(), vm.pid_start)
}

#[async_trait]
impl Vmm for Qemu {
    async fn binary(&self, program: &str) -> Option<Result<HostQemu, InspectHostError>> {
        let path = find_program(program)?;
        Some(crate::qemu_binaries::known_qemu(&path).await)
    }

    fn is_there(&self, vm: &VmRecord) -> bool {
        process_of(vm).is_ok()
    }

    fn has_ended(&self, vm: &VmRecord) -> bool {
        match process_of(vm) {
            Ok(process) => process.is_ending(),
            Err(error) => matches!(error, MemoryError::ProcessGone { .. }),
        }
    }

    fn adopt(&self, vm: &VmRecord) -> Result<Arc<dyn QemuHandle>, ProcessError> {
        let process = QemuProcess::adopt(vm.pid.unsigned_abs(), &log_in(&vm.vm_dir))?;
        if let Some(uuid) = &vm.libvirt {
            let (monitors, domains) = (Arc::clone(&self.monitors), Arc::clone(&self.domains));
            return Ok(Arc::new(OfLibvirt {
                process,
                monitors,
                domains,
                uuid: uuid.clone(),
                socket: vm.qmp_socket.clone(),
            }));
        }
        Ok(Arc::new(Started { process, monitors: Arc::clone(&self.monitors) }))
    }

    async fn monitor(&self, vm: &VmRecord) -> Result<Arc<dyn LeavingMonitor>, QmpError> {
        let client = self.monitors.client(&vm.qmp_socket).await?;
        if vm.libvirt.is_some() {
            return Ok(Arc::new(LeavingDomain(client)));
        }
        Ok(Arc::new(Monitor { client, destination: None }))
    }

    async fn forget_monitor(&self, socket: &Path) {
        self.monitors.forget(socket).await;
    }

    fn shares_memory(&self, vm: &VmRecord) -> Result<bool, MemoryError> {
        let files: Vec<RamFile> =
            vm.ram.iter().map(|ram| RamFile::open(&ram.path)).collect::<Result<_, _>>()?;
        is_shared_whole(&process_of(vm)?, &files.iter().collect::<Vec<_>>())
    }

    fn can_follow_writes(&self) -> bool {
        DirtyTracker::supported().is_ok()
    }

    fn find_memory(&self, vm: &VmRecord, files: &[&RamFile]) -> Result<Box<dyn GuestWrites>, MemoryError> {
        let process = match process_of(vm) {
            Ok(process) => process,
            // It ends as soon as the guest runs at the destination; what is still to be sent is in the files.
            Err(MemoryError::ProcessGone { .. }) if is_kept(vm) => {
                return Ok(Box::new(QemuHasEnded));
            }
            Err(error) => return Err(error),
        };
        match find_mappings(&process, files) {
            Ok(mappings) => Ok(Box::new(InQemu { process, mappings })),
            // It is just ending.
            Err(_) if is_kept(vm) && process.is_ending() => Ok(Box::new(QemuHasEnded)),
            Err(error) => Err(error),
        }
    }

    async fn end_left(
        &self,
        vm: &VmRecord,
        by_monitor: bool,
        deadline: Duration,
    ) -> Result<(), ProcessError> {
        let process = QemuProcess::adopt(vm.pid.unsigned_abs(), &log_in(&vm.vm_dir))?;
        // The session holds the connection, if it has one: this finds the same.
        let monitor = if by_monitor { self.monitors.client(&vm.qmp_socket).await.ok() } else { None };
        process.quit(monitor.as_ref(), deadline).await
    }

    fn page_map_dir(&self, dir: &Path) -> Result<PathBuf, MemoryError> {
        Ok(MemoryDir::prepare(dir, Backing::Thp)?.path().to_owned())
    }

    fn create_ram_file(
        &self,
        vm: &str,
        dir: &Path,
        backing: Backing,
        name: &str,
        len: ByteLen,
    ) -> Result<RamFile, MemoryError> {
        // Its memory was reserved when the guest was admitted.
        let file = MemoryDir::prepare(dir, backing)?.create_promised_ram_file(name, len)?;
        self.starter.bind_memory(vm, &file);
        Ok(file)
    }

    fn start(
        &self,
        vm: &str,
        command: &[OsString],
        vm_dir: &Path,
    ) -> Result<Arc<dyn QemuHandle>, ProcessError> {
        let process = self.starter.start(vm, command, vm_dir, &self.confinement)?;
        Ok(Arc::new(Started { process, monitors: Arc::clone(&self.monitors) }))
    }

    fn take_faults(
        &self,
        qemu: &dyn QemuHandle,
        files: &[&RamFile],
        locked: bool,
    ) -> Result<TakenFaults, FaultsError> {
        take_faults(qemu.pid(), files, locked)
    }

    fn retake_faults(
        &self,
        vm: &VmRecord,
        fault_fd: i32,
        files: &[&RamFile],
    ) -> Result<Option<Attached>, MemoryError> {
        let process = process_of(vm)?;
        let mappings = find_mappings(&process, files)?;
        let context = FaultContext::new(reopen_uffd(&process, fault_fd)?);
        // Whoever waits was reported to a process that is no more: all fault again.
        for mapping in &mappings {
            context.wake(mapping.hva, mapping.len)?;
        }
        Ok(Some(Attached { process, context, mappings }))
    }

    async fn reconnect(&self, vm: &VmRecord) -> Result<Arc<dyn ArrivingMonitor>, QmpError> {
        let socket = &vm.qmp_socket;
        if let Some(uuid) = &vm.libvirt {
            let client = self.monitors.client(socket).await?;
            return Ok(Arc::new(Arriving::found_again(&client, &self.domains, uuid)));
        }
        Ok(Arc::new(Monitor { client: self.monitors.client(socket).await?, destination: None }))
    }

    async fn end_started_in(&self, vm_dir: &Path) -> Result<Vec<u32>, ProcessError> {
        vmove_qmp::process::end_started_in(vm_dir).await
    }

    fn expected(&self, domain: &str) -> Option<VmRecord> {
        self.domains.expected(domain)
    }

    fn keep_from_running(&self, vm: &VmRecord) -> Result<(), MemoryError> {
        fence::raise(vm)
    }

    fn let_on(&self, vm: &VmRecord) -> Result<(), MemoryError> {
        fence::lift(vm)
    }

    async fn was_told_to_run(&self, vm: &VmRecord) -> bool {
        vm.libvirt.is_some() && !self.has_ended(vm) && was_told_to_run(vm, &self.monitors).await
    }

    fn let_lock_memory(&self, vm: &VmRecord, bytes: u64) -> std::io::Result<()> {
        allow_locked_memory(vm.pid.unsigned_abs(), with_devices(bytes))
    }
}

/// Registers QEMU's mappings, and drops the page-table entries it had before: those would never fault (hazard: stale mappings).
fn take_faults(pid: u32, files: &[&RamFile], locked: bool) -> Result<TakenFaults, FaultsError> {
    let process = Process::open(pid)?;
    let mappings = find_mappings(&process, files)?;
    for (index, file) in files.iter().enumerate() {
        let mapped: u64 = mappings.iter().filter(|m| m.file_index == index).map(|m| m.len.0).sum();
        if mapped != file.len().0 {
            let (path, len) = (file.path().to_owned(), file.len().0);
            return Err(FaultsError::NotMappedOnce { path, mapped, len });
        }
    }
    let remote = create_uffd(&process, UffdFeatures::Faults, Keep::InQemu)?;
    let fault_fd = remote.fd_in_qemu.ok_or(FaultsError::NoFaultDescriptor)?;
    let context = FaultContext::new(remote);
    context.register(&mappings)?;
    let mut touched = Vec::new();
    if !locked {
        touched_in_qemu(&process, &mappings, |block, run| touched.push((block, run)))?;
    }
    discard_in_qemu(&process, &mappings, Some(&context))?;
    Ok(TakenFaults { attached: Some(Attached { process, context, mappings }), fault_fd, touched })
}

/// A process of this host.
#[derive(Debug)]
struct Started {
    process: QemuProcess,
    monitors: Arc<Monitors>,
}

#[async_trait]
impl QemuHandle for Started {
    fn pid(&self) -> u32 {
        self.process.pid()
    }

    fn start_time(&self) -> u64 {
        Process::open(self.process.pid()).map_or(0, |process| process.start_time())
    }

    async fn make_ready(
        &self,
        socket: &Path,
        deadline: Duration,
    ) -> Result<Arc<dyn ArrivingMonitor>, NotReady> {
        let client = self.process.wait_qmp(socket, deadline).await?;
        let destination = Destination::prepare(&client, &DestinationOptions::default()).await?;
        let (state, theirs) = StateSender::pair()?;
        destination.listen(Inbound::Fd(theirs)).await?;
        self.monitors.insert(socket, client.clone()).await;
        let state = Mutex::new(Some(state));
        let incoming =
            Incoming { destination: Arc::new(destination), state, announcing: Announcing::default() };
        Ok(Arc::new(Monitor { client, destination: Some(Arc::new(incoming)) }))
    }

    fn alive(&self) -> bool {
        lives(&self.process)
    }

    async fn exited(&self) {
        self.process.exited().await;
    }

    async fn kill(&self) -> Result<(), ProcessError> {
        self.process.kill().await
    }

    fn log_tail(&self) -> String {
        self.process.log_tail()
    }
}

/// A QMP connection.
#[derive(Debug)]
pub(super) struct Monitor {
    client: Client,
    /// Of a QEMU that this process started: by it the device state is loaded, and the guest's new place announced.
    destination: Option<Arc<Incoming>>,
}

#[derive(Debug)]
struct Incoming {
    destination: Arc<Destination>,
    /// Our end of its device-state stream, until it is used.
    state: Mutex<Option<StateSender>>,
    announcing: Announcing,
}

impl Monitor {
    pub(super) const fn client(&self) -> &Client {
        &self.client
    }
}

#[async_trait]
impl DeviceMonitor for Monitor {
    async fn seat(&self, id: &str) -> Result<Option<Seat>, HotplugError> {
        self.client.seat(id).await
    }

    async fn ports(&self) -> Result<Vec<Port>, HotplugError> {
        self.client.ports().await
    }

    async fn unplug(&self, id: &str, limits: UnplugLimits) -> Result<Duration, HotplugError> {
        self.client.unplug(id, limits).await
    }

    async fn plug(
        &self,
        properties: &Map<String, Value>,
        deadline: Duration,
    ) -> Result<Duration, HotplugError> {
        self.client.plug(properties, deadline).await
    }

    async fn run_in_guest(&self, request: &ExecRequest) -> Result<Ran, InGuestError> {
        self.client.run_in_guest(request).await
    }
}

#[async_trait]
impl LeavingMonitor for Monitor {
    async fn facts(&self, pid: u32) -> Result<VmFacts, QmpError> {
        vmove_qmp::inspect::facts(&self.client, pid, None).await
    }

    async fn run_state(&self, deadline: Duration) -> Result<String, QmpError> {
        self.client.run_state(deadline).await
    }

    async fn set_running(&self, wanted: Running, deadline: Duration) -> Result<(), QmpError> {
        self.client.set_running(wanted, deadline).await
    }

    async fn prepare(&self, hold: bool) -> Result<Arc<dyn Leaving>, SwitchoverError> {
        // QEMU 10 says when the guest is drained without being made to wait (2 ms less pause); older ones say it only when all is sent,
        // which may be never if the destination needs a page to take it in.
        let hold = match self.client.version().major {
            _ if hold => Hold::UntilTold,
            10.. => Hold::Never,
            _ => Hold::AtOnce,
        };
        let source = Source::prepare(&self.client, &SourceOptions::default().hold(hold)).await?;
        Ok(Arc::new(SwitchOver { source, relay: Mutex::default() }))
    }

    async fn take_up(&self, was_running: bool) -> Result<Arc<dyn Leaving>, SwitchoverError> {
        let source = Source::attach(&self.client, was_running).await?;
        Ok(Arc::new(SwitchOver { source, relay: Mutex::default() }))
    }
}

/// A source QEMU that is made ready, or that sends.
#[derive(Debug)]
struct SwitchOver {
    source: Source,
    relay: Mutex<Option<Relay>>,
}

/// Carries QEMU's device state to the destination. It ends when this is dropped: QEMU's write fails if it still sends, which ends its
/// migration sooner.
#[derive(Debug)]
struct Relay(AbortHandle);

impl Drop for Relay {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Relay {
    fn start(mut from: StateReceiver, mut to: BoxedStream) -> Self {
        let relaying = tokio::spawn(async move {
            if let Err(error) = relay(&mut from, &mut to).await {
                tracing::debug!(%error, "the device state stream broke");
            }
        });
        Self(relaying.abort_handle())
    }
}

impl SwitchOver {
    fn set_relay(&self, relay: Option<Relay>) {
        *self.relay.lock().unwrap_or_else(PoisonError::into_inner) = relay;
    }
}

#[async_trait]
impl Leaving for SwitchOver {
    async fn start(&self, to: BoxedStream) -> Result<(), SwitchoverError> {
        let (from, theirs) = StateReceiver::pair()?;
        self.set_relay(Some(Relay::start(from, to)));
        self.source.start(Outbound::Fd(theirs)).await
    }

    async fn stopped(&self, deadline: Duration) -> Result<Halt, SwitchoverError> {
        self.source.stopped(deadline).await.map(Halt::from)
    }

    async fn held(&self, deadline: Duration) -> Result<(), SwitchoverError> {
        self.source.held(deadline).await.map(drop)
    }

    async fn go_on(&self) -> Result<(), SwitchoverError> {
        self.source.continue_().await
    }

    async fn completed(&self, deadline: Duration) -> Result<(), SwitchoverError> {
        self.source.completed(deadline).await.map(drop)
    }

    async fn cancel(&self, deadline: Duration) -> Result<(), SwitchoverError> {
        // Ends the stream to the destination, so that QEMU does not wait for it.
        self.set_relay(None);
        self.source.cancel(deadline).await.map(drop)
    }
}

#[async_trait]
impl ArrivingMonitor for Monitor {
    async fn load(&self, from: BoxedStream) -> Result<u64, SwitchoverError> {
        let state = self.destination.as_deref().and_then(|incoming| {
            let to = incoming.state.lock().unwrap_or_else(PoisonError::into_inner).take()?;
            Some((&incoming.destination, to))
        });
        match state {
            Some((destination, to)) => load(destination, from, to).await,
            // Its stream ended with the process that had started it, or was used before.
            None => Err(SwitchoverError::Gone { waiting_for: "the loading of the device state" }),
        }
    }

    async fn take_home(
        &self,
        pid: u32,
        stand_ins: &[RamFile],
        home: &[&RamFile],
    ) -> Result<(), TakeHomeError> {
        stand_in::replace(&self.client, pid, stand_ins, home).await
    }

    async fn taps(&self, pid: u32) -> Result<Vec<Tap>, TapsError> {
        Tap::all(&self.client, pid).await
    }

    async fn announced(&self) -> Option<Mono> {
        self.destination.as_ref()?.announcing.first().await
    }

    async fn resume(&self) -> Result<Option<Mono>, QmpError> {
        let resumed = self.client.expect("RESUME", |_| true);
        self.client.execute_raw("cont", Value::Null, RESUME_TIMEOUT).await?;
        let event = resumed.wait(RESUME_TIMEOUT).await?;
        if let Some(incoming) = &self.destination {
            incoming.announcing.begin(Arc::clone(&incoming.destination));
        }
        Ok(Some(Mono(event.at.0)))
    }

    async fn run_state(&self) -> Result<String, QmpError> {
        self.client.run_state(RESUME_TIMEOUT).await
    }
}

async fn load(
    destination: &Destination,
    mut from: BoxedStream,
    mut to: StateSender,
) -> Result<u64, SwitchoverError> {
    let mut relaying = pin!(relay(&mut from, &mut to));
    let mut loaded = pin!(destination.loaded(LOAD_TIMEOUT));
    let mut relayed = None;
    loop {
        tokio::select! {
            stats = &mut relaying, if relayed.is_none() => {
                if let Err(error) = &stats {
                    // QEMU says what it makes of that.
                    tracing::warn!(%error, "the device state stream broke");
                }
                relayed = Some(stats);
            }
            done = &mut loaded => {
                done?;
                break;
            }
        }
    }
    let stats = match relayed {
        Some(stats) => stats,
        None => relaying.await,
    };
    Ok(stats.map_or(0, |stats| stats.bytes))
}
