//! The phases of a session at the source, one after the other. Each ends by becoming the next, or is undone.
//!
//! ```text
//! Asking ──▶ Warm ──▶ Stopping ──▶ Stopped ──▶ Committed ──▶ Released
//!    │         │         │            │            │
//!    └─────────┴─────────┴────────────┴─▶ Aborted ◀┘ only if the destination gives the guest back
//! ```
//!
//! In the journal Asking and Warm are one state, and so are Stopping and Stopped. Until the commit, a cancel or a timeout may drop what a
//! phase is doing at any `await`. The phase itself survives, and [`abort`] undoes it.

use std::sync::Arc;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span, info_span};

use super::aborted::{Undo, Untouched, abort};
use super::asking::Guest;
use super::by_libvirt;
use super::committed::Committed;
use super::error::{SourceError, Stop};
use super::followed;
use super::gathering::{is_committed, stop_of_group};
use super::session::Session;
use super::stopped::Stopped;
use super::stopping::Stopping;
use crate::group::barrier::{Fate, Membership};
use crate::group::resuming::ResumePlace;
use crate::kept_memory::let_memory_go;
use crate::node::Node;
use crate::ownership::{SourceEvent, SourceState};
use crate::proto::message::Home;
use crate::publish::Publisher;
use crate::records::{Detached, SourceRecord};
use vmove_node::journal::Journal;
use vmove_node::peer::{PeerTarget, SessionId, Token};
use vmove_node::record::VmRecord;
use vmove_types::choice::Choice;
use vmove_types::problem::chain;
use vmove_types::progress::{GuestPlace, Phase};
use vmove_types::report::Report;
use vmove_types::spec::{MigrationSpec, Mode};

/// A session that was begun: what the engine needs of it.
#[derive(Debug)]
pub(crate) struct Begun {
    pub node: Arc<Node>,
    pub id: SessionId,
    pub vm: VmRecord,
    pub to: PeerTarget,
    pub spec: MigrationSpec,
    pub publisher: Publisher,
    pub cancel: CancellationToken,
    /// The group that it is about, and its place in that.
    pub group: Option<SessionId>,
    pub member: Option<Arc<Membership>>,
    /// The visit that the guest comes back from.
    pub home: Option<Home>,
    /// How it was chosen.
    pub choice: Option<Choice>,
}

/// What ends the way to the hand-over from outside.
struct Limits {
    cancel: CancellationToken,
    /// When, and after how many milliseconds that is.
    deadline: Option<(Instant, u64)>,
    /// Its place in its group: what calls one member off, calls off all.
    member: Option<Arc<Membership>>,
}

impl Limits {
    fn new(cancel: CancellationToken, spec: &MigrationSpec, member: Option<Arc<Membership>>) -> Self {
        let deadline = spec.timeout().map(|limit| (Instant::now() + limit, spec.timeout_ms));
        Self { cancel, deadline, member }
    }

    /// The time that disks take is not counted: it depends on how much they hold.
    fn while_disks_are_copied(&self, spec: &MigrationSpec) -> Self {
        let deadline = self.deadline.filter(|_| !spec.copies_disks_first());
        Self { cancel: self.cancel.clone(), deadline, member: self.member.clone() }
    }

    /// The time begins anew if disks were copied.
    fn afterwards(self, before: &Self, spec: &MigrationSpec) -> Self {
        if !spec.copies_disks_first() {
            let deadline = before.deadline;
            return Self { deadline, ..self };
        }
        Self::new(self.cancel, spec, self.member)
    }

    /// Does some work, unless it is cut short.
    async fn run<T>(&self, work: impl Future<Output = Result<T, Stop>>) -> Result<T, Stop> {
        let timed_out = async {
            match self.deadline {
                Some((at, ms)) => {
                    sleep_until(at).await;
                    ms
                }
                None => std::future::pending().await,
            }
        };
        let called_off = async {
            match &self.member {
                Some(member) => member.called_off().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            why = called_off => Err(stop_of_group(&why)),
            () = self.cancel.cancelled() => Err(Stop::Cancelled),
            ms = timed_out => Err(SourceError::TimedOut(ms).into()),
            result = work => result,
        }
    }
}

fn phase(name: &'static str) -> Span {
    info_span!("phase", name)
}

/// Runs a migration from its request to its end.
pub(crate) async fn begin(begun: Begun) {
    let Begun { node, id, vm, to, spec, publisher, cancel, group, member, home, choice } = begun;
    let limits = Limits::new(cancel, &spec, member.clone());
    let mode = spec.mode.fixed().unwrap_or(Mode::Hybrid);
    let mut report = Report::new(id.to_string(), vm.name.clone(), mode);
    if spec.mode.fixed().is_none() {
        // Not chosen yet: a migration that ends before says none.
        report.mode.clear();
    }
    report.source.clone_from(&node.config.node);
    report.began_at = publisher.began_at();
    report.choice = choice;
    let kept = vm.clone();
    let record = SourceRecord {
        called_off: None,
        id,
        vm,
        to,
        spec,
        token: Token::random(),
        state: SourceState::Warm,
        was_running: false,
        fabric: None,
        fabric_address: String::new(),
        bulk_connections: 0,
        may_fall_back: false,
        freed: false,
        untold: false,
        to_resume: false,
        detached: Detached::default(),
        group,
        missing: Vec::new(),
        disks: Vec::new(),
        after: Vec::new(),
        memory_is_there: false,
        home,
        report: report.clone(),
    };
    let dir = node.session_dir(id);
    let path = dir.join("source.jsonl");
    let disk = node.disk();
    match disk.create_dir_all(&dir).and_then(|()| Journal::create_on(disk, &path, record)) {
        Ok(journal) => {
            let resume = member.as_ref().map(|member| member.resume_place());
            let session = Session { member, resume, ..Session::new(node, journal, publisher, report, mode) };
            run(session, &limits).await;
        }
        Err(source) => {
            let_memory_go(disk, &kept);
            let error = chain(&SourceError::Journal { path, source });
            if let Some(member) = &member {
                member.give_up(error.clone(), false, false).await;
            }
            publisher.fail(error, GuestPlace::Source, false);
        }
    }
}

/// The phases up to the commit, and what follows.
async fn run(mut session: Session, limits: &Limits) {
    let asked = async {
        let guest = Guest::look(&mut session).await?;
        guest.promise(&mut session).await?;
        guest.dial(&session).await
    };
    let mut asking = match limits.run(asked.instrument(phase("Asking"))).await {
        Ok(asking) => asking,
        Err(stop) => return undo(session, stop, Untouched).await,
    };
    let mut warm = match limits.run(asking.ask(&mut session).instrument(phase("Asking"))).await {
        Ok(room) => asking.accepted(room),
        Err(stop) => return undo(session, stop, asking).await,
    };
    let copying = limits.while_disks_are_copied(session.spec());
    let copied = async {
        warm.begin(&mut session).await?;
        warm.copy_disks(&mut session).await
    };
    if let Err(stop) = copying.run(copied.instrument(phase("Warm"))).await {
        return undo(session, stop, warm).await;
    }
    let limits = &copying.afterwards(limits, session.spec());
    let sent = async {
        warm.run(&mut session).await?;
        warm.prepare_qemu(&session).await
    };
    let mut stopping = match limits.run(sent.instrument(phase("Warm"))).await {
        Ok(qemu) => warm.stop(qemu),
        Err(stop) => return undo(session, stop, warm).await,
    };
    let mut stopped = match limits.run(stopping.run(&mut session).instrument(phase("Stopping"))).await {
        Ok(guest) => stopping.stopped(guest),
        Err(stop) if by_libvirt::gave_away(&session, &*stopping.qemu, &stop).await => {
            let Stopping { qemu, pages, .. } = stopping;
            return followed::follow(session, qemu, pages).instrument(phase("Committed")).await;
        }
        Err(stop) => return undo(session, stop, stopping).await,
    };
    if let Err(stop) = limits.run(stopped.run(&mut session).instrument(phase("Stopped"))).await
        && !is_committed(&session, &stop).await
    {
        if by_libvirt::gave_away(&session, &*stopped.qemu, &stop).await {
            let Stopped { qemu, pages, .. } = stopped;
            return followed::follow(session, qemu, pages).instrument(phase("Committed")).await;
        }
        return undo(session, stop, stopped).await;
    }
    if let Err(error) = commit(&mut session) {
        session.cut_back().await;
        return undo(session, error.into(), stopped).await;
    }
    let (committed, control) = stopped.commit(&session);
    committed.run(session, Some(control)).instrument(phase("Committed")).await;
}

/// Not without its line: a daemon started anew would have the guest go on here, while it runs there. The line of a group is such a line.
fn commit(session: &mut Session) -> Result<(), SourceError> {
    match session.member {
        Some(_) => session.advance_owing(SourceEvent::PeerLoaded),
        None => session.advance(SourceEvent::PeerLoaded),
    }
}

async fn undo(session: Session, stop: Stop, from: impl Undo) {
    if let Some(member) = &session.member {
        let refused = matches!(stop, Stop::Refused(_));
        let fate = member.give_up(stop.why_told(), matches!(stop, Stop::Cancelled), refused).await;
        debug_assert_eq!(fate, Fate::Stays, "a member is committed in its last phase alone");
    }
    abort(session, stop, from).instrument(phase("Aborted")).await;
}

/// Takes up a session that had committed before this daemon was started anew, or that had stopped trying.
pub(crate) async fn go_on(
    node: Arc<Node>,
    journal: Journal<SourceRecord>,
    publisher: Publisher,
    resume: Option<Arc<ResumePlace>>,
) {
    let mut report = journal.record().report.clone();
    report.recoveries += 1;
    let mode = match report.mode.as_str() {
        "precopy" => Mode::Precopy,
        "postcopy" => Mode::Postcopy,
        _ => Mode::Hybrid,
    };
    let mut session = Session { resume, ..Session::new(node, journal, publisher, report, mode) };
    // It is in this state: the line has only the report.
    if let Err(error) = session.advance_owing(SourceEvent::PeerLoaded) {
        return session.end_badly(chain(&error), GuestPlace::PausedAtSource);
    }
    session.publisher.enter(Phase::HandOver);
    Committed::journaled().run(session, None).instrument(phase("Committed")).await;
}
