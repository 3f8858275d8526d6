//! What a daemon asks of its QEMUs, as [`crate::world::qemu`] plays them.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};
use vmove_memory::{ByteLen, MemoryError, PageIndex, PageRun, PageTable, RamFile};
use vmove_migrate::vmm::{
    ArrivingMonitor, Attached, FaultsError, GuestWrites, Halt, Leaving, LeavingMonitor, NotReady,
    PageWorkers, QemuHandle, TakeHomeError, TakenFaults, Vmm, is_kept,
};
use vmove_node::peer::BoxedStream;
use vmove_node::record::VmRecord;
use vmove_qmp::QmpError;
use vmove_qmp::inspect::{HostQemu, InspectHostError, VmFacts};
use vmove_qmp::process::ProcessError;
use vmove_qmp::switchover::{MigrationStatus, SwitchoverError};
use vmove_types::Backing;
use vmove_types::time::Mono;
use vmove_types::vm::Running;

use crate::life::Life;
use crate::plan::NodeIndex;
use crate::world::disk::SimDisk;
use crate::world::guest::{self, FIRMWARE, PAGES};
use crate::world::qemu::{self, Ender, LOOK_INTERVAL, Stage};
use crate::world::status::Status;
use crate::world::{Fate, World};

/// The descriptor that serves faults, as numbered in QEMU.
const FAULT_FD: i32 = 17;
/// The page that QEMU writes to before its faults are taken.
const FIRMWARE_PAGE: u64 = 1;
/// A pipe takes this much.
const PIPE: usize = 64 << 10;

/// The QEMUs of a node, as one life of its daemon reaches them.
#[derive(Clone)]
pub struct SimVmm {
    world: World,
    life: Arc<Life>,
}

impl std::fmt::Debug for SimVmm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimVmm").field("life", &self.life).finish_non_exhaustive()
    }
}

impl SimVmm {
    /// For a life.
    #[must_use]
    pub fn new(world: &World, life: &Arc<Life>) -> Self {
        Self { world: world.clone(), life: Arc::clone(life) }
    }

    fn qemu(&self, pid: i32) -> Qemu {
        Qemu { vmm: self.clone(), pid }
    }

    fn is_alive(&self, pid: i32) -> bool {
        self.world.state().machine(pid).is_some()
    }

    /// A process whose working folder this is.
    fn in_folder(&self, vm_dir: &Path) -> Vec<i32> {
        let state = self.world.state();
        state.machines.iter().filter(|m| m.alive && m.vm_dir == vm_dir).map(|m| m.pid).collect()
    }
}

fn no_monitor(path: &Path) -> QmpError {
    QmpError::Connect { path: path.to_owned(), source: io::ErrorKind::ConnectionRefused.into() }
}

pub(super) fn ended(pid: i32) -> MemoryError {
    MemoryError::ProcessGone { pid: pid.unsigned_abs() }
}

fn file_error(path: &Path, source: io::Error) -> MemoryError {
    MemoryError::Path { what: "Creating the RAM file", path: path.to_owned(), source }
}

fn make_dir(dir: &Path) -> Result<(), MemoryError> {
    std::fs::create_dir_all(dir).map_err(|source| file_error(dir, source))
}

/// As [`vmove_memory::MemoryDir`] does, without a look at what is mounted and free.
pub(crate) fn create_ram_file(path: &Path, len: ByteLen) -> Result<RamFile, MemoryError> {
    path.parent().map_or(Ok(()), make_dir)?;
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path);
    let file = file.and_then(|file| file.set_len(len.0).map(|()| file));
    RamFile::from_fd(file.map_err(|source| file_error(path, source))?.into(), path)
}

#[async_trait]
impl Vmm for SimVmm {
    async fn binary(&self, program: &str) -> Option<Result<HostQemu, InspectHostError>> {
        self.world.may(&self.life, "ask QEMU what it is").await;
        guest::moment(&self.world).await;
        let host = json!({ "path": program, "version": VERSION, "machines": [{ "name": MACHINE, "alias_of": null }] });
        Some(Ok(serde_json::from_value(host).expect("it is one")))
    }

    fn is_there(&self, vm: &VmRecord) -> bool {
        self.is_alive(vm.pid)
    }

    fn has_ended(&self, vm: &VmRecord) -> bool {
        !self.is_alive(vm.pid)
    }

    fn adopt(&self, vm: &VmRecord) -> Result<Arc<dyn QemuHandle>, ProcessError> {
        // As the real one, which gives a handle on a process that has ended, too.
        Ok(Arc::new(self.qemu(vm.pid)))
    }

    async fn monitor(&self, vm: &VmRecord) -> Result<Arc<dyn LeavingMonitor>, QmpError> {
        self.world.may(&self.life, "connect to a monitor").await;
        guest::moment(&self.world).await;
        if !self.is_alive(vm.pid) {
            return Err(no_monitor(&vm.qmp_socket));
        }
        Ok(Arc::new(self.qemu(vm.pid)))
    }

    async fn forget_monitor(&self, _: &Path) {}

    fn shares_memory(&self, vm: &VmRecord) -> Result<bool, MemoryError> {
        if self.is_alive(vm.pid) { Ok(true) } else { Err(ended(vm.pid)) }
    }

    fn can_follow_writes(&self) -> bool {
        true
    }

    fn find_memory(&self, vm: &VmRecord, _: &[&RamFile]) -> Result<Box<dyn GuestWrites>, MemoryError> {
        // As the real one: of a guest that visits, what is still to be sent is in the files.
        if self.is_alive(vm.pid) || is_kept(vm) {
            Ok(Box::new(self.qemu(vm.pid)))
        } else {
            Err(ended(vm.pid))
        }
    }

    async fn end_left(&self, vm: &VmRecord, _: bool, _: Duration) -> Result<(), ProcessError> {
        self.world.may(&self.life, "end QEMU").await;
        guest::moment(&self.world).await;
        qemu::end(&self.world, vm.pid, Ender::Daemon);
        Ok(())
    }

    fn page_map_dir(&self, dir: &Path) -> Result<PathBuf, MemoryError> {
        make_dir(dir)?;
        Ok(dir.to_owned())
    }

    fn create_ram_file(
        &self,
        _: &str,
        dir: &Path,
        _: Backing,
        name: &str,
        len: ByteLen,
    ) -> Result<RamFile, MemoryError> {
        if let Fate::Dies(_) = self.world.step(&self.life, "create a RAM file") {
            return Err(file_error(dir, io::Error::other("the daemon was killed")));
        }
        if SimDisk::new(&self.world, &self.life).is_full() {
            return Err(file_error(dir, rustix::io::Errno::NOSPC.into()));
        }
        create_ram_file(&dir.join(name), len)
    }

    fn start(
        &self,
        _: &str,
        command: &[OsString],
        vm_dir: &Path,
    ) -> Result<Arc<dyn QemuHandle>, ProcessError> {
        let failed = || ProcessError::NoProgram;
        if let Fate::Dies(_) = self.world.step(&self.life, "start QEMU") {
            return Err(failed());
        }
        let words = command.iter().filter_map(|word| word.to_str());
        let ram = words.flat_map(|word| word.split(',')).find_map(|option| option.strip_prefix("mem-path="));
        let ram = ram.ok_or_else(failed)?;
        let started = qemu::start(&self.world, self.life.node(), vm_dir, Path::new(ram), Status::InMigrate);
        Ok(Arc::new(self.qemu(started.map_err(|_| failed())?)))
    }

    fn take_faults(
        &self,
        qemu: &dyn QemuHandle,
        _: &[&RamFile],
        _: bool,
    ) -> Result<TakenFaults, FaultsError> {
        let pid = i32::try_from(qemu.pid()).unwrap_or(0);
        if let Fate::Dies(_) = self.world.step(&self.life, "take the page faults") {
            return Err(ended(pid).into());
        }
        let mut state = self.world.state();
        let machine = state.machine(pid).ok_or_else(|| ended(pid))?;
        if machine.is_home {
            return Ok(TakenFaults { attached: None, fault_fd: FAULT_FD, touched: Vec::new() });
        }
        guest::write(&machine.memory, FIRMWARE_PAGE, FIRMWARE);
        let touched = vec![(0, PageRun::new(PageIndex(FIRMWARE_PAGE), 1))];
        Ok(TakenFaults { attached: None, fault_fd: FAULT_FD, touched })
    }

    fn retake_faults(
        &self,
        vm: &VmRecord,
        fault_fd: i32,
        _: &[&RamFile],
    ) -> Result<Option<Attached>, MemoryError> {
        if fault_fd == FAULT_FD && self.is_alive(vm.pid) { Ok(None) } else { Err(ended(vm.pid)) }
    }

    async fn reconnect(&self, vm: &VmRecord) -> Result<Arc<dyn ArrivingMonitor>, QmpError> {
        self.world.may(&self.life, "connect to a monitor").await;
        guest::moment(&self.world).await;
        let socket = &vm.qmp_socket;
        let found = socket.parent().and_then(|vm_dir| self.in_folder(vm_dir).pop());
        Ok(Arc::new(self.qemu(found.ok_or_else(|| no_monitor(socket))?)))
    }

    async fn end_started_in(&self, vm_dir: &Path) -> Result<Vec<u32>, ProcessError> {
        let mut all = Vec::new();
        for pid in self.in_folder(vm_dir) {
            self.world.may(&self.life, "end QEMU").await;
            qemu::end(&self.world, pid, Ender::Daemon);
            all.push(pid.unsigned_abs());
        }
        Ok(all)
    }

    fn page_workers(&self) -> PageWorkers {
        PageWorkers::Turns
    }
}

/// One QEMU, as it is reached by a life.
#[derive(Clone, Debug)]
pub(super) struct Qemu {
    vmm: SimVmm,
    pid: i32,
}

impl Qemu {
    /// Its process id.
    pub(super) const fn pid(&self) -> i32 {
        self.pid
    }

    /// Where it is.
    pub(super) fn node(&self) -> NodeIndex {
        self.vmm.life.node()
    }

    pub(super) fn world(&self) -> &World {
        &self.vmm.world
    }

    /// The daemon asks something of it.
    pub(super) async fn asked(&self, what: &str) -> Result<(), QmpError> {
        self.world().may(&self.vmm.life, what).await;
        guest::moment(self.world()).await;
        self.has_its_page(what).await?;
        self.look(|_| ()).ok_or_else(|| no_monitor(Path::new("qmp.sock")))
    }

    async fn switching(&self, step: &'static str) -> Result<(), SwitchoverError> {
        self.asked(step).await.map_err(|source| SwitchoverError::Qmp { step, source })
    }

    /// QEMU's main loop has touched a page of the guest, as it does when an interrupt is delivered just then: until the page has landed nothing is
    /// answered.
    async fn has_its_page(&self, command: &str) -> Result<(), QmpError> {
        let waits = |machine: &mut qemu::Machine| machine.touched.is_some_and(|page| !machine.has(page));
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        while self.look(waits).ok_or_else(|| no_monitor(Path::new("qmp.sock")))? {
            if Instant::now() > deadline {
                return Err(QmpError::Timeout { command: command.to_owned(), waited: ANSWER_TIMEOUT });
            }
            sleep(LOOK_INTERVAL).await;
        }
        Ok(())
    }

    /// Looks at it, or changes it; nothing if it has ended.
    pub(super) fn look<T>(&self, look: impl FnOnce(&mut qemu::Machine) -> T) -> Option<T> {
        self.world().state().machine(self.pid).map(look)
    }
}

/// How long a daemon waits for an answer of QEMU's monitor.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// What it says of itself.
const VERSION: &str = "10.0.2";
const MACHINE: &str = "pc-q35-10.0";

#[async_trait]
impl QemuHandle for Qemu {
    fn pid(&self) -> u32 {
        self.pid.unsigned_abs()
    }

    fn start_time(&self) -> u64 {
        u64::from(self.pid.unsigned_abs())
    }

    async fn make_ready(&self, _: &Path, _: Duration) -> Result<Arc<dyn ArrivingMonitor>, NotReady> {
        for _ in 0..3 {
            self.switching("make QEMU ready").await?;
        }
        Ok(Arc::new(self.clone()))
    }

    fn alive(&self) -> bool {
        self.vmm.is_alive(self.pid)
    }

    async fn exited(&self) {
        let exited = self.look(|machine| Arc::clone(&machine.exited));
        if let Some(exited) = exited {
            exited.notified().await;
        }
    }

    async fn kill(&self) -> Result<(), ProcessError> {
        self.world().may(&self.vmm.life, "kill QEMU").await;
        qemu::end(self.world(), self.pid, Ender::Daemon);
        guest::moment(self.world()).await;
        Ok(())
    }

    fn log_tail(&self) -> String {
        String::new()
    }
}

#[async_trait]
impl LeavingMonitor for Qemu {
    async fn facts(&self, pid: u32) -> Result<VmFacts, QmpError> {
        self.asked("ask QEMU for facts").await?;
        let (status, ram) = self
            .look(|machine| (machine.status.as_str(), machine.ram.clone()))
            .ok_or_else(|| no_monitor(Path::new("qmp.sock")))?;
        let facts = json!({
            "pid": pid, "version": VERSION, "package": "", "machine": MACHINE, "cpu": "qemu64", "accelerator": "tcg",
            "status": status, "name": "guest", "vcpus": 1,
            "ram": [{ "id": "ram0", "kind": "memory-backend-file", "size": guest::bytes().0, "share": true,
                "path": ram, "pages": "tmpfs", "page_bytes": guest::PAGE, "prealloc": false }],
            "block": [], "devices": [], "netdevs": [], "qemu_blockers": [],
        });
        Ok(serde_json::from_value(facts).expect("these are facts"))
    }

    async fn run_state(&self, _: Duration) -> Result<String, QmpError> {
        self.asked("ask QEMU for its run state").await?;
        Ok(self.look(|machine| machine.status.as_str()).unwrap_or("unknown").to_owned())
    }

    async fn set_running(&self, wanted: Running, _: Duration) -> Result<(), QmpError> {
        self.asked(wanted.command()).await?;
        if wanted == Running::Running {
            qemu::run(self.world(), self.pid);
        } else {
            self.look(|machine| machine.status = Status::Paused);
        }
        Ok(())
    }

    async fn prepare(&self, _: bool) -> Result<Arc<dyn Leaving>, SwitchoverError> {
        self.switching("prepare the migration").await?;
        let (status, stage) =
            self.look(|machine| (machine.status, machine.stage)).unwrap_or((Status::Paused, Stage::None));
        if !matches!(status, Status::Running | Status::Paused) {
            return Err(SwitchoverError::RunState { run_state: status.as_str().to_owned() });
        }
        if matches!(stage, Stage::Active | Stage::Stopped | Stage::Drained) {
            return Err(SwitchoverError::Busy { status: MigrationStatus::Active });
        }
        let was_running = status == Status::Running;
        Ok(Arc::new(SwitchOver { qemu: self.clone(), was_running, relay: Mutex::default() }))
    }

    async fn take_up(&self, was_running: bool) -> Result<Arc<dyn Leaving>, SwitchoverError> {
        self.switching("take up the migration").await?;
        Ok(Arc::new(SwitchOver { qemu: self.clone(), was_running, relay: Mutex::default() }))
    }
}

/// A QEMU whose guest is to leave.
#[derive(Debug)]
struct SwitchOver {
    qemu: Qemu,
    was_running: bool,
    /// Carries its state to the destination, until this is dropped.
    relay: Mutex<Option<Relay>>,
}

#[derive(Debug)]
struct Relay(AbortHandle);

impl Drop for Relay {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl SwitchOver {
    fn set_relay(&self, relay: Option<Relay>) {
        *self.relay.lock().unwrap_or_else(PoisonError::into_inner) = relay;
    }

    /// Waits until its migration has come this far.
    async fn until(
        &self,
        waiting_for: &'static str,
        deadline: Duration,
        reached: impl Fn(Stage) -> bool + Send,
    ) -> Result<(), SwitchoverError> {
        let begun = Instant::now();
        loop {
            let Some(stage) = self.qemu.look(|machine| machine.stage) else {
                return Err(SwitchoverError::Gone { waiting_for });
            };
            if reached(stage) {
                return Ok(());
            }
            if matches!(stage, Stage::Failed | Stage::None) {
                let (status, reason) = (MigrationStatus::Failed, "its stream broke".to_owned());
                return Err(SwitchoverError::Failed { status, waiting_for, reason });
            }
            let waited = begun.elapsed();
            if waited >= deadline {
                return Err(SwitchoverError::Timeout {
                    waiting_for,
                    waited,
                    status: MigrationStatus::Active,
                });
            }
            sleep(LOOK_INTERVAL).await;
        }
    }
}

#[async_trait]
impl Leaving for SwitchOver {
    async fn start(&self, mut to: BoxedStream) -> Result<(), SwitchoverError> {
        self.qemu.switching("migrate").await?;
        let (pipe, mut from) = tokio::io::duplex(PIPE);
        let relaying = vmove_node::task::spawn(async move {
            let _ = tokio::io::copy(&mut from, &mut to).await;
            let _ = tokio::io::AsyncWriteExt::shutdown(&mut to).await;
        });
        self.set_relay(Some(Relay(relaying.abort_handle())));
        self.qemu.look(|machine| machine.stage = Stage::Active);
        qemu::begin_migration(self.qemu.world(), self.qemu.pid, pipe);
        Ok(())
    }

    async fn stopped(&self, deadline: Duration) -> Result<Halt, SwitchoverError> {
        let reached = |stage| matches!(stage, Stage::Stopped | Stage::Drained | Stage::Completed);
        self.until("the stop of the guest", deadline, reached).await?;
        Ok(Halt { at: Mono::now(), wall: SystemTime::UNIX_EPOCH, was_running: self.was_running })
    }

    async fn held(&self, deadline: Duration) -> Result<(), SwitchoverError> {
        let reached = |stage| matches!(stage, Stage::Drained | Stage::Completed);
        self.until("the end of its writes", deadline, reached).await
    }

    async fn go_on(&self) -> Result<(), SwitchoverError> {
        Ok(())
    }

    async fn completed(&self, deadline: Duration) -> Result<(), SwitchoverError> {
        self.until("the end of the migration", deadline, |stage| stage == Stage::Completed).await
    }

    async fn cancel(&self, deadline: Duration) -> Result<(), SwitchoverError> {
        self.set_relay(None);
        self.qemu.switching("cancel the migration").await?;
        let settled = self.until("the end of the cancelled migration", deadline, |stage| {
            matches!(stage, Stage::None | Stage::Completed | Stage::Failed)
        });
        settled.await?;
        let gone = SwitchoverError::Gone { waiting_for: "the guest to run again" };
        let status = self.qemu.look(|machine| machine.status).ok_or(gone)?;
        if self.was_running && status != Status::Running {
            self.qemu.switching("cont").await?;
            qemu::run(self.qemu.world(), self.qemu.pid);
        }
        self.qemu.look(|machine| {
            machine.stage = Stage::None;
            if machine.status == Status::PostMigrate {
                machine.status = Status::Paused;
            }
        });
        Ok(())
    }
}

#[async_trait]
impl ArrivingMonitor for Qemu {
    async fn load(&self, mut from: BoxedStream) -> Result<u64, SwitchoverError> {
        let mut bytes = Vec::new();
        let read = from.read_to_end(&mut bytes).await;
        self.switching("load the device state").await?;
        match (read, qemu::copy_in(&bytes)) {
            (Ok(_), Some(copy)) => {
                self.look(|machine| {
                    machine.copy = Some(copy);
                    machine.status = Status::Paused;
                });
                Ok(bytes.len() as u64)
            }
            _ => {
                // QEMU ends when it cannot load.
                qemu::end(self.world(), self.pid, Ender::Daemon);
                let (status, reason) = (MigrationStatus::Failed, "its stream broke".to_owned());
                Err(SwitchoverError::Failed { status, waiting_for: "the device state", reason })
            }
        }
    }

    async fn take_home(&self, _: u32, _: &[RamFile], home: &[&RamFile]) -> Result<(), TakeHomeError> {
        self.asked("give QEMU its memory of before").await?;
        let memory = home.first().ok_or(TakeHomeError::Unable)?.map()?;
        let had = self.look(|machine| {
            guest::write(&machine.memory, FIRMWARE_PAGE, FIRMWARE);
            machine.is_home = true;
            std::mem::replace(&mut machine.memory, memory)
        });
        had.map(drop).ok_or(TakeHomeError::Memory(ended(self.pid)))
    }

    async fn resume(&self) -> Result<Option<Mono>, QmpError> {
        self.asked("cont").await?;
        let (table, visits) = self.table().map_or((None, false), |(table, visits)| (Some(table), visits));
        self.look(|machine| {
            machine.visits = visits;
            machine.table = machine.table.take().or(table);
            // One that is not there yet.
            let missing = |table: &Arc<PageTable>| {
                (0..PAGES).map(PageIndex).find(|page| !table.state(*page).is_final())
            };
            machine.touched = machine.touched.or_else(|| machine.table.as_ref().and_then(missing));
        });
        qemu::run(self.world(), self.pid);
        let runs = Mono::now();
        self.has_its_page("cont").await?;
        Ok(Some(runs))
    }

    async fn run_state(&self) -> Result<String, QmpError> {
        LeavingMonitor::run_state(self, Duration::ZERO).await
    }
}

impl Qemu {
    /// The page table of the session that brings the guest here: until a page has landed a guest thread that touches it waits.
    /// And whether that is a visit.
    fn table(&self) -> Option<(Arc<PageTable>, bool)> {
        let memory_dir = self.world().memory_dir(self.vmm.life.node());
        let session = crate::world::journals::session_of(self.world(), self.vmm.life.node(), self.pid)?;
        let dir = vmove_node::layout::memory_dir(&memory_dir, Backing::Thp);
        Some((PageTable::open(&dir.join(format!("{}-0.pages", session.id))).ok()?, session.is_visit))
    }
}
