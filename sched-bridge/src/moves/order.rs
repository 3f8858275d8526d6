//! An order in which moves can be done.

use super::plans::without;
use super::{PlanError, Step};
use crate::model::{Assignment, ClusterName, Fleet, NodeName, Occupancy};
use crate::place::{ClusterRequest, Options, place};

/// A VM that is to go from one place to another.
#[derive(Debug, Clone)]
pub(super) struct Move {
    pub cluster: ClusterName,
    pub from: Assignment,
    pub to: Assignment,
    /// What the VM alone asks for, to find it a spare place.
    pub alone: ClusterRequest,
    /// It has stepped aside already.
    pub aside: bool,
}

/// Puts moves in an order in which each finds its destination free. Those with the least memory come first where there is a choice;
/// where none can go on, the smallest VM steps aside.
pub(super) fn order(
    fleet: &Fleet,
    used: &Occupancy,
    moves: Vec<Move>,
    avoid: &[NodeName],
) -> Result<Vec<Step>, PlanError> {
    let mut used = used.clone();
    let mut left = moves;
    left.sort_by(|a, b| a.from.memory().cmp(&b.from.memory()).then_with(|| a.from.vm.cmp(&b.from.vm)));
    let mut steps: Vec<Step> = Vec::new();
    while !left.is_empty() {
        if let Some(at) = left.iter().position(|next| is_free(fleet, &used, next)) {
            let next = left.remove(at);
            push(&mut steps, &next, next.to.clone(), false);
            used.take(fleet, &next.to)?;
            used.release(fleet, &next.from)?;
            continue;
        }
        let (at, aside) = spare(fleet, &used, &left, avoid).ok_or(PlanError::Deadlock { vms: left.len() })?;
        push(&mut steps, &left[at], aside.clone(), true);
        used.take(fleet, &aside)?;
        used.release(fleet, &left[at].from)?;
        left[at].from = aside;
        left[at].aside = true;
    }
    Ok(steps)
}

/// A VM is on both sides while it moves: its destination must be free while it still holds its source.
fn is_free(fleet: &Fleet, used: &Occupancy, next: &Move) -> bool {
    used.clone().take(fleet, &next.to).is_ok()
}

/// Someone who can step aside, and where to: not in the way of anyone who waits. Nobody steps aside twice.
fn spare(fleet: &Fleet, used: &Occupancy, left: &[Move], avoid: &[NodeName]) -> Option<(usize, Assignment)> {
    // With everything that is still to come taken as well, what is left is in nobody's way. Parts of it may be taken already.
    let mut reserved = used.clone();
    for next in left {
        let _ = reserved.take(fleet, &next.to);
    }
    for (reserved, strict) in [(&reserved, true), (used, false)] {
        for (at, next) in left.iter().enumerate().filter(|(_, next)| !next.aside) {
            let mut not = vec![next.from.node.clone(), next.to.node.clone()];
            not.extend(avoid.iter().cloned());
            let Some(alone) = without(next.alone.clone(), &not) else { continue };
            let found = place(fleet, reserved, &alone, &Options::default()).ok();
            if let Some(mut aside) = found.and_then(|found| found.assignments.into_iter().next()) {
                aside.vm = next.from.vm.clone();
                // In the way of others is better than no way at all, but only for what then moves on for sure.
                let unblocks = || {
                    let mut after = used.clone();
                    let moved = after.take(fleet, &aside).is_ok() && after.release(fleet, &next.from).is_ok();
                    moved
                        && left
                            .iter()
                            .enumerate()
                            .any(|(other, waits)| other != at && is_free(fleet, &after, waits))
                };
                if strict || unblocks() {
                    return Some((at, aside));
                }
            }
        }
    }
    None
}

/// A step waits for those that free a part of its destination, and for those of the same VM.
fn push(steps: &mut Vec<Step>, next: &Move, to: Assignment, spare: bool) {
    let waits = |before: &&Step| before.from.vm == next.from.vm || before.from.node == to.node;
    let after = steps.iter().filter(waits).map(|before| before.id).collect();
    steps.push(Step {
        id: steps.len(),
        cluster: next.cluster.clone(),
        memory: next.from.memory(),
        from: next.from.clone(),
        to,
        after,
        spare,
    });
}
