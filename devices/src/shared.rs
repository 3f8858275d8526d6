//! Parts of devices that are not PCI functions: mediated devices and MIG slices. They are listed but not given to VMs: QEMU cannot
//! plug them into a running guest, so the guest could not be moved.

use serde::{Deserialize, Serialize};

use crate::{PciAddress, Sys};

/// A part of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SharedPart {
    /// A mediated device, such as a vendor's vGPU.
    Mediated {
        /// Its UUID.
        uuid: String,
        /// The device that it is a part of, if that is a PCI device.
        parent: Option<PciAddress>,
        /// The vendor's name of its type.
        model: String,
    },
    /// A slice of an NVIDIA GPU in MIG mode.
    MigSlice {
        /// The GPU, if its driver tells.
        gpu: Option<PciAddress>,
        /// Number of the GPU instance.
        gpu_instance: u32,
        /// Number of the compute instance in it.
        compute_instance: u32,
    },
}

impl SharedPart {
    /// Why a VM cannot have it.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Mediated { .. } => {
                "mediated devices and vendors' vGPUs cannot be unplugged from a running guest: it could never be moved"
            }
            Self::MigSlice { .. } => {
                "a MIG slice is no device of its own: containers can have it, a VM only by the vendor's vGPU"
            }
        }
    }
}

/// All such parts of a node.
#[must_use]
pub fn read(sys: &Sys) -> Vec<SharedPart> {
    let mut parts = mediated(sys);
    parts.extend(mig(sys));
    parts
}

fn mediated(sys: &Sys) -> Vec<SharedPart> {
    const MDEVS: &str = "sys/bus/mdev/devices";
    let part = |uuid: String| {
        let target = std::fs::read_link(sys.path(&format!("{MDEVS}/{uuid}"))).ok();
        // It is a folder below its parent's.
        let parent = target.as_deref().and_then(|path| path.parent()?.file_name()?.to_str()?.parse().ok());
        let model = sys.link_name(&format!("{MDEVS}/{uuid}/mdev_type")).unwrap_or_default();
        SharedPart::Mediated { uuid, parent, model }
    };
    sys.names(MDEVS).into_iter().map(part).collect()
}

/// `gpu0/mig/gi1/ci0/access` for each slice; which GPU that is tells another file.
fn mig(sys: &Sys) -> Vec<SharedPart> {
    const CAPABILITIES: &str = "proc/driver/nvidia/capabilities";
    let numbered = |names: Vec<String>, prefix: &str| -> Vec<(String, u32)> {
        let number = |name: &String| name.strip_prefix(prefix)?.parse().ok();
        names.into_iter().filter_map(|name| number(&name).map(|number| (name, number))).collect()
    };
    let mut parts = Vec::new();
    for (gpu, minor) in numbered(sys.names(CAPABILITIES), "gpu") {
        let mig = format!("{CAPABILITIES}/{gpu}/mig");
        for (instance, gpu_instance) in numbered(sys.names(&mig), "gi") {
            for (_, compute_instance) in numbered(sys.names(&format!("{mig}/{instance}")), "ci") {
                parts.push(SharedPart::MigSlice {
                    gpu: gpu_of_minor(sys, minor),
                    gpu_instance,
                    compute_instance,
                });
            }
        }
    }
    parts
}

fn gpu_of_minor(sys: &Sys, minor: u32) -> Option<PciAddress> {
    const GPUS: &str = "proc/driver/nvidia/gpus";
    sys.names(GPUS).into_iter().find_map(|name| {
        let text = sys.read(&format!("{GPUS}/{name}/information"))?;
        let said =
            text.lines().find_map(|line| line.strip_prefix("Device Minor:"))?.trim().parse::<u32>().ok()?;
        (said == minor).then(|| name.parse().ok()).flatten()
    })
}
