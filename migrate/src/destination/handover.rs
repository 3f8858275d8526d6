//! From the device state to the end: loading, the commit, the first instruction here, the last page.

use std::sync::Arc;
use std::time::Duration;

use vmove_memory::{Process, RemoteUffd, close_in_qemu, collapse, fill_locked_in_qemu};
use vmove_qmp::process::{QemuProcess, end_started_in};
use vmove_qmp::switchover::Announce;

use super::guest::ReadElsewhere;
use super::launch::chain;
use super::session::{End, Session};
use crate::clock::Mono;
use crate::ownership::{DestinationEvent, DestinationState};
use crate::progress::{Outcome, Phase};
use crate::proto::channel::Channel;
use crate::proto::message::{Complete, DestinationStand, Running, ToDestination, ToSource};
use crate::report::Report;
use crate::vm::VmRecord;

/// Loading half a MiB of device state takes milliseconds; a page it needs may have to be fetched meanwhile.
const LOAD: Duration = Duration::from_secs(30);
/// `cont` takes disks over, which may have to wait for a lock on a slow file server.
const RESUME: Duration = Duration::from_secs(30);
/// Pages that a guest may lack when it is resumed, if they come within about this time anyway.
const LINGER: Duration = Duration::from_millis(3);

impl Session {
    /// Joins the source's device-state stream to QEMU's, once both are there.
    pub(super) fn start_relay(&mut self) {
        if self.state_stream.is_none() || self.state_sender.is_none() {
            return;
        }
        let (Some(mut from), Some(mut to)) = (self.state_stream.take(), self.state_sender.take()) else {
            return;
        };
        self.relay = Some(tokio::spawn(async move {
            let relayed = vmove_qmp::switchover::relay(&mut from, &mut to).await;
            relayed.map(|stats| stats.bytes).map_err(|e| format!("device state stream: {e}"))
        }));
        if let Some(destination) = self.destination.clone() {
            self.loading =
                Some(tokio::spawn(
                    async move { destination.loaded(LOAD).await.map(drop).map_err(|e| chain(&e)) },
                ));
        }
    }

    pub(super) async fn state_loaded(
        &mut self,
        loaded: Result<(), String>,
        channel: &mut Channel<ToDestination>,
    ) -> Result<(), End> {
        if let Err(why) = loaded {
            let log = self.process.as_ref().map(QemuProcess::log_tail).unwrap_or_default();
            return Err(End::Failed(format!(
                "The destination QEMU did not load the device state: {why}; its log says: {log}"
            )));
        }
        if let Some(relay) = self.relay.take() {
            self.state_bytes = relay.await.map_err(|e| End::Failed(e.to_string()))?.unwrap_or_default();
        }
        self.loaded = true;
        self.linger().await;
        self.tell_loaded(channel).await
    }

    /// When almost nothing is missing it is worth a moment to have it all: then the guest never faults.
    async fn linger(&self) {
        let until = tokio::time::Instant::now() + LINGER;
        let memory = &self.room.memory;
        // What bulk readers move in the time at 1 GB/s.
        let near = u64::try_from(LINGER.as_micros()).unwrap_or(0) * 1000
            / memory.blocks.first().map_or(4096, |b| b.page_size.bytes());
        while memory.left() > 0 && memory.left() <= near && tokio::time::Instant::now() < until {
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    }

    async fn tell_loaded(&mut self, channel: &mut Channel<ToDestination>) -> Result<(), End> {
        // Before the final set is applied nobody knows what is missing, and a daemon started anew would trust old pages.
        if !self.room.memory.is_serving() {
            return Ok(());
        }
        let missing = self.whole_first && self.room.memory.recount() > 0;
        if !self.loaded || self.told_loaded || missing {
            return Ok(());
        }
        self.qemu_lives(channel).await?;
        self.advance(DestinationEvent::StateLoaded)?;
        self.publisher.enter(Phase::HandOver);
        self.told_loaded = true;
        channel.send(&ToSource::Loaded).await?;
        Ok(())
    }

    /// Fails if QEMU has ended. If it was never told to run the guest, the session is over with that, and the source may take the
    /// guest back although it has committed: so the journal first, then the word.
    pub(super) async fn qemu_lives(&mut self, channel: &mut Channel<ToDestination>) -> Result<(), End> {
        let Some(process) = self.process.as_ref().filter(|p| !p.alive()) else { return Ok(()) };
        let why = format!("QEMU at the destination has ended; its log says: {}", process.log_tail());
        if self.state() == DestinationState::Loaded {
            self.advance(DestinationEvent::QemuEnded)?;
            channel.send(&ToSource::Resume(DestinationStand::Gone)).await?;
        }
        Err(End::Failed(why))
    }

    /// The source has given the guest up.
    pub(super) async fn commit(&mut self, channel: &mut Channel<ToDestination>) -> Result<(), End> {
        let first = self.state() == DestinationState::Loaded;
        self.qemu_lives(channel).await?;
        self.advance(DestinationEvent::Commit)?;
        self.owes_resume |= first;
        if self.owes_resume && self.client.is_none() {
            // Found again after a restart, and the monitor does not answer yet: pages go first.
            self.publisher.enter(Phase::Fetch);
            return Ok(());
        }
        self.run_here(channel).await
    }

    async fn run_here(&mut self, channel: &mut Channel<ToDestination>) -> Result<(), End> {
        let left = self.room.memory.recount();
        let resumed_at = if self.owes_resume { self.take_over(left).await? } else { None };
        self.owes_resume = false;
        self.publisher.enter(Phase::Fetch);
        channel.send(&ToSource::Running(Running { resumed_at, pages_left: left })).await?;
        self.whole(channel).await
    }

    /// Registers the VM as ours and lets it run, unless it is to stay paused.
    async fn take_over(&mut self, left: u64) -> Result<Option<Mono>, End> {
        let record = self.journal.record();
        let (vm, run) = (record.vm.clone(), record.prepare.was_running && !record.prepare.spec.paused);
        if left == 0 && self.room.memory.hashes.is_none() {
            // Nothing is missing: no page needs us, and QEMU's mappings become huge by ordinary faults.
            self.release_faults()?;
        }
        let resumed = if run { Some(self.resume_guest().await?) } else { None };
        if let Some(vm) = vm {
            // After the guest runs: a record on a slow disk must not lengthen the pause. The journal knows it already.
            self.node.vms.put(vm).map_err(|e| End::Failed(chain(&e)))?;
        }
        Ok(resumed)
    }

    async fn resume_guest(&self) -> Result<Mono, End> {
        let failed = |e: &dyn std::error::Error| {
            End::Failed(format!("The guest did not resume at the destination: {}", chain(e)))
        };
        let Some(client) = &self.client else {
            return Err(End::Failed("no monitor of the destination QEMU".to_owned()));
        };
        let resumed = client.expect("RESUME", |_| true);
        client.execute_raw("cont", serde_json::Value::Null, RESUME).await.map_err(|e| failed(&e))?;
        let event = resumed.wait(RESUME).await.map_err(|e| failed(&e))?;
        let at = Mono(event.at.0);
        self.announce();
        Ok(at)
    }

    /// Tells the network where the guest is now. In the background: nothing waits for it.
    fn announce(&self) {
        if let Some(destination) = self.destination.clone() {
            tokio::spawn(async move {
                if let Err(error) = destination.announce(Announce::default()).await {
                    tracing::warn!(%error, "the guest's new place was not announced to the network");
                }
            });
        }
    }

    /// The monitor of a QEMU that was found again answers.
    pub(super) async fn connected(
        &mut self,
        client: Result<vmove_qmp::Client, String>,
        channel: &mut Channel<ToDestination>,
    ) -> Result<(), End> {
        self.client = Some(client.map_err(|why| End::Failed(format!("The monitor does not answer: {why}")))?);
        if self.owes_resume {
            return self.run_here(channel).await;
        }
        if self.state().may_run() {
            self.resume_if_paused().await;
        }
        Ok(())
    }

    /// After a kill between the journal's line and `cont`.
    async fn resume_if_paused(&mut self) {
        let record = self.journal.record();
        if !record.prepare.was_running || record.prepare.spec.paused {
            return;
        }
        let Some(client) = self.client.clone() else { return };
        let status = client.execute_raw("query-status", serde_json::Value::Null, RESUME).await;
        let paused = status.is_ok_and(|s| s.get("status").and_then(|s| s.as_str()) == Some("paused"));
        let resumed = if paused { self.resume_guest().await.map(drop) } else { Ok(()) };
        if let Err(End::Failed(error)) = resumed {
            tracing::error!(error, "the guest stays paused");
        }
    }

    /// Called whenever everything might be there.
    pub(super) async fn whole(&mut self, channel: &mut Channel<ToDestination>) -> Result<(), End> {
        if self.loaded && !self.told_loaded {
            return self.tell_loaded(channel).await;
        }
        if !self.state().may_run()
            || self.owes_resume
            || self.told_complete
            || self.room.memory.left() > 0
            || self.room.memory.recount() > 0
        {
            return Ok(());
        }
        if self.room.memory.hashes.is_some() && !self.all_hashes {
            return Ok(());
        }
        let differing = self.verify().await;
        if self.state() == DestinationState::Owner {
            self.release_faults()?;
        }
        let counted = self.attempt.counted(&self.room.memory);
        let pages_zero = self.room.memory.blocks.iter().map(|b| b.table.counts().zero).sum();
        let complete = Complete {
            faults: self.room.memory.latencies.stats(),
            pages_zero,
            counted,
            differing_pages: differing,
            state_bytes: self.state_bytes,
        };
        if self.state() == DestinationState::Owner {
            let kept = Some(Box::new(complete.clone()));
            self.advance_with(DestinationEvent::AllPages, |r| r.complete = kept)?;
        }
        self.publisher.enter(Phase::Finish);
        self.told_complete = true;
        channel.send(&ToSource::Complete(Box::new(complete))).await?;
        self.make_huge();
        Ok(())
    }

    /// Hashes what has not been mapped yet and compares all with the source.
    async fn verify(&self) -> Option<u64> {
        self.room.memory.hashes.as_ref()?;
        let memory = Arc::clone(&self.room.memory);
        let theirs = self.source_hashes.clone();
        let compare = move || {
            let hashes = memory.hashes.as_ref()?;
            for (index, block) in memory.blocks.iter().enumerate() {
                if memory.map_landed(index, 0..block.pages(), &mut ReadElsewhere::default()).is_err() {
                    return None;
                }
                hashes.take_rest(index, &block.file, block.mapping());
            }
            let named: u64 = theirs.iter().map(|h| h.hashes.len() as u64).sum();
            let pages: u64 = memory.blocks.iter().map(super::guest::Block::pages).sum();
            let differing: u64 =
                theirs.iter().map(|h| hashes.differing(usize::from(h.block), h.start, &h.hashes)).sum();
            Some(differing + pages.saturating_sub(named))
        };
        tokio::task::spawn_blocking(compare).await.ok().flatten()
    }

    /// Every byte is in the file: from here on faults are the kernel's business.
    fn release_faults(&mut self) -> Result<(), End> {
        // Threads first: one that was about to map a page would find its range gone and take QEMU for dead.
        self.attempt.end();
        let Some(attached) = self.room.memory.attached() else { return Ok(()) };
        attached.context.unregister(&attached.mappings).map_err(|e| End::Failed(chain(&e)))
    }

    /// Turns 4 KiB mappings into 2 MiB ones, closes the fault descriptor in QEMU, and has locked memory mapped as a whole again, in the
    /// background.
    fn make_huge(&self) {
        let record = self.journal.record();
        let (Some(vm), Some(fault_fd)) = (&record.vm, record.fault_fd) else { return };
        let (pid, start) = (vm.pid.unsigned_abs(), vm.pid_start);
        let (memory, locked) = (Arc::clone(&self.room.memory), self.room.locked);
        tokio::task::spawn_blocking(move || {
            let Ok(process) = Process::reopen(pid, start) else { return };
            let Some(attached) = memory.attached() else { return };
            // A second descriptor of the same context: ours ends with the session, QEMU's must be closed in QEMU.
            let Ok(fd) = attached.context.as_fd().try_clone_to_owned() else { return };
            if let Err(error) = close_in_qemu(&process, RemoteUffd { fd, fd_in_qemu: Some(fault_fd) }) {
                tracing::warn!(%error, "the fault descriptor stays open in QEMU; it does no harm");
            }
            for mapping in attached
                .mappings
                .iter()
                .filter(|m| memory.blocks[m.file_index].page_size == vmove_memory::PageSize::Base4K)
            {
                if let Err(error) = collapse(&process, mapping.hva, mapping.len) {
                    tracing::debug!(%error, "guest memory keeps 4 KiB mappings");
                }
            }
            if let Err(error) =
                if locked { fill_locked_in_qemu(&process, &attached.mappings) } else { Ok(()) }
            {
                tracing::warn!(pid, error = chain(&error), "locked memory gets mapped only as it is touched");
            }
        });
    }

    /// The source will not ask again how this ended.
    pub(super) fn released(&mut self) {
        if let Err(error) = self.journal.update(|r| r.released = true) {
            tracing::warn!(%error, "this migration stays in the history for good");
        }
    }

    /// The last words: the source has freed its side, or was lost after it had heard that it may.
    pub(super) fn finished(&mut self) {
        self.room.remove_tables();
        if let Some(mut vm) = self.journal.record().vm.clone() {
            vm.session = None;
            if let Err(error) = self.node.vms.put(vm) {
                tracing::warn!(%error, "could not update the VM's record");
            }
        }
        let prepare = &self.journal.record().prepare;
        let mut report =
            Report { schema: 1, id: self.id.to_string(), vm: prepare.vm.clone(), ..Report::default() };
        report.source.clone_from(&prepare.source);
        report.destination.clone_from(&self.node.config.node);
        report.memory.clone_from(&prepare.backing);
        report.mode = self.journal.record().mode.map(|m| m.to_string()).unwrap_or_default();
        report.faults = self.room.memory.latencies.stats();
        report.total_ms = self.publisher.elapsed_ms();
        report.phases = self.publisher.phases();
        self.publisher.finish(Outcome::Done { report: Box::new(report) });
    }

    /// Removes everything: the guest never was ours.
    pub(super) async fn undo(&mut self) {
        self.attempt.end();
        self.populating = None;
        if let Some(launching) = self.launching.take() {
            // It ends by itself within its own deadlines; its QEMU is ended below as soon as it is known.
            launching.abort();
            let _ = launching.await;
        }
        let started = self.started.take().and_then(|mut started| started.try_recv().ok());
        self.process = started.or(self.process.take());
        for task in
            [self.loading.take().map(|t| t.abort_handle()), self.relay.take().map(|t| t.abort_handle())]
                .into_iter()
                .flatten()
        {
            task.abort();
        }
        if let Some(process) = self.process.take() {
            if let Err(error) = process.kill().await {
                tracing::error!(%error, "the destination QEMU could not be ended");
            }
        }
        self.node.config.monitors.forget(&self.room.layout.qmp_socket).await;
        self.room.remove();
    }
}

/// Ends the QEMU that an earlier process of this daemon had started for a session that is no more, also when that process was
/// killed before it had written down which one it is.
pub(super) async fn end_left_qemu(vm: &VmRecord) {
    match end_started_in(&vm.vm_dir).await {
        Ok(ended) if ended.iter().any(|pid| *pid != vm.pid.unsigned_abs()) => {
            tracing::warn!(vm = vm.name, ?ended, "ended a QEMU that has no record");
        }
        Ok(_) => {}
        Err(error) => tracing::error!(vm = vm.name, error = chain(&error), "a QEMU does not end"),
    }
}
