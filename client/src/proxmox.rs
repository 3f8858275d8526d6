//! Requests of `vmove-pve`.

use vmove_types::libvirt::DomainHookDone;
use vmove_types::proxmox::ProxmoxArrival;

use crate::{Client, Error};

/// Proxmox VE. Each request fails if the daemon refuses it or does not answer.
#[expect(clippy::missing_errors_doc, reason = "said once, above")]
impl Client {
    /// Answered when QEMU's own migration to here may begin.
    pub async fn expect_proxmox_guest(&self, arrival: &ProxmoxArrival) -> Result<DomainHookDone, Error> {
        self.0.post("/v1/proxmox/arrival", arrival).await
    }
}
