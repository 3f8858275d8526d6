//! The monitor of the destination QEMU, and the guest's first instruction here.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tracing::Instrument as _;
use vmove_qmp::QmpError;

use super::error::DestinationError;
use super::guest_memory::GuestMemory;
use super::session::Session;
use crate::vmm::ArrivingMonitor;
use vmove_node::blocking::spawn_blocking;
use vmove_node::store::VmStoreError;
use vmove_types::problem::chain;
use vmove_types::time::Mono;

/// Attempts of up to 5 s each to reach the monitor of a QEMU that was found again: its main loop may wait for pages that come only when
/// the source has dialled.
const CONNECT_TRIES: u32 = 1000;
/// Between them.
const CONNECT_INTERVAL: Duration = Duration::from_millis(200);

/// A monitor that answers.
#[derive(Debug)]
pub(super) struct Monitor(Arc<dyn ArrivingMonitor>);

/// A monitor that is being connected to: QEMU may answer only once it has the pages that it waits for.
#[derive(Debug)]
pub(super) struct Connecting(JoinHandle<Result<Arc<dyn ArrivingMonitor>, QmpError>>);

impl Drop for Connecting {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Connecting {
    pub(super) fn to_monitor_of(session: &Session) -> Self {
        let (node, vm) = (Arc::clone(&session.node), session.journal.record().vm.clone());
        Self(vmove_node::task::spawn(async move {
            let mut tries = 1;
            // Whoever waits for the answer of a monitor has a VM.
            let Some(vm) = vm else { return std::future::pending().await };
            loop {
                match node.config.vmm.reconnect(&vm).await {
                    Err(error) if tries >= CONNECT_TRIES => return Err(error),
                    Err(_) => tokio::time::sleep(CONNECT_INTERVAL).await,
                    connected => return connected,
                }
                tries += 1;
            }
        }))
    }

    /// Waits until it answers. Cancel-safe; not to be called again after that.
    pub(super) async fn connected(&mut self) -> Result<Monitor, DestinationError> {
        Ok(Monitor((&mut self.0).await?.map_err(DestinationError::Monitor)?))
    }
}

/// A guest that is being let run, unless it is to stay paused. QEMU may answer only once it has pages that it waits for, so whoever fetches
/// those must not wait for it.
#[derive(Debug)]
pub(super) struct Resuming(JoinHandle<Result<Resumed, DestinationError>>);

/// A guest that runs here, or is to stay paused.
#[derive(Debug)]
pub(super) struct Resumed {
    /// When it began to run; nothing if it is to stay paused.
    pub at: Option<Mono>,
    /// Pages that it lacked then.
    pub pages_left: u64,
    /// An earlier process of this daemon had let it run, and nobody knows when.
    pub earlier: bool,
    /// Its record is being written.
    recording: Option<JoinHandle<Result<(), VmStoreError>>>,
}

/// What is told to QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    /// To run the guest.
    Run,
    /// The same, unless it runs: an earlier process of this daemon may have told it.
    RunIfPaused,
    /// Nothing.
    StayPaused,
}

impl Drop for Resuming {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Resuming {
    /// Begins. The VM is registered as ours after the guest runs: a record on a slow or full disk must not lengthen the pause, and the
    /// journal knows it already.
    pub(super) fn begin(session: &Session, monitor: Monitor, wish: Wish) -> Self {
        let (memory, vms) = (Arc::clone(&session.files.memory), Arc::clone(&session.node.vms));
        // One that is found again has been entered already.
        let vm = session
            .journal
            .record()
            .vm
            .clone()
            .filter(|vm| wish != Wish::RunIfPaused && vm.libvirt.is_none());
        let pages_left = memory.left();
        let work = async move {
            let at = monitor.fulfil(wish, &memory).await?;
            let recording = vm.map(|vm| spawn_blocking(move || vms.put_owing(vm)));
            Ok(Resumed { at, pages_left, earlier: wish == Wish::RunIfPaused && at.is_none(), recording })
        };
        Self(vmove_node::task::spawn(work.in_current_span()))
    }

    /// Waits until it runs. Cancel-safe; not to be called again after that.
    pub(super) async fn resumed(&mut self) -> Result<Resumed, DestinationError> {
        (&mut self.0).await?
    }
}

impl Resumed {
    /// Waits until the VM's record is written, or owed.
    pub(super) async fn recorded(self) -> Result<(), DestinationError> {
        match self.recording {
            Some(recording) => recording.await?.map_err(DestinationError::Record),
            None => Ok(()),
        }
    }
}

impl Monitor {
    pub(super) const fn new(monitor: Arc<dyn ArrivingMonitor>) -> Self {
        Self(monitor)
    }

    /// For tasks of their own.
    pub(super) fn shared(&self) -> Arc<dyn ArrivingMonitor> {
        Arc::clone(&self.0)
    }

    /// When the guest began to run, if it was let run. As long as pages are missing QEMU may wait for one of them: then it is asked again
    /// whether it runs, however often.
    async fn fulfil(&self, wish: Wish, memory: &GuestMemory) -> Result<Option<Mono>, DestinationError> {
        let mut looks = match wish {
            Wish::StayPaused => return Ok(None),
            Wish::Run => false,
            Wish::RunIfPaused => true,
        };
        loop {
            let tried = if looks { self.run_unless_it_runs().await } else { self.0.resume().await };
            match tried {
                Err(error @ QmpError::Timeout { .. }) if memory.left() > 0 => {
                    tracing::warn!(
                        error = chain(&error),
                        pages_left = memory.left(),
                        "QEMU may wait for a page"
                    );
                    looks = true;
                }
                // It runs, and has not said since when: a moment that is too late makes no pause shorter than it was.
                Ok(None) if wish == Wish::Run && looks => return Ok(Some(Mono::now())),
                other => return other.map_err(DestinationError::Resume),
            }
        }
    }

    async fn run_unless_it_runs(&self) -> Result<Option<Mono>, QmpError> {
        if self.0.run_state().await? == "paused" { self.0.resume().await } else { Ok(None) }
    }
}
