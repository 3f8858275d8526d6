//! What sessions ask of QEMU, and of the kernel about it: processes, monitors, which pages a guest has written, whose faults are served.
//!
//! [`Qemu`] does it for real. The drivers in `source` and `destination`, and what they write down, know only these traits: `tests/sim` runs
//! them against QEMUs that are played, on a network and on disks that fail.

mod alive;
mod announcing;
mod disks;
mod fence;
mod libvirt;
mod qemu;
mod qemu_disks;
mod stand_in;
mod writes;

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use vmove_memory::{ByteLen, FaultContext, MemoryError, PageRun, Process, QemuMapping, RamFile};
use vmove_node::peer::BoxedStream;
use vmove_node::record::VmRecord;
use vmove_qmp::QmpError;
use vmove_qmp::inspect::{HostQemu, InspectHostError, VmFacts};
use vmove_qmp::process::ProcessError;
use vmove_qmp::switchover::{StoppedAt, SwitchoverError};
use vmove_types::Backing;
use vmove_types::time::Mono;
use vmove_types::vm::Running;

pub use crate::kept_memory::is_kept;
pub use crate::taps::{Tap, TapsError};
pub use disks::{ComparesDisks, CopiesDisks, MovesDisks, TakesDisks};
pub use qemu::Qemu;
pub use stand_in::TakeHomeError;
pub use vmove_node::guest_devices::{DeviceMonitor, InGuestError, Ran};

/// The QEMUs of a node.
#[async_trait]
pub trait Vmm: Send + Sync + fmt::Debug {
    /// What the binary is by which a command line calls QEMU; `None` if it is not on this node.
    async fn binary(&self, program: &str) -> Option<Result<HostQemu, InspectHostError>>;

    /// Whether there is the process of this record, ending ones included.
    fn is_there(&self, vm: &VmRecord) -> bool;

    /// Whether the process of this record is known to have ended, or to be ending. A process that cannot be looked at is not.
    fn has_ended(&self, vm: &VmRecord) -> bool;

    /// Takes the process of this record, which an earlier process of this daemon or somebody else started.
    ///
    /// # Errors
    /// It has ended.
    fn adopt(&self, vm: &VmRecord) -> Result<Arc<dyn QemuHandle>, ProcessError>;

    /// The monitor of a guest that is to leave, or that was to.
    ///
    /// # Errors
    /// It does not answer.
    async fn monitor(&self, vm: &VmRecord) -> Result<Arc<dyn LeavingMonitor>, QmpError>;

    /// Forgets the connection to a monitor.
    async fn forget_monitor(&self, socket: &Path);

    /// Whether QEMU shares all of the guest's memory with its files.
    ///
    /// # Errors
    /// [`MemoryError`], also if it has ended.
    fn shares_memory(&self, vm: &VmRecord) -> Result<bool, MemoryError>;

    /// Whether the guest's writes can be followed here.
    fn can_follow_writes(&self) -> bool;

    /// Finds the guest's memory in QEMU. The guest does not notice.
    ///
    /// # Errors
    /// [`MemoryError`], also if QEMU has ended, unless its memory [is kept](is_kept).
    fn find_memory(&self, vm: &VmRecord, files: &[&RamFile]) -> Result<Box<dyn GuestWrites>, MemoryError>;

    /// Ends the QEMU of a guest that has left: it is asked by its monitor if `by_monitor`, then killed.
    ///
    /// # Errors
    /// It does not end.
    async fn end_left(&self, vm: &VmRecord, by_monitor: bool, deadline: Duration)
    -> Result<(), ProcessError>;

    /// A folder for page maps: on tmpfs.
    ///
    /// # Errors
    /// [`MemoryError`].
    fn page_map_dir(&self, dir: &Path) -> Result<PathBuf, MemoryError>;

    /// A RAM file of this VM and this backing, of so many bytes and all of it a hole.
    ///
    /// # Errors
    /// [`MemoryError`], also if it exists or there is no room.
    fn create_ram_file(
        &self,
        vm: &str,
        dir: &Path,
        backing: Backing,
        name: &str,
        len: ByteLen,
    ) -> Result<RamFile, MemoryError>;

    /// Starts a QEMU that waits for the guest of this name.
    ///
    /// # Errors
    /// It did not start.
    fn start(
        &self,
        vm: &str,
        command: &[OsString],
        vm_dir: &Path,
    ) -> Result<Arc<dyn QemuHandle>, ProcessError>;

    /// Takes the page faults of a QEMU that was just started.
    ///
    /// # Errors
    /// [`FaultsError`].
    fn take_faults(
        &self,
        qemu: &dyn QemuHandle,
        files: &[&RamFile],
        locked: bool,
    ) -> Result<TakenFaults, FaultsError>;

    /// Takes the page faults again of a QEMU whose fault descriptor an earlier process of this daemon left open in it.
    ///
    /// # Errors
    /// [`MemoryError`], also if it has ended.
    fn retake_faults(
        &self,
        vm: &VmRecord,
        fault_fd: i32,
        files: &[&RamFile],
    ) -> Result<Option<Attached>, MemoryError>;

    /// The monitor of a QEMU that an earlier process of this daemon started.
    ///
    /// # Errors
    /// It does not answer.
    async fn reconnect(&self, vm: &VmRecord) -> Result<Arc<dyn ArrivingMonitor>, QmpError>;

    /// Ends every QEMU that was started in a VM's folder; gives their process ids.
    ///
    /// # Errors
    /// One does not end.
    async fn end_started_in(&self, vm_dir: &Path) -> Result<Vec<u32>, ProcessError>;

    /// Lets a QEMU lock its guest's memory, of so many bytes, as devices of the host need it.
    ///
    /// # Errors
    /// The kernel's answer.
    fn let_lock_memory(&self, _: &VmRecord, _: u64) -> std::io::Result<()> {
        Ok(())
    }

    /// The QEMU in which the guest of this libvirt domain is expected.
    fn expected(&self, _domain: &str) -> Option<VmRecord> {
        None
    }

    /// Keeps a guest that was given away from running on here, whoever tells its QEMU to: until [`Self::let_on`], also after the end of this daemon.
    ///
    /// # Errors
    /// [`MemoryError`]; also if QEMU has ended.
    fn keep_from_running(&self, _: &VmRecord) -> Result<(), MemoryError> {
        Ok(())
    }

    /// Lets it run on, if somebody has told QEMU to, or will.
    ///
    /// # Errors
    /// [`MemoryError`]; also if QEMU has ended.
    fn let_on(&self, _: &VmRecord) -> Result<(), MemoryError> {
        Ok(())
    }

    /// Whether somebody else (libvirt) has told this QEMU to run its guest, which it does, or stands still while it tries to.
    async fn was_told_to_run(&self, _: &VmRecord) -> bool {
        false
    }

    /// How pages are read.
    fn page_workers(&self) -> PageWorkers {
        PageWorkers::Threads
    }
}

/// Who reads pages at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageWorkers {
    /// A thread for each page connection.
    Threads,
    /// Tasks of the runtime, which take turns, and nobody serves faults: for simulations, in which nothing may depend on threads.
    Turns,
}

/// A QEMU process. Dropping this ends nothing.
#[async_trait]
pub trait QemuHandle: Send + Sync + fmt::Debug {
    /// Its process id.
    fn pid(&self) -> u32;

    /// When it was started, in clock ticks since boot; 0 if that cannot be told any more.
    fn start_time(&self) -> u64;

    /// Connects to the monitor of a QEMU that was just started, and makes it ready to take a guest's device state.
    ///
    /// # Errors
    /// [`NotReady`].
    async fn make_ready(
        &self,
        socket: &Path,
        deadline: Duration,
    ) -> Result<Arc<dyn ArrivingMonitor>, NotReady>;

    /// Whether it has neither ended nor is ending: it may take seconds to give a large guest's memory back, and will not run it any more.
    fn alive(&self) -> bool;

    /// Ends when the process has.
    async fn exited(&self);

    /// Ends it by SIGKILL, and waits.
    ///
    /// # Errors
    /// [`ProcessError::Unkillable`].
    async fn kill(&self) -> Result<(), ProcessError>;

    /// Ends it by SIGKILL, and waits, also one that is somebody else's to end (libvirt's).
    ///
    /// # Errors
    /// [`ProcessError::Unkillable`].
    async fn end_for_good(&self) -> Result<(), ProcessError> {
        self.kill().await
    }

    /// Ends one that is somebody else's to end (libvirt's), soon and in the background, if it waits for a page of a guest that is not to run in it: nobody
    /// answers that fault any more, and whoever is to end it may wait for its answer.
    fn end_if_stuck(&self) {}

    /// The last lines of its log.
    fn log_tail(&self) -> String;
}

/// The monitor of a QEMU whose guest is to leave.
#[async_trait]
pub trait LeavingMonitor: DeviceMonitor + CopiesDisks + ComparesDisks + MovesDisks {
    /// What QEMU and guest are made of.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn facts(&self, pid: u32) -> Result<VmFacts, QmpError>;

    /// QEMU's run state, such as `running`.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn run_state(&self, deadline: Duration) -> Result<String, QmpError>;

    /// Lets the guest's processors run, or stops them.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn set_running(&self, wanted: Running, deadline: Duration) -> Result<(), QmpError>;

    /// Makes QEMU ready to stop the guest and to send its device state. Changes nothing for the guest. With `hold`, QEMU sends the device
    /// state, and gives its disks away, only after [`Leaving::go_on`].
    ///
    /// # Errors
    /// [`SwitchoverError`].
    async fn prepare(&self, hold: bool) -> Result<Arc<dyn Leaving>, SwitchoverError>;

    /// Takes up a switch-over that an earlier process of this daemon began.
    ///
    /// # Errors
    /// [`SwitchoverError`].
    async fn take_up(&self, was_running: bool) -> Result<Arc<dyn Leaving>, SwitchoverError>;
}

/// When the guest stopped.
#[derive(Debug, Clone, Copy)]
pub struct Halt {
    /// By our clock.
    pub at: Mono,
    /// By the clock that frames are timed with.
    pub wall: SystemTime,
    /// It was not paused before.
    pub was_running: bool,
}

impl From<StoppedAt> for Halt {
    fn from(stopped: StoppedAt) -> Self {
        let wall = stopped.qemu_time.wall().unwrap_or_else(SystemTime::now);
        Self { at: Mono(stopped.at.0), wall, was_running: stopped.was_running }
    }
}

/// A QEMU that is made ready to give its guest away.
#[async_trait]
pub trait Leaving: Send + Sync + fmt::Debug {
    /// QEMU is to stop the guest and to send its device state, which goes into `to`.
    ///
    /// # Errors
    /// [`SwitchoverError`]; the guest is then as it was.
    async fn start(&self, to: BoxedStream) -> Result<(), SwitchoverError>;

    /// Waits for the guest to stop.
    ///
    /// # Errors
    /// [`SwitchoverError`].
    async fn stopped(&self, deadline: Duration) -> Result<Halt, SwitchoverError>;

    /// Waits until nothing in QEMU writes guest memory any more.
    ///
    /// # Errors
    /// [`SwitchoverError`].
    async fn held(&self, deadline: Duration) -> Result<(), SwitchoverError>;

    /// Ends the hold: QEMU sends the device state.
    ///
    /// # Errors
    /// [`SwitchoverError`].
    async fn go_on(&self) -> Result<(), SwitchoverError>;

    /// Waits until everything was sent. From then on QEMU does not run the guest by itself.
    ///
    /// # Errors
    /// [`SwitchoverError`].
    async fn completed(&self, deadline: Duration) -> Result<(), SwitchoverError>;

    /// Ends the migration wherever it stands, brings the guest back to what it was, and puts QEMU's settings back.
    ///
    /// # Errors
    /// [`SwitchoverError`].
    async fn cancel(&self, deadline: Duration) -> Result<(), SwitchoverError>;

    /// Where somebody else decides on which side the guest runs (libvirt): calls the migration off if it can be, and says whether everything
    /// was sent before, so that the guest is the destination's.
    ///
    /// # Errors
    /// [`SwitchoverError`]: nobody knows.
    async fn is_given_up(&self, _deadline: Duration) -> Result<bool, SwitchoverError> {
        Ok(false)
    }

    /// Ends when somebody else has the guest run here again after everything was sent. Otherwise never. Cancel-safe.
    async fn runs_again(&self) {
        std::future::pending::<()>().await;
    }

    /// Where somebody else decides that: has the guest stand still, or run, all the same.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn overrule(&self, _: Running) -> Result<(), QmpError> {
        Ok(())
    }
}

/// The guest's memory in QEMU at the source.
pub trait GuestWrites: Send + Sync + fmt::Debug {
    /// Begins to follow the guest's writes. `mapped`: our own mappings of the files.
    ///
    /// # Errors
    /// [`MemoryError`].
    fn follow(&self, mapped: &[MappedFile<'_>]) -> Result<Box<dyn WriteTracker>, MemoryError>;
}

/// A RAM file and our mapping of it.
#[derive(Debug, Clone, Copy)]
pub struct MappedFile<'a> {
    /// The file.
    pub file: &'a RamFile,
    /// The mapping.
    pub mapping: &'a Arc<vmove_memory::Mapping>,
}

/// What the guest does during a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum During {
    /// It runs.
    Rounds,
    /// It is stopped, and waits for the scan.
    Pause,
}

/// Follows a guest's writes until it is dropped.
pub trait WriteTracker: Send + Sync + fmt::Debug {
    /// Tells of the pages of the file of this number that were written, or given back to the host, since the last scan. What is told of in
    /// the pause may be told of again by a later scan.
    ///
    /// # Errors
    /// [`MemoryError`].
    fn scan(
        &mut self,
        during: During,
        index: usize,
        file: &RamFile,
        dirty: &mut dyn FnMut(PageRun),
    ) -> Result<(), MemoryError>;

    /// Ends it; the guest's memory is as before.
    ///
    /// # Errors
    /// [`MemoryError`].
    fn end(self: Box<Self>) -> Result<(), MemoryError>;
}

/// The monitor of a QEMU that takes a guest.
#[async_trait]
pub trait ArrivingMonitor: TakesDisks + ComparesDisks {
    /// Gives QEMU the device state that comes by `from`, and waits until it has loaded it. How many bytes that were.
    ///
    /// # Errors
    /// [`SwitchoverError`].
    async fn load(&self, from: BoxedStream) -> Result<u64, SwitchoverError>;

    /// Gives a QEMU whose guest does not run the files `home` as its memory, in the place of those that it was started with. `pid`: its process.
    ///
    /// # Errors
    /// [`TakeHomeError`]; it is of no use then.
    async fn take_home(
        &self,
        _pid: u32,
        _stand_ins: &[RamFile],
        _home: &[&RamFile],
    ) -> Result<(), TakeHomeError> {
        Err(TakeHomeError::Unable)
    }

    /// The taps by which the guest will reach the network. `pid`: QEMU's process.
    ///
    /// # Errors
    /// [`TapsError`].
    async fn taps(&self, _pid: u32) -> Result<Vec<Tap>, TapsError> {
        Ok(Vec::new())
    }

    /// Waits until the addresses of a guest that was let run are announced to the network for the first time. When that was, by our clock; `None` if
    /// they cannot be announced.
    async fn announced(&self) -> Option<Mono> {
        None
    }

    /// Lets the guest run, or waits until it runs if that is for somebody else to say. When it began to, by our clock; nothing if it is to
    /// stay paused.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn resume(&self) -> Result<Option<Mono>, QmpError>;

    /// QEMU's run state, such as `paused`.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn run_state(&self) -> Result<String, QmpError>;
}

/// QEMU's side of guest memory at the destination, once its faults are ours.
#[derive(Debug)]
pub struct Attached {
    pub(crate) process: Process,
    pub(crate) context: FaultContext,
    pub(crate) mappings: Vec<QemuMapping>,
}

/// Page faults that were taken.
#[derive(Debug)]
pub struct TakenFaults {
    /// Nothing where nobody serves faults.
    pub attached: Option<Attached>,
    /// The descriptor that serves faults, as numbered in QEMU.
    pub fault_fd: i32,
    /// Pages that QEMU had mapped before its faults were ours: (block, run). It may have written to them.
    pub touched: Vec<(usize, PageRun)>,
}

/// Why a QEMU that was started does not wait for a guest.
#[derive(Debug, thiserror::Error)]
pub enum NotReady {
    /// It has ended, or its monitor does not answer.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// It does not take what it is told.
    #[error(transparent)]
    Switchover(#[from] SwitchoverError),
}

/// Why a QEMU's page faults could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum FaultsError {
    /// The kernel's answer.
    #[error("Its page faults could not be taken")]
    Memory(#[from] MemoryError),
    /// QEMU maps more or less than the file.
    #[error("It maps {mapped} of the {len} bytes of {}: expected the whole file once", path.display())]
    NotMappedOnce {
        /// The file.
        path: PathBuf,
        /// Bytes that are mapped.
        mapped: u64,
        /// Length of the file in bytes.
        len: u64,
    },
    /// It is needed for a life of the daemon after this one.
    #[error("The fault descriptor did not stay open in it")]
    NoFaultDescriptor,
}
