//! What an operator does about a guest that lacks a device.

use std::sync::Arc;

use vmove_node::devices::DevicesError;
use vmove_qmp::QmpError;
use vmove_qmp::hotplug::HotplugError;
use vmove_types::device::VmDevice;

use crate::devices::attach::attach;
use crate::devices::of_role;
use crate::engine::Engine;
use vmove_node::peer::SessionId;
use vmove_node::record::VmRecord;
use vmove_node::store::VmStoreError;

/// Why a guest was not given a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// Unknown VM, or its record cannot be used.
    #[error(transparent)]
    Vm(#[from] VmStoreError),
    /// A migration sees to it.
    #[error("{vm:?} is in migration {session}: see `vmove status {session}`")]
    Busy {
        /// The VM.
        vm: String,
        /// The migration.
        session: SessionId,
    },
    /// It is to have no such device.
    #[error("{vm:?} has no device {role}: `vmove devices` lists what VMs have")]
    NoSuchRole {
        /// The VM.
        vm: String,
        /// The role.
        role: String,
    },
    /// The device cannot be had.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// QEMU does not answer.
    #[error("The monitor of the guest's QEMU does not answer")]
    Monitor(#[from] QmpError),
    /// QEMU does not take it.
    #[error(transparent)]
    Plug(#[from] HotplugError),
}

impl Engine {
    /// Gives a guest a device that its record names and that it lacks. If it has it, this does nothing.
    ///
    /// # Errors
    /// [`AttachError`].
    pub async fn attach_device(self: &Arc<Self>, vm: &str, role: &str) -> Result<VmDevice, AttachError> {
        let record = self.node.vms.get(vm)?;
        if let Some((session, _)) = self.lock().iter().find(|(_, handle)| handle.excludes(vm)) {
            return Err(AttachError::Busy { vm: vm.to_owned(), session: *session });
        }
        let no_such = || AttachError::NoSuchRole { vm: vm.to_owned(), role: role.to_owned() };
        let mut device = of_role(&record, role).ok_or_else(no_such)?.clone();
        self.node.config.devices.take(vm, &device.request).await?;
        let monitor = self.node.config.vmm.monitor(&record).await?;
        device.bus = attach(&*self.node.config.vmm, &record, &*monitor, &device).await?.bus;
        let own = device.clone();
        let change = |now: &mut VmRecord| {
            let known = now.devices.iter_mut().find(|known| known.request.role == role);
            if let Some(known) = known.filter(|known| **known != own) {
                *known = own;
            }
        };
        self.node.vms.change_owing(&record, change)?;
        Ok(device)
    }
}
