//! Empties a node.

use super::changes::{plan_of, request_of_one};
use super::sequence::Move;
use super::{Plan, PlanError, Resident, occupancy, stays};
use crate::model::{Assignment, Fleet, NodeIndex, NodeName, Occupancy, VmName};
use crate::place::{ClusterRequest, PlaceError, Score, capacities, obeys, place_at, score};

/// Most places that are compared for one VM.
const MOST_COMPARED: usize = 32;

/// Plans to empty a node: its VMs go to where they are closest to the rest of their clusters. VMs that have a device with which they cannot move
/// stay, and a note says so.
///
/// # Errors
/// A VM that cannot leave; then nothing is planned.
pub fn evacuate(fleet: &Fleet, residents: &[Resident], node: &NodeName) -> Result<Plan, PlanError> {
    if fleet.find(node.as_str()).is_none() {
        return Err(PlanError::Unknown { what: "node", name: node.to_string() });
    }
    let used = occupancy(fleet, residents)?;
    let mut after = used.clone();
    let mut moves = Vec::new();
    let mut result = residents.to_vec();
    let mut stay = Vec::new();
    for resident in &mut result {
        for vm in 0..resident.assignments.len() {
            let from = resident.assignments[vm].clone();
            if from.node != *node {
                continue;
            }
            if let Some(why) = from.stays() {
                stay.push(stays(&from, why));
                continue;
            }
            let to = best_other_place(fleet, &after, resident, vm, std::slice::from_ref(node))?
                .with_remote_of(&from);
            // What it leaves stays taken: no VM may come to this node.
            after.take(fleet, &to.without_remote())?;
            moves.push(Move {
                cluster: resident.request.name.clone(),
                from,
                to: to.clone(),
                alone: request_of_one(resident, vm),
                stepped_aside: false,
            });
            resident.assignments[vm] = to;
        }
    }
    let mut plan = plan_of(fleet, &used, residents, &result, moves, std::slice::from_ref(node))?;
    plan.notes.extend(stay);
    Ok(plan)
}

/// The best other place for one VM: close to the rest of its cluster, and within the cluster's limits.
fn best_other_place(
    fleet: &Fleet,
    used: &Occupancy,
    resident: &Resident,
    vm: usize,
    avoid: &[NodeName],
) -> Result<Assignment, PlanError> {
    let now = &resident.assignments[vm];
    let stuck = |reason: String| PlanError::Stuck { vm: now.vm.clone(), node: now.node.clone(), reason };
    if resident.pinned.contains(&now.vm) {
        return Err(stuck(
            "it cannot move now, because it is being migrated or its lease names its resources".to_owned(),
        ));
    }
    let Some(request) = request_of_one(resident, vm).without_nodes(avoid) else {
        return Err(stuck("its request allows no other node".to_owned()));
    };
    let others = resident.assignments.iter().enumerate().filter(|(at, _)| *at != vm);
    let others: Vec<NodeIndex> = others.filter_map(|(_, other)| fleet.find(other.node.as_str())).collect();
    let put = |to: &Assignment| {
        let mut all = resident.assignments.clone();
        all[vm] = to.clone();
        all
    };
    best_place(fleet, used, &resident.request, (&request, &now.vm), &others, put)?.map_err(stuck)
}

/// The best place for a VM, which needs what `one` says: close to `others`, which are the nodes of the rest of its cluster, and within the limits of
/// the cluster. `put`: where the VMs of the cluster are then. Or why there is none.
pub(super) fn best_place(
    fleet: &Fleet,
    used: &Occupancy,
    cluster: &ClusterRequest,
    (one, name): (&ClusterRequest, &VmName),
    others: &[NodeIndex],
    put: impl Fn(&Assignment) -> Vec<Assignment>,
) -> Result<Result<Assignment, String>, PlaceError> {
    let mut best: Option<((u32, u64), Score, Assignment)> = None;
    let mut reason = "no other node has room for it".to_owned();
    let mut compared = 0;
    // The nearest nodes first; of those that are equally near, the best for the whole cluster.
    for (hops, index) in nearest(fleet, others, &capacities(fleet, used, one)?) {
        if compared == MOST_COMPARED || best.as_ref().is_some_and(|(known, ..)| hops > *known) {
            break;
        }
        let Ok(found) = place_at(fleet, used, one, &[(index, 1)]) else { continue };
        let Some(to) = found.assignments.into_iter().next() else { continue };
        let to = Assignment { vm: name.clone(), ..to };
        let all = put(&to);
        let score = score(fleet, used, cluster, &all)?;
        match obeys(fleet, cluster, &all, &score) {
            Err(limit) => reason = limit,
            Ok(()) => {
                compared += 1;
                if best.as_ref().is_none_or(|(_, known, _)| score < *known) {
                    best = Some((hops, score, to));
                }
            }
        }
    }
    Ok(best.map(|(.., to)| to).ok_or(reason))
}

/// Nodes with room, sorted by greatest and by total hops to others; without nodes that are not connected to these.
fn nearest(fleet: &Fleet, others: &[NodeIndex], room: &[u32]) -> Vec<((u32, u64), NodeIndex)> {
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
