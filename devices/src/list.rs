//! The PCI devices of a node.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::device::{Device, DeviceKind, Sriov};
use crate::error::{Act, Cause, DeviceError};
use crate::{PciAddress, Sys};

/// Where the kernel lists PCI devices.
pub(crate) const DEVICES: &str = "sys/bus/pci/devices";

/// All PCI devices of a node, bridges too, by address.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeDevices {
    /// The devices.
    pub devices: BTreeMap<PciAddress, Device>,
    /// What could not be read, a note each. Its devices are left out.
    pub notes: Vec<String>,
}

impl NodeDevices {
    /// Reads them all.
    #[must_use]
    pub fn read(sys: &Sys) -> Self {
        let mut all = Self::default();
        for name in sys.names(DEVICES) {
            let Ok(address) = name.parse() else {
                all.notes.push(format!("{}: no PCI address", sys.path(DEVICES).join(name).display()));
                continue;
            };
            match read(sys, address) {
                Ok(device) => drop(all.devices.insert(address, device)),
                Err(error) => all.notes.push(error.to_string()),
            }
        }
        all
    }

    /// The others of a device's IOMMU group.
    pub fn group_mates<'a>(&'a self, device: &'a Device) -> impl Iterator<Item = &'a Device> {
        let mates = self.devices.values().filter(|other| other.address != device.address);
        mates.filter(|other| device.group.is_some() && other.group == device.group)
    }
}

/// One device, as it is now.
///
/// # Errors
/// [`Cause::Absent`], [`Cause::File`], [`Cause::Strange`].
pub fn read(sys: &Sys, address: PciAddress) -> Result<Device, DeviceError> {
    if !sys.exists(&format!("{DEVICES}/{address}")) {
        return Err(Cause::Absent.of(address, Act::Read));
    }
    parse(sys, address).map_err(|cause| cause.of(address, Act::Read))
}

fn parse(sys: &Sys, address: PciAddress) -> Result<Device, Cause> {
    let dir = format!("{DEVICES}/{address}");
    let short = |name: &str| -> Result<u16, Cause> {
        let path = format!("{dir}/{name}");
        let number = sys.hex(&path)?;
        u16::try_from(number).map_err(|_| Cause::Strange {
            path: sys.path(&path),
            found: format!("{number:#x}"),
            expected: "a number of 16 bits",
        })
    };
    let class = sys.hex(&format!("{dir}/class"))?;
    let (vendor, device) = (short("vendor")?, short("device")?);
    let rdma = sys.names(&format!("{dir}/infiniband"));
    let sriov = sriov(sys, &dir, address);
    // A virtual function that vfio-pci has shows no RDMA device, but its physical one does.
    let of_rdma = match &sriov {
        Sriov::Virtual { pf, .. } => !sys.names(&format!("{DEVICES}/{pf}/infiniband")).is_empty(),
        _ => !rdma.is_empty(),
    };
    Ok(Device {
        address,
        kind: DeviceKind::of(class, vendor, of_rdma),
        class,
        vendor,
        device,
        driver: driver(sys, address),
        group: sys.link_name(&format!("{dir}/iommu_group")).and_then(|name| name.parse().ok()),
        sriov,
        numa: sys.number(&format!("{dir}/numa_node")),
        netdevs: netdevs(sys, &dir),
        rdma,
    })
}

/// Network devices, also those of a virtio device, which are one folder further down.
fn netdevs(sys: &Sys, dir: &str) -> Vec<String> {
    let virtio = sys.names(dir).into_iter().filter(|name| name.starts_with("virtio"));
    let folders = std::iter::once(format!("{dir}/net")).chain(virtio.map(|name| format!("{dir}/{name}/net")));
    folders.flat_map(|folder| sys.names(&folder)).collect()
}

/// The driver that has a device now.
pub(crate) fn driver(sys: &Sys, address: PciAddress) -> Option<String> {
    sys.link_name(&format!("{DEVICES}/{address}/driver"))
}

fn sriov(sys: &Sys, dir: &str, address: PciAddress) -> Sriov {
    let pf: Option<PciAddress> = sys.link_name(&format!("{dir}/physfn")).and_then(|name| name.parse().ok());
    if let Some(pf) = pf {
        let functions = functions(sys, pf);
        let index = functions.iter().find(|(_, function)| **function == address).map(|(index, _)| *index);
        // Without its number nothing can be set for it; it is a virtual function all the same.
        return index.map_or(Sriov::None, |index| Sriov::Virtual { pf, index });
    }
    match sys.number(&format!("{dir}/sriov_totalvfs")) {
        Some(total) if total > 0 => {
            Sriov::Physical { total, functions: functions(sys, address).into_values().collect() }
        }
        _ => Sriov::None,
    }
}

/// Virtual functions by number.
fn functions(sys: &Sys, pf: PciAddress) -> BTreeMap<u32, PciAddress> {
    let dir = format!("{DEVICES}/{pf}");
    let numbers = sys.names(&dir);
    let number = |name: &String| name.strip_prefix("virtfn")?.parse::<u32>().ok();
    numbers
        .iter()
        .filter_map(|name| Some((number(name)?, sys.link_name(&format!("{dir}/{name}"))?.parse().ok()?)))
        .collect()
}
