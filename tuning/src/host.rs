//! Cores, sibling threads and NUMA nodes of a host.
//!
//! Source: `Documentation/ABI/stable/sysfs-devices-node` and `Documentation/ABI/stable/sysfs-devices-system-cpu` of the kernel.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use crate::cpus::{BadCpus, Cpus};

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub id: u32,
    /// Its processors.
    pub cpus: Cpus,
    /// All its memory but that of huge pages. Unit: bytes. 0: it has none.
    pub memory: u64,
    /// Memory that can be had: free, or given back by the kernel when asked (page cache). Unit: bytes.
    pub available: u64,
    /// Huge pages, by their size in bytes.
    pub huge: BTreeMap<u64, HugePages>,
    /// Memory that was promised to VMs. Unit: bytes.
    pub promised: u64,
    /// Distances to the nodes in order of their numbers, 10 to itself (ACPI's SLIT).
    pub distances: Vec<u32>,
}

/// Huge pages of one size on a NUMA node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HugePages {
    /// How many there are.
    pub all: u64,
    /// How many nobody has.
    pub free: u64,
}

impl NumaNode {
    /// What VMs were promised of its memory and have not touched yet is not available to others. Unit: bytes.
    pub fn promise(&mut self, bytes: u64) {
        self.promised += bytes;
        self.available = self.available.min(self.memory.saturating_sub(self.promised));
    }

    /// The same of huge pages of a size.
    pub fn promise_huge(&mut self, size: u64, pages: u64) {
        if let Some(huge) = self.huge.get_mut(&size) {
            huge.all = huge.all.saturating_sub(pages);
            huge.free = huge.free.min(huge.all);
        }
    }

    /// Memory that a VM has here already is there for it. Unit: bytes.
    pub fn give_back(&mut self, bytes: u64, huge_page: Option<u64>) {
        match huge_page.map(|size| (size, self.huge.get_mut(&size))) {
            None => self.available += bytes,
            Some((size, Some(huge))) => huge.free += bytes / size,
            Some((_, None)) => {}
        }
    }

    /// Free huge pages of a size.
    pub(crate) fn free_huge(&self, size: u64) -> u64 {
        self.huge.get(&size).map_or(0, |huge| huge.free)
    }
}

/// The processors and the memory of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Sets of sibling threads, of which each is a core, in order of their first.
    pub cores: Vec<Cpus>,
    /// NUMA nodes, by number. A kernel without NUMA shows one.
    pub nodes: Vec<NumaNode>,
}

/// What could not be learnt of the host.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// A file of `/sys`.
    #[error("could not read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// What it holds.
    #[error("{path}")]
    Cpus {
        /// The file.
        path: PathBuf,
        /// Why it is no set of processors.
        #[source]
        source: BadCpus,
    },
}

impl Host {
    /// Reads `/sys` below `root`, of which only processors in `allowed` count.
    ///
    /// # Errors
    /// [`HostError`].
    pub fn read(root: &Path, allowed: &Cpus) -> Result<Self, HostError> {
        let system = root.join("sys/devices/system");
        let mut cores: BTreeMap<u32, Cpus> = BTreeMap::new();
        for cpu in allowed.iter() {
            let path = system.join(format!("cpu/cpu{cpu}/topology/thread_siblings_list"));
            // Kernels of virtual machines may not tell: then each is a core.
            let siblings = if path.exists() { read_cpus(&path)? } else { [cpu].into_iter().collect() };
            cores.insert(siblings.first().unwrap_or(cpu), siblings.and(allowed));
        }
        let nodes = read_cpus(&system.join("node/online"));
        let nodes = match nodes {
            Ok(ids) => ids.iter().map(|id| node(&system, id, allowed)).collect::<Result<_, _>>()?,
            Err(_) => vec![whole(root, allowed)?],
        };
        Ok(Self { cores: cores.into_values().collect(), nodes })
    }

    /// The processors of all cores.
    #[must_use]
    pub fn cpus(&self) -> Cpus {
        self.cores.iter().fold(Cpus::none(), |all, core| all.or(core))
    }

    /// A NUMA node by its number.
    #[must_use]
    pub fn node(&self, id: u32) -> Option<&NumaNode> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// The NUMA nodes that these processors are on.
    #[must_use]
    pub fn nodes_of(&self, cpus: &Cpus) -> Vec<u32> {
        self.nodes.iter().filter(|node| !node.cpus.and(cpus).is_empty()).map(|node| node.id).collect()
    }

    /// The node with memory that is nearest to this one: itself, if it has some.
    #[must_use]
    pub fn memory_near(&self, id: u32) -> Option<u32> {
        let own = self.node(id)?;
        let distance = |place: usize| own.distances.get(place).copied().unwrap_or(u32::MAX);
        let with_memory = self.nodes.iter().enumerate().filter(|(_, node)| node.memory > 0);
        with_memory.min_by_key(|(place, node)| (node.id != id, distance(*place))).map(|(_, node)| node.id)
    }
}

/// A host whose kernel knows of no NUMA: all is one node.
fn whole(root: &Path, allowed: &Cpus) -> Result<NumaNode, HostError> {
    let text = read(&root.join("proc/meminfo"))?;
    let bytes = |key: &str| meminfo(&text, key).unwrap_or(0) << 10;
    Ok(NumaNode {
        id: 0,
        cpus: allowed.clone(),
        memory: bytes("MemTotal:").saturating_sub(bytes("Hugetlb:")),
        available: bytes("MemAvailable:"),
        huge: BTreeMap::new(),
        promised: 0,
        distances: vec![10],
    })
}

fn node(system: &Path, id: u32, allowed: &Cpus) -> Result<NumaNode, HostError> {
    let folder = system.join(format!("node/node{id}"));
    let cpus = read_cpus(&folder.join("cpulist"))?.and(allowed);
    let text = read(&folder.join("meminfo"))?;
    let bytes = |key: &str| meminfo(&text, key).unwrap_or(0) << 10;
    // Page cache without what is shared memory: that cannot be dropped.
    let cache = bytes("FilePages:").saturating_sub(bytes("Shmem:")) + bytes("SReclaimable:");
    let available = bytes("MemFree:") + cache;
    let distances = std::fs::read_to_string(folder.join("distance")).unwrap_or_default();
    let distances = distances.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let huge = huge_pages(&folder);
    let reserved: u64 = huge.iter().map(|(size, pages)| size * pages.all).sum();
    let memory = bytes("MemTotal:").saturating_sub(reserved);
    Ok(NumaNode { id, cpus, memory, available, huge, promised: 0, distances })
}

fn huge_pages(node: &Path) -> BTreeMap<u64, HugePages> {
    let folders = std::fs::read_dir(node.join("hugepages")).into_iter().flatten().flatten();
    folders
        .filter_map(|folder| {
            let name = folder.file_name().into_string().ok()?;
            let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let number = |file: &str| {
                let text = std::fs::read_to_string(folder.path().join(file)).ok()?;
                text.trim().parse().ok()
            };
            Some((kib << 10, HugePages { all: number("nr_hugepages")?, free: number("free_hugepages")? }))
        })
        .collect()
}

/// The number behind a key, which stands anywhere in its line: `Node 0 MemTotal: 1 kB` or `MemTotal: 1 kB`.
fn meminfo(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| *word != key);
        words.next()?;
        words.next()?.parse().ok()
    })
}

fn read(path: &Path) -> Result<String, HostError> {
    std::fs::read_to_string(path).map_err(|source| HostError::Read { path: path.to_owned(), source })
}

fn read_cpus(path: &Path) -> Result<Cpus, HostError> {
    read(path)?.parse().map_err(|source| HostError::Cpus { path: path.to_owned(), source })
}
