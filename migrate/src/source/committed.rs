//! Phase Committed: the guest is given up, and this side keeps its memory until all of it is at the destination.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::aborted::{last_words, not_back, note_resumed};
use super::by_libvirt;
use super::control::Control;
use super::conversation::{Heard, Serving, Until};
use super::devices::bring_back;
use super::disk_hashes::{DiskHashing, Turn};
use super::error::{SourceError, Stop};
use super::final_pages::FinalPages;
use super::hold::Hold;
use super::memory::SourceMemory;
use super::page_service::{PageService, Terms};
use super::released;
use super::session::Session;
use super::stopped_qemu::Kept;
use super::visits;
use crate::devices::told;
use crate::disk_hash::CHUNK;
use crate::frames::Copies;
use crate::group::resuming::ResumePlace;
use crate::history::ENDED_BY_OPERATOR;
use crate::kept_memory::{is_kept, let_memory_go};
use crate::ownership::SourceEvent;
use crate::proto::message::{Complete, DestinationStand, Running, SourceStand, ToDestination, ToSource};
use crate::records::LeftImage;
use vmove_node::blocking::spawn_blocking;
use vmove_node::peer::{HelloError, LinkError};
use vmove_types::go_home::GoHome;
use vmove_types::problem::chain;
use vmove_types::progress::{ComparedDisks, GuestPlace, Outcome, Phase};
use vmove_types::spec::Visit;

/// For the destination's answer to `Resume`.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Between attempts to dial.
const DIAL_INTERVAL: Duration = Duration::from_millis(250);
/// The same once it has been tried for long.
const LONG_DIAL_INTERVAL: Duration = Duration::from_secs(2);
/// A connection that held for so long was a good one: the time for which others are tried begins anew.
const HELD_TIMEOUT: Duration = Duration::from_secs(5);

/// A guest that is the destination's.
#[derive(Debug)]
pub(super) struct Committed {
    pub kept: Kept,
    /// What the destination reads. After a restart of the daemon nothing, until the destination has said that it lacks pages.
    pub serving: Option<(PageService, FinalPages)>,
    /// The destination has said that the guest runs there.
    pub runs_there: bool,
    /// libvirt was found to have had the guest run here.
    pub returned: bool,
    /// Keeps the guest from running here, where libvirt may have it run all the same.
    pub hold: Hold,
    /// The destination is asked, over this connection, whose the guest is.
    pub asked: bool,
    /// It has said that the guest is its own.
    pub is_theirs: bool,
    /// It waits, over this connection, for the word that those have their devices that the guest moves with.
    pub awaits_others: bool,
    /// Its disks are being hashed, over this connection.
    pub disk_hashes: DiskHashes,
}

/// Hashes of disks for `--verify`.
#[derive(Debug, Default)]
pub(super) struct DiskHashes {
    turn: Turn,
    under_way: Option<DiskHashing>,
}

/// How a conversation ended without the destination being whole.
struct Lost {
    why: Why,
    /// To be listened to for a reason.
    control: Option<Control>,
}

enum Why {
    /// Another connection may help.
    Connection(SourceError),
    /// The destination is gone without ever having run the guest.
    GivenBack,
    /// Nothing will.
    ForGood(SourceError),
}

impl<E: Into<SourceError>> From<E> for Why {
    fn from(error: E) -> Self {
        Self::Connection(error.into())
    }
}

/// What the destination says of itself.
enum Answer {
    /// How far it is.
    Stand(DestinationStand),
    /// It needs nothing any more.
    Whole(Box<Complete>),
}

/// The destination's last figures, and the connection that they came over.
type Whole = (Box<Complete>, Control);

impl Committed {
    /// Of a session that had committed before this daemon was started anew, or that had stopped trying.
    pub(super) fn journaled() -> Self {
        Self {
            kept: Kept::Journaled,
            serving: None,
            runs_there: false,
            awaits_others: false,
            disk_hashes: DiskHashes::default(),
            returned: false,
            hold: Hold::none(),
            asked: false,
            is_theirs: false,
        }
    }

    /// Stays until the destination is whole, over as many connections as it takes. `control`: the one over which it is told first.
    pub(super) async fn run(mut self, mut session: Session, control: Option<Control>) {
        session.serve_disks(control.is_none());
        let home = visits::came_home(&session, control.is_none());
        tokio::pin!(home);
        let mut conversation = match control {
            Some(control) => {
                tokio::select! {
                    biased;
                    conversation = self.first_conversation(&mut session, control) => conversation,
                    figures = &mut home => return released::run(session, (self.kept, self.hold), &figures, None).await,
                }
            }
            None => Err(Box::new(Lost { why: SourceError::StartedAnew.into(), control: None })),
        };
        let reconnect_for = session.node.config.reconnect_for;
        let mut until = Instant::now() + reconnect_for;
        loop {
            let Lost { why, control } = match conversation {
                Ok((figures, control)) => {
                    // The page connections end; then the memory is no longer registered.
                    drop(self.serving);
                    return released::run(session, (self.kept, self.hold), &figures, Some(control)).await;
                }
                Err(lost) => *lost,
            };
            match why {
                Why::GivenBack if self.runs_there => {
                    session.end_served_disks().await;
                    let error = SourceError::GivenBackTooLate(session.to().clone());
                    return session.end_badly(chain(&error), GuestPlace::PausedAtDestination);
                }
                Why::GivenBack => return self.take_back(session, control).await,
                Why::ForGood(error) => {
                    let why = chain(&error);
                    if by_libvirt::goes_on_here(&session, &self.hold, &why).await {
                        return by_libvirt::runs_here_again(session, self.kept, self.hold).await;
                    }
                    return given_up(session, why).await;
                }
                // A guest on a visit needs its home, whenever that can be reached again, and so does one whose disks follow it.
                Why::Connection(error)
                    if Instant::now() >= until
                        && session.spec().visit != Visit::Go
                        && !session.spec().disks_after =>
                {
                    let (to, id) = (session.to().clone(), session.journal.record().id);
                    let why = chain(&error);
                    let why = format!("{why}; the guest belongs to {to}: `vmove recover {id}` tries again");
                    return given_up(session, why).await;
                }
                Why::Connection(error) => {
                    drop(control);
                    self.reconnecting(&session, &error);
                }
            }
            let tried = Instant::now();
            let abandon = session.publisher.abandon();
            let another = tokio::select! {
                biased;
                another = self.another_conversation(&mut session) => Some(another),
                figures = &mut home => return released::run(session, (self.kept, self.hold), &figures, None).await,
                () = abandon.asked() => None,
            };
            let Some(another) = another else {
                return given_up(session, chain(&SourceError::Abandoned)).await;
            };
            conversation = another;
            if tried.elapsed() > HELD_TIMEOUT {
                until = Instant::now() + reconnect_for;
            } else if conversation.is_err() {
                let long = Instant::now() >= until;
                sleep(if long { LONG_DIAL_INTERVAL } else { DIAL_INTERVAL }).await;
            }
        }
    }

    fn reconnecting(&mut self, session: &Session, error: &SourceError) {
        let mut error = chain(error);
        tracing::warn!(error, "destination lost; dialling again");
        if self.hold.has_returned() {
            let (to, id) = (session.to(), session.journal.record().id);
            error = format!(
                "{error}; libvirt has the guest run here, where it stands still until {to} has said whether it ran there: \
                 if that is lost for good, `vmove reclaim {id} --guest-is-lost`"
            );
        }
        if let Some((pages, last)) = &mut self.serving {
            pages.close();
            // Named anew once the destination has the page connections again.
            last.stop();
            if session.vm().libvirt.is_some() {
                // It may have lost us before it had heard of all of them.
                *last = FinalPages::all(&pages.memory);
            }
        }
        session.publisher.reconnecting(error);
    }

    async fn first_conversation(
        &mut self,
        session: &mut Session,
        mut control: Control,
    ) -> Result<Whole, Box<Lost>> {
        let told = control.send(&ToDestination::Commit).await;
        let whole = match told {
            Ok(()) => {
                session.frames.given_up();
                self.begin_to_hold(session);
                self.hash(session);
                self.converse(session, &mut control).await
            }
            Err(error) => Err(error.into()),
        };
        ended(whole, control)
    }

    /// Not before the commit is sent, if it is sent: the guest would wait for it.
    fn begin_to_hold(&mut self, session: &Session) {
        let memory = self.serving.as_ref().map(|(pages, _)| Arc::clone(&pages.memory));
        self.hold.begin(session, self.kept.watch(), memory, self.returned);
    }

    /// Begins to hash for `--verify`. Not before the commit is sent: it would wait behind the hashes, and the guest with it.
    fn hash(&mut self, session: &Session) {
        if let Some((pages, last)) = &mut self.serving
            && session.spec().verify
        {
            last.hash(pages);
        }
    }

    /// Dials again, says that the guest was given up, and serves what is still missing.
    async fn another_conversation(&mut self, session: &mut Session) -> Result<Whole, Box<Lost>> {
        self.begin_to_hold(session);
        session.report.recoveries += 1;
        let dialled = Control::dial(session, session.journal.record().token).await;
        let mut control = dialled.map_err(|error| {
            let error = match error {
                LinkError::Hello { source: HelloError::Refused(why), .. } => {
                    SourceError::UnknownSession { to: session.to().clone(), why }
                }
                other => other.into(),
            };
            Box::new(Lost { why: Why::Connection(error), control: None })
        })?;
        let whole = self.take_up(session, &mut control).await;
        ended(whole, control)
    }

    async fn take_up(&mut self, session: &mut Session, control: &mut Control) -> Result<Box<Complete>, Why> {
        // It says so again.
        self.awaits_others = false;
        self.disk_hashes.under_way = None;
        self.asked = false;
        control.send(&ToDestination::Resume(SourceStand::Committed)).await?;
        let answer = timeout(ANSWER_TIMEOUT, self.answer(session, control)).await;
        let no_answer =
            |_| SourceError::NoAnswer { to: session.to().clone(), seconds: ANSWER_TIMEOUT.as_secs() };
        let stand = match answer.map_err(no_answer)?? {
            Answer::Stand(stand) => stand,
            Answer::Whole(figures) => return Ok(figures),
        };
        session.publisher.update(|p| p.outcome = Outcome::Running);
        if matches!(stand, DestinationStand::Owner | DestinationStand::Complete) {
            // Or will at once.
            visits::guest_runs_there(session);
        }
        if stand != DestinationStand::Complete && !session.journal.record().memory_is_there {
            let (pages, last) = match &mut self.serving {
                Some((pages, last)) => {
                    if session.spec().visit == Visit::Go {
                        // It may have become one by what was said last.
                        *last = holes(&pages.memory)?;
                    }
                    (pages, last)
                }
                None => {
                    let (pages, last) = self.serving.insert(open_again(session).await.map_err(Why::ForGood)?);
                    (pages, last)
                }
            };
            pages.open(session, control).await?;
            last.name(pages);
            self.hash(session);
        }
        self.converse(session, control).await
    }

    /// The answer to `Resume`. A destination that has something to tell of its own says that first: it looks at what it holds as soon
    /// as there is a connection, before it reads from it.
    async fn answer(&mut self, session: &mut Session, control: &mut Control) -> Result<Answer, Why> {
        loop {
            let heard = session.next(control, Serving::Nothing).await?;
            if let Some(answer) = self.heard(session, heard)? {
                return Ok(answer);
            }
        }
    }

    /// Serves until the destination is whole.
    async fn converse(&mut self, session: &mut Session, control: &mut Control) -> Result<Box<Complete>, Why> {
        loop {
            let serving = match &mut self.serving {
                Some((pages, last)) => Serving::Final(pages, last),
                None => Serving::Nothing,
            };
            let others = others_have_devices(session.resume.clone(), self.awaits_others);
            let returned = returned_unless(&self.hold, self.asked);
            let tell = told_next(others, returned, &mut self.disk_hashes.under_way);
            match session.next_until(control, serving, tell).await? {
                Until::Over(Told::Returned) => {
                    control.send(&ToDestination::RunsHere).await?;
                    self.asked = true;
                }
                Until::Over(Told::OthersHaveDevices) => {
                    control.send(&ToDestination::AllAttached).await?;
                    self.awaits_others = false;
                }
                Until::Heard(Heard::Message(ToSource::KeepHome(go_home))) => {
                    self.keep_home(session, control, go_home).await?;
                }
                Until::Heard(Heard::Message(ToSource::ByDemand)) => {
                    self.serve_by_demand(session, control).await?;
                }
                Until::Over(Told::OfDisks(Some(message))) => {
                    note_compared(session, &message);
                    control.send(&message).await?;
                }
                Until::Over(Told::OfDisks(None)) => self.disk_hashes.under_way = None,
                Until::Heard(heard) => {
                    if let Some(Answer::Whole(figures)) = self.heard(session, heard)? {
                        return Ok(figures);
                    }
                    if std::mem::take(&mut self.is_theirs) {
                        session.report.ended_copy = std::mem::take(&mut self.hold).end().await;
                    }
                }
            }
        }
    }

    fn heard(&mut self, session: &mut Session, heard: Heard) -> Result<Option<Answer>, Why> {
        let Heard::Message(message) = heard else { return Ok(None) };
        match message {
            ToSource::Running(running) => self.guest_runs_there(session, running),
            ToSource::Attached => {
                session.has_devices();
                self.awaits_others = true;
            }
            ToSource::HashDisks if session.spec().verify => self.hash_disks(session),
            ToSource::Complete(figures) => return Ok(Some(Answer::Whole(figures))),
            ToSource::Resume(DestinationStand::Gone) => return Err(Why::GivenBack),
            ToSource::Resume(stand) => return Ok(Some(Answer::Stand(stand))),
            ToSource::Failed(why) => {
                let to = session.to().clone();
                return Err(Why::ForGood(SourceError::AtDestination { to, why }));
            }
            ToSource::Loaded | ToSource::Prepared => {}
            other => return Err(out_of_order(session, &other)),
        }
        Ok(None)
    }

    /// The guest is to be on a visit: answers whether this side is its home.
    async fn keep_home(
        &self,
        session: &mut Session,
        control: &mut Control,
        go_home: GoHome,
    ) -> Result<(), Why> {
        let kept = visits::keep_home(session, go_home);
        let refused = kept.err().map(|why| chain(&why));
        tracing::info!(?refused, "the migration is to become a visit");
        if refused.is_none() && self.runs_there {
            visits::guest_runs_there(session);
        }
        Ok(control.send(&ToDestination::KeptHome { refused }).await?)
    }

    /// It is on a visit: nothing but what is zero is named any more, over page connections that know of nothing else.
    async fn serve_by_demand(&mut self, session: &mut Session, control: &mut Control) -> Result<(), Why> {
        let Some((pages, last)) = &mut self.serving else {
            return Err(out_of_order(session, &ToSource::ByDemand));
        };
        last.stop();
        *last = holes(&pages.memory)?;
        pages.open(session, control).await?;
        last.name(pages);
        Ok(())
    }

    /// Begins to hash the disks: nothing but that is left to be done, and no page waits behind it.
    fn hash_disks(&mut self, session: &Session) {
        let disks = session.journal.record().disks.iter();
        let size = |disk: &LeftImage| session.report.disks.iter().find(|known| known.name == disk.name);
        let bytes_total = disks.filter_map(size).map(|disk| disk.size_bytes).sum();
        session.publisher.update(|p| p.compared_disks = Some(ComparedDisks { bytes_total, bytes_done: 0 }));
        self.disk_hashes.under_way = Some(DiskHashing::begin(session, &self.disk_hashes.turn));
    }

    fn guest_runs_there(&mut self, session: &mut Session, running: Running) {
        // libvirt's word is not needed for one that was paused before.
        self.runs_there = running.resumed_at.is_some() || session.vm().libvirt.is_none();
        self.is_theirs = self.asked && self.runs_there;
        if let Some((pages, _)) = &mut self.serving {
            pages.book_answers();
        }
        session.cpu.hold();
        session.publisher.enter(Phase::Fetch);
        visits::guest_runs_there(session);
        let (stopped_at, pause) = match &mut self.kept {
            Kept::InMemory(qemu) => (qemu.stopped_at, qemu.pause.take()),
            Kept::Journaled => (None, None),
        };
        let offset = session.clock.offset();
        let report = &mut session.report;
        report.pages_after_resume = running.pages_left;
        if let (Some(stopped), Some(resumed)) = (stopped_at, running.resumed_at) {
            report.downtime_ms = offset.to_ours(resumed).ms_since(stopped);
            report.downtime_error_ms = offset.error as f64 / 1e6;
            session.member.iter().for_each(|member| member.runs(offset.to_ours(resumed)));
            if let Some(pause) = pause {
                report.pause = pause.end(offset.to_ours(resumed));
            }
        }
        report.paused = running.resumed_at.is_none();
        // For a life of the daemon after this one; without it only the figures would be lost.
        let report = report.clone();
        session.write_owing(|r| r.report = report);
    }

    /// The commit came too late: the destination's QEMU had ended without ever running the guest, which goes on here.
    async fn take_back(self, mut session: Session, control: Option<Control>) {
        session.frames = Copies::default();
        // Its images are written here again.
        session.end_served_disks().await;
        if session.vm().libvirt.is_some() {
            return by_libvirt::given_back(session, self.kept, self.hold).await;
        }
        // Safe without its line: a daemon started anew that finds Committed asks, and the destination stays gone.
        if let Err(error) = session.advance_owing(SourceEvent::PeerGone) {
            return session.end_badly(chain(&error), GuestPlace::PausedAtSource);
        }
        let back = self.kept.bring_guest_back(&session).await;
        let mut lacks = Vec::new();
        if back.is_ok() {
            note_resumed(&mut session);
            lacks = bring_back(&mut session).await;
        }
        if let Some((pages, _)) = &self.serving {
            pages.memory.end_tracking();
        }
        let_memory_go(session.node.disk(), session.vm());
        let mut stop = Stop::Failed(SourceError::GivenBack(session.to().clone()));
        if let Some(mut control) = control {
            stop = last_words(&session, &mut control, stop).await;
        }
        session.write_owed().await;
        match back {
            Ok(()) if lacks.is_empty() => session.end_badly(stop.why(), GuestPlace::Source),
            Ok(()) => session.end_badly(format!("{}; {}", stop.why(), told(&lacks)), GuestPlace::Source),
            Err(error) => not_back(&session, &stop.why(), &error),
        }
    }
}

/// Waits until they have, if somebody wants to know: never ends otherwise. At once if there are none. Cancel-safe.
async fn others_have_devices(place: Option<Arc<ResumePlace>>, asked: bool) {
    match place {
        _ if !asked => std::future::pending().await,
        Some(place) => place.all_have_devices().await,
        None => {}
    }
}

/// Waits until libvirt has had the guest run here: never ends once the destination was asked whose it is. Cancel-safe.
async fn returned_unless(hold: &Hold, asked: bool) {
    if asked {
        return std::future::pending().await;
    }
    hold.returned().await;
}

/// What the destination is to be told next.
enum Told {
    OthersHaveDevices,
    /// libvirt has had the guest run here.
    Returned,
    /// Nothing: all was told.
    OfDisks(Option<ToDestination>),
}

/// Waits for that. Cancel-safe.
async fn told_next(
    others: impl Future<Output = ()>,
    returned: impl Future<Output = ()>,
    disks: &mut Option<DiskHashing>,
) -> Told {
    let of_disks = async {
        match disks {
            Some(hashing) => {
                // They may come without a pause: what the destination says is heard in between.
                tokio::task::yield_now().await;
                hashing.next().await
            }
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = others => Told::OthersHaveDevices,
        () = returned => Told::Returned,
        message = of_disks => Told::OfDisks(message),
    }
}

fn note_compared(session: &Session, message: &ToDestination) {
    if let ToDestination::DiskHashes(told) = message {
        let bytes = told.hashes.count().saturating_mul(CHUNK);
        session.publisher.update(|p| p.compared_disks.iter_mut().for_each(|all| all.add(bytes)));
    }
}

/// This side can do nothing more for the guest.
async fn given_up(mut session: Session, why: String) {
    session.end_served_disks().await;
    // Of a guest that visits, nothing but its memory is here.
    if is_kept(session.vm()) || !session.node.was_ended(session.vm()) {
        return session.end_badly(why, GuestPlace::PausedAtDestination);
    }
    // An operator has ended what was left here, and an earlier process of the daemon could not write that down.
    session.write_owing(|r| r.freed = true);
    session.write_owed().await;
    let (error, guest) = (ENDED_BY_OPERATOR.to_owned(), GuestPlace::Destination);
    session.publisher.finish(Outcome::Failed { error, guest, cancelled: true });
}

fn ended(whole: Result<Box<Complete>, Why>, control: Control) -> Result<Whole, Box<Lost>> {
    match whole {
        Ok(figures) => Ok((figures, control)),
        Err(why) => Err(Box::new(Lost { why, control: Some(control) })),
    }
}

fn out_of_order(session: &Session, message: &ToSource) -> Why {
    let (to, state) = (session.to().clone(), session.state());
    Why::ForGood(SourceError::OutOfOrder { to, message: message.name(), state })
}

/// In a new life of the daemon nothing is known of what has crossed: everything is named, and the destination takes what it lacks.
async fn open_again(session: &Session) -> Result<(PageService, FinalPages), SourceError> {
    let terms = Terms::journaled(session.journal.record()).ok_or(SourceError::NoFabric)?;
    let (vm, vmm) = (session.vm().clone(), Arc::clone(&session.node.config.vmm));
    let memory = spawn_blocking(move || SourceMemory::open(&*vmm, &vm)).await?;
    let memory = memory.map_err(SourceError::memory("open the guest's memory"))?;
    session.publisher.coming(|coming| coming.begin(memory.content_bytes()));
    let last = match session.spec().visit {
        Visit::Go => holes(&memory)?,
        Visit::No | Visit::Back => FinalPages::all(&memory),
    };
    Ok((PageService::new(terms, Arc::new(memory.counted_in(&session.cpu))), last))
}

fn holes(memory: &SourceMemory) -> Result<FinalPages, SourceError> {
    FinalPages::holes(memory).map_err(SourceError::memory("look at the guest's memory"))
}
