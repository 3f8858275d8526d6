//! What a node has left, in the form in which VMs are packed onto it.

use super::devices::{Bin, Group, Shelf};
use super::fit;
use super::packer::Wanted;
use super::request::{NumaPolicy, Pages};
use crate::model::{Device, DeviceKind, Fleet, Node, NodeIndex, NumaShare, Occupancy};

/// Cores and memory in one pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Pool {
    pub cores: u64,
    pub memory: u64,
    pub pages_2m: u64,
    pub pages_1g: u64,
}

impl Pool {
    /// What VMs of an alternative take.
    pub fn need(vcpus: u32, mib: u64, pages: Pages) -> Self {
        let mut pool = Self { cores: u64::from(vcpus), ..Self::default() };
        match pages {
            Pages::Normal => pool.memory = mib,
            Pages::Huge2M => pool.pages_2m = mib.div_ceil(2),
            Pages::Huge1G => pool.pages_1g = mib.div_ceil(1024),
        }
        pool
    }

    fn map(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            cores: f(self.cores, other.cores),
            memory: f(self.memory, other.memory),
            pages_2m: f(self.pages_2m, other.pages_2m),
            pages_1g: f(self.pages_1g, other.pages_1g),
        }
    }

    pub fn plus(self, other: Self) -> Self {
        self.map(other, u64::saturating_add)
    }

    pub fn times(self, count: u64) -> Self {
        self.map(self, |own, _| own.saturating_mul(count))
    }

    pub fn least(self, other: Self) -> Self {
        self.map(other, u64::min)
    }

    pub fn holds(self, other: Self) -> bool {
        self.map(other, u64::saturating_sub).plus(other) == self
    }

    pub fn of(share: &NumaShare) -> Self {
        Self {
            cores: u64::from(share.cores),
            memory: share.memory.0,
            pages_2m: share.huge.pages_2m,
            pages_1g: share.huge.pages_1g,
        }
    }
}

/// A part of a node within which each VM must be: the whole node, a socket or a NUMA node.
#[derive(Debug, Clone)]
pub(super) struct Unit {
    /// Places in [`Node::numa`].
    pub numa: Vec<usize>,
    /// What is free, and not more than all VMs together could use.
    pub pool: Pool,
    /// Free devices.
    pub shelf: Shelf,
    /// Places in [`Node::devices`], by group and bin of the shelf.
    pub devices: Vec<Vec<Vec<usize>>>,
}

/// What counts for telling two units apart.
pub(super) type UnitKey = (Pool, Shelf);

/// A node's units, and which alternatives it could serve at all.
#[derive(Debug, Clone)]
pub(super) struct View {
    /// Bit by alternative.
    pub usable: u64,
    pub units: Vec<Unit>,
}

/// A free device, and where it belongs.
struct Item<'a> {
    device: &'a Device,
    at: usize,
    unit: usize,
    numa: u16,
    needs: u64,
}

impl View {
    /// Looks at a node. None if it can serve no alternative.
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
        let items = items(fleet, used, index, wanted, &split);
        for (at, numa) in split.into_iter().enumerate() {
            let all = numa.iter().fold(Pool::default(), |sum, at| sum.plus(Pool::of(&free[*at])));
            let own: Vec<&Item<'_>> = items.iter().filter(|item| item.unit == at).collect();
            let (shelf, devices) = shelve(&own, wanted);
            units.push(Unit { numa, pool: all.least(most), shelf, devices });
        }
        Some(Self { usable, units })
    }

    /// What counts for telling two nodes apart.
    pub fn key(&self) -> (u64, Vec<UnitKey>) {
        (self.usable, self.units.iter().map(|unit| (unit.pool, unit.shelf.clone())).collect())
    }
}

/// Places in [`Node::numa`] by unit.
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

fn items<'a>(
    fleet: &'a Fleet,
    used: &Occupancy,
    index: NodeIndex,
    wanted: &Wanted<'_>,
    split: &[Vec<usize>],
) -> Vec<Item<'a>> {
    if wanted.filters.is_empty() {
        return Vec::new();
    }
    let node = fleet.node(index);
    let mut items = Vec::new();
    for at in fit::offered(fleet, used, index) {
        let device = &node.devices[at];
        let needs = wanted.needs(device);
        if needs == 0 {
            continue;
        }
        // A host with one NUMA node often does not say that its devices are on it.
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
            items.push(Item { device, at, unit, numa, needs });
        }
    }
    items
}

/// Sorts devices into groups by PCIe root, and bins of devices that are alike.
fn shelve(items: &[&Item<'_>], wanted: &Wanted<'_>) -> (Shelf, Vec<Vec<Vec<usize>>>) {
    let mut roots: Vec<(u16, Option<&str>, Vec<&Item<'_>>)> = Vec::new();
    for item in items {
        let (numa, root) = if wanted.fungible {
            (0, Some(""))
        } else {
            (item.numa, item.device.root.as_ref().map(|root| root.0.as_ref()))
        };
        // Of devices with an unknown root nobody can say that they share it.
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
            let gpu = item.device.kind == DeviceKind::Gpu;
            let parent = match item.device.parent {
                Some(address) if !wanted.fungible => {
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
                Some((_, members)) => members.push(item.at),
                None => bins.push((bin, vec![item.at])),
            }
        }
        bins.sort();
        let counts = bins.iter().map(|(bin, members)| wanted.useful(bin.needs, members.len())).collect();
        groups.push((Group { numa, bins: bins.iter().map(|(bin, _)| bin.clone()).collect() }, counts));
        devices.push(bins.into_iter().map(|(_, members)| members).collect::<Vec<_>>());
    }
    let (shelf, order) = Shelf::new(&groups);
    let devices = order.into_iter().map(|at| std::mem::take(&mut devices[at])).collect();
    (shelf, devices)
}
