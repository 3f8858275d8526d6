//! All sessions of one daemon: the interface between `vmoved` and the session machines.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span};

use crate::destination::{self, Arrival};
use crate::disk_holds::DiskMoves;
pub use crate::engine_error::EngineError;
use crate::group::barrier::Membership;
use crate::group::handles::Groups;
use crate::history::{Moved, QemuId};
pub use crate::node::EngineConfig;
use crate::node::Node;
use crate::ownership::DestinationState;
use crate::past::{self, By, Measured, Past};
use crate::proto::message::{Home, Prepare};
use crate::publish::{Abandon, Publisher};
use crate::records::DestinationRecord;
use crate::source::{self, Begun};
use crate::visits::Visits;
use vmove_node::journal::Journal;
use vmove_node::latency::Latencies;
use vmove_node::peer::{Caller, Hello, LinkKind, SessionId, Status, Token};
use vmove_node::peer::{Link, PeerTarget};
use vmove_node::record::VmRecord;
use vmove_node::store::VmStore;
use vmove_types::check::{Blocker, BlockerCode, CheckReport};
use vmove_types::choice::Choice;
use vmove_types::progress::{GuestPlace, Outcome, Phase, Progress, Role};
use vmove_types::spec::MigrationSpec;

/// Connections that a session has not taken yet. A peer that opens more is cut off.
pub(crate) const ARRIVALS: usize = 80;

/// All sessions of one daemon.
#[derive(Debug)]
pub struct Engine {
    pub(crate) node: Arc<Node>,
    sessions: Mutex<BTreeMap<SessionId, Handle>>,
    /// The sessions to here that an earlier process left are known: before that, none may be called unknown.
    pub(crate) recovered: AtomicBool,
    /// Old migrations are being forgotten.
    pub(crate) forgetting: AtomicBool,
    /// Those that move at one barrier.
    pub(crate) groups: Groups,
    entered: Entered,
}

/// Who is told of each session, if anybody is.
#[derive(Default)]
struct Entered(OnceLock<Box<dyn Fn(SessionId) + Send + Sync>>);

impl fmt::Debug for Entered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Entered({})", if self.0.get().is_some() { "told" } else { "nobody" })
    }
}

/// What the engine keeps of a session.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) vm: String,
    pub(crate) role: Role,
    token: Token,
    pub(crate) progress: watch::Receiver<Progress>,
    cancel: CancellationToken,
    pub(crate) abandon: Abandon,
    arrivals: Option<mpsc::Sender<Arrival>>,
    /// When it was begun here, for the order of listings.
    number: usize,
}

impl Handle {
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.progress.borrow().outcome, Outcome::Running | Outcome::Reconnecting { .. })
    }

    /// No other migration of its VM may begin: it is at work, or nobody knows where it stands.
    pub(crate) fn excludes(&self, vm: &str) -> bool {
        let unknown =
            |outcome: &Outcome| matches!(outcome, Outcome::Failed { guest: GuestPlace::Unknown, .. });
        self.vm == vm && (self.is_running() || unknown(&self.progress.borrow().outcome))
    }
}

/// A session that is to be begun.
#[derive(Debug)]
pub(crate) struct New {
    pub(crate) id: SessionId,
    pub(crate) vm: VmRecord,
    pub(crate) to: PeerTarget,
    pub(crate) spec: MigrationSpec,
    /// The group that it is about, and its place at the barrier.
    pub(crate) group: Option<SessionId>,
    pub(crate) member: Option<Arc<Membership>>,
    /// The visit that the guest comes back from.
    pub(crate) home: Option<Home>,
    /// How it was chosen.
    pub(crate) choice: Option<Choice>,
}

impl New {
    fn handle(&self, number: usize, cancel: &CancellationToken) -> (Publisher, Handle) {
        let (publisher, progress) =
            Publisher::new(&self.id.to_string(), &self.vm.name, Role::Source, &self.to.name);
        publisher.update(|p| p.group = self.group.map(|group| group.to_string()));
        let handle = Handle {
            vm: self.vm.name.clone(),
            role: Role::Source,
            token: Token::default(),
            progress,
            cancel: cancel.clone(),
            abandon: publisher.abandon(),
            arrivals: None,
            number,
        };
        (publisher, handle)
    }

    fn begun(self, node: &Arc<Node>, publisher: Publisher, cancel: &CancellationToken) -> Begun {
        let Self { id, vm, to, spec, group, member, home, choice } = self;
        let (node, cancel) = (Arc::clone(node), cancel.clone());
        Begun { node, id, vm, to, spec, publisher, cancel, group, member, home, choice }
    }
}

impl Engine {
    /// Opens the state directory. Call [`Engine::resume_owners`] and [`Engine::resume_others`] next.
    ///
    /// # Errors
    /// [`EngineError::Io`].
    pub fn open(config: EngineConfig, vms: Arc<VmStore>) -> Result<Arc<Self>, EngineError> {
        let dir = config.sessions_dir.clone();
        config.disk.create_dir_all(&dir).map_err(|source| EngineError::Io { path: dir, source })?;
        let past = Arc::new(Past::open(&*config.disk, past::file(&config.sessions_dir)));
        Ok(Arc::new(Self {
            node: Arc::new(Node {
                config,
                vms,
                fault_latencies: Arc::default(),
                past,
                visits: Visits::default(),
                disk_moves: DiskMoves::default(),
            }),
            sessions: Mutex::default(),
            recovered: AtomicBool::new(false),
            forgetting: AtomicBool::new(false),
            groups: Groups::default(),
            entered: Entered::default(),
        }))
    }

    /// Has `told` hear of each session from now on before it does anything: those that are asked for, those that come from peers, those that
    /// follow the others of a group, and those that an earlier process left. Only the first call counts. `told` must not call the engine.
    pub fn on_entered(&self, told: impl Fn(SessionId) + Send + Sync + 'static) {
        let _ = self.entered.0.set(Box::new(told));
    }

    fn tell_entered(&self, id: SessionId) {
        if let Some(told) = self.entered.0.get() {
            told(id);
        }
    }

    pub(crate) fn register(
        &self,
        id: SessionId,
        vm: &str,
        role: Role,
        token: Token,
        (progress, abandon): (watch::Receiver<Progress>, Abandon),
        arrivals: Option<mpsc::Sender<Arrival>>,
    ) -> CancellationToken {
        let cancel = enter(&mut self.lock(), id, vm, (role, token), (progress, abandon), arrivals);
        self.tell_entered(id);
        cancel
    }

    /// Begins sessions from here, all of them or none. What ends one before its hand-over ends all.
    pub(crate) fn begin_all(
        self: &Arc<Self>,
        all: Vec<New>,
        cancel: &CancellationToken,
    ) -> Result<(), EngineError> {
        let mut begun = Vec::new();
        {
            // Looked up and entered under one lock: of two requests for a VM one is refused.
            let mut sessions = self.lock();
            for new in &all {
                let vm = &new.vm.name;
                if new.home.is_some_and(|home| self.node.visits.stays(home.visit)) {
                    let why = "it is to stay, and its memory is on its way".to_owned();
                    return Err(EngineError::NotVisiting { vm: vm.clone(), why });
                }
                if let Some(session) = busy(&sessions, vm, new.home) {
                    return Err(held(&sessions, vm, session));
                }
                if let Some(disk) = self.node.disk_moves.of(vm) {
                    return Err(EngineError::DiskMoves { vm: vm.clone(), disk });
                }
            }
            for new in all {
                let (publisher, handle) = new.handle(next_number(&sessions), cancel);
                sessions.insert(new.id, handle);
                begun.push(new.begun(&self.node, publisher, cancel));
            }
        }
        for begun in begun {
            self.tell_entered(begun.id);
            let span = session_span(begun.id, "source");
            vmove_node::task::spawn(source::begin(begun).instrument(span));
        }
        self.forget_old();
        Ok(())
    }

    /// Looks for everything that stands in the way; changes nothing.
    ///
    /// # Errors
    /// [`EngineError::Vm`]; an unreachable peer is a blocker in the report.
    pub async fn check(
        self: &Arc<Self>,
        vm: &str,
        to: PeerTarget,
        spec: MigrationSpec,
    ) -> Result<CheckReport, EngineError> {
        spec.validate().map_err(EngineError::BadSpec)?;
        let record = self.node.vms.get(vm)?;
        let no_visit = self.why_no_visit(&record, &spec);
        let mut report = source::check(Arc::clone(&self.node), record, to, spec, no_visit.as_deref()).await;
        let busy = busy(&self.lock(), vm, None);
        if let Some(id) = busy {
            report.blockers.push(
                Blocker::new(BlockerCode::Busy, held(&self.lock(), vm, id).to_string()).about(id.to_string()),
            );
            report.modes.clear();
        }
        if let Some(disk) = self.node.disk_moves.of(vm) {
            let error = EngineError::DiskMoves { vm: vm.to_owned(), disk: disk.clone() };
            report.blockers.push(Blocker::new(BlockerCode::Busy, error.to_string()).about(disk));
            report.modes.clear();
        }
        Ok(report)
    }

    /// Calls a migration off; the guest goes on at the source. Returns once it is decided: the progress tells the end.
    ///
    /// # Errors
    /// [`EngineError::UnknownSession`] or [`EngineError::TooLate`].
    pub async fn cancel(self: &Arc<Self>, id: &str) -> Result<(), EngineError> {
        let (id, cancel, mut progress) = {
            let sessions = self.lock();
            let id = find(&sessions, id)?;
            let handle = &sessions[&id];
            (id, handle.cancel.clone(), handle.progress.clone())
        };
        cancel.cancel();
        // The session alone knows whether the commit came first.
        let decided = progress.wait_for(|p| {
            let over = !matches!(p.outcome, Outcome::Running | Outcome::Reconnecting { .. });
            over || p.phase >= Phase::Fetch || p.role == Role::Destination || p.unwritten.is_some()
        });
        match tokio::time::timeout(Duration::from_secs(30), decided).await {
            Ok(Ok(p)) => match &p.outcome {
                Outcome::Failed { guest: GuestPlace::Source, .. } | Outcome::Refused { .. } => Ok(()),
                // Before the hand-over a session that cannot write its journal is called off.
                Outcome::Running if p.unwritten.is_some() && p.phase < Phase::Fetch => Ok(()),
                _ => Err(EngineError::TooLate(id)),
            },
            _ => Err(EngineError::TooLate(id)),
        }
    }

    /// The newest snapshot of a session and those to come. `id` may be any unambiguous prefix.
    ///
    /// # Errors
    /// [`EngineError::UnknownSession`].
    pub fn progress(&self, id: &str) -> Result<watch::Receiver<Progress>, EngineError> {
        let sessions = self.lock();
        let id = find(&sessions, id)?;
        Ok(sessions[&id].progress.clone())
    }

    /// The newest snapshot of every session: those of this process first (running ones, then the newest), then older ones from their
    /// journals.
    #[must_use]
    pub fn sessions(&self) -> Vec<Progress> {
        let sessions = self.lock();
        let mut all: Vec<_> = sessions.values().collect();
        all.sort_by_key(|h| (!h.is_running(), std::cmp::Reverse(h.number)));
        let mut list: Vec<Progress> = all.into_iter().map(|h| h.progress.borrow().clone()).collect();
        let known: Vec<SessionId> = sessions.keys().copied().collect();
        drop(sessions);
        list.extend(crate::history::older(self.node.disk(), &self.node.config.sessions_dir, &known));
        list
    }

    /// Remembers what a trial of a fabric has measured of the link to a node, for migrations that can measure nothing themselves.
    pub fn link_was_tried(&self, node: &str, fabric: &str, bytes_per_s: f64) {
        let measured =
            Measured { link_bytes_per_s: Some(bytes_per_s), ..Measured::now(node, fabric, By::FabricCheck) };
        self.node.past.remember(&self.node.config.disk, measured);
    }

    /// How long guests have waited for pages on their way here, in the life of this process.
    #[must_use]
    pub fn fault_latencies(&self) -> Arc<Latencies> {
        Arc::clone(&self.node.fault_latencies)
    }

    /// Where guests were sent, as long as the journals of that are kept. Reads the disk.
    #[must_use]
    pub fn moved(&self) -> HashMap<QemuId, Moved> {
        crate::history::moved(self.node.disk(), &self.node.config.sessions_dir)
    }

    /// The guest that a session brought here, as it was registered first, as long as the journal of that is kept. Reads the disk.
    #[must_use]
    pub fn came(&self, session: SessionId) -> Option<VmRecord> {
        crate::history::came(self.node.disk(), &self.node.config.sessions_dir, session)
    }

    /// Whether a connection with this greeting is wanted. Called before [`Engine::accept`], to answer the greeting.
    ///
    /// # Errors
    /// The status and the sentence for the peer.
    pub fn wants(&self, hello: &Hello) -> Result<(), (Status, String)> {
        let unknown = || {
            Err((
                Status::UnknownSession,
                format!("{} knows no session {}", self.node.config.node, hello.session),
            ))
        };
        // Of no session: nothing here is touched by it.
        if hello.kind == LinkKind::Trial {
            return Ok(());
        }
        // "No such session" is final: a source that hears it takes its guest back.
        if !self.lock().get(&hello.session).is_some_and(Handle::is_running)
            && let Err(error) = self.destination_record(hello.session)
        {
            let why = format!(
                "{} cannot tell how session {} stands: {error}",
                self.node.config.node, hello.session
            );
            return Err((Status::Busy, why));
        }
        // Not under the lock: below, journals are read from the disk.
        let found = self.lock().get(&hello.session).map(|handle| {
            let is_its = handle.token == hello.token;
            (handle.role, is_its, handle.is_running())
        });
        if !self.recovered.load(Ordering::Acquire) && found.is_none() {
            return Err((Status::Busy, format!("{} is being started; try again", self.node.config.node)));
        }
        match found {
            Some((Role::Source, true, _)) => {
                let node = &self.node.config.node;
                Err((
                    Status::UnknownSession,
                    format!("{node} is the node that the guest is on: choose another"),
                ))
            }
            Some((role, is_its, _)) if role != Role::Destination || !is_its => unknown(),
            Some((_, _, is_running)) if is_running || self.ended(hello).is_some() => Ok(()),
            Some(_) => {
                let why = format!(
                    "session {} stopped with an error at {}; `vmove recover` there takes it up",
                    hello.session, self.node.config.node
                );
                Err((Status::Busy, why))
            }
            None if hello.kind == LinkKind::Control && hello.token == Token::default() => Ok(()),
            // A session that ended in an earlier life of this daemon can still be asked how.
            None if hello.kind == LinkKind::Control && self.ended(hello).is_some() => Ok(()),
            None => match self.abandoned(hello) {
                Some(why) => Err((Status::UnknownSession, why)),
                None => unknown(),
            },
        }
    }

    /// What a source is told that asks for a session which an operator has ended here.
    fn abandoned(&self, hello: &Hello) -> Option<String> {
        let record = self.destination_record(hello.session).ok()??;
        (record.abandoned && record.prepare.token == hello.token).then(|| {
            let (id, vm) = (hello.session, &record.prepare.vm);
            if record.prepare.home.is_some() {
                return format!("an operator ended {vm:?} here, at home, while pages were missing: `vmove stop --force {vm}` frees what is left of its visit");
            }
            format!(
                "an operator ended {vm:?} here while pages were missing: `vmove reclaim {id} --guest-is-lost` runs the copy that the source has, `vmove stop --force {vm}` frees it"
            )
        })
    }

    /// What the journal of a session to here says; nothing if there is none.
    fn destination_record(&self, id: SessionId) -> std::io::Result<Option<DestinationRecord>> {
        Journal::read_begun_on(self.node.disk(), &self.node.destination_journal(id))
    }

    /// How a session to here has ended, and its journal, if the greeting knows its secret.
    fn ended(&self, hello: &Hello) -> Option<(DestinationState, PathBuf)> {
        let path = self.node.destination_journal(hello.session);
        let record = Journal::<DestinationRecord>::read_on(self.node.disk(), &path).ok()?;
        // One that owns the guest and has failed must not be taken for one that never had it.
        let ended = matches!(record.state, DestinationState::Complete | DestinationState::Gone);
        (ended && record.prepare.token == hello.token).then_some((record.state, path))
    }

    /// Takes a connection of `caller` whose greeting was wanted.
    pub async fn accept(self: &Arc<Self>, hello: Hello, link: Link, caller: Caller) {
        let existing = self
            .lock()
            .get(&hello.session)
            .and_then(|h| h.is_running().then(|| h.arrivals.clone()).flatten());
        match (existing, link) {
            (Some(arrivals), link) => {
                if arrivals.try_send(Arrival { hello, link }).is_err() {
                    tracing::warn!("connection dropped: its session has ended or has too many");
                }
            }
            (None, Link::Stream(stream)) if hello.token == Token::default() => {
                self.serve_new((hello, caller), stream);
            }
            (None, Link::Stream(stream)) => {
                if let Some((state, journal)) = self.ended(&hello) {
                    let answered = crate::history::answer_for_ended(
                        Arc::clone(&self.node.config.disk),
                        state,
                        journal,
                        stream,
                    );
                    vmove_node::task::spawn(answered.instrument(session_span(hello.session, "destination")));
                }
            }
            (None, Link::Endpoint(_)) => {
                tracing::debug!(session = %hello.session, "page connection for a session that has ended");
            }
        }
    }

    fn serve_new(self: &Arc<Self>, (hello, caller): (Hello, Caller), stream: vmove_node::peer::BoxedStream) {
        let (sender, arrivals) = mpsc::channel(ARRIVALS);
        let engine = Arc::clone(self);
        let id = hello.session;
        let announce = move |prepare: &Prepare| engine.announce(id, prepare, sender);
        let served =
            destination::serve_new(Arc::clone(&self.node), (hello, caller), stream, arrivals, announce);
        vmove_node::task::spawn(served.instrument(session_span(id, "destination")));
    }

    /// Enters a new session to here, unless its VM is on its way here already.
    fn announce(
        self: &Arc<Self>,
        id: SessionId,
        prepare: &Prepare,
        arrivals: mpsc::Sender<Arrival>,
    ) -> Result<Publisher, Blocker> {
        let (publisher, progress) =
            Publisher::new(&id.to_string(), &prepare.vm, Role::Destination, &prepare.source);
        let (vm, node) = (&prepare.vm, &self.node.config.node);
        let refused = |why: String| Err(Blocker::new(BlockerCode::Busy, why));
        let ends = (progress, publisher.abandon());
        {
            // Looked up and entered under one lock; whoever starts a VM holds its name before looking for sessions.
            let mut sessions = self.lock();
            if let Some(busy) = busy(&sessions, vm, prepare.home) {
                return refused(format!("{vm:?} is in migration {busy} at {node} already"));
            }
            if self.node.vms.is_name_held(vm) {
                return refused(format!(
                    "The name {vm:?} is taken at {node}, by a VM that is being started or removed, or by a prepared child: try again in a moment"
                ));
            }
            enter(&mut sessions, id, vm, (Role::Destination, prepare.token), ends, Some(arrivals));
        }
        self.tell_entered(id);
        self.forget_old();
        Ok(publisher)
    }

    pub(crate) fn resolve(&self, id: &str) -> Result<SessionId, EngineError> {
        if let Ok(found) = find(&self.lock(), id) {
            return Ok(found);
        }
        let all = crate::history::session_ids(self.node.disk(), &self.node.config.sessions_dir);
        unambiguous(all.into_iter(), id)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<SessionId, Handle>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whatever a session logs is within it: so no message need say which session it is about.
pub(crate) fn session_span(id: SessionId, side: &'static str) -> Span {
    tracing::info_span!("migration", %id, side)
}

/// The session that stands in the way of another one for this VM. A guest goes home while its visit lasts.
pub(crate) fn busy(
    sessions: &BTreeMap<SessionId, Handle>,
    vm: &str,
    home: Option<Home>,
) -> Option<SessionId> {
    let other = |id: &SessionId| home.is_none_or(|home| home.visit != *id);
    sessions.iter().find(|(id, handle)| handle.excludes(vm) && other(id)).map(|(id, _)| *id)
}

/// Why a VM that a session holds is not taken for another.
fn held(sessions: &BTreeMap<SessionId, Handle>, vm: &str, session: SessionId) -> EngineError {
    match sessions.get(&session) {
        Some(handle) => EngineError::held(vm, session, &handle.progress.borrow()),
        None => EngineError::Busy { vm: vm.to_owned(), session },
    }
}

fn enter(
    sessions: &mut BTreeMap<SessionId, Handle>,
    id: SessionId,
    vm: &str,
    (role, token): (Role, Token),
    (progress, abandon): (watch::Receiver<Progress>, Abandon),
    arrivals: Option<mpsc::Sender<Arrival>>,
) -> CancellationToken {
    let cancel = CancellationToken::new();
    let (vm, number) = (vm.to_owned(), next_number(sessions));
    let handle = Handle { vm, role, token, progress, cancel: cancel.clone(), abandon, arrivals, number };
    sessions.insert(id, handle);
    cancel
}

fn next_number(sessions: &BTreeMap<SessionId, Handle>) -> usize {
    sessions.values().map(|h| h.number + 1).max().unwrap_or(0)
}

fn find(sessions: &BTreeMap<SessionId, Handle>, id: &str) -> Result<SessionId, EngineError> {
    unambiguous(sessions.keys().copied(), id)
}

fn unambiguous(ids: impl Iterator<Item = SessionId>, prefix: &str) -> Result<SessionId, EngineError> {
    let unknown = || EngineError::UnknownSession(prefix.to_owned());
    let mut matching = ids.filter(|id| !prefix.is_empty() && id.to_string().starts_with(prefix));
    let found = matching.next().ok_or_else(unknown)?;
    if matching.next().is_some() { Err(unknown()) } else { Ok(found) }
}
