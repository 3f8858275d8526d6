//! What a node has, read from `/sys` and `/proc` of this machine, or from a copy of another machine's.
//!
//! What is missing or cannot be read is left out, with a note. Only if no processor is found, or `etc/vmove/inventory.toml` is wrong, that is an
//! error.
//!
//! ```
//! use sched_bridge::inventory::read;
//! use sched_bridge::model::NodeName;
//!
//! let inventory = read("/".as_ref(), NodeName::new("node1")?)?;
//! println!("{} cores, {}", inventory.node.cores(), inventory.node.memory());
//! for note in &inventory.notes {
//!     println!("note: {note}");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod files;
mod glue2;
mod names;
mod parts;
mod pci;
mod rdma;
mod settings;

pub use glue2::glue2;
pub use names::{arch_name, model_name};
pub use parts::Part;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::model::{Cpu, HugePages, MemoryMib, Node, NodeName, NodeState, NumaId, NumaNode, SocketId};
use files::Files;
use settings::Settings;

/// Why a node could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InventoryError {
    /// Neither NUMA nodes nor processors were found.
    #[error(
        "no processor was found below {root}; expected the root of a Linux system, with sys/devices/system/node or sys/devices/system/cpu/online"
    )]
    NoProcessors {
        /// The folder that was read.
        root: PathBuf,
    },
    /// What the operator says of the node is not as expected.
    #[error("{}: {what}", .file.display())]
    Settings {
        /// The file.
        file: PathBuf,
        /// What was found and expected.
        what: String,
    },
}

/// A node, and notes on what could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// The node.
    pub node: Node,
    /// One note for each thing that is missing or unexpected: the file, what was found, what was expected.
    pub notes: Vec<String>,
    /// Parts of devices that no lease can be for.
    pub parts: Vec<Part>,
}

/// Reads the node whose `/sys` and `/proc` are below a root folder (`/` for this machine).
///
/// # Errors
/// [`InventoryError`]; everything that the kernel does not say as expected is a note.
pub fn read(root: &Path, name: NodeName) -> Result<Inventory, InventoryError> {
    let mut files = Files::new(root);
    let numa = numa_nodes(&mut files);
    if numa.iter().all(|numa| numa.cores == 0) {
        return Err(InventoryError::NoProcessors { root: root.to_path_buf() });
    }
    let rdma = rdma::adapters(&mut files);
    let text = files.read(settings::FILE).unwrap_or_default();
    let settings = Settings::read(&text)
        .map_err(|what| InventoryError::Settings { file: root.join(settings::FILE), what })?;
    let mut devices = pci::devices(&mut files, &rdma);
    if devices.iter().any(|device| device.iommu_group.is_none()) {
        files.note(
            "sys/bus/pci/devices",
            "some devices have no iommu_group; they cannot be given to VMs until the IOMMU is enabled",
        );
    }
    let (shares, parts) = parts::read(&mut files, &devices, &settings);
    devices.extend(shares);
    let mut node = Node {
        name,
        state: NodeState::Up,
        cpu: cpu(&mut files),
        numa,
        devices,
        hypervisors: hypervisors(&files),
        traits: BTreeSet::new(),
        labels: BTreeMap::new(),
    };
    node.count_shares();
    Ok(Inventory { node, notes: files.into_notes(), parts })
}

fn cpu(files: &mut Files) -> Cpu {
    let info = files.expect("proc/cpuinfo");
    let field = |names: &[&str]| {
        info.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            names.contains(&key.trim()).then(|| value.trim().to_owned())
        })
    };
    let features = field(&["flags", "Features"]).unwrap_or_default();
    let arch = files.read("proc/sys/kernel/arch").or_else(|| guess_arch(&info)).unwrap_or_default();
    Cpu {
        arch: arch.trim().into(),
        model: field(&["model name", "cpu", "Processor"]).unwrap_or_default().into(),
        features: Arc::new(features.split_whitespace().map(str::to_ascii_lowercase).collect()),
    }
}

/// Kernels before 6.1 do not name the architecture; the form of `cpuinfo` differs between architectures.
fn guess_arch(info: &str) -> Option<String> {
    let has = |key: &str| info.lines().any(|line| line.starts_with(key));
    let signs = [("vendor_id", "x86_64"), ("CPU implementer", "aarch64"), ("timebase", "ppc64le")];
    let arch = signs.into_iter().find(|(key, _)| has(key)).map(|(_, arch)| arch)?;
    Some(arch.to_owned())
}

fn numa_nodes(files: &mut Files) -> Vec<NumaNode> {
    let dir = "sys/devices/system/node";
    let mut ids: Vec<u16> =
        files.list(dir).iter().filter_map(|entry| entry.strip_prefix("node")?.parse().ok()).collect();
    ids.sort_unstable();
    if ids.is_empty() {
        return vec![without_numa(files)];
    }
    ids.into_iter()
        .map(|id| {
            let node = format!("{dir}/node{id}");
            let cpus = cpu_list(files, &format!("{node}/cpulist"));
            let huge = huge_pages(files, &format!("{node}/hugepages"));
            let total = mem_total(&files.expect(&format!("{node}/meminfo")));
            numa_node(files, id, &cpus, total, huge)
        })
        .collect()
}

/// A kernel without NUMA.
fn without_numa(files: &mut Files) -> NumaNode {
    let cpus = cpu_list(files, "sys/devices/system/cpu/online");
    let huge = huge_pages(files, "sys/kernel/mm/hugepages");
    let total = mem_total(&files.expect("proc/meminfo"));
    numa_node(files, 0, &cpus, total, huge)
}

fn numa_node(files: &mut Files, id: u16, cpus: &[u32], total_mib: u64, huge: HugePages) -> NumaNode {
    let socket = cpus.first().and_then(|first| {
        files.number(&format!("sys/devices/system/cpu/cpu{first}/topology/physical_package_id"))
    });
    NumaNode {
        id: NumaId(id),
        socket: SocketId(socket.and_then(|socket| u16::try_from(socket).ok()).unwrap_or(0)),
        cores: u32::try_from(cpus.len()).unwrap_or(u32::MAX),
        memory: MemoryMib(total_mib.saturating_sub(huge.pages_2m * 2 + huge.pages_1g * 1024)),
        huge,
    }
}

/// `Node 0 MemTotal: 131072 kB`, or without the node.
fn mem_total(meminfo: &str) -> u64 {
    let line = meminfo.lines().find(|line| line.contains("MemTotal:"));
    let kib =
        line.and_then(|line| line.split_once("MemTotal:")?.1.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}

fn huge_pages(files: &mut Files, dir: &str) -> HugePages {
    let mut of = |size: &str| {
        let path = format!("{dir}/hugepages-{size}kB/nr_hugepages");
        files.number(&path).and_then(|pages| u64::try_from(pages).ok()).unwrap_or(0)
    };
    HugePages { pages_2m: of("2048"), pages_1g: of("1048576") }
}

/// `0-15,32-47`.
fn cpu_list(files: &mut Files, path: &str) -> Vec<u32> {
    let Some(text) = files.read(path) else { return Vec::new() };
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        match (from.parse::<u32>(), to.parse::<u32>()) {
            (Ok(from), Ok(to)) if from <= to && to - from < 65536 => cpus.extend(from..=to),
            _ => files.note(path, &format!("{part:?} is not a range of processors like 0-15,32")),
        }
    }
    cpus
}

fn hypervisors(files: &Files) -> BTreeSet<Arc<str>> {
    let mut found = BTreeSet::new();
    let signs: [(&str, &[&str]); 6] = [
        ("kvm", &["dev/kvm"]),
        (
            "qemu",
            &[
                "usr/bin/qemu-system-x86_64",
                "usr/local/bin/qemu-system-x86_64",
                "usr/libexec/qemu-kvm",
                "usr/bin/qemu-system-aarch64",
            ],
        ),
        ("xen", &["proc/xen/capabilities"]),
        ("cloud-hypervisor", &["usr/bin/cloud-hypervisor", "usr/local/bin/cloud-hypervisor"]),
        ("firecracker", &["usr/bin/firecracker", "usr/local/bin/firecracker"]),
        ("lxc", &["usr/bin/lxc-start"]),
    ];
    for (name, paths) in signs {
        if paths.iter().any(|path| files.exists(path)) {
            found.insert(Arc::from(name));
        }
    }
    found
}
