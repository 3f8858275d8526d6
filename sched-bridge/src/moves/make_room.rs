//! Makes room for a request.

use super::changes::{moves_between, plan_of, settle};
use super::{Plan, PlanError, Resident, clusters_that_stay, occupancy};
use crate::model::{Assignment, Fleet, Occupancy};
use crate::place::{ClusterRequest, Options, Placement, place};

/// Most clusters that are moved for a request.
const MOST_MOVED: usize = 16;

/// Plans moves after which a request fits. Returns the plan and where the request then goes.
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
        return Ok((plan_of(fleet, &used, residents, residents, Vec::new(), &[])?, placement));
    }
    request.check()?;
    // Those with the least memory first: they are the cheapest to move.
    let mut candidates: Vec<usize> = (0..residents.len()).filter(|at| residents[*at].may_move()).collect();
    let memory = |at: usize| residents[at].assignments.iter().map(|vm| vm.memory().0).sum::<u64>();
    candidates.sort_by_key(|at| (memory(*at), *at));
    let stay = clusters_that_stay(residents.iter()).join("; ");
    let mut reason = if stay.is_empty() { "no cluster can be moved".to_owned() } else { stay };
    for count in 1..=candidates.len().min(MOST_MOVED) {
        for start in 0..=(candidates.len() - count).min(MOST_MOVED) {
            let displaced = &candidates[start..start + count];
            match place_before(fleet, &used, residents, displaced, request, &options) {
                Ok((mut plan, placement)) => {
                    plan.notes.extend(clusters_that_stay(residents.iter()));
                    return Ok((plan, placement));
                }
                Err(error) => reason = error.to_string(),
            }
        }
    }
    Err(PlanError::NoRoom { cluster: request.name.clone(), reason })
}

/// Places the request first, and after it the clusters that are displaced.
fn place_before(
    fleet: &Fleet,
    used: &Occupancy,
    residents: &[Resident],
    displaced: &[usize],
    request: &ClusterRequest,
    options: &Options,
) -> Result<(Plan, Placement), PlanError> {
    let mut free = used.clone();
    for assignment in displaced.iter().flat_map(|at| &residents[*at].assignments) {
        free.release(fleet, assignment)?;
    }
    let placement = place(fleet, &free, request, options)?;
    for assignment in &placement.assignments {
        free.take(fleet, assignment)?;
    }
    let mut result = residents.to_vec();
    let mut moves = Vec::new();
    for at in displaced {
        let resident = &residents[*at];
        let after = match take_all(fleet, &free, &resident.assignments) {
            // It is not in the way, and stays.
            Some(taken) => {
                free = taken;
                resident.assignments.clone()
            }
            None => place_elsewhere(fleet, &mut free, resident, options)?,
        };
        moves.extend(moves_between(resident, &after));
        result[*at].assignments = after;
    }
    Ok((plan_of(fleet, used, residents, &result, moves, &[])?, placement))
}

/// The fleet after all these assignments are taken. None if one of them is not free.
fn take_all(fleet: &Fleet, free: &Occupancy, assignments: &[Assignment]) -> Option<Occupancy> {
    let mut after = free.clone();
    for assignment in assignments {
        after.take(fleet, assignment).ok()?;
    }
    Some(after)
}

fn place_elsewhere(
    fleet: &Fleet,
    free: &mut Occupancy,
    resident: &Resident,
    options: &Options,
) -> Result<Vec<Assignment>, PlanError> {
    let placement = place(fleet, free, &resident.request, options)?;
    settle(fleet, free, resident, &placement).ok_or_else(|| PlanError::NoRoom {
        cluster: resident.request.name.clone(),
        reason: "its devices cannot be granted again".to_owned(),
    })
}
