//! Disks that follow their guest: QEMU here reads the source's images by sockets of ours.
//!
//! ```text
//! QEMU - overlay - after0.sock - vmoved ==== peer port ==== vmoved - qemu-nbd --read-only - image
//!        |________ destination _______|              |__________ source __________|
//! ```
//!
//! The source dials a connection for each disk, and dials again when it breaks. QEMU, too, connects anew, and repeats what it had asked. Until the
//! guest is ours, QEMU is shown [an image that cannot be read](super::size_only).

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use vmove_node::peer::{BoxedStream, join};
use vmove_qmp::confine::Confinement;

use super::size_only;
use crate::proto::message::Prepare;

/// Until it is tried again to listen on a socket, or to accept.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// The socket by which QEMU reads the disk of this number.
pub(super) fn socket(vm_dir: &Path, number: usize) -> PathBuf {
    vm_dir.join(format!("vmove-after{number}.sock"))
}

/// Connections of QEMU here to images of the source.
#[derive(Debug)]
pub(super) struct AfterWires {
    slots: Vec<Arc<Slot>>,
    is_open: watch::Sender<bool>,
    tasks: JoinSet<()>,
    sockets: Vec<PathBuf>,
}

/// A connection of the source's that QEMU is to have.
#[derive(Debug, Default)]
struct Slot {
    wire: Mutex<Option<BoxedStream>>,
    filled: Notify,
}

/// What serves a disk.
struct Server {
    socket: PathBuf,
    size: u64,
    rights: Confinement,
    slot: Arc<Slot>,
    is_open: watch::Receiver<bool>,
}

impl AfterWires {
    /// Listens for the QEMU of a guest whose disks follow it: of others there are none. `is_ours`: the guest is.
    pub(super) fn of(prepare: &Prepare, vm_dir: &Path, rights: &Confinement, is_ours: bool) -> Self {
        let (is_open, seen) = watch::channel(is_ours);
        let (mut slots, mut tasks, mut sockets) = (Vec::new(), JoinSet::new(), Vec::new());
        let disks = prepare.moved.iter().filter(|_| prepare.spec.disks_after);
        for (number, disk) in disks.enumerate() {
            let (slot, socket) = (Arc::new(Slot::default()), socket(vm_dir, number));
            let (rights, is_open) = (rights.clone(), seen.clone());
            let server =
                Server { socket: socket.clone(), size: disk.size, rights, slot: Arc::clone(&slot), is_open };
            // QEMU finds it there as soon as it is started.
            let listener = server.listen();
            tasks.spawn(server.serve(listener));
            slots.push(slot);
            sockets.push(socket);
        }
        Self { slots, is_open, tasks, sockets }
    }

    /// The guest is ours: from here on its disks are read from the source. Its QEMU is told to run it only after that.
    pub(super) fn open(&self) {
        self.is_open.send_replace(true);
    }

    /// Takes a connection of the source's. An older one for the same disk is of no use any more. The connection again, if it is for no disk that
    /// follows.
    pub(super) fn take(&self, number: u8, wire: BoxedStream) -> Option<BoxedStream> {
        let Some(slot) = self.slots.get(usize::from(number)) else { return Some(wire) };
        *slot.lock() = Some(wire);
        slot.filled.notify_one();
        None
    }
}

impl Drop for AfterWires {
    fn drop(&mut self) {
        self.tasks.abort_all();
        for socket in &self.sockets {
            let _ = std::fs::remove_file(socket);
        }
    }
}

impl Slot {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<BoxedStream>> {
        self.wire.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is a connection. Cancel-safe.
    async fn is_filled(&self) {
        while self.lock().is_none() {
            self.filled.notified().await;
        }
    }

    /// Waits for a connection, and takes it. Cancel-safe.
    async fn wire(&self) -> BoxedStream {
        loop {
            self.is_filled().await;
            if let Some(wire) = self.lock().take() {
                return wire;
            }
        }
    }
}

impl Server {
    fn listen(&self) -> std::io::Result<UnixListener> {
        let _ = std::fs::remove_file(&self.socket);
        let listener = UnixListener::bind(&self.socket)?;
        self.rights.give(&self.socket)?;
        Ok(listener)
    }

    /// Never ends.
    async fn serve(mut self, mut listener: std::io::Result<UnixListener>) {
        let listener = loop {
            match listener {
                Ok(listener) => break listener,
                Err(error) => {
                    tracing::error!(socket = %self.socket.display(), %error, "cannot listen for a disk that follows its guest: trying again");
                    tokio::time::sleep(TRY_AGAIN).await;
                    listener = self.listen();
                }
            }
        };
        let mut next = accept(&listener).await;
        loop {
            next = self.serve_one(next, &listener).await;
        }
    }

    /// Serves a connection of QEMU's until it ends, and gives the next one. QEMU has one at a time: if it makes another, it has left this one.
    async fn serve_one(&mut self, qemu: UnixStream, listener: &UnixListener) -> UnixStream {
        if !*self.is_open.borrow() {
            let (seen, mut opens) = (self.is_open.clone(), self.is_open.clone());
            let shown = size_only::serve(self.size, qemu, || *seen.borrow());
            return first(listener, async {
                tokio::select! {
                    biased;
                    _ = opens.wait_for(|is_open| *is_open) => {}
                    _ = shown => {}
                }
            })
            .await;
        }
        let slot = Arc::clone(&self.slot);
        first(listener, async move {
            let wire = slot.wire().await;
            tokio::select! {
                () = join(qemu, wire) => {}
                // The source has dialled again: the other one is dead.
                () = slot.is_filled() => {}
            }
        })
        .await
    }
}

/// The next connection of QEMU's: after this has come to its end, or instead of it.
async fn first(listener: &UnixListener, serving: impl Future<Output = ()>) -> UnixStream {
    tokio::select! {
        () = serving => {}
        next = accept(listener) => return next,
    }
    accept(listener).await
}

async fn accept(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            // Out of descriptors.
            Err(error) => {
                tracing::warn!(%error, "QEMU cannot connect to a disk that follows its guest: trying again");
                tokio::time::sleep(TRY_AGAIN).await;
            }
        }
    }
}
