//! The score of a finished placement, worked out from its assignments alone.

use std::collections::HashMap;

use super::PlaceError;
use super::devices::distance;
use super::net::{BlockUnit, Net, loss};
use super::request::ClusterRequest;
use super::result::Score;
use crate::model::{Assignment, DeviceKind, Fleet, Node, NodeIndex, Occupancy};
use crate::topology::SwitchId;

/// Scores assignments of a request's VMs in the order of [`ClusterRequest::vm_names`]; `used` is what was taken before.
///
/// # Errors
/// Nodes that are not in the fleet, or that cannot reach each other.
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
    let switches = net.free_switch.iter().zip(&below).map(|(free, taken)| loss(*free, *taken));
    let nodes = taken.iter().map(|(index, taken)| loss(net.free_node[index.usize()], *taken));
    score.fragmentation = switches.sum::<u64>() + nodes.sum::<u64>();
    Ok(score)
}

/// Hops are those of leaf switches: few pairs, however many VMs.
fn hops(net: &Net<'_>, on: &HashMap<NodeIndex, u64>, score: &mut Score) -> Result<(), PlaceError> {
    let mut leaves: HashMap<Option<SwitchId>, Vec<u64>> = HashMap::new();
    for (index, vms) in on {
        leaves.entry(net.home[index.usize()]).or_default().push(*vms);
    }
    score.leaf_switches = u32::try_from(leaves.keys().flatten().count()).unwrap_or(u32::MAX);
    let lost = || PlaceError::NoRoom {
        vms: u32::try_from(on.values().sum::<u64>()).unwrap_or(u32::MAX),
        fit: 0,
        reason: "some of these nodes cannot reach each other in the topology".to_owned(),
    };
    let mut sums = Vec::with_capacity(leaves.len());
    for (leaf, nodes) in &leaves {
        let all: u64 = nodes.iter().sum();
        let pairs = (all * all - nodes.iter().map(|vms| vms * vms).sum::<u64>()) / 2;
        if pairs > 0 {
            leaf.ok_or_else(lost)?;
            score.sum_hops += pairs;
            score.max_hops = score.max_hops.max(1);
        }
        sums.push((*leaf, all));
    }
    for (at, (a, vms_a)) in sums.iter().enumerate() {
        for (b, vms_b) in &sums[at + 1..] {
            let hops = a.zip(*b).and_then(|(a, b)| net.topology.switch_hops(a, b)).ok_or_else(lost)?;
            score.sum_hops += u64::from(hops) * vms_a * vms_b;
            score.max_hops = score.max_hops.max(hops);
        }
    }
    Ok(())
}

/// Distance of the devices of one VM; see [`Score::device_distance`].
fn device_distance(node: &Node, assignment: &Assignment) -> u64 {
    if assignment.devices.len() < 2 {
        return 0;
    }
    let (mut roots, mut parts): (Vec<Option<&str>>, Vec<(u16, u32, u32)>) = <_>::default();
    for granted in &assignment.devices {
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
        *(if granted.kind == DeviceKind::Gpu { &mut part.1 } else { &mut part.2 }) += 1;
    }
    u64::from(distance(&parts, None).unwrap_or(0))
}
