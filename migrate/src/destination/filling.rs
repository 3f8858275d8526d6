//! Phase Filling, before the guest is stopped at the source: QEMU is started here, and rounds of pages land.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use vmove_memory::{PageIndex, PageRun};

use super::block::Block;
use super::device_state::DeviceState;
use super::error::{DestinationError, DeviceStateError, LaunchError, PopulateError};
use super::exports::Exports;
use super::fill::FillEvent;
use super::huge_pages;
use super::images;
use super::launch::{self, LaunchOrder, Launched};
use super::monitor::Monitor;
use super::populate::{self, Populating};
use super::session::{Control, End, Event, PROGRESS_INTERVAL, Session, qemu_lives};
use super::switchover::{Incoming, Switchover};
use crate::proto::message::{Final, Outdated, RoundBegun, RoundDone, ToDestination, ToSource};
use crate::vmm::QemuHandle;
use vmove_types::problem::chain;
use vmove_types::progress::Phase;
use vmove_types::spec::{Mode, Visit};

/// Pages and a QEMU for the guest; it runs at the source.
#[derive(Debug)]
pub(super) struct Filling {
    /// Memory that is being given its pages.
    populating: Option<Populating>,
    qemu: Qemu,
    /// The round that is under way.
    round: Option<Round>,
}

#[derive(Debug)]
enum Qemu {
    /// All of its memory is given pages first, which it locks as it starts.
    NotStarted,
    Starting(Starting),
    Ready(Ready),
}

#[derive(Debug)]
struct Starting {
    task: JoinHandle<Result<Launched, LaunchError>>,
    /// Told as soon as there is a process.
    started: Option<oneshot::Receiver<Arc<dyn QemuHandle>>>,
    process: Option<Arc<dyn QemuHandle>>,
}

/// QEMU waits for the device state; its page faults are ours.
#[derive(Debug)]
struct Ready {
    qemu: Incoming,
    /// Pages that it had mapped before its faults were ours.
    touched: Vec<(usize, PageRun)>,
}

#[derive(Debug)]
struct Round {
    number: u32,
    began: Instant,
    landed_before: u64,
}

/// What this phase waits for beside the source.
enum Step {
    Event(Event),
    Populated(Result<(), PopulateError>),
    Started(Arc<dyn QemuHandle>),
    Launched(Result<Box<Launched>, LaunchError>),
    StateLoaded(Result<(), DeviceStateError>),
}

impl Filling {
    /// Begins to make the destination ready.
    pub(super) fn begin(session: &mut Session) -> Self {
        session.publisher.enter(Phase::Prepare);
        let prepare = &session.journal.record().prepare;
        let locked = session.files.locked;
        let mut filling = Self { populating: None, qemu: Qemu::NotStarted, round: None };
        // Of a guest that visits, most pages never come; of one that comes home, they are here.
        let ahead = prepare.spec.mode.fixed() == Some(Mode::Postcopy) && prepare.spec.visit == Visit::No;
        if ahead || locked || must_be_given(session) {
            match populate::start(
                &session.files.memory,
                &prepare.blocks,
                &session.files.held,
                locked,
                session.node.config.vmm.page_workers(),
            ) {
                Ok(populating) => filling.populating = Some(populating),
                // Then pages get their memory when they are touched.
                Err(error) => tracing::warn!(error = chain(&error), "memory is not populated ahead"),
            }
        }
        if !locked || filling.populating.is_none() {
            filling.qemu = Qemu::Starting(Starting::begin(session));
        }
        filling
    }

    /// Goes on until the guest is stopped at the source. `None` if the session has ended.
    pub(super) async fn run(
        mut self,
        session: &mut Session,
        mut control: Control,
    ) -> Option<(Switchover, Option<Control>)> {
        let (filling, end) = match self.until_stopped(session, &mut control).await {
            Ok(last) => match self.stopped(session, &last) {
                Ok(switchover) => return Some((switchover, Some(control))),
                Err(failed) => *failed,
            },
            Err(end) => (self, end),
        };
        let (filling, end) = match filling.unless_let_go(session, end) {
            Ok(switchover) => return Some((switchover, None)),
            Err(failed) => *failed,
        };
        let end = huge_pages::explained(session, end);
        let end = control.farewell(end).await;
        filling.discard(session, end).await;
        None
    }

    async fn until_stopped(&mut self, session: &mut Session, control: &mut Control) -> Result<Final, End> {
        loop {
            if !self.is_being_given(session) {
                session.start_readers()?;
            }
            let step = tokio::select! {
                biased;
                populated = populated(&mut self.populating) => Step::Populated(populated),
                step = self.qemu.next() => step,
                event = session.next(control) => Step::Event(event?),
            };
            match step {
                Step::Event(event) => {
                    if let Some(last) = self.event(event, session, control).await? {
                        return Ok(last);
                    }
                }
                Step::Populated(populated) => {
                    populated.map_err(DestinationError::Populate)?;
                    self.populating = None;
                    match self.qemu {
                        Qemu::NotStarted => self.qemu = Qemu::Starting(Starting::begin(session)),
                        Qemu::Starting(_) => {}
                        Qemu::Ready(_) => control.send(&ToSource::Prepared).await?,
                    }
                }
                Step::Started(process) => process_started(session, &*process)?,
                Step::Launched(launched) => {
                    let launched = launched.map_err(DestinationError::Launch)?;
                    self.qemu = Qemu::Ready(Ready::new(session, *launched)?);
                    // The source may stop the guest: QEMU waits for its state, and there is memory.
                    if self.populating.is_none() {
                        control.send(&ToSource::Prepared).await?;
                    }
                }
                // Told when the final set has been applied: before that nobody knows what is missing.
                Step::StateLoaded(loaded) => {
                    loaded.map_err(|source| self.qemu.device_state_error(source))?;
                }
            }
        }
    }

    /// What an event does. The set of final pages ends the phase.
    async fn event(
        &mut self,
        event: Event,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<Option<Final>, End> {
        let event = match (event, &mut self.qemu) {
            (Event::DeviceState(stream), Qemu::Ready(ready)) => {
                if session.files.of_libvirt {
                    // From here on libvirt may let the guest run here, whatever becomes of this process.
                    session.write(|r| r.let_go = true)?;
                }
                ready.qemu.state.give(stream);
                return Ok(None);
            }
            (Event::Frames(stream), Qemu::Ready(ready)) => {
                ready.qemu.deliver(session, stream);
                return Ok(None);
            }
            (event, _) => event,
        };
        let event = session.common_event(event, control).await?;
        if session.pages.is_renewing() {
            self.round = None;
        }
        match event {
            Some(Event::Message(message)) => {
                let last = self.message(message, session, control).await?;
                control.count_silence_anew();
                return Ok(last);
            }
            Some(Event::Tick) => {
                if self.is_being_given(session) {
                    control.count_silence_anew();
                }
                session.look_at_source(control)?;
                if let Some(process) = self.qemu.process() {
                    qemu_lives(process)?;
                }
                session.tell_progress(control).await?;
            }
            _ => {}
        }
        Ok(None)
    }

    async fn message(
        &mut self,
        message: ToDestination,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<Option<Final>, End> {
        match message {
            ToDestination::Round(round) => self.begin_round(round, session),
            ToDestination::RoundEnd(number) if self.round.as_ref().is_some_and(|r| r.number == number) => {
                self.end_round(session, control).await?;
            }
            ToDestination::Outdated(named) if self.round.is_none() => mark_outdated(session, &named)?,
            ToDestination::Stopped(last) => return Ok(Some(last)),
            ToDestination::Abort(why) => return Err(End::Aborted(why)),
            other => return Err(session.out_of_order(other.name())),
        }
        Ok(None)
    }

    fn begin_round(&mut self, begun: RoundBegun, session: &Session) {
        let number = begun.number;
        session.publisher.enter(Phase::Rounds);
        session.publisher.update(|p| p.round = number);
        session.publisher.coming(|coming| coming.part(begun.bytes));
        session.files.memory.comparing.begin_round(begun.compare);
        let landed_before = session.pages.counted(&session.files.memory).landed_bytes;
        self.round = Some(Round { number, began: Instant::now(), landed_before });
    }

    async fn end_round(&mut self, session: &mut Session, control: &mut Control) -> Result<(), End> {
        let Some(fill) = session.pages.fill().cloned() else {
            return Err(session.out_of_order("RoundEnd before the page connections"));
        };
        // Reads are under way; a dead connection shows as a fill event, a dead peer as silence on its socket.
        loop {
            tokio::select! {
                biased;
                () = fill.queue.idle() => break,
                event = session.pages.next_event() => match event {
                    FillEvent::Lost(lost) => drop(session.common_event(Event::PagesLost(lost), control).await?),
                    FillEvent::Failed(error) => return Err(error.into()),
                    FillEvent::NothingLeft => {}
                },
                message = control.receive_meanwhile() => session.hear_meanwhile(message?, control).await?,
                // A round may take long, and nobody else says that we live.
                () = tokio::time::sleep(PROGRESS_INTERVAL) => {
                    session.publish_landed();
                    session.tell_progress(control).await?;
                }
            }
            if session.pages.is_renewing() {
                self.round = None;
                return Ok(());
            }
        }
        let Some(round) = self.round.take() else { return Ok(()) };
        session.files.memory.comparing.begin_round(false);
        let landed = session.pages.counted(&session.files.memory).landed_bytes;
        let micros = u64::try_from(round.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        let bytes = landed.saturating_sub(round.landed_before);
        control.send(&ToSource::RoundDone(RoundDone { round: round.number, bytes, micros })).await?;
        Ok(())
    }

    /// Pages are being given, or locked, and nothing may be read before that is done. What the source says meanwhile waits.
    fn is_being_given(&self, session: &Session) -> bool {
        let populating = self.populating.is_some();
        let starting = matches!(self.qemu, Qemu::Starting(_));
        // Its files are emptied when its faults are ours: what had landed before that would be lost.
        let emptying = session.files.of_libvirt && starting;
        let locking = session.files.locked && (populating || starting);
        emptying || locking || populating && must_be_given(session)
    }

    /// The guest has stopped at the source. From here on the page tables say exactly what is missing.
    fn stopped(self, session: &mut Session, last: &Final) -> Result<Switchover, Box<(Self, End)>> {
        match self {
            Self { qemu: Qemu::Ready(ready), populating: None, .. } => {
                match apply_final_set(session, &ready.touched, last) {
                    Ok(()) => Ok(Switchover::begin(session, ready.qemu, last.mode)),
                    Err(end) => {
                        Err(Box::new((Self { qemu: Qemu::Ready(ready), populating: None, round: None }, end)))
                    }
                }
            }
            unprepared => Err(Box::new((unprepared, session.out_of_order("Stopped")))),
        }
    }

    /// libvirt was let go on, and may have given the guest to this side: then the source is waited for, and everything is fetched from it.
    fn unless_let_go(self, session: &mut Session, end: End) -> Result<Switchover, Box<(Self, End)>> {
        let lives = self.qemu.process().is_some_and(QemuHandle::alive);
        let stays = matches!(end, End::Aborted(_));
        match self {
            Self { qemu: Qemu::Ready(ready), populating, round }
                if session.journal.record().let_go && lives && !stays =>
            {
                match nothing_is_known(session) {
                    Ok(()) => {
                        session.reconnecting(&end);
                        Ok(Switchover::begin(session, ready.qemu, Mode::Hybrid))
                    }
                    Err(error) => {
                        Err(Box::new((Self { qemu: Qemu::Ready(ready), populating, round }, error.into())))
                    }
                }
            }
            other => Err(Box::new((other, end))),
        }
    }

    async fn discard(self, session: &mut Session, end: End) {
        drop(self.populating);
        let process = match self.qemu {
            Qemu::NotStarted => None,
            Qemu::Starting(starting) => starting.end().await,
            Qemu::Ready(ready) => Some(ready.qemu.process),
        };
        session.remove(process, end.stays()).await;
    }
}

impl Qemu {
    /// Never ends if QEMU waits for somebody else. Cancel-safe.
    async fn next(&mut self) -> Step {
        match self {
            Self::NotStarted => std::future::pending().await,
            Self::Starting(starting) => starting.next().await,
            Self::Ready(ready) => Step::StateLoaded(ready.qemu.state.loaded().await),
        }
    }

    fn process(&self) -> Option<&dyn QemuHandle> {
        match self {
            Self::NotStarted => None,
            Self::Starting(starting) => starting.process.as_deref(),
            Self::Ready(ready) => Some(&*ready.qemu.process),
        }
    }

    fn device_state_error(&self, source: DeviceStateError) -> DestinationError {
        let log = self.process().map(QemuHandle::log_tail).unwrap_or_default();
        DestinationError::DeviceState { log, source }
    }
}

impl Starting {
    fn begin(session: &mut Session) -> Self {
        let (started, receiver) = oneshot::channel();
        let stand_ins = std::mem::take(&mut session.files.stand_ins);
        let files = &session.files;
        let order = LaunchOrder {
            vmm: Arc::clone(&session.node.config.vmm),
            command: files.command.clone(),
            layout: files.layout.clone(),
            memory: Arc::clone(&files.memory),
            vm: session.journal.record().prepare.vm.clone(),
            locked: files.locked,
            images: images::exports(&session.journal.record().prepare),
            waits: session.journal.record().vm.clone().filter(|_| files.of_libvirt),
            stand_ins,
            ram: files.ram.iter().map(|file| file.path.clone()).collect(),
            disk: Arc::clone(&session.node.config.disk),
            started,
        };
        let task = vmove_node::task::spawn(launch::launch(order));
        Self { task, started: Some(receiver), process: None }
    }

    async fn next(&mut self) -> Step {
        loop {
            tokio::select! {
                biased;
                started = async {
                    match &mut self.started {
                        Some(started) => started.await,
                        None => std::future::pending().await,
                    }
                } => {
                    self.started = None;
                    // Without a process the launch has failed, and says why.
                    if let Ok(process) = started {
                        self.process = Some(Arc::clone(&process));
                        return Step::Started(process);
                    }
                }
                done = &mut self.task => {
                    let launched = done.unwrap_or_else(|error| Err(error.into()));
                    return Step::Launched(launched.map(Box::new));
                }
            }
        }
    }

    /// Ends the launch; the process that it has started, if it has.
    async fn end(mut self) -> Option<Arc<dyn QemuHandle>> {
        if !self.task.is_finished() {
            self.task.abort();
            let _ = self.task.await;
        }
        let started = self.started.take().and_then(|mut started| started.try_recv().ok());
        started.or(self.process)
    }
}

impl Ready {
    /// Writes down what an heir of this process must know, and takes the faults.
    fn new(session: &mut Session, launched: Launched) -> Result<Self, DestinationError> {
        let pid = i32::try_from(launched.process.pid()).unwrap_or(0);
        let (start, fd) = (launched.pid_start, launched.fault_fd);
        session.write(|r| {
            r.fault_fd = Some(fd);
            if let Some(vm) = &mut r.vm {
                (vm.pid, vm.pid_start) = (pid, start);
            }
        })?;
        let_lock_memory(session)?;
        if let Some(attached) = launched.attached {
            session.files.memory.attach(attached);
        }
        session.room.mapped();
        let qemu = Incoming {
            process: launched.process,
            monitor: Monitor::new(Arc::clone(&launched.monitor)),
            exports: Exports::of(&session.journal.record().prepare),
            state: DeviceState::await_stream(launched.monitor),
        };
        Ok(Self { qemu, touched: launched.touched })
    }
}

/// A guest that is to have devices gives its own up only for a QEMU that may pin its memory.
fn let_lock_memory(session: &Session) -> Result<(), DestinationError> {
    let Some(vm) = session.journal.record().vm.as_ref().filter(|vm| !vm.devices.is_empty()) else {
        return Ok(());
    };
    let bytes = vm.ram.iter().map(|ram| ram.size).sum();
    let raised = session.node.config.vmm.let_lock_memory(vm, bytes);
    raised.map_err(|source| DestinationError::LockedMemory { mib: bytes >> 20, source })
}

async fn populated(populating: &mut Option<Populating>) -> Result<(), PopulateError> {
    match populating {
        Some(populating) => populating.ended().await,
        None => std::future::pending().await,
    }
}

fn must_be_given(session: &Session) -> bool {
    session.files.memory.blocks.iter().any(Block::must_be_given)
}

fn process_started(session: &mut Session, process: &dyn QemuHandle) -> Result<(), DestinationError> {
    let pid = i32::try_from(process.pid()).unwrap_or(0);
    let start = process.start_time();
    session.write(|r| {
        if let Some(vm) = &mut r.vm {
            (vm.pid, vm.pid_start) = (pid, start);
        }
    })
}

/// What the source names as outdated is to be fetched again. Pages that never came stay `Absent`: their bytes here are known to be zero.
fn mark_outdated(session: &Session, named: &[Outdated]) -> Result<(), End> {
    let blocks = &session.files.memory.blocks;
    for Outdated { block, part } in named {
        let index = usize::from(*block);
        let of = blocks
            .get(index)
            .ok_or_else(|| session.out_of_order("Outdated for a RAM block that is not there"))?;
        part.each_run(of.pages(), |run| {
            of.table.mark_outdated(PageRun::new(PageIndex(run.start), run.end - run.start));
        })
        .map_err(|source| DestinationError::PageSet { block: index, source })?;
    }
    Ok(())
}

/// The final set never came, or not as a whole: no page is known to be current.
pub(super) fn nothing_is_known(session: &mut Session) -> Result<(), DestinationError> {
    for block in &session.files.memory.blocks {
        block.table.mark_stale(PageRun::new(PageIndex(0), block.pages()));
    }
    session.write(|r| {
        r.final_applied = true;
        r.mode = Some(Mode::Hybrid);
    })
}

/// The source has named all that is outdated.
fn apply_final_set(session: &mut Session, touched: &[(usize, PageRun)], last: &Final) -> Result<(), End> {
    // QEMU may have written where it had touched; what came there is fetched again.
    for (block, run) in touched {
        session.files.memory.blocks[*block].table.mark_stale(*run);
    }
    session.write(|r| {
        r.final_applied = true;
        r.mode = Some(last.mode);
    })?;
    session.publisher.update(|p| p.mode = Some(last.mode.to_string()));
    Ok(())
}
