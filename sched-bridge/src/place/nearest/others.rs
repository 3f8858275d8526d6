//! What others would have to do: nodes that take no VMs, and leases.

use std::collections::BTreeSet;

use super::{Change, Trials};
use crate::model::{Fleet, NodeName, NodeState, Occupancy};
use crate::place::placement::Placement;

/// From so many nodes on, it is not tried which of them can be left out.
const MOST_NODES: usize = 16;

impl Trials<'_> {
    pub(super) fn others(&mut self) {
        if !self.request.only_nodes.is_empty() || !self.request.not_nodes.is_empty() {
            let fits = self.place(|request| {
                request.only_nodes.clear();
                request.not_nodes.clear();
            });
            if let Some(placement) = fits {
                self.add(Change::ExcludedNodes, &placement);
            }
        }
        for state in [NodeState::Drained, NodeState::Down] {
            self.nodes(state);
        }
        if let Some(placement) = self.place_on(self.fleet, &Occupancy::new(self.fleet), self.request) {
            self.add(Change::OtherLeases, &placement);
        }
    }

    /// The nodes in this state are thought to be up.
    fn nodes(&mut self, state: NodeState) {
        let in_state = self.fleet.nodes().iter().filter(|node| node.state == state);
        let all: BTreeSet<NodeName> = in_state.map(|node| node.name.clone()).collect();
        if all.is_empty() {
            return;
        }
        let Some(mut placement) = self.with_up(&all) else { return };
        let mut names = used(&all, &placement);
        if names.len() <= MOST_NODES {
            for name in names.clone() {
                let fewer: BTreeSet<NodeName> =
                    names.iter().filter(|known| **known != name).cloned().collect();
                // Without any of them, it does not fit: that is why we are here.
                if fewer.is_empty() {
                    break;
                }
                if let Some(found) = self.with_up(&fewer) {
                    names = used(&fewer, &found);
                    placement = found;
                }
            }
        }
        self.add(Change::Nodes { state, names: names.into_iter().collect() }, &placement);
    }

    fn with_up(&mut self, names: &BTreeSet<NodeName>) -> Option<Placement> {
        let mut nodes = self.fleet.nodes().to_vec();
        for node in nodes.iter_mut().filter(|node| names.contains(&node.name)) {
            node.state = NodeState::Up;
        }
        // The same nodes in the same sequence: what is taken remains so.
        let fleet = Fleet::new(nodes, self.fleet.topology().clone()).ok()?;
        self.place_on(&fleet, self.used, self.request)
    }
}

fn used(names: &BTreeSet<NodeName>, placement: &Placement) -> BTreeSet<NodeName> {
    let nodes = placement.assignments.iter().map(|assignment| &assignment.node);
    nodes.filter(|node| names.contains(*node)).cloned().collect()
}
