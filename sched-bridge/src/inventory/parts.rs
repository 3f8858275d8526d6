//! Shares of GPUs that are no PCI functions (vGPUs, which are mediated devices, and MIG slices), and remote GPUs.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::files::Files;
use super::settings::Settings;
use crate::model::{Device, DeviceAddress, DeviceKind, PciAddress, PciId};

/// A part of a device that no lease can be for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// `mediated` or `mig-slice`.
    pub kind: String,
    /// Its UUID, or GPU instance and compute instance.
    pub name: String,
    /// The device that it is a part of, if that is known.
    pub device: Option<PciAddress>,
    /// The vendor's name of its type, if it has one.
    pub model: Option<String>,
    /// Why no lease can have it.
    pub why: String,
}

/// Shares of the GPUs among `devices`, and remote GPUs; and parts that no lease can be for.
pub(super) fn read(files: &mut Files, devices: &[Device], settings: &Settings) -> (Vec<Device>, Vec<Part>) {
    let gpus: Vec<&Device> = devices.iter().filter(|device| device.kind == DeviceKind::Gpu).collect();
    let mut found = Found { gpus, shares: Vec::new(), parts: Vec::new() };
    found.mediated(files, settings);
    found.instances_to_be(files, settings);
    found.mig_slices(files, settings);
    let remote = settings.remote_gpus.iter().flat_map(|own| {
        (0..own.count).map(|number| {
            let address = DeviceAddress::Remote { server: own.address, number };
            let mut device = Device::new(address, DeviceKind::RemoteGpu, PciId { vendor: 0, device: 0 });
            device.model = own.model.to_ascii_lowercase().into();
            device
        })
    });
    found.shares.extend(remote);
    (found.shares, found.parts)
}

struct Found<'a> {
    gpus: Vec<&'a Device>,
    shares: Vec<Device>,
    parts: Vec<Part>,
}

impl Found<'_> {
    fn gpu(&self, address: Option<PciAddress>) -> Option<&Device> {
        let address = address?;
        self.gpus.iter().find(|gpu| gpu.address.pci() == Some(address)).copied()
    }

    /// Mediated devices that exist.
    fn mediated(&mut self, files: &Files, settings: &Settings) {
        const DIR: &str = "sys/bus/mdev/devices";
        for name in files.list(DIR) {
            // It is a folder below its parent's.
            let link = files.link(&format!("{DIR}/{name}"));
            let device = link.as_deref().and_then(|path| path.parent()?.file_name()?.to_str()?.parse().ok());
            let model = files.link_name(&format!("{DIR}/{name}/mdev_type"));
            let address = name.parse().ok().filter(|own| matches!(own, DeviceAddress::Mediated(_)));
            match (self.gpu(device), address) {
                (Some(gpu), Some(address)) => {
                    let share = vgpu(gpu, address, model.as_deref().unwrap_or_default(), settings);
                    self.shares.push(share);
                }
                _ => self.parts.push(Part {
                    kind: "mediated".to_owned(),
                    name,
                    device,
                    model,
                    why: "it is no share of a GPU that this node lists, and requests name no other mediated devices"
                        .to_owned(),
                }),
            }
        }
    }

    /// Instances that GPUs can make of the type that they are divided into: by the operator's word, or because one of it exists.
    fn instances_to_be(&mut self, files: &mut Files, settings: &Settings) {
        let mut made: Vec<Device> = Vec::new();
        for gpu in &self.gpus {
            let Some(address) = gpu.address.pci() else { continue };
            let own = |share: &&Device| share.kind == DeviceKind::Vgpu && share.parent == Some(address);
            let known: BTreeSet<DeviceAddress> =
                self.shares.iter().filter(own).map(|own| own.address).collect();
            let types: BTreeSet<&str> = self
                .shares
                .iter()
                .filter(own)
                .map(|own| own.model.as_ref())
                .filter(|name| !name.is_empty())
                .collect();
            let told = settings.vgpus_of(address);
            let Some(name) = told.map(|told| told.name.as_str()).or_else(|| types.first().copied()) else {
                continue;
            };
            // Of a GPU with instances of several types, nothing says how many of each can still be made.
            if types.iter().any(|other| *other != name) {
                continue;
            }
            let dir = format!("sys/bus/pci/devices/{address}/mdev_supported_types/{name}");
            let Some(free) = files.number(&format!("{dir}/available_instances")) else {
                if told.is_some_and(|told| told.gpus.contains(&address)) {
                    files.note(
                        &dir,
                        "is missing; the GPU makes no vGPUs of this type (see etc/vmove/inventory.toml)",
                    );
                }
                continue;
            };
            let numbers = (0..=0xfff_u16).map(|number| DeviceAddress::of_instance(address, name, number));
            let free = usize::try_from(free).unwrap_or(0);
            let to_be = numbers.filter(|address| !known.contains(address)).take(free);
            made.extend(to_be.map(|address| vgpu(gpu, address, name, settings)));
        }
        self.shares.extend(made);
    }

    /// `gpu0/mig/gi1/ci0` for each slice.
    fn mig_slices(&mut self, files: &Files, settings: &Settings) {
        const DIR: &str = "proc/driver/nvidia/capabilities";
        for (dir, minor) in numbered(files, DIR, "gpu") {
            let mig = format!("{DIR}/{dir}/mig");
            let device = gpu_of_minor(files, minor);
            for (instance, gpu_instance) in numbered(files, &mig, "gi") {
                for (_, compute_instance) in numbered(files, &format!("{mig}/{instance}"), "ci") {
                    let Some(gpu) = self.gpu(device) else {
                        self.parts.push(Part {
                            kind: "mig-slice".to_owned(),
                            name: format!("gi{gpu_instance}/ci{compute_instance}"),
                            device,
                            model: None,
                            why: "it is not known which GPU it is a part of (proc/driver/nvidia/gpus)"
                                .to_owned(),
                        });
                        continue;
                    };
                    let parent = device.unwrap_or_else(|| unreachable!("its GPU was found by it"));
                    let told = settings
                        .migs
                        .iter()
                        .find(|own| own.gpu == parent && own.gpu_instances.contains(&gpu_instance));
                    let address = DeviceAddress::Slice { gpu: parent, gpu_instance, compute_instance };
                    let mut slice = share_of(gpu, address, DeviceKind::MigSlice);
                    slice.model = told.map_or("", |told| told.profile.as_str()).into();
                    self.shares.push(slice);
                }
            }
        }
    }
}

fn numbered(files: &Files, dir: &str, prefix: &str) -> Vec<(String, u16)> {
    let number = |name: String| {
        let number = name.strip_prefix(prefix)?.parse().ok()?;
        Some((name, number))
    };
    files.list(dir).into_iter().filter_map(number).collect()
}

fn share_of(gpu: &Device, address: DeviceAddress, kind: DeviceKind) -> Device {
    let mut share = Device::new(address, kind, gpu.id);
    share.arch = Arc::clone(&gpu.arch);
    share.parent = gpu.address.pci();
    (share.numa, share.root) = (gpu.numa, gpu.root.clone());
    share
}

fn vgpu(gpu: &Device, address: DeviceAddress, model: &str, settings: &Settings) -> Device {
    let mut share = share_of(gpu, address, DeviceKind::Vgpu);
    share.model = model.into();
    if !model.is_empty() {
        // As Nova's users name them: CUSTOM_NVIDIA_63.
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
        share.traits.insert(Arc::from(format!("CUSTOM_{}", model.chars().map(plain).collect::<String>())));
    }
    let told = gpu.address.pci().and_then(|gpu| settings.vgpus_of(gpu)).filter(|told| told.name == model);
    share.traits.extend(told.iter().flat_map(|told| &told.traits).map(|name| Arc::from(name.as_str())));
    share
}

fn gpu_of_minor(files: &Files, minor: u16) -> Option<PciAddress> {
    const GPUS: &str = "proc/driver/nvidia/gpus";
    files.list(GPUS).into_iter().find_map(|name| {
        let text = files.read(&format!("{GPUS}/{name}/information"))?;
        let said = text.lines().find_map(|line| line.strip_prefix("Device Minor:"))?.trim().parse::<u16>();
        (said == Ok(minor)).then(|| name.parse().ok()).flatten()
    })
}
