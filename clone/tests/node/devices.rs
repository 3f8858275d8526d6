//! Devices of a node that exist only in its list: who has which is as real as it needs to be for those that ask.

use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use vmove_node::devices::{Claim, Devices, DevicesError, Trouble};
use vmove_types::device::{DeviceRequest, NodeDeviceList};

/// Model of all of them.
const MODEL: &str = "8086:10ca";

/// Devices 0000:77:00.0 to 0000:77:00.7. The last cannot be taken, which shows only then.
#[derive(Default)]
pub struct Shelf(Mutex<Vec<Claim>>);

#[async_trait]
impl Devices for Shelf {
    async fn take(&self, vm: &str, request: &DeviceRequest) -> Result<(), DevicesError> {
        let mut claims = self.0.lock().unwrap();
        let held = claims.iter().find(|claim| claim.request.address == request.address);
        let why = match held {
            _ if request.address.to_string().ends_with(".7") => "its driver refuses".to_owned(),
            Some(claim) if claim.vm != vm => format!("VM {:?} has it", claim.vm),
            Some(_) => return Ok(()),
            None => {
                let (vm, request) = (vm.to_owned(), request.clone());
                claims.push(Claim { vm, request, held: true, taken_in: false });
                return Ok(());
            }
        };
        Err(DevicesError::Device { trouble: Trouble::Unavailable, why: why.into() })
    }

    async fn take_in(&self, vm: &str, request: &DeviceRequest) -> Result<(), DevicesError> {
        self.take(vm, request).await
    }

    async fn give_back(&self, vm: &str, role: &str, _: Duration) -> Result<(), DevicesError> {
        self.0.lock().unwrap().retain(|claim| claim.vm != vm || claim.request.role != role);
        Ok(())
    }

    async fn wait_until_closed(&self, _: &str, _: &str, _: Duration) -> Result<(), DevicesError> {
        Ok(())
    }

    async fn forget(&self, vm: &str) -> Result<(), DevicesError> {
        self.0.lock().unwrap().retain(|claim| claim.vm != vm);
        Ok(())
    }

    fn claims(&self) -> Vec<Claim> {
        self.0.lock().unwrap().clone()
    }

    async fn list(&self) -> Result<NodeDeviceList, DevicesError> {
        let claims = self.claims();
        let device = |function: u8| {
            let address = format!("0000:77:00.{function}");
            let owner = claims.iter().find(|claim| claim.request.address.to_string() == address);
            let refused = owner.map(|claim| format!("VM {:?} has it", claim.vm));
            serde_json::json!({ "address": address, "kind": "nic", "model": MODEL, "moves": "unplug", "refused": refused })
        };
        let devices: Vec<_> = (0..8).map(device).collect();
        let list = serde_json::json!({ "devices": devices, "parts": [] });
        Ok(serde_json::from_value(list).unwrap())
    }
}
