//! What is free on a node, in the form in which VMs are packed onto it.

use super::devices::{Bin, FreeDevices, RootGroup};
use super::fit;
use super::pool::Pool;
use super::request::NumaPolicy;
use super::wanted::Wanted;
use crate::model::{Device, Fleet, Node, NodeIndex, Occupancy};

/// A part of a node within which each VM must be: the whole node, a socket or a NUMA node.
#[derive(Debug, Clone)]
pub(super) struct Unit {
    /// Indices in [`Node::numa`].
    pub numa: Vec<usize>,
    /// What is free, but at most what all VMs together could use.
    pub pool: Pool,
    pub free_devices: FreeDevices,
    /// Indices in [`Node::devices`], by group and bin of the free devices.
    pub devices: Vec<Vec<Vec<usize>>>,
}

/// Units with equal keys are packed in the same way.
pub(super) type UnitKey = (Pool, FreeDevices);

/// A node's units, and the alternatives whose conditions it meets.
#[derive(Debug, Clone)]
pub(super) struct NodeView {
    /// These alternatives, as bits.
    pub usable: u64,
    pub units: Vec<Unit>,
}

/// A free device.
struct FreeDevice<'a> {
    device: &'a Device,
    /// Index in [`Node::devices`].
    index: usize,
    unit: usize,
    numa: u16,
    needs: u64,
}

impl NodeView {
    /// The view of a node. None if it meets the conditions of no alternative.
    pub fn new(fleet: &Fleet, used: &Occupancy, index: NodeIndex, wanted: &Wanted<'_>) -> Option<Self> {
        let node = fleet.node(index);
        let usable = wanted.usable(node);
        if usable == 0 {
            return None;
        }
        let free = used.free(fleet, index);
        let split = split(node, wanted.scope);
        let most = wanted.most();
        let mut units: Vec<Unit> = Vec::with_capacity(split.len());
        let items = free_devices(fleet, used, index, wanted, &split);
        for (at, numa) in split.into_iter().enumerate() {
            let all = numa.iter().fold(Pool::default(), |sum, at| sum.plus(Pool::of(&free[*at])));
            let in_unit: Vec<&FreeDevice<'_>> = items.iter().filter(|item| item.unit == at).collect();
            let (free_devices, devices) = group_devices(&in_unit, wanted);
            units.push(Unit { numa, pool: all.least(most), free_devices, devices });
        }
        Some(Self { usable, units })
    }

    /// Nodes with equal keys are packed in the same way.
    pub fn key(&self) -> (u64, Vec<UnitKey>) {
        (self.usable, self.units.iter().map(|unit| (unit.pool, unit.free_devices.clone())).collect())
    }
}

/// Indices in [`Node::numa`] of each unit.
fn split(node: &Node, scope: NumaPolicy) -> Vec<Vec<usize>> {
    match scope {
        NumaPolicy::Preferred => vec![(0..node.numa.len()).collect()],
        NumaPolicy::Required => (0..node.numa.len()).map(|at| vec![at]).collect(),
        NumaPolicy::Socket => {
            let mut sockets: Vec<(u16, Vec<usize>)> = Vec::new();
            for (at, numa) in node.numa.iter().enumerate() {
                match sockets.iter_mut().find(|(socket, _)| *socket == numa.socket.0) {
                    Some((_, members)) => members.push(at),
                    None => sockets.push((numa.socket.0, vec![at])),
                }
            }
            sockets.into_iter().map(|(_, members)| members).collect()
        }
    }
}

fn free_devices<'a>(
    fleet: &'a Fleet,
    used: &Occupancy,
    index: NodeIndex,
    wanted: &Wanted<'_>,
    split: &[Vec<usize>],
) -> Vec<FreeDevice<'a>> {
    if wanted.filters.is_empty() {
        return Vec::new();
    }
    let node = fleet.node(index);
    let mut free = Vec::new();
    for at in fit::offered(fleet, used, index) {
        let device = &node.devices[at];
        let needs = wanted.needs(device);
        if needs == 0 {
            continue;
        }
        // The firmware of a host with one NUMA node often does not say that devices are on it.
        let place = match device.numa {
            None if node.numa.len() == 1 => Some(0),
            None => None,
            Some(id) => node.numa.iter().position(|numa| numa.id == id),
        };
        let unit = match place {
            _ if split.len() == 1 => Some(0),
            Some(place) => split.iter().position(|numa| numa.contains(&place)),
            None => None,
        };
        let numa = place.and_then(|place| u16::try_from(place).ok()).unwrap_or(u16::MAX);
        if let Some(unit) = unit {
            free.push(FreeDevice { device, index: at, unit, numa, needs });
        }
    }
    free
}

/// Sorts devices into groups by PCIe root, and these into bins of interchangeable devices.
fn group_devices(items: &[&FreeDevice<'_>], wanted: &Wanted<'_>) -> (FreeDevices, Vec<Vec<Vec<usize>>>) {
    let mut roots: Vec<(u16, Option<&str>, Vec<&FreeDevice<'_>>)> = Vec::new();
    for item in items {
        let (numa, root) = if wanted.fungible {
            (0, Some(""))
        } else {
            (item.numa, item.device.root.as_ref().map(|root| root.0.as_ref()))
        };
        // Devices with unknown roots may have different ones.
        match roots.iter_mut().find(|known| root.is_some() && known.1 == root && known.0 == numa) {
            Some(known) => known.2.push(item),
            None => roots.push((numa, root, vec![item])),
        }
    }
    let mut groups = Vec::with_capacity(roots.len());
    let mut devices = Vec::with_capacity(roots.len());
    for (numa, _, members) in roots {
        let mut parents = Vec::new();
        let mut bins: Vec<(Bin, Vec<usize>)> = Vec::new();
        for item in members {
            let gpu = !item.device.kind.is_network();
            let parent = match item.device.parent {
                Some(address) if !wanted.fungible && !gpu => {
                    let known = parents.iter().position(|known| *known == address);
                    known.unwrap_or_else(|| {
                        parents.push(address);
                        parents.len() - 1
                    })
                }
                _ => 0,
            };
            let bin = Bin { needs: item.needs, gpu, parent: u16::try_from(parent).unwrap_or(u16::MAX) };
            match bins.iter_mut().find(|(known, _)| *known == bin) {
                Some((_, members)) => members.push(item.index),
                None => bins.push((bin, vec![item.index])),
            }
        }
        bins.sort();
        let counts = bins.iter().map(|(bin, members)| wanted.useful(bin.needs, members.len())).collect();
        groups.push((RootGroup { numa, bins: bins.iter().map(|(bin, _)| bin.clone()).collect() }, counts));
        devices.push(bins.into_iter().map(|(_, members)| members).collect::<Vec<_>>());
    }
    let (free_devices, order) = FreeDevices::new(&groups);
    let devices = order.into_iter().map(|at| std::mem::take(&mut devices[at])).collect();
    (free_devices, devices)
}
