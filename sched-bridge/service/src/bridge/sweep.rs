//! Ends leases whose holders send no heartbeats, and leases whose VMs have ended.
//!
//! A lease whose VMs run needs no heartbeat: it ends with its last VM (see docs/decisions/0016-leases-of-running-vms.md).
//!
//! No time of day is compared. Each bridge measures, with a clock that does not jump, how long it has seen a lease without a heartbeat
//! while it was running and in touch with the store. Time during which a bridge was stopped, suspended or cut off does not count,
//! because it could not have seen a heartbeat; a bridge that has just started begins at zero. A lease is ended by compare and swap on
//! the revision of its last heartbeat: of a heartbeat and an end at the same moment, exactly one succeeds.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use sched_bridge::model::{NodeName, VmName};
use tracing::Instrument;
use vmove_bridge_types::requests::LeaseInfo;

use super::transactions::{end_lease, update_lease};
use super::{Attempt, Bridge, BridgeError, LeaseEntry};
use crate::account::End;
use crate::clock::Stamp;
use crate::lease::{Lease, LeaseId, Part};
use crate::metrics;
use crate::store::{Committed, Revision};

/// Between two sweeps.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);
/// However much time has passed between two sweeps, at most this much counts. Unit: milliseconds.
const MAX_COUNTED_MS: u64 = 1000;

/// How long each lease was seen without a heartbeat.
#[derive(Debug, Default)]
pub(super) struct Sweeper {
    last_sweep_ms: Option<u64>,
    /// Revision of the last heartbeat, and for how long it has been the last. Unit: milliseconds.
    ages: HashMap<LeaseId, (Revision, u64)>,
}

impl Sweeper {
    /// Leases without a heartbeat for longer than their time to live.
    fn overdue<'a>(
        &mut self,
        now_ms: u64,
        leases: impl Iterator<Item = (&'a LeaseId, Revision, u64)>,
    ) -> Vec<LeaseId> {
        let passed = self.last_sweep_ms.map_or(0, |last| now_ms.saturating_sub(last)).min(MAX_COUNTED_MS);
        self.last_sweep_ms = Some(now_ms);
        let mut ages = HashMap::with_capacity(self.ages.len());
        let mut overdue = Vec::new();
        for (id, revision, ttl_ms) in leases {
            let age = match self.ages.get(id) {
                Some((seen, age)) if *seen == revision => age + passed,
                _ => 0,
            };
            if age > ttl_ms {
                overdue.push(id.clone());
            }
            ages.insert(id.clone(), (revision, age));
        }
        self.ages = ages;
        overdue
    }

    /// For how long a lease was seen without a heartbeat. Unit: milliseconds.
    fn age_ms(&self, id: &LeaseId) -> u64 {
        self.ages.get(id).map_or(0, |(_, age)| *age)
    }
}

impl Bridge {
    /// Ends the leases whose time to live is over. Returns their ids.
    #[tracing::instrument(skip_all)]
    pub async fn sweep(&self) -> Vec<LeaseId> {
        let now = self.clock.monotonic_ms();
        let Ok(view) = self.view() else {
            // Out of touch: other bridges may be receiving heartbeats.
            self.sweeper.lock().unwrap_or_else(PoisonError::into_inner).last_sweep_ms = None;
            return Vec::new();
        };
        let overdue = {
            let mut sweeper = self.sweeper.lock().unwrap_or_else(PoisonError::into_inner);
            let idle = view.leases().iter().filter(|(_, entry)| !entry.lease.runs());
            let leases = idle.map(|(id, entry)| (id, entry.revision, entry.lease.ttl_ms));
            sweeper.overdue(now, leases)
        };
        let mut ended = Vec::new();
        for id in overdue {
            let Ok(entry) = view.lease(&id) else { continue };
            if self.expire(entry).instrument(tracing::info_span!("lease", %id)).await {
                ended.push(id);
            }
        }
        ended
    }

    /// What is told of a lease, with the time that it has without a heartbeat, as far as this bridge has measured.
    #[must_use]
    pub fn info(&self, lease: &Lease) -> LeaseInfo {
        let ends_in_ms = (!lease.runs()).then(|| {
            let sweeper = self.sweeper.lock().unwrap_or_else(PoisonError::into_inner);
            lease.ttl_ms.saturating_sub(sweeper.age_ms(&lease.id))
        });
        lease.info(ends_in_ms)
    }

    /// Ends a lease, unless a heartbeat is faster. True if it has ended.
    async fn expire(&self, entry: &LeaseEntry) -> bool {
        let (txn, _) = end_lease(&entry.lease, entry.revision, End::Expired, &self.clock.stamp());
        match self.store.commit(txn).await {
            Ok(Committed::At(_)) => {
                metrics::lease_ended(End::Expired);
                tracing::info!(holder = entry.lease.holder, "the lease has ended: no heartbeat came in time");
                true
            }
            Ok(Committed::Conflict) => false,
            Err(error) => {
                tracing::warn!(%error, "could not end the lease; the next sweep tries again");
                false
            }
        }
    }

    /// Sweeps until the task is dropped.
    pub async fn keep_sweeping(self: Arc<Self>) {
        loop {
            tokio::time::sleep(SWEEP_INTERVAL).await;
            self.sweep().await;
        }
    }

    /// What this node has of leases, before its VMs are listed.
    ///
    /// # Errors
    /// The store does not answer.
    pub fn leased_on(&self, node: &NodeName) -> Result<LeasedOn, BridgeError> {
        let view = self.view()?;
        let mut leased = LeasedOn::default();
        for lease in view.leases().values().map(|entry| &entry.lease) {
            for held in lease.held.iter().filter(|held| held.assignment.node == *node) {
                let vm = held.assignment.vm.to_string();
                if held.seen {
                    leased.running.insert(vm.clone(), lease.granted.clone());
                }
                leased.beats.insert(vm, (lease.granted.clone(), lease.beats));
            }
        }
        Ok(leased)
    }

    /// Takes note of the VMs that a node's daemon lists. One that was known to run and is listed no more has ended: its resources are released, and
    /// the lease ends with its last VM. Returns the VMs that have ended.
    ///
    /// A VM that was stopped and one of its name that was started later are two, in a later lease as well as in the same one. A list that was asked for
    /// before says nothing of the later one: neither that it runs, after which it would be missed while it starts, nor that it has ended.
    ///
    /// # Errors
    /// The store does not answer.
    #[tracing::instrument(name = "listing", skip_all, fields(%node))]
    pub async fn vms_listed(
        &self,
        node: &NodeName,
        listing: &Listing<'_>,
    ) -> Result<Vec<VmName>, BridgeError> {
        let view = self.view()?;
        let mut ended = Vec::new();
        for (id, entry) in view.leases() {
            if after_listing(&entry.lease, node, listing).is_some() {
                let work = self.update_by_listing(id, node, listing);
                ended.extend(work.instrument(tracing::info_span!("lease", %id)).await?);
            }
        }
        Ok(ended)
    }

    async fn update_by_listing(
        &self,
        id: &LeaseId,
        node: &NodeName,
        listing: &Listing<'_>,
    ) -> Result<Vec<VmName>, BridgeError> {
        let (ended, lease_ended) = self
            .change(|view| {
                let Ok(entry) = view.lease(id) else { return Ok(Attempt::Done((Vec::new(), false))) };
                let Some((mut lease, ended)) = after_listing(&entry.lease, node, listing) else {
                    return Ok(Attempt::Done((Vec::new(), false)));
                };
                let now = self.clock.stamp();
                if lease.held.is_empty() {
                    let (txn, _) = end_lease(&entry.lease, entry.revision, End::VmsEnded, &now);
                    return Ok(Attempt::Commit(txn, (ended, true)));
                }
                // Until now all of it was in use.
                let mut counted = Lease::clone(&entry.lease);
                counted.count(&now);
                (lease.usage, lease.counted, lease.exact) = (counted.usage, counted.counted, counted.exact);
                Ok(Attempt::Commit(update_lease(&lease, entry.revision), (ended, false)))
            })
            .await?;
        if lease_ended {
            metrics::lease_ended(End::VmsEnded);
            tracing::info!("the lease has ended: all its VMs have");
        }
        Ok(ended)
    }
}

/// VMs of a node, each with the time at which its lease was granted.
pub type Known = BTreeMap<String, Stamp>;

/// What leases had on a node at one moment.
#[derive(Debug, Clone, Default)]
pub struct LeasedOn {
    /// The VMs that were known to run there.
    pub running: Known,
    /// All VMs, with the time at which their lease was granted, and its beats: each start and stop of its VMs is one.
    beats: BTreeMap<String, (Stamp, u64)>,
}

/// What a node's daemon lists.
#[derive(Debug)]
pub struct Listing<'a> {
    /// The VMs that run.
    pub now: &'a BTreeSet<String>,
    /// These, and those of the list before: a VM has ended if it is in neither.
    pub lately: &'a BTreeSet<String>,
    /// What was leased there before the list was asked for.
    pub leased: &'a LeasedOn,
    /// The VMs that were known to run before the list before was asked for.
    pub known: &'a Known,
}

/// A lease after a listing of a node's VMs, and the VMs that have ended. None if nothing changes. A VM that is being moved is left
/// alone: it is on one of two nodes.
fn after_listing(lease: &Lease, node: &NodeName, listing: &Listing<'_>) -> Option<(Lease, Vec<VmName>)> {
    if !lease.held.iter().any(|held| held.assignment.node == *node) {
        return None;
    }
    let moving: BTreeSet<&VmName> = lease
        .held
        .iter()
        .filter(|held| held.part == Part::Incoming)
        .map(|held| &held.assignment.vm)
        .collect();
    let mut after = lease.clone();
    let mut ended = Vec::new();
    after.held.retain_mut(|held| {
        let vm = &held.assignment.vm;
        if held.assignment.node != *node || moving.contains(vm) {
            return true;
        }
        let was_known = listing.known.get(vm.as_str()) == Some(&lease.granted);
        if held.seen && was_known && !listing.lately.contains(vm.as_str()) {
            ended.push(vm.clone());
            return false;
        }
        let is_same = listing.leased.beats.get(vm.as_str()) == Some(&(lease.granted.clone(), lease.beats));
        let runs = is_same && listing.now.contains(vm.as_str());
        held.seen |= runs;
        held.growing &= !runs;
        true
    });
    (after != *lease).then_some((after, ended))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> LeaseId {
        text.parse().unwrap()
    }

    #[test]
    fn only_time_awake_and_in_touch_counts() {
        let (lease, mut sweeper) = (id("a"), Sweeper::default());
        let mut look = |now: u64, revision: u64| {
            !sweeper.overdue(now, std::iter::once((&lease, Revision(revision), 3000))).is_empty()
        };
        assert!(!look(0, 1));
        // Stopped for a day: one look, one second.
        assert!(!look(86_400_000, 1));
        assert!(!look(86_401_000, 1));
        assert!(!look(86_402_000, 1));
        assert!(look(86_402_001, 1));
        // A heartbeat makes it young again.
        assert!(!look(86_402_002, 2));
    }
}
