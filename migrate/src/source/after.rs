//! From the commit on: the guest belongs to the destination, and this side keeps its memory until all of it is there.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use vmove_qmp::process::QemuProcess;

use super::memory::SourceMemory;
use super::session::Session;
use crate::destination::chain;
use crate::link::LinkError;
use crate::ownership::SourceEvent;
use crate::pending::PageSet;
use crate::progress::{GuestPlace, Outcome, Phase};
use crate::proto::hello::HelloError;
use crate::proto::message::{Complete, DestinationStand, Running, SourceStand, ToDestination, ToSource};

/// QEMU gives its memory back to the kernel: about 0.1 s per GiB with 4 KiB pages.
const QUIT: Duration = Duration::from_secs(20);

/// Why a conversation ended without the destination being whole.
enum Lost {
    /// Another connection may help.
    Connection(String),
    /// The destination is gone without ever having run the guest.
    GivenBack,
    /// Nothing will.
    ForGood(String),
}

impl Session {
    /// Commits (unless an earlier life of the daemon has) and stays until the destination is whole.
    pub(super) async fn see_through(mut self, first: bool) {
        if let Err(error) = self.advance(SourceEvent::PeerLoaded) {
            return self.end_badly(error, GuestPlace::PausedAtSource, false);
        }
        self.publisher.enter(Phase::HandOver);
        let mut lost = if first {
            self.first_conversation().await
        } else {
            Some(Lost::Connection("this daemon was started anew".to_owned()))
        };
        let mut until = Instant::now() + self.node.config.reconnect_for;
        while let Some(why) = lost {
            match why {
                Lost::GivenBack if self.runs_there => {
                    let why = format!("{} gives back a guest that has run there", self.to);
                    return self.end_badly(why, GuestPlace::PausedAtDestination, false);
                }
                Lost::GivenBack => return self.take_back().await,
                Lost::ForGood(why) => return self.end_badly(why, GuestPlace::PausedAtDestination, false),
                Lost::Connection(why) if Instant::now() >= until => {
                    let why = format!(
                        "{why}; the guest belongs to {}: `vmove recover {}` tries again",
                        self.to, self.id
                    );
                    return self.end_badly(why, GuestPlace::PausedAtDestination, false);
                }
                Lost::Connection(why) => {
                    tracing::warn!(session = %self.id, why, "destination lost; dialling again");
                    self.channel = None;
                    self.end_pages();
                    // Named anew once the destination has the page connections again.
                    self.final_runs = None;
                    self.hashes = None;
                    self.publisher.update(|p| p.outcome = Outcome::Reconnecting { error: why });
                }
            }
            let tried = Instant::now();
            lost = self.another_conversation().await;
            if tried.elapsed() > Duration::from_secs(5) {
                // It held for a while: count anew.
                until = Instant::now() + self.node.config.reconnect_for;
            } else if lost.is_some() {
                sleep(Duration::from_millis(250)).await;
            }
        }
        self.finish().await;
    }

    async fn first_conversation(&mut self) -> Option<Lost> {
        match self.send(&ToDestination::Commit).await {
            Ok(()) => self.converse().await.err(),
            Err(error) => Some(Lost::Connection(error.to_string())),
        }
    }

    /// Dials again, says that the guest was given up, and serves what is still missing.
    async fn another_conversation(&mut self) -> Option<Lost> {
        self.report.recoveries += 1;
        match self.dial_control(self.token).await {
            Ok(()) => {}
            Err(LinkError::Hello { source: HelloError::Refused(why), .. }) => {
                return Some(Lost::Connection(format!("{} does not know the session: {why}", self.to)));
            }
            Err(error) => return Some(Lost::Connection(chain(&error))),
        }
        self.take_up().await.err()
    }

    async fn take_up(&mut self) -> Result<(), Lost> {
        let connection = |e: String| Lost::Connection(e);
        self.send(&ToDestination::Resume(SourceStand::Committed))
            .await
            .map_err(|e| connection(e.to_string()))?;
        let answer = timeout(Duration::from_secs(15), self.next())
            .await
            .map_err(|_| connection("no answer to Resume".to_owned()))?;
        let stand = match answer.map_err(|e| connection(e.to_string()))? {
            ToSource::Resume(stand) => stand,
            other => {
                return Err(Lost::ForGood(format!(
                    "Protocol violation by {}: {} after Resume",
                    self.to,
                    other.name()
                )));
            }
        };
        self.publisher.update(|p| p.outcome = Outcome::Running);
        if stand == DestinationStand::Gone {
            return Err(Lost::GivenBack);
        }
        if stand != DestinationStand::Complete {
            self.open_memory_again().await.map_err(Lost::ForGood)?;
            if let Err(stop) = self.serve_pages().await {
                return Err(connection(format!("{stop:?}")));
            }
            self.start_naming();
            self.start_hashing();
        }
        self.converse().await
    }

    /// In a new life of the daemon nothing is known of what has crossed: everything is named, and the destination takes what it lacks.
    async fn open_memory_again(&mut self) -> Result<(), String> {
        if self.memory.is_some() {
            return Ok(());
        }
        let vm = self.vm.clone();
        let memory = tokio::task::spawn_blocking(move || SourceMemory::open(&vm))
            .await
            .map_err(|e| e.to_string())??;
        self.final_sets = memory.blocks.iter().map(|b| PageSet::full(b.file.pages())).collect();
        self.memory = Some(Arc::new(memory));
        Ok(())
    }

    /// Serves until the destination is whole.
    async fn converse(&mut self) -> Result<(), Lost> {
        loop {
            match self.next().await.map_err(|e| Lost::Connection(e.to_string()))? {
                ToSource::Running(running) => self.guest_runs_there(running),
                ToSource::Complete(complete) => {
                    self.complete = Some(complete);
                    return Ok(());
                }
                ToSource::Resume(DestinationStand::Gone) => return Err(Lost::GivenBack),
                ToSource::Failed(why) => return Err(Lost::ForGood(format!("{}: {why}", self.to))),
                ToSource::Loaded | ToSource::Prepared | ToSource::Resume(_) => {}
                other => {
                    return Err(Lost::ForGood(format!(
                        "Protocol violation by {}: {} after the commit",
                        self.to,
                        other.name()
                    )));
                }
            }
        }
    }

    fn guest_runs_there(&mut self, running: Running) {
        self.runs_there = true;
        self.publisher.enter(Phase::Fetch);
        self.report.pages_after_resume = running.pages_left;
        if let (Some(stopped), Some(resumed)) = (self.stopped_at, running.resumed_at) {
            let offset = self.clock.offset();
            self.report.downtime_ms = offset.to_ours(resumed).ms_since(stopped);
            self.report.downtime_error_ms = offset.error as f64 / 1e6;
        }
        self.report.paused = running.resumed_at.is_none();
        // For a life of the daemon after this one; without it only the figures would be lost.
        let report = self.report.clone();
        if let Err(error) = self.journal.update(|r| r.report = report) {
            tracing::warn!(%error, "the downtime is not in the journal");
        }
    }

    /// The destination is whole: ends QEMU here, frees its memory, forgets the VM.
    async fn finish(mut self) {
        self.publisher.enter(Phase::Finish);
        if let Err(error) = self.advance(SourceEvent::PeerComplete) {
            return self.end_badly(error, GuestPlace::Destination, false);
        }
        if let Some(complete) = self.complete.take() {
            self.add_to_report(&complete);
        }
        self.end_pages();
        self.memory = None;
        if let Err(error) = self.release().await {
            let error =
                format!("The guest runs at {}, but its old QEMU could not be ended: {error}", self.to);
            return self.end_badly(error, GuestPlace::Destination, false);
        }
        let _ = timeout(Duration::from_secs(2), self.send(&ToDestination::Released)).await;
        self.report.total_ms = self.publisher.elapsed_ms();
        self.report.phases = self.publisher.phases();
        let report = self.report.clone();
        if let Err(error) = self.journal.update(|r| r.report = report) {
            tracing::warn!(%error, "the report is not in the history");
        }
        let differing = self.report.verified == Some(false);
        if differing {
            let error = "Verification failed: pages at the destination differ from the source's; do not trust this guest";
            return self.end_badly(error, GuestPlace::Destination, false);
        }
        self.publisher.finish(Outcome::Done { report: Box::new(self.report.clone()) });
    }

    fn add_to_report(&mut self, complete: &Complete) {
        complete.add_to(&mut self.report);
        if self.report.pages_zero == 0 {
            self.report.pages_zero = complete.pages_zero;
        }
        self.report.verified = match (self.spec.verify, complete.differing_pages) {
            (false, _) => None,
            // A destination that was started anew has no hashes of what it had mapped before.
            (true, differing) => differing.map(|pages| pages == 0),
        };
        let rounds = self.report.rounds.len();
        if rounds > 0 {
            let gib = (self.report.pages_total * self.report.page_size) as f64 / f64::from(1 << 30);
            let scans: f64 = self.report.rounds.iter().map(|r| r.scan_us).sum();
            self.report.scan_us_per_gib = scans / rounds as f64 / gib;
        }
    }

    async fn release(&mut self) -> Result<(), String> {
        let pid = self.vm.pid.unsigned_abs();
        if vmove_memory::Process::reopen(pid, self.vm.pid_start).is_ok() {
            let process = QemuProcess::adopt(pid, &vmove_qmp::process::log_in(&self.vm.vm_dir))
                .map_err(|e| chain(&e))?;
            process.quit(self.client.as_ref(), QUIT).await.map_err(|e| chain(&e))?;
        }
        self.client = None;
        self.qmp = None;
        self.node.config.monitors.forget(&self.vm.qmp_socket).await;
        // The VM may have come back since this session's daemon was killed: what is here now is not ours to free.
        let ours = self
            .node
            .vms
            .get(&self.vm.name)
            .is_ok_and(|now| now.pid == self.vm.pid && now.pid_start == self.vm.pid_start);
        if ours {
            self.free_files()?;
        }
        self.journal.update(|r| r.freed = true).map_err(|e| format!("Could not write the journal: {e}"))
    }

    fn free_files(&self) -> Result<(), String> {
        for ram in &self.vm.ram {
            match std::fs::remove_file(&ram.path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(format!("{}: {error}", ram.path.display()));
                }
                _ => {}
            }
        }
        if !self.vm.adopted {
            // QEMU's log stays for whoever wonders; sockets in it are dead.
            let _ = std::fs::remove_file(&self.vm.qmp_socket);
        }
        self.node.vms.remove(&self.vm.name).map_err(|e| chain(&e))
    }
}
