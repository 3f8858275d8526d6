//! The template on its way to a host: it takes part in the distribution until everything is here.

use std::sync::Arc;

use tokio::sync::oneshot;
use vmove_fabric::{Fabric, FabricKind, Multicast, PeerAddress};
use vmove_node::blocking::run_blocking;
use vmove_spread::{Host, HostId, HostOptions, HostStatus, SpreadError};

use super::{HostPart, PROGRESS_INTERVAL, SILENCE_TIMEOUT};
use crate::CloneError;
use crate::chunks::Chunks;
use crate::engine::distribution::{ArrivingMemory, Connections};
use crate::engine::error::{DistributionError, ForkError, TalkError};
use crate::engine::message::{Begin, Phase, Taken, ToHost, address_of};
use crate::template::{self, Arriving, Manifest, Template};
use vmove_types::problem::chain;

impl HostPart {
    /// Makes room for the template.
    pub(super) async fn arriving(&self, manifest: Manifest) -> Result<Arriving, ForkError> {
        self.engine.update(&self.order.fork, |p| p.phase = "fetch".to_owned());
        let memory = self.engine.registry.memory_dir().to_owned();
        Ok(run_blocking(move || template::receive(&memory, manifest)).await??)
    }

    /// The whole template, from the parent's node and from other hosts.
    pub(super) async fn fetch(
        &mut self,
        begin: &Begin,
        manifest: Manifest,
    ) -> Result<(Template, Arc<Host>, HostStatus), ForkError> {
        let arriving = self.arriving(manifest).await?;
        let host = self.join(begin, &arriving, None)?;
        let status = match self.until_whole(&host).await {
            Ok(status) => status,
            Err(error) => {
                // Its threads end, which may take a while.
                let _ = run_blocking(move || drop(host)).await;
                return Err(error);
            }
        };
        let (state, checksum) = (begin.state.clone(), begin.checksum);
        let work = move || {
            let template = arriving.complete(&state)?;
            if checksum.is_some_and(|sum| template.checksum().ok() != Some(sum)) {
                let why = "its memory is not that of the parent's node: the checksum differs".to_owned();
                return Err(CloneError::Template { path: template.dir().to_owned(), why });
            }
            Ok(template)
        };
        let completed = self.alive_during(&status, run_blocking(work)).await?;
        Ok((completed?, host, status))
    }

    /// Takes part in the distribution; `known` is told what travels.
    pub(super) fn join(
        &self,
        begin: &Begin,
        arriving: &Arriving,
        known: Option<oneshot::Sender<Arc<Chunks>>>,
    ) -> Result<Arc<Host>, ForkError> {
        let peers = &self.engine.peers;
        let root = peers.parent_of(&self.order.node, self.from, self.order.port);
        let hosts = begin.peers.iter().map(|(name, target)| (name.clone(), peers.named_by_peer(target)));
        let hosts = hosts.chain([(address_of(0), root)]).collect();
        let (session, token) = (self.hello.session, self.hello.token);
        let connections = Connections::open(peers, session, token, hosts);
        let taken = |so: fn(&Taken) -> bool| self.taken.as_ref().is_some_and(so);
        let verbs = begin.no_verbs.is_none() && taken(|taken| taken.verbs);
        let kind = if verbs { FabricKind::Verbs } else { FabricKind::Tcp };
        let shared = |kind| connections.by(kind).map(|fabric| fabric as Arc<dyn Fabric>);
        let tcp = shared(FabricKind::Tcp);
        let (fabric, second) = match shared(kind).filter(|_| verbs) {
            Some(fabric) => (Some(fabric), tcp),
            None => (tcp, None),
        };
        let fabric = fabric.ok_or(DistributionError::NoFabric(kind))?;
        // Where the parent's node has RDMA, datagrams go that way.
        let hears = taken(|taken| taken.hears) && fabric.kind() == kind && verbs == begin.no_verbs.is_none();
        let multicast = peers.multicast(kind, token).ok().filter(|_| hears).map(Arc::<dyn Multicast>::from);
        let memory = arriving.memory.clone();
        let target = ArrivingMemory { memory, parts: begin.parts.clone().into(), known, chunks: None };
        let options = HostOptions {
            me: HostId(begin.me),
            root: PeerAddress::Named(address_of(0)),
            listens: begin.listens,
            second,
        };
        let host =
            Host::join(fabric, multicast, Box::new(target), options).map_err(DistributionError::from)?;
        Ok(Arc::new(host))
    }

    /// Follows the distribution until everything is here, and tells the parent's daemon how far it is.
    pub(super) async fn until_whole(&mut self, host: &Arc<Host>) -> Result<HostStatus, ForkError> {
        let mut heard = tokio::time::Instant::now();
        let mut gone: Option<TalkError> = None;
        loop {
            let waiting = host.clone();
            match run_blocking(move || waiting.wait(PROGRESS_INTERVAL)).await? {
                Ok(status) => return Ok(status),
                Err(SpreadError::Timeout { .. }) => self.say(&host.status(), Phase::Fetch).await,
                Err(error) => {
                    if let Some(gone) = gone {
                        tracing::warn!(why = %chain(&error), "the distribution failed, and its parent is gone");
                        return Err(ForkError::ParentLost(gone));
                    }
                    return Err(DistributionError::from(error).into());
                }
            }
            while let Some(message) = self.channel.received() {
                heard = tokio::time::Instant::now();
                match message {
                    Ok(ToHost::GiveUp(why)) => return Err(ForkError::GivenUp(why)),
                    Ok(_) => {}
                    // What is under way may still be completed by other hosts.
                    Err(error) => gone = gone.or_else(|| Some(error.into())),
                }
            }
            if heard.elapsed() > SILENCE_TIMEOUT {
                let missing = host.status().missing;
                let why = gone.unwrap_or(TalkError::NotHeard(SILENCE_TIMEOUT));
                return Err(ForkError::Incomplete { missing, source: Box::new(ForkError::ParentLost(why)) });
            }
        }
    }
}
