//! From where clusters are and should be to the moves between, and to a plan.

use std::collections::BTreeMap;

use super::sequence::{Move, in_sequence};
use super::{Hops, Plan, PlanError, Resident};
use crate::model::{Assignment, DeviceKind, Fleet, MemoryMib, NodeName, Occupancy};
use crate::place::{ClusterRequest, Compactness, PlaceError, Placement, VmGroup, place_at, score};

/// New assignments for a cluster by a placement. A VM stays, with what it has, if its node is to have one of its group; the others
/// go where VMs are still missing. Everything is taken from `free`. None if the rest of a node has no room for who should come.
pub(super) fn settle(
    fleet: &Fleet,
    free: &mut Occupancy,
    resident: &Resident,
    placement: &Placement,
) -> Option<Vec<Assignment>> {
    let groups: Vec<usize> = resident.request.vm_names().ok()?.into_iter().map(|(_, group)| group).collect();
    let mut missing: BTreeMap<(usize, NodeName), u32> = BTreeMap::new();
    for (assignment, group) in placement.assignments.iter().zip(&groups) {
        *missing.entry((*group, assignment.node.clone())).or_default() += 1;
    }
    let mut after = free.clone();
    let mut settled: Vec<Option<Assignment>> = vec![None; resident.assignments.len()];
    for (vm, now) in resident.assignments.iter().enumerate() {
        if let Some(count) = missing.get_mut(&(groups[vm], now.node.clone())).filter(|count| **count > 0) {
            *count -= 1;
            after.take(fleet, now).ok()?;
            settled[vm] = Some(now.clone());
        }
    }
    for (vm, now) in resident.assignments.iter().enumerate() {
        if settled[vm].is_some() {
            continue;
        }
        let mut places = missing.iter_mut();
        let ((_, node), count) = places.find(|((group, _), count)| *group == groups[vm] && **count > 0)?;
        *count -= 1;
        let index = fleet.find(node.as_str())?;
        let found = place_at(fleet, &after, &request_of_one(resident, vm), &[(index, 1)]).ok()?;
        let to =
            Assignment { vm: now.vm.clone(), ..found.assignments.into_iter().next()? }.with_remote_of(now);
        after.take(fleet, &to).ok()?;
        settled[vm] = Some(to);
    }
    *free = after;
    settled.into_iter().collect()
}

/// Moves of the VMs whose node or devices change.
pub(super) fn moves_between(resident: &Resident, after: &[Assignment]) -> Vec<Move> {
    let mut moves = Vec::new();
    for (vm, (from, to)) in resident.assignments.iter().zip(after).enumerate() {
        if from != to {
            moves.push(Move {
                cluster: resident.request.name.clone(),
                from: from.clone(),
                to: to.clone(),
                alone: request_of_one(resident, vm),
                stepped_aside: false,
            });
        }
    }
    moves
}

/// What one VM of a cluster needs of a node, without the limits of the cluster. `vm` is its index. Its remote GPUs stay the same ones.
pub(super) fn request_of_one(resident: &Resident, vm: usize) -> ClusterRequest {
    let mut before = u32::try_from(vm).unwrap_or(u32::MAX);
    let mut group: Option<&VmGroup> = None;
    for candidate in &resident.request.groups {
        if before < candidate.count {
            group = Some(candidate);
            break;
        }
        before -= candidate.count;
    }
    let mut request = one_of(&resident.request, group);
    for alternative in request.groups.iter_mut().flat_map(|group| &mut group.alternatives) {
        alternative.devices.retain(|need| need.filter.kind != DeviceKind::RemoteGpu);
    }
    request
}

/// The same for one VM of a group. None if there is no such group.
pub(super) fn request_of_group(request: &ClusterRequest, group: usize) -> Option<ClusterRequest> {
    request.groups.get(group).map(|group| one_of(request, Some(group)))
}

fn one_of(request: &ClusterRequest, group: Option<&VmGroup>) -> ClusterRequest {
    let mut request = request.clone();
    let group = group.map(|group| VmGroup { count: 1, ..group.clone() });
    request.groups = group.into_iter().collect();
    request.compactness = Compactness::default();
    request.anti_affinity = None;
    request.near = None;
    request
}

/// Hops of a cluster, summed over all pairs of its VMs.
pub(super) fn sum_hops(fleet: &Fleet, resident: &Resident) -> Result<u64, PlaceError> {
    let empty = Occupancy::new(fleet);
    Ok(score(fleet, &empty, &resident.request, &resident.assignments)?.sum_hops)
}

/// The plan with these moves. `before` and `after` are all clusters; `avoid` are nodes that no VM may wait on.
pub(super) fn plan_of(
    fleet: &Fleet,
    used: &Occupancy,
    before: &[Resident],
    after: &[Resident],
    moves: Vec<Move>,
    avoid: &[NodeName],
) -> Result<Plan, PlanError> {
    let mut hops = Hops::default();
    for (old, new) in before.iter().zip(after) {
        if moves.iter().any(|next| next.cluster == old.request.name) {
            hops.before += sum_hops(fleet, old)?;
            hops.after += sum_hops(fleet, new)?;
        }
    }
    let pinned = before.iter().filter(|resident| !resident.pinned.is_empty());
    let notes = pinned
        .map(|resident| format!("cluster {} has VMs that cannot move", resident.request.name))
        .collect();
    let steps = in_sequence(fleet, used, moves, avoid)?;
    let memory = MemoryMib(steps.iter().map(|step| step.memory.0).sum());
    Ok(Plan { steps, memory, hops, notes })
}
