//! Phase Warm: the guest runs here, and memory crosses.

use std::sync::Arc;
use std::time::Duration;

use super::aborted::Undo;
use super::control::Control;
use super::conversation::{Heard, Serving};
use super::disk_choice::Moving;
use super::disk_copies::GIVE_UP_TIMEOUT;
use super::error::{SourceError, Stop};
use super::link_rate::LinkRate;
use super::page_service::PageService;
use super::session::Session;
use super::stopping::Stopping;
use crate::proto::message::ToSource;
use crate::taps::{Tap, TapsError};
use crate::vmm::{Leaving, LeavingMonitor};
use vmove_types::group::Gate;
use vmove_types::progress::Phase;
use vmove_types::vm::Running;

/// QEMU answers within milliseconds unless its main loop hangs.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(10);
/// Attempts to let a guest run again, of [`MONITOR_TIMEOUT`] each at most.
const RUN_AGAIN_TRIES: u32 = 6;
/// Between them.
const RUN_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// A guest that runs here while its memory is read.
#[derive(Debug)]
pub(super) struct Warm {
    pub monitor: Arc<dyn LeavingMonitor>,
    /// A disk bypasses the page cache: the guest is stopped and drained for each scan.
    pub direct_io: bool,
    /// The guest may stand still, since its disks begin to be copied.
    pub begins_copies: bool,
    /// Disks that are to be copied.
    pub moving: Vec<Moving>,
    /// By which the guest reaches the network.
    pub taps: Result<Vec<Tap>, TapsError>,
    pub control: Control,
    pub pages: PageService,
    /// By the rounds so far.
    pub link_rate: LinkRate,
    /// The destination has most of the next round's pages already, as they were before devices left.
    pub compare_next: bool,
    /// The destination has a QEMU that waits for the device state.
    pub prepared: bool,
}

impl Warm {
    /// Opens the page connections.
    pub(super) async fn begin(&mut self, session: &mut Session) -> Result<(), Stop> {
        session.publisher.enter(Phase::Prepare);
        self.pages.open(session, &mut self.control).await?;
        session.ask_clock(&mut self.control).await?;
        session.report.setup_ms = session.publisher.elapsed_ms();
        Ok(())
    }

    /// Sends memory until the guest may be stopped for the rest.
    pub(super) async fn run(&mut self, session: &mut Session) -> Result<(), Stop> {
        if session.owns_devices() || session.member.is_some() {
            // It is without them from then on: not before the destination is ready, nor before those of its whole group are.
            self.wait_prepared(session).await?;
        }
        // Before the others are waited for: who is at rest waits for nobody's memory.
        self.head_start(session).await?;
        self.gather(session, Gate::Prepared).await?;
        if session.owns_devices() {
            session.publisher.enter(Phase::Detach);
        }
        self.quiesce(session).await?;
        self.gather(session, Gate::Quiesced).await?;
        if session.owns_devices() {
            self.detach_devices(session).await?;
        }
        self.rounds(session).await?;
        if !self.prepared {
            self.wait_prepared(session).await?;
            // The guest went on writing meanwhile.
            if self.rounds_would_pay(session) {
                self.rounds(session).await?;
            }
        }
        if self.hold_disks_in_step(session).await? && self.rounds_would_pay(session) {
            self.rounds(session).await?;
        }
        self.pages.all_registered(session, &mut self.control).await?;
        self.be_ready(session).await?;
        self.copy_frames(session).await;
        Ok(())
    }

    /// The next message, or that page connections were renewed.
    pub(super) async fn next(&mut self, session: &mut Session) -> Result<Heard, SourceError> {
        let heard = session.next(&mut self.control, Serving::Rounds(&mut self.pages)).await?;
        if let Heard::Message(ToSource::Prepared) = heard {
            self.prepared = true;
            session.ready_ms.get_or_insert(session.publisher.elapsed_ms());
        }
        Ok(heard)
    }

    /// Waits until the destination's QEMU does.
    pub(super) async fn wait_prepared(&mut self, session: &mut Session) -> Result<(), Stop> {
        while !self.prepared {
            match self.next(session).await? {
                Heard::Message(ToSource::Prepared) | Heard::PagesRenewed => {}
                Heard::Message(other) => return Err(session.unexpected(&other)),
            }
        }
        Ok(())
    }

    /// Makes QEMU ready to stop the guest and to send its device state.
    pub(super) async fn prepare_qemu(&self, session: &Session) -> Result<Arc<dyn Leaving>, Stop> {
        // Disks are finished between the stop and the device state.
        let prepared = self.monitor.prepare(session.copies.is_some()).await;
        Ok(prepared.map_err(SourceError::qemu("be made ready to send its device state"))?)
    }

    /// From here on QEMU has settings that must be put back.
    pub(super) fn stop(self, qemu: Arc<dyn Leaving>) -> Stopping {
        Stopping { qemu, control: self.control, pages: self.pages }
    }

    /// Lets the guest's processors run, or stops them.
    pub(super) async fn set_running(&self, wanted: Running) -> Result<(), SourceError> {
        let told = self.monitor.set_running(wanted, MONITOR_TIMEOUT).await;
        told.map_err(|source| SourceError::StopOrCont { command: wanted.command(), source })
    }
}

impl Undo for Warm {
    async fn bring_guest_back(&mut self, session: &Session) -> Result<(), SourceError> {
        // A scan with direct I/O, or the begin of copies, may have been dropped while the guest was stopped for it.
        let back = if (self.direct_io || self.begins_copies) && session.journal.record().was_running {
            self.run_again().await
        } else {
            Ok(())
        };
        if self.begins_copies {
            // Nobody else knows of them.
            let _ = self.monitor.give_up_copies(GIVE_UP_TIMEOUT).await;
        }
        self.pages.memory.end_tracking();
        back
    }

    fn control(&mut self) -> Option<&mut Control> {
        Some(&mut self.control)
    }
}

impl Warm {
    /// `cont`, unless the guest runs. QEMU may still be busy with stopping it.
    async fn run_again(&self) -> Result<(), SourceError> {
        let mut tries = 0;
        loop {
            let back = self.try_run_again().await;
            tries += 1;
            if back.is_ok() || tries == RUN_AGAIN_TRIES {
                return back;
            }
            tokio::time::sleep(RUN_AGAIN_AFTER).await;
        }
    }

    async fn try_run_again(&self) -> Result<(), SourceError> {
        let status = self.monitor.run_state(MONITOR_TIMEOUT).await;
        if status.map_err(|source| SourceError::StopOrCont { command: "cont", source })? == "running" {
            return Ok(());
        }
        self.set_running(Running::Running).await
    }
}
