//! Devices of this node that VMs own: taken for a VM, given back, never lost when the daemon is killed in between.
//!
//! Starts, migrations and forks take devices by [`Devices`]; the daemon has the ledger behind it. A device that a VM has (a *claim*) is
//! bound to `vfio-pci`, has the addresses that the VM's device is to have, and may be opened by QEMU's user. Whether QEMU has it plugged in
//! is QEMU's to say. So a VM whose record names a device of which there is no claim lacks it.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use vmove_types::device::{DeviceRequest, NodeDeviceList};
use vmove_types::problem::Code;

use crate::blocking::TaskFailed;

/// A device that a VM has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The VM.
    pub vm: String,
    /// The device, its role and its addresses.
    pub request: DeviceRequest,
    /// Whether it is all the VM's. Otherwise it was on its way to the VM, or back, when a daemon was killed or the kernel refused.
    pub held: bool,
    /// Somebody else bound it and started the QEMU that has it: it stays as it is when the VM is released.
    pub taken_in: bool,
}

/// What kept a device from being given or given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trouble {
    /// It cannot be given as things are: absent, taken, in use by the host, in a group with others, of a kind that cannot be given.
    Unavailable,
    /// A process still has it open.
    Open,
    /// The kernel, its driver, or the disk of the journal refused.
    Failed,
}

/// A device could not be given to a VM, or given back. The message names the device, the reason and the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DevicesError {
    /// The device.
    #[error("{why}")]
    Device {
        /// Its kind.
        trouble: Trouble,
        /// In full.
        why: Box<dyn std::error::Error + Send + Sync>,
    },
    /// This node gives no devices.
    #[error("This node gives no devices to VMs: {0}")]
    Nowhere(String),
    /// A task broke off.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

impl DevicesError {
    /// The stable word by which programs know it.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::Device { trouble: Trouble::Unavailable | Trouble::Open, .. } | Self::Nowhere(_) => {
                Code::DeviceUnavailable
            }
            Self::Device { trouble: Trouble::Failed, .. } => Code::DeviceFailed,
            Self::Task(_) => Code::Internal,
        }
    }

    /// Whether a process still has the device open: it can be tried again later.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        matches!(self, Self::Device { trouble: Trouble::Open, .. })
    }
}

/// The devices of this node that VMs have.
#[async_trait]
pub trait Devices: Send + Sync {
    /// Gives a device to a VM: checks it, sets its addresses, binds it to `vfio-pci`, lets QEMU's user open it. On an error it is as it was.
    /// Asked again for what the VM has, it changes nothing.
    async fn take(&self, vm: &str, request: &DeviceRequest) -> Result<(), DevicesError>;

    /// Notes a device that the QEMU of an adopted VM has already. Nothing of it is changed.
    async fn take_in(&self, vm: &str, request: &DeviceRequest) -> Result<(), DevicesError>;

    /// Gives a VM's device back to the host, as soon as no process has it open, at the latest after `limit`. On an error the VM has it
    /// still, or it is given back when the next daemon starts. Of a role that the VM does not have it does nothing. One that was
    /// [taken in](Devices::take_in) stays bound as it is.
    async fn give_back(&self, vm: &str, role: &str, limit: Duration) -> Result<(), DevicesError>;

    /// Waits until no process has a VM's device open: a QEMU that has let it go closes it a little later, and until then the device may
    /// write guest memory. Of a role that the VM does not have it does nothing.
    ///
    /// # Errors
    /// After `limit`, one that [is open](DevicesError::is_open).
    async fn wait_until_closed(&self, vm: &str, role: &str, limit: Duration) -> Result<(), DevicesError>;

    /// Forgets the devices of a VM that goes on with them, unknown to us.
    async fn forget(&self, vm: &str) -> Result<(), DevicesError>;

    /// All claims.
    fn claims(&self) -> Vec<Claim>;

    /// Every device of the node, what it is, who has it, and why it cannot be given if it cannot.
    async fn list(&self) -> Result<NodeDeviceList, DevicesError>;

    /// The claims of one VM.
    fn of_vm(&self, vm: &str) -> Vec<Claim> {
        self.claims().into_iter().filter(|claim| claim.vm == vm).collect()
    }

    /// Gives all devices of a VM back. All are tried; the first error is told.
    async fn give_all_back(&self, vm: &str, limit: Duration) -> Result<(), DevicesError> {
        let mut first = Ok(());
        for claim in self.of_vm(vm) {
            let given = self.give_back(vm, &claim.request.role, limit).await;
            first = first.and(given);
        }
        first
    }
}

impl fmt::Debug for dyn Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Devices")
    }
}

/// A node that gives no devices to VMs.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoDevices;

#[async_trait]
impl Devices for NoDevices {
    async fn take(&self, _: &str, request: &DeviceRequest) -> Result<(), DevicesError> {
        Err(DevicesError::Nowhere(format!("{request} was asked for")))
    }

    async fn take_in(&self, vm: &str, request: &DeviceRequest) -> Result<(), DevicesError> {
        self.take(vm, request).await
    }

    async fn give_back(&self, _: &str, _: &str, _: Duration) -> Result<(), DevicesError> {
        Ok(())
    }

    async fn wait_until_closed(&self, _: &str, _: &str, _: Duration) -> Result<(), DevicesError> {
        Ok(())
    }

    async fn forget(&self, _: &str) -> Result<(), DevicesError> {
        Ok(())
    }

    fn claims(&self) -> Vec<Claim> {
        Vec::new()
    }

    async fn list(&self) -> Result<NodeDeviceList, DevicesError> {
        Ok(NodeDeviceList::default())
    }
}
