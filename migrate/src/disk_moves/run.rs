//! The course of a move: what QEMU says is followed until the guest has the new image, or the old one for good.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tracing::Instrument as _;
use vmove_node::blocking::run_blocking;
use vmove_node::journal::Journal;
use vmove_node::record::VmRecord;
use vmove_node::store::VmStore;
use vmove_qmp::cmdline::{CommandLineError, NewImage};
use vmove_qmp::disks::{MoveState, OldImage, has_moved};
use vmove_qmp::{CommandLine, QmpError};
use vmove_types::disk::SourceDisks;
use vmove_types::disk_latency::DiskLatency;
use vmove_types::disk_move::{DiskMove, DiskMoveState};
use vmove_types::problem::chain;
use vmove_types::time::Mono;
use vmove_types::vm::Running;

use super::record::{MoveRecord, Step};
use crate::copy_rate::CopyRate;
use crate::destination::images;
use crate::disk_holds::Told;
use crate::disk_io::DiskIoWatch;
use crate::giving_way::{Copying, GivingWay};
use crate::node::Node;
use crate::source::disk_copies::FirstPass;
use crate::source::disks_aside::see_to;
use crate::vmm::LeavingMonitor;

/// How often it is looked how far the copy is.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Between attempts at what does not work: a monitor that does not answer, a full disk.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// For the guest to get the new image. Longer on slow storage: then it is waited for again.
const SWITCH_TIMEOUT: Duration = Duration::from_secs(30);
/// For QEMU to end a job, or to close an image.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a copy is over of which QEMU tells nothing.
const UNKNOWN_JOB: &str = "QEMU knows nothing of it any more";

/// How a move ends.
#[derive(Debug)]
enum End {
    Moved,
    Cancelled,
    Failed(String),
}

/// Follows a move.
pub(super) struct Mover {
    node: Arc<Node>,
    journal: Journal<MoveRecord>,
    told: Arc<Told>,
    begun: Mono,
    rate: CopyRate,
    /// As this process has seen it.
    pass: FirstPass,
    /// The guest writes to both images.
    held: bool,
    /// What the guest does with the disk meanwhile.
    io: DiskIoWatch,
    /// How fast it may be copied, and what QEMU was told last. Nothing of a move that an older vmoved began: QEMU keeps what it was told then.
    pace: Option<GivingWay>,
    speed: Option<Option<u64>>,
}

impl Mover {
    pub(super) fn new(node: Arc<Node>, journal: Journal<MoveRecord>, told: Arc<Told>) -> Self {
        let begun = Mono::now();
        let MoveRecord { device, counted, bandwidth, disk_pace, .. } = journal.record();
        let io = DiskIoWatch::going_on(vec![device.clone()], vec![counted.clone()]);
        let pace = disk_pace.map(|keep| GivingWay::new(keep, *bandwidth));
        let (rate, pass) = (CopyRate::default(), FirstPass::default());
        Self { node, journal, told, begun, rate, pass, held: false, io, pace, speed: None }
    }

    /// Follows a move in a task of its own: one that has just begun, or one that an earlier process of the daemon has left.
    pub(super) fn spawn(self) {
        let span = tracing::info_span!("disk_move", id = %self.journal.record().id);
        vmove_node::task::spawn(self.run().instrument(span));
    }

    async fn run(mut self) {
        let end = loop {
            let vm = &self.journal.record().vm;
            if self.node.config.vmm.has_ended(vm) {
                break self.without_qemu().await;
            }
            let stepped = match self.node.config.vmm.monitor(vm).await {
                Ok(monitor) => self.step(&*monitor).await,
                Err(error) => Err(error),
            };
            match stepped {
                Ok(Some(end)) => break end,
                Ok(None) => self.told.update(|it| it.problem = None),
                Err(error) => {
                    let why = format!("{}; trying again", chain(&error));
                    if self.told.now().problem.as_ref() != Some(&why) {
                        tracing::warn!(why, "the move of a disk does not go on");
                    }
                    self.told.update(|it| it.problem = Some(why));
                    sleep(TRY_AGAIN).await;
                }
            }
        };
        self.close_journal().await;
        let told = &self.told;
        match end {
            End::Moved => told.update(|it| it.state = DiskMoveState::Moved),
            End::Cancelled => told.update(|it| it.state = DiskMoveState::Cancelled),
            End::Failed(why) => told.update(|it| (it.state, it.error) = (DiskMoveState::Failed, Some(why))),
        }
        let DiskMove { vm, disk, state, error, .. } = told.now();
        tracing::info!(vm, disk, ?state, error, "the move of a disk has ended");
    }

    /// Takes the next step; its end, if that was the last.
    async fn step(&mut self, monitor: &dyn LeavingMonitor) -> Result<Option<End>, QmpError> {
        if self.journal.record().stops_guest {
            // The daemon was killed, or QEMU did not answer, while the guest stood still for the begin of the copy.
            if monitor.run_state(CLOSE_TIMEOUT).await? == "paused" {
                monitor.set_running(Running::Running, CLOSE_TIMEOUT).await?;
            }
            let _ = self.journal.update_owing(|r| r.stops_guest = false);
        }
        match self.journal.record().step {
            Step::Making => {
                let why = "vmoved ended before the copy had begun; the guest has its disk as before";
                Ok(Some(self.undo(monitor, End::Failed(why.to_owned())).await?))
            }
            Step::Copying => self.copy(monitor).await,
            Step::Switching => self.switch(monitor).await,
            Step::Moved => self.close(monitor).await.map(Some),
            Step::Done => Ok(Some(End::Moved)),
        }
    }

    async fn copy(&mut self, monitor: &dyn LeavingMonitor) -> Result<Option<End>, QmpError> {
        if self.told.cancel.is_cancelled() {
            return Ok(Some(self.undo(monitor, End::Cancelled).await?));
        }
        let id = self.journal.record().short_id();
        match monitor.move_state(&id).await? {
            Some(MoveState::Copying { total, done, ready, in_step }) => {
                self.tell_progress(total, done, ready);
                self.count_io(monitor).await;
                self.keep_speed(monitor, &id, done, ready).await?;
                if (self.pass.is_outrun(Mono::now(), total, done, ready) || ready) && !self.held {
                    monitor.hold_move_in_step(&id).await?;
                    self.held = true;
                }
                if in_step && self.held {
                    return Ok(self.enter_switch().await);
                }
                tokio::select! {
                    () = sleep(LOOK_INTERVAL) => {}
                    () = self.told.cancel.cancelled() => {}
                }
                Ok(None)
            }
            Some(MoveState::Ended(why)) => self.after_the_job(monitor, why).await,
            None => self.after_the_job(monitor, Some(UNKNOWN_JOB.to_owned())).await,
        }
    }

    /// Has QEMU copy as fast as the bandwidth and the guest let it, where that has changed. A copy that follows the guest is not held back.
    async fn keep_speed(
        &mut self,
        monitor: &dyn LeavingMonitor,
        id: &str,
        done: u64,
        ready: bool,
    ) -> Result<(), QmpError> {
        let Some(pace) = &mut self.pace else { return Ok(()) };
        if !ready {
            let guest_writes_both = self.held || monitor.guest_writes_both();
            self.io.show(pace, Copying { copies: 1, bytes: done, guest_writes_both });
        }
        let now = if ready { self.journal.record().bandwidth } else { pace.speed() };
        if self.speed != Some(now) {
            monitor.set_move_speed(id, now.unwrap_or(0)).await?;
            self.speed = Some(now);
        }
        Ok(())
    }

    /// Notes that QEMU is about to be asked. Without that, a later process would not know that the guest may have either image.
    async fn enter_switch(&mut self) -> Option<End> {
        let noted = self.journal.update(|r| r.step = Step::Switching).and_then(|()| self.journal.sync());
        if let Err(error) = noted {
            let path = self.journal.path().display().to_string();
            tracing::warn!(path, %error, "the copy of a disk is in step, and waits until the journal can be written");
            self.told.update(|it| it.problem = Some(format!("Cannot write {path}: {error}; trying again")));
            sleep(TRY_AGAIN).await;
            return None;
        }
        let took = Mono::now().ms_since(self.begun);
        self.told.update(|it| {
            it.problem = None;
            it.copy_ms = Some(took);
            it.state = DiskMoveState::Switching;
        });
        None
    }

    async fn switch(&mut self, monitor: &dyn LeavingMonitor) -> Result<Option<End>, QmpError> {
        let id = self.journal.record().short_id();
        // Also after a line that could be written and not be made durable.
        if let Err(error) = self.journal.sync() {
            let why = format!("Cannot write {}: {error}; trying again", self.journal.path().display());
            self.told.update(|it| it.problem = Some(why));
            sleep(TRY_AGAIN).await;
            return Ok(None);
        }
        let asked = Mono::now();
        let switched = match monitor.move_state(&id).await? {
            Some(MoveState::Copying { .. }) => monitor.switch_image(&id, SWITCH_TIMEOUT).await,
            _ => Ok(()),
        };
        let took = Mono::now().ms_since(asked);
        match monitor.move_state(&id).await? {
            // Slow storage: it is waited for again.
            Some(MoveState::Copying { .. }) => switched.map(|()| None),
            Some(MoveState::Ended(why)) => {
                self.told.update(|it| it.switch_ms = Some(took));
                self.after_the_job(monitor, why).await
            }
            None => self.after_the_job(monitor, Some(UNKNOWN_JOB.to_owned())).await,
        }
    }

    /// QEMU copies no more: it says which image the guest has, whoever ended the job.
    async fn after_the_job(
        &mut self,
        monitor: &dyn LeavingMonitor,
        why: Option<String>,
    ) -> Result<Option<End>, QmpError> {
        let (disks, record) = (monitor.disks().await?, self.journal.record());
        if has_moved(&disks, &record.short_id()) {
            // Whether this can be written down or not: a later process finds out as this one did.
            let _ = self.journal.update_owing(|r| r.step = Step::Moved);
            self.count_io(monitor).await;
            self.told.switched(self.io.last(0));
            self.told.update(|it| it.state = DiskMoveState::Closing);
            return Ok(None);
        }
        self.told.update(|it| it.switch_ms = None);
        if why.is_none() && !disks.iter().any(|disk| disk.node == record.node) {
            return Ok(Some(End::Failed(self.either("no drive of the guest has it any more"))));
        }
        let why = why.unwrap_or_else(|| "QEMU does not say why".to_owned());
        let why = format!("The copy ended: {why}; the guest has its disk as before");
        Ok(Some(self.undo(monitor, End::Failed(why)).await?))
    }

    /// Nobody knows which image is the newer one.
    fn either(&self, why: &str) -> String {
        let MoveRecord { from, to, own, .. } = self.journal.record();
        let (old, new) = (from.path.display(), to.path.display());
        if *own {
            return format!(
                "The disk was about to get the new image, and {why}: {new} is left as it was then"
            );
        }
        format!(
            "The disk was about to get the new image, and {why}: {new} is what the guest had last if it got that, {old} if not. Both are kept"
        )
    }

    /// The guest has the new image: its record names that, and the old one is closed and put aside.
    async fn close(&mut self, monitor: &dyn LeavingMonitor) -> Result<End, QmpError> {
        let record = self.journal.record().clone();
        if !has_moved(&monitor.disks().await?, &record.short_id()) {
            return Ok(End::Failed(self.either("it has gone since")));
        }
        // Before the old one goes, this must be known whatever happens.
        while let Err(error) = self.write_moved().await {
            self.told.update(|it| it.problem = Some(error));
            sleep(TRY_AGAIN).await;
        }
        self.told.update(|it| it.problem = None);
        let old = OldImage { node: record.node, file: record.file, below: record.below };
        let closed = monitor.close_old_image(&self.journal.record().short_id(), &old, CLOSE_TIMEOUT).await;
        if let Err(error) = closed {
            if self.node.config.vmm.has_ended(&self.journal.record().vm) {
                return Err(error);
            }
            let why = format!("QEMU still has the old image open: {}", chain(&error));
            self.told.update(|it| it.problem = Some(why));
        }
        monitor.end_io_histograms().await;
        self.put_aside().await;
        Ok(End::Moved)
    }

    /// Whoever moves, forks or shows the VM must know of the new image, and so must a later process of the daemon.
    async fn write_moved(&mut self) -> Result<(), String> {
        let record = self.journal.record().clone();
        let synced = self.journal.write_owed().and_then(|()| self.journal.sync());
        synced.map_err(|error| {
            format!("Cannot write {}: {error}; trying again", self.journal.path().display())
        })?;
        let vms = Arc::clone(&self.node.vms);
        run_blocking(move || follow_record(&vms, &record)).await.map_err(|error| chain(&error))??;
        match self.node.vms.owed(&self.journal.record().vm.name) {
            Some(owed) => Err(format!("Cannot write {}: {}; trying again", owed.path.display(), owed.error)),
            None => Ok(()),
        }
    }

    async fn put_aside(&self) {
        let record = self.journal.record().clone();
        // One that was made for this VM alone would be left for ever.
        let what = if record.own { SourceDisks::Delete } else { record.source_disks };
        let done = run_blocking(move || see_to(&record.from, what, &record.id.to_string())).await;
        let old = self.journal.record().from.path.clone();
        self.told.update(|it| match done {
            Ok(Ok(left)) => it.left_at = left.map(|path| path.to_string_lossy().into_owned()),
            failed => {
                let why = match failed {
                    Ok(Err(error)) => error.to_string(),
                    other => format!("{:?}", other.map(drop)),
                };
                it.left_at = Some(old.to_string_lossy().into_owned());
                it.problem.get_or_insert(format!("The old image could not be put aside: {why}"));
            }
        });
    }

    /// QEMU has ended, and the guest with it.
    async fn without_qemu(&mut self) -> End {
        let record = self.journal.record().clone();
        // A line of this journal may be lost with the host; the record of a VM is not.
        let named =
            self.node.vms.get(&record.vm.name).is_ok_and(|vm| names(&vm.command_line, &record.to.path));
        match record.step {
            Step::Making | Step::Copying if !named => {
                self.remove_image().await;
                let old = record.from.path.display();
                End::Failed(format!("The guest's QEMU ended while its disk was copied; its disk is {old}"))
            }
            Step::Switching if !named => End::Failed(self.either("the guest's QEMU ended")),
            Step::Done => End::Moved,
            _ => {
                self.put_aside().await;
                End::Moved
            }
        }
    }

    /// Counts the guest's requests to the disk.
    async fn count_io(&mut self, monitor: &dyn LeavingMonitor) {
        self.io.look(monitor).await;
        self.told.update(|it| {
            it.progress.io = self.io.recent(0);
            let pace = self.pace.as_ref();
            it.progress.gives_way = pace.is_some_and(GivingWay::holds_back) && !it.progress.in_step;
            it.latency = DiskLatency { gave_way: pace.and_then(GivingWay::told), ..self.io.told(0) };
        });
    }

    /// Takes the new image away. The guest keeps the old one.
    async fn undo(&mut self, monitor: &dyn LeavingMonitor, end: End) -> Result<End, QmpError> {
        monitor.undo_move(&self.journal.record().short_id(), CLOSE_TIMEOUT).await?;
        monitor.end_io_histograms().await;
        self.told.update(|it| it.problem = None);
        self.remove_image().await;
        Ok(end)
    }

    async fn remove_image(&self) {
        let MoveRecord { id, to, .. } = self.journal.record().clone();
        let shown = to.path.display().to_string();
        let removed = run_blocking(move || images::remove_one(id, &to.path, to.file)).await;
        if !removed.unwrap_or(false) {
            self.told.update(|it| it.problem = Some(format!("{shown} could not be removed: remove it")));
        }
    }

    fn tell_progress(&mut self, total: u64, done: u64, ready: bool) {
        self.rate.look(Mono::now(), done);
        let rate = &self.rate;
        self.told.update(|it| {
            let told = &mut it.progress;
            (told.bytes_total, told.bytes_done, told.in_step) = (total, done, ready);
            told.rate_bytes_per_s = rate.bytes_per_s();
            told.eta_ms = rate.eta_ms(total.saturating_sub(done)).filter(|_| !ready);
        });
    }

    async fn close_journal(&mut self) {
        let path = self.journal.path().to_owned();
        let node = Arc::clone(&self.node);
        let removed = run_blocking(move || node.disk().remove_file(&path)).await;
        if let Ok(Err(error)) = removed {
            tracing::warn!(path = %self.journal.path().display(), %error, "the journal of a move of a disk stays");
            // It is not to be taken up again.
            let _ = self.journal.update_owing(|r| r.step = Step::Done);
        }
    }
}

/// Changes the record of a VM: its disk is on the new image.
fn follow_record(vms: &VmStore, record: &MoveRecord) -> Result<(), String> {
    let mut done = Ok(());
    let change = |now: &mut VmRecord| {
        match on_new_image(&now.command_line, record) {
            Ok(line) => now.command_line = line,
            Err(error) => {
                done = Err(format!("The command line of the VM cannot name its new disk: {}", chain(&error)));
            }
        }
        // It is at a path that somebody chose: it stays when the VM ends.
        now.overlays.retain(|own| *own != record.written && *own != record.to.path);
    };
    let is_there = vms.change_owing(&record.vm, change).map_err(|error| chain(&error))?;
    done?;
    let named = vms.get(&record.vm.name).is_ok_and(|vm| names(&vm.command_line, &record.to.path));
    if is_there && !named {
        return Err(format!("The command line of the VM does not name {}", record.to.path.display()));
    }
    Ok(())
}

/// Whether a command line has this image.
fn names(words: &[String], image: &Path) -> bool {
    let line = CommandLine::parse(words.iter().map(Into::into).collect());
    let images = line.and_then(|line| line.movable_images());
    images.is_ok_and(|images| images.iter().any(|known| Path::new(&known.file) == image))
}

/// The command line with the new image in place of the old one. One that has it already stays as it is.
fn on_new_image(words: &[String], record: &MoveRecord) -> Result<Vec<String>, CommandLineError> {
    let mut line = CommandLine::parse(words.iter().map(Into::into).collect())?;
    let new = NewImage {
        image: record.image.clone(),
        file: record.to.path.to_str().map(str::to_owned),
        format: record.format.clone(),
        is_device: record.is_device,
    };
    line.move_image(&new)?;
    Ok(line.to_argv().into_iter().map(|word| word.to_string_lossy().into_owned()).collect())
}
