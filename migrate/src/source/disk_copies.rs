//! Disks that move: QEMU here copies them into the destination's QEMU while the guest runs, and finishes when it stands still.
//!
//! ```text
//! QEMU - disk0.sock - vmoved ==== peer port ==== vmoved - disks.sock - QEMU (waits for the guest)
//! ```
//!
//! Until the commit the guest's own disks here are whole, whatever becomes of the copies.

use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use vmove_node::peer::{BoxedStream, Hello, PeerTarget, enlarge_far_end, join_counted};
use vmove_qmp::QmpError;
use vmove_qmp::confine::Confinement;
use vmove_qmp::disks::{CopyOrder, CopyState};
use vmove_types::disk::{DiskPace, DiskProgress, DiskReport};
use vmove_types::disk_latency::DiskLatency;
use vmove_types::spec::Bandwidth;
use vmove_types::time::Mono;

use super::disk_choice::Moving;
use super::error::SourceError;
use crate::copy_rate::CopyRate;
use crate::disk_io::DiskIoWatch;
use crate::giving_way::{self, GivingWay};
use crate::node::Node;
use crate::vmm::LeavingMonitor;

/// How often it is looked how far copies are.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// The same where they are about to end.
const SHORTEST_LOOK: Duration = Duration::from_millis(10);
/// For QEMU to connect to a socket that it was told.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// The guest stands still meanwhile; what is missing was written in the last milliseconds.
const FINISH_TIMEOUT: Duration = Duration::from_secs(10);
/// For QEMU to give up copies whose connections are closed, or of an earlier migration.
pub(super) const GIVE_UP_TIMEOUT: Duration = Duration::from_secs(10);

/// What copies are begun with.
pub(super) struct Ground<'a> {
    pub node: &'a Node,
    pub to: &'a PeerTarget,
    /// The VM's folder: QEMU finds sockets there.
    pub vm_dir: &'a Path,
    /// Shared by the copies that have not reached their end.
    pub bandwidth: Option<Bandwidth>,
    /// What the guest keeps of its pace meanwhile.
    pub pace: DiskPace,
    /// How the destination is greeted for the disk of this number.
    pub hello: &'a (dyn Fn(u8) -> Hello + Sync),
}

/// Copies that are under way, or whole.
#[derive(Debug)]
pub(super) struct DiskCopies {
    monitor: Arc<dyn LeavingMonitor>,
    disks: Vec<Copying>,
    /// Carry bytes between QEMU and the destination, until this is dropped or they are closed.
    wires: JoinSet<()>,
    begun: Mono,
    /// How long the guest stood still when they began.
    still: Duration,
    /// What the guest does with its disks meanwhile.
    io: DiskIoWatch,
    /// What the copies may take of that.
    pace: GivingWay,
    /// By what QEMU was told last how fast it may copy.
    speed: Speed,
}

/// What the speed of the copies follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Speed {
    /// Of all that have not reached their end, in bytes per second.
    all: Option<u64>,
    /// How many have not.
    copying: usize,
}

impl Speed {
    /// Bytes per second of each; 0: no limit.
    fn each(self) -> u64 {
        self.all.map_or(0, |all| (all / self.copying.max(1) as u64).max(1))
    }
}

#[derive(Debug)]
struct Copying {
    moving: Moving,
    /// Bytes on the wire, both ways.
    sent: Arc<AtomicU64>,
    pass: FirstPass,
    /// The guest was told to wait for it when it writes.
    held: bool,
    /// When it was ready for the first time, after the begin.
    copied_ms: Option<f64>,
    rate: CopyRate,
}

impl DiskCopies {
    /// Begins all copies.
    pub(super) async fn begin(
        ground: Ground<'_>,
        monitor: &Arc<dyn LeavingMonitor>,
        moving: Vec<Moving>,
    ) -> Result<Self, SourceError> {
        let pace = GivingWay::new(ground.pace, ground.bandwidth.map(|bandwidth| bandwidth.0));
        let devices = moving.iter().map(|moving| moving.device.clone()).collect();
        let mut copies = Self {
            io: DiskIoWatch::begin(&**monitor, devices).await,
            monitor: Arc::clone(monitor),
            disks: Vec::new(),
            wires: JoinSet::new(),
            begun: Mono::now(),
            still: Duration::ZERO,
            speed: Speed { all: pace.speed(), copying: moving.len() },
            pace,
        };
        let begun = copies.begin_all(&ground, moving).await;
        if let Err(error) = begun {
            copies.give_up().await;
            return Err(error);
        }
        Ok(copies)
    }

    async fn begin_all(&mut self, ground: &Ground<'_>, moving: Vec<Moving>) -> Result<(), SourceError> {
        let mut orders = Vec::new();
        for (number, moving) in moving.into_iter().enumerate() {
            orders.push(self.connect(ground, number, moving).await?);
        }
        let begun = self.monitor.begin_copies(&orders, self.speed.each()).await;
        for order in &orders {
            // QEMU has connected, or will not.
            let _ = std::fs::remove_file(&order.socket);
        }
        let failed = |(place, source): (usize, QmpError)| SourceError::DiskCopy {
            name: self.disks.get(place).map(|disk| disk.moving.told.name.clone()).unwrap_or_default(),
            source,
        };
        self.still = begun.map_err(failed)?;
        self.begun = Mono::now();
        Ok(())
    }

    /// Connects to the destination for a disk.
    async fn connect(
        &mut self,
        ground: &Ground<'_>,
        number: usize,
        moving: Moving,
    ) -> Result<CopyOrder, SourceError> {
        let index = u8::try_from(number).map_err(|_| SourceError::TooManyDisks)?;
        let wire = ground.node.config.dialer.stream(ground.to, &(ground.hello)(index)).await?;
        let socket = ground.vm_dir.join(format!("vmove-disk{number}.sock"));
        let listened = listen(&ground.node.config.confinement, &socket);
        let listener = listened.map_err(|source| SourceError::DiskSocket { path: socket.clone(), source })?;
        let sent = Arc::new(AtomicU64::new(0));
        self.wires.spawn(carry(listener, wire, Arc::clone(&sent)));
        // Nothing else is in there; and the path there is the one here, unless another was named.
        let to = moving.told.to.as_ref().map_or(moving.path.as_path(), Path::new);
        let order = CopyOrder {
            number,
            node: moving.node.clone(),
            socket,
            is_device: to.starts_with("/dev") && !to.starts_with("/dev/shm"),
        };
        self.disks.push(Copying {
            moving,
            sent,
            pass: FirstPass::default(),
            held: false,
            copied_ms: None,
            rate: CopyRate::default(),
        });
        Ok(order)
    }

    /// Looks how far the copies are. One that has ended fails the migration.
    pub(super) async fn look(&mut self) -> Result<Vec<CopyState>, SourceError> {
        let states = self.monitor.copies().await.map_err(SourceError::Monitor)?;
        let now = Mono::now();
        for (number, disk) in self.disks.iter_mut().enumerate() {
            let state = states.iter().find(|state| state.number == number);
            let ended = |why: &str| SourceError::DiskCopyEnded {
                name: disk.moving.told.name.clone(),
                why: why.to_owned(),
            };
            let state = state.ok_or_else(|| ended("QEMU knows nothing of it any more"))?;
            if let Some(why) = &state.error {
                return Err(ended(why));
            }
            if state.ready && disk.copied_ms.is_none() {
                disk.copied_ms = Some(now.ms_since(self.begun));
            }
            disk.rate.look(now, state.done);
        }
        self.io.look(&*self.monitor).await;
        Ok(states)
    }

    /// When to look again: copies that reach their end are not kept waiting for it.
    pub(super) fn until_next_look(&self, states: &[CopyState], longest: Duration) -> Duration {
        let left = |(disk, state): (&Copying, &CopyState)| {
            (!state.ready).then(|| disk.rate.eta_ms(state.total.saturating_sub(state.done)))
        };
        look_again_after(self.disks.iter().zip(states).filter_map(left), longest)
    }

    /// Holds the copies in step that have been over all of their disk and do not come to their end: the guest writes as fast as it is copied.
    pub(super) async fn catch_up(&mut self, states: &[CopyState]) -> Result<(), SourceError> {
        for (disk, state) in self.disks.iter_mut().zip(states) {
            if !disk.held && disk.pass.is_outrun(Mono::now(), state.total, state.done, state.ready) {
                self.monitor.hold_copy_in_step(state.number).await.map_err(SourceError::Monitor)?;
                disk.held = true;
            }
        }
        Ok(())
    }

    /// For people.
    pub(super) fn progress(&self, states: &[CopyState]) -> Vec<DiskProgress> {
        let told = |(place, (disk, state)): (usize, (&Copying, &CopyState))| {
            let left = state.total.saturating_sub(state.done);
            DiskProgress {
                name: disk.moving.told.name.clone(),
                bytes_total: state.total,
                bytes_done: state.done,
                rate_bytes_per_s: disk.rate.bytes_per_s(),
                eta_ms: disk.rate.eta_ms(left).filter(|_| !state.ready),
                in_step: state.ready,
                io: self.io.recent(place),
                gives_way: self.pace.holds_back() && !state.ready,
            }
        };
        self.disks.iter().zip(states).enumerate().map(told).collect()
    }

    /// Has QEMU copy as fast as the bandwidth and the guest let it, where that has changed. What follows the guest is not held back.
    pub(super) async fn keep_speed(&mut self, states: &[CopyState]) -> Result<(), SourceError> {
        let at_work = || states.iter().filter(|state| !state.ready);
        let copying = at_work().count();
        if copying > 0 {
            let guest_writes_both =
                self.monitor.guest_writes_both() || self.disks.iter().any(|disk| disk.held);
            let bytes = at_work().map(|state| state.done).sum();
            self.io.show(&mut self.pace, giving_way::Copying { copies: copying, bytes, guest_writes_both });
        }
        let now = Speed { all: self.pace.speed(), copying };
        if now == self.speed {
            return Ok(());
        }
        for state in states {
            let speed = if state.ready { 0 } else { now.each() };
            self.monitor.set_copy_speed(state.number, speed).await.map_err(SourceError::Monitor)?;
        }
        self.speed = now;
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.disks.len()
    }

    /// Ends all copies of a guest that stands still: each holds what its disk holds when this returns.
    pub(super) async fn finish(&self) -> Result<(), SourceError> {
        let numbers: Vec<usize> = (0..self.disks.len()).collect();
        Ok(self.monitor.finish_copies(&numbers, FINISH_TIMEOUT).await?)
    }

    /// Closes the connections: whatever QEMU waits for from the destination fails at once, and the guest's writes go on.
    pub(super) async fn close(&mut self) {
        self.wires.shutdown().await;
    }

    /// Takes everything away again. The guest keeps its disks as they are.
    pub(super) async fn give_up(&mut self) {
        self.close().await;
        if let Err(error) = self.monitor.give_up_copies(GIVE_UP_TIMEOUT).await {
            let error = vmove_types::problem::chain(&error);
            tracing::warn!(
                error,
                "something of the copies of disks is left in QEMU: the next migration takes it away"
            );
        }
    }

    /// Counts the guest's requests for the last time: it has been stopped.
    pub(super) async fn count_last(&mut self) {
        self.io.look(&*self.monitor).await;
    }

    /// What became of the disks.
    pub(super) fn reports(&self) -> Vec<DiskReport> {
        let report = |(place, disk): (usize, &Copying)| {
            let Moving { told, path, .. } = &disk.moving;
            let from = path.to_string_lossy().into_owned();
            DiskReport {
                name: told.name.clone(),
                to: told.to.clone().unwrap_or_else(|| from.clone()),
                from,
                format: told.format.clone(),
                size_bytes: told.size,
                allocated_bytes: told.allocated,
                sent_bytes: disk.sent.load(Ordering::Relaxed),
                copy_ms: disk.copied_ms.unwrap_or_default(),
                begin_pause_ms: self.still.as_secs_f64() * 1e3,
                latency: DiskLatency { gave_way: self.pace.told(), ..self.io.told(place) },
                ..DiskReport::default()
            }
        };
        self.disks.iter().enumerate().map(report).collect()
    }
}

/// The pass of a copy over all of its disk.
#[derive(Debug, Default)]
pub(crate) struct FirstPass {
    /// All that was to be copied when it began. QEMU may not know in its first answers, and says 0.
    total: Option<NonZeroU64>,
    /// Since when as much was copied as there was in the beginning.
    over: Option<Mono>,
}

impl FirstPass {
    /// Whether the guest writes as fast as its disk is copied: as much was copied as there was in the beginning, and the copy is not ready some time
    /// later. What a guest wrote in passing is copied by then.
    pub(crate) fn is_outrun(&mut self, now: Mono, total: u64, done: u64, ready: bool) -> bool {
        self.total = self.total.or(NonZeroU64::new(total));
        if ready || self.total.is_none_or(|total| done < total.get()) {
            self.over = None;
            return false;
        }
        now.since(*self.over.get_or_insert(now)) >= LOOK_INTERVAL
    }
}

/// `left`: milliseconds until copies end, where it is known.
fn look_again_after(left: impl Iterator<Item = Option<f64>>, longest: Duration) -> Duration {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let last = left.map(|left| left.unwrap_or(f64::INFINITY)).reduce(f64::max);
    let shortest = longest.min(SHORTEST_LOOK);
    last.map_or(longest, |last| Duration::from_secs_f64(last.clamp(ms(shortest), ms(longest)) / 1e3))
}

fn listen(confinement: &Confinement, socket: &Path) -> std::io::Result<UnixListener> {
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    confinement.give(socket)?;
    Ok(listener)
}

/// Joins the QEMU that connects to the destination's.
async fn carry(listener: UnixListener, wire: BoxedStream, sent: Arc<AtomicU64>) {
    let accepted: Option<UnixStream> = match timeout(CONNECT_TIMEOUT, listener.accept()).await {
        Ok(Ok((qemu, _))) => Some(qemu),
        _ => None,
    };
    drop(listener);
    if let Some(qemu) = accepted {
        if let Err(error) = enlarge_far_end(&qemu) {
            tracing::debug!(%error, "QEMU sends a disk in small pieces");
        }
        join_counted(qemu, wire, &sent).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_outruns_a_copy_that_was_over_all_of_its_disk_and_is_not_ready() {
        let mut pass = FirstPass::default();
        let at = |ms: u64| Mono(ms * 1_000_000);
        assert!(!pass.is_outrun(at(0), 0, 0, false), "QEMU does not know yet how much there is");
        assert!(!pass.is_outrun(at(500), 10, 9, false), "it may still come to its end");
        assert!(!pass.is_outrun(at(600), 20, 10, false), "the guest wrote something in passing");
        assert!(!pass.is_outrun(at(690), 20, 19, false));
        assert!(pass.is_outrun(at(700), 20, 19, false));
        assert!(!pass.is_outrun(at(800), 20, 12, true), "it follows the guest");
        assert!(!pass.is_outrun(at(900), 20, 12, false), "anew");
    }

    #[test]
    fn copies_that_are_about_to_end_are_looked_at_more_often() {
        let longest = LOOK_INTERVAL;
        let after = |left: &[Option<f64>]| look_again_after(left.iter().copied(), longest);
        assert_eq!(after(&[]), longest, "all follow the guest");
        assert_eq!(after(&[None]), longest, "nobody knows yet");
        assert_eq!(after(&[Some(5000.0)]), longest);
        assert_eq!(after(&[Some(30.0)]), Duration::from_millis(30));
        assert_eq!(after(&[Some(2.0), Some(30.0)]), Duration::from_millis(30), "all must have ended");
        assert_eq!(after(&[Some(0.0), Some(2.0)]), SHORTEST_LOOK);
        assert_eq!(after(&[Some(0.0)]), SHORTEST_LOOK);
        assert_eq!(look_again_after([Some(2.0)].into_iter(), Duration::from_millis(5)).as_millis(), 5);
    }

    #[test]
    fn copies_share_what_they_may_take() {
        let each = |all, copying| Speed { all, copying }.each();
        assert_eq!(each(None, 3), 0);
        assert_eq!(each(Some(9 << 20), 3), 3 << 20);
        assert_eq!(each(Some(9 << 20), 0), 9 << 20);
        assert_eq!(each(Some(2), 3), 1, "0 would be no limit");
    }
}
