//! One set of page connections and the threads that use them. A lost connection ends the attempt, not the session.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc;
use vmove_fabric::{CountersHandle, Endpoint, FabricKind};

use super::faults::{self, FaultThread};
use super::fill::{Fill, FillEvent};
use super::guest_memory::GuestMemory;
use super::reader::Reader;
use super::remote_memory::RemoteMemory;
use crate::proto::message::Counted;
use crate::throttle::Throttle;
use crate::vmm::PageWorkers;

/// A connection that no thread uses yet. The mutex is locked by nobody else: it makes the session's future `Send`, which a bare endpoint, meant for
/// one thread, would not.
#[derive(Debug)]
struct Idle(Mutex<Box<dyn Endpoint>>);

impl Idle {
    fn is(&self, kind: FabricKind) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).kind() == kind
    }

    fn into_endpoint(self) -> Box<dyn Endpoint> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Page connections as they arrive, and the threads once all are there.
#[derive(Debug)]
pub(super) struct PageConnections {
    remote: Option<Arc<RemoteMemory>>,
    urgent: Option<Idle>,
    bulk: Vec<Idle>,
    wanted_bulk: usize,
    running: Option<Running>,
    /// The source was asked for others: what it has named before that is named again.
    renewing: bool,
    /// Bytes of connections before these.
    earlier_wire_bytes: u64,
    workers: PageWorkers,
    sender: mpsc::UnboundedSender<FillEvent>,
    events: mpsc::UnboundedReceiver<FillEvent>,
}

#[derive(Debug)]
struct Running {
    fill: Arc<Fill>,
    // Joined on drop, after `fill.stop()`.
    readers: Vec<Reader>,
    faults: Option<FaultThread>,
    /// Of a connection that nobody reads from, since nobody serves faults.
    _urgent: Option<Idle>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.fill.stop();
    }
}

impl PageConnections {
    pub(super) fn new(wanted_bulk: u8, workers: PageWorkers) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        Self {
            remote: None,
            urgent: None,
            bulk: Vec::new(),
            wanted_bulk: usize::from(wanted_bulk.max(1)),
            running: None,
            renewing: false,
            earlier_wire_bytes: 0,
            workers,
            sender,
            events,
        }
    }

    /// Ends the threads and drops the connections; the next ones start anew. Blocks for a moment: threads are joined.
    pub(super) fn end(&mut self) {
        self.earlier_wire_bytes = self.wire_bytes();
        self.running = None;
        self.remote = None;
        self.urgent = None;
        self.bulk.clear();
        self.renewing = false;
        // Of threads that have ended.
        while self.events.try_recv().is_ok() {}
    }

    /// As [`Self::end`], where no others will come: what was registered for them is released in the background. For a guest of 1 TiB that is a
    /// million handles, and the guest stands still.
    pub(super) fn end_for_good(&mut self) {
        let fill = self.fill().cloned();
        self.end();
        drop(vmove_node::blocking::spawn_blocking(move || drop(fill)));
    }

    /// As [`Self::end`], and the source is asked for others.
    pub(super) fn renew(&mut self) {
        self.end();
        self.renewing = true;
    }

    /// The source has opened others.
    pub(super) const fn renewed(&mut self) {
        self.renewing = false;
    }

    /// The source was asked for others, and has not opened them yet.
    pub(super) const fn is_renewing(&self) -> bool {
        self.renewing
    }

    /// What the threads tell. Cancel-safe.
    pub(super) async fn next_event(&mut self) -> FillEvent {
        match self.events.recv().await {
            Some(event) => event,
            // Never: we hold a sender.
            None => std::future::pending().await,
        }
    }

    pub(super) fn add_urgent(&mut self, endpoint: Box<dyn Endpoint>) {
        self.urgent = Some(Idle(Mutex::new(endpoint)));
    }

    pub(super) fn add_bulk(&mut self, endpoint: Box<dyn Endpoint>) {
        self.bulk.push(Idle(Mutex::new(endpoint)));
    }

    /// What can be read over the page connections that come now, or have come. Threads of earlier ones end.
    pub(super) fn set_remote(&mut self, remote: Arc<RemoteMemory>) {
        self.earlier_wire_bytes = self.wire_bytes();
        self.running = None;
        self.remote = Some(remote);
    }

    /// Starts the threads once everything is there. Returns whether they run.
    pub(super) fn start(
        &mut self,
        memory: &Arc<GuestMemory>,
        throttle: impl FnOnce() -> Throttle,
    ) -> std::io::Result<bool> {
        if self.running.is_some() {
            return Ok(true);
        }
        let Some(kind) = self.remote.as_ref().map(|remote| remote.kind()) else { return Ok(false) };
        // Those of a fabric that the source tried first are of no use.
        self.bulk.retain(|idle| idle.is(kind));
        if self.bulk.len() < self.wanted_bulk || !self.urgent.as_ref().is_some_and(|idle| idle.is(kind)) {
            return Ok(false);
        }
        let (Some(remote), Some(urgent)) = (self.remote.take(), self.urgent.take()) else {
            return Ok(false);
        };
        let fill = Arc::new(Fill::new(Arc::clone(memory), remote, throttle(), self.sender.clone())?);
        let (faults, urgent) = match self.workers {
            PageWorkers::Threads => (Some(faults::start(&fill, urgent.into_endpoint())?), None),
            PageWorkers::Turns => (None, Some(urgent)),
        };
        let mut running = Running { fill, readers: Vec::new(), faults, _urgent: urgent };
        for (index, endpoint) in self.bulk.drain(..).enumerate() {
            let reader = running.fill.start_reader(index, endpoint.into_endpoint(), self.workers)?;
            running.readers.push(reader);
        }
        self.running = Some(running);
        Ok(true)
    }

    /// The source has named its memory, and connections that it has opened have not all reached us: they come by other tasks.
    pub(super) fn await_connections(&self) -> bool {
        self.running.is_none() && self.remote.is_some()
    }

    /// The shared state of the threads, while they run.
    pub(super) fn fill(&self) -> Option<&Arc<Fill>> {
        self.running.as_ref().map(|r| &r.fill)
    }

    fn wire_bytes(&self) -> u64 {
        let both = |c: &CountersHandle| {
            let c = c.read();
            c.bytes_sent + c.bytes_received
        };
        let running = self.running.as_ref();
        let now: u64 = running.map_or(0, |r| {
            r.readers.iter().map(|reader| both(&reader.counters)).sum::<u64>()
                + r.faults.as_ref().map_or(0, |faults| both(&faults.counters))
        });
        self.earlier_wire_bytes + now
    }

    pub(super) fn counted(&self, memory: &GuestMemory) -> Counted {
        Counted {
            landed_bytes: memory.landed_bytes.load(std::sync::atomic::Ordering::Relaxed),
            wire_bytes: self.wire_bytes(),
            pages_left: if memory.is_serving() { memory.left() } else { 0 },
        }
    }
}
