//! `--verify` of disks, the source's side: their images are read as the guest has left them, and hashed. QEMU here has given them away, and nobody
//! writes to them until the destination is whole.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, mpsc};
use vmove_node::blocking::spawn_blocking;
use vmove_qmp::QmpError;
use vmove_types::problem::chain;

use super::session::Session;
use crate::disk_hash::{Chunks, chunks_of, socket};
use crate::host_cpu::HostCpu;
use crate::proto::message::{DiskHashes, DiskRead, ToDestination};
use crate::throttle::Throttle;
use crate::vmm::LeavingMonitor;

/// Messages that wait to be sent: the disks are read no faster than they are told.
const WAITING: usize = 4;
/// While nothing may be read, it is looked so often whether anybody still wants to know.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Whose turn it is: one that begins waits until the one before has taken its exports away.
pub(super) type Turn = Arc<Mutex<()>>;

/// Hashes that are being taken. Dropped, it ends, and takes away what it has made in QEMU.
#[derive(Debug)]
pub(super) struct DiskHashing(mpsc::Receiver<ToDestination>);

/// What is read, and how fast.
struct Reading {
    socket: PathBuf,
    disks: u8,
    pace: Throttle,
    cpu: Arc<HostCpu>,
    said: mpsc::Sender<ToDestination>,
}

impl DiskHashing {
    pub(super) fn begin(session: &Session, turn: &Turn) -> Self {
        let (said, hashes) = mpsc::channel(WAITING);
        let record = session.journal.record();
        let images: Vec<PathBuf> = record.disks.iter().map(|disk| disk.path.clone()).collect();
        let (node, vm, turn) = (Arc::clone(&session.node), session.vm().clone(), Arc::clone(turn));
        let reading = Reading {
            socket: socket(&vm),
            disks: u8::try_from(images.len()).unwrap_or(u8::MAX),
            pace: Throttle::new(session.spec().bandwidth),
            cpu: Arc::clone(&session.cpu),
            said: said.clone(),
        };
        drop(vmove_node::task::spawn(async move {
            let _turn = turn.lock().await;
            let begun = async {
                let monitor = node.config.vmm.monitor(&vm).await?;
                let socket = socket(&vm);
                monitor.end_comparison(&socket, false).await?;
                monitor.export_left(&socket, &vm.vm_dir, &images).await?;
                Ok::<Arc<dyn LeavingMonitor>, QmpError>(monitor)
            };
            let begun = begun.await;
            match &begun {
                Ok(_) => {
                    let _ = spawn_blocking(move || reading.all()).await;
                }
                Err(error) => {
                    let why = format!("QEMU at the source does not let it be read: {}", chain(error));
                    for disk in 0..reading.disks {
                        let problem = Some(why.clone());
                        let read = DiskRead { disk, read_bytes: 0, problem };
                        let _ = said.send(ToDestination::DiskRead(read)).await;
                    }
                }
            }
            // Also after a beginning that has failed half-way.
            if let Ok(monitor) = node.config.vmm.monitor(&vm).await
                && let Err(error) = monitor.end_comparison(&socket(&vm), false).await
            {
                tracing::debug!(error = chain(&error), "QEMU keeps an export until it ends");
            }
        }));
        Self(hashes)
    }

    /// What the destination is to be told next; nothing once all was told. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<ToDestination> {
        self.0.recv().await
    }
}

impl Reading {
    fn all(self) {
        for disk in 0..self.disks {
            let mut read = DiskRead { disk, read_bytes: 0, problem: None };
            match self.one(disk, &mut read) {
                // Nobody wants to know any more.
                Ok(false) => return,
                Ok(true) => {}
                Err(error) => read.problem = Some(format!("at the source: {}", chain(&error))),
            }
            if self.said.blocking_send(ToDestination::DiskRead(read)).is_err() {
                return;
            }
        }
    }

    /// Hashes a disk. False if nobody wants to know any more.
    fn one(&self, disk: u8, read: &mut DiskRead) -> Result<bool, vmove_qmp::nbd::NbdError> {
        let mut chunks = Chunks::open(&self.socket, usize::from(disk))?;
        let all = chunks_of(chunks.size());
        let mut booking = self.cpu.booking();
        let mut first = 0;
        while first < all {
            if !self.waits_its_turn() {
                return Ok(false);
            }
            let hashes = chunks.next(first, all - first)?;
            self.pace.book(chunks.read_bytes - read.read_bytes);
            read.read_bytes = chunks.read_bytes;
            booking.book();
            let count = hashes.count();
            if self.said.blocking_send(ToDestination::DiskHashes(DiskHashes { disk, first, hashes })).is_err()
            {
                return Ok(false);
            }
            first += count;
        }
        Ok(true)
    }

    /// Rests as `--bandwidth` and `--host-cpu` ask for. False if nobody wants to know any more.
    fn waits_its_turn(&self) -> bool {
        self.cpu.rest_until_free(|| self.said.is_closed());
        loop {
            let rest = self.pace.free_in();
            if self.said.is_closed() {
                return false;
            }
            if rest.is_zero() {
                return true;
            }
            std::thread::sleep(rest.min(LOOK_INTERVAL));
        }
    }
}
