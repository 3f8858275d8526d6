//! The root, as who spreads a template sees it.

mod thread;

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use vmove_fabric::{Fabric, Group, Incoming, Multicast, MulticastCounters, PeerAddress};

use self::thread::RootThread;
use super::acceptor::Acceptor;
use super::inbox::Inbox;
use super::prompt;
use crate::error::SpreadError;
use crate::host_id::HostId;
use crate::root::RootTotals;
use crate::route::Route;
use crate::template::Template;

/// What the root is to do.
#[derive(Debug, Clone)]
pub struct RootOptions {
    /// Bytes per second of datagrams at most, with all headers.
    pub rate: f64,
    /// From where each host reads; hosts that are not named read from the root.
    pub routes: BTreeMap<HostId, Route>,
    /// Where the hosts listen that others read from.
    pub addresses: BTreeMap<HostId, PeerAddress>,
    /// Number of hosts that the root waits for before it admits them, so that they begin together; more may join later.
    pub expected: usize,
    /// Time after the first host at which the root admits hosts even if some are missing.
    pub gather: Duration,
}

/// How far a host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostState {
    /// It has joined and misses something.
    Fetching,
    /// It has everything.
    Complete,
    /// It went without having everything.
    Gone,
}

/// How far the distribution is.
#[derive(Debug, Clone, Default)]
pub struct RootStatus {
    /// Hosts that have joined so far.
    pub hosts: BTreeMap<HostId, HostState>,
    /// What was sent by multicast.
    pub totals: RootTotals,
    /// The same as the transport counts it.
    pub multicast: MulticastCounters,
    /// Bytes per second of datagrams now.
    pub rate: f64,
    /// Bytes that hosts have read, with the fabric's own headers.
    pub read_bytes: u64,
    /// Why it ended, if it did.
    pub failed: Option<String>,
}

/// What the thread is woken for.
#[derive(Debug)]
enum RootEvent {
    Incoming(Incoming),
    Stop,
}

/// Progress of the thread; notified of each change.
type Shared = (Mutex<RootStatus>, Condvar);

/// A template that is being distributed. Dropping it ends the distribution: incomplete hosts see that the connection to the root ended.
#[derive(Debug)]
pub struct Root {
    inbox: Arc<Inbox<RootEvent>>,
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
    _acceptor: Acceptor,
}

impl Root {
    /// Spreads `template` to all that join. `fabric` must listen; hosts connect there. With `multicast`, datagrams go to that
    /// group; its payload limit must be that of the template.
    ///
    /// # Errors
    /// The group's sender could not be opened; a thread could not be started.
    pub fn start(
        fabric: Arc<dyn Fabric>,
        multicast: Option<(&dyn Multicast, Group)>,
        template: Template,
        options: RootOptions,
    ) -> Result<Self, SpreadError> {
        let inbox = Arc::new(Inbox::new()?);
        let shared: Arc<Shared> = Arc::default();
        let sender = multicast.map(|(multicast, group)| multicast.sender(&group)).transpose()?;
        let group = multicast.map(|(_, group)| group);
        let root = RootThread::new(Arc::clone(&inbox), Arc::clone(&shared), template, options, group, sender);
        let thread = prompt("vmove-spread").spawn(move |_| root.run());
        let thread = Some(thread.map_err(SpreadError::io("start a thread"))?);
        let to = Arc::clone(&inbox);
        let acceptor = Acceptor::start(fabric, move |incoming| to.push(RootEvent::Incoming(incoming)))?;
        Ok(Self { inbox, shared, thread, _acceptor: acceptor })
    }

    /// How far it is.
    #[must_use]
    pub fn status(&self) -> RootStatus {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until `so`, or for `timeout`; the status then.
    pub fn wait_until(&self, timeout: Duration, so: impl Fn(&RootStatus) -> bool) -> RootStatus {
        let (status, changed) = &*self.shared;
        let guard = status.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = changed.wait_timeout_while(guard, timeout, |status| !so(status));
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        self.inbox.push(RootEvent::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
