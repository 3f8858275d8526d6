//! From a request to a placement: exactly where that is possible, else group by group.

use std::collections::HashMap;

use super::explain;
use super::grant::{Grant, grants};
use super::net::{BlockUnit, Net, Order, indexed};
use super::packer::{Packer, Wanted};
use super::request::{ClusterRequest, Domain, VmGroup};
use super::result::{Method, Placement};
use super::search::{Found, Limits};
use super::space::Space;
use super::tree::{Chosen, Fixed, Tree};
use super::{Options, PlaceError, heuristic, score};
use crate::model::{Assignment, Fleet, NodeState, Occupancy};

/// All that stays the same while a request is being placed.
pub(super) struct Task<'a> {
    pub fleet: &'a Fleet,
    pub used: &'a Occupancy,
    pub request: &'a ClusterRequest,
    pub net: Net<'a>,
    pub near: Option<Vec<Option<u32>>>,
    pub allowed: Vec<bool>,
    pub limits: Limits,
    pub unit: BlockUnit,
}

impl<'a> Task<'a> {
    pub fn new(
        fleet: &'a Fleet,
        used: &'a Occupancy,
        request: &'a ClusterRequest,
    ) -> Result<Self, PlaceError> {
        let unit = BlockUnit::of(request);
        let net = Net::new(fleet, used, unit);
        let mut near = net.near(request)?;
        let most = request.near.as_ref().and_then(|near| near.max_hops);
        for hops in near.iter_mut().flatten() {
            *hops = hops.filter(|hops| most.is_none_or(|most| *hops <= most));
        }
        for name in &request.only_nodes {
            if fleet.find(name.as_str()).is_none() {
                return Err(PlaceError::Unknown { what: "node", name: name.to_string() });
            }
        }
        let allowed = |node: &crate::model::Node| {
            node.state == NodeState::Up
                && (request.only_nodes.is_empty() || request.only_nodes.contains(&node.name))
                && !request.not_nodes.contains(&node.name)
        };
        let allowed = indexed(fleet).map(|(_, node)| allowed(node)).collect();
        Ok(Self { fleet, used, request, net, near, allowed, limits: Limits::of(request), unit })
    }

    /// A search for some groups with so many VMs each. None if it has more states than allowed.
    pub fn tree<'b>(
        &'b self,
        groups: &[(&'a VmGroup, u32)],
        used: &'b Occupancy,
        fixed: Option<&'b Fixed>,
        leaves: Option<u32>,
        most_states: usize,
    ) -> Result<Option<Tree<'a, 'b>>, PlaceError> {
        let counts: Vec<u32> = groups.iter().map(|(_, count)| *count).collect();
        let Some(space) = Space::new(&counts, leaves, most_states) else { return Ok(None) };
        let anti = self.request.anti_affinity;
        let per_node = anti.filter(|anti| anti.domain == Domain::Node).map_or(u32::MAX, |anti| anti.at_most);
        Ok(Some(Tree {
            net: &self.net,
            used,
            packer: Packer::new(Wanted::new(groups, per_node)?),
            space,
            units: groups.iter().map(|(group, _)| self.unit.per_vm(group)).collect(),
            vms: counts.iter().map(|count| u64::from(*count)).sum(),
            order: Order::of(self.request.compactness.mode),
            near: self.near.as_deref(),
            anti,
            allowed: &self.allowed,
            fixed,
            whole: HashMap::new(),
            packed: vec![None; self.fleet.nodes().len()],
            scratch: Vec::new(),
            exact: true,
        }))
    }
}

/// See [`super::place`].
pub(super) fn solve(
    fleet: &Fleet,
    used: &Occupancy,
    request: &ClusterRequest,
    options: &Options,
) -> Result<Placement, PlaceError> {
    request.check()?;
    let task = Task::new(fleet, used, request)?;
    if let Some(placement) = exact(&task, options)? {
        return placement.ok_or_else(|| explain::no_room(&task));
    }
    heuristic::solve(&task, options)?.ok_or_else(|| explain::no_room(&task))
}

/// None if there are too many states; then the other way must do.
#[expect(clippy::option_option, reason = "outer: was it tried; inner: was there room")]
fn exact(task: &Task<'_>, options: &Options) -> Result<Option<Option<Placement>>, PlaceError> {
    let groups: Vec<_> = task.request.groups.iter().map(|group| (group, group.count)).collect();
    let Some(mut tree) = task.tree(&groups, task.used, None, None, options.exact_states)? else {
        return Ok(None);
    };
    let mut found = tree.search(task.limits);
    let most = task.request.compactness.max_leaf_switches;
    let broken = |most: &u32| found.as_ref().is_some_and(|best| leaves(task, &best.chosen) > *most);
    if let Some(most) = most.filter(broken) {
        // Without the limit it is broken: search again and count leaf switches on the way.
        let packed_exactly = tree.exact;
        match task.tree(&groups, task.used, None, Some(most), options.exact_states)? {
            None => return Ok(None),
            Some(limited) => tree = limited,
        }
        found = tree.search(task.limits);
        tree.exact &= packed_exactly;
    }
    let exact = tree.exact;
    let Some(Found { chosen, .. }) = found else { return Ok(Some(None)) };
    let mut granted: Vec<Vec<(crate::model::NodeName, Grant)>> = groups.iter().map(|_| Vec::new()).collect();
    for (index, counts) in &chosen {
        let Some(grants) = grants(&mut tree.packer, task.fleet, task.used, *index, counts) else {
            return Ok(None);
        };
        for grant in grants {
            granted[grant.group].push((task.fleet.node(*index).name.clone(), grant));
        }
    }
    let method = if exact { Method::Exact } else { Method::Heuristic };
    assemble(task, granted, method).map(|placement| Some(Some(placement)))
}

/// Leaf switches in use.
pub(super) fn leaves(task: &Task<'_>, chosen: &Chosen) -> u32 {
    let mut leaves: Vec<_> = chosen.iter().filter_map(|(index, _)| task.net.home[index.usize()]).collect();
    leaves.sort_unstable();
    leaves.dedup();
    u32::try_from(leaves.len()).unwrap_or(u32::MAX)
}

/// Gives each VM its name, and the whole its score.
pub(super) fn assemble(
    task: &Task<'_>,
    granted: Vec<Vec<(crate::model::NodeName, Grant)>>,
    method: Method,
) -> Result<Placement, PlaceError> {
    let mut granted: Vec<_> = granted.into_iter().map(Vec::into_iter).collect();
    let mut assignments = Vec::new();
    for (vm, group) in task.request.vm_names()? {
        if let Some((node, grant)) = granted[group].next() {
            assignments.push(Assignment { vm, node, devices: grant.devices, shares: grant.shares });
        }
    }
    let score = score::score(task.fleet, task.used, task.request, &assignments)?;
    Ok(Placement { cluster: task.request.name.clone(), assignments, score, method })
}

/// The most VMs of the first group of a request that each node of a fleet could take, by itself.
///
/// # Errors
/// As for [`super::place`], but not for want of room.
pub fn capacities(fleet: &Fleet, used: &Occupancy, request: &ClusterRequest) -> Result<Vec<u32>, PlaceError> {
    request.check()?;
    let task = Task::new(fleet, used, request)?;
    let groups = [(&request.groups[0], request.groups[0].count)];
    let Some(mut tree) = task.tree(&groups, used, None, None, usize::MAX)? else { return Ok(Vec::new()) };
    Ok(indexed(fleet).map(|(index, _)| tree.packed(index).most(0)).collect())
}

/// Places the VMs of a request of one group on nodes that somebody else chose (Slurm, an operator): so many on each. Limits of
/// distance are not looked at.
///
/// # Errors
/// A node that has no room for its VMs, a wrong number of VMs, a request of several groups.
pub fn place_at(
    fleet: &Fleet,
    used: &Occupancy,
    request: &ClusterRequest,
    nodes: &[(crate::model::NodeIndex, u32)],
) -> Result<Placement, PlaceError> {
    request.check()?;
    let chosen: u32 = nodes.iter().map(|(_, vms)| *vms).sum();
    if request.groups.len() != 1 || chosen != request.count() {
        return Err(PlaceError::Contradiction {
            reason: format!(
                "{chosen} VMs on given nodes for {} VMs of {} groups; expected one group and as many",
                request.count(),
                request.groups.len()
            ),
        });
    }
    let task = Task::new(fleet, used, request)?;
    let groups = [(&request.groups[0], request.count())];
    let per_node = request
        .anti_affinity
        .filter(|anti| anti.domain == Domain::Node)
        .map_or(u32::MAX, |anti| anti.at_most);
    let mut packer = Packer::new(Wanted::new(&groups, per_node)?);
    let mut granted = Vec::new();
    for (index, vms) in nodes {
        let counts = [u16::try_from(*vms).unwrap_or(u16::MAX)];
        let grants = grants(&mut packer, fleet, used, *index, &counts).ok_or_else(|| PlaceError::NoRoom {
            vms: *vms,
            fit: packer.node(fleet, used, *index).most(0),
            reason: format!("node {} has no room for so many", fleet.node(*index).name),
        })?;
        granted.extend(grants.into_iter().map(|grant| (fleet.node(*index).name.clone(), grant)));
    }
    assemble(&task, vec![granted], Method::Heuristic)
}
