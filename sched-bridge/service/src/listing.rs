//! Lists the VMs of each node again and again: VMs that run keep their leases, those that end give their resources back, and those of which
//! no lease knows are told.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sched_bridge::model::{NodeName, VmName};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};

use crate::bridge::{Bridge, Known, Listing};
use crate::driver::{Reach, VmDriver};

/// A node that does not answer is asked after so many intervals again: it takes little from those that do.
const INTERVALS_WITHOUT_ANSWER: u32 = 4;
/// A list that lacks a VM is confirmed by another one after this time at most.
const CONFIRM_AFTER: Duration = Duration::from_secs(1);

/// A node that is new, or of which something is leased for the first time, is looked at after this time at most.
const NEW_NODES_AFTER: Duration = Duration::from_secs(5);
/// Between two looks at a node that are asked for.
const SOONEST: Duration = Duration::from_millis(200);

/// What the daemons of nodes listed last, and the nodes that are to be looked at before their turn.
#[derive(Debug, Default)]
pub struct Listings {
    last: Mutex<BTreeMap<NodeName, NodeListing>>,
    hints: Mutex<BTreeMap<NodeName, Arc<Hint>>>,
}

/// What somebody has said of a node that is listed.
#[derive(Debug, Default)]
struct Hint {
    /// VMs that have ended there.
    ended: Mutex<BTreeSet<String>>,
    said: Notify,
}

/// VMs that run on a node; or why its daemon does not say.
pub type NodeListing = Result<BTreeSet<String>, String>;

impl Listings {
    /// What the daemon of a node listed last; none if it has not been asked yet, or is not asked.
    #[must_use]
    pub fn of(&self, node: &NodeName) -> Option<NodeListing> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).get(node).cloned()
    }

    fn set(&self, node: &NodeName, listing: Option<NodeListing>) {
        let mut all = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match listing {
            Some(listing) => drop(all.insert(node.clone(), listing)),
            None => drop(all.remove(node)),
        }
    }

    /// Has a node looked at now. One of `ended`, VMs of which somebody has said that they have ended there, has ended if the node does not list it
    /// then. False if this bridge does not look at that node.
    pub fn look(&self, node: &NodeName, ended: impl IntoIterator<Item = String>) -> bool {
        let hint = self.hints.lock().unwrap_or_else(PoisonError::into_inner).get(node).cloned();
        let Some(hint) = hint else { return false };
        hint.ended.lock().unwrap_or_else(PoisonError::into_inner).extend(ended);
        hint.said.notify_one();
        true
    }

    fn hint_of(&self, node: &NodeName) -> Arc<Hint> {
        let mut hints = self.hints.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(hints.entry(node.clone()).or_default())
    }

    fn forget_hint(&self, node: &NodeName) {
        self.hints.lock().unwrap_or_else(PoisonError::into_inner).remove(node);
    }
}

impl Hint {
    fn take_ended(&self) -> BTreeSet<String> {
        std::mem::take(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Lists the VMs of the fleet's nodes until the task is dropped. No node waits for another one.
pub async fn keep_listing_vms(
    bridge: Arc<Bridge>,
    driver: Arc<dyn VmDriver>,
    listings: Arc<Listings>,
    interval: Duration,
) {
    let mut tasks = JoinSet::new();
    let mut running: BTreeMap<NodeName, AbortHandle> = BTreeMap::new();
    loop {
        if let Some(wanted) = nodes_to_list(&bridge, &*driver) {
            running.retain(|node, task| {
                let stays = wanted.contains(node);
                if !stays {
                    task.abort();
                    listings.set(node, None);
                    listings.forget_hint(node);
                }
                stays
            });
            for node in wanted {
                running.entry(node.clone()).or_insert_with(|| {
                    let (bridge, driver) = (Arc::clone(&bridge), Arc::clone(&driver));
                    tasks.spawn(keep_listing(bridge, driver, Arc::clone(&listings), node, interval))
                });
            }
        }
        // Those that were aborted above.
        while tasks.try_join_next().is_some() {}
        tokio::time::sleep(interval.min(NEW_NODES_AFTER)).await;
    }
}

/// The nodes whose daemons are asked: those that the configuration names, and, of those that can be reached by their name alone, the ones
/// of which something is leased. None while the store does not answer.
fn nodes_to_list(bridge: &Bridge, driver: &dyn VmDriver) -> Option<BTreeSet<NodeName>> {
    let view = bridge.view().ok()?;
    let fleet = view.fleet().nodes().iter().map(|node| &node.name);
    let mut wanted: BTreeSet<NodeName> =
        fleet.filter(|node| driver.reach(node) == Reach::Known).cloned().collect();
    let leased = view.leases().values().flat_map(|entry| &entry.lease.held);
    let leased = leased.map(|held| &held.assignment.node);
    wanted.extend(leased.filter(|node| driver.reach(node) == Reach::ByName).cloned());
    Some(wanted)
}

async fn keep_listing(
    bridge: Arc<Bridge>,
    driver: Arc<dyn VmDriver>,
    listings: Arc<Listings>,
    node: NodeName,
    interval: Duration,
) {
    // What was known to run before the last list was asked for, and that list.
    let mut before: Option<(Known, BTreeSet<String>)> = None;
    let mut pause = Duration::ZERO;
    let hint = listings.hint_of(&node);
    loop {
        // A look that is asked for comes soon, and not too often.
        let _ = tokio::time::timeout(pause.saturating_sub(SOONEST), hint.said.notified()).await;
        tokio::time::sleep(SOONEST.min(pause)).await;
        pause = interval;
        // Before the list is asked for: what is said meanwhile is looked at next.
        let told = hint.take_ended();
        let Ok(leased) = bridge.leased_on(&node) else { continue };
        // A daemon that does not answer says nothing about its VMs.
        let listed = match driver.list(&node).await {
            Ok(listed) => listed,
            Err(reason) => {
                tracing::debug!(%node, reason, "the VMs of a node are not known");
                listings.set(&node, Some(Err(reason)));
                pause = interval * INTERVALS_WITHOUT_ANSWER;
                continue;
            }
        };
        let listed: BTreeSet<String> =
            listed.into_iter().filter(|(_, vm)| !vm.ended).map(|(name, _)| name).collect();
        listings.set(&node, Some(Ok(listed.clone())));
        if !leased.running.keys().all(|vm| listed.contains(vm)) {
            pause = interval.min(CONFIRM_AFTER);
        }
        // A VM has ended if two lists in a row lack it: a daemon that has just started may not know all its VMs yet.
        let (mut known_before, mut either) = before.as_ref().map_or_else(
            || (Known::new(), listed.clone()),
            |(known, last)| (known.clone(), last.union(&listed).cloned().collect()),
        );
        // Of one that its own daemon has said to have ended, one list is enough.
        for vm in told.into_iter().filter(|vm| !listed.contains(vm)) {
            if let Some(granted) = leased.running.get(&vm) {
                either.remove(&vm);
                known_before.insert(vm, granted.clone());
            }
        }
        let listing = Listing { now: &listed, lately: &either, leased: &leased, known: &known_before };
        let noted = bridge.vms_listed(&node, &listing).await;
        before = Some((leased.running, listed));
        match noted {
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

    async fn until(what: &str, is: &dyn Fn() -> bool) {
        let start = std::time::Instant::now();
        while !is() {
            assert!(start.elapsed() < DEADLINE, "not so: {what}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The next look would be in an hour, and a list that lacks a VM would wait for another one.
    #[tokio::test]
    async fn a_vm_whose_end_is_told_gives_its_share_back_at_once() {
        let (bridge, fake) = scene(2).await;
        let homes: Vec<NodeName> = (0..2).map(|vm| bridge.home("vc", vm)).collect();
        let driver: Arc<dyn VmDriver> = Arc::new(fake.clone());
        let listings = Arc::new(Listings::default());
        assert!(!listings.look(&homes[0], []), "nobody looks at it yet");
        let hour = Duration::from_secs(3600);
        let listing =
            tokio::spawn(keep_listing_vms(Arc::clone(&bridge), driver, Arc::clone(&listings), hour));
        let held = || bridge.view().unwrap().lease(&id("vc")).unwrap().lease.held.clone();
        until("VMs are seen", &|| held().iter().all(|held| held.seen)).await;
        let vm = held()[0].assignment.vm.to_string();
        // It runs, whatever somebody says.
        assert!(listings.look(&homes[0], [vm.clone()]));
        tokio::time::sleep(SOONEST * 3).await;
        assert_eq!(held().len(), 2);
        fake.world().running.remove(&vm);
        assert!(listings.look(&homes[0], [vm]));
        until("its share is free", &|| held().len() == 1).await;
        listing.abort();
    }

    #[tokio::test]
    async fn a_node_that_hangs_does_not_stop_the_others() {
        let (bridge, fake) = scene(3).await;
        let homes: Vec<NodeName> = (0..3).map(|vm| bridge.home("vc", vm)).collect();
        fake.world().hanging.insert(homes[0].clone());
        let driver: Arc<dyn VmDriver> = Arc::new(fake.clone());
        fake.world().running.insert("stranger".to_owned(), homes[1].clone());
        let listings = Arc::new(Listings::default());
        let listing =
            keep_listing_vms(Arc::clone(&bridge), driver, Arc::clone(&listings), Duration::from_millis(20));
        let listing = tokio::spawn(listing);
        let left = || bridge.view().unwrap().lease(&id("vc")).unwrap().lease.vms().count();
        let seen = || {
            let view = bridge.view().unwrap();
            let held = view.lease(&id("vc")).unwrap().lease.held.clone();
            held.iter().filter(|held| held.seen).count()
        };
        until("VMs of nodes that answer are seen", &|| seen() == 2).await;
        assert!(listings.of(&homes[1]).unwrap().unwrap().contains("stranger"));
        fake.world().running.clear();
        until("the end of these VMs is noticed", &|| left() == 1).await;
        assert_eq!(bridge.home("vc", 0), homes[0]);
        assert_eq!(listings.of(&homes[0]), None, "it has not answered yet");
        listing.abort();
    }
}
