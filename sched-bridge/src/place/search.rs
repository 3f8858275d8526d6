//! Goes through all limits of distance, the smallest first, and for each through all places within it.
//!
//! In a tree, nodes that are all within D links of each other lie within D/2 links of one switch or link. So it is enough to look at
//! the surroundings of every switch and link.

use std::collections::VecDeque;

use super::net::{Block, CostTerms, loss};
use super::request::{ClusterRequest, Domain, Mode};
use super::space::{Cost, Entry};
use super::tree::{Chosen, Tree, Within};
use crate::model::NodeIndex;
use crate::topology::SwitchId;

/// A place in which to look for room.
#[derive(Debug, Clone)]
pub(super) enum Place {
    /// One node.
    Node(NodeIndex),
    /// All around a switch or a link.
    Ball(Ball),
}

/// The surroundings of a switch or a link.
#[derive(Debug, Clone)]
pub(super) struct Ball {
    /// A switch that is above all of it.
    pub root: SwitchId,
    /// Its nodes; none if these are all nodes below the root.
    pub within: Option<Within>,
}

/// Limits of distance of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Most hops between two VMs.
    pub hops: u32,
    /// Greatest height of a switch between two VMs.
    pub height: u32,
}

impl Limits {
    pub fn of(request: &ClusterRequest) -> Self {
        let compactness = &request.compactness;
        let level = compactness.level.filter(|_| compactness.mode == Mode::Required);
        Self {
            hops: compactness.max_hops.unwrap_or(u32::MAX).min(if level == Some(Domain::Node) {
                0
            } else {
                u32::MAX
            }),
            height: level.map_or(u32::MAX, Domain::height),
        }
    }
}

/// The best nodes that were found.
#[derive(Debug)]
pub(super) struct Found {
    pub cost: Cost,
    pub chosen: Chosen,
}

impl Tree<'_, '_> {
    /// The smallest limit of hops with enough room, and for it the least cost.
    pub fn search(&mut self, limits: Limits) -> Option<Found> {
        let mut best = self.one_node();
        for hops in 1..=self.net.topology.height() * 2 {
            if hops > limits.hops || (self.order.compact && best.is_some()) {
                break;
            }
            for ball in self.balls(hops, limits) {
                if let Some(found) = self.in_ball(&ball, best.as_ref().map(|best| best.cost)) {
                    best = Some(found);
                }
            }
        }
        best
    }

    /// The best node for all VMs.
    fn one_node(&mut self) -> Option<Found> {
        let mut best: Option<Found> = None;
        for at in 0..self.net.home.len() {
            let index = NodeIndex(u32::try_from(at).unwrap_or(u32::MAX));
            let found = self.on_node(index);
            best = found.into_iter().chain(best).min_by_key(|found| (found.cost, found.chosen[0].0));
        }
        best
    }

    /// This node for all VMs, if it has room.
    pub fn on_node(&mut self, index: NodeIndex) -> Option<Found> {
        if !self.allowed[index.usize()] {
            return None;
        }
        let table = self.node(index);
        let entry = table.iter().find(|entry| u64::from(entry.vms) == self.vms)?;
        let mut cost = entry.cost;
        if let Some(home) = self.net.home[index.usize()] {
            if !self.fixed.is_some_and(|fixed| fixed.leaves[home.usize()]) {
                self.space.with_leaf(entry)?;
                cost = cost + self.order.cost(CostTerms { leaves: 1, ..CostTerms::default() });
            }
            cost = cost + self.upwards(Some(home), entry)?;
        }
        Some(Found { cost, chosen: vec![(index, self.space.counts(entry))] })
    }

    /// The best nodes in a ball, if they cost less than what is known.
    pub fn in_ball(&mut self, ball: &Ball, known: Option<Cost>) -> Option<Found> {
        if !self.could_hold(ball) {
            return None;
        }
        let table = self.below(ball.root, ball.within.as_ref());
        let entry = self.space.complete(&table)?;
        let cost = entry.cost + self.upwards(self.net.topology.switch(ball.root).parent, &entry)?;
        if known.is_some_and(|known| known <= cost) {
            return None;
        }
        let mut chosen = Vec::new();
        self.trace(ball.root, ball.within.as_ref(), &entry, &mut chosen);
        Some(Found { cost, chosen })
    }

    /// A quick check: whether each group alone has room.
    fn could_hold(&mut self, ball: &Ball) -> bool {
        let groups = self.units.len();
        let mut left: Vec<u32> = self.packer.wanted.limits.clone();
        let mut stack = vec![ball.root];
        while let Some(id) = stack.pop() {
            for index in self.net.direct[id.usize()].clone() {
                if ball.within.as_ref().is_some_and(|within| !within.contains(&index)) {
                    continue;
                }
                let packed = self.packed(index);
                for (group, left) in left.iter_mut().enumerate().take(groups) {
                    *left = left.saturating_sub(packed.most(group));
                }
            }
            if left.iter().all(|left| *left == 0) {
                return true;
            }
            stack.extend(&self.net.topology.switch(id).children);
        }
        false
    }

    /// Loss of free blocks from a switch upwards. None if anti-affinity forbids this number of VMs below one of the switches.
    fn upwards(&self, first: Option<SwitchId>, entry: &Entry) -> Option<Cost> {
        let taken = self.taken(&self.space.counts(entry));
        let mut cost = Cost::default();
        let mut at = first;
        while let Some(id) = at {
            let switch = self.net.topology.switch(id);
            if entry.vms > self.most_below(id) {
                return None;
            }
            let block = Block::of(self.net.topology, id);
            let fragmentation = loss(block, self.net.free_switch[id.usize()], taken);
            cost = cost + self.order.cost(CostTerms { fragmentation, ..CostTerms::default() });
            at = switch.parent;
        }
        Some(cost)
    }

    /// All areas in which the maximum distance between two nodes is exactly the given number of hops.
    pub fn balls(&self, hops: u32, limits: Limits) -> Vec<Ball> {
        let links = hops + 1;
        let mut balls = Vec::new();
        for center in self.net.topology.ids() {
            if links.is_multiple_of(2) {
                balls.extend(self.ball(&[(center, links / 2)], limits));
            } else if let Some(parent) = self.net.topology.switch(center).parent {
                balls.extend(self.ball(&[(center, links / 2), (parent, links / 2)], limits));
            }
        }
        balls
    }

    /// The surroundings of one centre, or of the two ends of a link. None if all nodes are closer together than the limit: then a
    /// smaller limit has covered them.
    fn ball(&self, centers: &[(SwitchId, u32)], limits: Limits) -> Option<Ball> {
        let topology = self.net.topology;
        if centers.iter().any(|(id, _)| topology.switch(*id).height > limits.height) {
            return None;
        }
        let mut within = Within::default();
        // Ways out of the centre that reach the full distance; there must be at least two.
        let mut full: Vec<usize> = Vec::new();
        let mut root = centers[0].0;
        let mut queue: VecDeque<(SwitchId, Option<SwitchId>, u32, usize)> = VecDeque::new();
        let mut ways = 0;
        for (at, (center, radius)) in centers.iter().enumerate() {
            let other = (centers.len() == 2).then(|| centers[1 - at].0);
            if *radius == 0 {
                return None;
            }
            if centers.len() == 2 {
                queue.push_back((*center, other, *radius, at));
                continue;
            }
            if *radius == 1 {
                within.extend(&self.net.direct[center.usize()]);
                full.extend([0, 1]);
            } else {
                within.extend(&self.net.direct[center.usize()]);
                for next in self.around(*center, limits) {
                    queue.push_back((next, Some(*center), radius - 1, ways));
                    ways += 1;
                }
            }
        }
        while let Some((id, from, left, way)) = queue.pop_front() {
            if topology.switch(id).depth < topology.switch(root).depth {
                root = id;
            }
            within.extend(&self.net.direct[id.usize()]);
            if left == 1 {
                if !self.net.direct[id.usize()].is_empty() && !full.contains(&way) {
                    full.push(way);
                }
                continue;
            }
            let onward = self.around(id, limits).into_iter().filter(|next| Some(*next) != from);
            queue.extend(onward.map(|next| (next, Some(id), left - 1, way)));
        }
        if full.len() < 2 || within.is_empty() {
            return None;
        }
        let nodes = u32::try_from(within.len()).unwrap_or(u32::MAX);
        let within = (nodes != self.net.below[root.usize()]).then_some(within);
        Some(Ball { root, within })
    }

    fn around(&self, id: SwitchId, limits: Limits) -> Vec<SwitchId> {
        let switch = self.net.topology.switch(id);
        let parent = switch.parent.filter(|parent| self.net.topology.switch(*parent).height <= limits.height);
        switch.children.iter().copied().chain(parent).collect()
    }
}
