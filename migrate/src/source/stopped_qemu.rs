//! The source's QEMU once it has stopped the guest: it holds the memory until all of that is at the destination.

use std::sync::Arc;

use tokio::task::AbortHandle;
use vmove_qmp::Client;
use vmove_qmp::switchover::{Source, StateReceiver, relay};

use super::aborted::cancel_qemu;
use super::error::SourceError;
use super::memory::SourceMemory;
use super::session::Session;
use vmove_node::peer::BoxedStream;
use vmove_types::time::Mono;

/// The QEMU that holds the guest's memory.
#[derive(Debug)]
pub(super) enum Kept {
    /// This process has stopped it.
    InMemory(Qemu),
    /// An earlier process of this daemon has: the journal says which it is.
    Journaled,
}

/// A QEMU whose guest was given up.
#[derive(Debug)]
pub(super) struct Qemu {
    pub monitor: Client,
    pub source: Arc<Source>,
    /// When it stopped the guest; `None` of one that was paused before.
    pub stopped_at: Option<Mono>,
    pub _relay: Option<Relay>,
}

/// Carries QEMU's device state to the destination. It ends when this is dropped: QEMU's write fails if it still sends, which ends its
/// migration sooner.
#[derive(Debug)]
pub(super) struct Relay(AbortHandle);

impl Drop for Relay {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Relay {
    pub(super) fn start(mut from: StateReceiver, mut to: BoxedStream) -> Self {
        let relaying = tokio::spawn(async move {
            if let Err(error) = relay(&mut from, &mut to).await {
                tracing::debug!(%error, "the device state stream broke");
            }
        });
        Self(relaying.abort_handle())
    }
}

/// Undoes the stop of a guest that was not given up: QEMU drops its migration, so the guest runs again if it did before.
pub(super) async fn cancel_stop(
    relay: &mut Option<Relay>,
    qemu: &Source,
    memory: &SourceMemory,
) -> Result<(), SourceError> {
    // Ends the stream to the destination, so that QEMU does not wait for it.
    *relay = None;
    let back = cancel_qemu(qemu).await;
    memory.end_tracking();
    back
}

impl Kept {
    /// Lets the guest run again.
    pub(super) async fn bring_guest_back(self, session: &Session) -> Result<(), SourceError> {
        match self {
            Self::InMemory(qemu) => cancel_qemu(&qemu.source).await,
            Self::Journaled => {
                let client = session.node.config.monitors.client(&session.vm().qmp_socket).await;
                let client = client.map_err(SourceError::Monitor)?;
                let attached = Source::attach(&client, session.journal.record().was_running).await;
                cancel_qemu(&attached.map_err(SourceError::qemu("be asked about its migration"))?).await
            }
        }
    }
}
