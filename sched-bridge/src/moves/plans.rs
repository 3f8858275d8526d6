//! Which VMs should go where.

use std::collections::BTreeMap;

use super::order::{Move, order};
use super::{Hops, Plan, PlanError, Resident, occupancy};
use crate::model::{Assignment, Fleet, MemoryMib, NodeIndex, NodeName, Occupancy};
use crate::place::{
    ClusterRequest, Options, PlaceError, Placement, Score, VmGroup, capacities, obeys, place, place_at, score,
};

/// Most clusters that are moved out of the way for a request.
const MOST_MOVED: usize = 16;
/// Most places that are tried to the end for a VM that has to leave.
const MOST_TRIED: usize = 32;

/// Empties a node: its VMs go to where they are closest to the rest of their clusters.
///
/// # Errors
/// A VM that cannot leave; nothing is planned then.
pub fn evacuate(fleet: &Fleet, residents: &[Resident], node: &NodeName) -> Result<Plan, PlanError> {
    if fleet.find(node.as_str()).is_none() {
        return Err(PlanError::Unknown { what: "node", name: node.to_string() });
    }
    let used = occupancy(fleet, residents)?;
    let mut after = used.clone();
    let mut moves = Vec::new();
    let mut result = residents.to_vec();
    for resident in &mut result {
        for at in 0..resident.assignments.len() {
            let from = resident.assignments[at].clone();
            if from.node != *node {
                continue;
            }
            let to = elsewhere(fleet, &after, resident, at, std::slice::from_ref(node))?;
            // Only its new place is taken: what it leaves must stay free for nobody, the node is to be empty.
            after.take(fleet, &to)?;
            moves.push(Move {
                cluster: resident.request.name.clone(),
                from,
                to: to.clone(),
                alone: alone(resident, at),
                aside: false,
            });
            resident.assignments[at] = to;
        }
    }
    finish(fleet, &used, residents, &result, moves, std::slice::from_ref(node))
}

/// Brings clusters closer together: each is placed anew as if it were not there, the one with most to gain first. A cluster stays
/// where it is unless that saves hops.
///
/// # Errors
/// A cluster that is not there, or VMs that stand in each other's way with no spare place.
pub fn compact(fleet: &Fleet, residents: &[Resident], cluster: Option<&str>) -> Result<Plan, PlanError> {
    let missing = |name: &&str| !residents.iter().any(|resident| resident.request.name.as_str() == *name);
    if let Some(name) = cluster.filter(missing) {
        return Err(PlanError::Unknown { what: "cluster", name: name.to_owned() });
    }
    let used = occupancy(fleet, residents)?;
    let mut now = used.clone();
    let mut result = residents.to_vec();
    let mut order: Vec<(usize, u64)> = Vec::new();
    for (at, resident) in residents.iter().enumerate() {
        if resident.pinned.is_empty() && cluster.is_none_or(|name| resident.request.name.as_str() == name) {
            order.push((at, hops(fleet, resident)?));
        }
    }
    order.sort_by_key(|(at, hops)| (std::cmp::Reverse(*hops), *at));
    let mut moves = Vec::new();
    for (at, before) in order {
        if before == 0 {
            continue;
        }
        let mut free = now.clone();
        for assignment in &result[at].assignments {
            free.release(fleet, assignment)?;
        }
        let Ok(placement) = place(fleet, &free, &result[at].request, &Options::default()) else { continue };
        if placement.score.sum_hops >= before {
            continue;
        }
        let Some(places) = settle(fleet, &mut free, &result[at], &placement) else { continue };
        moves.extend(moved(&result[at], &places));
        result[at].assignments = places;
        now = free;
    }
    if cluster.is_none() {
        if let Some(all) = all_anew(fleet, &used, residents, &result)? {
            let moves =
                residents.iter().zip(&all).flat_map(|(old, new)| moved(old, &new.assignments)).collect();
            if let Ok(plan) = finish(fleet, &used, residents, &all, moves, &[]) {
                return Ok(plan);
            }
        }
    }
    finish(fleet, &used, residents, &result, moves, &[])
}

/// All clusters placed anew together, those with most VMs first: clusters that sit crosswise cannot be untangled one by one. None
/// if that saves nothing against what is known.
fn all_anew(
    fleet: &Fleet,
    used: &Occupancy,
    residents: &[Resident],
    known: &[Resident],
) -> Result<Option<Vec<Resident>>, PlanError> {
    let mut free = used.clone();
    let mut order: Vec<usize> = (0..residents.len()).filter(|at| residents[*at].pinned.is_empty()).collect();
    order.sort_by_key(|at| (std::cmp::Reverse(residents[*at].assignments.len()), *at));
    for assignment in order.iter().flat_map(|at| &residents[*at].assignments) {
        free.release(fleet, assignment)?;
    }
    let mut result = residents.to_vec();
    let (mut before, mut after) = (0, 0);
    for at in order {
        let Ok(found) = place(fleet, &free, &residents[at].request, &Options::default()) else {
            return Ok(None);
        };
        let Some(places) = settle(fleet, &mut free, &residents[at], &found) else { return Ok(None) };
        result[at].assignments = places;
        before += hops(fleet, &known[at])?;
        after += hops(fleet, &result[at])?;
    }
    Ok((after < before).then_some(result))
}

/// Moves others out of the way until a request fits. Returns the plan and where the request then goes.
///
/// # Errors
/// Nothing that can be moved makes enough room.
pub fn make_room(
    fleet: &Fleet,
    residents: &[Resident],
    request: &ClusterRequest,
) -> Result<(Plan, Placement), PlanError> {
    let used = occupancy(fleet, residents)?;
    let options = Options::default();
    if let Ok(placement) = place(fleet, &used, request, &options) {
        return Ok((finish(fleet, &used, residents, residents, Vec::new(), &[])?, placement));
    }
    request.check()?;
    // The least memory first: those are the cheapest to move.
    let mut candidates: Vec<usize> =
        (0..residents.len()).filter(|at| residents[*at].pinned.is_empty()).collect();
    let memory = |at: usize| residents[at].assignments.iter().map(|vm| vm.memory().0).sum::<u64>();
    candidates.sort_by_key(|at| (memory(*at), *at));
    let mut last = "no cluster can be moved".to_owned();
    for many in 1..=candidates.len().min(MOST_MOVED) {
        for start in 0..=(candidates.len() - many).min(MOST_MOVED) {
            match out_of_the_way(fleet, &used, residents, &candidates[start..start + many], request, &options)
            {
                Ok(found) => return Ok(found),
                Err(error) => last = error.to_string(),
            }
        }
    }
    Err(PlanError::NoRoom { cluster: request.name.clone(), reason: last })
}

/// Places the request first and then those who were moved for it.
fn out_of_the_way(
    fleet: &Fleet,
    used: &Occupancy,
    residents: &[Resident],
    moved_ones: &[usize],
    request: &ClusterRequest,
    options: &Options,
) -> Result<(Plan, Placement), PlanError> {
    let mut free = used.clone();
    for at in moved_ones {
        for assignment in &residents[*at].assignments {
            free.release(fleet, assignment)?;
        }
    }
    let placement = place(fleet, &free, request, options)?;
    for assignment in &placement.assignments {
        free.take(fleet, assignment)?;
    }
    let mut result = residents.to_vec();
    let mut moves = Vec::new();
    for at in moved_ones {
        let mut pairs = Vec::new();
        let resident = &residents[*at];
        // Whoever is not in the way stays.
        let stays =
            resident.assignments.iter().all(|assignment| free.clone().take(fleet, assignment).is_ok());
        if stays {
            for assignment in &resident.assignments {
                if free.take(fleet, assignment).is_ok() {
                    pairs.push(assignment.clone());
                }
            }
        }
        if pairs.len() < resident.assignments.len() {
            for assignment in &pairs {
                free.release(fleet, assignment)?;
            }
            let found = place(fleet, &free, &resident.request, options)?;
            let no_room = || PlanError::NoRoom {
                cluster: resident.request.name.clone(),
                reason: "its devices cannot be granted again".to_owned(),
            };
            pairs = settle(fleet, &mut free, resident, &found).ok_or_else(no_room)?;
        }
        moves.extend(moved(resident, &pairs));
        result[*at].assignments = pairs;
    }
    Ok((finish(fleet, used, residents, &result, moves, &[])?, placement))
}

/// Makes moves of a placement: VMs of whose group there is to be one on their node stay, with what they have; the others go where
/// some are still missing. Takes all places from what is free. None if what is left of a node does not suit who is to come.
fn settle(
    fleet: &Fleet,
    free: &mut Occupancy,
    resident: &Resident,
    placement: &Placement,
) -> Option<Vec<Assignment>> {
    let groups: Vec<usize> = resident.request.vm_names().ok()?.into_iter().map(|(_, group)| group).collect();
    let mut wanted: BTreeMap<(usize, NodeName), u32> = BTreeMap::new();
    for (assignment, group) in placement.assignments.iter().zip(&groups) {
        *wanted.entry((*group, assignment.node.clone())).or_default() += 1;
    }
    let mut after = free.clone();
    let mut places: Vec<Option<Assignment>> = vec![None; resident.assignments.len()];
    for (at, own) in resident.assignments.iter().enumerate() {
        if let Some(count) = wanted.get_mut(&(groups[at], own.node.clone())).filter(|count| **count > 0) {
            *count -= 1;
            after.take(fleet, own).ok()?;
            places[at] = Some(own.clone());
        }
    }
    for (at, own) in
        resident.assignments.iter().enumerate().filter(|(at, _)| places[*at].is_none()).collect::<Vec<_>>()
    {
        let slot = wanted.iter_mut().find(|((group, _), count)| *group == groups[at] && **count > 0)?;
        *slot.1 -= 1;
        let index = fleet.find(slot.0.1.as_str())?;
        let found = place_at(fleet, &after, &alone(resident, at), &[(index, 1)]).ok()?;
        let to = Assignment { vm: own.vm.clone(), ..found.assignments.into_iter().next()? };
        after.take(fleet, &to).ok()?;
        places[at] = Some(to);
    }
    *free = after;
    places.into_iter().collect()
}

/// Moves of those whose node or devices change.
fn moved(resident: &Resident, pairs: &[Assignment]) -> Vec<Move> {
    let mut moves = Vec::new();
    for (at, (from, to)) in resident.assignments.iter().zip(pairs).enumerate() {
        if from != to {
            let cluster = resident.request.name.clone();
            moves.push(Move {
                cluster,
                from: from.clone(),
                to: to.clone(),
                alone: alone(resident, at),
                aside: false,
            });
        }
    }
    moves
}

/// What one VM of a cluster asks for by itself.
fn alone(resident: &Resident, vm: usize) -> ClusterRequest {
    let mut left = u32::try_from(vm).unwrap_or(u32::MAX);
    let mut group: Option<&VmGroup> = None;
    for own in &resident.request.groups {
        if left < own.count {
            group = Some(own);
            break;
        }
        left -= own.count;
    }
    let mut request = resident.request.clone();
    request.groups = group.into_iter().map(|group| VmGroup { count: 1, ..group.clone() }).collect();
    request.compactness = crate::place::Compactness::default();
    request.anti_affinity = None;
    request.near = None;
    request
}

/// The best other place for one VM: close to the rest of its cluster, and within the limits the cluster set.
fn elsewhere(
    fleet: &Fleet,
    used: &Occupancy,
    resident: &Resident,
    vm: usize,
    avoid: &[NodeName],
) -> Result<Assignment, PlanError> {
    let own = &resident.assignments[vm];
    let stuck = |reason: String| PlanError::Stuck { vm: own.vm.clone(), node: own.node.clone(), reason };
    if resident.pinned.contains(&own.vm) {
        return Err(stuck("it cannot move now".to_owned()));
    }
    let Some(request) = without(alone(resident, vm), avoid) else {
        return Err(stuck("the request allows no other node".to_owned()));
    };
    let mut best: Option<((u32, u64), Score, Assignment)> = None;
    let mut last = "no other node has room for it".to_owned();
    let mut tries = 0;
    // The nearest first; of those that are equally near, the best for the whole cluster.
    for (hops, index) in nearest(fleet, resident, vm, &capacities(fleet, used, &request)?) {
        if tries == MOST_TRIED || best.as_ref().is_some_and(|(known, ..)| hops > *known) {
            break;
        }
        let Ok(found) = place_at(fleet, used, &request, &[(index, 1)]) else { continue };
        let Some(to) = found.assignments.into_iter().next() else { continue };
        let to = Assignment { vm: own.vm.clone(), ..to };
        let mut all = resident.assignments.clone();
        all[vm] = to.clone();
        let score = score(fleet, used, &resident.request, &all)?;
        match obeys(fleet, &resident.request, &all, &score) {
            Err(reason) => last = reason,
            Ok(()) => {
                tries += 1;
                if best.as_ref().is_none_or(|(_, known, _)| score < *known) {
                    best = Some((hops, score, to));
                }
            }
        }
    }
    best.map(|(.., to)| to).ok_or_else(|| stuck(last))
}

/// Nodes with room, by most and sum of hops to the other VMs of the cluster; without those that cannot reach them.
fn nearest(fleet: &Fleet, resident: &Resident, vm: usize, room: &[u32]) -> Vec<((u32, u64), NodeIndex)> {
    let others = resident.assignments.iter().enumerate().filter(|(at, _)| *at != vm);
    let others: Vec<NodeIndex> = others.filter_map(|(_, own)| fleet.find(own.node.as_str())).collect();
    let mut nodes = Vec::new();
    for at in (0..room.len()).filter(|at| room[*at] > 0) {
        let index = NodeIndex(u32::try_from(at).unwrap_or(u32::MAX));
        let hops: Option<Vec<u32>> = others.iter().map(|other| fleet.hops(index, *other)).collect();
        let Some(hops) = hops else { continue };
        let sum = hops.iter().map(|hops| u64::from(*hops)).sum();
        nodes.push(((hops.into_iter().max().unwrap_or(0), sum), index));
    }
    nodes.sort_unstable();
    nodes
}

/// The same request without some nodes. None if it then has none left.
pub(super) fn without(mut request: ClusterRequest, nodes: &[NodeName]) -> Option<ClusterRequest> {
    let limited = !request.only_nodes.is_empty();
    for node in nodes {
        request.only_nodes.remove(node);
        request.not_nodes.insert(node.clone());
    }
    (!limited || !request.only_nodes.is_empty()).then_some(request)
}

fn hops(fleet: &Fleet, resident: &Resident) -> Result<u64, PlaceError> {
    let empty = Occupancy::new(fleet);
    Ok(score(fleet, &empty, &resident.request, &resident.assignments)?.sum_hops)
}

fn finish(
    fleet: &Fleet,
    used: &Occupancy,
    before: &[Resident],
    after: &[Resident],
    moves: Vec<Move>,
    avoid: &[NodeName],
) -> Result<Plan, PlanError> {
    let mut sums = Hops::default();
    for (old, new) in before.iter().zip(after) {
        if moves.iter().any(|own| own.cluster == old.request.name) {
            sums.before += hops(fleet, old)?;
            sums.after += hops(fleet, new)?;
        }
    }
    let pinned = before.iter().filter(|resident| !resident.pinned.is_empty());
    let notes = pinned
        .map(|resident| format!("cluster {} has VMs that cannot move", resident.request.name))
        .collect();
    let steps = order(fleet, used, moves, avoid)?;
    let memory = MemoryMib(steps.iter().map(|step| step.memory.0).sum());
    Ok(Plan { steps, memory, hops: sums, notes })
}
