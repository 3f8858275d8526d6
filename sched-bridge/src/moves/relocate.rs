//! Moves a cluster to other nodes.

use super::changes::{moves_between, plan_of, settle};
use super::{Plan, PlanError, Resident, occupancy};
use crate::model::{Fleet, NodeName};
use crate::place::{Options, PlaceError, place};

/// Plans to move a cluster off these nodes: it is placed again as if it were not there, on others. VMs stay on a node that is to have one of their
/// group.
///
/// # Errors
/// An unknown cluster, one that cannot move, or no room elsewhere.
pub fn relocate(
    fleet: &Fleet,
    residents: &[Resident],
    cluster: &str,
    away: &[NodeName],
) -> Result<Plan, PlanError> {
    let unknown = |what, name: &str| PlanError::Unknown { what, name: name.to_owned() };
    if let Some(node) = away.iter().find(|node| fleet.find(node.as_str()).is_none()) {
        return Err(unknown("node", node.as_str()));
    }
    let at = residents.iter().position(|resident| resident.request.name.as_str() == cluster);
    let at = at.ok_or_else(|| unknown("cluster", cluster))?;
    let resident = &residents[at];
    if let Some(vm) = resident.assignments.iter().find(|vm| resident.pinned.contains(&vm.vm)) {
        let reason =
            "it cannot move now, because it is being migrated or its lease names its resources".to_owned();
        return Err(PlanError::Stuck { vm: vm.vm.clone(), node: vm.node.clone(), reason });
    }
    if let Some((vm, why)) = resident.staying() {
        return Err(PlanError::Stuck { vm: vm.vm.clone(), node: vm.node.clone(), reason: why.to_owned() });
    }
    let used = occupancy(fleet, residents)?;
    let mut free = used.clone();
    for assignment in &resident.assignments {
        free.release(fleet, assignment)?;
    }
    let no_room = |reason: String| PlanError::NoRoom { cluster: resident.request.name.clone(), reason };
    let elsewhere = resident.request.clone().without_nodes(away);
    let elsewhere = elsewhere.ok_or_else(|| no_room("its request allows no other node".to_owned()))?;
    let placement = match place(fleet, &free, &elsewhere, &Options::default()) {
        Ok(placement) => placement,
        Err(error @ PlaceError::NoRoom { .. }) => return Err(no_room(error.to_string())),
        Err(error) => return Err(error.into()),
    };
    let mut result = residents.to_vec();
    result[at].assignments = settle(fleet, &mut free, resident, &placement).ok_or_else(|| {
        no_room("its VMs do not fit beside each other on the nodes that were found".to_owned())
    })?;
    let moves = moves_between(resident, &result[at].assignments);
    plan_of(fleet, &used, residents, &result, moves, away)
}
