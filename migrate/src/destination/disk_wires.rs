//! Connections by which the source's QEMU writes to images here.

use std::path::PathBuf;

use tokio::net::UnixStream;
use tokio::task::JoinSet;
use vmove_node::peer::{BoxedStream, join};
use vmove_qmp::RunLayout;

/// Where QEMU here listens for the source's.
pub(super) fn socket(layout: &RunLayout) -> PathBuf {
    layout.vm_dir.join("vmove-disks.sock")
}

/// Connections of the source's QEMU to ours.
#[derive(Debug, Default)]
pub(super) struct DiskWires(JoinSet<()>);

impl DiskWires {
    /// Joins one with our QEMU.
    pub(super) fn join(&mut self, socket: PathBuf, stream: BoxedStream) {
        while self.0.try_join_next().is_some() {}
        self.0.spawn(async move {
            match UnixStream::connect(&socket).await {
                Ok(qemu) => join(qemu, stream).await,
                Err(error) => {
                    tracing::warn!(socket = %socket.display(), %error, "QEMU takes no copy of a disk");
                }
            }
        });
    }
}
