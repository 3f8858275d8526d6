//! A request that is being placed on a fleet.

use std::collections::HashMap;

use super::PlaceError;
use super::grant::Grant;
use super::net::{BlockUnit, Net, Order, indexed};
use super::packer::Packer;
use super::placement::{Method, Placement};
use super::request::{ClusterRequest, Domain, VmGroup};
use super::score;
use super::search::Limits;
use super::space::Space;
use super::tree::{Fixed, Tree};
use super::wanted::Wanted;
use crate::model::{Assignment, Fleet, Node, NodeName, NodeState, Occupancy};

/// What stays the same while a request is being placed.
pub(super) struct Task<'a> {
    pub fleet: &'a Fleet,
    pub used: &'a Occupancy,
    pub request: &'a ClusterRequest,
    pub net: Net<'a>,
    /// Hops of each node to what the cluster is to be near; none for nodes that are too far.
    pub near: Option<Vec<Option<u32>>>,
    /// Nodes that may be used.
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
        let allowed = |node: &Node| {
            node.state == NodeState::Up
                && (request.only_nodes.is_empty() || request.only_nodes.contains(&node.name))
                && !request.not_nodes.contains(&node.name)
        };
        let allowed = indexed(fleet).map(|(_, node)| allowed(node)).collect();
        Ok(Self { fleet, used, request, net, near, allowed, limits: Limits::of(request), unit })
    }

    /// An exact search for some groups, each with a number of VMs. None if it has more than `most_states` states.
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

/// The placement with these grants, by group: gives each VM its name, and the whole its score.
pub(super) fn assemble(
    task: &Task<'_>,
    granted: Vec<Vec<(NodeName, Grant)>>,
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
