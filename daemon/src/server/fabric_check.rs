//! `vmove fabric check`: what this node could move guests to another node by, tried out.

use std::sync::Arc;

use tokio::sync::Semaphore;
use vmove_fabric::{Endpoint, FabricError, FabricKind, trial};
use vmove_node::peer::{Dialer, LinkError, PeerTarget};
use vmove_node::peer::{Hello, LinkKind, PROTOCOL_VERSION, SessionId, Token};

use super::dialer::PeerDialer;
use super::fabrics::Fabrics;
use vmove_types::node::{FabricCheck, FabricTrial};
use vmove_types::problem::chain;

/// Peers that may try us at a time: each holds 4 MiB and a thread.
const VISITORS: usize = 4;

/// Why a fabric could not be tried, or failed when it was.
#[derive(Debug, thiserror::Error)]
enum TryError {
    /// This node has no such fabric.
    #[error("not usable at this node: {0}")]
    NotUsableHere(String),
    /// The fabric could not take the connection over.
    #[error("{0}")]
    PageConnection(String),
    /// The connection failed.
    #[error(transparent)]
    Link(LinkError),
    /// The fabric was closed meanwhile.
    #[error("{0} is not open here (any more)")]
    NotOpen(FabricKind),
    /// The reads failed.
    #[error(transparent)]
    Reads(#[from] FabricError),
    /// The task that reads failed.
    #[error(transparent)]
    Task(#[from] tokio::task::JoinError),
}

/// The side that is tried.
#[derive(Debug, Clone)]
pub struct Visits(Arc<Semaphore>);

impl Default for Visits {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(VISITORS)))
    }
}

impl Visits {
    /// Answers a peer that tries a connection, in the background.
    pub fn receive(&self, fabrics: &Arc<Fabrics>, trial: Token, endpoint: Box<dyn Endpoint>, from: &str) {
        let Ok(permit) = self.0.clone().try_acquire_owned() else {
            return tracing::warn!(%from, "too many trials of connections at once; one was refused");
        };
        let Some(fabric) = fabrics.fabric(endpoint.kind(), trial) else { return };
        let multicast = fabrics.multicast(endpoint.kind(), trial);
        let from = from.to_owned();
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            if let Err(error) = trial::answer(&*fabric, multicast.as_deref(), endpoint) {
                tracing::warn!(%from, error = chain(&error), "trial of a connection failed");
            }
        });
    }
}

/// Tries what this node offers, best first.
pub async fn check(node: &str, fabrics: &Arc<Fabrics>, dialer: &PeerDialer, to: &PeerTarget) -> FabricCheck {
    let mut check = FabricCheck {
        node: node.to_owned(),
        to: to.to_string(),
        devices: devices(),
        best: None,
        fabrics: Vec::new(),
    };
    for offer in fabrics.offers() {
        // What a migration between two daemons of one kernel uses needs no trial.
        if offer.kind == FabricKind::Local {
            continue;
        }
        let mut tried = FabricTrial { fabric: offer.kind.to_string(), ..FabricTrial::default() };
        let result = match offer.why_not {
            Some(why) => Err(TryError::NotUsableHere(why)),
            None => one(node, fabrics, dialer, to, offer.kind).await,
        };
        match result {
            Ok(figures) => {
                tried.usable = true;
                tried.read_4k_p50_us = Some(figures.read_4k_p50_us);
                tried.read_4k_p99_us = Some(figures.read_4k_p99_us);
                tried.read_bytes_per_s = Some(figures.read_bytes_per_s);
                match figures.datagrams {
                    Some(Ok(found)) => {
                        tried.multicast_sent = Some(found.sent);
                        tried.multicast_lost = Some(found.lost);
                        tried.multicast_bytes_per_s = Some(found.bytes_per_s);
                    }
                    Some(Err(why)) => tried.multicast_problem = Some(why),
                    None => {}
                }
                check.best.get_or_insert_with(|| offer.kind.to_string());
            }
            Err(why) => tried.problem = Some(chain(&why)),
        }
        check.fabrics.push(tried);
    }
    check
}

async fn one(
    node: &str,
    fabrics: &Arc<Fabrics>,
    dialer: &PeerDialer,
    to: &PeerTarget,
    kind: FabricKind,
) -> Result<trial::Figures, TryError> {
    let hello = Hello {
        version: PROTOCOL_VERSION,
        kind: LinkKind::Trial,
        rdma: kind == FabricKind::Verbs,
        index: 0,
        session: SessionId::random(),
        token: Token::random(),
        node: node.to_owned(),
    };
    let endpoint = dialer.endpoint(to, kind, &hello).await.map_err(|error| match error {
        LinkError::Fabric { why, .. } => TryError::PageConnection(why),
        other => TryError::Link(other),
    })?;
    let fabric = fabrics.fabric(kind, hello.token).ok_or(TryError::NotOpen(kind))?;
    let multicast = fabrics.multicast(kind, hello.token);
    let measure = move || trial::measure(&*fabric, multicast.as_deref(), endpoint);
    Ok(tokio::task::spawn_blocking(measure).await??)
}

/// The RDMA ports of this node, in words.
fn devices() -> Vec<String> {
    #[cfg(feature = "verbs")]
    return vmove_fabric::verbs::ports();
    #[cfg(not(feature = "verbs"))]
    Vec::new()
}
