//! The tree of conditions that all spellings of a request are read into.

use std::fmt;

/// Conditions, combined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expr {
    /// All must hold.
    All(Vec<Expr>),
    /// One must hold.
    Any(Vec<Expr>),
    /// A single condition.
    Is(Clause),
}

/// A single condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clause {
    /// What it restricts.
    pub key: Key,
    /// The comparison and its values.
    pub op: Op,
    /// Where it stands in the request, for messages.
    pub place: String,
}

/// What a condition can restrict.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Key {
    /// Name of an instance type, which defines cores and memory.
    Flavor,
    /// Cores of the VM.
    Vcpus,
    /// Memory of the VM, MiB.
    MemoryMb,
    /// Size of the memory's pages.
    PageSize,
    /// Number of GPUs or other accelerators.
    Gpus,
    /// Their architecture.
    GpuArch,
    /// Their PCI vendor.
    GpuVendor,
    /// Number of vGPUs.
    Vgpus,
    /// Their type.
    VgpuType,
    /// Number of MIG slices.
    Migs,
    /// Their profile.
    MigProfile,
    /// Number of remote GPUs.
    RemoteGpus,
    /// Their model.
    RemoteGpuModel,
    /// Number of whole network adapters.
    Hcas,
    /// Number of virtual functions.
    Vfs,
    /// Link layer of their ports: infiniband or ethernet.
    NetArch,
    /// Rate of their ports, Mb/s.
    NetMbps,
    /// Architecture of the CPU.
    CpuArch,
    /// Model of the CPU.
    CpuModel,
    /// Features of the CPU.
    CpuFeatures,
    /// Hypervisor.
    Hypervisor,
    /// Memory of the node, MiB.
    NodeMemoryMb,
    /// Cores of the node.
    NodeVcpus,
    /// How close cores, memory and devices must be.
    NumaPolicy,
    /// How close GPUs must be to adapters.
    GpuHcaAffinity,
    /// Whether VFs come from different adapters.
    VfPolicy,
    /// Only devices that can be migrated with a running VM.
    LiveMigratable,
    /// A trait.
    Trait(String),
    /// A label of the node.
    Label(String),
}

/// Names of keys; the first of each is used in messages.
const NAMES: [(Key, &[&str]); 27] = [
    (Key::Flavor, &["instance_type", "flavor"]),
    (Key::Vcpus, &["vcpus", "cores"]),
    (Key::MemoryMb, &["memory_mb", "ram", "ram_mb"]),
    (Key::PageSize, &["page_size", "mem_page_size"]),
    (Key::Gpus, &["xpus", "gpus"]),
    (Key::GpuArch, &["xpu_arch", "gpu_arch"]),
    (Key::GpuVendor, &["xpu_vendor", "gpu_vendor"]),
    (Key::Vgpus, &["vgpus"]),
    (Key::VgpuType, &["vgpu_type"]),
    (Key::Migs, &["migs"]),
    (Key::MigProfile, &["mig_profile"]),
    (Key::RemoteGpus, &["remote_gpus"]),
    (Key::RemoteGpuModel, &["remote_gpu_model"]),
    (Key::Hcas, &["hcas"]),
    (Key::Vfs, &["vfs"]),
    (Key::NetArch, &["net_arch"]),
    (Key::NetMbps, &["net_mbps"]),
    (Key::CpuArch, &["cpu_arch"]),
    (Key::CpuModel, &["cpu_model"]),
    (Key::CpuFeatures, &["cpu_features", "cpu_info", "cpu_info:features"]),
    (Key::Hypervisor, &["hypervisor_type", "hypervisor"]),
    (Key::NodeMemoryMb, &["node_memory_mb"]),
    (Key::NodeVcpus, &["node_vcpus"]),
    (Key::NumaPolicy, &["numa_policy", "pci_numa_affinity_policy"]),
    (Key::GpuHcaAffinity, &["gpu_hca_affinity"]),
    (Key::VfPolicy, &["vf_policy", "group_policy"]),
    (Key::LiveMigratable, &["live_migratable"]),
];

impl Key {
    /// The key with this name (case-insensitive); `trait:NAME` and `label:NAME` are keys, too.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        let lower = name.to_ascii_lowercase();
        if let Some(name) = lower.strip_prefix("trait:").filter(|name| !name.is_empty()) {
            return Some(Self::Trait(name.to_ascii_uppercase()));
        }
        if lower.starts_with("label:") && name.len() > 6 {
            return Some(Self::Label(name[6..].to_owned()));
        }
        NAMES.iter().find(|(_, names)| names.contains(&lower.as_str())).map(|(key, _)| key.clone())
    }

    /// The first name of each that has names.
    pub(super) fn names() -> impl Iterator<Item = &'static str> {
        NAMES.iter().map(|(_, names)| names[0])
    }

    /// All names, for messages.
    #[must_use]
    pub fn known() -> String {
        let names: Vec<&str> = Self::names().collect();
        format!("one of {}, trait:NAME, label:NAME", names.join(", "))
    }

    /// Whether its values are numbers.
    #[must_use]
    pub fn is_number(&self) -> bool {
        matches!(
            self,
            Self::Vcpus
                | Self::MemoryMb
                | Self::Gpus
                | Self::Vgpus
                | Self::Migs
                | Self::RemoteGpus
                | Self::Hcas
                | Self::Vfs
                | Self::NetMbps
                | Self::NodeMemoryMb
                | Self::NodeVcpus
        )
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trait(name) => write!(f, "trait:{name}"),
            Self::Label(name) => write!(f, "label:{name}"),
            _ => f.write_str(NAMES.iter().find(|(key, _)| key == self).map_or("?", |(_, names)| names[0])),
        }
    }
}

/// A comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// A number in this range, both ends included.
    Within(u64, u64),
    /// All of these values.
    AllOf(Vec<String>),
    /// One of these values.
    OneOf(Vec<String>),
    /// None of these values.
    NoneOf(Vec<String>),
    /// A text that contains this.
    Contains(String),
}
