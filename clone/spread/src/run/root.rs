//! The root: a thread that sends, marks and answers.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vmove_fabric::{
    Class, Fabric, Group, Incoming, Multicast, MulticastCounters, MulticastSender, Outgoing, PeerAddress,
    ServeHandle, ThreadOptions,
};

use super::control::Control;
use super::inbox::Inbox;
use super::{Acceptor, prompt, wait};
use crate::error::SpreadError;
use crate::message::{Greeting, HostId, Message, Welcome};
use crate::pace::{Pacer, Time};
use crate::root::{RootEngine, RootTotals, Sizes, Step};
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
    /// Hosts are let in when so many are there, so that they begin together; more may come later.
    pub expected: usize,
    /// Or when so much time has passed since the first came.
    pub gather: Duration,
}

/// How long hosts that were let in together are waited for until they hear the group.
const HEAR: Duration = Duration::from_millis(500);

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

#[derive(Debug)]
enum Event {
    Incoming(Incoming),
    Stop,
}

/// A template that is being spread. Dropping it ends that: hosts that miss something see that the root is gone.
#[derive(Debug)]
pub struct Root {
    inbox: Arc<Inbox<Event>>,
    shared: Arc<(Mutex<RootStatus>, Condvar)>,
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
        let shared = Arc::new((Mutex::new(RootStatus::default()), Condvar::new()));
        let sender = multicast.map(|(multicast, group)| multicast.sender(&group)).transpose()?;
        let layout = template.layout().clone();
        let engine = RootEngine::new(layout, sender.is_some(), Pacer::new(options.rate), Sizes::default());
        let runner = Runner {
            inbox: Arc::clone(&inbox),
            shared: Arc::clone(&shared),
            group: multicast.map(|(_, group)| group),
            template,
            options,
            sender,
            engine,
            begin: Instant::now(),
            controls: Vec::new(),
            gathering: Some(None),
            ready: Vec::new(),
            begins: None,
            served: Vec::new(),
            states: BTreeMap::new(),
        };
        let thread = prompt("vmove-spread").spawn(move |_| runner.run());
        let thread = Some(thread.map_err(SpreadError::io("start a thread"))?);
        let to = Arc::clone(&inbox);
        let acceptor = Acceptor::start(fabric, move |incoming| to.push(Event::Incoming(incoming)))?;
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
        self.inbox.push(Event::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Runner {
    inbox: Arc<Inbox<Event>>,
    shared: Arc<(Mutex<RootStatus>, Condvar)>,
    group: Option<Group>,
    template: Template,
    options: RootOptions,
    sender: Option<Box<dyn MulticastSender>>,
    engine: RootEngine,
    begin: Instant,
    controls: Vec<Control>,
    /// While hosts are gathered: when the first came.
    gathering: Option<Option<Time>>,
    /// Hosts that can begin and wait for others to, and whether they hear the group.
    ready: Vec<(HostId, bool)>,
    /// When sending begins at the latest, once a host is ready.
    begins: Option<Time>,
    served: Vec<ServeHandle>,
    states: BTreeMap<HostId, HostState>,
}

impl Runner {
    fn now(&self) -> Time {
        self.begin.elapsed()
    }

    fn run(mut self) {
        let failed = loop {
            match self.round() {
                Ok(true) => {}
                Ok(false) => break None,
                Err(error) => break Some(error.to_string()),
            }
        };
        if let Some(error) = &failed {
            tracing::error!(%error, "the template is not spread any more");
        }
        self.publish(failed);
    }

    /// Whether to go on.
    fn round(&mut self) -> Result<bool, SpreadError> {
        for event in self.inbox.take() {
            match event {
                Event::Incoming(incoming) => self.take(incoming),
                Event::Stop => return Ok(false),
            }
        }
        self.listen();
        self.gather();
        let until = match self.engine.step(self.now()) {
            Step::Send(pieces) => {
                self.send(&pieces);
                Some(self.now())
            }
            Step::At(time) => Some(time),
            Step::Idle => None,
        };
        for (id, message) in self.engine.take_out() {
            if let Some(control) = self.controls.iter_mut().find(|control| control.peer == id) {
                control.send(&message);
            }
        }
        let heard = self.listen();
        self.publish(None);
        if heard {
            // Somebody may wait for the answer.
            return Ok(true);
        }
        let idle = if self.gathering.is_some() || !self.ready.is_empty() { 5 } else { 200 };
        let nap = until.map_or(Duration::from_millis(idle), |time| time.saturating_sub(self.now()));
        if !nap.is_zero() {
            let fds: Vec<(BorrowedFd<'_>, bool)> = self
                .controls
                .iter()
                .map(|control| (control.endpoint.wait_fd(), control.endpoint.wants_write()))
                .chain([(self.inbox.fd(), false)])
                .collect();
            wait(&fds, nap)?;
        }
        Ok(true)
    }

    /// A connection.
    fn take(&mut self, incoming: Incoming) {
        match postcard::from_bytes(&incoming.greeting) {
            Ok(Greeting::Control { from }) if from != HostId::ROOT => self.join(from, incoming),
            Ok(Greeting::Reads { .. }) => {
                let options = match incoming.class {
                    Class::Urgent => ThreadOptions::urgent("vmove-spread-u"),
                    _ => ThreadOptions::bulk("vmove-spread-r"),
                };
                match incoming.endpoint.serve(options) {
                    Ok(handle) => self.served.push(handle),
                    Err(error) => tracing::warn!(%error, "a connection for READs is dropped"),
                }
            }
            _ => tracing::warn!("a connection with an unknown greeting is dropped"),
        }
    }

    fn join(&mut self, id: HostId, incoming: Incoming) {
        // A host that comes again has lost its earlier connection.
        self.lose(id);
        self.controls.push(Control::new(id, incoming.endpoint));
        self.states.insert(id, HostState::Fetching);
        match &mut self.gathering {
            None => self.welcome(id),
            Some(first) => *first = first.or(Some(self.begin.elapsed())),
        }
    }

    /// Lets hosts in that were gathered, and begins to send when they hear it.
    fn gather(&mut self) {
        let now = self.now();
        if let Some(Some(first)) = self.gathering {
            if self.controls.len() >= self.options.expected || now >= first + self.options.gather {
                self.gathering = None;
                let ids: Vec<HostId> = self.controls.iter().map(|control| control.peer).collect();
                ids.into_iter().for_each(|id| self.welcome(id));
            }
        }
        let all = self.ready.len() >= self.controls.len();
        if self.begins.is_some_and(|latest| all || now >= latest) {
            let ready = std::mem::take(&mut self.ready);
            ready.into_iter().for_each(|(id, hears)| self.engine.joined(now, id, hears));
            self.begins = Some(Time::ZERO); // who comes later begins at once
        }
    }

    fn welcome(&mut self, id: HostId) {
        let route = self.options.routes.get(&id).cloned().unwrap_or_else(|| Route::from_root(id));
        let sources = route.sources();
        let peers = self.options.addresses.iter().filter(|(peer, _)| sources.contains(peer));
        let control = self.controls.iter().find(|control| control.peer == id);
        let Some(regions) = control.and_then(|control| self.template.remotes(control.endpoint.kind())) else {
            tracing::warn!(host = %id, "a host came by a fabric that this template is not offered by");
            return self.lose(id);
        };
        let welcome = Welcome {
            layout: self.template.layout().clone(),
            regions,
            peers: peers.map(|(peer, address)| (*peer, address.clone())).collect(),
            route,
            group: self.group,
        };
        if let Some(control) = self.controls.iter_mut().find(|control| control.peer == id) {
            control.send(&Message::Welcome(Box::new(welcome)));
        }
    }

    fn lose(&mut self, id: HostId) {
        let before = self.controls.len();
        self.controls.retain(|control| control.peer != id);
        if self.controls.len() != before {
            if !self.engine.is_complete(id) {
                self.states.insert(id, HostState::Gone);
            }
            self.ready.retain(|(ready, _)| *ready != id);
            self.engine.left(self.begin.elapsed(), id);
        }
    }

    /// Takes what hosts say. Whether anything was said.
    fn listen(&mut self) -> bool {
        let (mut messages, mut lost) = (Vec::new(), Vec::new());
        let mut heard = false;
        for control in &mut self.controls {
            if let Err(error) = control.poll(&mut messages) {
                tracing::info!(host = %control.peer, %error, "a host has gone");
                lost.push(control.peer);
            }
            heard |= !messages.is_empty();
            for message in messages.drain(..) {
                let now = self.begin.elapsed();
                match message {
                    Message::Ready { hears } if self.group.is_none() => {
                        self.engine.joined(now, control.peer, hears);
                    }
                    Message::Ready { hears } => {
                        self.ready.push((control.peer, hears));
                        self.begins.get_or_insert(now + HEAR);
                    }
                    message => self.engine.hear(now, control.peer, message),
                }
            }
            if self.engine.is_complete(control.peer) {
                self.states.insert(control.peer, HostState::Complete);
            }
        }
        for id in lost {
            self.lose(id);
        }
        heard
    }

    /// Sends pieces to all. If that cannot be done any more they count as lost, and hosts read them.
    fn send(&mut self, pieces: &[u32]) {
        let Some(sender) = &mut self.sender else { return };
        if let Err(error) = send(&mut **sender, &self.template, pieces) {
            tracing::warn!(%error, "no more datagrams are sent: hosts read what is missing");
            self.sender = None;
        }
    }

    fn publish(&mut self, failed: Option<String>) {
        let (status, changed) = &*self.shared;
        let mut status = status.lock().unwrap_or_else(PoisonError::into_inner);
        status.hosts.clone_from(&self.states);
        status.totals = self.engine.totals;
        status.rate = self.engine.rate();
        if let Some(sender) = &self.sender {
            status.multicast = sender.counters().read();
        }
        status.read_bytes = self.served.iter().map(|served| served.counters().bytes_sent).sum();
        status.failed = failed;
        changed.notify_all();
    }
}

fn send(sender: &mut dyn MulticastSender, template: &Template, pieces: &[u32]) -> Result<(), SpreadError> {
    let layout = template.layout();
    let outgoing: Vec<Outgoing> = pieces
        .iter()
        .filter_map(|piece| {
            let payload = template.slice(layout.place_of_piece(*piece))?;
            Some(Outgoing { immediate: *piece, payload })
        })
        .collect();
    let begin = Instant::now();
    let mut sent = 0;
    while sent < outgoing.len() {
        sent += sender.send(&outgoing[sent..])?;
        // What an interface does not take for so long is repaired like losses.
        if begin.elapsed() > Duration::from_millis(200) {
            break;
        }
        if sent < outgoing.len() {
            sender.wait(Duration::from_millis(5))?;
        }
    }
    Ok(())
}
