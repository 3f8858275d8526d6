//! A cluster that gets more VMs, or fewer: as compact as it can be with the others where they are.

use super::changes::request_of_group;
use super::evacuate::best_place;
use super::{PlanError, Resident};
use crate::model::{Assignment, Fleet, NodeIndex, Occupancy, VmName};

/// Places for further VMs of a group, one after the other: each where the cluster is the most compact with it. The others stay where they are.
/// `names`: those of the new VMs. `used` has everything that is leased.
///
/// # Errors
/// There is no room for all within the limits of the cluster; then none is placed.
pub fn grow(
    fleet: &Fleet,
    used: &Occupancy,
    resident: &Resident,
    group: usize,
    names: &[VmName],
) -> Result<Vec<Assignment>, PlanError> {
    let (mut resident, mut used) = (resident.clone(), used.clone());
    let unknown = || PlanError::Unknown { what: "group", name: group.to_string() };
    let mut added = Vec::new();
    for name in names {
        let one = request_of_group(&resident.request, group).ok_or_else(unknown)?;
        resident.request.groups[group].count += 1;
        let end = resident.request.groups[..=group].iter().map(|group| group.count as usize).sum::<usize>();
        let others = resident.assignments.iter().filter_map(|vm| fleet.find(vm.node.as_str()));
        let others: Vec<NodeIndex> = others.collect();
        let put = |to: &Assignment| {
            let mut all = resident.assignments.clone();
            all.insert(end - 1, to.clone());
            all
        };
        let found = best_place(fleet, &used, &resident.request, (&one, name), &others, put)?;
        let to = found.map_err(|reason| PlanError::NoRoom {
            cluster: resident.request.name.clone(),
            reason: format!("{} of {} more VMs fit; for the next, {reason}", added.len(), names.len()),
        })?;
        used.take(fleet, &to)?;
        resident.assignments.insert(end - 1, to.clone());
        added.push(to);
    }
    Ok(added)
}

/// Which VMs of a group leave, so that the rest of the cluster is compact: each time that with the most hops to all others; of several the last.
/// Fewer than `count` if the group has no more.
#[must_use]
pub fn shrink(fleet: &Fleet, resident: &Resident, group: usize, count: usize) -> Vec<VmName> {
    let counts: Vec<usize> = resident.request.groups.iter().map(|group| group.count as usize).collect();
    let Some(of_group) = counts.get(group) else { return Vec::new() };
    let begin: usize = counts[..group].iter().sum();
    let nodes: Vec<Option<NodeIndex>> =
        resident.assignments.iter().map(|vm| fleet.find(vm.node.as_str())).collect();
    // Nodes that are not connected are farther than all that are.
    let hops = |a: usize, b: usize| match (nodes[a], nodes[b]) {
        (Some(a), Some(b)) => fleet.hops(a, b).map_or(1 << 32, u64::from),
        _ => 1 << 32,
    };
    let mut left: Vec<usize> = (0..resident.assignments.len()).collect();
    let mut sums: Vec<u64> = left.iter().map(|a| left.iter().map(|b| hops(*a, *b)).sum()).collect();
    let mut leave = Vec::new();
    while leave.len() < count.min(*of_group) {
        let own = left.iter().filter(|at| (begin..begin + of_group).contains(*at));
        let Some(&farthest) = own.max_by_key(|at| (sums[**at], **at)) else { break };
        left.retain(|at| *at != farthest);
        for at in &left {
            sums[*at] -= hops(*at, farthest);
        }
        leave.push(resident.assignments[farthest].vm.clone());
    }
    leave
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ClusterName, MemoryMib, Node, NodeName};
    use crate::place::{Alternative, ClusterRequest, Options, VmGroup, place};
    use crate::topology::{Format, import};

    /// Two leaves of three nodes with four cores, below one switch.
    fn fleet() -> Fleet {
        let text = "SwitchName=l1 Nodes=n[1-3]\nSwitchName=l2 Nodes=n[4-6]\nSwitchName=s Switches=l[1-2]\n";
        let topology = import(text, Format::SlurmConf, &[]).unwrap().topology;
        let node = |at: usize| Node::plain(NodeName::new(format!("n{at}")).unwrap(), 4, MemoryMib(16384));
        Fleet::new((1..=6).map(node).collect(), topology).unwrap()
    }

    fn request(name: &str, count: u32, vcpus: u32) -> ClusterRequest {
        let needs = Alternative { vcpus, memory: MemoryMib(512), ..Alternative::default() };
        let group = VmGroup { name: "vm".to_owned(), count, alternatives: vec![needs] };
        ClusterRequest::new(ClusterName::new(name).unwrap(), vec![group])
    }

    fn placed(fleet: &Fleet, used: &mut Occupancy, request: ClusterRequest) -> Resident {
        let assignments = place(fleet, used, &request, &Options::default()).unwrap().assignments;
        assignments.iter().for_each(|one| used.take(fleet, one).unwrap());
        Resident { request, assignments, pinned: Vec::new() }
    }

    fn names(from: usize, until: usize) -> Vec<VmName> {
        (from..until).map(|at| VmName::new(format!("c-vm-{at}")).unwrap()).collect()
    }

    fn nodes(all: &[Assignment]) -> Vec<&str> {
        all.iter().map(|one| one.node.as_str()).collect()
    }

    #[test]
    fn what_is_added_is_on_the_same_node_then_on_the_same_leaf_then_elsewhere() {
        let fleet = fleet();
        let mut used = Occupancy::new(&fleet);
        let cluster = placed(&fleet, &mut used, request("c", 1, 2));
        let home = cluster.assignments[0].node.clone();
        let added = grow(&fleet, &used, &cluster, 0, &names(1, 7)).unwrap();
        assert_eq!(added[0].node, home, "two cores are left there");
        let near = fleet.find(home.as_str()).unwrap();
        let hops = |one: &Assignment| fleet.hops(near, fleet.find(one.node.as_str()).unwrap()).unwrap();
        assert_eq!(added.iter().map(hops).collect::<Vec<_>>(), [0, 1, 1, 1, 1, 3], "{:?}", nodes(&added));
        assert_eq!(added[5].vm.as_str(), "c-vm-6");
    }

    #[test]
    fn all_are_added_or_none_and_the_refusal_says_how_many_would_fit() {
        let fleet = fleet();
        let mut used = Occupancy::new(&fleet);
        let cluster = placed(&fleet, &mut used, request("c", 1, 4));
        let refused = grow(&fleet, &used, &cluster, 0, &names(1, 8)).unwrap_err().to_string();
        assert!(refused.contains("5 of 7 more VMs fit"), "{refused}");
        let mut narrow = cluster;
        narrow.request.compactness.max_hops = Some(1);
        let refused = grow(&fleet, &used, &narrow, 0, &names(1, 4)).unwrap_err().to_string();
        assert!(refused.contains("2 of 3 more VMs fit"), "{refused}");
    }

    #[test]
    fn those_that_are_farthest_from_the_others_leave_first() {
        let fleet = fleet();
        let mut used = Occupancy::new(&fleet);
        let mut cluster = placed(&fleet, &mut used, request("c", 3, 4));
        let far = if nodes(&cluster.assignments)[0] < "n4" { "n5" } else { "n2" };
        cluster.assignments[1].node = NodeName::new(far).unwrap();
        assert_eq!(shrink(&fleet, &cluster, 0, 1), [cluster.assignments[1].vm.clone()]);
        let two = shrink(&fleet, &cluster, 0, 2);
        assert_eq!(two, [cluster.assignments[1].vm.clone(), cluster.assignments[2].vm.clone()]);
        assert_eq!(shrink(&fleet, &cluster, 0, 9).len(), 3);
    }
}
