//! QEMUs of libvirt domains, and of VMs of Proxmox VE, for which `vmove-pve` does what libvirt does: libvirt starts and ends them, has them migrate,
//! and lets the guest run. Here that is followed, over a second monitor, and guest memory is added. Nothing here resumes a guest, and of QEMUs only one
//! is ended that waits for a page for ever.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Mutex;
use tokio::time::timeout;
use vmove_node::domains::Domains;
use vmove_node::monitors::Monitors;
use vmove_node::peer::BoxedStream;
use vmove_node::record::VmRecord;
use vmove_qmp::agent::ExecRequest;
use vmove_qmp::hotplug::{HotplugError, Port, Seat, UnplugLimits};
use vmove_qmp::inspect::VmFacts;
use vmove_qmp::io_threads::IoThreads;
use vmove_qmp::process::{ProcessError, QemuProcess};
use vmove_qmp::switchover::{SkipsShared, SwitchoverError, Verdict, Watched};
use vmove_qmp::{Client, QmpError};
use vmove_types::time::Mono;
use vmove_types::vm::Running;

use super::{
    ArrivingMonitor, ComparesDisks, CopiesDisks, DeviceMonitor, Halt, InGuestError, Leaving, LeavingMonitor,
    MovesDisks, NotReady, QemuHandle, Ran, TakesDisks,
};

/// What the source sends in the place of the device state: libvirt may begin its migration.
const GO: u8 = b'!';
/// For libvirt to end a QEMU whose guest stays where it was.
const ENDED_BY_LIBVIRT: Duration = Duration::from_secs(3);
/// How often it is looked after before it is left to libvirt.
const LOOKS: usize = 100;
/// For a QEMU that waits for nothing to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);
/// A guest that libvirt has not let run for so long after its state was loaded stays paused (`--suspend`, or it was paused before).
const STAYS_PAUSED: Duration = Duration::from_secs(10);

/// A QEMU that libvirt started.
#[derive(Debug)]
pub(super) struct OfLibvirt {
    pub process: QemuProcess,
    pub monitors: Arc<Monitors>,
    pub domains: Arc<Domains>,
    pub uuid: String,
    /// Its monitor for vmove.
    pub socket: PathBuf,
}

/// Whether QEMU waits for a page, so that it may not be able to answer libvirt, which is to end it. Any thread counts: one that waits with QEMU's lock held
/// keeps the main loop from it.
async fn is_stuck(pid: u32, monitors: &Monitors, socket: &Path) -> bool {
    let places = waiting_places(pid);
    if !places.is_empty() {
        return places.iter().any(|place| place == "handle_userfault");
    }
    match monitors.client(socket).await {
        Ok(client) => matches!(client.run_state(ANSWERS_WITHIN).await, Err(QmpError::Timeout { .. })),
        Err(error) => matches!(error, QmpError::NoGreeting { .. }),
    }
}

/// Where the kernel has the threads of a process wait (proc_pid_wchan(5)). Empty if none waits, or that is not told.
fn waiting_places(pid: u32) -> Vec<String> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let place = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("wchan")).ok();
    threads.filter_map(place).filter(|place| place != "0").collect()
}

/// Whether libvirt has told QEMU to run the guest, which it does, or stands still while it tries to.
pub(super) async fn was_told_to_run(vm: &VmRecord, monitors: &Monitors) -> bool {
    let state = async { monitors.client(&vm.qmp_socket).await?.run_state(ANSWERS_WITHIN).await };
    match timeout(ANSWERS_WITHIN, state).await {
        Ok(Ok(state)) => state == "running",
        // A QEMU that has left its guest stopped touches no memory of it.
        _ => is_stuck(vm.pid.unsigned_abs(), monitors, &vm.qmp_socket).await,
    }
}

#[async_trait]
impl QemuHandle for OfLibvirt {
    fn pid(&self) -> u32 {
        self.process.pid()
    }

    fn start_time(&self) -> u64 {
        vmove_memory::Process::open(self.process.pid()).map_or(0, |process| process.start_time())
    }

    async fn make_ready(&self, socket: &Path, _: Duration) -> Result<Arc<dyn ArrivingMonitor>, NotReady> {
        let client = self
            .monitors
            .client(socket)
            .await
            .map_err(SwitchoverError::at("connecting to the monitor for vmove"))?;
        let watched = Watched::begin(&client);
        let skips = watched.skip_shared().await?;
        let arriving = Arriving {
            watched,
            skips: Mutex::new(Some(skips)),
            domains: Arc::clone(&self.domains),
            uuid: self.uuid.clone(),
        };
        Ok(Arc::new(arriving))
    }

    fn alive(&self) -> bool {
        super::alive::lives(&self.process)
    }

    async fn exited(&self) {
        self.process.exited().await;
    }

    /// libvirt ends it, when it hears that its migration has failed. Until then it cannot run the guest: nobody answers its faults.
    async fn kill(&self) -> Result<(), ProcessError> {
        Ok(())
    }

    async fn end_for_good(&self) -> Result<(), ProcessError> {
        self.process.kill().await
    }

    fn end_if_stuck(&self) {
        let (process, monitors) = (self.process.clone(), Arc::clone(&self.monitors));
        let socket = self.socket.clone();
        vmove_node::task::spawn(async move {
            for _ in 0..LOOKS {
                if timeout(ENDED_BY_LIBVIRT, process.exited()).await.is_ok() {
                    return;
                }
                if is_stuck(process.pid(), &monitors, &socket).await {
                    tracing::warn!(
                        pid = process.pid(),
                        "QEMU waits for a page of a guest that stays at the source, and libvirt for QEMU: killing it"
                    );
                    if let Err(error) = process.kill().await {
                        tracing::error!(pid = process.pid(), %error, "it does not end");
                    }
                    return;
                }
            }
        });
    }

    fn log_tail(&self) -> String {
        "it is not vmove's: see /var/log/libvirt/qemu, or the task log of Proxmox VE".to_owned()
    }
}

/// The monitor of a QEMU that waits for a guest of libvirt's.
pub(super) struct Arriving {
    watched: Watched,
    skips: Mutex<Option<SkipsShared>>,
    domains: Arc<Domains>,
    uuid: String,
}

impl fmt::Debug for Arriving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arriving").field("uuid", &self.uuid).finish_non_exhaustive()
    }
}

impl Arriving {
    /// Of a QEMU that an earlier process of this daemon had let libvirt go on with.
    pub(super) fn found_again(client: &Client, domains: &Arc<Domains>, uuid: &str) -> Self {
        let (domains, uuid) = (Arc::clone(domains), uuid.to_owned());
        Self { watched: Watched::begin(client), skips: Mutex::new(None), domains, uuid }
    }
}

impl TakesDisks for Arriving {}

impl ComparesDisks for Arriving {}

#[async_trait]
impl ArrivingMonitor for Arriving {
    /// Has libvirt go on as soon as the source says so. libvirt loads the state.
    async fn load(&self, mut from: BoxedStream) -> Result<u64, SwitchoverError> {
        let stream = |source| SwitchoverError::Stream { what: "the source's word", source };
        if from.read_u8().await.map_err(stream)? != GO {
            return Err(stream(std::io::ErrorKind::InvalidData.into()));
        }
        self.domains.let_go(&self.uuid);
        Ok(0)
    }

    async fn resume(&self) -> Result<Option<Mono>, QmpError> {
        let paused = async {
            // Perhaps before this process was there to see it.
            loop {
                tokio::time::sleep(STAYS_PAUSED).await;
                match self.watched.run_state().await?.as_str() {
                    "inmigrate" | "prelaunch" => {}
                    "running" => return Ok(Some(Mono::now())),
                    _ => return Ok(None),
                }
            }
        };
        let runs = tokio::select! {
            biased;
            resumed = self.watched.resumed() => {
                resumed.map(Some).map_err(|error| QmpError::Closed { reason: error.to_string() })
            }
            paused = paused => paused,
        };
        if runs.is_ok() {
            drop(self.skips.lock().await.take());
        }
        runs
    }

    async fn run_state(&self) -> Result<String, QmpError> {
        self.watched.run_state().await
    }
}

/// The monitor of a guest of libvirt's that is to leave.
#[derive(Debug)]
pub(super) struct LeavingDomain(pub Client);

#[async_trait]
impl DeviceMonitor for LeavingDomain {
    async fn seat(&self, id: &str) -> Result<Option<Seat>, HotplugError> {
        self.0.seat(id).await
    }

    async fn ports(&self) -> Result<Vec<Port>, HotplugError> {
        self.0.ports().await
    }

    async fn unplug(&self, id: &str, limits: UnplugLimits) -> Result<Duration, HotplugError> {
        self.0.unplug(id, limits).await
    }

    async fn plug(&self, properties: &Map<String, Value>, limit: Duration) -> Result<Duration, HotplugError> {
        self.0.plug(properties, limit).await
    }

    async fn run_in_guest(&self, request: &ExecRequest) -> Result<Ran, InGuestError> {
        self.0.run_in_guest(request).await
    }
}

/// libvirt copies disks (`--copy-storage-all`).
impl CopiesDisks for LeavingDomain {}

impl ComparesDisks for LeavingDomain {}

impl MovesDisks for LeavingDomain {}

#[async_trait]
impl LeavingMonitor for LeavingDomain {
    async fn facts(&self, pid: u32) -> Result<VmFacts, QmpError> {
        vmove_qmp::inspect::facts(&self.0, pid, None).await
    }

    async fn run_state(&self, deadline: Duration) -> Result<String, QmpError> {
        self.0.run_state(deadline).await
    }

    async fn set_running(&self, wanted: Running, deadline: Duration) -> Result<(), QmpError> {
        self.0.set_running(wanted, deadline).await
    }

    async fn prepare(&self, _: bool) -> Result<Arc<dyn Leaving>, SwitchoverError> {
        let watched = Watched::begin(&self.0);
        let io_threads = IoThreads::of(&self.0).await;
        let io_threads = io_threads.map_err(SwitchoverError::at("asking for the I/O threads"))?;
        let skips = Mutex::new(Some(watched.skip_shared().await?));
        let client = self.0.clone();
        Ok(Arc::new(LeavesByLibvirt { client, watched, skips, io_threads, go: Mutex::default() }))
    }

    async fn take_up(&self, _: bool) -> Result<Arc<dyn Leaving>, SwitchoverError> {
        let (watched, _) = Watched::take_up(&self.0).await?;
        // Whatever was set is cleared with this.
        let skips = Mutex::new(Some(SkipsShared::taken_up(&self.0)));
        let io_threads = IoThreads::default();
        let client = self.0.clone();
        Ok(Arc::new(LeavesByLibvirt { client, watched, skips, io_threads, go: Mutex::default() }))
    }
}

/// A guest that libvirt sends away.
struct LeavesByLibvirt {
    client: Client,
    watched: Watched,
    skips: Mutex<Option<SkipsShared>>,
    io_threads: IoThreads,
    /// Carries the word by which libvirt may begin; its end means nothing.
    go: Mutex<Option<BoxedStream>>,
}

impl fmt::Debug for LeavesByLibvirt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeavesByLibvirt").field("watched", &self.watched).finish_non_exhaustive()
    }
}

#[async_trait]
impl Leaving for LeavesByLibvirt {
    async fn start(&self, mut to: BoxedStream) -> Result<(), SwitchoverError> {
        self.io_threads.go_ahead();
        let sent = async {
            to.write_u8(GO).await?;
            to.flush().await
        };
        let what = "the word for the destination";
        sent.await.map_err(|source| SwitchoverError::Stream { what, source })?;
        *self.go.lock().await = Some(to);
        Ok(())
    }

    async fn stopped(&self, deadline: Duration) -> Result<Halt, SwitchoverError> {
        let drained = self.watched.drained(deadline).await;
        self.io_threads.step_back();
        drained.map(Halt::from)
    }

    async fn held(&self, deadline: Duration) -> Result<(), SwitchoverError> {
        self.watched.drained(deadline).await.map(drop)
    }

    /// libvirt does.
    async fn go_on(&self) -> Result<(), SwitchoverError> {
        Ok(())
    }

    async fn completed(&self, deadline: Duration) -> Result<(), SwitchoverError> {
        self.watched.completed(deadline).await
    }

    async fn cancel(&self, deadline: Duration) -> Result<(), SwitchoverError> {
        let ended = self.watched.call_off(deadline).await;
        let skips = self.skips.lock().await.take();
        if let Some(skips) = skips {
            skips.clear(deadline).await?;
        }
        ended.map(drop)
    }

    async fn is_given_up(&self, deadline: Duration) -> Result<bool, SwitchoverError> {
        Ok(self.watched.call_off(deadline).await? == Verdict::Sent)
    }

    async fn runs_again(&self) {
        if self.watched.resumed().await.is_err() {
            // It has ended, as it does when libvirt has heard that the guest has arrived.
            std::future::pending::<()>().await;
        }
    }

    async fn overrule(&self, wanted: Running) -> Result<(), QmpError> {
        self.client.set_running(wanted, ANSWERS_WITHIN).await
    }
}
