//! What a session at the source owns, and its conversation with the destination.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use vmove_fabric::{FabricKind, ServeHandle};
use vmove_qmp::Client;
use vmove_qmp::switchover::Source;

use super::classify::Classified;
use super::exposure::{Exposure, THE_END};
use super::memory::SourceMemory;
use super::pages::next_step;
use super::registering::{Gate, Registering};
use crate::check::{Blocker, CheckReport};
use crate::clock::{Mono, PeerClock};
use crate::destination::chain;
use crate::journal::{Journal, SourceRecord};
use crate::link::{LinkError, PeerTarget};
use crate::node::Node;
use crate::ownership::{SourceEvent, SourceState};
use crate::pending::PageSet;
use crate::progress::{GuestPlace, Outcome};
use crate::proto::channel::Channel;
use crate::proto::codec::CodecError;
use crate::proto::hello::{Hello, LinkKind, PROTOCOL_VERSION, SessionId, Token};
use crate::proto::message::{Accepted, Complete, Counted, Hashes, ToDestination, ToSource, WireRun};
use crate::publish::Publisher;
use crate::report::Report;
use crate::spec::{MigrationSpec, Mode};
use crate::vm::VmRecord;

/// Keeps the destination from taking silence for death, and tells us when it is dead.
const PING_EVERY: Duration = Duration::from_secs(1);
/// The destination tells its progress ten times a second.
const SILENCE: Duration = Duration::from_secs(15);

/// Why the way to the hand-over ended early.
#[derive(Debug)]
pub(super) enum Stop {
    /// Blockers; nothing was changed.
    Refused(Vec<Blocker>),
    /// An operator asked.
    Cancelled,
    /// Something did not work.
    Failed(String),
}

impl Stop {
    /// As the end of the conversation with the destination.
    pub(super) fn into_lost(self) -> CodecError {
        CodecError::Io(std::io::Error::other(match self {
            Self::Failed(why) => why,
            other => format!("{other:?}"),
        }))
    }
}

impl From<CodecError> for Stop {
    fn from(error: CodecError) -> Self {
        Self::Failed(format!("The destination was lost: {error}"))
    }
}

impl From<LinkError> for Stop {
    fn from(error: LinkError) -> Self {
        Self::Failed(chain(&error))
    }
}

impl From<String> for Stop {
    fn from(error: String) -> Self {
        Self::Failed(error)
    }
}

/// Everything a session owns.
pub(super) struct Session {
    pub node: Arc<Node>,
    pub id: SessionId,
    pub token: Token,
    pub vm: VmRecord,
    pub to: PeerTarget,
    pub spec: MigrationSpec,
    pub publisher: Publisher,
    pub journal: Journal<SourceRecord>,
    pub report: Report,
    pub channel: Option<Channel<ToSource>>,
    pub accepted: Option<Accepted>,
    pub memory: Option<Arc<SourceMemory>>,
    pub serving: Vec<ServeHandle>,
    /// Dropped after the connections that may read it. Only one task uses it; the lock lets it go to a worker thread.
    pub exposure: Option<Arc<std::sync::Mutex<Exposure>>>,
    /// Guest memory that is not registered yet.
    pub registering: Option<Registering>,
    /// How far pages may be named.
    pub gate: Arc<Gate>,
    /// Bytes that had landed when page connections were lost the last time.
    pub landed_at_renewal: Option<u64>,
    /// Fabric of the page connections, once agreed on.
    pub fabric: Option<FabricKind>,
    /// How often the destination has lost its page connections.
    pub renewals: u32,
    /// A round is under way: it must be begun anew when page connections are.
    pub in_round: bool,
    pub client: Option<Client>,
    pub qmp: Option<Arc<Source>>,
    pub mode: Mode,
    pub prepared: bool,
    pub clock: PeerClock,
    pub direct_io: bool,
    pub counted: Counted,
    /// Bytes named in the current round (zero pages included), and bytes landed before it.
    pub round_began: (u64, u64),
    pub complete: Option<Box<Complete>>,
    pub stopped_at: Option<Mono>,
    /// The destination has said so.
    pub runs_there: bool,
    pub final_sets: Vec<PageSet>,
    pub final_runs: Option<Naming>,
    pub hashes: Option<mpsc::Receiver<Hashes>>,
    pub relay: Option<JoinHandle<Result<u64, String>>>,
    heard: Instant,
    ping: Interval,
}

/// Pages of the final set being named.
pub(super) struct Naming {
    pub batches: mpsc::Receiver<Vec<WireRun>>,
    pub task: JoinHandle<Result<Classified, String>>,
}

/// A session that was begun: what the engine needs of it.
pub(crate) struct Begun {
    pub node: Arc<Node>,
    pub id: SessionId,
    pub vm: VmRecord,
    pub to: PeerTarget,
    pub spec: MigrationSpec,
    pub publisher: Publisher,
    pub cancel: CancellationToken,
}

/// Runs a migration from its request to its end.
pub(crate) async fn begin(begun: Begun) {
    let Begun { node, id, vm, to, spec, publisher, cancel } = begun;
    let mode = spec.mode.fixed().unwrap_or(Mode::Hybrid);
    let mut report = Report::new(id.to_string(), vm.name.clone(), mode);
    report.source.clone_from(&node.config.node);
    let record = SourceRecord {
        id,
        vm: vm.clone(),
        to: to.clone(),
        spec: spec.clone(),
        token: Token::random(),
        state: SourceState::Warm,
        was_running: false,
        fabric: None,
        fabric_address: String::new(),
        bulk_connections: 0,
        may_fall_back: false,
        freed: false,
        untold: false,
        report: report.clone(),
    };
    let token = record.token;
    let dir = node.session_dir(id);
    let journal =
        std::fs::create_dir_all(&dir).and_then(|()| Journal::create(&dir.join("source.jsonl"), record));
    let journal = match journal {
        Ok(journal) => journal,
        Err(e) => {
            return publisher.fail(
                format!("Could not write the journal in {}: {e}", dir.display()),
                GuestPlace::Source,
                false,
            );
        }
    };
    let mut session = Session::new(node, id, token, vm, to, spec, publisher, journal, report, mode);
    let limit = session.spec.timeout();
    let timed_out = async {
        match limit {
            Some(limit) => tokio::time::sleep(limit).await,
            None => std::future::pending().await,
        }
    };
    let stop = tokio::select! {
        biased;
        () = cancel.cancelled() => Err(Stop::Cancelled),
        () = timed_out => Err(Stop::Failed(format!("The guest was not handed over within {} ms", session.spec.timeout_ms))),
        result = session.up_to_hand_over() => result,
    };
    match stop {
        Ok(()) => session.see_through(true).await,
        Err(stop) => session.give_up(stop).await,
    }
}

/// Takes up a session that had committed before this daemon was started anew, or that had stopped trying.
pub(crate) async fn go_on(node: Arc<Node>, journal: Journal<SourceRecord>, publisher: Publisher) {
    let r = journal.record().clone();
    let mut report = r.report;
    report.recoveries += 1;
    let mode = match report.mode.as_str() {
        "precopy" => Mode::Precopy,
        "postcopy" => Mode::Postcopy,
        _ => Mode::Hybrid,
    };
    let mut session = Session::new(node, r.id, r.token, r.vm, r.to, r.spec, publisher, journal, report, mode);
    if let Some(fabric) = r.fabric {
        session.accepted = Some(Accepted {
            destination: session.report.destination.clone(),
            boot_id: String::new(),
            fabric,
            fabric_reason: session.report.fabric_reason.clone(),
            fabric_address: r.fabric_address,
            bulk_connections: r.bulk_connections,
            may_fall_back: r.may_fall_back,
        });
    }
    session.see_through(false).await;
}

/// Looks for blockers on both sides; changes nothing.
pub(crate) async fn check(node: Arc<Node>, vm: VmRecord, to: PeerTarget) -> CheckReport {
    let mut report =
        CheckReport { vm: vm.name.clone(), destination: to.to_string(), ..CheckReport::default() };
    match look(&node, &vm, &to, &mut report).await {
        Ok(blockers) => report.blockers.extend(blockers),
        Err(blocker) => report.blockers.push(blocker),
    }
    let open = |mode: &&Mode| !report.blockers.iter().any(|b| b.rules_out(**mode));
    report.modes =
        [Mode::Precopy, Mode::Postcopy, Mode::Hybrid].iter().filter(open).map(ToString::to_string).collect();
    report
}

async fn look(
    node: &Arc<Node>,
    vm: &VmRecord,
    to: &PeerTarget,
    report: &mut CheckReport,
) -> Result<Vec<Blocker>, Blocker> {
    let trouble = |code: &'static str| move |e: String| Blocker::new(code, e);
    let client =
        node.config.monitors.client(&vm.qmp_socket).await.map_err(|e| trouble("monitor")(chain(&e)))?;
    let facts = vmove_qmp::inspect::facts(&client, vm.pid.unsigned_abs(), None)
        .await
        .map_err(|e| trouble("monitor")(chain(&e)))?;
    report.blockers.extend(crate::check::source::blockers(&facts));
    report.warnings = crate::check::source::warnings(&facts);
    if let Some(blocker) = crate::check::source::private_ram(vm).map_err(trouble("ram-not-shared"))? {
        return Err(blocker);
    }
    let infos = SourceMemory::open(vm).map(|m| m.infos()).map_err(trouble("ram-not-shared"))?;
    let id = SessionId::random();
    let hello = Hello {
        version: PROTOCOL_VERSION,
        kind: LinkKind::Control,
        index: 0,
        session: id,
        token: Token::default(),
        rdma: false,
        node: node.config.node.clone(),
    };
    let stream =
        node.config.dialer.stream(to, &hello).await.map_err(|e| trouble("unreachable")(chain(&e)))?;
    let mut channel: Channel<ToSource> = Channel::new(stream);
    let spec = MigrationSpec::default();
    let prepare = super::before::prepare_message(node, vm, &spec, &facts, infos, Token::random(), true);
    channel
        .send(&ToDestination::Prepare(Box::new(prepare)))
        .await
        .map_err(|e| trouble("unreachable")(chain(&e)))?;
    match timeout(super::before::ANSWER, channel.receive()).await {
        Ok(Ok(ToSource::Checked { blockers, fabric })) => {
            report.fabric = fabric;
            Ok(blockers)
        }
        other => Err(Blocker::new("unreachable", format!("{to} did not answer the check: {other:?}"))),
    }
}

impl Session {
    #[expect(clippy::too_many_arguments, reason = "one field each, called from two places")]
    fn new(
        node: Arc<Node>,
        id: SessionId,
        token: Token,
        vm: VmRecord,
        to: PeerTarget,
        spec: MigrationSpec,
        publisher: Publisher,
        journal: Journal<SourceRecord>,
        report: Report,
        mode: Mode,
    ) -> Self {
        let mut ping = interval(PING_EVERY);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            node,
            id,
            token,
            vm,
            to,
            spec,
            publisher,
            journal,
            report,
            channel: None,
            accepted: None,
            memory: None,
            serving: Vec::new(),
            exposure: None,
            registering: None,
            gate: Arc::new(Gate::new(THE_END)),
            landed_at_renewal: None,
            fabric: None,
            renewals: 0,
            in_round: false,
            client: None,
            qmp: None,
            mode,
            prepared: false,
            clock: PeerClock::default(),
            direct_io: false,
            counted: Counted::default(),
            round_began: (0, 0),
            complete: None,
            stopped_at: None,
            runs_there: false,
            final_sets: Vec::new(),
            final_runs: None,
            hashes: None,
            relay: None,
            heard: Instant::now(),
            ping,
        }
    }

    pub(super) fn state(&self) -> SourceState {
        self.journal.record().state
    }

    /// Asks the ownership machine, writes the answer down, and only then lets the caller act.
    pub(super) fn advance(&mut self, event: SourceEvent) -> Result<(), String> {
        let next = self.state().step(event).map_err(|e| e.to_string())?;
        let report = self.report.clone();
        self.journal
            .update(|r| {
                r.state = next;
                r.report = report;
            })
            .map_err(|e| format!("Could not write the journal: {e}"))
    }

    pub(super) fn hello(&self, kind: LinkKind, index: u8, token: Token) -> Hello {
        Hello {
            version: PROTOCOL_VERSION,
            kind,
            index,
            session: self.id,
            token,
            rdma: false,
            node: self.node.config.node.clone(),
        }
    }

    pub(super) fn memory(&self) -> Result<&Arc<SourceMemory>, String> {
        self.memory.as_ref().ok_or_else(|| "guest memory is not open".to_owned())
    }

    pub(super) async fn dial_control(&mut self, token: Token) -> Result<(), LinkError> {
        let hello = self.hello(LinkKind::Control, 0, token);
        let stream = self.node.config.dialer.stream(&self.to, &hello).await?;
        self.channel = Some(Channel::new(stream));
        self.heard = Instant::now();
        Ok(())
    }

    pub(super) async fn send(&mut self, message: &ToDestination) -> Result<(), CodecError> {
        match &mut self.channel {
            Some(channel) => channel.send(message).await,
            None => Err(CodecError::Closed),
        }
    }

    /// The next message that the caller must know of. Meanwhile: keeps the peer informed and informs the operator, passes on pages of
    /// the final set and hashes. Cancel-safe up to the sending of a message.
    pub(super) async fn next(&mut self) -> Result<ToSource, CodecError> {
        loop {
            let Some(channel) = &mut self.channel else { return Err(CodecError::Closed) };
            let message = tokio::select! {
                biased;
                message = channel.receive() => message?,
                batch = next_batch(&mut self.final_runs) => {
                    self.pass_on_runs(batch).await?;
                    continue;
                }
                step = next_step(&mut self.registering) => {
                    if self.registered(step).await? && self.in_round {
                        return Ok(ToSource::PagesRenewed);
                    }
                    continue;
                }
                hashes = next_hashes(&mut self.hashes) => {
                    let message = if let Some(hashes) = hashes { ToDestination::Hashes(hashes) } else {
                        self.hashes = None;
                        ToDestination::HashesEnd
                    };
                    self.send(&message).await?;
                    continue;
                }
                _ = self.ping.tick() => {
                    if self.heard.elapsed() > SILENCE {
                        return Err(CodecError::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, "nothing heard from the destination for 15 s")));
                    }
                    self.ask_clock().await?;
                    continue;
                }
            };
            self.heard = Instant::now();
            match message {
                ToSource::Progress(counted) => self.counted(counted),
                ToSource::Prepared => {
                    self.prepared = true;
                    return Ok(ToSource::Prepared);
                }
                ToSource::PagesLost { why, same_fabric } => {
                    self.renew_pages(why, same_fabric).await?;
                    if self.in_round {
                        return Ok(ToSource::PagesRenewed);
                    }
                }
                ToSource::Pong { token, now } => {
                    if self.clock.answered(token, now) {
                        self.ask_clock().await?;
                    }
                }
                other => return Ok(other),
            }
        }
    }

    async fn pass_on_runs(&mut self, batch: Option<Vec<WireRun>>) -> Result<(), CodecError> {
        match batch {
            Some(batch) => self.send(&ToDestination::Runs(batch)).await,
            None => {
                if let Some(naming) = self.final_runs.take() {
                    match naming.task.await {
                        Ok(Ok(found)) => self.report.pages_zero = found.zero,
                        other => tracing::warn!(
                            ?other,
                            "naming the final pages failed; the destination reads them all"
                        ),
                    }
                }
                self.send(&ToDestination::FinalEnd).await
            }
        }
    }

    fn counted(&mut self, counted: Counted) {
        self.counted = counted;
        let page = self.memory.as_ref().map_or(4096, |m| m.page_bytes());
        let (planned, landed_before) = self.round_began;
        let left = if self.state() == SourceState::Warm {
            planned.saturating_sub(counted.landed_bytes.saturating_sub(landed_before))
        } else {
            counted.pages_left * page
        };
        self.publisher.landed(counted.landed_bytes, counted.wire_bytes, Some(left));
    }

    /// Keeps the session alive, and measures how far the destination's clock is from ours.
    pub(super) async fn ask_clock(&mut self) -> Result<(), CodecError> {
        let ping = ToDestination::Ping(self.clock.ask());
        self.send(&ping).await
    }

    pub(super) fn end_badly(&self, error: impl std::fmt::Display, guest: GuestPlace, cancelled: bool) {
        self.publisher.fail(error, guest, cancelled);
    }

    pub(super) fn refused(&self, blockers: Vec<Blocker>) {
        self.publisher.finish(Outcome::Refused { blockers });
    }
}

async fn next_batch(naming: &mut Option<Naming>) -> Option<Vec<WireRun>> {
    match naming {
        Some(naming) => naming.batches.recv().await,
        None => std::future::pending().await,
    }
}

async fn next_hashes(hashes: &mut Option<mpsc::Receiver<Hashes>>) -> Option<Hashes> {
    match hashes {
        Some(receiver) => receiver.recv().await,
        None => std::future::pending().await,
    }
}
