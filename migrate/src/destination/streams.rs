//! Disks that follow their guest are brought here, one after the other, once its memory is.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use vmove_node::record::VmRecord;
use vmove_qmp::QmpError;
use vmove_qmp::disks::StreamState;
use vmove_types::disk::DiskProgress;
use vmove_types::disk_latency::GaveWay;
use vmove_types::problem::chain;
use vmove_types::time::Mono;

use super::error::DestinationError;
use super::images;
use super::session::Session;
use crate::copy_rate::CopyRate;
use crate::giving_way::{Copying, GivingWay, Requests};
use crate::node::Node;
use crate::vmm::ArrivingMonitor;

/// How often it is looked how far they are, and whether the guest is held up.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Until QEMU is asked again after an error.
const TRY_AGAIN: Duration = Duration::from_secs(2);

/// What is left to be brought.
#[derive(Debug)]
pub(super) enum Streaming {
    NotYet,
    UnderWay(Work),
    /// Nothing; or no disk follows. How that gave way to the guest, as far as this process knows.
    Done(Option<GaveWay>),
}

/// A task, which ends with this.
#[derive(Debug)]
pub(super) struct Work {
    task: JoinHandle<()>,
    seen: watch::Receiver<Seen>,
}

/// How far it is.
#[derive(Debug, Clone, Default)]
struct Seen {
    disks: Vec<DiskProgress>,
    whole: bool,
    warning: Option<String>,
    gave_way: Option<GaveWay>,
}

impl Drop for Work {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Streaming {
    /// Whether all disks are here. Begins to bring them if that has not been done, and shows how far that is.
    pub(super) fn is_done(&mut self, session: &Session) -> bool {
        if matches!(self, Self::NotYet) {
            *self = Work::begin(session).map_or(Self::Done(None), Self::UnderWay);
        }
        let Self::UnderWay(work) = self else { return true };
        let Seen { disks, whole, warning, gave_way } = work.seen.borrow_and_update().clone();
        session.publisher.update(|p| {
            p.disks = disks;
            if warning != p.warning {
                p.warning = warning;
            }
        });
        if whole {
            *self = Self::Done(gave_way);
        }
        whole
    }

    /// Why the guest's end is no end for the operator: as long as disks follow, what it left of them is at two nodes.
    pub(super) fn explain(&self, session: &Session, error: DestinationError) -> DestinationError {
        let prepare = &session.journal.record().prepare;
        match error {
            DestinationError::QemuEnded { log } if matches!(self, Self::UnderWay(_)) => {
                let paths = images::paths(prepare);
                let images: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
                let source_node = prepare.source.clone();
                DestinationError::EndedBeforeDisks { source_node, images: images.join(", "), log }
            }
            other => other,
        }
    }

    /// How the disks gave way to the guest when they came.
    pub(super) fn gave_way(&self) -> Option<GaveWay> {
        if let Self::Done(gave_way) = self { gave_way.clone() } else { None }
    }
}

impl Work {
    /// Nothing if no disk follows.
    fn begin(session: &Session) -> Option<Self> {
        let record = session.journal.record();
        if !record.prepare.spec.disks_after {
            return None;
        }
        let (paths, names) = (images::paths(&record.prepare), images::names(&record.prepare));
        let vm = record.vm.clone()?;
        let spec = &record.prepare.spec;
        let pace = GivingWay::new(spec.disk_pace, spec.bandwidth.map(|limit| limit.0));
        let (sender, seen) = watch::channel(Seen::default());
        let bringing = Bringing {
            node: Arc::clone(&session.node),
            source: record.prepare.source.clone(),
            vm,
            paths,
            pace,
            io: None,
            disks: names.into_iter().map(Followed::new).collect(),
        };
        Some(Self { task: vmove_node::task::spawn(bringing.run(sender)), seen })
    }
}

struct Bringing {
    node: Arc<Node>,
    /// The source's name.
    source: String,
    vm: VmRecord,
    paths: Vec<PathBuf>,
    /// How fast they may come.
    pace: GivingWay,
    /// What the guest has done with them, as QEMU has told last.
    io: Option<Requests>,
    disks: Vec<Followed>,
}

struct Followed {
    name: String,
    rate: CopyRate,
}

impl Bringing {
    /// Goes on until all are here.
    async fn run(mut self, sender: watch::Sender<Seen>) {
        let mut monitor: Option<Arc<dyn ArrivingMonitor>> = None;
        loop {
            let seen = match self.look(&mut monitor).await {
                Ok(states) => self.seen(&states),
                Err(error) => {
                    monitor = None;
                    let disks = sender.borrow().disks.clone();
                    Seen { disks, warning: Some(self.stuck(&chain(&error))), ..Seen::default() }
                }
            };
            let pause = if seen.warning.is_some() { TRY_AGAIN } else { LOOK_INTERVAL };
            if let Some(warning) =
                seen.warning.as_ref().filter(|new| sender.borrow().warning.as_ref() != Some(new))
            {
                tracing::warn!("{warning}");
            }
            let whole = seen.whole;
            sender.send_replace(seen);
            if whole {
                return tracing::info!(
                    disks = self.disks.len(),
                    "the disks that followed the guest are here"
                );
            }
            tokio::time::sleep(pause).await;
        }
    }

    async fn look(
        &mut self,
        monitor: &mut Option<Arc<dyn ArrivingMonitor>>,
    ) -> Result<Vec<StreamState>, QmpError> {
        let at = match monitor {
            Some(monitor) => monitor,
            None => monitor.insert(self.node.config.vmm.reconnect(&self.vm).await?),
        };
        let states = at.bring_disks(&self.paths, self.pace.speed().unwrap_or(0)).await?;
        // Without an answer the guest has done nothing more: so a rest ends all the same.
        if let Ok(io) = at.io_of_images(&self.paths).await {
            self.io = Some(Requests::of(io));
        }
        if let Some(io) = self.io {
            let bytes = states.iter().map(|state| state.done).sum();
            self.pace.look(Mono::now(), io, Copying { copies: 1, bytes, guest_writes_both: false });
        }
        Ok(states)
    }

    fn stuck(&self, why: &str) -> String {
        format!(
            "what the guest's disks lack does not come from {}, trying on: {why}; see to {0} and its images, or to room here, and the guest has all of its disks",
            self.source
        )
    }

    fn seen(&mut self, states: &[StreamState]) -> Seen {
        let now = Mono::now();
        let gives_way = self.pace.holds_back();
        let disks = self.disks.iter_mut().zip(states);
        let disks = disks.map(|(disk, state)| disk.progress(state, gives_way, now)).collect();
        let error = states.iter().find_map(|state| state.error.as_deref());
        Seen {
            disks,
            whole: states.iter().all(|state| state.whole),
            warning: error.map(|why| self.stuck(why)),
            gave_way: self.pace.told(),
        }
    }
}

impl Followed {
    fn new(name: String) -> Self {
        Self { name, rate: CopyRate::default() }
    }

    fn progress(&mut self, state: &StreamState, gives_way: bool, now: Mono) -> DiskProgress {
        self.rate.look(now, state.done);
        let left = state.total.saturating_sub(state.done);
        DiskProgress {
            name: self.name.clone(),
            bytes_total: state.total,
            bytes_done: state.done,
            rate_bytes_per_s: if state.whole { 0.0 } else { self.rate.bytes_per_s() },
            eta_ms: self.rate.eta_ms(left).filter(|_| !state.whole),
            in_step: state.whole,
            io: None,
            gives_way: gives_way && !state.whole,
        }
    }
}
