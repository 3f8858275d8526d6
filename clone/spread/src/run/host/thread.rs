//! The thread of a host: it receives, reads, verifies and passes on.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use vmove_fabric::{
    Access, Fabric, FabricError, FabricKind, Incoming, LocalSlice, Multicast, MulticastReceiver, PeerAddress,
    ServeHandle, Sink, ThreadOptions,
};

use super::join::{Joined, dial, said};
use super::reader::{Reader, SEGMENTS};
use super::wants::Wants;
use super::{HostEvent, HostOptions, HostStatus, Shared, Target};
use crate::error::SpreadError;
use crate::host::HostEngine;
use crate::host_id::HostId;
use crate::message::{Greeting, Message};
use crate::pace::Time;
use crate::run::control::Control;
use crate::run::inbox::Inbox;
use crate::run::wait;
use crate::template::Copy;

/// READs under way from one source.
const DEPTH: usize = 4;
/// READs under way for chunks that something waits for.
const URGENT: usize = 64;
/// Chunks verified before anything else is looked at again.
const VERIFIED_AT_ONCE: usize = 512;

/// The inputs of the thread: messages of other hosts, and wanted chunks of this host.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub(super) inbox: &'a Arc<Inbox<HostEvent>>,
    pub(super) wants: &'a Wants,
}

/// What the thread of a host works with.
pub(super) struct HostThread<'a> {
    target: Box<dyn Target>,
    me: HostId,
    at: PeerAddress,
    kind: FabricKind,
    second: Option<Arc<dyn Fabric>>,
    left: Option<String>,
    inputs: Inputs<'a>,
    shared: &'a Shared,
    begin: Instant,
    engine: HostEngine,
    copy: Copy,
    root: Control,
    /// Hosts that this one reads from, and hosts that read from it.
    peers: Vec<Control>,
    /// For chunks that something waits for.
    urgent: Reader,
    readers: BTreeMap<HostId, Reader>,
    receiver: Option<Box<dyn MulticastReceiver>>,
    served: Vec<ServeHandle>,
    took: Option<Duration>,
}

/// Where datagrams go.
struct Landing<'a> {
    engine: &'a mut HostEngine,
    copy: &'a Copy,
}

impl Sink for Landing<'_> {
    fn place(&mut self, immediate: u32, len: usize) -> Option<LocalSlice> {
        if !self.engine.accepts(immediate) {
            return None;
        }
        let place = self.engine.layout().place_of_piece(immediate);
        if place.len as usize == len { self.copy.slice(place) } else { None }
    }

    fn landed(&mut self, immediate: u32) {
        self.engine.landed(immediate);
    }
}

impl<'a> HostThread<'a> {
    pub(super) fn begin(
        fabric: &Arc<dyn Fabric>,
        multicast: Option<Arc<dyn Multicast>>,
        mut target: Box<dyn Target>,
        options: HostOptions,
        inputs: Inputs<'a>,
        shared: &'a Shared,
    ) -> Result<Self, SpreadError> {
        let HostOptions { me, root: at, mut second, .. } = options;
        let (mut fabric, mut left) = (Arc::clone(fabric), None);
        let first = Joined::begin(&*fabric, multicast, &mut *target, me, &at);
        let (joined, copy) = match (first, second.is_some()) {
            (Err(error), true) => {
                left = Some(said(&error));
                fabric = second.take().expect("looked at");
                Joined::begin(&*fabric, None, &mut *target, me, &at)?
            }
            (first, _) => first?,
        };
        let Joined { root, welcome, rest, receiver, urgent, reads, begin } = joined;
        // A host that cannot hear the group misses all of it, and is told to read.
        let by_multicast = welcome.group.is_some();
        let engine = HostEngine::new(welcome.layout, welcome.route, by_multicast, begin.elapsed());
        let engine = if receiver.is_none() { engine.deaf() } else { engine };
        for (peer, address) in welcome.peers {
            dial(&fabric, inputs.inbox, HostEvent::Dialled, me, peer, address)?;
        }
        let mut runner = Self {
            target,
            me,
            at,
            kind: fabric.kind(),
            second,
            left,
            inputs,
            shared,
            begin,
            engine,
            copy,
            root,
            peers: Vec::new(),
            urgent,
            readers: BTreeMap::from([(HostId::ROOT, reads)]),
            receiver,
            served: Vec::new(),
            took: None,
        };
        rest.into_iter().for_each(|message| runner.engine.hear(begin.elapsed(), message));
        Ok(runner)
    }

    fn now(&self) -> Time {
        self.begin.elapsed()
    }

    pub(super) fn run(mut self) -> Result<(), SpreadError> {
        loop {
            match self.round() {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => self.rejoin(error)?,
            }
        }
    }

    /// Goes on by the second fabric, if it was the first one's path that died: what is here stays, the rest comes by that.
    fn rejoin(&mut self, error: SpreadError) -> Result<(), SpreadError> {
        let of_path = |e: &SpreadError| {
            matches!(e, SpreadError::RootGone { .. } | SpreadError::Refused { .. } | SpreadError::Fabric(_))
        };
        let Some(fabric) = self.second.take().filter(|_| of_path(&error)) else { return Err(error) };
        let why = said(&error);
        tracing::warn!(%why, by = %fabric.kind(), "the path to the root has died, another is tried");
        let (mut root, welcome, rest) = match Joined::enter(&*fabric, self.me, &self.at) {
            Ok(entered) => entered,
            // The root itself is gone.
            Err(_) => return Err(error),
        };
        if welcome.layout != *self.engine.layout() {
            let what = "another template than before".to_owned();
            return Err(SpreadError::Protocol { from: HostId::ROOT, what });
        }
        let (urgent, reads) = Joined::readers(&*fabric, self.me, &self.at, &welcome)?;
        self.leave_first(urgent, reads);
        // Only now: no device writes to it any more.
        self.copy.regions = self.target.regions(&*fabric, &welcome.layout)?;
        self.copy.table.move_to(&*fabric, Access::REMOTE_READ)?;
        root.send(&Message::Ready { hears: false });
        (self.root, self.kind, self.left) = (root, fabric.kind(), Some(why));
        self.engine.rejoined();
        let now = self.now();
        rest.into_iter().for_each(|message| self.engine.hear(now, message));
        Ok(())
    }

    /// Ends every connection of the first fabric, whose READs count as failed.
    fn leave_first(&mut self, urgent: Reader, reads: Reader) {
        let now = self.now();
        self.receiver = None;
        self.served.clear();
        self.peers.clear();
        let urgent = std::mem::replace(&mut self.urgent, urgent);
        let readers = std::mem::replace(&mut self.readers, BTreeMap::from([(HostId::ROOT, reads)]));
        for reader in readers.into_values().chain([urgent]) {
            let source = reader.source;
            for pieces in reader.into_lost() {
                self.engine.read_done(now, source, &pieces, false);
            }
            self.engine.gone(source);
        }
    }

    /// Whether to go on.
    fn round(&mut self) -> Result<bool, SpreadError> {
        for event in self.inputs.inbox.take() {
            match event {
                HostEvent::Incoming(incoming) => self.take(incoming),
                HostEvent::Dialled(peer, Ok(connections)) => {
                    let (control, reader) = *connections;
                    if control.endpoint.kind() != self.kind {
                        self.engine.gone(peer); // dialled before the first fabric was left
                        continue;
                    }
                    self.peers.push(control);
                    self.readers.insert(peer, reader);
                }
                HostEvent::Dialled(peer, Err(error)) => self.lose(peer, &error),
                HostEvent::Stop => return Ok(false),
            }
        }
        // After the inbox, whose descriptor tells of these, too.
        while let Some((region, offset)) = self.inputs.wants.next() {
            if let Some(chunk) = self.engine.layout().chunk_at(region, offset) {
                self.engine.want(self.begin.elapsed(), chunk);
            }
        }
        if self.root.peer == HostId::ROOT {
            self.hear_root()?;
        }
        self.hear_peers();
        let drained = self.receive()?;
        self.reap()?;
        let verifying = self.verify()?;
        let now = self.now();
        if drained {
            self.engine.drained(now);
        }
        self.engine.check(now);
        self.ask()?;
        for message in self.engine.take_out() {
            self.root.send(&message);
        }
        self.pass_on();
        self.publish();
        if drained && !verifying {
            self.sleep()?;
        }
        Ok(true)
    }

    fn root_gone(&self, source: FabricError) -> SpreadError {
        let chunks = self.engine.layout().chunks();
        SpreadError::RootGone { missing: self.engine.missing_chunks(), chunks, source }
    }

    fn hear_root(&mut self) -> Result<(), SpreadError> {
        let mut messages = Vec::new();
        let result = self.root.poll(&mut messages);
        for message in messages {
            self.engine.hear(self.begin.elapsed(), message);
        }
        match result {
            Err(_) if self.engine.is_complete() => {
                // It is not needed any more; others may still read from here.
                self.root.peer = self.me;
                Ok(())
            }
            Err(error) => Err(self.root_gone(error)),
            Ok(()) => Ok(()),
        }
    }

    fn hear_peers(&mut self) {
        let (mut messages, mut lost) = (Vec::new(), Vec::new());
        for control in &mut self.peers {
            let result = control.poll(&mut messages);
            for message in messages.drain(..) {
                match message {
                    Message::Regions(regions) => {
                        let expected = self.copy.regions.len() + 1;
                        let reader = self.readers.get_mut(&control.peer);
                        reader
                            .filter(|_| regions.len() == expected)
                            .into_iter()
                            .for_each(|reader| reader.set_regions(regions.clone()));
                    }
                    Message::Have { blocks } => {
                        self.engine.peer_has(self.begin.elapsed(), control.peer, &blocks);
                    }
                    _ => {}
                }
            }
            if let Err(error) = result {
                lost.push((control.peer, error));
            }
        }
        for (peer, error) in lost {
            self.lose(peer, &error);
        }
    }

    /// A peer has left, either a source or a reader.
    fn lose(&mut self, peer: HostId, error: &FabricError) {
        tracing::info!(%peer, %error, "a peer has gone");
        self.peers.retain(|control| control.peer != peer);
        let now = self.now();
        if let Some(reader) = self.readers.remove(&peer) {
            for pieces in reader.into_lost() {
                self.engine.read_done(now, peer, &pieces, false);
            }
        }
        self.engine.gone(peer);
    }

    /// Takes datagrams. Whether there are no more.
    fn receive(&mut self) -> Result<bool, SpreadError> {
        let Some(receiver) = &mut self.receiver else { return Ok(true) };
        for _ in 0..4 {
            let mut landing = Landing { engine: &mut self.engine, copy: &self.copy };
            if receiver.poll(&mut landing)? == 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Takes READs that have ended.
    fn reap(&mut self) -> Result<(), SpreadError> {
        let now = self.begin.elapsed();
        let (mut refused, mut lost) = (None, Vec::new());
        let engine = &mut self.engine;
        for reader in self.readers.values_mut().chain([&mut self.urgent]) {
            let source = reader.source;
            let result = reader.poll(&self.copy, |pieces, status| {
                engine.read_done(now, source, pieces, status.is_ok());
                refused = refused.or(status.err().filter(|_| source == HostId::ROOT));
            });
            if let Err(error) = result {
                lost.push((source, error));
            }
        }
        if let Some(status) = refused {
            return Err(SpreadError::Refused { status });
        }
        for (source, error) in lost {
            if source != HostId::ROOT {
                self.lose(source, &error);
            } else if !self.engine.is_complete() {
                return Err(self.root_gone(error));
            }
        }
        Ok(())
    }

    /// Compares what has arrived with its checksums. Whether there is more.
    fn verify(&mut self) -> Result<bool, SpreadError> {
        for _ in 0..VERIFIED_AT_ONCE {
            let Some(chunk) = self.engine.next_to_verify() else { return Ok(false) };
            let right = self.copy.is_right(self.engine.layout(), chunk);
            self.engine.compared(chunk, right);
            if self.engine.is_hopeless() {
                return Err(SpreadError::Wrong { wrong: self.engine.totals.wrong });
            }
            let place = self.engine.layout().place_of_chunk(chunk);
            if let (true, Some(region)) = (right, place.region) {
                self.target.landed(region, place.offset);
            }
        }
        Ok(true)
    }

    /// Posts READs.
    fn ask(&mut self) -> Result<(), SpreadError> {
        let mut lost = Vec::new();
        while self.urgent.has_room(URGENT) {
            let Some(pieces) = self.engine.next_urgent() else { break };
            self.urgent.read(self.engine.layout(), &self.copy, pieces)?;
        }
        // What somebody waits for is not to wait behind more than one READ on the wire.
        let most = if self.urgent.is_idle() { DEPTH } else { 1 };
        for reader in self.readers.values_mut() {
            while reader.has_room(most) {
                let Some(pieces) = self.engine.next_read(reader.source, SEGMENTS) else { break };
                if let Err(error) = reader.read(self.engine.layout(), &self.copy, pieces.clone()) {
                    lost.push((reader.source, pieces, error));
                    break;
                }
            }
        }
        for (source, pieces, error) in lost {
            self.engine.read_done(self.begin.elapsed(), source, &pieces, false);
            if source == HostId::ROOT {
                return Err(self.root_gone(error));
            }
            self.lose(source, &error);
        }
        let readers = self.readers.values_mut().chain([&mut self.urgent]);
        readers.for_each(|reader| drop(reader.endpoint.flush())); // `poll` tells of an error
        Ok(())
    }

    /// Tells peers what is here now.
    fn pass_on(&mut self) {
        let blocks = self.engine.take_finished();
        if !blocks.is_empty() {
            let message = Message::Have { blocks };
            self.peers.iter_mut().for_each(|control| control.send(&message));
        }
        // The next `poll` tells of an error.
        self.peers.iter_mut().for_each(|control| drop(control.flush()));
        if self.root.peer == HostId::ROOT {
            drop(self.root.flush());
        }
    }

    /// A peer that asks to read from this host.
    fn take(&mut self, incoming: Incoming) {
        if incoming.endpoint.kind() != self.kind {
            // It reads from the root instead.
            return tracing::info!(kind = %incoming.endpoint.kind(), "a peer of another fabric is not served");
        }
        match postcard::from_bytes(&incoming.greeting) {
            Ok(Greeting::Control { from }) => {
                let mut control = Control::new(from, incoming.endpoint);
                control.send(&Message::Regions(self.copy.remotes()));
                control.send(&Message::Have { blocks: self.engine.whole_blocks() });
                self.peers.push(control);
            }
            Ok(Greeting::Reads { .. }) => {
                match incoming.endpoint.serve(ThreadOptions::bulk("vmove-spread-r")) {
                    Ok(handle) => self.served.push(handle),
                    Err(error) => tracing::warn!(%error, "a connection for READs is dropped"),
                }
            }
            Err(_) => tracing::warn!("a connection with an unknown greeting is dropped"),
        }
    }

    fn publish(&mut self) {
        if self.took.is_none() && self.engine.is_complete() {
            self.took = Some(self.now());
        }
        let (state, changed) = self.shared;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 = HostStatus {
            chunks: self.engine.layout().chunks(),
            missing: self.engine.missing_chunks(),
            totals: self.engine.totals,
            multicast: self.receiver.as_ref().map(|r| r.counters().read()).unwrap_or_default(),
            took: self.took,
            fabric: Some(self.kind),
            left: self.left.clone(),
            ended: false,
        };
        changed.notify_all();
    }

    fn sleep(&self) -> Result<(), SpreadError> {
        let now = self.now();
        let until =
            self.engine.next_time().map_or(Duration::from_millis(100), |time| time.saturating_sub(now));
        let mut fds: Vec<(BorrowedFd<'_>, bool)> = vec![(self.inputs.inbox.fd(), false)];
        fds.extend(self.receiver.iter().map(|receiver| (receiver.wait_fd(), false)));
        let root = (self.root.peer == HostId::ROOT).then_some(&self.root);
        let controls = self.peers.iter().chain(root).map(|control| &control.endpoint);
        let readers = self.readers.values().chain([&self.urgent]);
        // Once everything is here the root's end is no news.
        let readers =
            readers.filter(|reader| reader.endpoint.outstanding() > 0 || !self.engine.is_complete());
        let endpoints = controls.chain(readers.map(|reader| &reader.endpoint));
        fds.extend(endpoints.map(|endpoint| (endpoint.wait_fd(), endpoint.wants_write())));
        wait(&fds, until.clamp(Duration::from_micros(100), Duration::from_millis(100)))
    }
}
