//! What a VM has of its host for itself.

use serde::{Deserialize, Serialize};

use crate::cpus::Cpus;

/// What a VM has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// Processors, sibling threads beside each other.
    pub cpus: Vec<u32>,
    /// NUMA nodes of its memory.
    pub memory: Vec<u32>,
    /// Its virtual processors.
    pub vcpus: u32,
    /// Memory that it was promised of these NUMA nodes together. Unit: bytes.
    #[serde(default)]
    pub promised: u64,
    /// Size of its huge pages, if its memory is of reserved ones. Unit: bytes.
    #[serde(default)]
    pub huge_page: Option<u64>,
}

impl Pin {
    /// Its processors as a set.
    #[must_use]
    pub fn set(&self) -> Cpus {
        self.cpus.iter().copied().collect()
    }

    /// Whether each virtual processor has a processor.
    #[must_use]
    pub fn one_each(&self) -> bool {
        self.cpus.len() == self.vcpus as usize
    }

    /// The threads of its virtual processors and where each belongs, from their indices and thread IDs.
    #[must_use]
    pub fn vcpus(&self, vcpus: &[(u32, u32)]) -> Vec<Vcpu> {
        // TCG has one thread for all virtual processors unless told otherwise: it belongs to all.
        let one_thread = vcpus.len() > 1 && vcpus.iter().all(|(_, thread)| *thread == vcpus[0].1);
        let belongs = |index: u32| match self.cpus.get(index as usize) {
            Some(cpu) if self.one_each() && !one_thread => [*cpu].into_iter().collect(),
            _ => self.set(),
        };
        vcpus
            .iter()
            .map(|(index, thread)| Vcpu { index: *index, thread: *thread, cpus: belongs(*index) })
            .collect()
    }
}

/// The thread of a virtual processor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vcpu {
    /// Index of the virtual processor.
    pub index: u32,
    /// Its thread.
    pub thread: u32,
    /// Where it belongs.
    pub cpus: Cpus,
}
