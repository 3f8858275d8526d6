//! What can go wrong with a device.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use vmove_node::devices::{DevicesError, Trouble};

use crate::PciAddress;

/// What was being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Act {
    /// Looking at what there is.
    Read,
    /// Giving it to a VM.
    Take,
    /// Handing it to `vfio-pci`.
    Bind,
    /// Setting its addresses.
    Identify,
    /// Taking it back from a VM.
    Return,
    /// Asking whether it can carry its own state.
    Probe,
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "be read",
            Self::Take => "be given to a VM",
            Self::Bind => "be bound to vfio-pci",
            Self::Identify => "get its addresses",
            Self::Return => "be returned to the host",
            Self::Probe => "be queried for migration support",
        })
    }
}

/// A device, the operation that failed on it, and why it failed.
#[derive(Debug, thiserror::Error)]
#[error("Device {device} could not {act}: {cause}; {}", cause.way_out())]
pub struct DeviceError {
    /// Its address, or the text that was given in place of an address.
    pub device: String,
    /// The operation.
    pub act: Act,
    /// Why it failed.
    #[source]
    pub cause: Cause,
}

/// Why an operation on a device failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// There is no such device.
    #[error("this node has no such PCI device")]
    Absent,
    /// The IOMMU is off, or does not cover the device.
    #[error("it is in no IOMMU group")]
    NoIommu,
    /// Its IOMMU group has further devices; a group is passed through as a whole.
    #[error("its IOMMU group {group} also holds {others}")]
    GroupHoldsOthers {
        /// The group.
        group: u32,
        /// The others, with their drivers.
        others: String,
    },
    /// The host itself needs it.
    #[error("the host uses it: {0}")]
    HostUses(String),
    /// Devices of this kind cannot be given to a VM.
    #[error("it is {0}")]
    Kind(&'static str),
    /// Another VM has it.
    #[error("VM {vm:?} has it as {role:?}")]
    Taken {
        /// The VM.
        vm: String,
        /// The role of the device in that VM.
        role: String,
    },
    /// The VM has another device in this role.
    #[error("VM {vm:?} has {other} as {role:?} already")]
    RoleTaken {
        /// The VM.
        vm: String,
        /// The role.
        role: String,
        /// The device that has this role.
        other: PciAddress,
    },
    /// A process holds its group open.
    #[error("a process still has its group /dev/vfio/{group} open after {waited:?}")]
    GroupOpen {
        /// The group.
        group: u32,
        /// How long vmoved waited for the process to close it.
        waited: Duration,
    },
    /// The driver did not bind to it.
    #[error("driver {wanted} did not bind to it; it is bound to {}", found.as_deref().unwrap_or("no driver"))]
    NotBound {
        /// The driver that should be bound to it.
        wanted: String,
        /// The driver that is bound to it.
        found: Option<String>,
    },
    /// Only virtual functions have addresses that can be set.
    #[error("it is not a virtual function")]
    NotVirtual,
    /// The physical function has no network device.
    #[error("its physical function {pf} has no network device")]
    NoNetdev {
        /// The physical function.
        pf: PciAddress,
    },
    /// The physical function is down.
    #[error(
        "network device {netdev} of its physical function is down and does not answer the virtual function's requests"
    )]
    PfDown {
        /// The network device.
        netdev: String,
    },
    /// The physical function's driver refused.
    #[error("the driver of {netdev} refused its {what} ({source})")]
    Refused {
        /// Network device of the physical function.
        netdev: String,
        /// What was to be set, such as `MAC address 52:54:00:00:00:01`.
        what: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The physical function's driver accepted a setting, but reports another one.
    #[error("{netdev} accepted its {what}, but reports {found}")]
    NotKept {
        /// Network device of the physical function.
        netdev: String,
        /// What was set.
        what: String,
        /// What was read back.
        found: String,
    },
    /// The driver cannot set the P_Key of a single function.
    #[error("driver {driver} cannot set the P_Key of a single function")]
    NoPkey {
        /// The driver of the physical function.
        driver: String,
    },
    /// The port is not in the partition.
    #[error("port {port} of {rdma} is not in partition {pkey:#06x}")]
    NotInPartition {
        /// RDMA device of the physical function.
        rdma: String,
        /// Its port.
        port: String,
        /// The P_Key.
        pkey: u16,
    },
    /// A file of `/sys` or `/dev` could not be accessed.
    #[error("{} ({source})", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A file of `/sys` has unexpected content.
    #[error("{} holds {found:?}, expected {expected}", path.display())]
    Strange {
        /// The file.
        path: PathBuf,
        /// Its content.
        found: String,
        /// The expected content.
        expected: &'static str,
    },
    /// The journal that records which VM has which device could not be written.
    #[error("the journal {} could not be written ({source})", path.display())]
    Journal {
        /// The journal.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// An ioctl of VFIO failed.
    #[error("VFIO refused {what} ({source})")]
    Vfio {
        /// The requested operation.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl Cause {
    /// What sort of trouble it is.
    #[must_use]
    pub const fn trouble(&self) -> Trouble {
        match self {
            Self::GroupOpen { .. } => Trouble::Open,
            Self::NotBound { .. }
            | Self::Refused { .. }
            | Self::NotKept { .. }
            | Self::File { .. }
            | Self::Strange { .. }
            | Self::Journal { .. }
            | Self::Vfio { .. } => Trouble::Failed,
            _ => Trouble::Unavailable,
        }
    }

    /// The remedy, for the operator.
    #[must_use]
    pub fn way_out(&self) -> &'static str {
        match self {
            Self::Absent => "'vmove devices' lists those that it has",
            Self::NoIommu => {
                "switch the IOMMU on in the firmware and boot with intel_iommu=on or amd_iommu=on"
            }
            Self::GroupHoldsOthers { .. } => {
                "put it into a slot of its own, enable ACS in the firmware, or use a virtual function"
            }
            Self::HostUses(_) => "end that use first, or take a virtual function",
            Self::Kind(_) => "use another device",
            Self::Taken { .. } => "use another device, or end that VM first",
            Self::RoleTaken { .. } => "name another role",
            Self::GroupOpen { .. } => "end the QEMU or the other program that has it open",
            Self::NotBound { .. } => {
                "'dmesg' says why; check that the module is loaded ('modprobe vfio-pci')"
            }
            Self::NotVirtual => {
                "for a device that is given as a whole, omit mac, vlan, trust, GUIDs and pkey"
            }
            Self::NoNetdev { .. } => "bind the physical function to its network driver",
            Self::PfDown { .. } => "run 'ip link set … up' for the physical function",
            Self::Refused { .. } | Self::NotKept { .. } => {
                "'ip link show' lists the settings of its virtual functions; omit the setting, or use the vendor's tool"
            }
            Self::NoPkey { .. } => "let the subnet manager put its port GUID into the partition",
            Self::NotInPartition { .. } => "let the subnet manager put the host's port into the partition",
            Self::File { .. } => "check that vmoved runs as root and that the device still exists",
            Self::Strange { .. } => "report this with the file's content",
            Self::Journal { .. } => "check the disk, then try again; nothing was changed",
            Self::Vfio { .. } => "'dmesg' may say more",
        }
    }

    /// For a device and what was done with it.
    pub(crate) fn of(self, device: PciAddress, act: Act) -> DeviceError {
        DeviceError { device: device.to_string(), act, cause: self }
    }
}

impl From<DeviceError> for DevicesError {
    fn from(error: DeviceError) -> Self {
        Self::Device { trouble: error.cause.trouble(), why: Box::new(error) }
    }
}
