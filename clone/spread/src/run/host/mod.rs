//! A host, as who takes part in a distribution sees it.

mod join;
mod reader;
mod thread;
mod wants;

pub use wants::Wants;

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use vmove_fabric::{Fabric, FabricKind, Incoming, Multicast, MulticastCounters, PeerAddress, Region};

use self::join::Dialled;
use self::thread::{HostThread, Inputs};
use super::acceptor::Acceptor;
use super::inbox::Inbox;
use super::prompt;
use crate::error::SpreadError;
use crate::host::HostTotals;
use crate::host_id::HostId;
use crate::layout::Layout;

/// Where a host's copy goes.
pub trait Target: Send {
    /// Zeroed memory as long as the regions of this layout, registered with `fabric`: readable by peers if others are to read from
    /// this host. Called once before anything arrives, and for the same memory once more if the second fabric takes over.
    ///
    /// # Errors
    /// There is no such memory; the host does not take part then.
    fn regions(&mut self, fabric: &dyn Fabric, layout: &Layout) -> Result<Vec<Region>, SpreadError>;

    /// A chunk of 4 KiB at `offset` of a region is there and verified. Called by the thread that receives: do not wait.
    fn landed(&mut self, region: u16, offset: u64);
}

/// Who a host is and where the root is.
#[derive(Debug, Clone)]
pub struct HostOptions {
    /// Which host it is; each has another number, from 1.
    pub me: HostId,
    /// Where the root listens.
    pub root: PeerAddress,
    /// Whether `fabric` listens, for other hosts to read from this one.
    pub listens: bool,
    /// Takes over, without datagrams, when the first fabric is of no use or its path dies.
    pub second: Option<Arc<dyn Fabric>>,
}

/// How far a host is.
#[derive(Debug, Clone, Default)]
pub struct HostStatus {
    /// Total number of chunks; 0 until the root has reported it.
    pub chunks: u32,
    /// Chunks that are not verified yet.
    pub missing: u32,
    /// Where pieces came from.
    pub totals: HostTotals,
    /// What came by multicast, as the transport counts it.
    pub multicast: MulticastCounters,
    /// From when the root let it in until it had everything.
    pub took: Option<Duration>,
    /// By which it reads from the root, once it has joined.
    pub fabric: Option<FabricKind>,
    /// Why the first fabric was given up.
    pub left: Option<String>,
    /// Whether its thread has ended.
    pub ended: bool,
}

/// What the thread is woken for.
#[derive(Debug)]
enum HostEvent {
    Incoming(Incoming),
    Dialled(HostId, Dialled),
    Stop,
}

/// How far the thread is, and why it ended.
type Shared = (Mutex<(HostStatus, Option<SpreadError>)>, Condvar);

/// A host that takes part in a distribution. Once it has everything it goes on serving others until it is dropped.
#[derive(Debug)]
pub struct Host {
    inbox: Arc<Inbox<HostEvent>>,
    wants: Wants,
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
    _acceptor: Option<Acceptor>,
}

impl Host {
    /// Joins the distribution whose root is at `options.root`.
    ///
    /// # Errors
    /// A thread could not be started. [`wait`](Self::wait) returns later errors.
    pub fn join(
        fabric: Arc<dyn Fabric>,
        multicast: Option<Arc<dyn Multicast>>,
        target: Box<dyn Target>,
        options: HostOptions,
    ) -> Result<Self, SpreadError> {
        let inbox = Arc::new(Inbox::new()?);
        let wants = Wants::new(inbox.fd())?;
        let shared: Arc<Shared> = Arc::default();
        let to = Arc::clone(&inbox);
        let take = move |incoming| to.push(HostEvent::Incoming(incoming));
        let acceptor = options.listens.then(|| Acceptor::start(Arc::clone(&fabric), take)).transpose()?;
        let (events, state, wanted) = (Arc::clone(&inbox), Arc::clone(&shared), wants.clone());
        let run = move |_| {
            let inputs = Inputs { inbox: &events, wants: &wanted };
            let result = HostThread::begin(&fabric, multicast, target, options, inputs, &state)
                .and_then(HostThread::run);
            let mut state_now = state.0.lock().unwrap_or_else(PoisonError::into_inner);
            state_now.0.ended = true;
            state_now.1 = result.err();
            state.1.notify_all();
        };
        let thread = prompt("vmove-spread-h").spawn(run);
        let thread = Some(thread.map_err(SpreadError::io("start a thread"))?);
        Ok(Self { inbox, wants, shared, thread, _acceptor: acceptor })
    }

    /// What asks for chunks that something here waits for.
    #[must_use]
    pub fn wants(&self) -> Wants {
        self.wants.clone()
    }

    /// How far it is.
    #[must_use]
    pub fn status(&self) -> HostStatus {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// Waits until everything is here.
    ///
    /// # Errors
    /// Why it will never be; [`SpreadError::Timeout`].
    pub fn wait(&self, timeout: Duration) -> Result<HostStatus, SpreadError> {
        let (state, changed) = &*self.shared;
        let guard = state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = changed.wait_timeout_while(guard, timeout, |(status, error)| {
            error.is_none() && status.took.is_none() && !status.ended
        });
        let mut guard = waited.unwrap_or_else(PoisonError::into_inner).0;
        if guard.0.took.is_some() {
            return Ok(guard.0.clone());
        }
        let waited_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        Err(guard.1.take().unwrap_or(SpreadError::Timeout { waited_ms, missing: guard.0.missing }))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.inbox.push(HostEvent::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
