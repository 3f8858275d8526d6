//! Phase Stopping: QEMU stops the guest and begins to send its device state. The guest may still go on here.

use std::sync::Arc;

use vmove_qmp::Client;
use vmove_qmp::switchover::{Outbound, Source, StateReceiver};

use super::aborted::Undo;
use super::control::Control;
use super::error::{SourceError, Stop};
use super::final_pages::FinalPages;
use super::page_service::{PageService, while_alive};
use super::session::Session;
use super::stopped::{STOP_TIMEOUT, Stopped, StoppedGuest};
use super::stopped_qemu::{Relay, cancel_stop};
use crate::ownership::SourceEvent;
use vmove_node::blocking::spawn_blocking;
use vmove_node::peer::LinkKind;
use vmove_types::progress::Phase;
use vmove_types::time::Mono;

/// A QEMU that is ready to stop the guest, or does.
#[derive(Debug)]
pub(super) struct Stopping {
    pub monitor: Client,
    pub qemu: Arc<Source>,
    pub relay: Option<Relay>,
    pub control: Control,
    pub pages: PageService,
}

impl Stopping {
    /// Stops the guest, and finds the pages whose copy at the destination is not current.
    pub(super) async fn run(&mut self, session: &mut Session) -> Result<StoppedGuest, Stop> {
        let hello = session.hello(LinkKind::State, 0, session.journal.record().token);
        let to = session.node.config.dialer.stream(session.to(), &hello).await?;
        let sends = SourceError::qemu("send its device state");
        let (from, theirs) = StateReceiver::pair().map_err(sends)?;
        self.relay = Some(Relay::start(from, to));
        session.advance(SourceEvent::Stop)?;
        session.publisher.enter(Phase::Switchover);
        self.qemu.start(Outbound::Fd(theirs)).await.map_err(sends)?;
        let stops = SourceError::qemu("stop the guest");
        let stopped = self.qemu.stopped(STOP_TIMEOUT).await.map_err(stops)?;
        // Drained: nothing in QEMU writes guest memory from here on.
        self.qemu.held(STOP_TIMEOUT).await.map_err(stops)?;
        let memory = Arc::clone(&self.pages.memory);
        let scanned = while_alive(&mut self.control, spawn_blocking(move || memory.scan())).await?;
        scanned.map_err(SourceError::memory("find what the guest has written"))?;
        self.pages.refresh_regions(session, &mut self.control).await?;
        let last = FinalPages::new(self.pages.memory.take_pending());
        Ok(StoppedGuest { at: Mono(stopped.at.0), was_running: stopped.was_running, last })
    }

    /// The guest is stopped.
    pub(super) fn stopped(self, guest: StoppedGuest) -> Stopped {
        let Self { monitor, qemu, relay, control, pages } = self;
        Stopped { monitor, qemu, relay, control, pages, guest }
    }
}

impl Undo for Stopping {
    async fn bring_guest_back(&mut self, _: &Session) -> Result<(), SourceError> {
        cancel_stop(&mut self.relay, &self.qemu, &self.pages.memory).await
    }

    fn control(&mut self) -> Option<&mut Control> {
        Some(&mut self.control)
    }
}
