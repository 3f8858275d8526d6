//! The score of a finished placement, from its assignments alone.

use std::collections::HashMap;

use super::PlaceError;
use super::devices::distance;
use super::net::{Block, BlockUnit, Net, loss};
use super::placement::Score;
use super::request::{ClusterRequest, Domain, Mode};
use crate::model::{Assignment, DeviceKind, Fleet, Node, NodeIndex, Occupancy};
use crate::topology::SwitchId;

/// The score of assignments for a request's VMs, in the order of [`ClusterRequest::vm_names`]. `used` is what was taken before.
///
/// # Errors
/// Nodes that are not in the fleet, or not connected to each other.
pub fn score(
    fleet: &Fleet,
    used: &Occupancy,
    request: &ClusterRequest,
    assignments: &[Assignment],
) -> Result<Score, PlaceError> {
    let unit = BlockUnit::of(request);
    let net = Net::new(fleet, used, unit);
    let near = net.near(request)?;
    let groups: Vec<usize> = request.vm_names()?.into_iter().map(|(_, group)| group).collect();
    let mut score = Score::default();
    let (mut on, mut taken): (HashMap<NodeIndex, u64>, HashMap<NodeIndex, u64>) = <_>::default();
    for (assignment, group) in assignments.iter().zip(&groups) {
        let name = assignment.node.as_str();
        let unknown = || PlaceError::Unknown { what: "node", name: name.to_owned() };
        let index = fleet.find(name).ok_or_else(unknown)?;
        *on.entry(index).or_default() += 1;
        *taken.entry(index).or_default() += unit.per_vm(&request.groups[*group]);
        score.device_distance += device_distance(fleet.node(index), assignment);
        if let Some(hops) = &near {
            score.near_hops += u64::from(hops[index.usize()].unwrap_or(0));
        }
    }
    hops(&net, &on, &mut score)?;
    let below = net.sum_up(|index| taken.get(&index).copied().unwrap_or(0));
    let switches = net
        .topology
        .ids()
        .map(|id| loss(Block::of(net.topology, id), net.free_switch[id.usize()], below[id.usize()]));
    let nodes = taken.iter().map(|(index, taken)| loss(Block::Other, net.free_node[index.usize()], *taken));
    score.fragmentation = switches.chain(nodes).fold(0, u64::saturating_add);
    Ok(score)
}

/// Adds the hops. They are those between leaf switches: few pairs, however many VMs.
fn hops(net: &Net<'_>, on: &HashMap<NodeIndex, u64>, score: &mut Score) -> Result<(), PlaceError> {
    let mut leaves: HashMap<Option<SwitchId>, Vec<u64>> = HashMap::new();
    for (index, vms) in on {
        leaves.entry(net.home[index.usize()]).or_default().push(*vms);
    }
    score.leaf_switches = u32::try_from(leaves.keys().flatten().count()).unwrap_or(u32::MAX);
    let not_connected = || PlaceError::NoRoom {
        vms: u32::try_from(on.values().sum::<u64>()).unwrap_or(u32::MAX),
        fit: 0,
        reason: "some of these nodes are not connected in the topology".to_owned(),
    };
    let mut sums = Vec::with_capacity(leaves.len());
    for (leaf, nodes) in &leaves {
        let all: u64 = nodes.iter().sum();
        let pairs = (all * all - nodes.iter().map(|vms| vms * vms).sum::<u64>()) / 2;
        if pairs > 0 {
            leaf.ok_or_else(not_connected)?;
            score.sum_hops += pairs;
            score.max_hops = score.max_hops.max(1);
        }
        sums.push((*leaf, all));
    }
    for (at, (a, vms_a)) in sums.iter().enumerate() {
        for (b, vms_b) in &sums[at + 1..] {
            let hops =
                a.zip(*b).and_then(|(a, b)| net.topology.switch_hops(a, b)).ok_or_else(not_connected)?;
            score.sum_hops += u64::from(hops) * vms_a * vms_b;
            score.max_hops = score.max_hops.max(hops);
        }
    }
    Ok(())
}

/// Distance of the devices of one VM; see [`Score::device_distance`].
fn device_distance(node: &Node, assignment: &Assignment) -> u64 {
    // Remote GPUs are near to nothing.
    if assignment.devices.len() < 2 {
        return 0;
    }
    let mut roots: Vec<Option<&str>> = Vec::new();
    let mut parts: Vec<(u16, u32, u32)> = Vec::new();
    for granted in assignment.devices.iter().filter(|own| own.kind != DeviceKind::RemoteGpu) {
        let Some(device) = node.devices.iter().find(|device| device.address == granted.address) else {
            continue;
        };
        let place = device.numa.and_then(|id| node.numa.iter().position(|numa| numa.id == id));
        let place = if node.numa.len() == 1 && device.numa.is_none() { Some(0) } else { place };
        let numa = place.and_then(|place| u16::try_from(place).ok()).unwrap_or(u16::MAX);
        let root = device.root.as_ref().map(|root| root.0.as_ref());
        let at = (0..roots.len()).find(|at| root.is_some() && roots[*at] == root && parts[*at].0 == numa);
        let at = at.unwrap_or_else(|| {
            roots.push(root);
            parts.push((numa, 0, 0));
            parts.len() - 1
        });
        let part = &mut parts[at];
        *(if granted.kind.is_network() { &mut part.2 } else { &mut part.1 }) += 1;
    }
    u64::from(distance(&parts, None).unwrap_or(0))
}

/// Checks that assignments are within the limits of a request: hops, level, leaf switches, anti-affinity, nearness. Devices and cores
/// are not checked.
///
/// # Errors
/// The first limit that is exceeded, in words.
pub fn obeys(
    fleet: &Fleet,
    request: &ClusterRequest,
    assignments: &[Assignment],
    score: &Score,
) -> Result<(), String> {
    let compactness = &request.compactness;
    if let Some(most) = compactness.max_hops.filter(|most| score.max_hops > *most) {
        return Err(format!("{} hops between two VMs, at most {most} are allowed", score.max_hops));
    }
    if let Some(most) = compactness.max_leaf_switches.filter(|most| score.leaf_switches > *most) {
        return Err(format!("{} leaf switches in use, at most {most} are allowed", score.leaf_switches));
    }
    if let Some(level) = compactness.level.filter(|_| compactness.mode == Mode::Required) {
        let domains = domains(fleet, assignments, level);
        if domains.len() > 1 {
            return Err(format!(
                "its VMs would be in {} domains of height {}, but must be in one",
                domains.len(),
                level.height()
            ));
        }
    }
    if let Some(anti) = request.anti_affinity {
        let most = domains(fleet, assignments, anti.domain).into_values().max().unwrap_or(0);
        if most > anti.at_most {
            return Err(format!("{most} VMs would be in one domain, anti-affinity allows {}", anti.at_most));
        }
    }
    let Some((near, most)) = request.near.as_ref().and_then(|near| Some((near, near.max_hops?))) else {
        return Ok(());
    };
    let net = Net::new(fleet, &Occupancy::new(fleet), BlockUnit::Cores);
    let hops = net.near(request).map_err(|error| error.to_string())?.unwrap_or_default();
    for assignment in assignments {
        let own = fleet.find(assignment.node.as_str()).and_then(|index| hops[index.usize()]);
        if own.is_none_or(|own| own > most) {
            return Err(format!("node {} is more than {most} hops from {}", assignment.node, near.to));
        }
    }
    Ok(())
}

/// Number of VMs by domain: the highest switch above a node that is not higher than `domain`, or the node itself.
fn domains(
    fleet: &Fleet,
    assignments: &[Assignment],
    domain: Domain,
) -> HashMap<(Option<SwitchId>, Option<String>), u32> {
    let topology = fleet.topology();
    let mut domains = HashMap::new();
    for assignment in assignments {
        let mut top = None;
        let mut at = topology.leaf_of(assignment.node.as_str());
        while let Some(id) = at.filter(|id| topology.switch(*id).height <= domain.height()) {
            top = Some(id);
            at = topology.switch(id).parent;
        }
        let own = top.is_none().then(|| assignment.node.to_string());
        *domains.entry((top, own)).or_default() += 1;
    }
    domains
}
