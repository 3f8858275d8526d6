//! What a PCI device is.

use serde::{Deserialize, Serialize};

use crate::PciAddress;

/// A PCI function of this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Device {
    /// Where it is.
    pub address: PciAddress,
    /// What it is.
    pub kind: DeviceKind,
    /// Class, subclass and programming interface, such as 0x030200.
    pub class: u32,
    /// Vendor's number, such as 0x10de.
    pub vendor: u16,
    /// The vendor's number of the model.
    pub device: u16,
    /// The driver that has it.
    pub driver: Option<String>,
    /// Its IOMMU group; `None` without an IOMMU.
    pub group: Option<u32>,
    /// Whether it has virtual functions, or is one.
    pub sriov: Sriov,
    /// Its NUMA node, if the firmware reports it.
    pub numa: Option<u16>,
    /// Its network devices.
    pub netdevs: Vec<String>,
    /// Its RDMA devices.
    pub rdma: Vec<String>,
}

/// Virtual functions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Sriov {
    /// Neither.
    None,
    /// It can have some.
    Physical {
        /// How many at most.
        total: u16,
        /// Those that it has, by number from 0.
        functions: Vec<PciAddress>,
    },
    /// It is one.
    Virtual {
        /// The physical one.
        pf: PciAddress,
        /// Its number there, from 0.
        index: u32,
    },
}

/// Kinds of devices, as operators tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DeviceKind {
    /// Draws or computes (class 03).
    Gpu,
    /// The console of a management controller: of no use to a guest.
    ConsoleGraphics,
    /// A Xeon Phi or another co-processor (class 0b40).
    CoProcessor,
    /// A processing accelerator, often an FPGA (class 1200).
    ProcessingAccelerator,
    /// An Ethernet card.
    Nic,
    /// An InfiniBand adapter, or an Ethernet card with RDMA.
    RdmaAdapter,
    /// A disk controller.
    Storage,
    /// A bridge: never given to a VM.
    Bridge,
    /// Something else, such as the sound function of a GPU.
    Other,
}

impl DeviceKind {
    /// As it is written for people and programs.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::ConsoleGraphics => "console-graphics",
            Self::CoProcessor => "co-processor",
            Self::ProcessingAccelerator => "processing-accelerator",
            Self::Nic => "nic",
            Self::RdmaAdapter => "rdma-adapter",
            Self::Storage => "storage",
            Self::Bridge => "bridge",
            Self::Other => "other",
        }
    }

    /// By class code, vendor, and whether it has an RDMA device.
    pub(crate) fn of(class: u32, vendor: u16, rdma: bool) -> Self {
        match class >> 8 {
            // Matrox and ASPEED make these.
            0x0300 if matches!(vendor, 0x1a03 | 0x102b) => Self::ConsoleGraphics,
            0x0300..=0x03ff => Self::Gpu,
            0x0b40 => Self::CoProcessor,
            0x1200 => Self::ProcessingAccelerator,
            0x0207 => Self::RdmaAdapter,
            0x0200..=0x02ff if rdma => Self::RdmaAdapter,
            0x0200..=0x02ff => Self::Nic,
            0x0100..=0x01ff => Self::Storage,
            0x0600..=0x06ff => Self::Bridge,
            _ => Self::Other,
        }
    }
}

impl Device {
    /// Whether it is a virtual function.
    #[must_use]
    pub fn is_virtual(&self) -> bool {
        matches!(self.sriov, Sriov::Virtual { .. })
    }

    /// Why this kind cannot be given to a VM at all, if it cannot.
    #[must_use]
    pub fn never_given(&self) -> Option<&'static str> {
        match (self.kind, &self.sriov) {
            (DeviceKind::Bridge, _) => Some("a bridge"),
            (DeviceKind::ConsoleGraphics, _) => Some("the console of the node's management controller"),
            (_, Sriov::Physical { functions, .. }) if !functions.is_empty() => {
                Some("a physical function whose virtual functions are in use; they would vanish")
            }
            _ => None,
        }
    }
}
