//! The page connections of a session at the source: opened, opened anew, and over which fabric.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::{JoinHandle, JoinSet};
use vmove_fabric::{Endpoint, FabricKind, Sched, ThreadOptions};

use super::exposure::{ExposeError, Exposure, FIRST_STEP, Place, THE_END, lock, register_next};
use super::registering::{Gate, Registering};
use super::session::{Session, Stop};
use crate::clock::Mono;
use crate::destination::chain;
use crate::link::LinkError;
use crate::ownership::SourceState;
use crate::proto::codec::CodecError;
use crate::proto::hello::LinkKind;
use crate::proto::message::{Accepted, ToDestination};
use crate::spec::Mode;
use crate::throttle::BULK_NICE;

/// A session whose page connections fail more often than this is given up.
const MOST_RENEWALS: u32 = 8;
/// The destination must hear from us meanwhile.
pub(super) const ALIVE_EVERY: Duration = Duration::from_secs(1);

/// A page connection, or why there is none.
type Dialled = Result<Box<dyn Endpoint>, LinkError>;

/// Why page connections could not be opened.
enum Trouble {
    /// Another fabric may do.
    Fabric(String),
    /// Nothing to do with the fabric.
    Stop(Stop),
}

impl From<Stop> for Trouble {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

impl From<ExposeError> for Trouble {
    fn from(error: ExposeError) -> Self {
        match error {
            ExposeError::Fabric(error) => Self::Fabric(chain(&error)),
            ExposeError::Memory(why) => Self::Stop(Stop::Failed(why)),
        }
    }
}

impl From<CodecError> for Trouble {
    fn from(error: CodecError) -> Self {
        Self::Stop(error.into())
    }
}

impl Session {
    /// Opens the page connections and answers reads on them from here on. Where the fabric that was agreed on does not work, tcp
    /// takes its place.
    pub(super) async fn serve_pages(&mut self) -> Result<(), Stop> {
        let accepted = self.accepted.as_ref().ok_or_else(|| "no fabric was agreed on".to_owned())?;
        let kind = *self.fabric.get_or_insert(accepted.fabric);
        match self.serve_over(kind).await {
            Ok(()) => Ok(()),
            Err(Trouble::Stop(stop)) => Err(stop),
            Err(Trouble::Fabric(why)) if self.fall_back(&format!("{kind} does not work: {why}")) => {
                match self.serve_over(FabricKind::Tcp).await {
                    Ok(()) => Ok(()),
                    Err(Trouble::Stop(stop)) => Err(stop),
                    Err(Trouble::Fabric(why)) => Err(Stop::Failed(why)),
                }
            }
            Err(Trouble::Fabric(why)) => Err(Stop::Failed(why)),
        }
    }

    /// Ends the page connections; then the memory is no longer registered.
    pub(super) fn end_pages(&mut self) {
        self.serving.clear();
        self.registering = None;
        self.exposure = None;
    }

    /// The destination has lost its page connections: opens others, and names again what it may lack.
    pub(super) async fn renew_pages(&mut self, why: String, same_fabric: bool) -> Result<(), CodecError> {
        self.renewals += 1;
        tracing::warn!(session = %self.id, why, renewals = self.renewals, "page connections were lost; opening others");
        if self.renewals > MOST_RENEWALS {
            let why = format!("page connections failed {} times; the last time: {why}", self.renewals);
            return Err(Stop::Failed(why).into_lost());
        }
        // Memory stays registered, so that a guest that waits for a page need not wait for that; unless it may be the cause.
        let landed = Some(self.counted.landed_bytes);
        if std::mem::replace(&mut self.landed_at_renewal, landed) == landed {
            self.end_pages();
        }
        self.report.recoveries += 1;
        if !same_fabric {
            self.fall_back(&format!("verbs was given up: {why}"));
        }
        self.final_runs = None;
        self.serve_pages().await.map_err(Stop::into_lost)?;
        if !self.final_sets.is_empty() {
            self.start_naming();
        }
        Ok(())
    }

    /// From here on tcp, if that is another fabric than the present one and both sides have it.
    fn fall_back(&mut self, why: &str) -> bool {
        let possible = self.accepted.as_ref().is_some_and(|accepted| accepted.may_fall_back);
        if !possible || self.fabric != Some(FabricKind::Verbs) {
            return false;
        }
        tracing::warn!(session = %self.id, why, "goes on over tcp");
        self.fabric = Some(FabricKind::Tcp);
        self.report.fabric = FabricKind::Tcp.to_string();
        why.clone_into(&mut self.report.fabric_reason);
        self.show_fabric();
        true
    }

    pub(super) fn show_fabric(&self) {
        let fabric = format!("{}: {}", self.report.fabric, self.report.fabric_reason);
        self.publisher.update(|p| p.fabric = Some(fabric));
    }

    async fn serve_over(&mut self, kind: FabricKind) -> Result<(), Trouble> {
        let accepted =
            self.accepted.clone().ok_or_else(|| Stop::Failed("no fabric was agreed on".to_owned()))?;
        let fabric = self.node.config.dialer.fabric(kind);
        let fabric = fabric.ok_or_else(|| Trouble::Fabric(format!("{kind} is not open here (any more)")))?;
        self.serving.clear();
        let known = self.exposure.take().filter(|known| lock(known).is_with(&fabric));
        if known.is_none() {
            self.registering = None;
        }
        let memory = Arc::clone(self.memory().map_err(Stop::Failed)?);
        // While the guest runs here the rest can be registered behind the first reads. One that waits for a page elsewhere must find
        // everything readable.
        let first = if self.state() == SourceState::Warm { FIRST_STEP } else { u64::MAX };
        let begun = Mono::now();
        let exposing = tokio::task::spawn_blocking(move || {
            let exposure = if let Some(known) = known {
                known
            } else {
                let exposure = Arc::new(Mutex::new(Exposure::open(&memory, fabric)?));
                register_next(&exposure, first)?;
                exposure
            };
            Ok::<_, ExposeError>((exposure, Mono::now()))
        });
        // Memory is registered and connections are opened at the same time: each is mostly waiting.
        let mut dialling = self.dial_pages(kind, &accepted);
        let (exposure, registered) = self.meanwhile_alive(exposing).await??;
        while let Some(dialled) = dialling.join_next().await {
            let (link, index, dialled) = dialled.map_err(|error| Stop::Failed(error.to_string()))?;
            let endpoint = dialled.map_err(|error| match error {
                LinkError::Fabric { why, .. } => Trouble::Fabric(why),
                other => Trouble::Stop(other.into()),
            })?;
            self.serve_connection(endpoint, link, index)?;
        }
        tracing::info!(
            session = %self.id,
            fabric = %kind,
            registered_ms = registered.ms_since(begun).round(),
            open_ms = Mono::now().ms_since(begun).round(),
            "page connections are open"
        );
        Ok(self.tell_regions(exposure).await?)
    }

    /// Says what can be read over the page connections, which are new, and goes on with what cannot be read yet.
    async fn tell_regions(&mut self, exposure: Arc<Mutex<Exposure>>) -> Result<(), CodecError> {
        let (regions, frontier) = {
            let exposure = lock(&exposure);
            (exposure.regions(false), exposure.frontier())
        };
        self.exposure = Some(Arc::clone(&exposure));
        self.send(&ToDestination::Regions(regions)).await?;
        if self.registering.is_some() {
            self.gate.open_to(frontier);
            return Ok(());
        }
        self.gate = Arc::new(Gate::new(frontier));
        if frontier != THE_END {
            self.registering = Some(Registering::start(exposure, Arc::clone(&self.gate)));
        }
        Ok(())
    }

    /// Passes on what was registered meanwhile: [`next_step`] gave this. Whether page connections had to be opened anew.
    pub(super) async fn registered(&mut self, step: Option<Place>) -> Result<bool, CodecError> {
        if let Some(place) = step {
            if let Some(exposure) = &self.exposure {
                let regions = lock(exposure).regions(true);
                self.send(&ToDestination::Regions(regions)).await?;
            }
            self.gate.open_to(place);
            return Ok(false);
        }
        let Some(registering) = self.registering.take() else { return Ok(false) };
        match registering.end().await {
            Ok(()) => {
                let landed_bytes = self.counted.landed_bytes;
                tracing::info!(session = %self.id, landed_bytes, "all guest memory is registered");
                Ok(false)
            }
            Err(error) => self.not_registered(error).await.map(|()| true).map_err(Stop::into_lost),
        }
    }

    /// Waits until all memory can be read.
    pub(super) async fn all_registered(&mut self) -> Result<(), Stop> {
        while self.registering.is_some() {
            match tokio::time::timeout(ALIVE_EVERY, next_step(&mut self.registering)).await {
                Ok(step) => drop(self.registered(step).await?),
                Err(_) => self.send(&ToDestination::Ping(0)).await?,
            }
        }
        Ok(())
    }

    /// Memory could not be registered: perhaps another fabric does without.
    async fn not_registered(&mut self, error: ExposeError) -> Result<(), Stop> {
        match error {
            ExposeError::Fabric(error) => {
                let why = format!("verbs was given up: {}", chain(&error));
                if !self.fall_back(&why) {
                    return Err(Stop::Failed(why));
                }
                self.serve_pages().await
            }
            ExposeError::Memory(why) => Err(Stop::Failed(why)),
        }
    }

    /// Opens all page connections, each in a task of its own.
    fn dial_pages(&self, kind: FabricKind, accepted: &Accepted) -> JoinSet<(LinkKind, u8, Dialled)> {
        let mut to = self.to.clone();
        if !accepted.fabric_address.is_empty() {
            to.address.clone_from(&accepted.fabric_address);
        }
        let bulk = accepted.bulk_connections.max(1);
        let links = std::iter::once((LinkKind::Urgent, 0)).chain((0..bulk).map(|i| (LinkKind::Bulk, i)));
        let mut dialling = JoinSet::new();
        for (link, index) in links {
            let mut hello = self.hello(link, index, self.token);
            hello.rdma = kind == FabricKind::Verbs;
            let (node, to) = (Arc::clone(&self.node), to.clone());
            dialling.spawn(async move {
                let dialled = node.config.dialer.endpoint(&to, kind, &hello).await;
                (link, index, dialled)
            });
        }
        dialling
    }

    fn serve_connection(
        &mut self,
        endpoint: Box<dyn Endpoint>,
        link: LinkKind,
        index: u8,
    ) -> Result<(), Stop> {
        let options = match link {
            LinkKind::Urgent => ThreadOptions::urgent("vmove-serve-u"),
            _ => ThreadOptions {
                sched: Sched::Normal { nice: self.bulk_nice() },
                ..ThreadOptions::bulk(format!("vmove-serve-{index}"))
            },
        };
        self.serving.push(endpoint.serve(options).map_err(|e| Stop::Failed(chain(&e)))?);
        Ok(())
    }

    /// Before pages are named, after the scan that found them: memory that is not what was registered any more is registered afresh,
    /// and the destination told.
    pub(super) async fn refresh_regions(&mut self) -> Result<(), Stop> {
        let Some(exposure) = self.exposure.clone() else { return Ok(()) };
        let memory = Arc::clone(self.memory()?);
        let regions = self.meanwhile_alive(tokio::task::spawn_blocking(move || {
            let mut exposure = lock(&exposure);
            exposure.refresh(&memory).map(|changed| changed.then(|| exposure.regions(true)))
        }));
        match regions.await? {
            Ok(None) => Ok(()),
            Ok(Some(regions)) => Ok(self.send(&ToDestination::Regions(regions)).await?),
            Err(error) => self.not_registered(error).await,
        }
    }

    /// Waits for work on a thread. It may take seconds for a large guest, and the destination must not take us for dead.
    pub(super) async fn meanwhile_alive<T>(&mut self, mut work: JoinHandle<T>) -> Result<T, Stop> {
        loop {
            match tokio::time::timeout(ALIVE_EVERY, &mut work).await {
                Ok(done) => return done.map_err(|error| Stop::Failed(error.to_string())),
                Err(_) => self.send(&ToDestination::Ping(0)).await?,
            }
        }
    }

    /// While the guest runs here it comes first; a guest that waits for pages elsewhere must not wait for idle work here.
    fn bulk_nice(&self) -> i8 {
        if self.mode == Mode::Postcopy || !self.state().may_run() { 0 } else { BULK_NICE }
    }
}

/// How far registering has come, or that it has ended. Cancel-safe.
pub(super) async fn next_step(registering: &mut Option<Registering>) -> Option<Place> {
    match registering {
        Some(registering) => registering.step().await,
        None => std::future::pending().await,
    }
}
