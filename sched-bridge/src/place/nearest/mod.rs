//! What is the nearest that would fit, for a request that does not.
//!
//! Every answer was placed: a part of the request is relaxed, or a part of the fleet is thought to be free, and the search runs again.
//! Nothing is guessed. One change is tried at a time, since each of them is a decision of whoever made the request.

mod amounts;
mod change;
mod conditions;
mod limits;
mod others;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

pub use change::Change;

use super::placement::Placement;
use super::request::ClusterRequest;
use super::{Options, solve};
use crate::model::{Fleet, NodeName, Occupancy};

/// A change with which a request would fit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fit {
    /// What is changed.
    #[serde(flatten)]
    pub change: Change,
    /// The same for people: `fits with 3 GPUs instead of 4 on node2`.
    pub text: String,
    /// The nodes where its VMs would be.
    pub nodes: Vec<NodeName>,
    /// The most hops between two of them.
    pub max_hops: u32,
}

/// What was tried for a request that does not fit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nearest {
    /// The changes with which it would fit, the nearest first: limits of distance; preferences; amounts, those first of which the smallest
    /// share is given up; descriptions of devices and nodes; nodes that take no VMs; leases of others.
    pub fits: Vec<Fit>,
    /// Placements that were tried.
    pub tried: u32,
    /// All changes were tried. Otherwise the time was over before.
    pub complete: bool,
}

/// Tries changes of a request that does not fit, as long as `may_go_on` says so before each placement.
#[must_use]
pub fn nearest(
    fleet: &Fleet,
    used: &Occupancy,
    request: &ClusterRequest,
    options: &Options,
    may_go_on: &mut dyn FnMut() -> bool,
) -> Nearest {
    let mut trials =
        Trials { fleet, used, request, options, may_go_on, found: Vec::new(), tried: 0, complete: true };
    trials.limits();
    trials.amounts();
    trials.preferences();
    trials.descriptions();
    trials.others();
    let Trials { mut found, tried, complete, .. } = trials;
    // Stable: in the order in which they were tried, otherwise.
    found.sort_by_key(|fit| fit.change.rank());
    Nearest { fits: found, tried, complete }
}

struct Trials<'a> {
    fleet: &'a Fleet,
    used: &'a Occupancy,
    request: &'a ClusterRequest,
    options: &'a Options,
    may_go_on: &'a mut dyn FnMut() -> bool,
    found: Vec<Fit>,
    tried: u32,
    complete: bool,
}

impl Trials<'_> {
    /// Where a request would be placed, on this fleet.
    fn place_on(&mut self, fleet: &Fleet, used: &Occupancy, request: &ClusterRequest) -> Option<Placement> {
        if !(self.may_go_on)() {
            self.complete = false;
            return None;
        }
        self.tried += 1;
        // A changed request may contradict itself; then it fits nowhere.
        solve::search(fleet, used, request, self.options).ok().flatten()
    }

    /// Where the changed request would be placed.
    fn place(&mut self, change: impl FnOnce(&mut ClusterRequest)) -> Option<Placement> {
        let mut request = self.request.clone();
        change(&mut request);
        self.place_on(self.fleet, self.used, &request)
    }

    /// The largest number below `asked`, and at least `least`, with which it fits. `step` is how exactly.
    fn largest(
        &mut self,
        least: u64,
        asked: u64,
        step: u64,
        change: impl Fn(&mut ClusterRequest, u64),
    ) -> Option<(u64, Placement)> {
        if least >= asked {
            return None;
        }
        let mut best = (least, self.place(|request| change(request, least))?);
        let mut above = asked;
        while above - best.0 > step {
            let middle = best.0 + (above - best.0) / 2;
            match self.place(|request| change(request, middle)) {
                Some(placement) => best = (middle, placement),
                None => above = middle,
            }
        }
        Some(best)
    }

    /// The smallest number above `asked`, and at most `most`, with which it fits.
    fn smallest(
        &mut self,
        asked: u32,
        most: u32,
        change: impl Fn(&mut ClusterRequest, u32),
    ) -> Option<(u32, Placement)> {
        if most <= asked {
            return None;
        }
        let mut best = (most, self.place(|request| change(request, most))?);
        let mut below = asked;
        while best.0 - below > 1 {
            let middle = below + (best.0 - below) / 2;
            match self.place(|request| change(request, middle)) {
                Some(placement) => best = (middle, placement),
                None => below = middle,
            }
        }
        Some(best)
    }

    fn add(&mut self, change: Change, placement: &Placement) {
        let nodes: BTreeSet<NodeName> =
            placement.assignments.iter().map(|assignment| assignment.node.clone()).collect();
        let nodes: Vec<NodeName> = nodes.into_iter().collect();
        let several = self.request.groups.len() > 1;
        let text = format!("{}{}", change.text(several), on(&nodes));
        self.found.push(Fit { change, text, nodes, max_hops: placement.score.max_hops });
    }
}

/// ` on n1, n2 and 7 more nodes`.
fn on(nodes: &[NodeName]) -> String {
    const NAMED: usize = 4;
    let named: Vec<&str> = nodes.iter().take(NAMED).map(NodeName::as_str).collect();
    match nodes.len() {
        0 => String::new(),
        all if all > NAMED => format!(" on {} and {} more nodes", named.join(", "), all - NAMED),
        _ => format!(" on {}", named.join(", ")),
    }
}
