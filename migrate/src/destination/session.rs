//! A session at the destination: one task, one loop over everything that can happen.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use vmove_memory::PageRun;
use vmove_qmp::process::QemuProcess;
use vmove_qmp::switchover::{Destination, StateSender};

use super::attempt::Attempt;
use super::fill::FillEvent;
use super::launch::Launched;
use super::populate::Populating;
use super::room::Room;
use crate::journal::{DestinationRecord, Journal};
use crate::link::{BoxedStream, Link};
use crate::node::Node;
use crate::ownership::{DestinationEvent, DestinationState};
use crate::progress::{GuestPlace, Outcome};
use crate::proto::channel::Channel;
use crate::proto::hello::{Hello, LinkKind, SessionId};
use crate::proto::message::{Hashes, ToDestination, ToSource};
use crate::publish::Publisher;
use crate::throttle::Throttle;

/// A source that says nothing for this long before the hand-over is lost. It pings every second.
const SILENCE: Duration = Duration::from_secs(15);
/// How long the source may take to read why it failed.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How often progress is told.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// A connection for a session, brought by the listener.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub hello: Hello,
    pub link: Link,
}

/// Why the session cannot go on with this peer connection.
#[derive(Debug)]
pub(super) enum End {
    /// The connection or the peer failed. After [`DestinationState::Loaded`] another connection may follow.
    Lost(String),
    /// The source keeps the guest.
    Aborted(String),
    /// Something here failed for good.
    Failed(String),
    /// All done.
    Done,
}

impl From<crate::proto::codec::CodecError> for End {
    fn from(error: crate::proto::codec::CodecError) -> Self {
        Self::Lost(error.to_string())
    }
}

/// Everything a session owns.
pub(super) struct Session {
    pub node: Arc<Node>,
    pub id: SessionId,
    pub journal: Journal<DestinationRecord>,
    pub room: Room,
    pub publisher: Publisher,
    pub attempt: Attempt,
    /// The source was asked for other page connections: what it has named before that is named again.
    pub renewing: bool,
    pub fill_events: mpsc::UnboundedReceiver<FillEvent>,
    pub launching: Option<JoinHandle<Result<Launched, String>>>,
    pub populating: Option<Populating>,
    pub populated: Option<JoinHandle<Result<(), String>>>,
    pub started: Option<oneshot::Receiver<QemuProcess>>,
    pub process: Option<QemuProcess>,
    pub client: Option<vmove_qmp::Client>,
    pub destination: Option<Arc<Destination>>,
    /// A monitor that is being connected to: QEMU may answer only once it has the pages it waits for.
    pub connecting: Option<JoinHandle<Result<vmove_qmp::Client, String>>>,
    /// The guest was given to us and has not been resumed yet, for want of the monitor.
    pub owes_resume: bool,
    pub state_sender: Option<StateSender>,
    pub state_stream: Option<BoxedStream>,
    pub relay: Option<JoinHandle<Result<u64, String>>>,
    pub loading: Option<JoinHandle<Result<(), String>>>,
    pub touched: Vec<(usize, PageRun)>,
    pub round: Option<OpenRound>,
    pub loaded: bool,
    pub told_loaded: bool,
    pub whole_first: bool,
    pub state_bytes: u64,
    pub source_hashes: Vec<Hashes>,
    pub all_hashes: bool,
    pub told_complete: bool,
}

pub(super) struct OpenRound {
    pub number: u32,
    pub began: Instant,
    pub landed_before: u64,
}

impl Session {
    pub(super) fn state(&self) -> DestinationState {
        self.journal.record().state
    }

    /// Asks the ownership machine, writes the answer down, and only then lets the caller act.
    pub(super) fn advance(&mut self, event: DestinationEvent) -> Result<(), End> {
        self.advance_with(event, |_| {})
    }

    /// The same, with what else is to be written down with the new state, in one line of the journal.
    pub(super) fn advance_with(
        &mut self,
        event: DestinationEvent,
        also: impl FnOnce(&mut DestinationRecord),
    ) -> Result<(), End> {
        let next = self.state().step(event).map_err(|e| End::Failed(e.to_string()))?;
        if next != self.state() {
            self.journal
                .update(|r| {
                    also(r);
                    r.state = next;
                })
                .map_err(|e| End::Failed(format!("Could not write the journal: {e}")))?;
        }
        Ok(())
    }

    /// Runs to the end, over as many peer connections as it takes.
    pub(super) async fn run(
        &mut self,
        first: Option<Channel<ToDestination>>,
        arrivals: &mut mpsc::Receiver<Arrival>,
    ) {
        let mut channel = first;
        loop {
            let end = match channel.take() {
                Some(mut open) => self.converse(&mut open, arrivals).await,
                None => match self.wait_for_source(arrivals).await {
                    Some(open) => {
                        channel = Some(open);
                        continue;
                    }
                    None => End::Failed("the daemon is shutting down".to_owned()),
                },
            };
            match self.after(end).await {
                std::ops::ControlFlow::Continue(()) => {}
                std::ops::ControlFlow::Break(()) => return,
            }
        }
    }

    /// Decides what the end of a conversation means for the session.
    async fn after(&mut self, end: End) -> std::ops::ControlFlow<()> {
        use std::ops::ControlFlow::{Break, Continue};
        let owns = self.state().may_run();
        match end {
            End::Done => {
                self.released();
                self.finished();
                return Break(());
            }
            // Once loaded, only the source's word ends the session: it may have given the guest up already.
            End::Lost(why) | End::Failed(why) if self.state() == DestinationState::Loaded => {
                self.wait_on(why);
                return Continue(());
            }
            // It has been told that all is here; should it have missed that, it asks again and is answered from the journal.
            End::Lost(_) if self.told_complete => {
                self.finished();
                return Break(());
            }
            End::Lost(why) if owns => {
                self.wait_on(why);
                return Continue(());
            }
            End::Failed(why) if owns => {
                self.attempt.end();
                let place = GuestPlace::PausedAtDestination;
                self.publisher.fail(why, place, false);
            }
            End::Lost(why) | End::Aborted(why) | End::Failed(why) => {
                let event = DestinationEvent::PeerAborted;
                if let Err(End::Failed(error)) = self.advance(event) {
                    tracing::warn!(session = %self.id, error, "session ends out of order");
                }
                self.undo().await;
                self.publisher.fail(why, GuestPlace::Source, false);
            }
        }
        Break(())
    }

    fn wait_on(&mut self, why: String) {
        tracing::warn!(session = %self.id, why, "source lost; waiting for it");
        self.attempt.end();
        self.publisher.update(|p| p.outcome = Outcome::Reconnecting { error: why });
    }

    /// Waits, however long, for the source to dial again: it alone knows whether the guest was given up.
    async fn wait_for_source(
        &mut self,
        arrivals: &mut mpsc::Receiver<Arrival>,
    ) -> Option<Channel<ToDestination>> {
        loop {
            let arrival = arrivals.recv().await?;
            match (arrival.hello.kind, arrival.link) {
                (LinkKind::Control, Link::Stream(stream)) => return Some(Channel::new(stream)),
                (kind, _) => {
                    tracing::debug!(session = %self.id, ?kind, "connection before the source said where it stands; dropped");
                }
            }
        }
    }

    /// One control connection, to its end.
    async fn converse(
        &mut self,
        channel: &mut Channel<ToDestination>,
        arrivals: &mut mpsc::Receiver<Arrival>,
    ) -> End {
        self.attempt.end();
        self.renewing = false;
        while self.fill_events.try_recv().is_ok() {}
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut heard = Instant::now();
        loop {
            let step = tokio::select! {
                // What follows the regions is for the page readers: it waits until they have their connections.
                message = channel.receive(), if !self.attempt.awaits_connections() => match message {
                    Ok(message) => {
                        let done = self.message(message, channel).await;
                        // Some take long, and what the source says meanwhile waits.
                        heard = Instant::now();
                        done
                    }
                    Err(error) => Err(error.into()),
                },
                Some(arrival) = arrivals.recv() => self.arrival(arrival),
                Some(event) = self.fill_events.recv() => self.fill_event(event, channel).await,
                Ok(process) = started(&mut self.started) => self.process_started(process),
                launched = ended(&mut self.launching) => self.launched(launched, channel).await,
                populated = ended(&mut self.populated) => self.populated(populated, channel).await,
                connected = ended(&mut self.connecting) => self.connected(connected, channel).await,
                loaded = ended(&mut self.loading) => self.state_loaded(loaded, channel).await,
                _ = tick.tick() => self.tick(channel, &mut heard).await,
            };
            match step {
                Ok(()) => {}
                Err(end) => {
                    if let End::Failed(why) = &end {
                        let _ = channel.send(&ToSource::Failed(why.clone())).await;
                        // Closing with messages unread would reset the connection, and the reason with it.
                        let _ = timeout(LAST_WORDS, async { while channel.receive().await.is_ok() {} }).await;
                    }
                    return end;
                }
            }
        }
    }

    async fn tick(&mut self, channel: &mut Channel<ToDestination>, heard: &mut Instant) -> Result<(), End> {
        if self.is_being_given() {
            *heard = Instant::now();
        }
        if heard.elapsed() > SILENCE {
            return Err(End::Lost(format!("nothing heard from the source for {} s", SILENCE.as_secs())));
        }
        self.qemu_lives(channel).await?;
        let counted = self.attempt.counted(&self.room.memory);
        let page = self.room.memory.blocks.first().map_or(4096, |b| b.page_size.bytes());
        let left = self.room.memory.is_serving().then_some(counted.pages_left * page);
        self.publisher.landed(counted.landed_bytes, counted.wire_bytes, left);
        if self.room.memory.is_serving() {
            self.whole(channel).await?;
        }
        channel.send(&ToSource::Progress(counted)).await?;
        Ok(())
    }

    fn arrival(&mut self, arrival: Arrival) -> Result<(), End> {
        match (arrival.hello.kind, arrival.link) {
            (LinkKind::Urgent, Link::Endpoint(endpoint)) => self.attempt.add_urgent(endpoint),
            (LinkKind::Bulk, Link::Endpoint(endpoint)) => self.attempt.add_bulk(endpoint),
            (LinkKind::State, Link::Stream(stream)) => {
                self.state_stream = Some(stream);
                self.start_relay();
            }
            // The source has dialled again before we noticed that the old connection is dead: the new one counts.
            (LinkKind::Control, Link::Stream(_)) => {
                return Err(End::Lost("replaced by a new connection".to_owned()));
            }
            (kind, link) => tracing::warn!(?kind, ?link, "connection of another kind than it said"),
        }
        self.start_attempt()
    }

    pub(super) fn start_attempt(&mut self) -> Result<(), End> {
        if self.is_being_given() {
            return Ok(());
        }
        let limit = self.journal.record().prepare.spec.bandwidth;
        let started = self.attempt.start(&self.room.memory, || Throttle::new(limit));
        started.map(drop).map_err(|e| End::Failed(format!("Could not start the page readers: {e}")))
    }
}

/// Resolves when the task ends; never if there is none. The task is taken out.
pub(super) async fn ended<T>(task: &mut Option<JoinHandle<Result<T, String>>>) -> Result<T, String> {
    match task {
        Some(running) => {
            let result = running.await.unwrap_or_else(|e| Err(e.to_string()));
            *task = None;
            result
        }
        None => std::future::pending().await,
    }
}

async fn started(
    receiver: &mut Option<oneshot::Receiver<QemuProcess>>,
) -> Result<QemuProcess, oneshot::error::RecvError> {
    match receiver {
        Some(waiting) => {
            let result = waiting.await;
            *receiver = None;
            result
        }
        None => std::future::pending().await,
    }
}
