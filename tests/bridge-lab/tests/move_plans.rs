//! Plans: every step finds its destination free, and the plan does what it says.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use std::collections::BTreeSet;

use bridge_lab::fleet::{FleetSpec, gpu_cluster};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use sched_bridge::model::{Fleet, NodeName, Occupancy, VmName};
use sched_bridge::moves::{Plan, PlanError, Resident, compact, evacuate, make_room, occupancy};
use sched_bridge::place::{ClusterRequest, Mode, place_at};

/// `leaves` leaf switches with two nodes of four GPUs each.
fn fleet(leaves: u32) -> Fleet {
    FleetSpec { nodes: leaves * 2, per_leaf: 2, fan_in: vec![2], gpus: 4, ..FleetSpec::three_levels(0) }
        .build()
        .unwrap()
}

fn resident(fleet: &Fleet, used: &mut Occupancy, request: ClusterRequest, on: &[(&str, u32)]) -> Resident {
    let nodes: Vec<_> = on.iter().map(|(name, vms)| (fleet.find(name).unwrap(), *vms)).collect();
    let placement = place_at(fleet, used, &request, &nodes).unwrap();
    for assignment in &placement.assignments {
        used.take(fleet, assignment).unwrap();
    }
    Resident { request, assignments: placement.assignments, pinned: Vec::new() }
}

/// Does the steps one after the other, then in another order that dependencies allow. Returns where everybody is in the end.
fn carry_out(fleet: &Fleet, residents: &[Resident], plan: &Plan) -> Vec<Resident> {
    let mut used = occupancy(fleet, residents).unwrap();
    let mut after = residents.to_vec();
    for (at, step) in plan.steps.iter().enumerate() {
        assert_eq!(step.id, at);
        assert!(step.after.iter().all(|before| *before < at));
        assert_ne!(step.from.node, step.to.node, "{step:?}");
        used.take(fleet, &step.to).unwrap_or_else(|error| panic!("step {at}: {error}"));
        used.release(fleet, &step.from).unwrap();
        let vm =
            after.iter_mut().flat_map(|own| &mut own.assignments).find(|own| own.vm == step.from.vm).unwrap();
        assert_eq!(*vm, step.from);
        *vm = step.to.clone();
    }
    // The last step that may go goes first: only dependencies hold it back.
    let mut used = occupancy(fleet, residents).unwrap();
    let mut done = vec![false; plan.steps.len()];
    while let Some(next) =
        plan.steps.iter().rev().find(|step| !done[step.id] && step.after.iter().all(|before| done[*before]))
    {
        used.take(fleet, &next.to).unwrap_or_else(|error| panic!("{error}: {next:?}"));
        used.release(fleet, &next.from).unwrap();
        done[next.id] = true;
    }
    assert!(done.iter().all(|done| *done));
    after
}

#[test]
fn a_node_is_emptied_to_the_nearest_place() {
    let fleet = fleet(4);
    let mut used = Occupancy::new(&fleet);
    let residents = vec![
        resident(&fleet, &mut used, gpu_cluster("a", 4, 1, 0), &[("n0", 2), ("n1", 2)]),
        resident(&fleet, &mut used, gpu_cluster("b", 2, 1, 1), &[("n0", 1), ("n7", 1)]),
    ];
    let plan = evacuate(&fleet, &residents, &NodeName::new("n0").unwrap()).unwrap();
    let after = carry_out(&fleet, &residents, &plan);
    assert_eq!(plan.steps.len(), 3);
    assert!(after.iter().flat_map(|own| &own.assignments).all(|own| own.node.as_str() != "n0"));
    assert!(
        after[0].assignments.iter().all(|own| own.node.as_str() == "n1"),
        "beside the rest of the cluster"
    );
    assert_eq!(after[1].assignments[0].node, after[1].assignments[1].node);
    assert_eq!(plan.hops.after, 0);
    assert_eq!(plan.memory.0, 3 * 16384);
}

#[test]
fn a_node_that_cannot_be_emptied_says_why() {
    let fleet = fleet(2);
    let mut used = Occupancy::new(&fleet);
    let mut full = vec![resident(
        &fleet,
        &mut used,
        gpu_cluster("a", 16, 1, 0),
        &[("n0", 4), ("n1", 4), ("n2", 4), ("n3", 4)],
    )];
    let error = evacuate(&fleet, &full, &NodeName::new("n0").unwrap()).unwrap_err();
    assert!(error.to_string().contains("no other node has room"), "{error}");
    full[0].pinned = vec![VmName::new("a-vm-0").unwrap()];
    let error = evacuate(&fleet, &full, &NodeName::new("n0").unwrap()).unwrap_err();
    assert!(error.to_string().contains("cannot move now"), "{error}");
    let error = evacuate(&fleet, &full, &NodeName::new("n9").unwrap()).unwrap_err();
    assert!(matches!(error, PlanError::Unknown { what: "node", .. }));
}

#[test]
fn a_scattered_cluster_is_brought_together() {
    let fleet = fleet(4);
    let mut used = Occupancy::new(&fleet);
    let spread = [("n0", 1), ("n2", 1), ("n4", 1), ("n6", 1)];
    let residents = vec![resident(&fleet, &mut used, gpu_cluster("a", 4, 1, 0), &spread)];
    let plan = compact(&fleet, &residents, Some("a")).unwrap();
    assert_eq!((plan.hops.after, plan.steps.len()), (0, 3), "one stays, three come to it");
    assert!(plan.hops.before > 20);
    carry_out(&fleet, &residents, &plan);
    assert!(matches!(
        compact(&fleet, &residents, Some("b")).unwrap_err(),
        PlanError::Unknown { what: "cluster", .. }
    ));
}

/// Two clusters sit crosswise on full nodes: no VM can go first unless one steps aside.
#[test]
fn a_deadlock_is_broken_by_a_spare_place() {
    let fleet = fleet(2);
    let mut used = Occupancy::new(&fleet);
    let mut residents = Vec::new();
    for (name, first, second) in [("a", "n0", "n1"), ("b", "n0", "n1")] {
        let mut request = gpu_cluster(name, 4, 1, 0);
        // They may only be on these two nodes, the filler of a third is gone by then.
        request.only_nodes = [NodeName::new(first).unwrap(), NodeName::new(second).unwrap()].into();
        residents.push(resident(&fleet, &mut used, request, &[(first, 2), (second, 2)]));
    }
    // All places of the two nodes are taken, and no VM may go elsewhere.
    assert_eq!(compact(&fleet, &residents, None).unwrap().steps, []);
    for own in &mut residents {
        own.request.only_nodes.clear();
        own.request.not_nodes = [NodeName::new("n3").unwrap()].into();
    }
    let mut filler = gpu_cluster("f", 3, 1, 0);
    filler.compactness.mode = Mode::Unconstrained;
    residents.push(resident(&fleet, &mut used, filler, &[("n2", 3)]));
    residents[2].pinned = residents[2].assignments.iter().map(|own| own.vm.clone()).collect();
    let plan = compact(&fleet, &residents, None).unwrap();
    let after = carry_out(&fleet, &residents, &plan);
    assert!(plan.hops.after < plan.hops.before, "{:?}", plan.hops);
    assert!(plan.steps.iter().any(|step| step.spare), "{plan:?}");
    let nodes =
        |own: &Resident| own.assignments.iter().map(|own| own.node.to_string()).collect::<BTreeSet<_>>();
    assert!(after.iter().all(|own| nodes(own).len() == 1), "{after:?}");
}

#[test]
fn room_is_made_by_moving_what_is_cheapest() {
    let fleet = fleet(2);
    let mut used = Occupancy::new(&fleet);
    // One small VM on each leaf: eight GPUs on one leaf are not free anywhere.
    let residents = vec![
        resident(&fleet, &mut used, gpu_cluster("a", 1, 1, 0), &[("n0", 1)]),
        resident(&fleet, &mut used, gpu_cluster("b", 2, 1, 0), &[("n2", 2)]),
    ];
    let mut request = gpu_cluster("big", 8, 1, 0);
    request.compactness.mode = Mode::Required;
    request.compactness.level = Some(sched_bridge::place::Domain::LEAF);
    let (plan, placement) = make_room(&fleet, &residents, &request).unwrap();
    assert_eq!(plan.steps.len(), 1, "{plan:?}");
    assert_eq!(plan.steps[0].cluster.as_str(), "a");
    let after = carry_out(&fleet, &residents, &plan);
    let mut used = occupancy(&fleet, &after).unwrap();
    for assignment in &placement.assignments {
        used.take(&fleet, assignment).unwrap();
    }
    request.groups[0].count = 17;
    let error = make_room(&fleet, &residents, &request).unwrap_err();
    assert!(matches!(error, PlanError::NoRoom { .. }), "{error}");
}

/// Random fleets with clusters here and there: plans can be carried out, and never make things worse.
#[test]
fn random_plans_can_be_carried_out() {
    let (mut steps, mut spares, mut before, mut after_all, mut stuck) = (0, 0, 0, 0, 0);
    for seed in 0..150 {
        let mut rng = StdRng::seed_from_u64(seed + 5);
        let fleet = fleet(2 + rng.random_range(0..3));
        let mut used = Occupancy::new(&fleet);
        let mut residents: Vec<Resident> = Vec::new();
        for at in 0..10 {
            let request =
                gpu_cluster(&format!("c{at}"), 1 + rng.random_range(0..5), 1, rng.random_range(0..2));
            let room = sched_bridge::place::capacities(&fleet, &used, &request).unwrap();
            let mut left = request.count();
            let mut on: Vec<(String, u32)> = Vec::new();
            for _ in 0..30 {
                let node = rng.random_range(0..u32::try_from(room.len()).unwrap()) as usize;
                let name = fleet.nodes()[node].name.to_string();
                if left > 0 && room[node] > 0 && !on.iter().any(|(known, _)| *known == name) {
                    on.push((name, 1));
                    left -= 1;
                }
            }
            if left == 0 {
                let on: Vec<(&str, u32)> = on.iter().map(|(name, vms)| (name.as_str(), *vms)).collect();
                residents.push(resident(&fleet, &mut used, request, &on));
            }
        }
        match compact(&fleet, &residents, None) {
            Ok(plan) => {
                carry_out(&fleet, &residents, &plan);
                assert!(plan.hops.after <= plan.hops.before, "seed {seed}: {:?}", plan.hops);
                steps += plan.steps.len();
                spares += plan.steps.iter().filter(|step| step.spare).count();
                before += plan.hops.before;
                after_all += plan.hops.after;
            }
            Err(PlanError::Deadlock { .. }) => stuck += 1,
            Err(error) => panic!("seed {seed}: {error}"),
        }
        if let Ok(plan) = evacuate(&fleet, &residents, &fleet.nodes()[0].name) {
            let after = carry_out(&fleet, &residents, &plan);
            assert!(
                after.iter().flat_map(|own| &own.assignments).all(|own| own.node != fleet.nodes()[0].name)
            );
        }
        if let Ok((plan, placement)) = make_room(&fleet, &residents, &gpu_cluster("new", 4, 1, 0)) {
            let after = carry_out(&fleet, &residents, &plan);
            let mut used = occupancy(&fleet, &after).unwrap();
            for assignment in &placement.assignments {
                used.take(&fleet, assignment).unwrap();
            }
        }
    }
    println!(
        "{steps} steps, {spares} to a spare place, {stuck} deadlocks; hops {before} before, {after_all} after"
    );
    assert!(
        steps > 300 && after_all * 10 < before * 7 && stuck < 15,
        "{steps} {spares} {stuck} {before} {after_all}"
    );
}
