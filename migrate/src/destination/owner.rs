//! Phase Owner: the guest is ours, and runs here while its last pages come.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::block::Block;
use super::complete::{Complete, finish, make_huge};
use super::devices::{Given, Giving, Next, Others, Script};
use super::disk_check::DiskCheck;
use super::error::DestinationError;
use super::exports::Flushing;
use super::guest_memory::{GuestMemory, ReadElsewhere};
use super::monitor::{Connecting, Monitor, Resumed, Resuming, Wish};
use super::page_messages::take_hashes;
use super::session::{Control, End, Event, Session, Waited, qemu_lives};
use super::streams::Streaming;
use super::turning::{Turning, wish_of};
use super::verify::SourceHashes;
use super::vm_files::remove_ended;
use crate::devices::{missing, told};
use crate::owed::TRY_AGAIN;
use crate::ownership::{DestinationEvent, DestinationState};
use crate::proto::message::{self, DestinationStand, Running, SourceStand, ToDestination, ToSource};
use crate::visits::{Listening, Said, VisitStand};
use crate::vmm::QemuHandle;
use vmove_types::problem::chain;
use vmove_types::progress::{Outcome, Phase};
use vmove_types::report::VisitEnd;
use vmove_types::time::Mono;

/// A guest that is ours and lacks pages.
#[derive(Debug)]
pub(super) struct Owner {
    pub process: Arc<dyn QemuHandle>,
    pub guest: Guest,
    /// Length of the device state.
    pub state_bytes: u64,
    pub hashes: SourceHashes,
    /// Every page is here: what the source is to be told, once that is written down.
    pub figures: Option<message::Complete>,
    /// When it was last tried to write that down.
    pub tried: Option<Instant>,
    /// Since when the guest runs here.
    pub(super) runs_since: Option<Mono>,
    /// Devices of this node that it is to have.
    giving: Giving,
    /// Disks that follow it.
    streaming: Streaming,
    /// What came of its disks is on disk.
    flushing: Flushing,
    /// Whether its disks are those that it left.
    disk_check: DiskCheck,
    /// The source has asked whose the guest is, and was not answered.
    pub(super) asked: bool,
    /// What is known of the other guests of its group.
    others: watch::Sender<Others>,
    /// Of a guest that came for a visit: what is said of that.
    pub(super) visit: Option<Listening>,
    /// How that has ended.
    pub(super) visit_end: Option<VisitEnd>,
    /// Of a guest that came to stay: it may be asked to be on a visit all the same.
    pub(super) turning: Option<Turning>,
}

/// Whether the guest runs here.
#[derive(Debug)]
pub(super) enum Guest {
    /// It was given to us and is to be resumed.
    Paused(Monitor),
    /// QEMU was told to, and has not answered yet.
    Resuming(Resuming),
    /// The same, and the monitor does not answer yet: pages go first.
    PausedUnreached(Connecting),
    /// An earlier process of this daemon has resumed it, or was killed just before.
    Unknown(Connecting),
    /// It runs, or is to stay paused.
    Settled,
}

/// What QEMU has answered.
enum News {
    /// Its monitor does.
    Answers(Monitor),
    /// The guest runs, or is to stay paused.
    Runs(Resumed),
}

impl Owner {
    pub(super) fn new(
        process: Arc<dyn QemuHandle>,
        guest: Guest,
        state_bytes: u64,
        hashes: SourceHashes,
        disk_check: DiskCheck,
    ) -> Self {
        let (giving, others) = (Giving::NotYet, watch::Sender::new(Others::Unknown));
        let (streaming, flushing) = (Streaming::NotYet, Flushing::NotYet);
        let (figures, tried, runs_since) = (None, None, None);
        let (visit, visit_end, turning) = (None, None, None);
        Self {
            process,
            guest,
            state_bytes,
            hashes,
            figures,
            tried,
            runs_since,
            giving,
            streaming,
            flushing,
            disk_check,
            asked: false,
            others,
            visit,
            visit_end,
            turning,
        }
    }

    /// Goes on until every page is here, over as many connections as it takes. `None` if the session has ended.
    pub(super) async fn run(
        mut self,
        session: &mut Session,
        mut control: Option<Control>,
    ) -> Option<(Complete, Control)> {
        let record = session.journal.record();
        if record.is_visit() {
            self.begin_visit(session);
        } else if record.stays {
            self.visit_end = Some(VisitEnd::Stayed);
        } else {
            self.turning = Some(Turning::of(session));
        }
        session.after.open();
        let record = session.journal.record();
        if let Some(home) = record.prepare.home {
            // The session of its visit, which is here, too, keeps nothing for it any more.
            session.node.visits.tell(home.visit, VisitStand::WentHome);
        }
        loop {
            if control.is_none()
                && let Err(end) = self.see_to_devices(session).await
            {
                // It is tried again with the source.
                tracing::debug!(why = end.why(), "the guest is not whole yet");
            }
            if control.is_none() && self.is_away() {
                // Its home is not needed any more: it asks, and is answered from the journal.
                self.end_without_home(session).await;
                return None;
            }
            let mut open = match control.take() {
                Some(open) => open,
                None => match session.wait_for_source(self.needed()).await {
                    Waited::Source(control) => control,
                    Waited::QemuEnded(_) if self.ended_on_visit() => continue,
                    Waited::QemuEnded(error) => {
                        self.give_up(session, chain(&self.streaming.explain(session, error)));
                        return None;
                    }
                    Waited::Abandoned => {
                        self.give_up(session, chain(&DestinationError::Abandoned));
                        return None;
                    }
                    Waited::DaemonEnds => return None,
                },
            };
            self.hear_of_others(Others::Awaited);
            let whole = self.until_whole(session, &mut open).await;
            self.hear_of_others(Others::Unknown);
            self.disk_check.stop();
            let end = match whole {
                Ok(figures) => return Some((self.complete(session, figures).await, open)),
                Err(End::Failed(error)) => End::Failed(self.streaming.explain(session, error)),
                Err(end) => end,
            };
            if let End::Lost(_) = end {
                session.reconnecting(&end);
                continue;
            }
            if self.ended_on_visit() {
                control = Some(open);
                continue;
            }
            if session.state() == DestinationState::Gone {
                session.remove(None, end.stays()).await;
                return None;
            }
            // A source takes that for the end of QEMU here, and lets the guest run if libvirt has told it to.
            if !(session.files.of_libvirt && self.process.alive()) {
                open.tell_failure(&end).await;
            }
            self.give_up(session, end.why());
            return None;
        }
    }

    /// Once all have their devices, no connection that comes or goes changes that.
    fn hear_of_others(&self, news: Others) {
        self.others.send_if_modified(|known| {
            let changes = *known != Others::HaveDevices && *known != news;
            if changes {
                *known = news;
            }
            changes
        });
    }

    async fn until_whole(
        &mut self,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<message::Complete, End> {
        let mut is_told = false;
        self.turning.iter_mut().for_each(Turning::begin_conversation);
        loop {
            self.begin_to_run(session)?;
            if !matches!(self.guest, Guest::Resuming(_)) && self.figures.is_none() {
                session.publisher.enter(Phase::Fetch);
            }
            self.see_to_devices(session).await?;
            if self.figures.is_some() && self.disk_check.begin(session) {
                control.send(&ToSource::HashDisks).await?;
            }
            if let Some(figures) = self.whole_by_journal(session).await? {
                return Ok(figures);
            }
            session.start_readers()?;
            tokio::select! {
                biased;
                said = said_of(&mut self.visit), if self.visit_end.is_none() => self.visit_is(said, session)?,
                go_home = wish_of(&mut self.turning) => self.ask_home(go_home, session, control).await?,
                news = self.guest.news() => match news? {
                    News::Answers(monitor) => self.connected(session, monitor),
                    News::Runs(resumed) => self.runs(session, control, resumed).await?,
                },
                next = self.giving.next(is_told) => match next {
                    Next::Attached => {
                        control.send(&ToSource::Attached).await?;
                        is_told = true;
                    }
                    Next::Done(given) => self.given(session, *given),
                },
                () = self.disk_check.ended() => {}
                event = session.next(control) => self.event(event?, session, control).await?,
            }
        }
    }

    fn give_up(&mut self, session: &mut Session, why: String) {
        self.disk_check.give_up(session);
        // libvirt never had it run here, and no QEMU is left that could: a source that asks is told so from the journal.
        let never_ran = session.files.of_libvirt
            && self.runs_since.is_none()
            && !session.journal.record().ran
            && !self.process.alive();
        if never_ran && let Err(error) = session.advance_owing(DestinationEvent::NeverRan) {
            tracing::warn!(error = chain(&error), "session ends out of order");
        }
        session.give_up_owned(why);
    }

    /// Writes down that the visit has ended, and ends its session.
    async fn end_without_home(&mut self, session: &mut Session) {
        loop {
            match self.whole_by_journal(session).await {
                Ok(Some(_)) => return finish(session),
                Ok(None) => tokio::time::sleep(TRY_AGAIN).await,
                Err(end) => return session.give_up_owned(end.why()),
            }
        }
    }

    /// Once every page is here, the guest gets its devices.
    async fn see_to_devices(&mut self, session: &mut Session) -> Result<(), End> {
        if self.figures.is_none() {
            self.figures = self.whole(session).await?;
        }
        if self.figures.is_some() && matches!(self.giving, Giving::NotYet) {
            let record = session.journal.record();
            let spec = &record.prepare.spec;
            let limit = Duration::from_millis(spec.script_timeout_ms);
            let others = record.prepare.in_group.then(|| self.others.subscribe());
            // One that does not run runs nothing.
            let script = spec.resume.clone().filter(|_| record.is_to_run());
            let script = script.map(|text| Script { text, limit, others });
            match record.vm.clone() {
                Some(vm) if !vm.devices.is_empty() || script.is_some() => {
                    // What is pinned cannot be made huge any more.
                    let first = make_huge(session);
                    self.giving.begin(&session.node, &vm, script, first);
                }
                _ => self.giving = Giving::Done,
            }
        }
        Ok(())
    }

    /// What came of the devices.
    fn given(&mut self, session: &mut Session, given: Given) {
        let Given { devices, script, vm } = given;
        let (name, of) = (&session.node.config.node, &session.journal.record().prepare.vm);
        let lacks = devices.iter().filter_map(|end| Some(missing(name, of, &end.role, end.problem.clone()?)));
        let lacks: Vec<_> = lacks.collect();
        if !lacks.is_empty() {
            tracing::error!("{}", told(&lacks));
            session.write_owing(|r| r.missing.clone_from(&lacks));
        }
        session.publisher.update(|p| p.missing_devices = lacks);
        if let Some(figures) = &mut self.figures {
            (figures.devices, figures.script) = (devices, script);
        }
        // Another port than before: whoever unplugs it later looks by its id.
        if let Some(vm) =
            vm.filter(|vm| session.node.vms.get(&vm.name).is_ok_and(|now| now.devices != vm.devices))
            && let Ok(mut now) = session.node.vms.get(&vm.name)
        {
            now.devices = vm.devices;
            if let Err(error) = session.node.vms.put_owing(now) {
                tracing::warn!(error = chain(&error), "could not update the VM's record");
            }
        }
    }

    /// Tells QEMU to run a guest that was given to us, unless it is to stay paused.
    fn begin_to_run(&mut self, session: &mut Session) -> Result<(), DestinationError> {
        if !matches!(self.guest, Guest::Paused(_)) {
            return Ok(());
        }
        let left = session.files.memory.left();
        // Of a visit it is to be seen what the guest touches.
        let visits = self.visit.is_some() || self.turning.as_ref().is_some_and(Turning::is_wished);
        if left == 0 && session.files.memory.hashes.is_none() && !visits {
            // Nothing is missing: no page needs us, and QEMU's mappings become huge by ordinary faults.
            end_page_service(session)?;
            self.turning = None;
        }
        let wish = if session.journal.record().is_to_run() { Wish::Run } else { Wish::StayPaused };
        if let Guest::Paused(monitor) = std::mem::replace(&mut self.guest, Guest::Settled) {
            self.guest = Guest::Resuming(Resuming::begin(session, monitor, wish));
        }
        Ok(())
    }

    /// The guest runs, or is to stay paused.
    async fn runs(
        &mut self,
        session: &mut Session,
        control: &mut Control,
        resumed: Resumed,
    ) -> Result<(), End> {
        self.guest = Guest::Settled;
        self.runs_since = resumed.at;
        session.files.memory.cpu.hold();
        session.publisher.enter(Phase::Fetch);
        let running = Running { resumed_at: resumed.at, pages_left: resumed.pages_left };
        let told = if resumed.earlier { Ok(()) } else { control.send(&ToSource::Running(running)).await };
        if session.files.of_libvirt && resumed.at.is_some() {
            session.write_owing(|r| r.ran = true);
        }
        resumed.recorded().await?;
        Ok(told?)
    }

    /// The monitor of a QEMU that was found again answers.
    fn connected(&mut self, session: &Session, monitor: Monitor) {
        self.guest = match &self.guest {
            Guest::Unknown(_) if session.journal.record().is_to_run() => {
                Guest::Resuming(Resuming::begin(session, monitor, Wish::RunIfPaused))
            }
            Guest::Unknown(_) => Guest::Settled,
            _ => Guest::Paused(monitor),
        };
    }

    async fn event(&mut self, event: Event, session: &mut Session, control: &mut Control) -> Result<(), End> {
        match session.common_event(event, control).await? {
            Some(Event::Message(message)) => {
                self.message(message, session, control).await?;
                control.count_silence_anew();
            }
            Some(Event::Tick) => {
                session.look_at_source(control)?;
                if !self.ended_on_visit() {
                    self.needed().map_or(Ok(()), qemu_lives)?;
                }
                self.write_owed(session);
                if self.asked {
                    self.tell_whose(session, control).await?;
                }
                session.tell_progress(control).await?;
            }
            _ => {}
        }
        Ok(())
    }

    async fn message(
        &mut self,
        message: ToDestination,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<(), End> {
        match message {
            // Said again.
            ToDestination::Commit => {}
            ToDestination::AllAttached => self.hear_of_others(Others::HaveDevices),
            ToDestination::KeptHome { refused } => self.kept_home(refused, session, control).await?,
            ToDestination::RunsHere => {
                self.asked = true;
                self.tell_whose(session, control).await?;
            }
            ToDestination::Resume(stand) => {
                control.send(&ToSource::Resume(DestinationStand::Owner)).await?;
                self.hashes = SourceHashes::default();
                session.publisher.update(|p| p.outcome = Outcome::Running);
                if stand == SourceStand::Aborted {
                    return Err(DestinationError::AbortTooLate(session.state()).into());
                }
            }
            ToDestination::Abort(_) => return Err(DestinationError::AbortTooLate(session.state()).into()),
            other => {
                let other = take_hashes(&mut self.hashes, other);
                if let Some(other) = other.and_then(|other| self.disk_check.take(other, session)) {
                    return Err(session.out_of_order(other.name()));
                }
            }
        }
        Ok(())
    }

    /// What the source is told when every page is here, and compared if that was asked for.
    async fn whole(&mut self, session: &mut Session) -> Result<Option<message::Complete>, End> {
        let memory = Arc::clone(&session.files.memory);
        if self.turning.as_ref().is_some_and(Turning::awaits_source) {
            return Ok(None);
        }
        if self.visit.is_some() {
            if self.visit_end.is_none() {
                return Ok(None);
            }
            // Its QEMU here has ended, or will: nothing is to be undone in it.
            session.pages.end_for_good();
            if self.visit_end == Some(VisitEnd::Ended) {
                remove_ended(&session.node, session.journal.record());
            }
            return Ok(Some(self.figures_of(session)));
        }
        // A daemon started anew that finds Complete does not look whether the guest was resumed.
        let unsettled = !matches!(self.guest, Guest::Settled);
        let unverified = memory.hashes.is_some() && !self.hashes.are_whole();
        if unsettled || unverified || memory.left() > 0 {
            return Ok(None);
        }
        if !session.journal.record().prepare.spec.disks_after && !self.flushing.is_done(session).await? {
            return Ok(None);
        }
        let differing_pages = self.differing_pages(session).await;
        end_page_service(session)?;
        Ok(Some(message::Complete { differing_pages, ..self.figures_of(session) }))
    }

    fn figures_of(&self, session: &Session) -> message::Complete {
        let memory = &session.files.memory;
        message::Complete {
            faults: memory.latencies.stats(),
            slowest_faults: memory.slowest_faults(),
            pages_zero: memory.blocks.iter().map(|b| b.table.counts().zero).sum(),
            counted: session.pages.counted(memory),
            state_bytes: self.state_bytes,
            visit: self.visit_end,
            host_cpu: memory.cpu.used(),
            disk_io: self.flushing.disk_io(&session.journal.record().prepare),
            ..message::Complete::default()
        }
    }

    /// Hashes what has not been mapped yet and compares all with the source.
    async fn differing_pages(&self, session: &Session) -> Option<u64> {
        session.files.memory.hashes.as_ref()?;
        let memory = Arc::clone(&session.files.memory);
        let theirs = self.hashes.parts().to_vec();
        let compare = move |memory: &GuestMemory| {
            let hashes = memory.hashes.as_ref()?;
            for (index, block) in memory.blocks.iter().enumerate() {
                if memory.map_landed(index, 0..block.pages(), &mut ReadElsewhere::of(memory)).is_err() {
                    return None;
                }
                hashes.take_rest(index, &block.file, block.mapping());
            }
            let named: u64 = theirs.iter().map(|h| h.hashes.len() as u64).sum();
            let pages: u64 = memory.blocks.iter().map(Block::pages).sum();
            Some(hashes.differing(&theirs) + pages.saturating_sub(named))
        };
        let work = move || {
            let differing = memory.cpu.count(|| compare(&memory));
            memory.cpu.rest_until_free(|| false);
            differing
        };
        vmove_node::blocking::spawn_blocking(work).await.ok().flatten()
    }

    /// Writes down that every page is here. Not before that may the source hear so, which frees its memory then: a daemon started anew
    /// would wait for it. The guest does not wait.
    async fn whole_by_journal(&mut self, session: &mut Session) -> Result<Option<message::Complete>, End> {
        let due = self.disks_are_here(session).await?
            && self.giving.is_done()
            && self.disk_check.is_done()
            && self.tried.is_none_or(|tried| tried.elapsed() >= TRY_AGAIN);
        let Some(mut figures) = self.figures.clone().filter(|_| due) else { return Ok(None) };
        figures.verified_disks = self.disk_check.found();
        self.tried = Some(Instant::now());
        let kept = Some(Box::new(figures.clone()));
        match session.advance_with(DestinationEvent::AllPages, |r| r.complete = kept) {
            Ok(()) => {
                session.publisher.can_write();
                Ok(Some(figures))
            }
            Err(DestinationError::Journal { path, source }) => {
                session.publisher.cannot_write(&path, &source);
                session.publisher.only_owes();
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Whether no disk follows any more: they come once the memory is here, and then to the storage.
    async fn disks_are_here(&mut self, session: &Session) -> Result<bool, End> {
        let prepare = &session.journal.record().prepare;
        let Some(figures) = self.figures.as_mut().filter(|_| prepare.spec.disks_after) else {
            return Ok(self.figures.is_some());
        };
        if !self.streaming.is_done(session) {
            session.publisher.enter(Phase::DisksAfter);
            return Ok(false);
        }
        if !self.flushing.is_done(session).await? {
            return Ok(false);
        }
        figures.disk_io = self.flushing.disk_io(prepare);
        figures.gave_way = self.streaming.gave_way();
        Ok(true)
    }

    /// Our QEMU, as long as pages or disks are missing. Afterwards it is a VM like any other, which may end.
    fn needed(&self) -> Option<&dyn QemuHandle> {
        let is_whole = self.figures.is_some() && !matches!(self.streaming, Streaming::UnderWay(_));
        if is_whole || self.is_away() { None } else { Some(&*self.process) }
    }

    /// Every page is here.
    async fn complete(self, session: &Session, mut figures: message::Complete) -> Complete {
        session.publisher.enter(Phase::Finish);
        if let Some(since) = self.runs_since {
            // The source, which is told that it may go, passes on what comes there until then.
            figures.announced_ms = session.deliveries.announced().await.map(|at| at.ms_since(since));
        }
        // Done with before the devices came.
        let is_huge = !figures.devices.is_empty() || figures.script.is_some();
        Complete { figures: Box::new(figures), is_huge }
    }
}

/// What others say of a visit. Never ends for a guest that came to stay. Cancel-safe.
async fn said_of(visit: &mut Option<Listening>) -> Said {
    match visit {
        // An end is acted on once: the next look finds no visit, or figures.
        Some(told) => told.said().await,
        None => std::future::pending().await,
    }
}

impl Guest {
    /// Waits for what QEMU answers. Never ends if it was not asked. Cancel-safe.
    async fn news(&mut self) -> Result<News, DestinationError> {
        match self {
            Self::PausedUnreached(connecting) | Self::Unknown(connecting) => {
                connecting.connected().await.map(News::Answers)
            }
            Self::Resuming(resuming) => resuming.resumed().await.map(News::Runs),
            Self::Paused(_) | Self::Settled => std::future::pending().await,
        }
    }
}

/// Every byte is in the file: from here on faults are the kernel's business.
fn end_page_service(session: &mut Session) -> Result<(), DestinationError> {
    // Threads first: one that was about to map a page would find its range gone and take QEMU for dead.
    session.pages.end_for_good();
    let Some(attached) = session.files.memory.attached() else { return Ok(()) };
    attached.context.unregister(&attached.mappings).map_err(DestinationError::EndService)
}
