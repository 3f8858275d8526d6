//! Which steps of a plan go at one barrier: the VMs of one lease that leave one node, and own devices or belong together as the lease says.
//!
//! Ranks of a parallel job cannot outlive each other. A group leaves one node, whose daemon decides for all of it, so VMs of a lease on
//! several nodes move in several groups, and the plan says so.

use std::collections::BTreeMap;

use sched_bridge::model::{Assignment, Granted};
use vmove_bridge_types::plan::{DeviceOutage, Plan, PlanStep};
use vmove_grant::GrantedDevice;

use crate::bridge::View;
use crate::lease::LeaseId;

/// A guest lets a device go within so many milliseconds, as a rule.
const UNPLUG_MS: u64 = 1000;
/// Guest memory that crosses in a millisecond, by a network of 10 Gbit/s. Unit: KiB.
const CROSSES_PER_MS: u64 = 1220;
/// Guest memory that is pinned in a millisecond, where it is in 4 KiB pages. Unit: KiB.
const PINNED_PER_MS: u64 = 1953;

/// Numbers the groups of a plan, and adds what is predicted of devices.
pub fn arrange(view: &View, plan: &mut Plan) {
    let mut groups: BTreeMap<(LeaseId, String), Vec<usize>> = BTreeMap::new();
    for (at, step) in plan.steps.iter().enumerate() {
        let Ok(entry) = view.lease_of(&step.vm) else { continue };
        let owns = entry.lease.home(&step.vm).is_some_and(|home| home.assignment.plugged().next().is_some());
        if !step.spare && (owns || entry.lease.together) {
            groups.entry((entry.lease.id.clone(), step.from.to_string())).or_default().push(at);
        }
    }
    let mut parts: BTreeMap<LeaseId, Vec<String>> = BTreeMap::new();
    let mut number = 0;
    for ((lease, from), members) in groups {
        parts.entry(lease.clone()).or_default().push(from.clone());
        if members.len() < 2 {
            continue;
        }
        if waits_for_itself(plan, &members) {
            plan.notes.push(format!(
                "the VMs of lease {lease} on {from} move one after the other: they wait for places that others free meanwhile"
            ));
            continue;
        }
        number += 1;
        members.iter().for_each(|at| plan.steps[*at].group = Some(number));
    }
    for (lease, nodes) in parts.into_iter().filter(|(_, nodes)| nodes.len() > 1) {
        plan.notes.push(format!(
            "VMs of lease {lease} leave {}: those of one node move at one barrier, those of several do not",
            nodes.join(", ")
        ));
    }
    predict(view, plan);
}

/// Whether a step that is no member waits for one member, and has another wait for it.
fn waits_for_itself(plan: &Plan, members: &[usize]) -> bool {
    let mut after = vec![false; plan.steps.len()];
    for at in 0..plan.steps.len() {
        let waits = plan.before(at).any(|earlier| after[earlier] || members.contains(&earlier));
        if waits && members.contains(&at) {
            return true;
        }
        after[at] = waits;
    }
    false
}

/// How long each VM will be without its devices: until all of its group have let theirs go, all memory has crossed, and its own is pinned.
fn predict(view: &View, plan: &mut Plan) {
    let group_mib = |step: &PlanStep| -> u64 {
        let same =
            |other: &&PlanStep| other.vm == step.vm || step.group.is_some() && other.group == step.group;
        plan.steps.iter().filter(same).map(|other| other.memory_mib).sum()
    };
    let outages: Vec<Vec<DeviceOutage>> = plan
        .steps
        .iter()
        .map(|step| {
            let home = view.lease_of(&step.vm).ok().and_then(|entry| entry.lease.home(&step.vm).cloned());
            let devices: Vec<Granted> =
                home.iter().flat_map(|home| home.assignment.plugged().copied()).collect();
            let crosses = (group_mib(step) * 1024).div_ceil(CROSSES_PER_MS);
            let pinned = (step.memory_mib * 1024).div_ceil(PINNED_PER_MS);
            let outage_ms = UNPLUG_MS + crosses + pinned;
            let outage = |device: &Granted| DeviceOutage { device: device.address.to_string(), outage_ms };
            devices.iter().map(outage).collect()
        })
        .collect();
    plan.steps.iter_mut().zip(outages).for_each(|(step, outages)| step.outages = outages);
}

/// The devices that a VM gets at its destination, in the roles that it knows: for each that it owns, the one in the same position among those of
/// its kind. What it owns without its lease has none.
pub fn in_their_roles(owned: &[GrantedDevice], from: &Assignment, to: &Assignment) -> Vec<GrantedDevice> {
    let counterpart = |device: &GrantedDevice| {
        let at = from.devices.iter().position(|leased| leased.address.to_string() == device.address)?;
        let kind = from.devices[at].kind;
        let of_kind = |all: &'_ [Granted]| all.iter().filter(|leased| leased.kind == kind).count();
        let position = of_kind(&from.devices[..at]);
        let there = to.devices.iter().filter(|leased| leased.kind == kind).nth(position)?;
        Some(GrantedDevice { role: device.role.clone(), address: there.address.to_string() })
    };
    owned.iter().filter_map(counterpart).collect()
}

#[cfg(test)]
mod tests {
    use sched_bridge::model::DeviceKind;

    use super::*;
    use crate::testing::one_gpu;

    #[test]
    fn a_role_keeps_its_kind_and_its_place_among_those_of_the_kind() {
        let leased = |devices: &[(&str, DeviceKind)]| {
            let device = |(address, kind): &(&str, DeviceKind)| Granted {
                address: address.parse().unwrap(),
                kind: *kind,
            };
            Assignment { devices: devices.iter().map(device).collect(), ..one_gpu("vm", "n0", 0) }
        };
        let (gpu, vf) = (DeviceKind::Gpu, DeviceKind::Vf);
        let from = leased(&[("0000:01:00.0", gpu), ("0000:02:00.0", gpu), ("0000:03:00.1", vf)]);
        // The other node lists functions first.
        let to = leased(&[("0000:09:00.5", vf), ("0000:0a:00.0", gpu), ("0000:0b:00.0", gpu)]);
        let device =
            |role: &str, address: &str| GrantedDevice { role: role.to_owned(), address: address.to_owned() };
        let owned =
            [device("net0", "0000:03:00.1"), device("gpu1", "0000:02:00.0"), device("mine", "0000:44:00.0")];
        let there = in_their_roles(&owned, &from, &to);
        assert_eq!(there, [device("net0", "0000:09:00.5"), device("gpu1", "0000:0b:00.0")]);
    }
}
