//! For clusters with many kinds of VMs, or very many VMs: groups are placed one after the other, each exactly while the others stay
//! where they are, until nothing gets better.

use super::grant::{Grant, grants};
use super::net::{Net, Order, indexed};
use super::placement::{Method, Placement};
use super::request::VmGroup;
use super::search::{Ball, Place};
use super::task::{Task, assemble};
use super::tree::Fixed;
use super::{Options, PlaceError};
use crate::model::{Assignment, NodeIndex, Occupancy, VmName};

/// Most VMs of one group that are placed at once.
const CHUNK: u32 = 256;
/// Most areas of one size that are tried to the end.
const TRIES: usize = 8;
/// Most times that all groups are placed again.
const ROUNDS: usize = 4;

/// Some VMs of a group, and where they are.
struct Chunk<'a> {
    group: usize,
    vms: &'a VmGroup,
    count: u32,
    grants: Vec<(NodeIndex, Grant)>,
}

pub(super) fn solve(task: &Task<'_>, options: &Options) -> Result<Option<Placement>, PlaceError> {
    let mut best: Option<Placement> = None;
    let order = Order::of(task.request.compactness.mode);
    let need: u64 = task.request.groups.iter().map(|g| task.unit.per_vm(g) * u64::from(g.count)).sum();
    for hops in 0..=task.net.topology.height() * 2 {
        if hops > task.limits.hops || (best.is_some() && order.compact) {
            break;
        }
        let mut places = places(task, hops)?;
        places.retain(|place| free(&task.net, place) >= need);
        // The fullest place that may have room first, so that large blocks stay free.
        places.sort_by_key(|place| free(&task.net, place));
        let mut tries = 0;
        for place in places {
            if let Some(placement) = in_place(task, &place, options)? {
                tries += 1;
                if best.as_ref().is_none_or(|best| order.key(placement.score) < order.key(best.score)) {
                    best = Some(placement);
                }
            }
            if tries == TRIES {
                break;
            }
        }
    }
    Ok(best)
}

/// Areas whose nodes are at most the given number of hops apart; single nodes for 0.
fn places(task: &Task<'_>, hops: u32) -> Result<Vec<Place>, PlaceError> {
    if hops > 0 {
        let nobody = task.tree(&[], task.used, None, None, 1)?;
        let balls = nobody.map(|tree| tree.balls(hops, task.limits)).unwrap_or_default();
        return Ok(balls.into_iter().map(Place::Ball).collect());
    }
    let allowed = indexed(task.fleet).filter(|(index, _)| task.allowed[index.usize()]);
    Ok(allowed.map(|(index, _)| Place::Node(index)).collect())
}

fn free(net: &Net<'_>, place: &Place) -> u64 {
    match place {
        Place::Node(index) => net.free_node[index.usize()],
        Place::Ball(Ball { root, within: None }) => net.free_switch[root.usize()],
        Place::Ball(Ball { within: Some(within), .. }) => {
            within.iter().map(|index| net.free_node[index.usize()]).sum()
        }
    }
}

/// The groups in chunks, those with the largest VMs first.
fn chunks<'a>(task: &Task<'a>) -> Vec<Chunk<'a>> {
    let mut chunks = Vec::new();
    for (group, vms) in task.request.groups.iter().enumerate() {
        let mut left = vms.count;
        while left > 0 {
            let count = left.min(CHUNK);
            chunks.push(Chunk { group, vms, count, grants: Vec::new() });
            left -= count;
        }
    }
    let size = |vms: &VmGroup| {
        let first = vms.alternatives.first();
        let cores = first.map_or(0, |first| first.vcpus);
        (task.unit.per_vm(vms), cores, first.map_or(0, |first| first.memory.0))
    };
    chunks.sort_by_key(|chunk| std::cmp::Reverse(size(chunk.vms)));
    chunks
}

fn in_place(task: &Task<'_>, place: &Place, options: &Options) -> Result<Option<Placement>, PlaceError> {
    // Whoever comes first may take what others need more: then another group comes first.
    for first in 0..task.request.groups.len().max(1) {
        let mut chunks = chunks(task);
        let by = first.min(chunks.len());
        chunks.rotate_left(by);
        if fill(task, place, &mut chunks, options)? {
            return improve(task, place, chunks, options).map(Some);
        }
    }
    Ok(None)
}

/// Places one chunk after the other. False if one of them has no room.
fn fill(
    task: &Task<'_>,
    place: &Place,
    chunks: &mut [Chunk<'_>],
    options: &Options,
) -> Result<bool, PlaceError> {
    for at in 0..chunks.len() {
        match replace(task, place, chunks, at, options)? {
            Some(grants) => chunks[at].grants = grants,
            None => return Ok(false),
        }
    }
    Ok(true)
}

fn improve(
    task: &Task<'_>,
    place: &Place,
    mut chunks: Vec<Chunk<'_>>,
    options: &Options,
) -> Result<Placement, PlaceError> {
    let mut best = finish(task, &chunks)?;
    let order = Order::of(task.request.compactness.mode);
    for _ in 0..ROUNDS {
        let before = best.score;
        for at in 0..chunks.len() {
            let old = std::mem::take(&mut chunks[at].grants);
            match replace(task, place, &chunks, at, options)? {
                Some(grants) => chunks[at].grants = grants,
                None => {
                    chunks[at].grants = old;
                    continue;
                }
            }
            let now = finish(task, &chunks)?;
            if order.key(now.score) <= order.key(best.score) {
                best = now;
            } else {
                chunks[at].grants = old;
            }
        }
        if best.score == before {
            break;
        }
    }
    Ok(best)
}

/// Places one chunk where it is best while all others stay. None if there is no room.
fn replace(
    task: &Task<'_>,
    place: &Place,
    chunks: &[Chunk<'_>],
    at: usize,
    options: &Options,
) -> Result<Option<Vec<(NodeIndex, Grant)>>, PlaceError> {
    let (fixed, used) = others(task, chunks, at);
    let most = task.request.compactness.max_leaf_switches;
    let leaves = most.map(|most| {
        let taken = fixed.leaves.iter().filter(|used| **used).count();
        most.saturating_sub(u32::try_from(taken).unwrap_or(u32::MAX))
    });
    let chunk = &chunks[at];
    let states = options.exact_states.max(16 * CHUNK as usize);
    let group = [(chunk.vms, chunk.count)];
    let Some(mut tree) = task.tree(&group, &used, Some(&fixed), leaves, states)? else { return Ok(None) };
    let found = match place {
        Place::Node(index) => tree.on_node(*index),
        Place::Ball(ball) => tree.in_ball(ball, None),
    };
    let Some(found) = found else { return Ok(None) };
    let mut placed = Vec::new();
    for (index, counts) in &found.chosen {
        let Some(grants) = grants(&mut tree.packer, task.fleet, &used, *index, counts) else {
            return Ok(None);
        };
        placed.extend(grants.into_iter().map(|grant| (*index, grant)));
    }
    Ok(Some(placed))
}

/// What the other chunks mean for one.
fn others(task: &Task<'_>, chunks: &[Chunk<'_>], at: usize) -> (Fixed, Occupancy) {
    let nodes = task.net.home.len();
    let mut fixed =
        Fixed { on_node: vec![0; nodes], leaves: vec![false; task.net.direct.len()], ..Fixed::default() };
    let mut used = task.used.clone();
    let others = chunks.iter().enumerate().filter(|(number, _)| *number != at);
    for (index, grant) in others.flat_map(|(_, chunk)| &chunk.grants) {
        fixed.on_node[index.usize()] += 1;
        if let Some(home) = task.net.home[index.usize()] {
            fixed.leaves[home.usize()] = true;
        }
        let (Ok(vm), node) = (VmName::new("other"), task.fleet.node(*index).name.clone()) else { continue };
        let (devices, shares) = (grant.devices.clone(), grant.shares.clone());
        // It was granted from what is free.
        used.take(task.fleet, &Assignment { vm, node, devices, shares }).unwrap_or_default();
    }
    let on: Vec<NodeIndex> = (0..nodes)
        .filter(|at| fixed.on_node[*at] > 0)
        .map(|at| NodeIndex(u32::try_from(at).unwrap_or(u32::MAX)))
        .collect();
    let below = task.net.sum_up(|index| u64::from(fixed.on_node[index.usize()]));
    fixed.below = below.into_iter().map(|count| u32::try_from(count).unwrap_or(u32::MAX)).collect();
    fixed.hops = hops(&task.net, &on, &fixed.on_node);
    (fixed, used)
}

/// Hops from each node to all VMs that stay.
fn hops(net: &Net<'_>, on: &[NodeIndex], vms: &[u32]) -> Vec<u64> {
    let mut by_leaf: std::collections::BTreeMap<_, u64> = std::collections::BTreeMap::new();
    for index in on {
        if let Some(home) = net.home[index.usize()] {
            *by_leaf.entry(home).or_default() += u64::from(vms[index.usize()]);
        }
    }
    let to_leaf = |leaf| -> u64 {
        let each = by_leaf
            .iter()
            .map(|(other, vms)| vms * u64::from(net.topology.switch_hops(leaf, *other).unwrap_or(1000)));
        each.sum()
    };
    let leaves: Vec<u64> = net
        .topology
        .ids()
        .map(|id| if net.direct[id.usize()].is_empty() { 0 } else { to_leaf(id) })
        .collect();
    let of = |(at, home): (usize, &Option<crate::topology::SwitchId>)| match home {
        // VMs on the node itself are 0 hops away, but their leaf switch was counted.
        Some(home) => leaves[home.usize()] - u64::from(vms[at]),
        None => 0,
    };
    net.home.iter().enumerate().map(of).collect()
}

fn finish(task: &Task<'_>, chunks: &[Chunk<'_>]) -> Result<Placement, PlaceError> {
    let mut granted: Vec<Vec<_>> = task.request.groups.iter().map(|_| Vec::new()).collect();
    for chunk in chunks {
        for (index, grant) in &chunk.grants {
            let copy =
                Grant { group: chunk.group, devices: grant.devices.clone(), shares: grant.shares.clone() };
            granted[chunk.group].push((task.fleet.node(*index).name.clone(), copy));
        }
    }
    assemble(task, granted, Method::Heuristic)
}
