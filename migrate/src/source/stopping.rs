//! Phase Stopping: QEMU stops the guest and begins to send its device state. The guest may still go on here.

use std::sync::Arc;

use super::aborted::Undo;
use super::control::Control;
use super::conversation::{Heard, Serving, Until};
use super::error::{SourceError, Stop};
use super::final_pages::FinalPages;
use super::page_service::{PageService, while_alive};
use super::pause::Pause;
use super::session::Session;
use super::stopped::{STOP_TIMEOUT, Stopped, StoppedGuest};
use super::stopped_qemu::cancel_stop;
use crate::ownership::SourceEvent;
use crate::proto::message::ToSource;
use crate::vmm::{Halt, Leaving};
use vmove_node::blocking::spawn_blocking;
use vmove_node::peer::LinkKind;
use vmove_types::progress::Phase;
use vmove_types::spec::Visit;

/// A QEMU that is ready to stop the guest, or does.
#[derive(Debug)]
pub(super) struct Stopping {
    pub qemu: Arc<dyn Leaving>,
    pub control: Control,
    pub pages: PageService,
}

impl Stopping {
    /// Stops the guest, and finds the pages whose copy at the destination is not current.
    pub(super) async fn run(&mut self, session: &mut Session) -> Result<StoppedGuest, Stop> {
        let hello = session.hello(LinkKind::State, 0, session.journal.record().token);
        let to = session.node.config.dialer.stream(session.to(), &hello).await?;
        // While the guest runs: what is told after the stop is what it writes from here on.
        let told = self.pages.memory.pending();
        self.control.tell_outdated(&told).await?;
        session.advance(SourceEvent::Stop)?;
        self.gather(session).await?;
        session.publisher.enter(Phase::Switchover);
        // From here on the guest waits, and nothing is held back for it.
        self.pages.book_answers();
        session.cpu.let_go();
        self.qemu.start(to).await.map_err(SourceError::qemu("send its device state"))?;
        let stops = SourceError::qemu("stop the guest");
        let Halt { at, wall, was_running } = match session.vm().libvirt {
            Some(_) => self.stopped_by_libvirt(session).await?,
            None => self.qemu.stopped(STOP_TIMEOUT).await.map_err(stops)?,
        };
        session.frames.stopped(wall);
        // Drained: nothing in QEMU writes guest memory from here on.
        self.qemu.held(STOP_TIMEOUT).await.map_err(stops)?;
        let mut pause = Pause::since(at);
        session.member.iter().for_each(|member| member.stopped(at));
        pause.step("drain");
        let memory = Arc::clone(&self.pages.memory);
        let scanning = while_alive(&mut self.control, spawn_blocking(move || memory.scan_stopped()));
        let (scanned, finished) = tokio::join!(scanning, finish_disks(session, &*self.qemu));
        finished?;
        if let Some(copies) = &session.copies {
            session.report.disks = copies.reports();
        }
        scanned?.map_err(SourceError::memory("find what the guest has written"))?;
        pause.step("scan");
        self.pages.refresh_regions(session, &mut self.control).await?;
        pause.step("register");
        let left = self.pages.memory.pending_pages() * self.pages.memory.page_bytes();
        let sets = self.pages.memory.take_pending();
        session.pages_at_stop = sets.iter().map(crate::pending::PageSet::count).sum();
        session.publisher.coming(|coming| coming.part(left));
        let untold = sets.iter().zip(&told).map(|(all, told)| all.without(told)).collect();
        let last = match session.spec().visit {
            Visit::Go => FinalPages::holes(&self.pages.memory)
                .map_err(SourceError::memory("look at the guest's memory"))?,
            Visit::No | Visit::Back => FinalPages::new(sets),
        };
        Ok(StoppedGuest { at, was_running, untold, last, pause })
    }

    /// libvirt may call its migration off without a word to QEMU here: then the destination's QEMU ends.
    async fn stopped_by_libvirt(&mut self, session: &mut Session) -> Result<Halt, Stop> {
        let qemu = Arc::clone(&self.qemu);
        let stopped = qemu.stopped(STOP_TIMEOUT);
        tokio::pin!(stopped);
        loop {
            let serving = Serving::Rounds(&mut self.pages);
            match session.next_until(&mut self.control, serving, &mut stopped).await? {
                Until::Over(halt) => return Ok(halt.map_err(SourceError::qemu("stop the guest"))?),
                Until::Heard(Heard::PagesRenewed | Heard::Message(ToSource::Prepared)) => {}
                Until::Heard(Heard::Message(other)) => return Err(session.unexpected(&other)),
            }
        }
    }

    /// The guest is stopped.
    pub(super) fn stopped(self, guest: StoppedGuest) -> Stopped {
        let Self { qemu, control, pages } = self;
        Stopped { qemu, control, pages, guest }
    }
}

/// What the guest wrote last comes into the copies of its disks; then QEMU may give the disks away, and sends the device state.
async fn finish_disks(session: &Session, qemu: &dyn Leaving) -> Result<(), SourceError> {
    let Some(copies) = &session.copies else { return Ok(()) };
    copies.finish().await?;
    qemu.go_on().await.map_err(SourceError::qemu("send its device state"))
}

impl Undo for Stopping {
    async fn bring_guest_back(&mut self, _: &Session) -> Result<(), SourceError> {
        cancel_stop(&*self.qemu, &self.pages.memory).await
    }

    fn control(&mut self) -> Option<&mut Control> {
        Some(&mut self.control)
    }
}
