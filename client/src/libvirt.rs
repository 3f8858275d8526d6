//! Requests of libvirt's hook.

use vmove_types::libvirt::{DomainHook, DomainHookDone};

use crate::{Client, Error};

/// libvirt. Each request fails if the daemon refuses it or does not answer.
#[expect(clippy::missing_errors_doc, reason = "said once, above")]
impl Client {
    /// Answered when libvirt may go on with what its hook tells of.
    pub async fn answer_libvirt(&self, hook: &DomainHook) -> Result<DomainHookDone, Error> {
        self.0.post("/v1/libvirt/hook", hook).await
    }
}
