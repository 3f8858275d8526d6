//! Ends leases whose holders are gone, and those whose VMs have ended.
//!
//! No time of day is compared. Each bridge measures, by a clock that does not jump, how long it has seen a lease without a heartbeat
//! while it was awake and in touch with the store. A bridge that was stopped, suspended or cut off has heard nobody, so that time
//! does not count; a bridge that was just started begins at zero. The end is a compare-and-swap on the revision of the last
//! heartbeat: a heartbeat that comes at the same moment wins or loses, never both.

use std::collections::{BTreeSet, HashMap};
use std::sync::PoisonError;
use std::time::Duration;

use sched_bridge::model::{NodeName, VmName};

use super::grant::{end_txn, json};
use super::{Bridge, BridgeError, Step};
use crate::account::End;
use crate::keys;
use crate::lease::{Lease, LeaseId, Part};
use crate::store::{Committed, Expect, Revision, Txn};

/// How often the leases are looked at.
pub const TICK: Duration = Duration::from_millis(250);
/// Between two looks, at most this much counts, however much time has passed. Unit: milliseconds.
const MOST_PER_TICK_MS: u64 = 1000;

/// How long each lease was seen without a heartbeat.
#[derive(Debug, Default)]
pub(super) struct Sweeper {
    last_look_ms: Option<u64>,
    ages: HashMap<LeaseId, (Revision, u64)>,
}

impl Sweeper {
    /// Leases that have had no heartbeat for their time to live.
    fn overdue<'a>(
        &mut self,
        now_ms: u64,
        leases: impl Iterator<Item = (&'a LeaseId, Revision, u64)>,
    ) -> Vec<LeaseId> {
        let passed = self.last_look_ms.map_or(0, |last| now_ms.saturating_sub(last)).min(MOST_PER_TICK_MS);
        self.last_look_ms = Some(now_ms);
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
}

impl Bridge {
    /// Looks once for leases without heartbeats and ends them. Says which.
    pub async fn sweep(&self) -> Vec<LeaseId> {
        let now = self.clock.monotonic_ms();
        let Ok(view) = self.view() else {
            // Out of touch: heartbeats may be coming in elsewhere.
            self.sweeper.lock().unwrap_or_else(PoisonError::into_inner).last_look_ms = None;
            return Vec::new();
        };
        let overdue = {
            let mut sweeper = self.sweeper.lock().unwrap_or_else(PoisonError::into_inner);
            let leases = view.leases().iter().map(|(id, known)| (id, known.revision, known.lease.ttl_ms));
            sweeper.overdue(now, leases)
        };
        let mut ended = Vec::new();
        for id in overdue {
            let Ok(known) = view.lease(&id) else { continue };
            let (txn, _) = end_txn(&known.lease, known.revision, End::Expired, &self.clock.stamp());
            match self.store.commit(txn).await {
                Ok(Committed::At(_)) => {
                    tracing::info!(lease = %id, holder = known.lease.holder, "no heartbeat: the lease has ended");
                    ended.push(id);
                }
                Ok(Committed::Conflict) => {}
                Err(error) => {
                    tracing::warn!(lease = %id, %error, "a lease could not be ended; it is tried again");
                }
            }
        }
        ended
    }

    /// Sweeps forever; the task ends when it is dropped.
    pub async fn keep_sweeping(self: std::sync::Arc<Self>) {
        loop {
            tokio::time::sleep(TICK).await;
            self.sweep().await;
        }
    }

    /// A node's daemon says which VMs are there. VMs that were seen before and are gone give back what they had there; a lease whose
    /// VMs are all gone ends. Says which VMs have ended.
    ///
    /// # Errors
    /// The store does not answer.
    pub async fn vms_seen(
        &self,
        node: &NodeName,
        there: &BTreeSet<String>,
    ) -> Result<Vec<VmName>, BridgeError> {
        let view = self.view()?;
        let mut gone = Vec::new();
        for known in view.leases().values() {
            let concerned = |lease: &Lease| lease.held.iter().any(|held| held.assignment.node == *node);
            if !concerned(&known.lease) || news_of(&known.lease, node, there).is_none() {
                continue;
            }
            let id = known.lease.id.clone();
            let result = self.change(|view| {
                let Ok(known) = view.lease(&id) else { return Ok(Step::Done(Vec::new())) };
                let Some((mut lease, ended)) = news_of(&known.lease, node, there) else {
                    return Ok(Step::Done(Vec::new()));
                };
                if lease.held.is_empty() {
                    let (txn, _) = end_txn(&known.lease, known.revision, End::VmsEnded, &self.clock.stamp());
                    return Ok(Step::Commit(txn, ended));
                }
                // Counted with what was held until now.
                let mut counted = Lease::clone(&known.lease);
                counted.count(&self.clock.stamp());
                (lease.usage, lease.counted, lease.exact) = (counted.usage, counted.counted, counted.exact);
                let key = keys::lease(&id);
                let txn = Txn::default().expect(&key, Expect::At(known.revision)).put(key, json(&lease));
                Ok(Step::Commit(txn, ended))
            });
            gone.extend(result.await?);
        }
        Ok(gone)
    }
}

/// What a list of VMs changes in a lease, and who is gone. A VM that is on the move is left alone: it is at one of two places.
fn news_of(lease: &Lease, node: &NodeName, there: &BTreeSet<String>) -> Option<(Lease, Vec<VmName>)> {
    let moving: BTreeSet<&VmName> = lease
        .held
        .iter()
        .filter(|held| held.part == Part::Incoming)
        .map(|held| &held.assignment.vm)
        .collect();
    let mut after = lease.clone();
    let mut gone = Vec::new();
    after.held.retain_mut(|held| {
        let vm = &held.assignment.vm;
        if held.assignment.node != *node || moving.contains(vm) {
            return true;
        }
        let is_there = there.contains(vm.as_str());
        if held.seen && !is_there {
            gone.push(vm.clone());
            return false;
        }
        held.seen |= is_there;
        true
    });
    (after != *lease).then_some((after, gone))
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
