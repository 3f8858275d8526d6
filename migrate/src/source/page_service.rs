//! What the destination reads of the guest's memory: the page connections, over which fabric, and what is registered for them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use vmove_fabric::{Endpoint, FabricKind, Sched, ServeHandle, ThreadOptions};

use super::control::Control;
use super::error::{FabricFailure, SourceError};
use super::exposure::{ExposeError, Exposure, FIRST_STEP, lock, register_next};
use super::gate::{Gate, Place, THE_END};
use super::memory::SourceMemory;
use super::registering::Registering;
use super::session::Session;
use crate::host_cpu::HostCpu;
use crate::ownership::SourceState;
use crate::proto::message::{Accepted, SourceCpu, ToDestination};
use crate::records::SourceRecord;
use crate::throttle::BULK_NICE;
use vmove_node::blocking::spawn_blocking;
use vmove_node::peer::codec::CodecError;
use vmove_node::peer::{LinkError, LinkKind};
use vmove_types::problem::chain;
use vmove_types::spec::Mode;
use vmove_types::time::Mono;

/// A session whose page connections fail more often than this is given up.
const MOST_RENEWALS: u32 = 8;
/// The destination must hear from us while work is under way.
pub(super) const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// How often the destination hears at most what is used of the processors here.
const TELL_CPU_INTERVAL: Duration = Duration::from_millis(20);

/// A page connection, or why there is none.
type Dialled = Result<Box<dyn Endpoint>, LinkError>;

/// What both sides have agreed on about page connections.
#[derive(Debug)]
pub(super) struct Terms {
    fabric: FabricKind,
    /// Its address at the destination, where it is not the daemon's port.
    address: String,
    bulk_connections: u8,
    /// Both sides have tcp, should that fabric fail.
    may_fall_back: bool,
}

/// Pages of the guest's memory as the destination reads them.
#[derive(Debug)]
pub(super) struct PageService {
    pub memory: Arc<SourceMemory>,
    /// How far pages may be named.
    pub gate: Arc<Gate>,
    terms: Terms,
    /// In use now.
    fabric: FabricKind,
    connections: Vec<Served>,
    /// Dropped after the connections that may read it.
    exposed: Option<Exposed>,
    /// How often the destination has lost its page connections.
    renewals: u32,
    /// Bytes that had landed when that was last so.
    landed_at_renewal: Option<u64>,
    /// What the destination was last told of the processors, and when.
    told_cpu: Option<(u64, Instant)>,
}

/// A page connection that is answered.
#[derive(Debug)]
struct Served {
    handle: ServeHandle,
    /// Processor time of it that is counted already, in nanoseconds.
    booked_ns: u64,
    /// Where that is counted, if it is.
    cpu: Option<Arc<HostCpu>>,
}

impl Served {
    fn book(&mut self) {
        let Some(cpu) = &self.cpu else { return };
        let used_ns = self.handle.cpu_ns();
        cpu.book(used_ns.saturating_sub(self.booked_ns));
        self.booked_ns = used_ns;
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.book();
    }
}

/// Memory that is registered with the fabric.
#[derive(Debug)]
struct Exposed {
    /// Only one task uses it; the lock lets it go to a worker thread.
    exposure: Arc<Mutex<Exposure>>,
    /// The rest is being registered.
    registering: Option<Registering>,
}

impl From<&Accepted> for Terms {
    fn from(accepted: &Accepted) -> Self {
        Self {
            fabric: accepted.fabric,
            address: accepted.fabric_address.clone(),
            bulk_connections: accepted.bulk_connections,
            may_fall_back: accepted.may_fall_back,
        }
    }
}

impl Terms {
    /// As an earlier process of this daemon has agreed on; `None` if it had not come to that.
    pub(super) fn journaled(record: &SourceRecord) -> Option<Self> {
        Some(Self {
            fabric: record.fabric?,
            address: record.fabric_address.clone(),
            bulk_connections: record.bulk_connections,
            may_fall_back: record.may_fall_back,
        })
    }
}

impl PageService {
    /// That is in use now.
    pub(super) const fn fabric(&self) -> FabricKind {
        self.fabric
    }

    /// How many connections pages cross by that nobody waits for.
    pub(super) fn bulk_connections(&self) -> u8 {
        self.terms.bulk_connections.max(1)
    }

    /// Nothing is read yet.
    pub(super) fn new(terms: Terms, memory: Arc<SourceMemory>) -> Self {
        Self {
            fabric: terms.fabric,
            memory,
            gate: Arc::new(Gate::new(THE_END)),
            terms,
            connections: Vec::new(),
            exposed: None,
            renewals: 0,
            landed_at_renewal: None,
            told_cpu: None,
        }
    }

    /// Opens the page connections and answers reads on them from here on. Where the fabric that was agreed on does not work, tcp
    /// takes its place.
    pub(super) async fn open(
        &mut self,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<(), SourceError> {
        let kind = self.fabric;
        match self.open_over(kind, session, control).await {
            Err(SourceError::Fabric(failure)) => {
                let why = format!("{kind} does not work: {}", chain(&failure));
                if !self.fall_back(&why, session) {
                    return Err(failure.into());
                }
                self.open_over(FabricKind::Tcp, session, control).await
            }
            done => done,
        }
    }

    /// Ends the page connections; then the memory is no longer registered.
    pub(super) fn close(&mut self) {
        self.connections.clear();
        self.exposed = None;
    }

    /// Counts what answering has used of the processors.
    pub(super) fn book_answers(&mut self) {
        self.connections.iter_mut().for_each(Served::book);
    }

    /// Tells the destination what this side uses of the processors: it holds its reads back for the sake of both.
    pub(super) async fn tell_host_cpu(&mut self, control: &mut Control) -> Result<(), CodecError> {
        let cpu = Arc::clone(&self.memory.cpu);
        if !cpu.is_shared() || self.told_cpu.is_some_and(|(_, at)| at.elapsed() < TELL_CPU_INTERVAL) {
            return Ok(());
        }
        self.book_answers();
        let used_ns = cpu.used_ns();
        if self.told_cpu.is_none_or(|(told, _)| told != used_ns) {
            self.told_cpu = Some((used_ns, Instant::now()));
            let used = SourceCpu { used_ns, processors: cpu.processors() };
            control.send(&ToDestination::HostCpu(used)).await?;
        }
        Ok(())
    }

    /// The destination has lost its page connections: opens others.
    pub(super) async fn renew(
        &mut self,
        why: String,
        same_fabric: bool,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<(), SourceError> {
        // Other connections would give no more of a file that is too short.
        self.memory.check_whole().map_err(SourceError::memory("serve the guest's memory"))?;
        self.renewals += 1;
        tracing::warn!(why, renewals = self.renewals, "page connections were lost; opening others");
        if self.renewals > MOST_RENEWALS {
            return Err(SourceError::PagesLostTooOften { times: self.renewals, why });
        }
        // Memory stays registered, so that a guest that waits for a page need not wait for that; unless it may be the cause.
        let landed = Some(session.counted.landed_bytes);
        if std::mem::replace(&mut self.landed_at_renewal, landed) == landed {
            self.close();
        }
        session.report.recoveries += 1;
        if !same_fabric {
            self.fall_back(&format!("verbs was given up: {why}"), session);
        }
        self.open(session, control).await
    }

    /// From here on tcp, if that is another fabric than the present one and both sides have it.
    fn fall_back(&mut self, why: &str, session: &mut Session) -> bool {
        if !self.terms.may_fall_back || self.fabric != FabricKind::Verbs {
            return false;
        }
        tracing::warn!(why, "goes on over tcp");
        self.fabric = FabricKind::Tcp;
        session.report.fabric = FabricKind::Tcp.to_string();
        why.clone_into(&mut session.report.fabric_reason);
        show_fabric(session);
        true
    }

    async fn open_over(
        &mut self,
        kind: FabricKind,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<(), SourceError> {
        let fabric = session.node.config.dialer.fabric(kind, session.journal.record().token);
        let fabric = fabric.ok_or(FabricFailure::NotOpen(kind))?;
        self.connections.clear();
        let known = self.exposed.take().filter(|known| lock(&known.exposure).is_with(&fabric));
        let memory = Arc::clone(&self.memory);
        // While the guest runs here the rest can be registered behind the first reads. One that waits for a page elsewhere must find
        // everything readable.
        let first = if session.state() == SourceState::Warm { FIRST_STEP } else { u64::MAX };
        let begun = Mono::now();
        let exposing = spawn_blocking(move || {
            let exposed = if let Some(known) = known {
                known
            } else {
                let exposure = Arc::new(Mutex::new(Exposure::open(&memory, fabric)?));
                register_next(&exposure, first)?;
                Exposed { exposure, registering: None }
            };
            Ok::<_, ExposeError>((exposed, Mono::now()))
        });
        // Memory is registered and connections are opened at the same time: each is mostly waiting.
        let mut dialling = self.dial(kind, session);
        let (exposed, registered) = while_alive(control, exposing).await?.map_err(source_error)?;
        while let Some(dialled) = dialling.join_next().await {
            let (link, index, dialled) = dialled?;
            let endpoint = dialled.map_err(|error| match error {
                LinkError::Fabric { why, .. } => FabricFailure::Dial(why).into(),
                other => SourceError::from(other),
            })?;
            let options = thread_options(session, link, index);
            let handle = endpoint.serve(options).map_err(SourceError::Serve)?;
            // What is answered on the other one the guest waits for.
            let cpu = (link == LinkKind::Bulk).then(|| Arc::clone(&self.memory.cpu));
            self.connections.push(Served { handle, booked_ns: 0, cpu });
        }
        tracing::info!(
            fabric = %kind,
            registered_ms = registered.ms_since(begun).round(),
            open_ms = Mono::now().ms_since(begun).round(),
            "page connections are open"
        );
        Ok(self.tell_regions(exposed, control).await?)
    }

    /// Says what can be read over the page connections, which are new, and goes on with what cannot be read yet.
    async fn tell_regions(&mut self, mut exposed: Exposed, control: &mut Control) -> Result<(), CodecError> {
        let (regions, frontier) = {
            let exposure = lock(&exposed.exposure);
            (exposure.regions(false), exposure.frontier())
        };
        let told = control.send(&ToDestination::Regions(regions)).await;
        if exposed.registering.is_some() {
            self.gate.open_to(frontier);
        } else {
            self.gate = Arc::new(Gate::new(frontier));
            if frontier != THE_END {
                let exposure = Arc::clone(&exposed.exposure);
                exposed.registering = Some(Registering::start(exposure, Arc::clone(&self.gate)));
            }
        }
        self.exposed = Some(exposed);
        told
    }

    /// How far registering has come, or that it has ended. Never ends if nothing is being registered. Cancel-safe.
    pub(super) async fn next_step(&mut self) -> Option<Place> {
        match self.registering() {
            Some(registering) => registering.step().await,
            None => std::future::pending().await,
        }
    }

    fn registering(&mut self) -> Option<&mut Registering> {
        self.exposed.as_mut()?.registering.as_mut()
    }

    /// Passes on what was registered meanwhile: [`PageService::next_step`] gave this. Whether page connections had to be opened anew.
    pub(super) async fn registered(
        &mut self,
        step: Option<Place>,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<bool, SourceError> {
        let Some(exposed) = &mut self.exposed else { return Ok(false) };
        if let Some(place) = step {
            let regions = lock(&exposed.exposure).regions(true);
            control.send(&ToDestination::Regions(regions)).await?;
            self.gate.open_to(place);
            return Ok(false);
        }
        let Some(registering) = exposed.registering.take() else { return Ok(false) };
        match registering.end().await {
            Ok(()) => {
                tracing::info!(landed_bytes = session.counted.landed_bytes, "all guest memory is registered");
                Ok(false)
            }
            Err(error) => self.not_registered(error, session, control).await.map(|()| true),
        }
    }

    /// Waits until all memory can be read.
    pub(super) async fn all_registered(
        &mut self,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<(), SourceError> {
        while self.registering().is_some() {
            match tokio::time::timeout(KEEPALIVE_INTERVAL, self.next_step()).await {
                Ok(step) => drop(self.registered(step, session, control).await?),
                Err(_) => control.keep_alive().await?,
            }
        }
        Ok(())
    }

    /// Memory could not be registered: perhaps another fabric does without.
    async fn not_registered(
        &mut self,
        error: ExposeError,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<(), SourceError> {
        match source_error(error) {
            SourceError::Fabric(failure) => {
                if !self.fall_back(&format!("verbs was given up: {}", chain(&failure)), session) {
                    return Err(failure.into());
                }
                self.open(session, control).await
            }
            other => Err(other),
        }
    }

    /// Before pages are named, after the scan that found them: memory that is not what was registered any more is registered afresh,
    /// and the destination told.
    pub(super) async fn refresh_regions(
        &mut self,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<(), SourceError> {
        let Some(exposed) = &self.exposed else { return Ok(()) };
        if !lock(&exposed.exposure).pins() {
            return Ok(());
        }
        let (exposure, memory) = (Arc::clone(&exposed.exposure), Arc::clone(&self.memory));
        let refreshing = spawn_blocking(move || {
            let mut exposure = lock(&exposure);
            exposure.refresh(&memory).map(|changed| changed.then(|| exposure.regions(true)))
        });
        match while_alive(control, refreshing).await? {
            Ok(None) => Ok(()),
            Ok(Some(regions)) => Ok(control.send(&ToDestination::Regions(regions)).await?),
            Err(error) => self.not_registered(error, session, control).await,
        }
    }

    /// Opens all page connections, each in a task of its own.
    fn dial(&self, kind: FabricKind, session: &Session) -> JoinSet<(LinkKind, u8, Dialled)> {
        let mut to = session.to().clone();
        if !self.terms.address.is_empty() {
            to.address.clone_from(&self.terms.address);
        }
        let bulk = (0..self.bulk_connections()).map(|i| (LinkKind::Bulk, i));
        let links = std::iter::once((LinkKind::Urgent, 0)).chain(bulk);
        let mut dialling = JoinSet::new();
        for (link, index) in links {
            let mut hello = session.hello(link, index, session.journal.record().token);
            hello.rdma = kind == FabricKind::Verbs;
            let (node, to) = (Arc::clone(&session.node), to.clone());
            dialling.spawn(async move {
                let dialled = node.config.dialer.endpoint(&to, kind, &hello).await;
                (link, index, dialled)
            });
        }
        dialling
    }
}

/// Shows the operator which fabric is in use, and why.
pub(super) fn show_fabric(session: &Session) {
    let fabric = format!("{}: {}", session.report.fabric, session.report.fabric_reason);
    session.publisher.update(|p| p.fabric = Some(fabric));
}

/// Waits for work on a thread. It may take seconds for a large guest, and the destination must not take us for dead.
pub(super) async fn while_alive<T>(control: &mut Control, mut work: JoinHandle<T>) -> Result<T, SourceError> {
    loop {
        match tokio::time::timeout(KEEPALIVE_INTERVAL, &mut work).await {
            Ok(done) => return Ok(done?),
            Err(_) => control.keep_alive().await?,
        }
    }
}

fn thread_options(session: &Session, link: LinkKind, index: u8) -> ThreadOptions {
    // While the guest runs here it comes first; a guest that waits for pages elsewhere must not wait for idle work here.
    let hurries = session.mode == Mode::Postcopy || !session.state().may_run();
    match link {
        LinkKind::Urgent => ThreadOptions::urgent("vmove-serve-u"),
        _ => ThreadOptions {
            sched: Sched::Normal { nice: if hurries { 0 } else { BULK_NICE } },
            ..ThreadOptions::bulk(format!("vmove-serve-{index}"))
        },
    }
}

fn source_error(error: ExposeError) -> SourceError {
    match error {
        ExposeError::Fabric(error) => FabricFailure::Register(error).into(),
        ExposeError::Memory(error) => SourceError::memory("make the guest's memory readable")(error),
        ExposeError::Task(error) => error.into(),
    }
}
