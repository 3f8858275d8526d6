//! At the destination: what the source passes on goes into the guest's taps.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;
use vmove_node::peer::BoxedStream;
use vmove_types::time::Mono;

use super::link::{read_frame, read_name};
use super::packet_socket::{PacketSocket, Way};
use super::stale;
use crate::vmm::ArrivingMonitor;

/// QEMU announces within a few milliseconds.
const ANNOUNCED_TIMEOUT: Duration = Duration::from_millis(100);

/// Connections for frames of one guest. Dropping this closes them.
#[derive(Debug, Default)]
pub(crate) struct Deliveries {
    tasks: Vec<JoinHandle<()>>,
    monitor: Option<Arc<dyn ArrivingMonitor>>,
}

impl Drop for Deliveries {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Deliveries {
    /// Takes a connection. QEMU has this process and this monitor, and its guest does not run yet.
    pub(crate) fn take(&mut self, link: BoxedStream, pid: u32, monitor: Arc<dyn ArrivingMonitor>) {
        self.monitor = Some(Arc::clone(&monitor));
        self.tasks.push(vmove_node::task::spawn(async move {
            if let Err(error) = deliver(link, pid, &*monitor).await {
                tracing::warn!(%error, "frames for the guest are not taken any more");
            }
        }));
    }

    /// Waits until the addresses of a guest that was let run are announced: until then switches send its frames to the source, which passes them on. When
    /// that was; `None` if the guest has no tap, or it took too long.
    pub(crate) async fn announced(&self) -> Option<Mono> {
        timeout(ANNOUNCED_TIMEOUT, self.monitor.as_ref()?.announced()).await.ok()?
    }
}

async fn deliver(mut link: BoxedStream, pid: u32, monitor: &dyn ArrivingMonitor) -> io::Result<()> {
    let netdev = read_name(&mut link).await?;
    let taps = monitor.taps(pid).await.map_err(io::Error::other)?;
    let tap = taps.iter().find(|tap| tap.netdev == netdev);
    let tap = tap.ok_or_else(|| io::Error::other(format!("the guest has no tap {netdev} here")))?;
    let socket = PacketSocket::open(&tap.interface, Way::Sends)?;
    let taken = stale::take_away(pid, &tap.interface)?;
    tracing::debug!(netdev, tap.interface, taken, "ready for frames");
    let (mut room, mut frames, mut lost) = (Vec::new(), 0_u64, 0_u64);
    while let Some(frame) = read_frame(&mut link, &mut room).await? {
        frames += 1;
        // As on any network: a tap that is full loses frames.
        if let Err(error) = socket.send(frame).await {
            lost += 1;
            tracing::debug!(%error, "a frame that the tap has not taken");
        }
    }
    tracing::debug!(netdev, frames, lost, "no more frames for the guest");
    Ok(())
}
