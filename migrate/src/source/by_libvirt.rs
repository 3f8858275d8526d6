//! Where libvirt decides on which side the guest runs: what this side does when it cannot go on as it was.

use std::time::Duration;

use super::aborted::tell_later;
use super::error::{SourceError, Stop};
use super::hold::Hold;
use super::session::Session;
use super::stopped_qemu::Kept;
use crate::kept_memory::let_memory_go;
use crate::ownership::SourceEvent;
use crate::vmm::Leaving;
use vmove_types::problem::chain;
use vmove_types::progress::GuestPlace;

/// Between two looks whether QEMU is still there.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// libvirt has a migration that was called off ended at once; one that hangs is not waited for longer.
pub(super) const VERDICT_TIMEOUT: Duration = Duration::from_secs(30);

/// Whether libvirt may have given the guest to the destination although this side cannot go on as it was. A migration that can still be called
/// off is.
pub(super) async fn gave_away(session: &Session, qemu: &dyn Leaving, stop: &Stop) -> bool {
    if session.vm().libvirt.is_none() {
        return false;
    }
    match qemu.is_given_up(VERDICT_TIMEOUT).await {
        Ok(sent) => {
            if sent {
                tracing::warn!(
                    why = stop.why(),
                    "libvirt has given the guest to the destination all the same"
                );
            }
            sent
        }
        // Whoever serves memory that nobody needs does no harm.
        Err(error) => {
            tracing::warn!(
                error = chain(&error),
                "nobody knows where the guest is: its memory is kept for the destination"
            );
            true
        }
    }
}

/// The destination's QEMU has ended, and never ran the guest: what becomes of it here is libvirt's to say.
pub(super) async fn given_back(mut session: Session, kept: Kept, hold: Hold) {
    let why = chain(&SourceError::GivenBack(session.to().clone()));
    if let Err(error) = session.advance_owing(SourceEvent::PeerGone) {
        return session.end_badly(chain(&error), GuestPlace::Source);
    }
    put_back(&session, kept, hold).await;
    session.write_owing(|r| r.to_resume = false);
    session.write_owed().await;
    session.end_badly(why, GuestPlace::Source);
}

async fn put_back(session: &Session, kept: Kept, hold: Hold) {
    // First: QEMU may answer nothing before.
    hold.let_on().await;
    // Also if this daemon was started anew meanwhile, and QEMU answered nothing then.
    if let Err(error) = kept.bring_guest_back(session).await {
        tracing::warn!(error = chain(&error), "x-ignore-shared may still be set");
    }
    let_memory_go(session.node.disk(), session.vm());
}

/// The destination can do nothing more for the guest. Waits until libvirt has it run here again, which is true, or has ended QEMU here, or an operator
/// ends the guest. False at once for a guest that is not libvirt's.
pub(super) async fn goes_on_here(session: &Session, hold: &Hold, why: &str) -> bool {
    if session.vm().libvirt.is_none() {
        return false;
    }
    session.publisher.reconnecting(format!(
        "{why}; it is for libvirt to have the guest go on here, or to end it (`virsh destroy`)"
    ));
    let abandon = session.publisher.abandon();
    loop {
        tokio::select! {
            biased;
            () = hold.returned() => return true,
            () = abandon.asked() => return false,
            () = tokio::time::sleep(LOOK_INTERVAL) => {}
        }
        if session.node.config.vmm.has_ended(session.vm()) {
            return false;
        }
    }
}

/// libvirt has the guest run here again, although everything was sent: its QEMU at the destination has ended.
pub(super) async fn runs_here_again(mut session: Session, kept: Kept, hold: Hold) {
    let why = "libvirt has the guest go on at the source";
    let next = session.state().step(SourceEvent::Reclaim);
    match next {
        Ok(next) => session.write_owing(|r| {
            r.enter(next);
            r.untold = true;
            r.to_resume = false;
        }),
        Err(error) => return session.end_badly(chain(&error), GuestPlace::Source),
    }
    put_back(&session, kept, hold).await;
    tell_later(&session.node, session.journal.record().clone(), None);
    session.write_owed().await;
    session.end_badly(why, GuestPlace::Source);
}
