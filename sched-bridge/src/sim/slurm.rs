//! What Slurm's topology/tree would have chosen, as far as nodes go.
//!
//! Written after `_eval_nodes_topo` of Slurm's sources (select/cons_tres of 22.05, topology/tree of 24.05 and later) for jobs without
//! required nodes, on nodes of one weight. Leaf switches are taken one after the other; on each, nodes in their order, all that they
//! have. What differs is which leaf is next, see [`SlurmTree`]. That the model chooses the same nodes as a real Slurm 22.05 is a
//! test of `vmove-bridge`.

use crate::model::{Fleet, NodeIndex, Occupancy};
use crate::place::{ClusterRequest, PlaceError, Placement, capacities, place_at};
use crate::topology::{SwitchId, Topology};

/// Chooses nodes like Slurm does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SlurmTree {
    /// 22.05 to 23.11: a leaf is enough if it has as many usable nodes as are asked for, however little is free on them.
    V22,
    /// 24.05 and later: it must have room for all tasks that are left, too.
    #[default]
    V24,
    /// What the Topology Guide describes, by free resources: the lowest switch with enough of them, below it leaves by best fit.
    /// Kinder than any Slurm on nodes that jobs share.
    Guide,
}

impl SlurmTree {
    /// Places the VMs of a request of one group on the nodes that Slurm would take for as many tasks (`--ntasks`), or for as many
    /// nodes (`--nodes`) if no node has room for two of them.
    ///
    /// # Errors
    /// As [`crate::place::place`].
    pub fn place(
        self,
        fleet: &Fleet,
        used: &Occupancy,
        request: &ClusterRequest,
    ) -> Result<Placement, PlaceError> {
        let room = capacities(fleet, used, request)?;
        let most = capacities(fleet, &Occupancy::new(fleet), request)?.into_iter().max().unwrap_or(0);
        let nodes = if most > 1 { 1 } else { request.count() };
        let chosen = slurm_nodes(self, fleet, &room, request.count(), nodes);
        let chosen = chosen.ok_or_else(|| PlaceError::NoRoom {
            vms: request.count(),
            fit: room.iter().sum::<u32>().min(request.count()),
            reason: "no switch has enough free below it".to_owned(),
        })?;
        place_at(fleet, used, request, &chosen)
    }
}

/// Nodes for so many tasks, on at least so many nodes, and how many tasks on each, given how many each node has room for. None if
/// there is not enough below any switch.
#[must_use]
pub fn slurm_nodes(
    slurm: SlurmTree,
    fleet: &Fleet,
    room: &[u32],
    tasks: u32,
    nodes: u32,
) -> Option<Vec<(NodeIndex, u32)>> {
    let below: Vec<Below> = fleet.topology().ids().map(|id| Below::new(fleet, room, id)).collect();
    let top = below.iter().enumerate().filter(|(_, at)| at.room >= tasks && at.nodes.len() >= nodes as usize);
    let height = |at: usize| fleet.topology().switches()[at].height;
    let top = if slurm == SlurmTree::Guide {
        top.min_by_key(|(at, below)| (height(*at), below.nodes.len(), *at))
    } else {
        top.max_by_key(|(at, _)| (height(*at), *at))
    };
    let leaves = leaves(fleet.topology(), id(top?.0));
    let mut job = Job {
        slurm,
        topology: fleet.topology(),
        counts: below.iter().map(|at| i64::try_from(at.nodes.len()).unwrap_or(i64::MAX)).collect(),
        room: below.iter().map(|at| i64::from(at.room)).collect(),
        distance: vec![0; below.len()],
        nodes: i64::from(nodes),
        tasks: i64::from(tasks),
    };
    let mut chosen = Vec::new();
    while let Some(leaf) = job.next_leaf(&leaves) {
        for index in &below[leaf].nodes {
            // One task is kept for each further node that is asked for.
            let kept = (job.nodes - 1).max(0);
            let here = i64::from(room[index.usize()]).min(job.tasks - kept);
            let here = u32::try_from(here).ok().filter(|here| *here > 0)?;
            chosen.push((*index, here));
            job.nodes -= 1;
            job.tasks -= i64::from(here);
            if job.nodes <= 0 && job.tasks <= 0 {
                return Some(chosen);
            }
        }
        job.use_up(leaf);
    }
    None
}

/// What can be used below a switch.
struct Below {
    nodes: Vec<NodeIndex>,
    room: u32,
}

impl Below {
    fn new(fleet: &Fleet, room: &[u32], id: SwitchId) -> Self {
        let below = fleet.topology().nodes_below(id).into_iter();
        let mut nodes: Vec<NodeIndex> = below.filter_map(|name| fleet.find(name.as_str())).collect();
        nodes.retain(|index| room[index.usize()] > 0);
        nodes.sort_unstable();
        let room = nodes.iter().map(|index| room[index.usize()]).sum();
        Self { nodes, room }
    }
}

/// A job that has got some of its nodes.
struct Job<'a> {
    slurm: SlurmTree,
    topology: &'a Topology,
    /// Usable nodes below each switch.
    counts: Vec<i64>,
    /// Tasks that have room below each switch.
    room: Vec<i64>,
    /// Links from each switch to all leaves in use, summed up.
    distance: Vec<u32>,
    /// Nodes and tasks that are left.
    nodes: i64,
    tasks: i64,
}

impl Job<'_> {
    /// The leaf that is used next.
    fn next_leaf(&self, leaves: &[SwitchId]) -> Option<usize> {
        let usable = leaves.iter().map(|leaf| leaf.usize()).filter(|leaf| self.counts[*leaf] > 0);
        if self.slurm == SlurmTree::Guide {
            let fits = |leaf: &usize| self.room[*leaf] >= self.tasks && self.counts[*leaf] >= self.nodes;
            let enough = usable.clone().filter(fits).min_by_key(|leaf| self.room[*leaf]);
            return enough.or_else(|| usable.rev().max_by_key(|leaf| self.room[*leaf]));
        }
        usable.reduce(|best, leaf| if self.better(leaf, best) { leaf } else { best })
    }

    /// Whether a leaf is taken rather than one that comes before it.
    fn better(&self, leaf: usize, best: usize) -> bool {
        let (order, fits) = self.compare(leaf, best);
        let closer = match self.slurm {
            SlurmTree::V22 => order >= 0,
            SlurmTree::V24 | SlurmTree::Guide => fits,
        };
        (self.distance[leaf] < self.distance[best] && closer)
            || (self.distance[leaf] == self.distance[best] && order > 0)
    }

    /// 1 if the first of two switches is the better fit, -1 if the second is; and whether the first fits. Where neither does, the
    /// switches above them are compared.
    fn compare(&self, mut a: usize, mut b: usize) -> (i32, bool) {
        let fits = |at: usize| {
            self.counts[at] >= self.nodes && (self.slurm == SlurmTree::V22 || self.room[at] >= self.tasks)
        };
        let parent = |at: usize| self.topology.switches()[at].parent.map_or(at, SwitchId::usize);
        loop {
            let fit = fits(a);
            match (fit, fits(b)) {
                (true, true) if self.counts[a] != self.counts[b] => {
                    return (if self.counts[a] < self.counts[b] { 1 } else { -1 }, fit);
                }
                (true, false) => return (1, fit),
                (false, true) => return (-1, fit),
                (false, false) if parent(a) != parent(b) => (a, b) = (parent(a), parent(b)),
                _ => {
                    let key = |at: usize| (self.counts[at], -i64::from(self.topology.switches()[at].height));
                    return (key(a).cmp(&key(b)) as i32, fit);
                }
            }
        }
    }

    fn use_up(&mut self, leaf: usize) {
        let used = std::mem::take(&mut self.counts[leaf]);
        let mut above = self.topology.switches()[leaf].parent;
        while let (SlurmTree::V24, Some(at)) = (self.slurm, above) {
            self.counts[at.usize()] = (self.counts[at.usize()] - used).max(0);
            above = self.topology.switch(at).parent;
        }
        for (at, distance) in self.distance.iter_mut().enumerate() {
            let links = self.topology.switch_hops(id(leaf), id(at)).map_or(u32::MAX / 4096, |hops| hops - 1);
            *distance = distance.saturating_add(links);
        }
    }
}

fn id(at: usize) -> SwitchId {
    SwitchId(u32::try_from(at).unwrap_or(u32::MAX))
}

/// Leaf switches below a switch, in their order.
fn leaves(topology: &Topology, top: SwitchId) -> Vec<SwitchId> {
    let (mut leaves, mut stack) = (Vec::new(), vec![top]);
    while let Some(id) = stack.pop() {
        let switch = topology.switch(id);
        if !switch.nodes.is_empty() {
            leaves.push(id);
        }
        stack.extend(&switch.children);
    }
    leaves.sort_unstable();
    leaves
}
