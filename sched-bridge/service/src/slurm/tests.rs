//! Against a real slurmctld with many slurmd on this machine.

use std::sync::Arc;

use sched_bridge::model::{Fleet, NodeIndex, NodeState};
use sched_bridge::place::ClusterRequest;
use sched_bridge::sim::{Churn, Event, SlurmTree, slurm_nodes};

use super::follow::Follow;
use super::read::{gpus, nodes, state};
use super::{Slurm, SlurmError};
use crate::bridge::{Ask, Want};
use crate::clock::{Clock, ManualClock};
use crate::lab::SlurmLab;
use crate::plan::tests::FakeMover;
use crate::slurm_stream::{self, Shape};

#[test]
fn gres_and_states_as_slurm_writes_them() {
    assert_eq!(gpus("gpu:8").unwrap(), [(String::new(), 8)]);
    assert_eq!(
        gpus("gpu:H100:4(S:0-1),gpu:a100:2,nic:mlx5:2").unwrap(),
        [("h100".into(), 4), ("a100".into(), 2)]
    );
    assert_eq!(gpus("(null)").unwrap(), []);
    gpus("gpu:many").unwrap_err();
    for (text, wanted) in [
        ("IDLE", NodeState::Up),
        ("MIXED+PLANNED", NodeState::Up),
        ("ALLOCATED+DRAIN", NodeState::Drained),
        ("IDLE*+DRAIN", NodeState::Drained),
        ("DOWN*+NOT_RESPONDING", NodeState::Down),
        ("UNKNOWN", NodeState::Down),
    ] {
        assert_eq!(state(text), wanted, "{text}");
    }
}

#[test]
fn malformed_output_is_named_by_its_line() {
    let good = "NodeName=n0 Arch=x86_64 CPUTot=8 Gres=gpu:2 RealMemory=100 State=IDLE";
    assert_eq!(nodes(good).unwrap()[0].devices.len(), 2);
    for (bad, wanted) in [
        ("Arch=x86_64", "NodeName="),
        ("NodeName=n1 CPUTot=x RealMemory=1 State=IDLE", "a number as CPUTot"),
        ("NodeName=n1 CPUTot=8 RealMemory=1 Gres=gpu:x State=IDLE", "gpu[:TYPE]:COUNT"),
    ] {
        let text = format!("{good}\n\n{bad}\n");
        let error = nodes(&text).unwrap_err();
        assert!(matches!(error, SlurmError::Output { line: 3, .. }), "{error}");
        assert!(error.to_string().contains(wanted), "{error}");
    }
}

proptest::proptest! {
    #[test]
    fn no_output_makes_it_panic(text in "(NodeName|CPUTot|Gres|State|RealMemory|[ =:,()\\n*+a-z0-9]){0,80}") {
        let _ = nodes(&text);
        let _ = super::read::topology(&text, &std::collections::HashMap::new());
    }
}

/// `vms` VMs, each on a node of its own with all 8 GPUs.
fn whole_nodes(name: &str, vms: u32) -> ClusterRequest {
    slurm_stream::whole_nodes(name, vms)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_gres_and_topology_are_read_held_and_drained() {
    let Some(lab) = SlurmLab::start_or_skip(16, 4, 2) else { return };
    let slurm = Slurm::new(lab.environment());
    let dir = tempfile::tempdir().unwrap();
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new());
    let store = crate::store::Embedded::open(&dir.path().join("s")).unwrap();
    let running = crate::bridge::Running::new(Arc::new(store), clock).await;
    let bridge = &running.0;
    assert!(slurm.publish(bridge).await.unwrap().is_empty());
    let view = bridge.view().unwrap();
    let fleet = view.fleet();
    assert_eq!(fleet.nodes().len(), 16);
    assert!(
        fleet
            .nodes()
            .iter()
            .all(|node| node.devices.len() == 8 && node.cores() == 8 && node.memory().0 == 65536)
    );
    let hops = |a: &str, b: &str| fleet.hops(fleet.find(a).unwrap(), fleet.find(b).unwrap());
    assert_eq!((hops("n0", "n3"), hops("n0", "n4"), hops("n0", "n8")), (Some(1), Some(3), Some(5)));

    // What the bridge placed, Slurm leaves alone: 12 nodes are left for jobs, and no 13.
    let want = Want::Place(Box::new(whole_nodes("vc", 4)));
    let granted = bridge
        .grant(Ask { id: "vc".parse().unwrap(), holder: "alice".into(), want, ttl_ms: 60_000 })
        .await
        .unwrap();
    assert_eq!(granted.placement.unwrap().score.max_hops, 1, "four nodes of one leaf");
    slurm.hold("vc", &granted.lease.nodes(), "root").await.unwrap();
    let allocate = |count: &'static str, seconds: &'static str| {
        let slurm = slurm.clone();
        async move {
            slurm.run(&["salloc", "--no-shell", seconds, "--exclusive", "-J", "other", "-N", count]).await
        }
    };
    allocate("13", "--immediate=2").await.unwrap_err();
    allocate("12", "--immediate=60").await.unwrap();
    let used = slurm.run(&["squeue", "-h", "-t", "R", "-o", "%N"]).await.unwrap();
    let used = slurm.run(&["scontrol", "show", "hostnames", used.trim()]).await.unwrap();
    assert!(
        granted.lease.nodes().iter().all(|node| !used.lines().any(|line| line == node.as_str())),
        "{used}"
    );
    // A job of the virtual cluster's own runs on them.
    let nodelist: Vec<String> = granted.lease.nodes().iter().map(ToString::to_string).collect();
    let nodelist = format!("--nodelist={}", nodelist.join(","));
    slurm
        .run(&["salloc", "--no-shell", "--immediate=60", "-N", "4", "--reservation=vc", &nodelist])
        .await
        .unwrap();

    // Slurm drains one of them: the bridge knows, and places nothing there any more.
    let drained = granted.lease.nodes()[0].clone();
    slurm
        .run(&["scontrol", "update", &format!("nodename={drained}"), "state=drain", "reason=test"])
        .await
        .unwrap();
    assert_eq!(slurm.publish(bridge).await.unwrap(), std::slice::from_ref(&drained));
    assert_eq!(bridge.view().unwrap().node(&drained).unwrap().0.state, NodeState::Drained);
    slurm.run(&["scancel", "-u", "root"]).await.unwrap();
    bridge.release(&"vc".parse().unwrap()).await.unwrap();
    let refused = bridge.what_if(whole_nodes("all", 16)).await.unwrap_err().to_string();
    assert!(refused.contains("15"), "{refused}");
    let mut gone = false;
    for _ in 0..1200 {
        gone = slurm.let_go("vc").await.is_ok();
        if gone {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    assert!(gone, "the reservation is free when its jobs have ended");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_stream_needs_no_more_hops_than_with_slurm() {
    let shape = Shape { nodes: 32, leaf: 4, spine: 4, largest: 8, events: 60, seed: 7 };
    let Some(lab) = SlurmLab::start_or_skip(shape.nodes, shape.leaf, shape.spine) else { return };
    let table = slurm_stream::compare(&Slurm::new(lab.environment()), &shape).await.unwrap();
    eprintln!("{table}");
    assert!(table.requests() >= 20, "{table}");
    assert!(table.bridge_hops() <= table.slurm_hops(), "{table}");
}

/// The model with which placements are compared in streams that are too long for a real Slurm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_model_of_slurm_takes_the_very_nodes_that_slurm_takes() {
    let Some(lab) = SlurmLab::start_or_skip(36, 4, 3) else { return };
    let slurm = Slurm::new(lab.environment());
    let fleet = Fleet::new(slurm.nodes().await.unwrap(), slurm.topology().await.unwrap()).unwrap();
    // (shared nodes, whole nodes)
    for (whole, largest, seed) in [(false, 40, 3), (true, 9, 4)] {
        let sizes: Vec<u32> = (1..=largest).collect();
        let mut churn = Churn::new(seed, &sizes, if whole { 29 } else { 230 });
        let mut compared = 0;
        let mut several_leaves = 0;
        // How often the guide's description, or a later Slurm, would have taken others: the test can tell.
        let mut others = [0, 0];
        for _ in 0..160 {
            let (id, tasks) = match churn.next_event() {
                Event::Arrive { id, vms } => (format!("m{id}"), vms),
                Event::Leave { id } => {
                    slurm_stream::end_named(&slurm, &format!("m{id}")).await.unwrap();
                    continue;
                }
            };
            let free = free_cpus(&slurm, &fleet).await;
            let (room, nodes): (Vec<u32>, u32) =
                if whole { (free.iter().map(|free| free / 8).collect(), tasks) } else { (free.clone(), 1) };
            let Some(model) = slurm_nodes(SlurmTree::V22, &fleet, &room, tasks, nodes) else { continue };
            let count = tasks.to_string();
            let shape: &[&str] =
                if whole { &["--exclusive", "-N", &count] } else { &["-n", &count, "--mem=1"] };
            let words = [&["salloc", "--no-shell", "--immediate=60", "-J", &id], shape].concat();
            slurm.run(&words).await.unwrap();
            let after = free_cpus(&slurm, &fleet).await;
            let unit = if whole { 8 } else { 1 };
            let taken = free.iter().zip(&after).map(|(before, after)| (before - after) / unit);
            let taken: Vec<(NodeIndex, u32)> =
                (0..).map(NodeIndex).zip(taken).filter(|(_, taken)| *taken > 0).collect();
            let mut model = model;
            model.sort_unstable();
            assert_eq!(model, taken, "{tasks} tasks, whole nodes: {whole}, free before: {free:?}");
            compared += 1;
            for (count, slurm) in others.iter_mut().zip([SlurmTree::Guide, SlurmTree::V24]) {
                let mut other = slurm_nodes(slurm, &fleet, &room, tasks, nodes).unwrap();
                other.sort_unstable();
                *count += u32::from(other != taken);
            }
            let leaves: std::collections::BTreeSet<_> = taken
                .iter()
                .map(|(index, _)| fleet.topology().leaf_of(fleet.node(*index).name.as_str()))
                .collect();
            several_leaves += u32::from(leaves.len() > 2);
        }
        assert!(
            compared >= 60 && several_leaves >= 10,
            "{compared} compared, {several_leaves} on several leaves"
        );
        assert!(whole || others.iter().all(|count| *count >= 10), "{others:?} of {compared} differ");
        eprintln!(
            "whole nodes: {whole}: {compared} placements alike; the guide and 24.05 differ in {others:?}"
        );
        slurm.run(&["scancel", "-u", "root"]).await.unwrap();
        slurm_stream::until_idle(&slurm).await.unwrap();
    }
}

/// Processors of each node that no job has.
async fn free_cpus(slurm: &Slurm, fleet: &Fleet) -> Vec<u32> {
    let text = slurm.run(&["scontrol", "-o", "show", "node"]).await.unwrap();
    let of = |line: &str, key: &str| super::read::field(line, key).unwrap().parse::<u32>().unwrap();
    let mut free = vec![0; fleet.nodes().len()];
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let name = super::read::field(line, "NodeName").unwrap();
        free[fleet.find(name).unwrap().usize()] = of(line, "CPUTot") - of(line, "CPUAlloc");
    }
    free
}

/// Slurm as an operator uses it, and the bridge that follows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_and_leases_keep_off_each_other_and_drained_nodes_are_emptied() {
    let Some(lab) = SlurmLab::start_or_skip(8, 4, 2) else { return };
    let slurm = Slurm::new(lab.environment());
    let dir = tempfile::tempdir().unwrap();
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new());
    let store = crate::store::Embedded::open(&dir.path().join("s")).unwrap();
    let running = crate::bridge::Running::new(Arc::new(store), clock).await;
    let bridge = &running.0;
    let every = std::time::Duration::from_secs(1);
    let follow =
        Follow { slurm: slurm.clone(), users: "root".into(), every, evacuate: true, alone: Arc::default() };

    // A job has a node: it is no place for VMs.
    slurm
        .run(&["salloc", "--no-shell", "--immediate=60", "--exclusive", "-J", "job", "--nodelist=n0"])
        .await
        .unwrap();
    follow.turn(bridge).await.unwrap();
    let ids = || bridge.view().unwrap().leases().keys().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(ids(), ["slurm.n0"]);
    bridge.what_if(whole_nodes("all", 8)).await.unwrap_err();
    let want = Want::Place(Box::new(whole_nodes("vc", 2)));
    let ask = Ask { id: "vc".parse().unwrap(), holder: "alice".into(), want, ttl_ms: 60_000 };
    let granted = bridge.grant(ask).await.unwrap();
    follow.turn(bridge).await.unwrap();
    let reserved = || async {
        let text = slurm.run(&["scontrol", "-o", "show", "reservation"]).await.unwrap();
        let line = text.lines().find(|line| line.contains("ReservationName=vmove-vc"));
        match line.and_then(|line| super::read::field(line, "Nodes")) {
            Some(list) => slurm.hosts(list).await.unwrap(),
            None => Default::default(),
        }
    };
    assert_eq!(reserved().await, granted.lease.nodes().into_iter().collect());

    // Slurm drains a node of the cluster: its VM leaves, and the reservation goes with it.
    let mover = FakeMover::default();
    for held in &granted.lease.held {
        mover.0.lock().unwrap().at.insert(held.assignment.vm.to_string(), held.assignment.node.clone());
    }
    let drained = granted.lease.nodes()[0].clone();
    slurm
        .run(&["scontrol", "update", &format!("nodename={drained}"), "state=drain", "reason=test"])
        .await
        .unwrap();
    follow.turn(bridge).await.unwrap();
    let movers: Arc<dyn crate::plan::mover::Mover> = Arc::new(mover.clone());
    let mut plans = Default::default();
    follow.empty(bridge, &movers, Default::default(), &mut plans).await.unwrap();
    assert!(mover.0.lock().unwrap().at.values().all(|at| *at != drained), "{mover:?}");
    follow.turn(bridge).await.unwrap();
    let nodes = reserved().await;
    assert!(nodes.len() == 2 && !nodes.contains(&drained), "{nodes:?}");
    // Empty, it is left alone.
    follow.empty(bridge, &movers, Default::default(), &mut plans).await.unwrap();
    assert_eq!(bridge.view().unwrap().plans().len(), 1);

    // What ends is given back, on both sides.
    bridge.release(&"vc".parse().unwrap()).await.unwrap();
    slurm.run(&["scancel", "-u", "root"]).await.unwrap();
    for _ in 0..600 {
        follow.turn(bridge).await.unwrap();
        if ids().is_empty() && reserved().await.is_empty() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    panic!("{:?} and {:?} are left", ids(), reserved().await);
}

/// No look lies between a job and a booking, in whatever order they come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_job_and_no_booking_come_onto_one_node_between_two_looks() {
    let Some(lab) = SlurmLab::start_or_skip(8, 4, 2) else { return };
    let slurm = Slurm::new(lab.environment());
    let dir = tempfile::tempdir().unwrap();
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new());
    let store = crate::store::Embedded::open(&dir.path().join("s")).unwrap();
    let running = crate::bridge::Running::new(Arc::new(store), clock).await;
    let bridge = &running.0;
    let every = std::time::Duration::from_secs(3600);
    let follow =
        Follow { slurm: slurm.clone(), users: "root".into(), every, evacuate: true, alone: Arc::default() };
    follow.turn(bridge).await.unwrap();
    let ask = |id: &str, vms: u32| {
        let want = Want::Place(Box::new(whole_nodes(id, vms)));
        Ask { id: id.parse().unwrap(), holder: "alice".into(), want, ttl_ms: 60_000 }
    };
    let start = |name: String, nodes: &'static str, list: Option<&'static str>| {
        let slurm = slurm.clone();
        async move {
            let list = list.map(|list| format!("--nodelist={list}"));
            let mut words =
                vec!["salloc", "--no-shell", "--immediate=3", "--exclusive", "-J", &name, "-N", nodes];
            words.extend(list.as_deref());
            slurm.run(&words).await
        }
    };
    let on = |name: String| {
        let slurm = slurm.clone();
        async move {
            let list = slurm.run(&["squeue", "-h", "-t", "R", "-n", &name, "-o", "%N"]).await.unwrap();
            slurm.hosts(list.trim()).await.unwrap()
        }
    };

    // A job that the bridge has not seen at a look: it is seen at the booking. Placed without that, it would be the first node.
    start("early".into(), "1", Some("n0")).await.unwrap();
    let blind = bridge.what_if(whole_nodes("blind", 2)).await.unwrap();
    assert!(blind.assignments.iter().any(|own| own.node.as_str() == "n0"), "nothing would have kept it off");
    let granted = follow.book(bridge, ask("vc", 3)).await.unwrap();
    assert!(granted.lease.nodes().iter().all(|node| node.as_str() != "n0"), "{:?}", granted.lease.nodes());
    // Slurm knows of the lease at once: four nodes are left.
    start("much".into(), "5", None).await.unwrap_err();
    // And of its end.
    bridge.release(&"vc".parse().unwrap()).await.unwrap();
    follow.ended(&"vc".parse().unwrap()).await;
    start("much".into(), "5", None).await.unwrap();
    slurm.run(&["scancel", "-u", "root"]).await.unwrap();
    slurm_stream::until_idle(&slurm).await.unwrap();

    // Both at the same moment, again and again.
    let mut met = 0;
    for turn in 0..12 {
        let (id, job) = (format!("r{turn}"), format!("j{turn}"));
        let (booked, started) = tokio::join!(follow.book(bridge, ask(&id, 4)), start(job.clone(), "3", None));
        let booked = booked.unwrap();
        let nodes = booked.lease.nodes();
        if started.is_ok() {
            met += 1;
            let taken = on(job.clone()).await;
            assert!(nodes.iter().all(|node| !taken.contains(node)), "{nodes:?} and {taken:?}");
        }
        slurm_stream::end_named(&slurm, &job).await.unwrap();
        bridge.release(&id.parse().unwrap()).await.unwrap();
        follow.ended(&id.parse().unwrap()).await;
    }
    assert!(met >= 6, "{met} jobs started beside a booking");
}
