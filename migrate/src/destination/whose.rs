//! libvirt has had a guest run at the source after the commit: whose it is. The side that has run it has it, and of the two QEMUs the other one is
//! ended.

use std::time::Duration;

use tokio::time::timeout;

use super::session::Session;
use crate::vmm::QemuHandle;

/// For QEMU to say whether it runs the guest. One that waits for a page is asked again.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Who has the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    /// It has run here.
    Ours,
    /// It has not.
    TheSources,
    /// QEMU does not say.
    Unknown,
}

/// Looks. `runs`: it was seen to run.
pub(super) async fn look(session: &Session, process: &dyn QemuHandle, runs: bool) -> Whose {
    let record = session.journal.record();
    if runs || record.ran {
        return Whose::Ours;
    }
    let Some(vm) = record.vm.clone().filter(|_| process.alive()) else { return Whose::TheSources };
    let asked = async { session.node.config.vmm.reconnect(&vm).await?.run_state().await };
    match timeout(ANSWER_TIMEOUT, asked).await {
        Ok(Ok(state)) if state == "running" => Whose::Ours,
        Ok(Ok(_)) => Whose::TheSources,
        Ok(Err(_)) | Err(_) => Whose::Unknown,
    }
}
