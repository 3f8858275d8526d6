//! GPUs and other accelerators, InfiniBand and RoCE adapters, and their virtual functions.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::DeviceAddress;
use crate::ids::{NumaId, PciAddress, PciId, PciRoot};

/// Kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DeviceKind {
    /// A GPU; a VM gets the whole of it.
    Gpu,
    /// The physical function of an InfiniBand or RoCE adapter.
    Hca,
    /// A virtual function of such an adapter.
    Vf,
    /// A Xeon Phi or another co-processor (PCI class 0b40).
    CoProcessor,
    /// A processing accelerator, often an FPGA (PCI class 1200).
    ProcessingAccelerator,
    /// A mediated device: a share of a GPU by its vendor's driver.
    Vgpu,
    /// A MIG slice of a GPU.
    MigSlice,
    /// A GPU of a service in the network.
    RemoteGpu,
}

impl DeviceKind {
    /// Why no lease can have it, if so.
    #[must_use]
    pub fn never_leased(self) -> Option<&'static str> {
        match self {
            Self::Gpu | Self::Hca | Self::Vf | Self::Vgpu | Self::MigSlice | Self::RemoteGpu => None,
            Self::CoProcessor => Some(
                "a co-processor: no request names this kind yet, give it to a VM by 'vmove run --device'",
            ),
            Self::ProcessingAccelerator => Some(
                "a processing accelerator or FPGA, no GPU: no request names this kind yet, give it to a VM by 'vmove run --device'",
            ),
        }
    }

    /// What people call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::Hca => "HCA",
            Self::Vf => "VF",
            Self::CoProcessor => "co-processor",
            Self::ProcessingAccelerator => "processing accelerator",
            Self::Vgpu => "vGPU",
            Self::MigSlice => "MIG slice",
            Self::RemoteGpu => "remote GPU",
        }
    }

    /// Whether it is a share of a GPU of the node, which no VM has while another VM has the whole GPU.
    #[must_use]
    pub fn is_share(self) -> bool {
        matches!(self, Self::Vgpu | Self::MigSlice)
    }

    /// Why a VM that has such a device stays on its node; nothing if it can move.
    #[must_use]
    pub fn stays(self) -> Option<&'static str> {
        match self {
            Self::Vgpu => Some("its vGPU cannot be unplugged from a running guest"),
            Self::MigSlice => Some(
                "its MIG slice is a part of a GPU of this node, and nothing takes it from a guest that runs",
            ),
            _ => None,
        }
    }

    /// Whether it is a network adapter.
    #[must_use]
    pub fn is_network(self) -> bool {
        matches!(self, Self::Hca | Self::Vf)
    }
}

/// Link layer of a port (`/sys/class/infiniband/*/ports/N/link_layer`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
}

/// A port of an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Number, from 1.
    pub number: u8,
    /// Whether it is `ACTIVE`.
    pub active: bool,
    /// State in the kernel's words, for example `ACTIVE`.
    pub state: String,
    /// Signalling rate in Gb/s; 0 if unknown.
    pub rate_gbps: u32,
    /// InfiniBand or Ethernet.
    pub link_layer: LinkLayer,
    /// Local identifier; 0 on Ethernet.
    #[serde(default)]
    pub lid: u32,
    /// Port GUID, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guid: Option<String>,
}

/// A device that can be passed through to a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its address.
    pub address: DeviceAddress,
    /// Its kind.
    pub kind: DeviceKind,
    /// Vendor and device id.
    pub id: PciId,
    /// Architecture of a GPU in lower case (`hopper`), or model of an adapter (`connectx-6`); empty if unknown.
    #[serde(default)]
    pub arch: Arc<str>,
    /// Type of a vGPU (`nvidia-63`), profile of a MIG slice (`3g.20gb`), or model of a remote GPU, in lower case; empty if unknown.
    #[serde(default, skip_serializing_if = "is_empty")]
    pub model: Arc<str>,
    /// Of a GPU: its slices and vGPUs, which are leased in its place.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shares: u16,
    /// Its NUMA node; none if the firmware does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<NumaId>,
    /// Its PCIe root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<PciRoot>,
    /// IOMMU group; without one the device cannot be passed through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iommu_group: Option<u32>,
    /// The driver bound to it now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<Arc<str>>,
    /// Of a virtual function: its physical function. Of a slice or vGPU: its GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<PciAddress>,
    /// Of a physical function: virtual functions that are enabled.
    #[serde(default)]
    pub vfs_enabled: u16,
    /// Of a physical function: virtual functions that can be enabled.
    #[serde(default)]
    pub vfs_total: u16,
    /// Name of the RDMA device (`mlx5_0`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma_name: Option<String>,
    /// Node GUID of an adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guid: Option<String>,
    /// Ports of an adapter.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<Port>,
    /// Its state can be migrated with a running VM (by a variant driver like `mlx5_vfio_pci`).
    #[serde(default)]
    pub live_migratable: bool,
    /// Traits in OpenStack's spelling (`HW_NIC_OFFLOAD_RDMA`).
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub traits: BTreeSet<Arc<str>>,
}

fn is_empty(text: &Arc<str>) -> bool {
    text.is_empty()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &u16) -> bool {
    *number == 0
}

impl Device {
    /// A device of which nothing else is known.
    #[must_use]
    pub fn new(address: impl Into<DeviceAddress>, kind: DeviceKind, id: PciId) -> Self {
        Self {
            address: address.into(),
            kind,
            id,
            arch: Arc::from(""),
            model: Arc::from(""),
            shares: 0,
            numa: None,
            root: None,
            iommu_group: None,
            driver: None,
            parent: None,
            vfs_enabled: 0,
            vfs_total: 0,
            rdma_name: None,
            guid: None,
            ports: Vec::new(),
            live_migratable: false,
            traits: BTreeSet::new(),
        }
    }

    /// Rate of its fastest active port in Gb/s; 0 without one.
    #[must_use]
    pub fn rate_gbps(&self) -> u32 {
        self.ports.iter().filter(|port| port.active).map(|port| port.rate_gbps).max().unwrap_or(0)
    }

    /// Link layer of its first port.
    #[must_use]
    pub fn link_layer(&self) -> Option<LinkLayer> {
        self.ports.first().map(|port| port.link_layer)
    }

    /// Why no lease can have it; nothing if one can.
    #[must_use]
    pub fn not_leased(&self) -> Option<String> {
        if let Some(why) = self.kind.never_leased() {
            return Some(why.to_owned());
        }
        if self.shares > 0 {
            return Some(format!("it has {} slices or vGPUs, which are leased in its place", self.shares));
        }
        (self.vfs_enabled > 0)
            .then(|| format!("it has {} virtual functions, which are leased in its place", self.vfs_enabled))
    }

    /// Whether a lease can have it: not a GPU that is divided, not a physical function with virtual functions enabled, and of a kind that requests name.
    #[must_use]
    pub fn is_grantable(&self) -> bool {
        self.not_leased().is_none()
    }
}
