//! The monitor of the destination QEMU, and the guest's first instruction here.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::task::JoinHandle;
use vmove_qmp::switchover::{Announce, Destination};
use vmove_qmp::{Client, QmpError};

use super::error::DestinationError;
use super::session::Session;
use vmove_types::problem::chain;
use vmove_types::time::Mono;

/// Attempts of up to 5 s each to reach the monitor of a QEMU that was found again: its main loop may wait for pages that come only when
/// the source has dialled.
const CONNECT_TRIES: u32 = 1000;
/// Between them.
const CONNECT_INTERVAL: Duration = Duration::from_millis(200);
/// `cont` takes disks over, which may have to wait for a lock on a slow file server.
const RESUME_TIMEOUT: Duration = Duration::from_secs(30);

/// A monitor that answers.
#[derive(Debug)]
pub(super) struct Monitor {
    client: Client,
    /// `None` if an earlier process of this daemon started QEMU: then the guest's new place is not announced.
    destination: Option<Arc<Destination>>,
}

/// A monitor that is being connected to: QEMU may answer only once it has the pages that it waits for.
#[derive(Debug)]
pub(super) struct Connecting(JoinHandle<Result<Client, QmpError>>);

impl Drop for Connecting {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Connecting {
    pub(super) fn to_monitor_of(session: &Session) -> Self {
        let (node, socket) = (Arc::clone(&session.node), session.files.layout.qmp_socket.clone());
        Self(tokio::spawn(async move {
            let mut tries = 1;
            loop {
                match node.config.monitors.client(&socket).await {
                    Err(error) if tries >= CONNECT_TRIES => return Err(error),
                    Err(_) => tokio::time::sleep(CONNECT_INTERVAL).await,
                    connected => return connected,
                }
                tries += 1;
            }
        }))
    }

    /// Waits until it answers. Cancel-safe; not to be called again after that.
    pub(super) async fn connected(&mut self) -> Result<Monitor, DestinationError> {
        let client = (&mut self.0).await?.map_err(DestinationError::Monitor)?;
        Ok(Monitor { client, destination: None })
    }
}

impl Monitor {
    pub(super) const fn new(client: Client, destination: Arc<Destination>) -> Self {
        Self { client, destination: Some(destination) }
    }

    /// Lets the guest run. Returns when it began to.
    pub(super) async fn resume_guest(&self) -> Result<Mono, DestinationError> {
        let resumed = self.client.expect("RESUME", |_| true);
        let cont = self.client.execute_raw("cont", Value::Null, RESUME_TIMEOUT).await;
        cont.map_err(DestinationError::Resume)?;
        let event = resumed.wait(RESUME_TIMEOUT).await.map_err(DestinationError::Resume)?;
        let at = Mono(event.at.0);
        self.announce();
        Ok(at)
    }

    /// After a kill between the journal's line and `cont`.
    pub(super) async fn resume_if_paused(&self) {
        let status = self.client.execute_raw("query-status", Value::Null, RESUME_TIMEOUT).await;
        let paused = status.is_ok_and(|s| s.get("status").and_then(|s| s.as_str()) == Some("paused"));
        let resumed = if paused { self.resume_guest().await.map(drop) } else { Ok(()) };
        if let Err(error) = resumed {
            tracing::error!(error = chain(&error), "the guest stays paused");
        }
    }

    /// Tells the network where the guest is now. In the background: nothing waits for it.
    fn announce(&self) {
        if let Some(destination) = self.destination.clone() {
            tokio::spawn(async move {
                if let Err(error) = destination.announce(Announce::default()).await {
                    tracing::warn!(
                        error = chain(&error),
                        "the guest's new place was not announced to the network"
                    );
                }
            });
        }
    }
}
