//! Puts moves into a sequence in which each finds its destination free.

use super::{PlanError, Step};
use crate::model::{Assignment, ClusterName, Fleet, NodeName, Occupancy, OccupancyError};
use crate::place::{ClusterRequest, Options, place};

/// A VM that is to go from one place to another.
#[derive(Debug, Clone)]
pub(super) struct Move {
    pub cluster: ClusterName,
    pub from: Assignment,
    pub to: Assignment,
    /// What the VM alone asks for, to find a spare place for it.
    pub alone: ClusterRequest,
    /// It was moved to a spare place already.
    pub stepped_aside: bool,
}

/// Steps that make these moves, each to a destination that is free when its turn comes. Where there is a choice, the VM with the
/// least memory comes first; where no VM can move, the smallest goes to a spare place.
pub(super) fn in_sequence(
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
        if let Some(at) = left.iter().position(|next| has_free_destination(fleet, &used, next)) {
            let next = left.remove(at);
            push(&mut steps, &next, next.to.clone(), false);
            moved(fleet, &mut used, &next.from, &next.to)?;
            continue;
        }
        let spare = spare_place(fleet, &used, &left, avoid);
        let (at, place) = spare.ok_or(PlanError::Deadlock { vms: left.len() })?;
        push(&mut steps, &left[at], place.clone(), true);
        moved(fleet, &mut used, &left[at].from, &place)?;
        left[at].from = place;
        left[at].stepped_aside = true;
    }
    Ok(steps)
}

/// The destination is taken while the VM still has the source. Its remote GPUs are the same ones before and after.
fn moved(
    fleet: &Fleet,
    used: &mut Occupancy,
    from: &Assignment,
    to: &Assignment,
) -> Result<(), OccupancyError> {
    used.take(fleet, &to.without_remote())?;
    used.release(fleet, &from.without_remote())
}

/// A VM has both places while it moves: the destination must be free while it still has the source.
fn has_free_destination(fleet: &Fleet, used: &Occupancy, next: &Move) -> bool {
    used.clone().take(fleet, &next.to.without_remote()).is_ok()
}

/// A VM that can step aside, and a place for it. No VM steps aside twice.
fn spare_place(
    fleet: &Fleet,
    used: &Occupancy,
    left: &[Move],
    avoid: &[NodeName],
) -> Option<(usize, Assignment)> {
    // With all destinations taken, what is still free blocks nobody. Parts of a destination may be taken already.
    let mut reserved = used.clone();
    for next in left {
        let _ = reserved.take(fleet, &next.to.without_remote());
    }
    for (taken, blocks_nobody) in [(&reserved, true), (used, false)] {
        for (at, next) in left.iter().enumerate().filter(|(_, next)| !next.stepped_aside) {
            let mut excluded = vec![next.from.node.clone(), next.to.node.clone()];
            excluded.extend(avoid.iter().cloned());
            let Some(alone) = next.alone.clone().without_nodes(&excluded) else { continue };
            let found = place(fleet, taken, &alone, &Options::default()).ok();
            let Some(mut place) = found.and_then(|found| found.assignments.into_iter().next()) else {
                continue;
            };
            place.vm = next.from.vm.clone();
            let place = place.with_remote_of(&next.from);
            // A place that blocks others is better than none, if some VM can move then.
            if blocks_nobody || lets_others_move(fleet, used, left, at, &place) {
                return Some((at, place));
            }
        }
    }
    None
}

/// Whether some other VM can move once the VM of move `at` is in this place.
fn lets_others_move(fleet: &Fleet, used: &Occupancy, left: &[Move], at: usize, place: &Assignment) -> bool {
    let mut after = used.clone();
    let has_moved = moved(fleet, &mut after, &left[at].from, place).is_ok();
    let mut others = left.iter().enumerate().filter(|(other, _)| *other != at);
    has_moved && others.any(|(_, waiting)| has_free_destination(fleet, &after, waiting))
}

/// Adds a step. It waits for steps that free a part of its destination, and for steps of the same VM.
fn push(steps: &mut Vec<Step>, next: &Move, to: Assignment, spare: bool) {
    let waits_for = |before: &&Step| before.from.vm == next.from.vm || before.from.node == to.node;
    let after = steps.iter().filter(waits_for).map(|before| before.id).collect();
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
