//! Which processors and NUMA nodes a VM gets.
//!
//! Whole cores first, so that no two VMs share one: sibling threads share its caches and execution units. What is left of an odd number goes to a
//! core of which another VM has the other thread already, if there is one. Sibling threads are neighbours in the result, so virtual processors
//! 0 and 1 are on one core: a guest that is told of two threads a core (`-smp threads=2`) is told the truth.

use std::cmp::Reverse;

use vmove_types::tuning::NumaShare;

use crate::cpus::Cpus;
use crate::host::{Host, NumaNode};

/// What a VM is to get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// What it gets of which NUMA node. Empty: this module chooses.
    pub numa: Vec<NumaShare>,
    /// Processors, if no NUMA node is named.
    pub cpus: u32,
    /// Its memory. Unit: bytes.
    pub memory: u64,
    /// Size of its huge pages, if its memory is of reserved ones. Unit: bytes.
    pub huge_page: Option<u64>,
}

/// What a VM gets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// Processors, sibling threads beside each other.
    pub cpus: Vec<u32>,
    /// NUMA nodes of its memory, in order.
    pub memory: Vec<u32>,
}

/// Why there is no place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoPlace {
    /// A NUMA node that the host does not have.
    #[error("expected one of the NUMA nodes {there}, found {wanted}")]
    NoSuchNode {
        /// The number asked for.
        wanted: u32,
        /// Those that there are.
        there: Cpus,
    },
    /// Memory of a NUMA node that has none.
    #[error("NUMA node {0} has no memory; name another one for it")]
    NoMemory(u32),
    /// Too few free processors.
    #[error("expected {wanted} processors that no other VM has on {of}, found {free} ({which})")]
    TooFew {
        /// How many are asked for.
        wanted: u32,
        /// The NUMA node, or the host.
        of: String,
        /// How many are free.
        free: usize,
        /// Which.
        which: String,
    },
    /// Too little memory.
    #[error("expected {wanted_mib} MiB on NUMA node{} {nodes}, found {free_mib} MiB free", if nodes.len() == 1 { "" } else { "s" })]
    TooLittleMemory {
        /// What it needs. Unit: MiB.
        wanted_mib: u64,
        /// Of which nodes.
        nodes: Cpus,
        /// What they have. Unit: MiB.
        free_mib: u64,
    },
    /// Too few huge pages.
    #[error(
        "expected {wanted} free huge pages of {kib} kB on NUMA node {node}, found {free}: echo {more} \
         >/sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB/nr_hugepages"
    )]
    TooFewHuge {
        /// How many are needed.
        wanted: u64,
        /// How many are free.
        free: u64,
        /// Their size.
        kib: u64,
        /// The NUMA node.
        node: u32,
        /// How many there must be, if all others are in use.
        more: String,
    },
}

/// A place for a VM, of processors that are in `free`.
///
/// # Errors
/// [`NoPlace`].
pub fn choose(host: &Host, free: &Cpus, wish: &Wish) -> Result<Place, NoPlace> {
    let shares = if wish.numa.is_empty() { spread(host, free, wish)? } else { wish.numa.clone() };
    let mut cpus = Vec::new();
    for share in &shares {
        cpus.extend(take(host, free, share)?);
    }
    let memory = memory_nodes(host, &shares)?;
    room(host, &memory, wish)?;
    Ok(Place { cpus, memory })
}

/// As few NUMA nodes as possible: the one with the fewest free processors of those that have enough; else those with most.
fn spread(host: &Host, free: &Cpus, wish: &Wish) -> Result<Vec<NumaShare>, NoPlace> {
    let free_of = |node: &&NumaNode| node.cpus.and(free).len();
    let share = |node: &NumaNode, cpus: usize| NumaShare {
        node: node.id,
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory_mib: 0,
    };
    let wanted = wish.cpus as usize;
    let fits = |node: &&NumaNode| free_of(node) >= wanted && holds(node, wish);
    if let Some(node) = host.nodes.iter().filter(fits).min_by_key(free_of) {
        return Ok(vec![share(node, wanted)]);
    }
    let mut nodes: Vec<&NumaNode> = host.nodes.iter().filter(|node| free_of(node) > 0).collect();
    nodes.sort_by_key(|node| Reverse(free_of(node)));
    let (mut shares, mut left) = (Vec::new(), wanted);
    for node in nodes {
        let part = free_of(&node).min(left);
        if part > 0 {
            shares.push(share(node, part));
            left -= part;
        }
    }
    if left > 0 {
        return Err(too_few(wish.cpus, "this host".to_owned(), free));
    }
    Ok(shares)
}

/// Whether a NUMA node has room for all the memory of a VM.
fn holds(node: &NumaNode, wish: &Wish) -> bool {
    match wish.huge_page {
        Some(size) => node.free_huge(size) * size >= wish.memory,
        None => node.available >= wish.memory,
    }
}

fn too_few(wanted: u32, of: String, free: &Cpus) -> NoPlace {
    let which = if free.is_empty() { "none".to_owned() } else { free.to_string() };
    NoPlace::TooFew { wanted, of, free: free.len(), which }
}

/// Processors of one NUMA node.
fn take(host: &Host, free: &Cpus, share: &NumaShare) -> Result<Vec<u32>, NoPlace> {
    let node = find(host, share.node)?;
    let free = node.cpus.and(free);
    let wanted = share.cpus as usize;
    if free.len() < wanted {
        return Err(too_few(share.cpus, format!("NUMA node {}", node.id), &free));
    }
    let mut taken = Vec::new();
    let whole = |core: &&Cpus| !core.is_empty() && core.without(&free).is_empty();
    for core in host.cores.iter().filter(whole) {
        if taken.len() + core.len() <= wanted {
            taken.extend(core.iter());
        }
    }
    let started: Cpus = taken.iter().copied().collect();
    let mut rest: Vec<Cpus> = host.cores.iter().map(|core| core.and(&free).without(&started)).collect();
    // A core of which least is free was begun by another VM.
    rest.retain(|core| !core.is_empty());
    rest.sort_by_key(Cpus::len);
    taken.extend(rest.iter().flat_map(Cpus::iter).take(wanted - taken.len()));
    Ok(taken)
}

fn find(host: &Host, id: u32) -> Result<&NumaNode, NoPlace> {
    let there = || host.nodes.iter().map(|node| node.id).collect();
    host.node(id).ok_or_else(|| NoPlace::NoSuchNode { wanted: id, there: there() })
}

/// NUMA nodes of the memory: those that were named for it, else those of the processors, or the nearest ones that have memory.
fn memory_nodes(host: &Host, shares: &[NumaShare]) -> Result<Vec<u32>, NoPlace> {
    let named: Vec<u32> =
        shares.iter().filter(|share| share.memory_mib > 0).map(|share| share.node).collect();
    let mut nodes = Vec::new();
    if named.is_empty() {
        nodes.extend(shares.iter().filter_map(|share| host.memory_near(share.node)));
    } else {
        for id in named {
            if find(host, id)?.memory == 0 {
                return Err(NoPlace::NoMemory(id));
            }
            nodes.push(id);
        }
    }
    nodes.sort_unstable();
    nodes.dedup();
    Ok(nodes)
}

/// Whether the memory of a VM fits on these nodes.
fn room(host: &Host, nodes: &[u32], wish: &Wish) -> Result<(), NoPlace> {
    let of = || nodes.iter().filter_map(|id| host.node(*id));
    if let Some(size) = wish.huge_page {
        let wanted = wish.memory.div_ceil(size);
        let free: u64 = of().map(|node| node.free_huge(size)).sum();
        if free < wanted {
            let node = nodes.first().copied().unwrap_or(0);
            let more = format!(
                "$(( $(cat /sys/devices/system/node/node{node}/hugepages/hugepages-{}kB/nr_hugepages) + {} ))",
                size >> 10,
                wanted - free
            );
            return Err(NoPlace::TooFewHuge { wanted, free, kib: size >> 10, node, more });
        }
        return Ok(());
    }
    let free: u64 = of().map(|node| node.available).sum();
    if free < wish.memory {
        let nodes = nodes.iter().copied().collect();
        return Err(NoPlace::TooLittleMemory { wanted_mib: wish.memory >> 20, nodes, free_mib: free >> 20 });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::host::HugePages;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn cpus(text: &str) -> Cpus {
        text.parse().unwrap()
    }

    /// Two NUMA nodes of four cores with two threads each, as Linux numbers them, and one that has memory only.
    fn host() -> Host {
        let node = |id, list: &str, memory, distances: [u32; 3]| NumaNode {
            id,
            cpus: cpus(list),
            memory,
            available: memory / 2,
            huge: BTreeMap::from([(2 << 20, HugePages { all: 8, free: 8 })]),
            promised: 0,
            distances: distances.to_vec(),
        };
        Host {
            cores: (0..8).map(|core| [core, core + 8].into_iter().collect()).collect(),
            nodes: vec![
                node(0, "0-3,8-11", 16 * GIB, [10, 20, 30]),
                node(1, "4-7,12-15", 0, [20, 10, 15]),
                node(2, "", 16 * GIB, [30, 15, 10]),
            ],
        }
    }

    fn wish(numa: &str, cpus: u32) -> Wish {
        let numa = numa.parse::<vmove_types::tuning::PinRequest>().unwrap().numa;
        Wish { numa, cpus, memory: GIB, huge_page: None }
    }

    #[test]
    fn whole_cores_are_taken_first_and_siblings_are_neighbours() {
        let place = choose(&host(), &cpus("0-15"), &wish("0:4", 0)).unwrap();
        assert_eq!(place, Place { cpus: vec![0, 8, 1, 9], memory: vec![0] });
        // Another VM has one thread of core 0: an odd one goes beside it, whole cores come from elsewhere.
        let place = choose(&host(), &cpus("1-15"), &wish("0:3", 0)).unwrap();
        assert_eq!(place.cpus, [1, 9, 8]);
    }

    #[test]
    fn without_a_named_node_the_fullest_that_has_room_is_chosen() {
        let place = choose(&host(), &cpus("0-3,8-11,4,12"), &wish("", 2)).unwrap();
        assert_eq!(
            (place.cpus, place.memory),
            (vec![0, 8], vec![0]),
            "node 1 has no memory, so it holds nothing"
        );
        let place = choose(&host(), &cpus("0-15"), &wish("", 10)).unwrap();
        assert_eq!(place.cpus.len(), 10);
        assert_eq!(place.memory, [0, 2], "the memory of node 1 is that of its nearest");
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_was_found() {
        let refused = |free: &str, wish: &Wish| choose(&host(), &cpus(free), wish).unwrap_err().to_string();
        assert!(refused("0-15", &wish("7:1", 0)).contains("one of the NUMA nodes 0-2, found 7"));
        assert!(refused("0-15", &wish("1:2:512", 0)).contains("NUMA node 1 has no memory"));
        assert!(
            refused("0-1,8-9", &wish("0:5", 0))
                .contains("expected 5 processors that no other VM has on NUMA node 0, found 4 (0-1,8-9)")
        );
        assert!(refused("", &wish("", 1)).contains("found 0 (none)"));
        let large = Wish { memory: 100 * GIB, ..wish("0:1", 0) };
        assert!(refused("0-15", &large).contains("expected 102400 MiB on NUMA node 0, found 8192 MiB free"));
        let huge = Wish { huge_page: Some(2 << 20), memory: 20 << 20, ..wish("0:1", 0) };
        let text = refused("0-15", &huge);
        assert!(
            text.contains("expected 10 free huge pages of 2048 kB on NUMA node 0, found 8: echo"),
            "{text}"
        );
        assert!(text.contains("+ 2 ))"), "{text}");
    }

    proptest! {
        /// No processor twice, only free ones, and as many as asked for.
        #[test]
        fn only_free_processors_are_given(free: u16, wanted in 0_u32..17) {
            let free: Cpus = (0..16).filter(|cpu| free & (1 << cpu) != 0).collect();
            let wish = Wish { memory: 0, ..wish("", wanted) };
            match choose(&host(), &free, &wish) {
                Ok(place) => {
                    let taken: Cpus = place.cpus.iter().copied().collect();
                    prop_assert_eq!(taken.len(), wanted as usize);
                    prop_assert_eq!(place.cpus.len(), wanted as usize);
                    prop_assert!(taken.without(&free).is_empty());
                }
                Err(_) => prop_assert!((wanted as usize) > free.len()),
            }
        }
    }
}
