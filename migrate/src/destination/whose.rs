//! libvirt has had a guest run at the source after the commit: whose it is. The side that has run it has it, and of the two QEMUs the other one is
//! ended.

use std::time::Duration;

use tokio::time::timeout;

use super::error::DestinationError;
use super::owner::Owner;
use super::session::{Control, End, Session};
use crate::ownership::DestinationEvent;
use crate::proto::message::{DestinationStand, Running, ToSource};
use crate::vmm::QemuHandle;
use vmove_types::time::Mono;

/// For QEMU to say whether it runs the guest. One that waits for a page is asked again.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Who has the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// It has run here.
    Ours,
    /// It has not.
    TheSources,
    /// QEMU does not say.
    Unknown,
}

/// Looks. `runs`: it was seen to run.
async fn look(session: &Session, process: &dyn QemuHandle, runs: bool) -> Whose {
    let record = session.journal.record();
    if runs || record.ran {
        // One that has ended is told as a failure with the next look at it: nobody has the guest then but the source.
        return if process.alive() { Whose::Ours } else { Whose::Unknown };
    }
    let Some(vm) = record.vm.clone().filter(|_| process.alive()) else { return Whose::TheSources };
    let asked = async { session.node.config.vmm.reconnect(&vm).await?.run_state().await };
    match timeout(ANSWER_TIMEOUT, asked).await {
        Ok(Ok(state)) if state == "running" => Whose::Ours,
        Ok(Ok(_)) => Whose::TheSources,
        Ok(Err(_)) | Err(_) => Whose::Unknown,
    }
}

impl Owner {
    /// Tells a source in which libvirt has had the guest run whose it is, once that is known. If it is the source's, QEMU here is ended first.
    pub(super) async fn tell_whose(
        &mut self,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<(), End> {
        match look(session, &*self.process, self.runs_since.is_some()).await {
            Whose::Unknown => return Ok(()),
            Whose::Ours => {
                let resumed_at = self.runs_since.or(Some(Mono::now()));
                let pages_left = session.files.memory.left();
                control.send(&ToSource::Running(Running { resumed_at, pages_left })).await?;
            }
            Whose::TheSources => {
                self.process.end_for_good().await.map_err(DestinationError::Kill)?;
                session.advance_owing(DestinationEvent::NeverRan)?;
                // If that is lost, the source asks, and is answered from the journal.
                let _ = control.send(&ToSource::Resume(DestinationStand::Gone)).await;
                return Err(DestinationError::RunsAtSource.into());
            }
        }
        self.asked = false;
        Ok(())
    }
}
