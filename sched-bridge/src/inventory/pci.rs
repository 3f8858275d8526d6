//! GPUs, adapters and virtual functions among the PCI devices.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::files::Files;
use super::names::{arch_name, model_name};
use super::rdma::Adapter;
use crate::model::{Device, DeviceKind, NumaId, PciAddress, PciId, PciRoot};

const DIR: &str = "sys/bus/pci/devices";

/// Devices that can be passed through to VMs, by address.
pub(super) fn devices(files: &mut Files, rdma: &BTreeMap<PciAddress, Adapter>) -> Vec<Device> {
    let mut devices = Vec::new();
    for entry in files.list(DIR) {
        let Ok(address) = entry.parse::<PciAddress>() else {
            files.note(&format!("{DIR}/{entry}"), "is not a PCI address");
            continue;
        };
        devices.extend(device(files, address, rdma));
    }
    devices.sort_by_key(|device: &Device| device.address);
    devices
}

fn device(files: &mut Files, address: PciAddress, rdma: &BTreeMap<PciAddress, Adapter>) -> Option<Device> {
    let dir = format!("{DIR}/{address}");
    let class = files.hex(&format!("{dir}/class"))?;
    let vendor = u16::try_from(files.hex(&format!("{dir}/vendor"))?).ok()?;
    let id = PciId { vendor, device: u16::try_from(files.hex(&format!("{dir}/device"))?).ok()? };
    let parent = files.link_name(&format!("{dir}/physfn")).and_then(|name| name.parse().ok());
    let adapter = rdma.get(&address);
    let kind = match class >> 8 {
        // Graphics of management controllers: of no use to VMs.
        0x0300 if !matches!(vendor, 0x10de | 0x1002 | 0x8086) => return None,
        0x0300 | 0x0302 | 0x0380 => DeviceKind::Gpu,
        0x0b40 => DeviceKind::CoProcessor,
        0x1200 => DeviceKind::ProcessingAccelerator,
        0x0207 | 0x0200 | 0x0208 | 0x0280 if parent.is_some() => {
            let of_rdma = parent.is_some_and(|parent| rdma.contains_key(&parent)) || vendor == 0x15b3;
            if !of_rdma {
                return None;
            }
            DeviceKind::Vf
        }
        0x0207 => DeviceKind::Hca,
        0x0200 | 0x0280 if adapter.is_some() => DeviceKind::Hca,
        _ => return None,
    };
    let mut device = Device::new(address, kind, id);
    device.arch = if kind == DeviceKind::Gpu { arch_name(id) } else { model_name(id) }.into();
    device.parent = parent;
    describe(files, &dir, &mut device);
    if let Some(adapter) = adapter {
        device.rdma_name = Some(adapter.name.clone());
        device.guid.clone_from(&adapter.guid);
        device.ports.clone_from(&adapter.ports);
    } else if let Some(pf) = parent.and_then(|parent| rdma.get(&parent)) {
        // A virtual function that is bound to vfio-pci has no RDMA device of its own; it shares the ports of its physical function.
        device.ports.clone_from(&pf.ports);
    }
    if kind.is_network() && !device.ports.is_empty() {
        device.traits.insert(Arc::from("HW_NIC_OFFLOAD_RDMA"));
    }
    if device.live_migratable {
        device.traits.insert(Arc::from("HW_PCI_LIVE_MIGRATABLE"));
    }
    Some(device)
}

fn describe(files: &mut Files, dir: &str, device: &mut Device) {
    // -1 where the firmware does not tell.
    let numa = files.number(&format!("{dir}/numa_node"));
    device.numa = numa.and_then(|numa| u16::try_from(numa).ok()).map(NumaId);
    device.iommu_group = files.link_name(&format!("{dir}/iommu_group")).and_then(|name| name.parse().ok());
    device.driver = files.link_name(&format!("{dir}/driver")).map(Into::into);
    // A variant driver saves and restores the state of the device.
    device.live_migratable = device.driver.as_deref().is_some_and(|driver| driver.ends_with("_vfio_pci"));
    let count = |number: Option<i64>| number.and_then(|number| u16::try_from(number).ok()).unwrap_or(0);
    device.vfs_enabled = count(files.number(&format!("{dir}/sriov_numvfs")));
    device.vfs_total = count(files.number(&format!("{dir}/sriov_totalvfs")));
    device.root = root(files, dir);
}

/// From the path of the device's folder: `…/pci0000:16/0000:16:01.0/0000:17:00.0` is below a root port; a device right on the root
/// complex has no port before its own address.
fn root(files: &Files, dir: &str) -> Option<PciRoot> {
    let path = files.link(dir)?;
    let mut parts = path.iter().filter_map(|part| part.to_str()).skip_while(|part| !part.starts_with("pci"));
    let complex = parts.next()?;
    let ports: Vec<&str> = parts.collect();
    let root = if ports.len() > 1 { ports[0] } else { complex };
    Some(PciRoot(root.into()))
}
