//! Why each node was chosen, left alone or ruled out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::PlaceError;
use super::net::indexed;
use super::packer::Packer;
use super::placement::{Placement, Score};
use super::reasons::reasons;
use super::remote;
use super::request::{ClusterRequest, Domain};
use super::task::Task;
use super::wanted::Wanted;
use crate::model::{Fleet, Node, NodeIndex, NodeName, Occupancy, VmName};

/// What a placement does with a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
#[non_exhaustive]
pub enum Verdict {
    /// It gets VMs.
    Chosen {
        /// Their names.
        vms: Vec<VmName>,
    },
    /// It has room, but the placement is better without it.
    Possible {
        /// Most VMs of one group that it has room for.
        vms: u32,
        /// Why it was not chosen.
        reason: String,
    },
    /// It has no room for any VM.
    Rejected {
        /// For each group of VMs the constraint that it does not meet.
        reasons: Vec<String>,
    },
}

/// A node and its verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeVerdict {
    /// The node.
    pub node: NodeName,
    /// The verdict.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// Why a placement is as it is, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// The score, if there is a placement.
    pub score: Option<Score>,
    /// Every node of the fleet.
    pub nodes: Vec<NodeVerdict>,
}

/// Why each node was chosen, left alone or ruled out. `used` is what was taken before the placement.
///
/// # Errors
/// As for [`super::place`], except for lack of room.
pub fn explain(
    fleet: &Fleet,
    used: &Occupancy,
    request: &ClusterRequest,
    placement: Option<&Placement>,
) -> Result<Explanation, PlaceError> {
    request.check()?;
    if let Some(apart) = remote::apart(request)? {
        if let Err(error) = apart.give(fleet, used) {
            let reasons = vec![error.to_string()];
            let rejected = |node: &Node| NodeVerdict {
                node: node.name.clone(),
                verdict: Verdict::Rejected { reasons: reasons.clone() },
            };
            return Ok(Explanation { score: None, nodes: fleet.nodes().iter().map(rejected).collect() });
        }
        return explain(fleet, used, &apart.request, placement);
    }
    let task = Task::new(fleet, used, request)?;
    let mut chosen: BTreeMap<&str, Vec<VmName>> = BTreeMap::new();
    for assignment in placement.iter().flat_map(|placement| &placement.assignments) {
        chosen.entry(assignment.node.as_str()).or_default().push(assignment.vm.clone());
    }
    let mut packers = packer_per_group(&task)?;
    let mut nodes = Vec::with_capacity(fleet.nodes().len());
    for (index, node) in indexed(fleet) {
        let verdict = match chosen.remove(node.name.as_str()) {
            Some(vms) => Verdict::Chosen { vms },
            None => not_chosen(&task, &mut packers, index, placement),
        };
        nodes.push(NodeVerdict { node: node.name.clone(), verdict });
    }
    Ok(Explanation { score: placement.map(|placement| placement.score), nodes })
}

/// Each group is packed by itself: a constraint belongs to a group.
fn packer_per_group<'a>(task: &Task<'a>) -> Result<Vec<Packer<'a>>, PlaceError> {
    let anti = task.request.anti_affinity.filter(|anti| anti.domain == Domain::Node);
    let per_node = anti.map_or(u32::MAX, |anti| anti.at_most);
    let each = task
        .request
        .groups
        .iter()
        .map(|group| Wanted::new(&[(group, group.count)], per_node).map(Packer::new));
    each.collect()
}

/// Most VMs of one group that a node has room for.
fn most_vms(task: &Task<'_>, packers: &mut [Packer<'_>], index: NodeIndex) -> u32 {
    if !task.allowed[index.usize()] || task.near.as_ref().is_some_and(|near| near[index.usize()].is_none()) {
        return 0;
    }
    packers.iter_mut().map(|packer| packer.node(task.fleet, task.used, index).most(0)).max().unwrap_or(0)
}

fn not_chosen(
    task: &Task<'_>,
    packers: &mut [Packer<'_>],
    index: NodeIndex,
    placement: Option<&Placement>,
) -> Verdict {
    let vms = most_vms(task, packers, index);
    if vms == 0 {
        return Verdict::Rejected { reasons: reasons(task, index) };
    }
    let reason = match placement {
        None => "nodes within the distance limits do not have enough room together".to_owned(),
        Some(placement) => why_worse(task, index, placement),
    };
    Verdict::Possible { vms, reason }
}

/// Why a placement is better without a node that has room.
fn why_worse(task: &Task<'_>, index: NodeIndex, placement: &Placement) -> String {
    let chosen = placement.assignments.iter().filter_map(|vm| task.fleet.find(vm.node.as_str()));
    let hops: Option<Vec<u32>> = chosen.map(|chosen| task.net.hops(index, chosen)).collect();
    let most = placement.score.max_hops;
    match hops.and_then(|hops| hops.into_iter().max()) {
        None => "not connected to the chosen nodes".to_owned(),
        Some(hops) if hops > most => {
            format!("{hops} hops from a chosen node; the placement has at most {most}")
        }
        Some(_) => "as near as the chosen nodes, but total hops, leaf switches or free blocks would be worse"
            .to_owned(),
    }
}

/// The error for lack of room: how many VMs have room, and what rules out most nodes.
pub(super) fn no_room(task: &Task<'_>) -> PlaceError {
    let vms = task.request.count();
    let mut packers = match packer_per_group(task) {
        Ok(packers) => packers,
        Err(error) => return error,
    };
    let mut room = vec![0_u64; task.net.home.len()];
    // Nodes without room, by reason.
    let mut ruled_out: BTreeMap<String, Vec<NodeIndex>> = BTreeMap::new();
    for (index, _) in indexed(task.fleet) {
        let most = most_vms(task, &mut packers, index);
        room[index.usize()] = u64::from(most);
        if most == 0 {
            ruled_out.entry(reasons(task, index).join("; ")).or_default().push(index);
        }
    }
    let height = task.limits.height.min(task.limits.hops.saturating_add(1) / 2);
    let sums = task.net.sum_up(|index| room[index.usize()]);
    let within = task.net.topology.ids().filter(|id| task.net.topology.switch(*id).height <= height);
    let best = within.map(|id| sums[id.usize()]).chain(room.iter().copied()).max().unwrap_or(0);
    let reason = match ruled_out.iter().max_by_key(|(_, nodes)| nodes.len()) {
        Some((reason, nodes)) => {
            let all = ruled_out.values().map(Vec::len).sum();
            most_frequent(task, reason, nodes, all)
        }
        None if best >= u64::from(vms) => {
            "limits on anti-affinity, leaf switches or devices rule it out".to_owned()
        }
        None => {
            "nodes within the distance limits have no more room together; relax level or max_hops, or wait"
                .to_owned()
        }
    };
    PlaceError::NoRoom { vms, fit: u32::try_from(best.min(u64::from(vms))).unwrap_or(vms), reason }
}

/// The reason that rules out most of the nodes without room; `without_room` is how many these are.
fn most_frequent(task: &Task<'_>, reason: &str, nodes: &[NodeIndex], without_room: usize) -> String {
    if let ([index], 1) = (nodes, without_room) {
        return format!("node {}: {reason}", task.fleet.node(*index).name);
    }
    let all = task.fleet.nodes().len();
    if nodes.len() == all {
        return format!("each of the {all} nodes: {reason}");
    }
    format!("{without_room} of {all} nodes have no room; {} of these: {reason}", nodes.len())
}
