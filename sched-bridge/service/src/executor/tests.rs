//! Plans run with a driver whose migrations fail, are slow, or were begun by a bridge that died.

use std::sync::Arc;
use std::time::Duration;

use super::{Limits, RunError, run};
use sched_bridge::model::{NodeName, NodeState};

use crate::bridge::BridgeError;
use crate::planner::{make_and_keep, make_plan};
use crate::testing::{
    FakeDriver, TestBridge, exactly, gpus_on, id, name, one_gpu, scene, two_leaves, whole_nodes,
};
use vmove_bridge_types::plan::{HopsGain, Plan, PlanRequest, PlanState, PlanStep, Runner, StepState};

/// The lease says where the VMs run.
fn assert_lease_follows(bridge: &TestBridge, driver: &FakeDriver) {
    let view = bridge.view().unwrap();
    let lease = &view.lease(&id("vc")).unwrap().lease;
    let world = driver.world();
    assert_eq!(lease.held.len(), world.running.len(), "one place for each VM");
    for held in &lease.held {
        assert_eq!(world.running.get(held.assignment.vm.as_str()), Some(&held.assignment.node));
    }
}

/// A stored plan that evacuates the node of a VM.
async fn evacuation_of(bridge: &TestBridge, vm: usize) -> Plan {
    let request = PlanRequest::Evacuate { node: bridge.home("vc", vm).to_string() };
    let plan = make_plan(bridge, &request, &Arc::default()).await.unwrap();
    bridge.put_plan(&plan, None).await.unwrap();
    plan
}

async fn run_with(bridge: &TestBridge, driver: &FakeDriver, plan: &Plan) -> Plan {
    run(bridge, Arc::new(driver.clone()), &plan.id, Limits::default()).await.unwrap()
}

#[tokio::test]
async fn an_evacuation_empties_a_node_and_the_leases_follow() {
    let (bridge, driver) = scene(2).await;
    let from = bridge.home("vc", 0);
    let plan = evacuation_of(&bridge, 0).await;
    assert_eq!((plan.steps.len(), plan.hops.after), (1, 1), "the third node of the same leaf: {plan:?}");
    let done = run_with(&bridge, &driver, &plan).await;
    assert_eq!(done.state, PlanState::Done);
    assert!(matches!(done.steps[0].state, StepState::Done { total_ms: 10, downtime_us: 500 }));
    assert_lease_follows(&bridge, &driver);
    assert_ne!(bridge.home("vc", 0), from);
    // Run again, it is done already.
    run_with(&bridge, &driver, &plan).await;
    assert_eq!(driver.world().log.len(), 1);
}

#[tokio::test]
async fn a_failure_stops_a_plan_and_running_it_again_continues() {
    let (bridge, driver) = scene(3).await;
    let plan = evacuation_of(&bridge, 1).await;
    let vm = plan.steps[0].vm.to_string();
    driver.world().failing.insert(vm.clone());
    let stopped = run_with(&bridge, &driver, &plan).await;
    let PlanState::Stopped { reason } = &stopped.state else { panic!("{stopped:?}") };
    assert!(reason.contains(&vm) && reason.contains("passthrough"), "{reason}");
    assert_lease_follows(&bridge, &driver);
    driver.world().failing.clear();
    assert_eq!(run_with(&bridge, &driver, &plan).await.state, PlanState::Done);
    assert_lease_follows(&bridge, &driver);
}

#[tokio::test]
async fn vms_of_a_lease_with_devices_leave_a_node_at_one_barrier_and_the_outage_is_predicted() {
    let bridge = TestBridge::empty().await;
    bridge.put_nodes(&["n0", "n1", "n2"], 8).await;
    bridge.put_topology(&two_leaves(&["n0"], &["n1", "n2"])).await.unwrap();
    let granted = bridge.grant(gpus_on("vc", "n0", 2)).await.unwrap();
    assert!(granted.lease.held.iter().all(|held| held.assignment.node.as_str() == "n0"), "{granted:?}");
    let plan =
        make_plan(&bridge, &PlanRequest::Evacuate { node: "n0".to_owned() }, &Arc::default()).await.unwrap();
    let groups: Vec<_> = plan.steps.iter().map(|step| step.group).collect();
    assert_eq!(groups, [Some(1), Some(1)], "{plan:?}");
    let outage = &plan.steps[0].outages;
    assert_eq!(outage.len(), 1);
    assert!(outage[0].outage_ms > 1000, "{outage:?}");
}

/// Two VMs with a GPU each leave a node as one: one that fails keeps both, and nothing is taken at their destinations.
#[tokio::test]
async fn vms_of_a_lease_with_devices_move_as_one_and_a_failure_of_one_keeps_all() {
    let bridge = TestBridge::empty().await;
    bridge.put_nodes(&["n0", "n1", "n2"], 8).await;
    bridge.put_topology(&two_leaves(&["n0"], &["n1", "n2"])).await.unwrap();
    let granted = bridge.grant(gpus_on("vc", "n0", 2)).await.unwrap();
    let driver = FakeDriver::default().with_migration_time(Duration::from_millis(20));
    let homes: Vec<_> = granted.lease.held.iter().map(|held| held.assignment.clone()).collect();
    driver.start_all(&homes);
    for home in &homes {
        let address = home.devices[0].address.to_string();
        let device = vmove_grant::GrantedDevice { role: "gpu0".to_owned(), address };
        driver.world().devices.insert(home.vm.to_string(), vec![device]);
    }
    let plan = evacuation_of(&bridge, 0).await;
    let second = homes[1].vm.to_string();
    driver.world().failing.insert(second.clone());
    let stopped = run_with(&bridge, &driver, &plan).await;
    let PlanState::Stopped { reason } = &stopped.state else { panic!("{stopped:?}") };
    assert!(reason.contains("which move at one barrier") && reason.contains(&second), "{reason}");
    assert!(stopped.steps.iter().all(|step| matches!(step.state, StepState::Failed { .. })), "{stopped:?}");
    assert_lease_follows(&bridge, &driver);

    driver.world().failing.clear();
    let done = run_with(&bridge, &driver, &plan).await;
    assert_eq!(done.state, PlanState::Done);
    assert_lease_follows(&bridge, &driver);
    let world = driver.world();
    assert!(world.log.iter().all(|moved| moved.contains('+')), "{:?}", world.log);
    for step in &done.steps {
        let given = &world.devices[step.vm.as_str()];
        let leased = step.to.devices[0].address.to_string();
        assert_eq!((given.len(), given[0].role.as_str(), &given[0].address), (1, "gpu0", &leased));
    }
}

#[tokio::test]
async fn a_plan_whose_bridge_died_is_taken_over_and_decided_by_where_the_vm_is() {
    for arrived in [false, true] {
        let (bridge, driver) = scene(2).await;
        let mut plan = evacuation_of(&bridge, 0).await;
        // As a bridge leaves it that was killed during the migration: leased, marked, its runner silent.
        let step = plan.steps[0].clone();
        bridge.reserve_move(&step.to).await.unwrap();
        plan.steps[0].state = StepState::Moving;
        plan.state = PlanState::Running;
        plan.runner = Some(Runner { id: "dead".into(), beat: 3 });
        bridge.put_plan(&plan, None).await.unwrap();
        if arrived {
            driver.world().running.insert(step.vm.to_string(), step.to.node.clone());
        }
        let done = run_with(&bridge, &driver, &plan).await;
        assert_eq!(done.state, PlanState::Done, "{done:?}");
        assert_eq!(driver.world().log.len(), usize::from(!arrived), "migrated once, by one of both");
        assert_lease_follows(&bridge, &driver);
    }
}

#[tokio::test(start_paused = true)]
async fn a_plan_that_is_being_run_is_not_run_twice() {
    let (bridge, driver) = scene(2).await;
    let slow = driver.with_migration_time(Duration::from_secs(8));
    let plan = evacuation_of(&bridge, 0).await;
    let first = {
        let (bridge, id) = (Arc::clone(&bridge), plan.id.clone());
        tokio::spawn(async move { run(&bridge, Arc::new(slow), &id, Limits::default()).await })
    };
    while bridge.plan(&plan.id).unwrap().runner.is_none() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let second = run(&bridge, Arc::new(driver), &plan.id, Limits::default()).await;
    assert!(matches!(second, Err(RunError::AlreadyRunning(_))), "{second:?}");
    assert_eq!(first.await.unwrap().unwrap().state, PlanState::Done);
}

/// Three VMs of one node go to three others, as many at once as the limits allow.
#[tokio::test]
async fn as_many_at_once_as_nodes_and_uplinks_bear() {
    for (per_node, per_uplink, most) in [(1, 9, 1), (2, 9, 2), (9, 1, 1), (9, 9, 3)] {
        let bridge = TestBridge::empty().await;
        bridge.put_nodes(&["n0", "n1", "n2", "n3"], 8).await;
        bridge.put_topology(&two_leaves(&["n0"], &["n1", "n2", "n3"])).await.unwrap();
        let driver = FakeDriver::default().with_migration_time(Duration::from_millis(100));
        let vms: Vec<_> = (0..3).map(|gpu| one_gpu(&format!("vc-{gpu}"), "n0", gpu)).collect();
        driver.start_all(&vms);
        bridge.grant(exactly("vc", vms.clone())).await.unwrap();
        let step = |(at, vm): (usize, &sched_bridge::model::Assignment)| PlanStep {
            vm: vm.vm.clone(),
            from: name("n0"),
            to: one_gpu(vm.vm.as_str(), &format!("n{}", at + 1), 0),
            memory_mib: 1,
            spare: false,
            group: None,
            outages: Vec::new(),
            state: StepState::Pending,
        };
        let plan = Plan {
            id: id("p"),
            purpose: "test".into(),
            made_wall_ms: 0,
            steps: vms.iter().enumerate().map(step).collect(),
            hops: HopsGain::default(),
            drains: None,
            notes: Vec::new(),
            state: PlanState::Planned,
            runner: None,
        };
        bridge.put_plan(&plan, None).await.unwrap();
        let limits = Limits { per_node, per_uplink };
        let done = run(&bridge, Arc::new(driver.clone()), &plan.id, limits).await.unwrap();
        assert_eq!(done.state, PlanState::Done);
        assert_eq!(driver.world().most_migrating, most, "{per_node} per node, {per_uplink} per uplink");
        assert_lease_follows(&bridge, &driver);
    }
}

#[tokio::test]
async fn a_scattered_cluster_is_brought_together() {
    let (bridge, _) = scene(2).await;
    // Only one node is left below each leaf.
    let first_leaf = ["n0", "n1", "n2"].contains(&bridge.home("vc", 0).as_str());
    let fillers = if first_leaf { ["n3", "n4"] } else { ["n0", "n1"] };
    for node in fillers {
        let all = (0..8).map(|gpu| one_gpu(&format!("{node}-{gpu}"), node, gpu));
        bridge.grant(exactly(node, all.collect())).await.unwrap();
    }
    let scattered = bridge.grant(whole_nodes("w", 2)).await.unwrap().placement.unwrap();
    assert_eq!(scattered.score.max_hops, 3, "{scattered:?}");
    for filler in fillers {
        bridge.release(&id(filler)).await.unwrap();
    }
    let plan = make_plan(&bridge, &PlanRequest::Compact { cluster: Some("w".into()) }, &Arc::default())
        .await
        .unwrap();
    assert!(plan.hops.after < plan.hops.before && !plan.steps.is_empty(), "{plan:?}");
    let none = make_plan(&bridge, &PlanRequest::Compact { cluster: Some("nobody".into()) }, &Arc::default())
        .await
        .unwrap_err();
    assert!(matches!(none, BridgeError::Invalid(_)) && none.to_string().contains("nobody"), "{none}");
}

#[tokio::test]
async fn a_node_is_drained_before_it_is_emptied_and_left_as_it_was_if_it_cannot_be() {
    let (bridge, driver) = scene(3).await;
    let node = bridge.home("vc", 0);
    let state = |of: &NodeName| bridge.view().unwrap().node(of).unwrap().0.state;
    let plan = make_and_keep(&bridge, &PlanRequest::Evacuate { node: node.to_string() }, &Arc::default())
        .await
        .unwrap();
    assert_eq!(state(&node), NodeState::Drained);
    assert!(plan.notes.iter().any(|note| note.contains("fleet resume")), "{:?}", plan.notes);
    // Resumed in between, it is drained again: no new VM comes while the others leave.
    bridge.set_node_state(&node, NodeState::Up).await.unwrap();
    let done = run_with(&bridge, &driver, &plan).await;
    assert_eq!((done.state, state(&node)), (PlanState::Done, NodeState::Drained));
    // All others take no VMs: there is no plan.
    let full = bridge.home("vc", 1);
    for other in ["n0", "n1", "n2", "n3", "n4", "n5"].map(name).into_iter().filter(|other| *other != full) {
        bridge.set_node_state(&other, NodeState::Drained).await.unwrap();
    }
    make_and_keep(&bridge, &PlanRequest::Evacuate { node: full.to_string() }, &Arc::default())
        .await
        .unwrap_err();
    assert_eq!(state(&full), NodeState::Up);
}

#[tokio::test]
async fn of_a_vm_that_was_not_started_only_the_place_moves() {
    let (bridge, driver) = scene(2).await;
    driver.world().running.clear();
    let plan = evacuation_of(&bridge, 0).await;
    let from = bridge.home("vc", 0);
    assert_eq!(run_with(&bridge, &driver, &plan).await.state, PlanState::Done);
    assert_ne!(bridge.home("vc", 0), from);
    assert_eq!(driver.world().log, Vec::<String>::new(), "nothing was migrated");
}
