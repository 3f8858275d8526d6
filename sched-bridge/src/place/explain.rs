//! Why each node was chosen, left alone or ruled out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::PlaceError;
use super::fit;
use super::net::{Block, BlockUnit, indexed};
use super::packer::{Packer, Wanted};
use super::request::{Affinity, Alternative, ClusterRequest, DeviceNeed, Domain, NumaPolicy};
use super::result::{Placement, Score};
use super::solve::Task;
use super::view::Pool;
use crate::model::{DeviceKind, Fleet, NodeIndex, NodeName, NodeState, Occupancy, VmName};

/// What became of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
#[non_exhaustive]
pub enum Verdict {
    /// These VMs go there.
    Chosen {
        /// Their names.
        vms: Vec<VmName>,
    },
    /// It could take VMs, but a better score does without it.
    Possible {
        /// Most VMs of one group that it could take.
        vms: u32,
        /// Why it was not taken.
        reason: String,
    },
    /// It can take no VM.
    Rejected {
        /// The constraint that failed, for each group of VMs.
        reasons: Vec<String>,
    },
}

/// A node, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeVerdict {
    /// The node.
    pub node: NodeName,
    /// What became of it.
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

/// Says of every node why it was chosen, left alone or ruled out. `used` is what was taken before the placement.
///
/// # Errors
/// As for [`super::place`], but not for want of room.
pub fn explain(
    fleet: &Fleet,
    used: &Occupancy,
    request: &ClusterRequest,
    placement: Option<&Placement>,
) -> Result<Explanation, PlaceError> {
    request.check()?;
    let task = Task::new(fleet, used, request)?;
    let mut chosen: BTreeMap<&str, Vec<VmName>> = BTreeMap::new();
    for assignment in placement.iter().flat_map(|placement| &placement.assignments) {
        chosen.entry(assignment.node.as_str()).or_default().push(assignment.vm.clone());
    }
    let mut packer = packer(&task)?;
    let mut nodes = Vec::with_capacity(fleet.nodes().len());
    for (index, node) in indexed(fleet) {
        let verdict = match chosen.remove(node.name.as_str()) {
            Some(vms) => Verdict::Chosen { vms },
            None => other(&task, &mut packer, index, placement),
        };
        nodes.push(NodeVerdict { node: node.name.clone(), verdict });
    }
    Ok(Explanation { score: placement.map(|placement| placement.score), nodes })
}

/// Each group is packed by itself: that is what a constraint speaks of.
fn packer<'a>(task: &Task<'a>) -> Result<Vec<Packer<'a>>, PlaceError> {
    let anti = task.request.anti_affinity.filter(|anti| anti.domain == Domain::Node);
    let per_node = anti.map_or(u32::MAX, |anti| anti.at_most);
    let each = task
        .request
        .groups
        .iter()
        .map(|group| Wanted::new(&[(group, group.count)], per_node).map(Packer::new));
    each.collect()
}

fn most(task: &Task<'_>, packers: &mut [Packer<'_>], index: NodeIndex) -> u32 {
    if !task.allowed[index.usize()] || task.near.as_ref().is_some_and(|near| near[index.usize()].is_none()) {
        return 0;
    }
    packers.iter_mut().map(|packer| packer.node(task.fleet, task.used, index).most(0)).max().unwrap_or(0)
}

fn other(
    task: &Task<'_>,
    packers: &mut [Packer<'_>],
    index: NodeIndex,
    placement: Option<&Placement>,
) -> Verdict {
    let vms = most(task, packers, index);
    if vms == 0 {
        return Verdict::Rejected { reasons: reasons(task, index) };
    }
    let reason = match placement {
        None => "not enough room in any one place within the limits of distance".to_owned(),
        Some(placement) => further(task, index, placement),
    };
    Verdict::Possible { vms, reason }
}

/// How far a node that was not taken is from those that were.
fn further(task: &Task<'_>, index: NodeIndex, placement: &Placement) -> String {
    let chosen = placement.assignments.iter().filter_map(|vm| task.fleet.find(vm.node.as_str()));
    let hops: Option<Vec<u32>> = chosen.map(|chosen| task.net.hops(index, chosen)).collect();
    let most = placement.score.max_hops;
    match hops.and_then(|hops| hops.into_iter().max()) {
        None => "cannot reach the chosen nodes".to_owned(),
        Some(hops) if hops > most => {
            format!("{hops} hops from a chosen node; the placement needs at most {most}")
        }
        Some(_) => {
            "as near as the chosen nodes, but the sum of hops, leaf switches or free blocks left are worse"
                .to_owned()
        }
    }
}

/// For each group the first constraint that fails; of several alternatives that of each.
fn reasons(task: &Task<'_>, index: NodeIndex) -> Vec<String> {
    let node = task.fleet.node(index);
    if node.state != NodeState::Up {
        let state = if node.state == NodeState::Drained { "drained" } else { "down" };
        return vec![format!("node is {state}")];
    }
    if !task.allowed[index.usize()] {
        return vec!["node is excluded by the request".to_owned()];
    }
    if task.near.as_ref().is_some_and(|near| near[index.usize()].is_none()) {
        return vec!["near: too many hops to the data, or no way to it".to_owned()];
    }
    let many = task.request.groups.len() > 1;
    let mut reasons = Vec::new();
    for group in &task.request.groups {
        let failed: Vec<String> = group.alternatives.iter().map(|alt| failed(task, index, alt)).collect();
        let failed = failed.join("; or: ");
        reasons.push(if many { format!("{}: {failed}", group.name) } else { failed });
    }
    reasons
}

fn failed(task: &Task<'_>, index: NodeIndex, alternative: &Alternative) -> String {
    let node = task.fleet.node(index);
    if let Some(reason) = fit::refusal(node, alternative) {
        return reason;
    }
    let offered = fit::offered(task.fleet, task.used, index);
    for need in &alternative.devices {
        let all = node.devices.iter().filter(|device| fit::matches(&need.filter, device)).count();
        let free = offered.iter().filter(|at| fit::matches(&need.filter, &node.devices[**at])).count();
        if free < need.count as usize {
            return format!("{}: {} wanted, {free} free of {all} that match", describe(need), need.count);
        }
    }
    let free = task.used.free(task.fleet, index);
    let all = free.iter().fold(Pool::default(), |sum, share| sum.plus(Pool::of(share)));
    let need = Pool::need(alternative.vcpus, alternative.memory.0, alternative.pages);
    for (what, need, all) in [
        ("cores", need.cores, all.cores),
        ("memory (MiB)", need.memory, all.memory),
        ("pages of 2 MiB", need.pages_2m, all.pages_2m),
        ("pages of 1 GiB", need.pages_1g, all.pages_1g),
    ] {
        if need > all {
            return format!("{what}: {need} wanted, {all} free");
        }
    }
    match (alternative.numa, alternative.affinity) {
        (_, Affinity::SameRoot) => "gpu:hca affinity: not enough free pairs below one PCIe root".to_owned(),
        (_, Affinity::SameNuma) => "gpu:hca affinity: not enough free pairs on one NUMA node".to_owned(),
        (NumaPolicy::Required, _) => "numa: enough in all, but not on any one NUMA node".to_owned(),
        (NumaPolicy::Socket, _) => "numa: enough in all, but not on any one socket".to_owned(),
        _ if alternative.isolate_vfs => "group_policy: not enough adapters with free VFs".to_owned(),
        _ => "devices: the needs are met one by one, but not together".to_owned(),
    }
}

/// A device need in the words of a request.
fn describe(need: &DeviceNeed) -> String {
    let kind = match need.filter.kind {
        DeviceKind::Gpu => "GPUs",
        DeviceKind::Hca => "HCAs",
        DeviceKind::Vf => "VFs",
    };
    let filter = &need.filter;
    let mut words: Vec<String> = filter.archs.iter().cloned().collect();
    words.extend(filter.vendors.iter().map(|vendor| format!("{vendor:04x}")));
    words.extend(filter.ids.iter().map(ToString::to_string));
    words.extend(filter.traits.iter().cloned());
    if filter.min_rate_gbps > 0 {
        words.push(format!(">= {} Gb/s", filter.min_rate_gbps));
    }
    if filter.live_migratable {
        words.push("live-migratable".to_owned());
    }
    if words.is_empty() { kind.to_owned() } else { format!("{kind} ({})", words.join(", ")) }
}

/// The error for want of room: how many would fit, and what stands in the way of most.
pub(super) fn no_room(task: &Task<'_>) -> PlaceError {
    let vms = task.request.count();
    let mut packers = match packer(task) {
        Ok(packers) => packers,
        Err(error) => return error,
    };
    let mut room = vec![0_u64; task.net.home.len()];
    let mut votes: BTreeMap<String, u32> = BTreeMap::new();
    for (index, _) in indexed(task.fleet) {
        let most = most(task, &mut packers, index);
        room[index.usize()] = u64::from(most);
        if most == 0 {
            *votes.entry(reasons(task, index).join("; ")).or_default() += 1;
        }
    }
    let height = task.limits.height.min(task.limits.hops.saturating_add(1) / 2);
    let sums = task.net.sum_up(|index| room[index.usize()]);
    let within = task.net.topology.ids().filter(|id| task.net.topology.switch(*id).height <= height);
    let best = within.map(|id| sums[id.usize()]).chain(room.iter().copied()).max().unwrap_or(0);
    let reason = match votes.iter().max_by_key(|(_, votes)| **votes) {
        Some((reason, nodes)) => {
            format!(
                "of {} nodes, {} can take none, {nodes} of them because: {reason}",
                room.len(),
                votes.values().sum::<u32>()
            )
        }
        None if best >= u64::from(vms) => {
            "limits of anti-affinity, leaf switches or devices stand in the way".to_owned()
        }
        None => "the limits of distance allow no place with more room; relax level or max_hops, or wait"
            .to_owned(),
    };
    PlaceError::NoRoom { vms, fit: u32::try_from(best.min(u64::from(vms))).unwrap_or(vms), reason }
}

/// GPUs (or cores, see [`Score::fragmentation`]) that are free in the biggest blocks: the sum over nodes and switches of the
/// squares of what is free, of the cubes for leaf switches. The more of it, the bigger the clusters that still fit.
#[must_use]
pub fn free_blocks(fleet: &Fleet, used: &Occupancy, request: &ClusterRequest) -> u128 {
    let net = super::net::Net::new(fleet, used, BlockUnit::of(request));
    let nodes = net.free_node.iter().map(|free| u128::from(*free).pow(2));
    let switches = net.topology.ids().map(|id| {
        let power = if Block::of(net.topology, id) == Block::Leaf { 3 } else { 2 };
        u128::from(net.free_switch[id.usize()]).pow(power)
    });
    nodes.chain(switches).sum()
}
