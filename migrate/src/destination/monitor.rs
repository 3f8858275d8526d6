//! The monitor of the destination QEMU, and the guest's first instruction here.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use vmove_qmp::QmpError;

use super::error::DestinationError;
use super::session::Session;
use crate::vmm::ArrivingMonitor;
use vmove_types::problem::chain;
use vmove_types::time::Mono;

/// Attempts of up to 5 s each to reach the monitor of a QEMU that was found again: its main loop may wait for pages that come only when
/// the source has dialled.
const CONNECT_TRIES: u32 = 1000;
/// Between them.
const CONNECT_INTERVAL: Duration = Duration::from_millis(200);

/// A monitor that answers.
#[derive(Debug)]
pub(super) struct Monitor(Arc<dyn ArrivingMonitor>);

/// A monitor that is being connected to: QEMU may answer only once it has the pages that it waits for.
#[derive(Debug)]
pub(super) struct Connecting(JoinHandle<Result<Arc<dyn ArrivingMonitor>, QmpError>>);

impl Drop for Connecting {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Connecting {
    pub(super) fn to_monitor_of(session: &Session) -> Self {
        let (node, socket) = (Arc::clone(&session.node), session.files.layout.qmp_socket.clone());
        Self(vmove_node::task::spawn(async move {
            let mut tries = 1;
            loop {
                match node.config.vmm.reconnect(&socket).await {
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
        Ok(Monitor((&mut self.0).await?.map_err(DestinationError::Monitor)?))
    }
}

impl Monitor {
    pub(super) const fn new(monitor: Arc<dyn ArrivingMonitor>) -> Self {
        Self(monitor)
    }

    /// Lets the guest run. Returns when it began to.
    pub(super) async fn resume_guest(&self) -> Result<Mono, DestinationError> {
        self.0.resume().await.map_err(DestinationError::Resume)
    }

    /// After a kill between the journal's line and `cont`.
    pub(super) async fn resume_if_paused(&self) {
        let paused = self.0.run_state().await.is_ok_and(|status| status == "paused");
        let resumed = if paused { self.resume_guest().await.map(drop) } else { Ok(()) };
        if let Err(error) = resumed {
            tracing::error!(error = chain(&error), "the guest stays paused");
        }
    }
}
