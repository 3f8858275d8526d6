//! From a request to a placement: by the exact search where that is possible, or else by the heuristic.

use super::explain;
use super::grant::{Grant, grants};
use super::net::indexed;
use super::packer::Packer;
use super::placement::{Method, Placement};
use super::remote;
use super::request::{ClusterRequest, Domain};
use super::search::Found;
use super::task::{Task, assemble};
use super::tree::Chosen;
use super::wanted::Wanted;
use super::{Options, PlaceError, heuristic};
use crate::model::{Fleet, NodeIndex, NodeName, Occupancy};

/// See [`super::place`].
pub(super) fn solve(
    fleet: &Fleet,
    used: &Occupancy,
    request: &ClusterRequest,
    options: &Options,
) -> Result<Placement, PlaceError> {
    request.check()?;
    if let Some(apart) = remote::apart(request)? {
        let given = apart.give(fleet, used)?;
        let mut placement = solve(fleet, used, &apart.request, options)?;
        remote::add(&mut placement, given);
        return Ok(placement);
    }
    let task = Task::new(fleet, used, request)?;
    searched(&task, options)?.ok_or_else(|| explain::no_room(&task))
}

/// As [`super::place`]; none, if there is no room, without the reason.
pub(super) fn search(
    fleet: &Fleet,
    used: &Occupancy,
    request: &ClusterRequest,
    options: &Options,
) -> Result<Option<Placement>, PlaceError> {
    request.check()?;
    if let Some(apart) = remote::apart(request)? {
        let Ok(given) = apart.give(fleet, used) else { return Ok(None) };
        let mut found = search(fleet, used, &apart.request, options)?;
        found.iter_mut().for_each(|placement| remote::add(placement, given.clone()));
        return Ok(found);
    }
    searched(&Task::new(fleet, used, request)?, options)
}

fn searched(task: &Task<'_>, options: &Options) -> Result<Option<Placement>, PlaceError> {
    match exact(task, options)? {
        Exact::Searched(placement) => Ok(placement),
        Exact::Undecided => heuristic::solve(task, options),
    }
}

/// What the exact search has found.
enum Exact {
    /// The best placement, if there is any.
    Searched(Option<Placement>),
    /// It cannot tell: it would have to go through too many states.
    Undecided,
}

fn exact(task: &Task<'_>, options: &Options) -> Result<Exact, PlaceError> {
    let groups: Vec<_> = task.request.groups.iter().map(|group| (group, group.count)).collect();
    let Some(mut tree) = task.tree(&groups, task.used, None, None, options.exact_states)? else {
        return Ok(Exact::Undecided);
    };
    let mut found = tree.search(task.limits);
    let most = task.request.compactness.max_leaf_switches;
    let exceeded = |most: &u32| found.as_ref().is_some_and(|best| leaf_switches(task, &best.chosen) > *most);
    if let Some(most) = most.filter(exceeded) {
        // The best placement without this limit breaks it: search again, and count leaf switches on the way.
        let packed_exactly = tree.exact;
        match task.tree(&groups, task.used, None, Some(most), options.exact_states)? {
            None => return Ok(Exact::Undecided),
            Some(limited) => tree = limited,
        }
        found = tree.search(task.limits);
        tree.exact &= packed_exactly;
    }
    let method = if tree.exact { Method::Exact } else { Method::Heuristic };
    let Some(Found { chosen, .. }) = found else { return Ok(Exact::Searched(None)) };
    let mut granted: Vec<Vec<(NodeName, Grant)>> = groups.iter().map(|_| Vec::new()).collect();
    for (index, counts) in &chosen {
        let Some(grants) = grants(&mut tree.packer, task.fleet, task.used, *index, counts) else {
            return Ok(Exact::Undecided);
        };
        for grant in grants {
            granted[grant.group].push((task.fleet.node(*index).name.clone(), grant));
        }
    }
    assemble(task, granted, method).map(|placement| Exact::Searched(Some(placement)))
}

/// Leaf switches in use.
fn leaf_switches(task: &Task<'_>, chosen: &Chosen) -> u32 {
    let mut leaves: Vec<_> = chosen.iter().filter_map(|(index, _)| task.net.home[index.usize()]).collect();
    leaves.sort_unstable();
    leaves.dedup();
    u32::try_from(leaves.len()).unwrap_or(u32::MAX)
}

/// The number of VMs of the request's first group that each node of the fleet has room for, if the others get none. Remote GPUs do not count: they
/// are of no node.
///
/// # Errors
/// As for [`super::place`], except for lack of room.
pub fn capacities(fleet: &Fleet, used: &Occupancy, request: &ClusterRequest) -> Result<Vec<u32>, PlaceError> {
    request.check()?;
    let apart = remote::apart(request)?;
    let request = apart.as_ref().map_or(request, |apart| &apart.request);
    let task = Task::new(fleet, used, request)?;
    let groups = [(&request.groups[0], request.groups[0].count)];
    let Some(mut tree) = task.tree(&groups, used, None, None, usize::MAX)? else { return Ok(Vec::new()) };
    Ok(indexed(fleet).map(|(index, _)| tree.packed(index).most(0)).collect())
}

/// Places the VMs of a request of one group on nodes that somebody else has chosen (Slurm, an operator): the given number on each.
/// Limits of distance are ignored.
///
/// # Errors
/// A node that has no room for its VMs, a wrong number of VMs, a request of several groups.
pub fn place_at(
    fleet: &Fleet,
    used: &Occupancy,
    request: &ClusterRequest,
    nodes: &[(NodeIndex, u32)],
) -> Result<Placement, PlaceError> {
    request.check()?;
    let chosen: u32 = nodes.iter().map(|(_, vms)| *vms).sum();
    if request.groups.len() != 1 || chosen != request.count() {
        return Err(PlaceError::Contradiction {
            reason: format!(
                "nodes are given for {chosen} VMs, the request has {} VMs in {} groups; expected one group of {chosen} VMs",
                request.count(),
                request.groups.len()
            ),
        });
    }
    if let Some(apart) = remote::apart(request)? {
        let given = apart.give(fleet, used)?;
        let mut placement = place_at(fleet, used, &apart.request, nodes)?;
        remote::add(&mut placement, given);
        return Ok(placement);
    }
    let task = Task::new(fleet, used, request)?;
    let groups = [(&request.groups[0], request.count())];
    let per_node = request
        .anti_affinity
        .filter(|anti| anti.domain == Domain::Node)
        .map_or(u32::MAX, |anti| anti.at_most);
    let mut packer = Packer::new(Wanted::new(&groups, per_node)?);
    let mut granted = Vec::new();
    for (index, vms) in nodes {
        let counts = [u16::try_from(*vms).unwrap_or(u16::MAX)];
        let grants = grants(&mut packer, fleet, used, *index, &counts).ok_or_else(|| PlaceError::NoRoom {
            vms: *vms,
            fit: packer.node(fleet, used, *index).most(0),
            reason: format!("node {} was chosen for all of them", fleet.node(*index).name),
        })?;
        granted.extend(grants.into_iter().map(|grant| (fleet.node(*index).name.clone(), grant)));
    }
    assemble(&task, vec![granted], Method::Heuristic)
}
