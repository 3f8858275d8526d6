//! What `vmove-pve` tells `vmoved` of VMs of Proxmox VE.

use serde::{Deserialize, Serialize};

use crate::libvirt::DomainOperation;

/// Where QEMUs of Proxmox VE have their monitors for vmove: `VMID.qmp`.
pub const MONITORS: &str = "/run/vmove-pve";

/// The name by which `vmoved` tells of a VM: several VMs of Proxmox VE may have one name, so it is that of its number.
#[must_use]
pub fn vm_name(vmid: impl std::fmt::Display) -> String {
    format!("pve-{vmid}")
}

/// A guest of a VM that is to come here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ProxmoxArrival {
    /// Whether there is a QEMU for it yet.
    pub operation: DomainOperation,
    /// Number of the VM.
    pub vmid: u32,
    /// UUID of the VM, in small letters (`smbios1` in its configuration).
    pub uuid: String,
}
