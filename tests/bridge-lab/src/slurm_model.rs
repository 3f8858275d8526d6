//! Which nodes Slurm's topology/tree would have chosen.
//!
//! Written after `_eval_nodes_topo` of Slurm's sources (select/cons_tres of 22.05, topology/tree of 24.05 and later) for jobs
//! without required nodes, on nodes of one weight. Leaf switches are taken one after the other; on each, nodes in their order, each
//! with all that is free on it. The versions differ in which leaf switch comes next, see [`SlurmModel`]. A test of this crate checks
//! that [`SlurmModel::V22`] chooses the same nodes as a real Slurm 22.05.

use sched_bridge::model::{Fleet, NodeIndex, Occupancy};
use sched_bridge::place::{ClusterRequest, PlaceError, Placement, capacities, place_at};
use sched_bridge::topology::{SwitchId, Topology};

/// Links to a leaf switch that cannot be reached.
const UNREACHABLE: u32 = u32::MAX / 4096;

/// A version of Slurm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SlurmModel {
    /// 22.05 to 23.11: a leaf switch fits if it has as many usable nodes as are asked for, however little is free on them.
    V22,
    /// 24.05 and later: it must have room for all remaining tasks, too.
    #[default]
    V24,
    /// The Topology Guide: the lowest switch with enough free resources, and below it the leaf switches that fit best by free
    /// resources. Kinder than any version of Slurm on nodes that jobs share.
    Guide,
}

impl SlurmModel {
    /// Places the VMs of a request of one group on the nodes that Slurm would take for as many tasks (`--ntasks`), or for as many
    /// nodes (`--nodes`) if no node has room for two of them.
    ///
    /// # Errors
    /// As [`sched_bridge::place::place`].
    pub fn place(
        self,
        fleet: &Fleet,
        used: &Occupancy,
        request: &ClusterRequest,
    ) -> Result<Placement, PlaceError> {
        let room = capacities(fleet, used, request)?;
        let most = capacities(fleet, &Occupancy::new(fleet), request)?.into_iter().max().unwrap_or(0);
        let nodes = if most > 1 { 1 } else { request.count() };
        let chosen = self.choose(fleet, &room, request.count(), nodes);
        let chosen = chosen.ok_or_else(|| PlaceError::NoRoom {
            vms: request.count(),
            fit: room.iter().sum::<u32>().min(request.count()),
            reason: "no switch has enough free below it".to_owned(),
        })?;
        place_at(fleet, used, request, &chosen)
    }

    /// Chooses nodes for so many tasks, at least `nodes` of them, and the number of tasks on each. `room` is how many tasks each node
    /// of the fleet has room for. None if there is not enough below any switch.
    #[must_use]
    pub fn choose(
        self,
        fleet: &Fleet,
        room: &[u32],
        tasks: u32,
        nodes: u32,
    ) -> Option<Vec<(NodeIndex, u32)>> {
        let topology = fleet.topology();
        let usable: Vec<Usable> = topology.ids().map(|id| Usable::below(fleet, room, id)).collect();
        let top = self.top_switch(topology, &usable, tasks, nodes)?;
        let leaves = leaves_below(topology, id(top));
        let mut job = Job::new(self, topology, &usable, tasks, nodes);
        let mut chosen = Vec::new();
        while let Some(leaf) = job.next_leaf(&leaves) {
            for index in &usable[leaf].nodes {
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

    /// The switch below which all nodes are chosen.
    fn top_switch(self, topology: &Topology, usable: &[Usable], tasks: u32, nodes: u32) -> Option<usize> {
        let height = |at: usize| topology.switches()[at].height;
        let enough = usable
            .iter()
            .enumerate()
            .filter(|(_, below)| below.tasks >= tasks && below.nodes.len() >= nodes as usize);
        let top = if self == Self::Guide {
            enough.min_by_key(|(at, below)| (height(*at), below.nodes.len(), *at))
        } else {
            enough.max_by_key(|(at, _)| (height(*at), *at))
        };
        top.map(|(at, _)| at)
    }
}

/// What can be used below a switch.
struct Usable {
    nodes: Vec<NodeIndex>,
    tasks: u32,
}

impl Usable {
    fn below(fleet: &Fleet, room: &[u32], id: SwitchId) -> Self {
        let names = fleet.topology().nodes_below(id).into_iter();
        let mut nodes: Vec<NodeIndex> = names.filter_map(|name| fleet.find(name.as_str())).collect();
        nodes.retain(|index| room[index.usize()] > 0);
        nodes.sort_unstable();
        let tasks = nodes.iter().map(|index| room[index.usize()]).sum();
        Self { nodes, tasks }
    }
}

/// A job that has got some of its nodes.
struct Job<'a> {
    model: SlurmModel,
    topology: &'a Topology,
    /// Usable nodes below each switch.
    node_counts: Vec<i64>,
    /// Tasks that have room below each switch.
    task_room: Vec<i64>,
    /// Links from each switch to all leaf switches in use, summed up.
    distance: Vec<u32>,
    /// Nodes that are still to be chosen.
    nodes: i64,
    /// Tasks that still have no node.
    tasks: i64,
}

impl<'a> Job<'a> {
    fn new(model: SlurmModel, topology: &'a Topology, usable: &[Usable], tasks: u32, nodes: u32) -> Self {
        Self {
            model,
            topology,
            node_counts: usable
                .iter()
                .map(|own| i64::try_from(own.nodes.len()).unwrap_or(i64::MAX))
                .collect(),
            task_room: usable.iter().map(|own| i64::from(own.tasks)).collect(),
            distance: vec![0; usable.len()],
            nodes: i64::from(nodes),
            tasks: i64::from(tasks),
        }
    }

    /// The leaf switch that is used next.
    fn next_leaf(&self, leaves: &[SwitchId]) -> Option<usize> {
        let usable = leaves.iter().map(|leaf| leaf.usize()).filter(|leaf| self.node_counts[*leaf] > 0);
        if self.model == SlurmModel::Guide {
            let fits =
                |leaf: &usize| self.task_room[*leaf] >= self.tasks && self.node_counts[*leaf] >= self.nodes;
            let best_fit = usable.clone().filter(fits).min_by_key(|leaf| self.task_room[*leaf]);
            return best_fit.or_else(|| usable.rev().max_by_key(|leaf| self.task_room[*leaf]));
        }
        usable.reduce(|best, leaf| if self.is_better(leaf, best) { leaf } else { best })
    }

    /// Whether a leaf switch is taken rather than one that comes before it.
    fn is_better(&self, leaf: usize, best: usize) -> bool {
        let (order, fits) = self.compare(leaf, best);
        let closer = match self.model {
            SlurmModel::V22 => order >= 0,
            SlurmModel::V24 | SlurmModel::Guide => fits,
        };
        (self.distance[leaf] < self.distance[best] && closer)
            || (self.distance[leaf] == self.distance[best] && order > 0)
    }

    /// 1 if the first of two switches is the better fit, -1 if the second is; and whether the first fits. Where neither does, the
    /// switches above them are compared.
    fn compare(&self, mut a: usize, mut b: usize) -> (i32, bool) {
        let fits = |at: usize| {
            self.node_counts[at] >= self.nodes
                && (self.model == SlurmModel::V22 || self.task_room[at] >= self.tasks)
        };
        let parent = |at: usize| self.topology.switches()[at].parent.map_or(at, SwitchId::usize);
        loop {
            let fit = fits(a);
            match (fit, fits(b)) {
                (true, true) if self.node_counts[a] != self.node_counts[b] => {
                    return (if self.node_counts[a] < self.node_counts[b] { 1 } else { -1 }, fit);
                }
                (true, false) => return (1, fit),
                (false, true) => return (-1, fit),
                (false, false) if parent(a) != parent(b) => (a, b) = (parent(a), parent(b)),
                _ => {
                    let key =
                        |at: usize| (self.node_counts[at], -i64::from(self.topology.switches()[at].height));
                    return (key(a).cmp(&key(b)) as i32, fit);
                }
            }
        }
    }

    /// All nodes of a leaf switch are taken.
    fn use_up(&mut self, leaf: usize) {
        let used = std::mem::take(&mut self.node_counts[leaf]);
        let mut above = self.topology.switches()[leaf].parent;
        while let (SlurmModel::V24, Some(at)) = (self.model, above) {
            self.node_counts[at.usize()] = (self.node_counts[at.usize()] - used).max(0);
            above = self.topology.switch(at).parent;
        }
        for (at, distance) in self.distance.iter_mut().enumerate() {
            let links = self.topology.switch_hops(id(leaf), id(at)).map_or(UNREACHABLE, |hops| hops - 1);
            *distance = distance.saturating_add(links);
        }
    }
}

fn id(at: usize) -> SwitchId {
    SwitchId(u32::try_from(at).unwrap_or(u32::MAX))
}

/// Leaf switches below a switch, in their order.
fn leaves_below(topology: &Topology, top: SwitchId) -> Vec<SwitchId> {
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
