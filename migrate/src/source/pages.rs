//! The page connections of a session at the source: opened, opened anew, and over which fabric.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::{JoinHandle, JoinSet};
use vmove_fabric::{Endpoint, FabricKind, Sched, ThreadOptions};

use super::exposure::{ExposeError, Exposure};
use super::session::{Session, Stop};
use crate::clock::Mono;
use crate::destination::chain;
use crate::link::LinkError;
use crate::proto::codec::CodecError;
use crate::proto::hello::LinkKind;
use crate::proto::message::{Accepted, ToDestination};
use crate::spec::Mode;
use crate::throttle::BULK_NICE;

/// A session whose page connections fail more often than this is given up.
const MOST_RENEWALS: u32 = 8;
/// The destination must hear from us meanwhile.
const ALIVE_EVERY: Duration = Duration::from_secs(1);

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
        self.exposure = None;
    }

    /// The destination has lost its page connections: opens others, and names again what it may lack.
    pub(super) async fn renew_pages(&mut self, why: String, same_fabric: bool) -> Result<(), CodecError> {
        self.renewals += 1;
        tracing::warn!(session = %self.id, why, renewals = self.renewals, "page connections were lost; opening others");
        let failed = |why: String| CodecError::Io(std::io::Error::other(why));
        if self.renewals > MOST_RENEWALS {
            return Err(failed(format!(
                "page connections failed {} times; the last time: {why}",
                self.renewals
            )));
        }
        self.report.recoveries += 1;
        if !same_fabric {
            self.fall_back(&format!("verbs was given up: {why}"));
        }
        self.final_runs = None;
        if let Err(stop) = self.serve_pages().await {
            return Err(match stop {
                Stop::Failed(why) => failed(why),
                other => failed(format!("{other:?}")),
            });
        }
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
        self.end_pages();
        let accepted =
            self.accepted.clone().ok_or_else(|| Stop::Failed("no fabric was agreed on".to_owned()))?;
        let fabric = self.node.config.dialer.fabric(kind);
        let fabric = fabric.ok_or_else(|| Trouble::Fabric(format!("{kind} is not open here (any more)")))?;
        let memory = Arc::clone(self.memory().map_err(Stop::Failed)?);
        let begun = Mono::now();
        let exposing = tokio::task::spawn_blocking(move || {
            let exposure = Exposure::open(&memory, fabric);
            (exposure, Mono::now())
        });
        // Memory is registered and connections are opened at the same time: each is mostly waiting.
        let mut dialling = self.dial_pages(kind, &accepted);
        let (exposure, registered) = self.meanwhile_alive(exposing).await?;
        let exposure = exposure.map_err(|error| match error {
            ExposeError::Fabric(error) => Trouble::Fabric(chain(&error)),
            ExposeError::Memory(why) => Trouble::Stop(Stop::Failed(why)),
        })?;
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
        let regions = exposure.regions(false);
        self.exposure = Some(Arc::new(Mutex::new(exposure)));
        self.send(&ToDestination::Regions(regions)).await?;
        Ok(())
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
            let mut exposure = exposure.lock().unwrap_or_else(PoisonError::into_inner);
            exposure.refresh(&memory).map(|changed| changed.then(|| exposure.regions(true)))
        }));
        match regions.await? {
            Ok(None) => Ok(()),
            Ok(Some(regions)) => Ok(self.send(&ToDestination::Regions(regions)).await?),
            Err(ExposeError::Fabric(error)) => {
                let why = format!("verbs was given up: {}", chain(&error));
                if !self.fall_back(&why) {
                    return Err(Stop::Failed(why));
                }
                self.serve_pages().await
            }
            Err(ExposeError::Memory(why)) => Err(Stop::Failed(why)),
        }
    }

    /// Waits for work on a thread. It may take seconds for a large guest, and the destination must not take us for dead.
    async fn meanwhile_alive<T>(&mut self, mut work: JoinHandle<T>) -> Result<T, Stop> {
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
