//! All guests of a cluster stand still at once, so that what one of them knows of another is consistent when all are frozen.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sched_bridge::model::{NodeName, VmName};
use tokio::task::JoinSet;

use super::{ClusterError, Clusters, joined};
use crate::driver::VmDriver;

/// A guest runs on by itself after this time, should the bridge be killed while it is paused.
const PAUSE_LIMIT: Duration = Duration::from_secs(60);

/// Guests that are paused. Each has to be let run, by whoever freezes it or by [`Barrier::lift`].
pub(super) struct Barrier {
    driver: Arc<dyn VmDriver>,
    vms: Vec<(VmName, NodeName)>,
    begun: Instant,
}

impl Clusters {
    /// Pauses all of these guests. If one does not stop, all run on.
    pub(super) async fn raise_barrier(&self, vms: &[(VmName, NodeName)]) -> Result<Barrier, ClusterError> {
        // A guest that an earlier fork has left without memory of its own gets it while it runs.
        let prepare = |driver: Arc<dyn VmDriver>, vm: VmName, node: NodeName| async move {
            let done = driver.give_own_memory(&node, &vm).await;
            done.map_err(|why| format!("VM {vm} on node {node} cannot be frozen: {why}"))
        };
        joined(&for_each(&self.driver, vms, prepare).await)?;
        let barrier = Barrier { driver: Arc::clone(&self.driver), vms: vms.to_vec(), begun: Instant::now() };
        let pause = |driver: Arc<dyn VmDriver>, vm: VmName, node: NodeName| async move {
            let done = driver.pause(&node, &vm, PAUSE_LIMIT).await;
            done.map_err(|why| format!("VM {vm} on node {node} does not pause: {why}"))
        };
        match joined(&for_each(&self.driver, vms, pause).await) {
            Ok(()) => Ok(barrier),
            Err(error) => {
                barrier.lift().await;
                Err(error)
            }
        }
    }
}

impl Barrier {
    /// Lets all run that are still paused.
    pub(super) async fn lift(self) {
        let resume = |driver: Arc<dyn VmDriver>, vm: VmName, node: NodeName| async move {
            driver.resume(&node, &vm).await.map_err(|why| format!("VM {vm} on node {node}: {why}"))
        };
        for why in for_each(&self.driver, &self.vms, resume).await {
            tracing::error!(why, "a guest may stay paused; it runs on by itself within a minute");
        }
    }
}

/// How long a guest has stood still at most: since the barrier, if it was paused there and `ran_on` so long after it was asked to be frozen, which
/// was at `asked`; otherwise for its freeze alone.
pub(super) fn stood_still(
    barrier: Option<&Barrier>,
    asked: Instant,
    ran_on: Option<Duration>,
    freeze: Duration,
) -> Duration {
    match (barrier, ran_on) {
        (Some(barrier), Some(ran_on)) => asked.duration_since(barrier.begun) + ran_on,
        _ => freeze,
    }
}

/// Does something for each VM, for all at once; the errors.
async fn for_each<F, T>(driver: &Arc<dyn VmDriver>, vms: &[(VmName, NodeName)], act: F) -> Vec<String>
where
    F: Fn(Arc<dyn VmDriver>, VmName, NodeName) -> T,
    T: Future<Output = Result<(), String>> + Send + 'static,
{
    let mut work = JoinSet::new();
    for (vm, node) in vms {
        work.spawn(act(Arc::clone(driver), vm.clone(), node.clone()));
    }
    work.join_all().await.into_iter().filter_map(Result::err).collect()
}
