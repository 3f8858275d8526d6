//! The thread of the root: it sends, marks and answers.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use vmove_fabric::{Class, Group, Incoming, MulticastSender, Outgoing, ServeHandle, ThreadOptions};

use super::{HostState, RootEvent, RootOptions, Shared};
use crate::error::SpreadError;
use crate::host_id::HostId;
use crate::message::{Greeting, Message, Welcome};
use crate::pace::{Pacer, Time};
use crate::root::{RootEngine, Sizes, Step};
use crate::route::Route;
use crate::run::control::Control;
use crate::run::inbox::Inbox;
use crate::run::wait;
use crate::template::Template;

/// Timeout for hosts that were admitted together to receive the group.
const HEAR_TIMEOUT: Duration = Duration::from_millis(500);

/// What the thread of the root works with.
pub(super) struct RootThread {
    inbox: Arc<Inbox<RootEvent>>,
    shared: Arc<Shared>,
    group: Option<Group>,
    template: Template,
    options: RootOptions,
    sender: Option<Box<dyn MulticastSender>>,
    engine: RootEngine,
    begin: Instant,
    controls: Vec<Control>,
    /// While hosts are gathered: when the first came.
    gathering: Option<Option<Time>>,
    /// Hosts that are ready and wait for others, and whether they receive the group.
    ready: Vec<(HostId, bool)>,
    /// When sending begins at the latest, once a host is ready.
    begins: Option<Time>,
    served: Vec<ServeHandle>,
    states: BTreeMap<HostId, HostState>,
}

impl RootThread {
    pub(super) fn new(
        inbox: Arc<Inbox<RootEvent>>,
        shared: Arc<Shared>,
        template: Template,
        options: RootOptions,
        group: Option<Group>,
        sender: Option<Box<dyn MulticastSender>>,
    ) -> Self {
        let layout = template.layout().clone();
        let engine = RootEngine::new(layout, sender.is_some(), Pacer::new(options.rate), Sizes::default());
        Self {
            inbox,
            shared,
            group,
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
        }
    }

    fn now(&self) -> Time {
        self.begin.elapsed()
    }

    pub(super) fn run(mut self) {
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
                RootEvent::Incoming(incoming) => self.take(incoming),
                RootEvent::Stop => return Ok(false),
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

    /// Admits the gathered hosts, and begins to send when they receive the group.
    fn gather(&mut self) {
        let now = self.now();
        if let Some(Some(first)) = self.gathering
            && (self.controls.len() >= self.options.expected || now >= first + self.options.gather)
        {
            self.gathering = None;
            let ids: Vec<HostId> = self.controls.iter().map(|control| control.peer).collect();
            ids.into_iter().for_each(|id| self.welcome(id));
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

    /// Handles the hosts' messages. Returns whether there were any.
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
                        self.begins.get_or_insert(now + HEAR_TIMEOUT);
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
