//! The device state: from the source's stream into QEMU.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use vmove_node::peer::BoxedStream;

use super::error::DeviceStateError;
use crate::vmm::ArrivingMonitor;

/// Where it stands.
#[derive(Debug)]
pub(super) enum DeviceState {
    /// QEMU waits for it, or is loading it.
    Loading(Loading),
    /// QEMU has it.
    Loaded {
        /// How much it was.
        bytes: u64,
    },
}

/// A task that hands QEMU the stream when that comes, and ends when QEMU has loaded it. The task ends when this is dropped.
#[derive(Debug)]
pub(super) struct Loading {
    stream: Option<oneshot::Sender<BoxedStream>>,
    task: JoinHandle<Result<u64, DeviceStateError>>,
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl DeviceState {
    /// Waits for the stream.
    pub(super) fn await_stream(monitor: Arc<dyn ArrivingMonitor>) -> Self {
        let (stream, given) = oneshot::channel();
        let task = vmove_node::task::spawn(async move {
            match given.await {
                Ok(from) => Ok(monitor.load(from).await?),
                // The session has ended, and this task with it.
                Err(_) => std::future::pending().await,
            }
        });
        Self::Loading(Loading { stream: Some(stream), task })
    }

    /// The source has opened the connection.
    pub(super) fn give(&mut self, stream: BoxedStream) {
        let waiting = match self {
            Self::Loading(loading) => loading.stream.take(),
            Self::Loaded { .. } => None,
        };
        match waiting {
            // A task that has ended tells why.
            Some(waiting) => drop(waiting.send(stream)),
            None => tracing::warn!("a second connection for device state; dropped"),
        }
    }

    /// Waits until QEMU has loaded it. Never ends if it has. Cancel-safe.
    pub(super) async fn loaded(&mut self) -> Result<(), DeviceStateError> {
        match self {
            Self::Loading(loading) => {
                let bytes = (&mut loading.task).await??;
                *self = Self::Loaded { bytes };
                Ok(())
            }
            Self::Loaded { .. } => std::future::pending().await,
        }
    }
}
