//! Devices that leases hold: whoever asks for one, by a start, a migration or a fork, gets it only if no other VM was granted it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use vmove_node::devices::{Claim, Devices, DevicesError, Trouble};
use vmove_types::device::{DeviceOwner, DeviceRequest, NodeDeviceList};

use crate::server::grants::{Grants, LeasedDevice};

/// A device is another VM's by its lease.
#[derive(Debug, thiserror::Error)]
#[error("Device {address}, asked for as {role} of {vm:?}, is held by lease {} of {} for VM {:?}: name another device, or release that lease first", .by.lease, .by.holder, .by.vm)]
struct HeldByLease {
    address: String,
    role: String,
    vm: String,
    by: LeasedDevice,
}

/// The devices of a node whose book of grants counts.
#[derive(Debug)]
pub struct LeasedDevices {
    devices: Arc<dyn Devices>,
    grants: Arc<Grants>,
}

impl LeasedDevices {
    /// With the book of the node, if it keeps one.
    pub fn beside(devices: Arc<dyn Devices>, grants: Option<&Arc<Grants>>) -> Arc<dyn Devices> {
        match grants {
            Some(grants) => Arc::new(Self { devices, grants: Arc::clone(grants) }),
            None => devices,
        }
    }
}

#[async_trait]
impl Devices for LeasedDevices {
    async fn take(&self, vm: &str, request: &DeviceRequest) -> Result<(), DevicesError> {
        if let Some(by) = self.grants.holder_of(request.address).filter(|by| by.vm != vm) {
            let (address, role) = (request.address.to_string(), request.role.clone());
            let why = HeldByLease { address, role, vm: vm.to_owned(), by };
            return Err(DevicesError::Device { trouble: Trouble::Unavailable, why: why.into() });
        }
        self.devices.take(vm, request).await
    }

    async fn take_in(&self, vm: &str, request: &DeviceRequest) -> Result<(), DevicesError> {
        self.devices.take_in(vm, request).await
    }

    async fn give_back(&self, vm: &str, role: &str, limit: Duration) -> Result<(), DevicesError> {
        self.devices.give_back(vm, role, limit).await
    }

    async fn wait_until_closed(&self, vm: &str, role: &str, limit: Duration) -> Result<(), DevicesError> {
        self.devices.wait_until_closed(vm, role, limit).await
    }

    async fn forget(&self, vm: &str) -> Result<(), DevicesError> {
        self.devices.forget(vm).await
    }

    fn claims(&self) -> Vec<Claim> {
        self.devices.claims()
    }

    /// Whoever chooses a device sees what is leased, too.
    async fn list(&self) -> Result<NodeDeviceList, DevicesError> {
        let mut list = self.devices.list().await?;
        for device in &mut list.devices {
            let Some(by) = self.grants.holder_of(device.address) else { continue };
            let LeasedDevice { vm, role, lease, holder } = by;
            let owner = device.owner.get_or_insert(DeviceOwner { vm, role, held: false, lease: None });
            owner.lease = Some(format!("{lease} of {holder}"));
        }
        Ok(list)
    }
}
