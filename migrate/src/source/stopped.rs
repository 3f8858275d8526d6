//! Phase Stopped: the guest is stopped here, and may still go on here. The last pages and the device state cross.

use std::sync::Arc;
use std::time::Duration;

use super::aborted::Undo;
use super::committed::Committed;
use super::control::Control;
use super::conversation::{Heard, Serving};
use super::error::{SourceError, Stop};
use super::final_pages::FinalPages;
use super::page_service::PageService;
use super::pause::Pause;
use super::session::Session;
use super::stopped_qemu::{Kept, StoppedQemu, cancel_stop};
use crate::pending::PageSet;
use crate::proto::message::{DestinationStand, Final, ToDestination, ToSource};
use crate::vmm::Leaving;
use vmove_types::progress::Phase;
use vmove_types::time::Mono;

/// QEMU sends what little RAM of its own is not shared (video memory), then stops the guest.
pub(super) const STOP_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two looks whether the destination is still there.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What is known of a guest that is stopped and drained.
#[derive(Debug)]
pub(super) struct StoppedGuest {
    /// When it stopped, by our clock.
    pub at: Mono,
    /// It was not paused before.
    pub was_running: bool,
    /// What of that the destination has not been told to be outdated.
    pub untold: Vec<PageSet>,
    pub last: FinalPages,
    /// What the pause has consisted of so far.
    pub pause: Pause,
}

/// A stopped guest that is not given up.
#[derive(Debug)]
pub(super) struct Stopped {
    pub qemu: Arc<dyn Leaving>,
    pub control: Control,
    pub pages: PageService,
    pub guest: StoppedGuest,
}

impl Stopped {
    /// Goes on until the destination has the device state and QEMU here cannot run the guest on by itself.
    pub(super) async fn run(&mut self, session: &mut Session) -> Result<(), Stop> {
        let last = &mut self.guest.last;
        self.control.tell_outdated(&std::mem::take(&mut self.guest.untold)).await?;
        let message = Final { stopped_at: self.guest.at, mode: session.mode };
        self.control.send(&ToDestination::Stopped(message)).await?;
        if session.copies.is_some() {
            // They were finished before the phase began.
            self.control.send(&ToDestination::DisksWhole).await?;
        }
        last.name(&self.pages);
        self.guest.pause.step("tell");
        session.publisher.enter(Phase::HandOver);
        loop {
            let serving = Serving::Final(&mut self.pages, &mut self.guest.last);
            match session.next(&mut self.control, serving).await? {
                Heard::Message(ToSource::Loaded) => break,
                Heard::Message(ToSource::Prepared) | Heard::PagesRenewed => {}
                Heard::Message(other) => return Err(session.unexpected(&other)),
            }
        }
        self.guest.pause.step("load");
        // Until QEMU has completed, a lost stream makes it run the guest on by itself: no commit before that.
        self.completed(session).await?;
        // Zeros that were read in the place of what somebody had cut off are at the destination: it must not run the guest with them.
        self.pages.memory.check_whole().map_err(SourceError::memory("give the guest's memory away"))?;
        self.guest.pause.step("complete");
        self.not_failed_meanwhile(session)?;
        self.gather(session).await
    }

    /// Waits until QEMU has completed. libvirt's does not once the destination is lost: the QEMU there waits for a page, which nobody brings any more,
    /// and this one for that QEMU, with a guest that stands still.
    async fn completed(&mut self, session: &Session) -> Result<(), Stop> {
        let qemu = Arc::clone(&self.qemu);
        let completed = qemu.completed(STOP_TIMEOUT);
        tokio::pin!(completed);
        loop {
            tokio::select! {
                biased;
                completed = &mut completed => {
                    return Ok(completed.map_err(SourceError::qemu("send its device state"))?);
                }
                () = tokio::time::sleep(LOOK_INTERVAL), if session.vm().libvirt.is_some() => {
                    self.not_failed_meanwhile(session)?;
                    self.control.look_at_silence()?;
                }
            }
        }
    }

    /// A destination that has failed since it said `Loaded` is not given the guest.
    pub(super) fn not_failed_meanwhile(&mut self, session: &Session) -> Result<(), Stop> {
        for message in self.control.look_ahead()? {
            match message {
                failed @ ToSource::Failed(_) => return Err(session.unexpected(failed)),
                // It says why in its next message, which is waited for when the guest is brought back.
                ToSource::Resume(DestinationStand::Gone) => {
                    return Err(SourceError::GivenBack(session.to().clone()).into());
                }
                // Such as that it has lost its page connections: that is dealt with after the commit.
                _ => {}
            }
        }
        Ok(())
    }

    /// The guest is given up, and the journal says so: from here on it is the destination's.
    pub(super) fn commit(self, session: &Session) -> (Committed, Control) {
        session.publisher.enter(Phase::HandOver);
        let Self { qemu, control, pages, guest } = self;
        let StoppedGuest { at, was_running, last, mut pause, .. } = guest;
        pause.step("commit");
        let pause = was_running.then_some(pause);
        let kept = Kept::InMemory(StoppedQemu { qemu, stopped_at: was_running.then_some(at), pause });
        (Committed { kept, serving: Some((pages, last)), ..Committed::journaled() }, control)
    }
}

impl Undo for Stopped {
    async fn bring_guest_back(&mut self, _: &Session) -> Result<(), SourceError> {
        cancel_stop(&*self.qemu, &self.pages.memory).await
    }

    fn control(&mut self) -> Option<&mut Control> {
        Some(&mut self.control)
    }
}
