//! Against a real slurmctld with many slurmd on this machine.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sched_bridge::model::{Assignment, NodeName, NodeState};
use test_servers::SlurmCluster;
use vmove_skip::need;

use super::follower::SlurmFollower;
use super::scontrol::{field, gpus, nodes, state};
use super::{Slurm, SlurmError};
use crate::driver::VmDriver;
use crate::executor::Limits;
use crate::testing::{DEADLINE, FakeDriver, TestBridge, cluster_of_whole_nodes, id, whole_nodes};

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
        let _ = super::scontrol::topology(&text, &std::collections::HashMap::new());
    }
}

#[tokio::test]
async fn a_command_that_hangs_is_killed_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let scontrol = dir.path().join("scontrol");
    std::fs::write(&scontrol, "#!/bin/sh\nsleep 1000\n").unwrap();
    std::fs::set_permissions(&scontrol, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/bin:/bin", dir.path().display());
    let slurm = Slurm::new(vec![("PATH".to_owned(), path)]).with_time_limit(Duration::from_millis(200));
    let error = slurm.nodes().await.unwrap_err();
    assert!(matches!(error, SlurmError::TimedOut(_)), "{error}");
    let message = error.to_string();
    assert!(message.starts_with("scontrol has not ended within 0.2 s and was killed: "), "{message}");
}

fn follower(slurm: &Slurm) -> SlurmFollower {
    SlurmFollower {
        slurm: slurm.clone(),
        users: "root".into(),
        interval: Duration::from_secs(3600),
        evacuate: true,
        exclusive: Arc::default(),
    }
}

/// Allocates whole nodes for a job that does nothing; fails if Slurm has none within some seconds.
async fn allocate(
    slurm: &Slurm,
    job: &str,
    nodes: &str,
    seconds: u32,
    more: &[&str],
) -> Result<String, SlurmError> {
    let immediate = format!("--immediate={seconds}");
    let mut words = vec!["salloc", "--no-shell", &immediate, "--exclusive", "-J", job, "-N", nodes];
    words.extend(more);
    slurm.run(&words).await
}

/// The nodes of running jobs of a name.
async fn nodes_of_job(slurm: &Slurm, job: &str) -> BTreeSet<NodeName> {
    let list = slurm.run(&["squeue", "-h", "-t", "R", "-n", job, "-o", "%N"]).await.unwrap();
    slurm.expand_hostlist(list.trim()).await.unwrap()
}

async fn drain(slurm: &Slurm, node: &NodeName) {
    let node = format!("nodename={node}");
    slurm.run(&["scontrol", "update", &node, "state=drain", "reason=test"]).await.unwrap();
}

/// The nodes of the reservation of lease `vc`; none without a reservation.
async fn reserved(slurm: &Slurm) -> BTreeSet<NodeName> {
    let text = slurm.run(&["scontrol", "-o", "show", "reservation"]).await.unwrap();
    let line = text.lines().find(|line| line.contains("ReservationName=vmove-vc"));
    match line.and_then(|line| field(line, "Nodes")) {
        Some(list) => slurm.expand_hostlist(list).await.unwrap(),
        None => BTreeSet::new(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_gres_and_topology_are_read_held_and_drained() {
    let cluster = need!(SlurmCluster::start(16, 4, 2));
    let slurm = Slurm::new(cluster.environment()).with_time_limit(DEADLINE);
    let bridge = TestBridge::empty().await;
    assert!(slurm.publish(&bridge).await.unwrap().is_empty());
    let view = bridge.view().unwrap();
    let fleet = view.fleet();
    assert_eq!(fleet.nodes().len(), 16);
    let sizes = fleet.nodes().iter().map(|node| (node.devices.len(), node.cores(), node.memory().0));
    assert_eq!(sizes.collect::<BTreeSet<_>>(), BTreeSet::from([(8, 8, 65536)]));
    let hops = |a: &str, b: &str| fleet.hops(fleet.find(a).unwrap(), fleet.find(b).unwrap());
    assert_eq!((hops("n0", "n3"), hops("n0", "n4"), hops("n0", "n8")), (Some(1), Some(3), Some(5)));

    // Slurm leaves reserved nodes alone: 12 nodes are left for jobs, and no 13.
    let granted = bridge.grant(whole_nodes("vc", 4)).await.unwrap();
    assert_eq!(granted.placement.unwrap().score.max_hops, 1, "four nodes of one leaf");
    let leased: BTreeSet<NodeName> = granted.lease.nodes().into_iter().collect();
    slurm.create_reservation("vc", &granted.lease.nodes(), "root").await.unwrap();
    allocate(&slurm, "other", "13", 2, &[]).await.unwrap_err();
    allocate(&slurm, "other", "12", 60, &[]).await.unwrap();
    let used = nodes_of_job(&slurm, "other").await;
    assert!(used.len() == 12 && used.is_disjoint(&leased), "{used:?}");
    // A job of the virtual cluster's own runs on them.
    let list: Vec<&str> = leased.iter().map(NodeName::as_str).collect();
    let nodelist = format!("--nodelist={}", list.join(","));
    slurm
        .run(&["salloc", "--no-shell", "--immediate=60", "-N", "4", "--reservation=vc", &nodelist])
        .await
        .unwrap();

    // Slurm drains one of them: it is drained at the bridge, which places nothing there any more.
    let drained = granted.lease.nodes()[0].clone();
    drain(&slurm, &drained).await;
    assert_eq!(slurm.publish(&bridge).await.unwrap(), std::slice::from_ref(&drained));
    assert_eq!(bridge.view().unwrap().node(&drained).unwrap().0.state, NodeState::Drained);
    slurm.run(&["scancel", "-u", "root"]).await.unwrap();
    bridge.release(&id("vc")).await.unwrap();
    let refused = bridge.what_if(cluster_of_whole_nodes("all", 16)).await.unwrap_err().to_string();
    assert!(refused.contains("15"), "{refused}");
    let start = Instant::now();
    while let Err(error) = slurm.delete_reservation("vc").await {
        assert!(start.elapsed() < DEADLINE, "the reservation stays after its jobs have ended: {error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Slurm as an operator uses it, and the bridge that follows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_and_leases_keep_off_each_other_and_drained_nodes_are_emptied() {
    let cluster = need!(SlurmCluster::start(8, 4, 2));
    let slurm = Slurm::new(cluster.environment()).with_time_limit(DEADLINE);
    let bridge = TestBridge::empty().await;
    let follower = follower(&slurm);

    // A job has a node: it is no place for VMs.
    allocate(&slurm, "job", "1", 60, &["--nodelist=n0"]).await.unwrap();
    follower.synchronize(&bridge).await.unwrap();
    let ids = || bridge.view().unwrap().leases().keys().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(ids(), ["slurm.n0"]);
    bridge.what_if(cluster_of_whole_nodes("all", 8)).await.unwrap_err();
    let granted = bridge.grant(whole_nodes("vc", 2)).await.unwrap();
    follower.synchronize(&bridge).await.unwrap();
    assert_eq!(reserved(&slurm).await, granted.lease.nodes().into_iter().collect());

    // Slurm drains a node of the cluster: its VM leaves, and the reservation follows.
    let fake = FakeDriver::default();
    let vms: Vec<Assignment> = granted.lease.held.iter().map(|held| held.assignment.clone()).collect();
    fake.start_all(&vms);
    let drained = granted.lease.nodes()[0].clone();
    drain(&slurm, &drained).await;
    follower.synchronize(&bridge).await.unwrap();
    let driver: Arc<dyn VmDriver> = Arc::new(fake.clone());
    let mut plans = BTreeMap::new();
    follower.evacuate_drained(&bridge, &driver, Limits::default(), &mut plans).await.unwrap();
    assert!(fake.world().running.values().all(|at| *at != drained), "{fake:?}");
    follower.synchronize(&bridge).await.unwrap();
    let nodes = reserved(&slurm).await;
    assert!(nodes.len() == 2 && !nodes.contains(&drained), "{nodes:?}");
    // An empty node needs no further plan.
    follower.evacuate_drained(&bridge, &driver, Limits::default(), &mut plans).await.unwrap();
    assert_eq!(bridge.view().unwrap().plans().len(), 1);

    // What ends is released, on both sides.
    bridge.release(&id("vc")).await.unwrap();
    slurm.run(&["scancel", "-u", "root"]).await.unwrap();
    let start = Instant::now();
    while !ids().is_empty() || !reserved(&slurm).await.is_empty() {
        assert!(start.elapsed() < DEADLINE, "{:?} and {:?} are left", ids(), reserved(&slurm).await);
        tokio::time::sleep(Duration::from_millis(100)).await;
        follower.synchronize(&bridge).await.unwrap();
    }
}

/// Without a synchronization between a job and a booking, in either sequence.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_job_and_no_booking_come_onto_one_node_between_two_synchronizations() {
    let cluster = need!(SlurmCluster::start(8, 4, 2));
    let slurm = Slurm::new(cluster.environment()).with_time_limit(DEADLINE);
    let bridge = TestBridge::empty().await;
    let follower = follower(&slurm);
    follower.synchronize(&bridge).await.unwrap();

    // The bridge does not know of this job until the booking, which would otherwise place a VM on its node.
    allocate(&slurm, "early", "1", 60, &["--nodelist=n0"]).await.unwrap();
    let unaware = bridge.what_if(cluster_of_whole_nodes("unaware", 2)).await.unwrap();
    assert!(unaware.assignments.iter().any(|own| own.node.as_str() == "n0"), "{unaware:?}");
    let granted = follower.book(&bridge, whole_nodes("vc", 3)).await.unwrap();
    assert!(granted.lease.nodes().iter().all(|node| node.as_str() != "n0"), "{:?}", granted.lease.nodes());
    // Slurm knows of the lease at once: four nodes are left.
    allocate(&slurm, "large", "5", 3, &[]).await.unwrap_err();
    // And of its end.
    bridge.release(&id("vc")).await.unwrap();
    follower.lease_ended(&id("vc")).await;
    allocate(&slurm, "large", "5", 60, &[]).await.unwrap();
    cluster.cancel_all().unwrap();

    // Both at the same moment, again and again.
    let mut started = 0;
    for turn in 0..12 {
        let (lease, job) = (format!("r{turn}"), format!("j{turn}"));
        let booking = follower.book(&bridge, whole_nodes(&lease, 4));
        let (booked, allocated) = tokio::join!(booking, allocate(&slurm, &job, "3", 60, &[]));
        let leased: BTreeSet<NodeName> = booked.unwrap().lease.nodes().into_iter().collect();
        if allocated.is_ok() {
            started += 1;
            let used = nodes_of_job(&slurm, &job).await;
            assert!(used.is_disjoint(&leased), "{leased:?} and {used:?}");
        }
        cluster.cancel(&job).unwrap();
        bridge.release(&id(&lease)).await.unwrap();
        follower.lease_ended(&id(&lease)).await;
    }
    assert!(started >= 6, "{started} jobs started beside a booking");
}
