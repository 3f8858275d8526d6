//! What a node has of devices, as `vmove devices` tells it.

use serde::{Deserialize, Serialize};

use super::PciAddress;

/// The devices of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeDeviceList {
    /// PCI functions, without bridges, by address.
    pub devices: Vec<NodeDevice>,
    /// Parts of devices that are no PCI functions: mediated devices, MIG slices.
    pub parts: Vec<DevicePart>,
    /// What could not be read, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A PCI function of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeDevice {
    /// Where it is, such as `0000:17:00.2`.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub address: PciAddress,
    /// `gpu`, `console-graphics`, `co-processor`, `processing-accelerator`, `nic`, `rdma-adapter`, `storage` or `other`. New words may be
    /// added.
    pub kind: String,
    /// Numbers of vendor and model, such as `8086:10ca`.
    pub model: String,
    /// The driver that it is bound to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Its IOMMU group; absent without an IOMMU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// Its NUMA node, if the firmware tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<u16>,
    /// The physical function that it is a virtual function of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub physical_function: Option<PciAddress>,
    /// How many virtual functions it can have; absent if none, or if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_virtual_functions: Option<u16>,
    /// The virtual functions that it has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub virtual_functions: Vec<PciAddress>,
    /// Its network devices on this node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub netdevs: Vec<String>,
    /// Its RDMA devices on this node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rdma: Vec<String>,
    /// The VM that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<DeviceOwner>,
    /// Why it cannot be given to a VM now; absent if it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// How a guest that has it is moved.
    pub moves: String,
    /// Whether it can carry its own state (VFIO migration, version 2), and what that is worth here. Absent if that could not be found out:
    /// it is not bound to a VFIO driver, or a VM has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_state: Option<OwnState>,
}

/// Who has a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DeviceOwner {
    /// Name of the VM.
    pub vm: String,
    /// What it is to the VM.
    pub role: String,
    /// Whether it is all the VM's: otherwise it is on its way to it, or back, or leased for it.
    pub held: bool,
    /// The lease that has it for the VM, and whose that is (`train-17 of alice`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
}

/// What a device says of its own state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct OwnState {
    /// It can be stopped, and its state saved and loaded.
    pub stop_copy: bool,
    /// It can first be kept from writing to other devices.
    pub p2p: bool,
    /// It can send state while it runs.
    pub pre_copy: bool,
    /// It tells which memory it wrote.
    pub logs_writes: bool,
    /// What QEMU could do with that, and what vmove does.
    pub words: String,
}

/// A part of a device that is no PCI function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DevicePart {
    /// `mediated` or `mig-slice`. New words may be added.
    pub kind: String,
    /// Its UUID, or GPU instance and compute instance.
    pub name: String,
    /// The device that it is a part of, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub device: Option<PciAddress>,
    /// The vendor's name of its type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Why a VM cannot have it.
    pub refused: String,
}
