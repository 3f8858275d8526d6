//! Disks that move, as this side takes them: the source's QEMU writes to those of ours until its copies are whole.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;
use vmove_qmp::QmpError;
use vmove_types::disk_latency::DiskIo;
use vmove_types::problem::chain;

use super::disk_check::{is_wanted, note_writes};
use super::error::DestinationError;
use super::images;
use super::session::Session;
use crate::owed::TRY_AGAIN;
use crate::proto::message::Prepare;
use crate::vmm::ArrivingMonitor;

/// How soon what was copied is on the disk.
const WRITE_BACK_INTERVAL: Duration = Duration::from_secs(1);

/// Who writes to the guest's disks here.
#[derive(Debug)]
pub(super) enum Exports {
    /// No disk moves, or the copies are whole and only QEMU here has them.
    Ended,
    /// The source's QEMU. What it writes goes to the disks soon, so that little is left to be flushed in the end.
    Open { images: usize, writing_back: JoinHandle<()> },
    /// The copies are whole; QEMU here is ending the exports.
    Ending(JoinHandle<Result<(), QmpError>>),
}

impl Exports {
    /// Of a QEMU that has opened them, and waits for its guest.
    pub(super) fn of(prepare: &Prepare) -> Self {
        let paths = images::paths(prepare);
        if paths.is_empty() || prepare.spec.disks_after {
            return Self::Ended;
        }
        Self::Open { images: paths.len(), writing_back: vmove_node::task::spawn(write_back(paths)) }
    }

    /// The copies are whole.
    pub(super) fn end(&mut self, session: &Session, monitor: Arc<dyn ArrivingMonitor>) {
        if let Self::Open { images, writing_back } = self {
            let images = *images;
            writing_back.abort();
            let record = session.journal.record();
            // Before the guest runs here, and once nobody else writes.
            let noted =
                is_wanted(&record.prepare).then(|| (record.vm.clone(), images::paths(&record.prepare)));
            *self = Self::Ending(vmove_node::task::spawn(async move {
                monitor.end_exports(images).await?;
                if let Some((vm, paths)) = noted {
                    note_writes(&*monitor, vm.as_ref(), &paths).await;
                }
                Ok(())
            }));
        }
    }

    /// Whether nobody but QEMU here writes to its disks. Its guest may not run before.
    pub(super) const fn have_ended(&self) -> bool {
        matches!(self, Self::Ended)
    }

    /// Waits until that is so. Never ends if it is, or if the copies are not whole. Cancel-safe.
    pub(super) async fn ended(&mut self) -> Result<(), DestinationError> {
        let Self::Ending(ending) = self else { return std::future::pending().await };
        ending.await?.map_err(DestinationError::EndExports)?;
        *self = Self::Ended;
        Ok(())
    }
}

impl Drop for Exports {
    fn drop(&mut self) {
        if let Self::Open { writing_back, .. } = self {
            writing_back.abort();
        }
    }
}

/// Has the kernel write out what has come, again and again. Never ends.
async fn write_back(paths: Vec<PathBuf>) {
    loop {
        tokio::time::sleep(WRITE_BACK_INTERVAL).await;
        let paths = paths.clone();
        let write = move || {
            for file in paths.iter().filter_map(|path| std::fs::File::open(path).ok()) {
                // What is wrong is found when it counts, by QEMU's own flush.
                let _ = file.sync_data();
            }
        };
        let _ = vmove_node::blocking::spawn_blocking(write).await;
    }
}

/// What was copied is on the disks here before the source hears that the guest is whole: then its own images go. The NBD client at the source
/// drops flushes, so that the guest does not stand still for them.
#[derive(Debug)]
pub(super) enum Flushing {
    /// Not begun.
    NotYet,
    /// QEMU is at it.
    UnderWay(JoinHandle<Result<Vec<Option<DiskIo>>, QmpError>>),
    /// It did not work then, and is tried again: until it does, the source keeps its images.
    Failed(Instant),
    /// Done. What the guest had done with each disk by then, where that is known.
    Done(Vec<Option<DiskIo>>),
}

impl Flushing {
    /// Whether all is on the disks. Begins with that if it has not.
    pub(super) async fn is_done(&mut self, session: &Session) -> Result<bool, DestinationError> {
        match self {
            Self::Done(_) => return Ok(true),
            Self::NotYet => *self = Self::begin(session),
            Self::Failed(since) if since.elapsed() >= TRY_AGAIN => *self = Self::begin(session),
            Self::UnderWay(flushing) if flushing.is_finished() => match flushing.await? {
                Ok(io) => *self = Self::Done(io),
                Err(error) => {
                    let why =
                        format!("what was copied is not on the disks yet, trying again: {}", chain(&error));
                    tracing::warn!("{why}");
                    session.publisher.update(|p| p.warning = Some(why));
                    *self = Self::Failed(Instant::now());
                }
            },
            Self::UnderWay(_) | Self::Failed(_) => {}
        }
        Ok(matches!(self, Self::Done(_)))
    }

    /// What the guest has done with its disks since it runs here, by their names.
    pub(super) fn disk_io(&self, prepare: &Prepare) -> Vec<(String, DiskIo)> {
        let Self::Done(io) = self else { return Vec::new() };
        let named = images::names(prepare).into_iter().zip(io);
        named.filter_map(|(name, io)| Some((name, io.clone()?))).collect()
    }

    fn begin(session: &Session) -> Self {
        let paths = images::paths(&session.journal.record().prepare);
        if paths.is_empty() {
            return Self::Done(Vec::new());
        }
        let Some(vm) = session.journal.record().vm.clone() else { return Self::Failed(Instant::now()) };
        let node = Arc::clone(&session.node);
        Self::UnderWay(vmove_node::task::spawn(async move {
            let monitor = node.config.vmm.reconnect(&vm).await?;
            monitor.flush_disks(&paths).await?;
            // Only told: nothing fails for want of it.
            Ok(monitor.io_of_images(&paths).await.unwrap_or_default())
        }))
    }
}
