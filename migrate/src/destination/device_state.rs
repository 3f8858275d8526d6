//! The device state: from the source's stream into QEMU.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use vmove_node::peer::BoxedStream;
use vmove_qmp::switchover::{Destination, StateSender, relay};

use super::error::DeviceStateError;

/// Loading half a MiB of device state takes milliseconds; a page it needs may have to be fetched meanwhile.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);

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
    pub(super) fn await_stream(destination: Arc<Destination>, to: StateSender) -> Self {
        let (stream, given) = oneshot::channel();
        let task = tokio::spawn(async move {
            match given.await {
                Ok(from) => load(&destination, from, to).await,
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

async fn load(
    destination: &Destination,
    mut from: BoxedStream,
    mut to: StateSender,
) -> Result<u64, DeviceStateError> {
    let mut relaying = pin!(relay(&mut from, &mut to));
    let mut loaded = pin!(destination.loaded(LOAD_TIMEOUT));
    let mut relayed = None;
    loop {
        tokio::select! {
            stats = &mut relaying, if relayed.is_none() => {
                if let Err(error) = &stats {
                    // QEMU says what it makes of that.
                    tracing::warn!(%error, "the device state stream broke");
                }
                relayed = Some(stats);
            }
            done = &mut loaded => {
                done?;
                break;
            }
        }
    }
    let stats = match relayed {
        Some(stats) => stats,
        None => relaying.await,
    };
    Ok(stats.map_or(0, |stats| stats.bytes))
}
