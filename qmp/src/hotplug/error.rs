//! Errors of hot plug and unplug.

use std::time::Duration;

use crate::QmpError;

/// Why a device could not be unplugged or plugged in.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HotplugError {
    /// There is no device of this id.
    #[error("This guest has no device {device:?}: it was unplugged before, or never had that id")]
    NoSuchDevice {
        /// The id.
        device: String,
    },
    /// It cannot leave while the guest runs.
    #[error(
        "Device {device:?} cannot be unplugged ({reason}): it must sit on a port with hot plug, such as -device pcie-root-port; \
         start the guest with it there"
    )]
    NotHotpluggable {
        /// The id.
        device: String,
        /// QEMU's own words, or what was found.
        reason: String,
    },
    /// The guest refused.
    #[error(
        "The guest refused to release device {device:?}: something in it uses the device; stop that, unload the driver, and try again"
    )]
    GuestRefused {
        /// The id.
        device: String,
    },
    /// The guest did not react.
    #[error(
        "The guest did not release device {device:?} within {waited:?} ({requests} requests): its system still boots, hangs, or has no \
         driver for hot plug; it may release the device later, or when it is reset"
    )]
    GuestKeeps {
        /// The id.
        device: String,
        /// The time limit.
        waited: Duration,
        /// How often it was asked.
        requests: u32,
    },
    /// QEMU did not take a device.
    #[error("QEMU did not plug device {device:?} in: {description}; {}", refusal.way_out())]
    NotPlugged {
        /// The id it was to have.
        device: String,
        /// Kind of the reason.
        refusal: PlugRefusal,
        /// QEMU's own words.
        description: String,
    },
    /// QEMU accepted a device, but does not list it.
    #[error(
        "QEMU accepted device {device:?} but does not list it: somebody else unplugged it at the same time"
    )]
    Vanished {
        /// The id.
        device: String,
    },
    /// The monitor.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// Why QEMU does not take a device, as far as its words tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlugRefusal {
    /// A device has that id.
    IdTaken,
    /// There is no such port.
    NoSuchPort,
    /// The port has no hot plug.
    NoHotplug,
    /// Another device sits in the port.
    PortTaken,
    /// The host has no such device.
    NoSuchHostDevice,
    /// The host's device is bound to another driver than `vfio-pci`.
    NotBound,
    /// Other devices of its IOMMU group are not free.
    GroupNotViable,
    /// Another process has its IOMMU group.
    GroupBusy,
    /// QEMU is not permitted to lock enough memory.
    MemoryLock,
    /// Something else.
    Other,
}

/// Words of QEMU 7.2 to 10.0; the first that are found count.
const WORDS: &[(&str, PlugRefusal)] = &[
    ("Duplicate device ID", PlugRefusal::IdTaken),
    ("Duplicate ID", PlugRefusal::IdTaken),
    ("does not support hotplugging", PlugRefusal::NoHotplug),
    ("already occupied by", PlugRefusal::PortTaken),
    ("not available for", PlugRefusal::PortTaken),
    ("no slot/function available", PlugRefusal::PortTaken),
    ("is not viable", PlugRefusal::GroupNotViable),
    ("Device or resource busy", PlugRefusal::GroupBusy),
    ("Cannot allocate memory", PlugRefusal::MemoryLock),
    ("no such host device", PlugRefusal::NoSuchHostDevice),
    ("no iommu_group found", PlugRefusal::NotBound),
    ("failed to open /dev/vfio/", PlugRefusal::NotBound),
    ("not found", PlugRefusal::NoSuchPort),
    ("is not bound to vfio-pci", PlugRefusal::NotBound),
    ("failed to get device", PlugRefusal::NotBound),
];

impl PlugRefusal {
    pub(super) fn of(description: &str) -> Self {
        WORDS
            .iter()
            .find(|(words, _)| description.contains(words))
            .map_or(Self::Other, |(_, refusal)| *refusal)
    }

    /// What to do about it.
    #[must_use]
    pub fn way_out(self) -> &'static str {
        match self {
            Self::IdTaken => "unplug the device of that id first, or give another id",
            Self::NoSuchPort => "name a port that the guest has",
            Self::NoHotplug => "name a port with hot plug, such as a pcie-root-port without hotplug=off",
            Self::PortTaken => "name a free port",
            Self::NoSuchHostDevice => "look at /sys/bus/pci/devices: the host does not have this device now",
            Self::NotBound => "bind the device to vfio-pci first",
            Self::GroupNotViable => {
                "bind all devices of its IOMMU group to vfio-pci, or give it a group of its own"
            }
            Self::GroupBusy => "another process has this device or its group: end that one first",
            Self::MemoryLock => {
                "all guest memory is pinned for the device: raise QEMU's limit of locked memory (RLIMIT_MEMLOCK) above the guest's size"
            }
            Self::Other => "QEMU's log may say more",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_qemu_are_understood() {
        let cases = [
            ("Duplicate device ID 'nic'", PlugRefusal::IdTaken),
            ("Bus 'rp2' does not support hotplugging", PlugRefusal::NoHotplug),
            ("Bus 'rp9' not found", PlugRefusal::NoSuchPort),
            (
                "PCI: slot 0 function 0 already occupied by e1000e, new func vfio-pci cannot be exposed to guest.",
                PlugRefusal::PortTaken,
            ),
            (
                "vfio 0000:01:10.0: failed to open /dev/vfio/10: Device or resource busy",
                PlugRefusal::GroupBusy,
            ),
            (
                "vfio 0000:01:10.0: failed to open /dev/vfio/10: No such file or directory",
                PlugRefusal::NotBound,
            ),
            ("vfio 0000:01:10.0: group 10 is not viable", PlugRefusal::GroupNotViable),
            (
                "vfio 0000:01:10.0: failed to setup container for group 10: memory listener initialization failed: \
                 Region ram: vfio_container_dma_map(0x55, 0x0, 0x80000, 0x7f) = -12 (Cannot allocate memory)",
                PlugRefusal::MemoryLock,
            ),
            (
                "vfio 0000:99:00.0: no such host device: No such file or directory",
                PlugRefusal::NoSuchHostDevice,
            ),
            ("something new", PlugRefusal::Other),
        ];
        for (words, refusal) in cases {
            assert_eq!(PlugRefusal::of(words), refusal, "{words}");
        }
    }
}
