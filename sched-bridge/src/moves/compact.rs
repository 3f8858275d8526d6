//! Brings clusters closer together.

use std::cmp::Reverse;

use super::changes::{moves_between, plan_of, settle, sum_hops};
use super::{Plan, PlanError, Resident, clusters_that_stay, occupancy};
use crate::model::{Fleet, Occupancy};
use crate::place::{Options, place};

/// Plans to bring clusters closer together: each is placed again as if it were not there, the one with most hops first. A cluster
/// moves only if that saves hops.
///
/// # Errors
/// An unknown cluster, or VMs that block each other with no spare place.
pub fn compact(fleet: &Fleet, residents: &[Resident], cluster: Option<&str>) -> Result<Plan, PlanError> {
    let is_unknown = |name: &&str| !residents.iter().any(|resident| resident.request.name.as_str() == *name);
    if let Some(name) = cluster.filter(is_unknown) {
        return Err(PlanError::Unknown { what: "cluster", name: name.to_owned() });
    }
    let asked =
        residents.iter().filter(|resident| cluster.is_none_or(|name| resident.request.name.as_str() == name));
    let stay = clusters_that_stay(asked);
    let used = occupancy(fleet, residents)?;
    let mut now = used.clone();
    let mut result = residents.to_vec();
    let mut candidates: Vec<(usize, u64)> = Vec::new();
    for (at, resident) in residents.iter().enumerate() {
        if resident.may_move() && cluster.is_none_or(|name| resident.request.name.as_str() == name) {
            candidates.push((at, sum_hops(fleet, resident)?));
        }
    }
    candidates.sort_by_key(|(at, hops)| (Reverse(*hops), *at));
    let mut moves = Vec::new();
    for (at, before) in candidates {
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
        let Some(after) = settle(fleet, &mut free, &result[at], &placement) else { continue };
        moves.extend(moves_between(&result[at], &after));
        result[at].assignments = after;
        now = free;
    }
    if cluster.is_none()
        && let Some(all) = place_all_again(fleet, &used, residents, &result)?
    {
        let pairs = residents.iter().zip(&all);
        let moves = pairs.flat_map(|(old, new)| moves_between(old, &new.assignments)).collect();
        if let Ok(mut plan) = plan_of(fleet, &used, residents, &all, moves, &[]) {
            plan.notes.extend(stay);
            return Ok(plan);
        }
    }
    let mut plan = plan_of(fleet, &used, residents, &result, moves, &[])?;
    plan.notes.extend(stay);
    Ok(plan)
}

/// Places all clusters again together, those with most VMs first: clusters that are interleaved cannot be separated one by one. None if
/// that saves no hops compared with `known`.
fn place_all_again(
    fleet: &Fleet,
    used: &Occupancy,
    residents: &[Resident],
    known: &[Resident],
) -> Result<Option<Vec<Resident>>, PlanError> {
    let mut free = used.clone();
    let mut order: Vec<usize> = (0..residents.len()).filter(|at| residents[*at].may_move()).collect();
    order.sort_by_key(|at| (Reverse(residents[*at].assignments.len()), *at));
    for assignment in order.iter().flat_map(|at| &residents[*at].assignments) {
        free.release(fleet, assignment)?;
    }
    let mut result = residents.to_vec();
    let (mut before, mut after) = (0, 0);
    for at in order {
        let Ok(placement) = place(fleet, &free, &residents[at].request, &Options::default()) else {
            return Ok(None);
        };
        let Some(settled) = settle(fleet, &mut free, &residents[at], &placement) else { return Ok(None) };
        result[at].assignments = settled;
        before += sum_hops(fleet, &known[at])?;
        after += sum_hops(fleet, &result[at])?;
    }
    Ok((after < before).then_some(result))
}
