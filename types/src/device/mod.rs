//! Devices of a node that VMs own: which one a VM is to get, and as what it has it.

pub mod address;
mod child;
mod choice;
pub mod identity;
mod list;
pub mod request;
mod vm;

pub use address::{BadAddress, PciAddress};
pub use child::ChildDevice;
pub use choice::DeviceChoice;
pub use identity::{BadIdentity, Guid, Identity, Mac};
pub use list::{DeviceOwner, DevicePart, NodeDevice, NodeDeviceList, OwnState};
pub use request::{BadRequest, DeviceRequest, is_role};
pub use vm::VmDevice;
