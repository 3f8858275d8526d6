//! What lives as long as a session at the destination, and what can happen to it in every phase.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, timeout};
use tracing::Instrument as _;

use super::after_wires::AfterWires;
use super::arrived::arrived;
use super::disk_wires::{self, DiskWires};
use super::error::{DestinationError, PageError, PagesLost};
use super::fill::FillEvent;
use super::images;
use super::page_connections::PageConnections;
use super::vm_files::VmFiles;
use crate::devices::arrival;
use crate::frames::Deliveries;
use crate::history::answer_for_ended;
use crate::node::Node;
use crate::owed;
use crate::ownership::{DestinationEvent, DestinationState};
use crate::proto::message::{Stays, ToDestination, ToSource};
use crate::publish::Publisher;
use crate::records::{CalledOff, DestinationRecord};
use crate::throttle::Throttle;
use crate::vmm::QemuHandle;
use vmove_node::journal::Journal;
use vmove_node::peer::codec::CodecError;
use vmove_node::peer::{BoxedStream, Channel, Hello, Link, LinkKind};
use vmove_node::reservations::Reservation;
use vmove_types::problem::chain;
use vmove_types::progress::GuestPlace;

/// A source that says nothing for this long before the hand-over is lost. It pings every second.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the source may take to read why this side failed.
const FAILURE_READ_TIMEOUT: Duration = Duration::from_secs(1);
/// How often progress is told.
pub(super) const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// A connection for a session, brought by the listener.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub hello: Hello,
    pub link: Link,
}

/// Why a phase ends before its time, or its conversation with the source.
#[derive(Debug)]
pub(super) enum End {
    /// The connection or the peer failed. From [`super::loaded::Loaded`] on another connection may follow.
    Lost(Lost),
    /// The source keeps the guest.
    Aborted(Stays),
    /// Something here failed for good.
    Failed(DestinationError),
}

/// How the source was lost.
#[derive(Debug, thiserror::Error)]
pub(super) enum Lost {
    #[error(transparent)]
    Connection(#[from] CodecError),
    #[error("nothing heard from the source for {} s", SILENCE_TIMEOUT.as_secs())]
    Silence,
    #[error("the source has opened a new connection")]
    Replaced,
}

impl From<CodecError> for End {
    fn from(error: CodecError) -> Self {
        Self::Lost(error.into())
    }
}

impl<E: Into<DestinationError>> From<E> for End {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl End {
    /// The guest stays at the source for this.
    pub(super) fn stays(self) -> Stays {
        match self {
            Self::Aborted(stays) => stays,
            other => other.why().into(),
        }
    }

    /// For the operator and the source.
    pub(super) fn why(&self) -> String {
        match self {
            Self::Lost(lost) => chain(lost),
            Self::Aborted(stays) => stays.why.clone(),
            Self::Failed(error) => chain(error),
        }
    }
}

/// What lives as long as the session, whatever phase it is in.
#[derive(Debug)]
pub(super) struct Session {
    pub node: Arc<Node>,
    pub journal: Journal<DestinationRecord>,
    pub publisher: Publisher,
    /// Folder, RAM files and page tables of the VM.
    pub files: VmFiles,
    /// Memory that the guest may still take: others are not promised it.
    pub room: Reservation,
    pub pages: PageConnections,
    pub arrivals: mpsc::Receiver<Arrival>,
    /// Of frames that came to the source.
    pub deliveries: Deliveries,
    /// The source's QEMU writes to the disks of ours by these.
    pub disks: DiskWires,
    /// Our QEMU reads the source's images by these, if disks follow the guest.
    pub after: AfterWires,
}

/// What ends the time without a source.
#[derive(Debug)]
pub(super) enum Waited {
    /// It has dialled again.
    Source(Control),
    /// An operator no longer waits for it.
    Abandoned,
    /// Our QEMU has ended.
    QemuEnded(DestinationError),
    DaemonEnds,
}

/// The control connection that there is now.
#[derive(Debug)]
pub(super) struct Control {
    messages: Messages,
    tick: Interval,
}

/// What the source says.
#[derive(Debug)]
struct Messages {
    channel: Channel<ToDestination>,
    heard: Instant,
    /// Came while a round was read, and is to be dealt with after it.
    later: Option<ToDestination>,
}

/// What a phase must deal with.
#[derive(Debug)]
pub(super) enum Event {
    /// From the source; not one of those that [`Session::common_message`] deals with.
    Message(ToDestination),
    /// A page connection was opened.
    PageConnection,
    /// The connection that carries the device state.
    DeviceState(BoxedStream),
    /// A connection for frames that come to the source.
    Frames(BoxedStream),
    /// Page connections failed.
    PagesLost(PagesLost),
    /// Pages cannot be landed or mapped any more.
    PagesFailed(PageError),
    /// Perhaps no page is missing any more.
    NothingLeft,
    /// Every [`PROGRESS_INTERVAL`].
    Tick,
}

impl Control {
    pub(super) fn new(channel: Channel<ToDestination>) -> Self {
        let mut tick = interval(PROGRESS_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { messages: Messages { channel, heard: Instant::now(), later: None }, tick }
    }

    /// The next message while a round is read: none once there was one that is for [later](Self::put_back). Cancel-safe.
    pub(super) async fn receive_meanwhile(&mut self) -> Result<ToDestination, CodecError> {
        if self.messages.later.is_some() {
            return std::future::pending().await;
        }
        self.messages.next().await
    }

    /// A message that is dealt with when the round has been read.
    pub(super) fn put_back(&mut self, message: ToDestination) {
        self.messages.later = Some(message);
    }

    pub(super) async fn send(&mut self, message: &ToSource) -> Result<(), CodecError> {
        self.messages.channel.send(message).await
    }

    /// What was just done took long, and what the source has said meanwhile waits to be read.
    pub(super) fn count_silence_anew(&mut self) {
        self.messages.heard = Instant::now();
    }

    /// The end of a session before the hand-over, of which the source is told. One that calls it off closes its page connections, too, and these may
    /// be seen to end before its word is read.
    pub(super) async fn farewell(&mut self, end: End) -> End {
        if matches!(end, End::Aborted(_)) {
            return end;
        }
        self.send_failure(&end).await;
        self.cancelled().await.map_or(end, End::Aborted)
    }

    /// Tells the source why this side cannot go on.
    pub(super) async fn tell_failure(&mut self, end: &End) {
        if self.send_failure(end).await {
            // Closing with messages unread would reset the connection, and the reason with it.
            self.cancelled().await;
        }
    }

    /// Whether there was something to tell.
    async fn send_failure(&mut self, end: &End) -> bool {
        let failed = matches!(end, End::Failed(_));
        if failed {
            let _ = self.send(&ToSource::Failed(end.why())).await;
        }
        failed
    }

    /// Reads what the source has said until it closes: perhaps that somebody has called it off.
    async fn cancelled(&mut self) -> Option<Stays> {
        let unread = async {
            loop {
                match self.messages.next().await {
                    Ok(ToDestination::Abort(stays)) if stays.cancelled => return Some(stays),
                    Ok(_) => {}
                    Err(_) => return None,
                }
            }
        };
        timeout(FAILURE_READ_TIMEOUT, unread).await.ok().flatten()
    }
}

impl Messages {
    /// The next one. Cancel-safe.
    async fn next(&mut self) -> Result<ToDestination, CodecError> {
        if let Some(message) = self.later.take() {
            return Ok(message);
        }
        let message = self.channel.receive().await?;
        self.heard = Instant::now();
        Ok(message)
    }
}

impl Session {
    pub(super) fn state(&self) -> DestinationState {
        self.journal.record().state
    }

    /// Asks the ownership machine, writes the answer down, and only then lets the caller act.
    pub(super) fn advance(&mut self, event: DestinationEvent) -> Result<(), DestinationError> {
        self.advance_with(event, |_| {})
    }

    /// The same, with what else is to be written down with the new state, in one line of the journal.
    pub(super) fn advance_with(
        &mut self,
        event: DestinationEvent,
        also: impl FnOnce(&mut DestinationRecord),
    ) -> Result<(), DestinationError> {
        let next = self.state().step(event)?;
        if next == self.state() {
            return Ok(());
        }
        self.write(|r| {
            also(r);
            r.enter(next);
        })
    }

    /// As [`Session::advance`], for a step that is safe though it is not written down: it is taken, and the line is
    /// [owed](Self::write_owed).
    pub(super) fn advance_owing(&mut self, event: DestinationEvent) -> Result<(), DestinationError> {
        let next = self.state().step(event)?;
        if next != self.state() {
            self.write_owing(|r| r.enter(next));
        }
        Ok(())
    }

    /// Changes the record, and writes it down if the disk takes it.
    pub(super) fn write_owing(&mut self, change: impl FnOnce(&mut DestinationRecord)) {
        if let Err(error) = self.journal.update_owing(change) {
            self.publisher.cannot_write(self.journal.path(), &error);
        }
    }

    /// Waits until it is written down how the session ended, and answers a source that asks. Until then it holds the name of its VM: a process of the
    /// daemon that finds the older line would take a later VM of that name for what is left of this session.
    pub(super) async fn write_owed(&mut self) {
        loop {
            let arrival = tokio::select! {
                biased;
                () = owed::write_owed(&mut self.journal, &self.publisher) => return,
                Some(arrival) = self.arrivals.recv() => arrival,
            };
            if let (LinkKind::Control, Link::Stream(stream)) = (arrival.hello.kind, arrival.link) {
                let (state, path) = (self.state(), self.journal.path().to_owned());
                let disk = Arc::clone(&self.node.config.disk);
                vmove_node::task::spawn(answer_for_ended(disk, state, path, stream).in_current_span());
            }
        }
    }

    /// After a step that was not taken: waits until no later process of the daemon can take it for one that was.
    pub(super) async fn cut_back(&mut self) {
        owed::cut_back(&mut self.journal, &self.publisher).await;
    }

    /// Writes a line of the journal.
    pub(super) fn write(
        &mut self,
        change: impl FnOnce(&mut DestinationRecord),
    ) -> Result<(), DestinationError> {
        let path = self.journal.path().to_owned();
        self.journal.update(change).map_err(|source| DestinationError::Journal { path, source })
    }

    pub(super) fn out_of_order(&self, message: &'static str) -> End {
        DestinationError::OutOfOrder { message, state: self.state() }.into()
    }

    /// What happens next that no task of the phase's own tells. Cancel-safe.
    pub(super) async fn next(&mut self, control: &mut Control) -> Result<Event, End> {
        tokio::select! {
            // What is rare goes first: a source that talks without a pause keeps nothing else waiting.
            biased;
            _ = control.tick.tick() => Ok(Event::Tick),
            Some(arrival) = self.arrivals.recv() => self.arrival(arrival),
            event = self.pages.next_event() => Ok(match event {
                FillEvent::Lost(error) => Event::PagesLost(error),
                FillEvent::Failed(error) => Event::PagesFailed(error),
                FillEvent::NothingLeft => Event::NothingLeft,
            }),
            // What follows the regions is for the page readers: it waits until they have their connections.
            message = control.messages.next(), if !self.pages.await_connections() => Ok(Event::Message(message?)),
        }
    }

    fn arrival(&mut self, arrival: Arrival) -> Result<Event, End> {
        match (arrival.hello.kind, arrival.link) {
            (LinkKind::Urgent, Link::Endpoint(endpoint)) => self.pages.add_urgent(endpoint),
            (LinkKind::Bulk, Link::Endpoint(endpoint)) => self.pages.add_bulk(endpoint),
            (LinkKind::Disk, Link::Stream(stream)) => {
                if let Some(stream) = self.after.take(arrival.hello.index, stream) {
                    self.disks.join(disk_wires::socket(&self.files.layout), stream);
                }
            }
            (LinkKind::State, Link::Stream(stream)) => return Ok(Event::DeviceState(stream)),
            (LinkKind::Frames, Link::Stream(stream)) => return Ok(Event::Frames(stream)),
            // The source has dialled again before we noticed that the old connection is dead: the new one counts.
            (LinkKind::Control, Link::Stream(_)) => return Err(End::Lost(Lost::Replaced)),
            (kind, link) => tracing::warn!(?kind, ?link, "connection of another kind than it said"),
        }
        Ok(Event::PageConnection)
    }

    /// Begins to talk over a new control connection: the page connections of an earlier one are of no use.
    pub(super) fn begin_conversation(&mut self) {
        self.pages.end();
    }

    /// Waits, however long, for the source to dial again: it alone knows whether the guest was given up. `process`: whose end is not waited
    /// out.
    pub(super) async fn wait_for_source(&mut self, process: Option<&dyn QemuHandle>) -> Waited {
        let abandon = self.publisher.abandon();
        let ended = async {
            let Some(process) = process else { return std::future::pending().await };
            process.exited().await;
            DestinationError::QemuEnded { log: process.log_tail() }
        };
        tokio::pin!(ended);
        loop {
            let arrival = tokio::select! {
                biased;
                arrival = self.arrivals.recv() => arrival,
                () = abandon.asked() => return Waited::Abandoned,
                error = &mut ended => return Waited::QemuEnded(error),
            };
            let Some(arrival) = arrival else { return Waited::DaemonEnds };
            match (arrival.hello.kind, arrival.link) {
                (LinkKind::Control, Link::Stream(stream)) => {
                    self.begin_conversation();
                    return Waited::Source(Control::new(Channel::new(stream)));
                }
                (LinkKind::Disk, Link::Stream(stream)) => {
                    drop(self.after.take(arrival.hello.index, stream));
                }
                (kind, _) => {
                    tracing::debug!(?kind, "connection before the source said where it stands; dropped");
                }
            }
        }
    }

    /// The source was lost, or this side cannot go on with this connection: the guest's fate is decided over another one.
    pub(super) fn reconnecting(&mut self, end: &End) {
        let why = end.why();
        tracing::warn!(why, "source lost; waiting for it");
        self.pages.end();
        self.publisher.reconnecting(why);
    }

    /// What every phase does ten times a second.
    pub(super) fn look_at_source(&self, control: &Control) -> Result<(), End> {
        if control.messages.heard.elapsed() > SILENCE_TIMEOUT {
            return Err(End::Lost(Lost::Silence));
        }
        self.publish_landed();
        Ok(())
    }

    /// Shows what has arrived.
    pub(super) fn publish_landed(&self) {
        let memory = &self.files.memory;
        let counted = self.pages.counted(memory);
        let left = memory.is_serving().then_some(counted.pages_left * self.page_bytes());
        let faults = Some(memory.latencies.stats()).filter(|faults| faults.count > 0);
        let arrived = arrived(&memory.blocks);
        self.publisher.update(|p| (p.arrived, p.faults) = (arrived, faults));
        self.publisher.landed(counted.landed_bytes, counted.wire_bytes, left);
    }

    pub(super) async fn tell_progress(&self, control: &mut Control) -> Result<(), CodecError> {
        control.send(&ToSource::Progress(self.pages.counted(&self.files.memory))).await?;
        control.send(&ToSource::Arrived(Box::new(self.publisher.arrived()))).await
    }

    pub(super) fn page_bytes(&self) -> u64 {
        self.files.memory.blocks.first().map_or(4096, |b| b.page_size.bytes())
    }

    /// Starts the page readers, if all of their connections are there.
    pub(super) fn start_readers(&mut self) -> Result<(), DestinationError> {
        let limit = self.journal.record().prepare.spec.bandwidth;
        let started = self.pages.start(&self.files.memory, || Throttle::new(limit));
        started.map(drop).map_err(DestinationError::Readers)
    }

    /// Removes everything: the guest never was ours. Tells the operator why.
    pub(super) async fn remove(&mut self, process: Option<Arc<dyn QemuHandle>>, stays: Stays) {
        let Stays { why, cancelled } = stays;
        // Safe without its line: a daemon started anew that finds Filling removes the same, and so it does with Loaded and no QEMU.
        if let Err(error) = self.advance_owing(DestinationEvent::PeerAborted) {
            tracing::warn!(error = chain(&error), "session ends out of order");
        }
        self.pages.end();
        let mut qemu_ended = true;
        if let Some(process) = process {
            if let Err(error) = process.kill().await {
                qemu_ended = false;
                tracing::error!(error = chain(&error), "the destination QEMU could not be ended");
            }
            process.end_if_stuck();
        }
        self.node.config.vmm.forget_monitor(&self.files.layout.qmp_socket).await;
        let mut left = !qemu_ended | !self.files.remove(self.node.disk());
        if qemu_ended {
            let record = self.journal.record();
            left |= !images::remove(record.id, &record.prepare, &record.images);
        }
        if let Some(vm) = &self.journal.record().vm {
            left |= !arrival::give_back(&*self.node.config.devices, vm, None).await;
        }
        let elapsed_ms = self.publisher.elapsed_ms();
        let reached = Some(self.publisher.reached());
        let called_off = CalledOff { why: why.clone(), cancelled, blockers: Vec::new(), elapsed_ms, reached };
        self.write_owing(|r| {
            r.note_removal(left);
            r.called_off = Some(called_off);
        });
        self.write_owed().await;
        self.publisher.fail(why, GuestPlace::Source, cancelled);
    }

    /// The guest is ours, and this side can do nothing more for it.
    pub(super) fn give_up_owned(&mut self, why: String) {
        self.pages.end();
        if self.files.of_libvirt {
            // Nothing is left to be done here: libvirt has heard of its QEMU's end, and decides what becomes of the guest.
            let ended =
                self.journal.record().vm.as_ref().is_some_and(|vm| self.node.config.vmm.has_ended(vm));
            if ended {
                self.write_owing(|r| r.abandoned = true);
                self.files.remove_tables(self.node.disk());
                return self.publisher.fail(why, GuestPlace::Source, false);
            }
        }
        self.publisher.fail(why, GuestPlace::PausedAtDestination, false);
    }
}

/// Fails if QEMU has ended.
pub(super) fn qemu_lives(process: &dyn QemuHandle) -> Result<(), DestinationError> {
    if process.alive() {
        return Ok(());
    }
    Err(DestinationError::QemuEnded { log: process.log_tail() })
}
