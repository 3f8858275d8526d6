//! What is taken in a fleet. Devices, cores, memory and huge pages each belong to at most one VM.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{DeviceAddress, DeviceKind, Fleet, HugePages, Node, NodeIndex};
use crate::ids::{MemoryMib, NodeName, NumaId, VmName};

/// A device given to a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Granted {
    /// Its address: `DDDD:BB:DD.F` of a PCI function, `DDDD:BB:DD.F/giN/ciN` of a MIG slice, the UUID of a vGPU, or `remote:IP:PORT/N`.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub address: DeviceAddress,
    /// Its kind: `gpu`, `hca`, `vf`, `vgpu`, `mig-slice` or `remote-gpu`.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub kind: DeviceKind,
}

/// What a VM gets from one NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NumaShare {
    /// The NUMA node.
    #[cfg_attr(feature = "schema", schema(value_type = u16))]
    pub numa: NumaId,
    /// Hardware threads.
    pub cores: u32,
    /// Memory outside huge pages. Unit: MiB.
    #[cfg_attr(feature = "schema", schema(value_type = u64))]
    pub memory: MemoryMib,
    /// Huge pages.
    #[serde(default)]
    pub huge: HugePages,
}

/// What one VM gets, and where: the unit that is placed, leased and given back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Assignment {
    /// The VM.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub vm: VmName,
    /// Its node.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
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

    /// Why the VM stays on its node, because of a device that it has; nothing if it can move.
    #[must_use]
    pub fn stays(&self) -> Option<&'static str> {
        self.devices.iter().find_map(|device| device.kind.stays())
    }

    /// Devices that are plugged into the VM on its node, and unplugged when it moves.
    pub fn plugged(&self) -> impl Iterator<Item = &Granted> {
        self.devices.iter().filter(|device| device.address.pci().is_some())
    }

    /// Remote GPUs: they stay the same ones when the VM moves.
    pub fn remote(&self) -> impl Iterator<Item = &Granted> {
        self.devices.iter().filter(|device| device.kind == DeviceKind::RemoteGpu)
    }

    /// The same without remote GPUs: what a VM has of a node.
    #[must_use]
    pub fn without_remote(&self) -> Self {
        let mut own = self.clone();
        own.devices.retain(|device| device.kind != DeviceKind::RemoteGpu);
        own
    }

    /// The same with the remote GPUs of where the VM comes from.
    #[must_use]
    pub fn with_remote_of(&self, from: &Self) -> Self {
        let mut own = self.without_remote();
        own.devices.extend(from.remote());
        own.devices.sort_unstable();
        own
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

/// Why something cannot be taken or given back. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OccupancyError {
    /// The node is not in the fleet.
    #[error("VM {vm}: node {node} is not in the fleet; publish its inventory first")]
    NoNode {
        /// The VM.
        vm: VmName,
        /// The node.
        node: NodeName,
    },
    /// The node has no such device or NUMA node.
    #[error("VM {vm}: node {node} has no {what}")]
    NoPart {
        /// The VM.
        vm: VmName,
        /// The node.
        node: NodeName,
        /// What is missing.
        what: String,
    },
    /// The device is another VM's.
    #[error("VM {vm}: device {address} of node {node} is taken")]
    DeviceTaken {
        /// The VM.
        vm: VmName,
        /// The node.
        node: NodeName,
        /// The device.
        address: DeviceAddress,
    },
    /// It is a GPU of which another VM has a slice or vGPU, or a slice or vGPU of a GPU that another VM has as a whole.
    #[error(
        "VM {vm}: device {address} of node {node} is taken: a GPU is leased either as a whole or by its slices and vGPUs"
    )]
    Divided {
        /// The VM.
        vm: VmName,
        /// The node.
        node: NodeName,
        /// The device.
        address: DeviceAddress,
    },
    /// Not enough is left.
    #[error("VM {vm} needs {needed} {what} of node {node}, has {free} free")]
    TooLittle {
        /// The VM.
        vm: VmName,
        /// The node.
        node: NodeName,
        /// The kind of resource.
        what: String,
        /// How much it needs.
        needed: u64,
        /// How much is left.
        free: u64,
    },
    /// Given back, but was not taken.
    #[error("VM {vm} returns {what} of node {node}, but does not hold it")]
    NotTaken {
        /// The VM.
        vm: VmName,
        /// The node.
        node: NodeName,
        /// What it returns.
        what: String,
    },
}

/// What is taken of one NUMA node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub cores: u32,
    pub memory: u64,
    pub huge: HugePages,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct NodeUse {
    /// One bit for each device, in the order of [`Node::devices`].
    devices: Vec<u64>,
    numa: Vec<Taken>,
    vms: u32,
}

impl NodeUse {
    fn has(&self, device: usize) -> bool {
        self.devices.get(device / 64).is_some_and(|word| word >> (device % 64) & 1 == 1)
    }
}

/// Whether what the device at this index is made of, or what is made of it, is taken.
pub(crate) fn overlaps_taken(node: &Node, at: usize, is_taken: impl Fn(usize) -> bool) -> bool {
    let device = &node.devices[at];
    let mut others = node.devices.iter().enumerate();
    if device.kind.is_share() {
        let whole = device.parent.map(DeviceAddress::Pci);
        others.any(|(other, own)| Some(own.address) == whole && is_taken(other))
    } else if device.shares > 0 {
        let whole = device.address.pci();
        others.any(|(other, own)| own.kind.is_share() && own.parent == whole && is_taken(other))
    } else {
        false
    }
}

/// How much is taken of each node of a fleet. It remembers sums, not VMs: what was taken by an [`Assignment`] is given back by an equal
/// one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occupancy {
    nodes: Vec<NodeUse>,
    /// Remote GPUs, which are of no node.
    remote: BTreeSet<DeviceAddress>,
}

impl Occupancy {
    /// A fleet of which nothing is taken.
    #[must_use]
    pub fn new(fleet: &Fleet) -> Self {
        let fresh = |node: &Node| NodeUse {
            devices: vec![0; node.devices.len().div_ceil(64)],
            numa: vec![Taken::default(); node.numa.len()],
            vms: 0,
        };
        Self { nodes: fleet.nodes().iter().map(fresh).collect(), remote: BTreeSet::new() }
    }

    /// A fleet of which these assignments are taken.
    ///
    /// # Errors
    /// The first assignment that does not fit beside those before it.
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

    /// Takes all that an assignment names, or nothing. The state of the node does not matter: a VM may run on a drained node.
    ///
    /// # Errors
    /// What is missing or taken.
    pub fn take(&mut self, fleet: &Fleet, assignment: &Assignment) -> Result<(), OccupancyError> {
        let (index, node) = find(fleet, assignment)?;
        let mut after = self.nodes[index.usize()].clone();
        let taken = |address: DeviceAddress| {
            let (vm, node) = (assignment.vm.clone(), assignment.node.clone());
            OccupancyError::DeviceTaken { vm, node, address }
        };
        for granted in &assignment.devices {
            let listed = node.devices.iter().find(|device| device.address == granted.address);
            // Whoever names another kind would get round what counts for this one.
            if let Some(kind) = listed.map(|device| device.kind).filter(|kind| *kind != granted.kind) {
                let (address, asked) = (granted.address, granted.kind);
                return Err(no_part(
                    assignment,
                    format!("device {address} of kind {asked:?}: it is {kind:?}"),
                ));
            }
        }
        for granted in assignment.devices.iter().filter(|own| own.kind != DeviceKind::RemoteGpu) {
            let (word, bit) = device_bit(node, assignment, granted.address)?;
            if after.devices[word] & bit != 0 {
                return Err(taken(granted.address));
            }
            after.devices[word] |= bit;
        }
        let mut remote: BTreeSet<DeviceAddress> = BTreeSet::new();
        for granted in assignment.remote() {
            fleet.remote_gpu(granted.address).ok_or_else(|| {
                no_part(assignment, format!("device {}, and no other node lists it", granted.address))
            })?;
            if self.remote.contains(&granted.address) || !remote.insert(granted.address) {
                return Err(taken(granted.address));
            }
        }
        if let Some(address) = assignment.devices.iter().map(|own| own.address).find(|address| {
            let at = node.devices.iter().position(|device| device.address == *address);
            at.is_some_and(|at| overlaps_taken(node, at, |other| after.has(other)))
        }) {
            let (vm, node) = (assignment.vm.clone(), assignment.node.clone());
            return Err(OccupancyError::Divided { vm, node, address });
        }
        for share in &assignment.shares {
            let at = numa_index(node, assignment, share.numa)?;
            let (has, used) = (&node.numa[at], &mut after.numa[at]);
            let add = |what: &str, used: &mut u64, all: u64, needed: u64| {
                let free = all.saturating_sub(*used);
                if needed > free {
                    return Err(OccupancyError::TooLittle {
                        vm: assignment.vm.clone(),
                        node: assignment.node.clone(),
                        what: format!("{what} on NUMA node {}", share.numa),
                        needed,
                        free,
                    });
                }
                *used += needed;
                Ok(())
            };
            let mut cores = u64::from(used.cores);
            add("cores", &mut cores, u64::from(has.cores), u64::from(share.cores))?;
            used.cores = u32::try_from(cores).unwrap_or(u32::MAX);
            add("MiB of memory", &mut used.memory, has.memory.0, share.memory.0)?;
            add("pages of 2 MiB", &mut used.huge.pages_2m, has.huge.pages_2m, share.huge.pages_2m)?;
            add("pages of 1 GiB", &mut used.huge.pages_1g, has.huge.pages_1g, share.huge.pages_1g)?;
        }
        after.vms += 1;
        self.nodes[index.usize()] = after;
        self.remote.extend(remote);
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
        if let Some(granted) = assignment.remote().find(|own| !self.remote.contains(&own.address)) {
            return Err(not_taken(format!("device {}", granted.address)));
        }
        for granted in assignment.devices.iter().filter(|own| own.kind != DeviceKind::RemoteGpu) {
            let (word, bit) = device_bit(node, assignment, granted.address)?;
            if after.devices[word] & bit == 0 {
                return Err(not_taken(format!("device {}", granted.address)));
            }
            after.devices[word] &= !bit;
        }
        for share in &assignment.shares {
            let used = &mut after.numa[numa_index(node, assignment, share.numa)?];
            let less = |what: &str, used: u64, back: u64| {
                used.checked_sub(back).ok_or_else(|| {
                    not_taken(format!("{back} {what} on NUMA node {} ({used} are taken)", share.numa))
                })
            };
            used.memory = less("MiB of memory", used.memory, share.memory.0)?;
            used.huge.pages_2m = less("pages of 2 MiB", used.huge.pages_2m, share.huge.pages_2m)?;
            used.huge.pages_1g = less("pages of 1 GiB", used.huge.pages_1g, share.huge.pages_1g)?;
            let cores = less("cores", u64::from(used.cores), u64::from(share.cores))?;
            used.cores = u32::try_from(cores).unwrap_or(u32::MAX);
        }
        after.vms = after.vms.checked_sub(1).ok_or_else(|| not_taken("a VM".to_owned()))?;
        self.nodes[index.usize()] = after;
        for granted in assignment.remote() {
            self.remote.remove(&granted.address);
        }
        Ok(())
    }

    /// Whether a remote GPU is taken.
    #[must_use]
    pub fn remote_taken(&self, address: DeviceAddress) -> bool {
        self.remote.contains(&address)
    }

    /// VMs on a node.
    #[must_use]
    pub fn vms(&self, node: NodeIndex) -> u32 {
        self.nodes[node.usize()].vms
    }

    /// Whether the device at this index of [`Node::devices`] is taken.
    #[must_use]
    pub fn device_taken(&self, node: NodeIndex, device: usize) -> bool {
        self.nodes[node.usize()].has(device)
    }

    /// Whether the device at this index is a share of a GPU that is taken as a whole, or a GPU of which a share is taken.
    #[must_use]
    pub fn overlaps_taken(&self, fleet: &Fleet, node: NodeIndex, device: usize) -> bool {
        overlaps_taken(fleet.node(node), device, |other| self.device_taken(node, other))
    }

    /// What is free on a node: by NUMA node, in the order of [`Node::numa`].
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

fn no_part(assignment: &Assignment, what: String) -> OccupancyError {
    OccupancyError::NoPart { vm: assignment.vm.clone(), node: assignment.node.clone(), what }
}

fn device_bit(
    node: &Node,
    assignment: &Assignment,
    address: DeviceAddress,
) -> Result<(usize, u64), OccupancyError> {
    let at = node.devices.iter().position(|device| device.address == address);
    at.map(|at| (at / 64, 1 << (at % 64))).ok_or_else(|| no_part(assignment, format!("device {address}")))
}

fn numa_index(node: &Node, assignment: &Assignment, numa: NumaId) -> Result<usize, OccupancyError> {
    let at = node.numa.iter().position(|own| own.id == numa);
    at.ok_or_else(|| no_part(assignment, format!("NUMA node {numa}")))
}
