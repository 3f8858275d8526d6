//! Lists the VMs of each node again and again, so that the end of a VM releases its resources.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use sched_bridge::model::{NodeName, VmName};
use tokio::task::JoinSet;

use crate::bridge::Bridge;
use crate::driver::VmDriver;

/// A node that does not answer is asked after so many intervals again: it takes little from those that do.
const INTERVALS_WITHOUT_ANSWER: u32 = 4;

/// Lists the VMs of all nodes until the task is dropped. No node waits for another one.
pub async fn keep_listing_vms(
    bridge: Arc<Bridge>,
    driver: Arc<dyn VmDriver>,
    nodes: Vec<NodeName>,
    interval: Duration,
) {
    let mut tasks = JoinSet::new();
    for node in nodes {
        tasks.spawn(keep_listing(Arc::clone(&bridge), Arc::clone(&driver), node, interval));
    }
    tasks.join_all().await;
}

async fn keep_listing(bridge: Arc<Bridge>, driver: Arc<dyn VmDriver>, node: NodeName, interval: Duration) {
    let mut before: Option<BTreeSet<String>> = None;
    let mut pause = interval;
    loop {
        tokio::time::sleep(pause).await;
        pause = interval;
        // A daemon that does not answer says nothing about its VMs.
        let listed = match driver.list(&node).await {
            Ok(listed) => listed,
            Err(reason) => {
                tracing::debug!(%node, reason, "the VMs of a node are not known");
                pause = interval * INTERVALS_WITHOUT_ANSWER;
                continue;
            }
        };
        let listed: BTreeSet<String> =
            listed.into_iter().filter(|(_, vm)| !vm.ended).map(|(name, _)| name).collect();
        // A VM has ended if two lists in a row lack it: a daemon that has just started may not know all its VMs yet.
        let either =
            before.as_ref().map_or_else(|| listed.clone(), |last| last.union(&listed).cloned().collect());
        before = Some(listed);
        match bridge.vms_listed(&node, &either).await {
            Ok(ended) if !ended.is_empty() => {
                let ended: Vec<&str> = ended.iter().map(VmName::as_str).collect();
                tracing::info!(%node, vms = ended.join(" "), "VMs have ended; their resources are free");
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%node, %error, "could not record the end of VMs"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{DEADLINE, id, scene};

    #[tokio::test]
    async fn a_node_that_hangs_does_not_stop_the_others() {
        let (bridge, fake) = scene(3).await;
        let homes: Vec<NodeName> = (0..3).map(|vm| bridge.home("vc", vm)).collect();
        fake.world().hanging.insert(homes[0].clone());
        let driver: Arc<dyn VmDriver> = Arc::new(fake.clone());
        let mut nodes = homes.clone();
        nodes.sort();
        let listing = keep_listing_vms(Arc::clone(&bridge), driver, nodes, Duration::from_millis(20));
        let listing = tokio::spawn(listing);
        let left = || bridge.view().unwrap().lease(&id("vc")).unwrap().lease.vms().count();
        let seen = || {
            let view = bridge.view().unwrap();
            let held = view.lease(&id("vc")).unwrap().lease.held.clone();
            held.iter().filter(|held| held.seen).count()
        };
        let until = async |what: &str, is: &dyn Fn() -> bool| {
            let start = std::time::Instant::now();
            while !is() {
                assert!(start.elapsed() < DEADLINE, "not so: {what}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        until("VMs of nodes that answer are seen", &|| seen() == 2).await;
        fake.world().running.clear();
        until("the end of these VMs is noticed", &|| left() == 1).await;
        assert_eq!(bridge.home("vc", 0), homes[0]);
        listing.abort();
    }
}
