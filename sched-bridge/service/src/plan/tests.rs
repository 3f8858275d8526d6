//! Plans run through a mover that does as it is told: fails, is killed in the middle, is slow.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use sched_bridge::model::{NodeName, VmName};

use super::mover::{Listed, Moved, Mover};
use super::run::{Limits, RunError, run};
use super::{Plan, PlanState, StepState, make};
use crate::api::plans::PlanRequest;
use crate::bridge::tests::{Running, embedded, id, node};
use crate::bridge::{Ask, Want};
use crate::clock::ManualClock;
use crate::slurm_stream::whole_nodes;
use crate::start::StartVm;

/// Where VMs really are, and what goes wrong.
#[derive(Debug, Default)]
pub struct World {
    pub at: BTreeMap<String, NodeName>,
    pub fail: BTreeSet<String>,
    pub stuck: BTreeSet<String>,
    at_work: usize,
    most_at_work: usize,
    pub log: Vec<String>,
}

#[derive(Debug, Clone, Default)]
pub struct FakeMover(pub Arc<Mutex<World>>, Duration);

#[async_trait]
impl Mover for FakeMover {
    async fn migrate(&self, vm: &VmName, from: &NodeName, to: &NodeName) -> Moved {
        {
            let mut world = self.0.lock().unwrap();
            assert_eq!(world.at.get(vm.as_str()), Some(from), "{vm} is told to leave where it is not");
            world.at_work += 1;
            world.most_at_work = world.most_at_work.max(world.at_work);
            world.log.push(vm.to_string());
        }
        tokio::time::sleep(self.1).await;
        let mut world = self.0.lock().unwrap();
        world.at_work -= 1;
        if world.fail.contains(vm.as_str()) {
            return Moved::Stayed("refused: a passthrough device".to_owned());
        }
        world.at.insert(vm.to_string(), to.clone());
        Moved::Arrived { total_ms: 10, downtime_us: 500 }
    }

    async fn list(&self, node: &NodeName) -> Result<BTreeMap<String, Listed>, String> {
        let world = self.0.lock().unwrap();
        let here = world.at.iter().filter(|(_, at)| *at == node);
        Ok(here.map(|(vm, _)| (vm.clone(), Listed { moving: false, ended: false })).collect())
    }

    async fn start(&self, node: &NodeName, vm: &StartVm) -> Result<(), String> {
        let mut world = self.0.lock().unwrap();
        if world.fail.contains(vm.vm.as_str()) {
            return Err("no such QEMU".to_owned());
        }
        world.log.push(vm.command_line.join(" "));
        assert_eq!(world.at.insert(vm.vm.to_string(), node.clone()), None, "{} runs already", vm.vm);
        Ok(())
    }

    async fn stop(&self, node: &NodeName, vm: &VmName) -> Result<(), String> {
        let mut world = self.0.lock().unwrap();
        if world.stuck.contains(vm.as_str()) {
            return Err("its monitor does not answer".to_owned());
        }
        assert_eq!(world.at.remove(vm.as_str()).as_ref(), Some(node), "{vm}");
        Ok(())
    }
}

fn name(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

/// Six nodes of 8 GPUs; a cluster of `vms` VMs, a node each; and the world as it is then.
pub async fn scene(dir: &std::path::Path, vms: u32) -> (Running, FakeMover) {
    let running = embedded(dir, &Arc::new(ManualClock::new())).await;
    for number in 0..6 {
        running.0.put_node(node(&format!("n{number}"), 8)).await.unwrap();
    }
    let topology = serde_json::from_value(serde_json::json!({ "switches": [
        { "name": "l0", "nodes": ["n0", "n1", "n2"] }, { "name": "l1", "nodes": ["n3", "n4", "n5"] },
        { "name": "s", "switches": ["l0", "l1"] }] }))
    .unwrap();
    running.0.put_topology(&topology).await.unwrap();
    let want = Want::Place(Box::new(whole_nodes("vc", vms)));
    let granted =
        running.0.grant(Ask { id: id("vc"), holder: "alice".into(), want, ttl_ms: 60_000 }).await.unwrap();
    let mover = FakeMover(Arc::default(), Duration::from_millis(20));
    for held in &granted.lease.held {
        mover.0.lock().unwrap().at.insert(held.assignment.vm.to_string(), held.assignment.node.clone());
    }
    (running, mover)
}

/// The store says what the world says.
fn agree(running: &Running, mover: &FakeMover) {
    let view = running.0.view().unwrap();
    let lease = &view.lease(&id("vc")).unwrap().lease;
    let world = mover.0.lock().unwrap();
    assert_eq!(lease.held.len(), world.at.len(), "one place for each VM");
    for held in &lease.held {
        assert_eq!(world.at.get(held.assignment.vm.as_str()), Some(&held.assignment.node));
    }
}

async fn evacuation(running: &Running, from: &NodeName) -> Plan {
    let request = PlanRequest::Evacuate { node: from.to_string() };
    let plan = make::make(&running.0, &request).await.unwrap();
    running.0.put_plan(&plan, None).await.unwrap();
    plan
}

fn home(running: &Running, vm: usize) -> NodeName {
    running.0.view().unwrap().lease(&id("vc")).unwrap().lease.held[vm].assignment.node.clone()
}

#[tokio::test]
async fn an_evacuation_empties_a_node_and_the_leases_follow() {
    let dir = tempfile::tempdir().unwrap();
    let (running, mover) = scene(dir.path(), 2).await;
    let from = home(&running, 0);
    let plan = evacuation(&running, &from).await;
    assert_eq!((plan.steps.len(), plan.hops.after), (1, 1), "the third node of the same leaf: {plan:?}");
    let done = run(&running.0, Arc::new(mover.clone()), &plan.id, Limits::default()).await.unwrap();
    assert_eq!(done.state, PlanState::Done);
    assert!(matches!(done.steps[0].state, StepState::Done { total_ms: 10, downtime_us: 500 }));
    agree(&running, &mover);
    assert_ne!(home(&running, 0), from);
    // Run again, it is done already.
    run(&running.0, Arc::new(mover.clone()), &plan.id, Limits::default()).await.unwrap();
    assert_eq!(mover.0.lock().unwrap().log.len(), 1);
}

#[tokio::test]
async fn a_failure_stops_a_plan_and_running_it_again_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (running, mover) = scene(dir.path(), 3).await;
    let plan = evacuation(&running, &home(&running, 1)).await;
    let vm = plan.steps[0].vm.to_string();
    mover.0.lock().unwrap().fail.insert(vm.clone());
    let stopped = run(&running.0, Arc::new(mover.clone()), &plan.id, Limits::default()).await.unwrap();
    let PlanState::Stopped { reason } = &stopped.state else { panic!("{stopped:?}") };
    assert!(reason.contains(&vm) && reason.contains("passthrough"), "{reason}");
    agree(&running, &mover);
    mover.0.lock().unwrap().fail.clear();
    let done = run(&running.0, Arc::new(mover.clone()), &plan.id, Limits::default()).await.unwrap();
    assert_eq!(done.state, PlanState::Done);
    agree(&running, &mover);
}

#[tokio::test]
async fn a_plan_whose_bridge_died_is_taken_over_and_decided_by_where_the_vm_is() {
    for arrived in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (running, mover) = scene(dir.path(), 2).await;
        let mut plan = evacuation(&running, &home(&running, 0)).await;
        // As a bridge leaves it that was killed while the VM moved: leased, marked, its runner silent.
        let step = plan.steps[0].clone();
        running.0.reserve_move(&step.to).await.unwrap();
        plan.steps[0].state = StepState::Moving;
        plan.state = PlanState::Running;
        plan.runner = Some(super::Runner { id: "dead".into(), beat: 3 });
        running.0.put_plan(&plan, None).await.unwrap();
        if arrived {
            mover.0.lock().unwrap().at.insert(step.vm.to_string(), step.to.node.clone());
        }
        let done = run(&running.0, Arc::new(mover.clone()), &plan.id, Limits::default()).await.unwrap();
        assert_eq!(done.state, PlanState::Done, "{done:?}");
        assert_eq!(mover.0.lock().unwrap().log.len(), usize::from(!arrived), "moved once, by whoever it was");
        agree(&running, &mover);
    }
}

#[tokio::test(start_paused = true)]
async fn a_plan_that_is_being_run_is_not_run_twice() {
    let dir = tempfile::tempdir().unwrap();
    let (running, mover) = scene(dir.path(), 2).await;
    let slow = FakeMover(Arc::clone(&mover.0), Duration::from_secs(8));
    let plan = evacuation(&running, &home(&running, 0)).await;
    let first = {
        let (bridge, id) = (Arc::clone(&running.0), plan.id.clone());
        tokio::spawn(async move { run(&bridge, Arc::new(slow), &id, Limits::default()).await })
    };
    while running.0.plan(&plan.id).unwrap().runner.is_none() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let second = run(&running.0, Arc::new(mover.clone()), &plan.id, Limits::default()).await;
    assert!(matches!(second, Err(RunError::Running(_))), "{second:?}");
    assert_eq!(first.await.unwrap().unwrap().state, PlanState::Done);
}

/// Three VMs of one node go to three others: as many at once as the node and its uplink bear.
#[tokio::test]
async fn as_many_at_once_as_nodes_and_uplinks_bear() {
    for (per_node, per_uplink, most) in [(1, 9, 1), (2, 9, 2), (9, 1, 1), (9, 9, 3)] {
        let dir = tempfile::tempdir().unwrap();
        let running = embedded(dir.path(), &Arc::new(ManualClock::new())).await;
        for number in 0..4 {
            running.0.put_node(node(&format!("n{number}"), 8)).await.unwrap();
        }
        let topology = serde_json::from_value(serde_json::json!({ "switches": [
            { "name": "l0", "nodes": ["n0"] }, { "name": "l1", "nodes": ["n1", "n2", "n3"] },
            { "name": "s", "switches": ["l0", "l1"] }] }))
        .unwrap();
        running.0.put_topology(&topology).await.unwrap();
        let mover = FakeMover(Arc::default(), Duration::from_millis(100));
        let vms: Vec<_> =
            (0..3).map(|gpu| crate::bridge::tests::one_gpu(&format!("vc-{gpu}"), "n0", gpu)).collect();
        running.0.grant(crate::bridge::tests::ask("vc", vms.clone())).await.unwrap();
        let mut steps = Vec::new();
        for (at, vm) in vms.iter().enumerate() {
            mover.0.lock().unwrap().at.insert(vm.vm.to_string(), name("n0"));
            let to = crate::bridge::tests::one_gpu(vm.vm.as_str(), &format!("n{}", at + 1), 0);
            steps.push(super::PlanStep {
                vm: vm.vm.clone(),
                from: name("n0"),
                to,
                memory_mib: 1,
                spare: false,
                state: StepState::Pending,
            });
        }
        let plan = Plan {
            id: id("p"),
            purpose: "test".into(),
            made_wall_ms: 0,
            steps,
            hops: Default::default(),
            notes: Vec::new(),
            state: PlanState::Planned,
            runner: None,
        };
        running.0.put_plan(&plan, None).await.unwrap();
        let done = run(&running.0, Arc::new(mover.clone()), &plan.id, Limits { per_node, per_uplink })
            .await
            .unwrap();
        assert_eq!(done.state, PlanState::Done);
        assert_eq!(
            mover.0.lock().unwrap().most_at_work,
            most,
            "{per_node} per node, {per_uplink} per uplink"
        );
        agree(&running, &mover);
    }
}

#[tokio::test]
async fn a_scattered_cluster_is_brought_together() {
    let dir = tempfile::tempdir().unwrap();
    let (running, mover) = scene(dir.path(), 2).await;
    // A second cluster finds one free node under each leaf, until the first has gone.
    let want = |name: &str| Want::Place(Box::new(whole_nodes(name, 1)));
    for filler in ["f0", "f1"] {
        let ask = Ask { id: id(filler), holder: "bob".into(), want: want(filler), ttl_ms: 60_000 };
        running.0.grant(ask).await.unwrap();
    }
    let ask = Ask {
        id: id("w"),
        holder: "eve".into(),
        want: Want::Place(Box::new(whole_nodes("w", 2))),
        ttl_ms: 60_000,
    };
    let scattered = running.0.grant(ask).await.unwrap().placement.unwrap().score.max_hops;
    for filler in ["f0", "f1"] {
        running.0.release(&id(filler)).await.unwrap();
    }
    let request = PlanRequest::Compact { cluster: Some("w".into()) };
    let plan = make::make(&running.0, &request).await.unwrap();
    assert!(plan.hops.after <= plan.hops.before);
    if scattered > 1 {
        assert!(plan.hops.after < plan.hops.before && !plan.steps.is_empty(), "{plan:?}");
    }
    let none =
        make::make(&running.0, &PlanRequest::Compact { cluster: Some("nobody".into()) }).await.unwrap_err();
    assert!(none.to_string().contains("nobody"), "{none}");
    drop(mover);
}
