//! Parts of devices that are no PCI functions, and that no lease can be for: mediated devices (vendors' vGPUs) and MIG slices.

use serde::{Deserialize, Serialize};

use super::files::Files;
use crate::model::PciAddress;

/// A part of a device.
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

/// All such parts of a node.
pub(super) fn read(files: &Files) -> Vec<Part> {
    let mut parts = mediated(files);
    parts.extend(mig_slices(files));
    parts
}

fn mediated(files: &Files) -> Vec<Part> {
    const DIR: &str = "sys/bus/mdev/devices";
    let part = |uuid: String| {
        // It is a folder below its parent's.
        let link = files.link(&format!("{DIR}/{uuid}"));
        let device = link.as_deref().and_then(|path| path.parent()?.file_name()?.to_str()?.parse().ok());
        Part {
            kind: "mediated".to_owned(),
            model: files.link_name(&format!("{DIR}/{uuid}/mdev_type")),
            name: uuid,
            device,
            why:
                "it cannot be unplugged from a running guest, which could never be moved: ask for a whole GPU"
                    .to_owned(),
        }
    };
    files.list(DIR).into_iter().map(part).collect()
}

/// `gpu0/mig/gi1/ci0` for each slice.
fn mig_slices(files: &Files) -> Vec<Part> {
    const DIR: &str = "proc/driver/nvidia/capabilities";
    let numbered = |dir: &str, prefix: &str| -> Vec<(String, u32)> {
        let number = |name: String| {
            let number = name.strip_prefix(prefix)?.parse().ok()?;
            Some((name, number))
        };
        files.list(dir).into_iter().filter_map(number).collect()
    };
    let mut parts = Vec::new();
    for (gpu, minor) in numbered(DIR, "gpu") {
        let mig = format!("{DIR}/{gpu}/mig");
        for (instance, gpu_instance) in numbered(&mig, "gi") {
            for (_, compute_instance) in numbered(&format!("{mig}/{instance}"), "ci") {
                parts.push(Part {
                    kind: "mig-slice".to_owned(),
                    name: format!("gi{gpu_instance}/ci{compute_instance}"),
                    device: gpu_of_minor(files, minor),
                    model: None,
                    why:
                        "it is no device of its own: containers can have it, a VM cannot; ask for a whole GPU"
                            .to_owned(),
                });
            }
        }
    }
    parts
}

fn gpu_of_minor(files: &Files, minor: u32) -> Option<PciAddress> {
    const GPUS: &str = "proc/driver/nvidia/gpus";
    files.list(GPUS).into_iter().find_map(|name| {
        let text = files.read(&format!("{GPUS}/{name}/information"))?;
        let said = text.lines().find_map(|line| line.strip_prefix("Device Minor:"))?.trim().parse::<u32>();
        (said == Ok(minor)).then(|| name.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_and_mediated_devices_are_found_with_their_device_and_why_no_lease_has_them() {
        let root = tempfile::tempdir().unwrap();
        let dir = |path: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        dir("proc/driver/nvidia/capabilities/gpu1/mig/gi3/ci0");
        let gpu = dir("proc/driver/nvidia/gpus/0000:65:00.0").join("information");
        std::fs::write(gpu, "Model: A100\nDevice Minor: \t 1\n").unwrap();
        let uuid = "c9a5d1c8-0000-4000-8000-000000000001";
        dir(&format!("sys/devices/pci0000:64/0000:65:00.1/{uuid}"));
        let link = dir("sys/bus/mdev/devices").join(uuid);
        std::os::unix::fs::symlink(format!("../../../devices/pci0000:64/0000:65:00.1/{uuid}"), link).unwrap();
        let parts = read(&Files::new(root.path()));
        let told: Vec<_> = parts
            .iter()
            .map(|p| (p.kind.as_str(), p.name.as_str(), p.device.map(|d| d.to_string())))
            .collect();
        assert_eq!(
            told,
            [
                ("mediated", uuid, Some("0000:65:00.1".to_owned())),
                ("mig-slice", "gi3/ci0", Some("0000:65:00.0".to_owned())),
            ]
        );
        assert!(parts.iter().all(|part| part.why.contains("whole GPU")));
    }
}
