//! Placements beside a real slurmctld with many slurmd on this machine.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use bridge_lab::churn::{Churn, Event};
use bridge_lab::slurm_model::SlurmModel;
use bridge_lab::slurm_stream::{Shape, compare};
use sched_bridge::model::{Fleet, NodeIndex};
use test_servers::SlurmCluster;
use vmove_bridge::slurm::Slurm;
use vmove_skip::need;

/// CPUs of each node of the cluster.
const CPUS: u32 = 8;
const EVENTS: u32 = 160;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_stream_needs_no_more_hops_than_with_slurm() {
    let cluster = need!(SlurmCluster::start(32, 4, 4));
    let table = compare(&cluster, &Shape { nodes: 32, largest: 8, events: 60, seed: 7 }).await.unwrap();
    eprintln!("{table}");
    let total = table.total();
    assert!(total.requests >= 20, "{table}");
    assert!(total.bridge_hops <= total.slurm_hops, "{table}");
}

/// What jobs of a stream ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Jobs {
    /// Tasks of one CPU, on nodes that jobs share.
    Tasks,
    /// Whole nodes.
    Nodes,
}

/// The model with which placements are compared in streams that are too long for a real Slurm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_model_of_slurm_takes_the_very_nodes_that_slurm_takes() {
    let cluster = need!(SlurmCluster::start(36, 4, 3));
    let slurm = Slurm::new(cluster.environment());
    let fleet = Fleet::new(slurm.nodes().await.unwrap(), slurm.topology().await.unwrap()).unwrap();
    for (jobs, largest, target, seed) in [(Jobs::Tasks, 40, 230, 3), (Jobs::Nodes, 9, 29, 4)] {
        let sizes: Vec<u32> = (1..=largest).collect();
        let mut churn = Churn::new(seed, &sizes, target);
        let mut seen = Seen::default();
        for _ in 0..EVENTS {
            match churn.next_event() {
                Event::Arrive { id, vms } => {
                    start_and_compare(&cluster, &slurm, &fleet, jobs, &format!("m{id}"), vms, &mut seen)
                        .await;
                }
                Event::Leave { id } => cluster.cancel(&format!("m{id}")).unwrap(),
            }
        }
        assert!(seen.compared >= 60 && seen.on_several_leaves >= 10, "{jobs:?}: {seen:?}");
        // Otherwise the test could not tell the models apart.
        let told_apart = seen.guide_differs >= 10 && seen.v24_differs >= 10;
        assert!(jobs == Jobs::Nodes || told_apart, "{jobs:?}: {seen:?}");
        eprintln!("{jobs:?}: {seen:?}");
        cluster.cancel_all().unwrap();
    }
}

#[derive(Debug, Default)]
struct Seen {
    compared: u32,
    /// Jobs on more than two leaf switches.
    on_several_leaves: u32,
    /// Jobs that other models would have placed on other nodes.
    guide_differs: u32,
    v24_differs: u32,
}

/// Starts a job for which the model sees room; Slurm must give it the nodes that the model has chosen.
async fn start_and_compare(
    cluster: &SlurmCluster,
    slurm: &Slurm,
    fleet: &Fleet,
    jobs: Jobs,
    name: &str,
    size: u32,
    seen: &mut Seen,
) {
    let free = free_cpus(slurm, fleet).await;
    let (room, nodes): (Vec<u32>, u32) = match jobs {
        Jobs::Tasks => (free.clone(), 1),
        Jobs::Nodes => (free.iter().map(|free| free / CPUS).collect(), size),
    };
    let choose = |model: SlurmModel| {
        let mut chosen = model.choose(fleet, &room, size, nodes)?;
        chosen.sort_unstable();
        Some(chosen)
    };
    let Some(expected) = choose(SlurmModel::V22) else { return };
    let size = size.to_string();
    let options: &[&str] = match jobs {
        Jobs::Tasks => &["-n", &size, "--mem=1"],
        Jobs::Nodes => &["--exclusive", "-N", &size],
    };
    cluster.run(&[&["salloc", "--no-shell", "--immediate=60", "-J", name], options].concat()).unwrap();
    let after = free_cpus(slurm, fleet).await;
    let unit = if jobs == Jobs::Nodes { CPUS } else { 1 };
    let taken = free.iter().zip(&after).map(|(before, after)| (before - after) / unit);
    let taken: Vec<(NodeIndex, u32)> =
        (0..).map(NodeIndex).zip(taken).filter(|(_, taken)| *taken > 0).collect();
    assert_eq!(expected, taken, "{jobs:?}, {size} of them, free before: {free:?}");
    seen.compared += 1;
    seen.guide_differs += u32::from(choose(SlurmModel::Guide).unwrap() != taken);
    seen.v24_differs += u32::from(choose(SlurmModel::V24).unwrap() != taken);
    let leaf = |index: NodeIndex| fleet.topology().leaf_of(fleet.node(index).name.as_str());
    let leaves: BTreeSet<_> = taken.iter().map(|(index, _)| leaf(*index)).collect();
    seen.on_several_leaves += u32::from(leaves.len() > 2);
}

/// CPUs of each node that no job has.
async fn free_cpus(slurm: &Slurm, fleet: &Fleet) -> Vec<u32> {
    let mut free = vec![0; fleet.nodes().len()];
    for node in slurm.capacity().await.unwrap() {
        free[fleet.find(node.node.as_str()).unwrap().usize()] = node.free_cpus;
    }
    free
}
