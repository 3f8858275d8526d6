//! What of a fleet is taken. Devices, cores, memory and huge pages are exclusive.

use serde::{Deserialize, Serialize};

use super::{DeviceKind, Fleet, HugePages, MemoryMib, Node, NodeIndex, NodeName, NumaId, PciAddress, VmName};

/// A device given to a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Granted {
    /// Where it is.
    pub address: PciAddress,
    /// What it is.
    pub kind: DeviceKind,
}

/// What a VM has of one NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaShare {
    /// The NUMA node.
    pub numa: NumaId,
    /// Hardware threads.
    pub cores: u32,
    /// Memory outside huge pages.
    pub memory: MemoryMib,
    /// Huge pages.
    #[serde(default)]
    pub huge: HugePages,
}

/// What one VM has, and where: the unit that is placed, leased and given back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// The VM.
    pub vm: VmName,
    /// Its node.
    pub node: NodeName,
    /// Devices, by address.
    #[serde(default)]
    pub devices: Vec<Granted>,
    /// Cores, memory and huge pages, by NUMA node.
    #[serde(default)]
    pub shares: Vec<NumaShare>,
}

impl Assignment {
    /// Devices of one kind.
    #[must_use]
    pub fn count(&self, kind: DeviceKind) -> usize {
        self.devices.iter().filter(|device| device.kind == kind).count()
    }

    /// Memory in and outside huge pages.
    #[must_use]
    pub fn memory(&self) -> MemoryMib {
        let of = |share: &NumaShare| share.memory.0 + share.huge.pages_2m * 2 + share.huge.pages_1g * 1024;
        MemoryMib(self.shares.iter().map(of).sum())
    }

    /// Hardware threads.
    #[must_use]
    pub fn cores(&self) -> u32 {
        self.shares.iter().map(|share| share.cores).sum()
    }
}

/// Why something cannot be taken or given back. Nothing has changed then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OccupancyError {
    /// The node is not in the fleet.
    #[error("VM {vm}: there is no node {node} in the fleet; import its inventory first")]
    NoNode {
        /// Who asked.
        vm: VmName,
        /// The node.
        node: NodeName,
    },
    /// The node has no such device or NUMA node.
    #[error("VM {vm}: node {node} has no {what}")]
    NoPart {
        /// Who asked.
        vm: VmName,
        /// The node.
        node: NodeName,
        /// What is missing.
        what: String,
    },
    /// Taken by somebody else, or not enough left.
    #[error("VM {vm}: {what} of node {node}: {wanted} wanted, {free} free")]
    Taken {
        /// Who asked.
        vm: VmName,
        /// The node.
        node: NodeName,
        /// The device, or the kind of resource.
        what: String,
        /// How much of it was asked for.
        wanted: u64,
        /// How much is left.
        free: u64,
    },
    /// Given back, but was not taken.
    #[error("VM {vm}: gives back {what} of node {node}, which was not taken")]
    NotTaken {
        /// Who gives back.
        vm: VmName,
        /// The node.
        node: NodeName,
        /// What it gives back.
        what: String,
    },
}

/// Taken parts of one NUMA node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub cores: u32,
    pub memory: u64,
    pub huge: HugePages,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct NodeUse {
    /// One bit a device, in the order of [`Node::devices`].
    devices: Vec<u64>,
    numa: Vec<Taken>,
    vms: u32,
}

/// Who has taken how much of each node of a fleet. It does not remember VMs, only sums: an [`Assignment`] that was taken is given
/// back by the same assignment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occupancy {
    nodes: Vec<NodeUse>,
}

impl Occupancy {
    /// Nothing is taken.
    #[must_use]
    pub fn new(fleet: &Fleet) -> Self {
        let fresh = |node: &Node| NodeUse {
            devices: vec![0; node.devices.len().div_ceil(64)],
            numa: vec![Taken::default(); node.numa.len()],
            vms: 0,
        };
        Self { nodes: fleet.nodes().iter().map(fresh).collect() }
    }

    /// What these assignments take together.
    ///
    /// # Errors
    /// The first that does not fit beside those before it.
    pub fn with<'a>(
        fleet: &Fleet,
        assignments: impl IntoIterator<Item = &'a Assignment>,
    ) -> Result<Self, OccupancyError> {
        let mut occupancy = Self::new(fleet);
        for assignment in assignments {
            occupancy.take(fleet, assignment)?;
        }
        Ok(occupancy)
    }

    /// Takes all that an assignment names, or nothing. Whether the node is up is not asked: what runs there, runs there.
    ///
    /// # Errors
    /// What is missing or taken already.
    pub fn take(&mut self, fleet: &Fleet, assignment: &Assignment) -> Result<(), OccupancyError> {
        let (index, node) = find(fleet, assignment)?;
        let mut after = self.nodes[index.usize()].clone();
        for granted in &assignment.devices {
            let (word, bit) = device_bit(node, assignment, granted.address)?;
            if after.devices[word] & bit != 0 {
                return Err(taken(assignment, format!("device {}", granted.address), 1, 0));
            }
            after.devices[word] |= bit;
        }
        for share in &assignment.shares {
            let at = numa_at(node, assignment, share.numa)?;
            let (has, used) = (&node.numa[at], &mut after.numa[at]);
            let add = |what: &str, used: &mut u64, all: u64, wanted: u64| {
                let free = all.saturating_sub(*used);
                if wanted > free {
                    return Err(taken(
                        assignment,
                        format!("{what} on NUMA node {}", share.numa),
                        wanted,
                        free,
                    ));
                }
                *used += wanted;
                Ok(())
            };
            let mut cores = u64::from(used.cores);
            add("cores", &mut cores, u64::from(has.cores), u64::from(share.cores))?;
            used.cores = u32::try_from(cores).unwrap_or(u32::MAX);
            add("memory (MiB)", &mut used.memory, has.memory.0, share.memory.0)?;
            add("2 MiB pages", &mut used.huge.pages_2m, has.huge.pages_2m, share.huge.pages_2m)?;
            add("1 GiB pages", &mut used.huge.pages_1g, has.huge.pages_1g, share.huge.pages_1g)?;
        }
        after.vms += 1;
        self.nodes[index.usize()] = after;
        Ok(())
    }

    /// Gives back all that an assignment names, or nothing.
    ///
    /// # Errors
    /// What was not taken.
    pub fn release(&mut self, fleet: &Fleet, assignment: &Assignment) -> Result<(), OccupancyError> {
        let (index, node) = find(fleet, assignment)?;
        let mut after = self.nodes[index.usize()].clone();
        let not_taken = |what: String| OccupancyError::NotTaken {
            vm: assignment.vm.clone(),
            node: assignment.node.clone(),
            what,
        };
        for granted in &assignment.devices {
            let (word, bit) = device_bit(node, assignment, granted.address)?;
            if after.devices[word] & bit == 0 {
                return Err(not_taken(format!("device {}", granted.address)));
            }
            after.devices[word] &= !bit;
        }
        for share in &assignment.shares {
            let used = &mut after.numa[numa_at(node, assignment, share.numa)?];
            let less = |what: &str, used: u64, back: u64| {
                used.checked_sub(back).ok_or_else(|| {
                    not_taken(format!("{what} on NUMA node {}: {back}, of which {used}", share.numa))
                })
            };
            used.memory = less("memory (MiB)", used.memory, share.memory.0)?;
            used.huge.pages_2m = less("2 MiB pages", used.huge.pages_2m, share.huge.pages_2m)?;
            used.huge.pages_1g = less("1 GiB pages", used.huge.pages_1g, share.huge.pages_1g)?;
            let cores = less("cores", u64::from(used.cores), u64::from(share.cores))?;
            used.cores = u32::try_from(cores).unwrap_or(u32::MAX);
        }
        after.vms = after.vms.checked_sub(1).ok_or_else(|| not_taken("a VM".to_owned()))?;
        self.nodes[index.usize()] = after;
        Ok(())
    }

    /// VMs on a node.
    #[must_use]
    pub fn vms(&self, node: NodeIndex) -> u32 {
        self.nodes[node.usize()].vms
    }

    /// Whether the device at this place of [`Node::devices`] is taken.
    #[must_use]
    pub fn device_taken(&self, node: NodeIndex, device: usize) -> bool {
        self.nodes[node.usize()].devices.get(device / 64).is_some_and(|word| word >> (device % 64) & 1 == 1)
    }

    /// What is left of a node: per NUMA node, in the order of [`Node::numa`].
    #[must_use]
    pub fn free(&self, fleet: &Fleet, node: NodeIndex) -> Vec<NumaShare> {
        let pairs = fleet.node(node).numa.iter().zip(&self.nodes[node.usize()].numa);
        let left = pairs.map(|(has, used)| NumaShare {
            numa: has.id,
            cores: has.cores.saturating_sub(used.cores),
            memory: MemoryMib(has.memory.0.saturating_sub(used.memory)),
            huge: HugePages {
                pages_2m: has.huge.pages_2m.saturating_sub(used.huge.pages_2m),
                pages_1g: has.huge.pages_1g.saturating_sub(used.huge.pages_1g),
            },
        });
        left.collect()
    }
}

fn find<'a>(fleet: &'a Fleet, assignment: &Assignment) -> Result<(NodeIndex, &'a Node), OccupancyError> {
    let missing = || OccupancyError::NoNode { vm: assignment.vm.clone(), node: assignment.node.clone() };
    let index = fleet.find(assignment.node.as_str()).ok_or_else(missing)?;
    Ok((index, fleet.node(index)))
}

fn taken(assignment: &Assignment, what: String, wanted: u64, free: u64) -> OccupancyError {
    OccupancyError::Taken { vm: assignment.vm.clone(), node: assignment.node.clone(), what, wanted, free }
}

fn no_part(assignment: &Assignment, what: String) -> OccupancyError {
    OccupancyError::NoPart { vm: assignment.vm.clone(), node: assignment.node.clone(), what }
}

fn device_bit(
    node: &Node,
    assignment: &Assignment,
    address: PciAddress,
) -> Result<(usize, u64), OccupancyError> {
    let at = node.devices.iter().position(|device| device.address == address);
    at.map(|at| (at / 64, 1 << (at % 64))).ok_or_else(|| no_part(assignment, format!("device {address}")))
}

fn numa_at(node: &Node, assignment: &Assignment, numa: NumaId) -> Result<usize, OccupancyError> {
    let at = node.numa.iter().position(|own| own.id == numa);
    at.ok_or_else(|| no_part(assignment, format!("NUMA node {numa}")))
}
