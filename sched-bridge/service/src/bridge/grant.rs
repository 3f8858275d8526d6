//! Giving leases, keeping them alive, taking them back.

use std::sync::Arc;

use sched_bridge::model::{Assignment, ClusterName, NodeName, NodeState};
use sched_bridge::place::{ClusterRequest, Explanation, Options, PlaceError, Placement, explain, place};

use super::{Bridge, BridgeError, Step, View};
use crate::account::{End, Record};
use crate::keys;
use crate::lease::{Held, Lease, LeaseId, MAX_TTL_MS, MIN_TTL_MS, Part, Usage};
use crate::store::{Expect, Txn};

/// A request for a lease.
#[derive(Debug, Clone)]
pub struct Ask {
    /// The id it shall have. Whoever repeats a request with it gets the same lease.
    pub id: LeaseId,
    /// For whom.
    pub holder: String,
    /// What, either to be placed or named exactly.
    pub want: Want,
    /// Time to live without a heartbeat. Unit: milliseconds.
    pub ttl_ms: u64,
}

/// What a lease is asked for.
#[derive(Debug, Clone)]
pub enum Want {
    /// The bridge places it.
    Place(Box<ClusterRequest>),
    /// The caller has placed it.
    Exactly(ClusterName, Vec<Assignment>),
}

impl Want {
    fn cluster(&self) -> &ClusterName {
        match self {
            Self::Place(request) => &request.name,
            Self::Exactly(name, _) => name,
        }
    }
}

/// A lease that was given.
#[derive(Debug, Clone)]
pub struct Granted {
    /// The lease.
    pub lease: Arc<Lease>,
    /// How it was placed, if the bridge did, and just now.
    pub placement: Option<Placement>,
    /// It was there already: the request is a repeated one.
    pub again: bool,
}

impl Bridge {
    /// Where a request would go now; nothing is taken.
    ///
    /// # Errors
    /// It does not fit, or the view is old.
    pub async fn what_if(&self, request: ClusterRequest) -> Result<Placement, BridgeError> {
        let view = self.view_when_current(tokio::time::Instant::now()).await?;
        placed(&view, &request).await
    }

    /// As [`Bridge::what_if`], with what is to be said of every node; a request that does not fit is explained, too.
    ///
    /// # Errors
    /// It contradicts itself, or the view is old.
    pub async fn explain(
        &self,
        request: ClusterRequest,
    ) -> Result<(Result<Placement, PlaceError>, Explanation), BridgeError> {
        let view = self.view_when_current(tokio::time::Instant::now()).await?;
        let placement = match placed(&view, &request).await {
            Ok(placement) => Ok(placement),
            Err(BridgeError::Place(reason @ PlaceError::NoRoom { .. })) => Err(reason),
            Err(error) => return Err(error),
        };
        let work = move || {
            let explanation = explain(view.fleet(), &view.occupancy(), &request, placement.as_ref().ok());
            explanation.map(|explanation| (placement, explanation))
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(explained) => Ok(explained?),
            Err(error) => Err(BridgeError::Bad(format!("the explanation failed inside: {error}"))),
        }
    }

    /// Gives a lease: all of it or nothing.
    ///
    /// # Errors
    /// It does not fit, the id is somebody else's, or the store does not answer.
    pub async fn grant(&self, ask: Ask) -> Result<Granted, BridgeError> {
        check(&ask)?;
        let start = tokio::time::Instant::now();
        loop {
            let view = self.view_when_current(start).await?;
            if let Some(known) = view.leases().get(&ask.id) {
                return again(&ask, &known.lease);
            }
            let (lease, placement) = match self.drafted(&view, &ask).await {
                Ok(drafted) => drafted,
                Err(_) if self.catch_up(&view, start).await? => continue,
                Err(error) => return Err(error),
            };
            let txn = grant_txn(&view, &lease);
            if self.commit(txn, &view, start).await? {
                return Ok(Granted { lease: Arc::new(lease), placement, again: false });
            }
        }
    }

    async fn drafted(&self, view: &Arc<View>, ask: &Ask) -> Result<(Lease, Option<Placement>), BridgeError> {
        let (assignments, placement) = match &ask.want {
            Want::Place(request) => {
                let placement = placed(view, request).await?;
                (placement.assignments.clone(), Some(placement))
            }
            Want::Exactly(_, assignments) => (assignments.clone(), None),
        };
        let lease = self.draft(ask, assignments);
        takeable(view, &lease)?;
        Ok((lease, placement))
    }

    fn draft(&self, ask: &Ask, assignments: Vec<Assignment>) -> Lease {
        let now = self.clock.stamp();
        let held = |assignment| Held { assignment, part: Part::Home, seen: false };
        let request = match &ask.want {
            Want::Place(request) => Some(ClusterRequest::clone(request)),
            Want::Exactly(..) => None,
        };
        Lease {
            id: ask.id.clone(),
            holder: ask.holder.clone(),
            cluster: ask.want.cluster().clone(),
            request,
            held: assignments.into_iter().map(held).collect(),
            ttl_ms: ask.ttl_ms,
            beats: 0,
            granted: now.clone(),
            counted: now,
            usage: Usage::default(),
            exact: true,
        }
    }

    /// A heartbeat: the holder is alive.
    ///
    /// # Errors
    /// The lease has ended. Its holder must let go of everything in it.
    pub async fn renew(&self, id: &LeaseId) -> Result<Arc<Lease>, BridgeError> {
        self.change(|view| {
            let known = view.lease(id)?;
            let mut lease = Lease::clone(&known.lease);
            lease.count(&self.clock.stamp());
            lease.beats += 1;
            let txn = Txn::default()
                .expect(keys::lease(id), Expect::At(known.revision))
                .put(keys::lease(id), json(&lease));
            Ok(Step::Commit(txn, Arc::new(lease)))
        })
        .await
    }

    /// Gives a lease back.
    ///
    /// # Errors
    /// There is none, or the store does not answer.
    pub async fn release(&self, id: &LeaseId) -> Result<Record, BridgeError> {
        let mut ended = None;
        self.change(|view| match (view.lease(id), ended.take()) {
            (Ok(known), _) => {
                let (txn, record) = end_txn(&known.lease, known.revision, End::Released, &self.clock.stamp());
                ended = Some(record.clone());
                Ok(Step::Commit(txn, record))
            }
            // The answer to the commit was lost, but it happened.
            (Err(_), Some(record)) => Ok(Step::Done(record)),
            (Err(error), None) => Err(error),
        })
        .await
    }
}

/// Places on the workers for long computations.
async fn placed(view: &Arc<View>, request: &ClusterRequest) -> Result<Placement, BridgeError> {
    let (fleet, view, request) = (Arc::clone(view.fleet()), Arc::clone(view), request.clone());
    let work = move || {
        let occupancy = view.occupancy();
        drop(view);
        place(&fleet, &occupancy, &request, &Options::default())
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(placement) => Ok(placement?),
        Err(error) => Err(BridgeError::Bad(format!(
            "the placement failed inside ({error}): please report this request"
        ))),
    }
}

fn check(ask: &Ask) -> Result<(), BridgeError> {
    let holder = ask.holder.trim();
    if holder.is_empty() || ask.holder.len() > 128 || ask.holder.chars().any(char::is_control) {
        return Err(BridgeError::Bad(format!(
            "holder {:?}: expected 1 to 128 bytes without control characters",
            ask.holder
        )));
    }
    if !(MIN_TTL_MS..=MAX_TTL_MS).contains(&ask.ttl_ms) {
        return Err(BridgeError::Bad(format!(
            "time to live {} ms: expected {MIN_TTL_MS} to {MAX_TTL_MS}",
            ask.ttl_ms
        )));
    }
    if matches!(&ask.want, Want::Exactly(_, assignments) if assignments.is_empty()) {
        return Err(BridgeError::Bad("no assignments: expected at least one VM on a node".to_owned()));
    }
    Ok(())
}

/// The lease is there: it is this request repeated, or somebody else's.
fn again(ask: &Ask, lease: &Arc<Lease>) -> Result<Granted, BridgeError> {
    if lease.holder != ask.holder || lease.cluster != *ask.want.cluster() {
        return Err(BridgeError::IdTaken {
            id: ask.id.clone(),
            holder: lease.holder.clone(),
            cluster: lease.cluster.to_string(),
        });
    }
    Ok(Granted { lease: Arc::clone(lease), placement: None, again: true })
}

/// Whatever placed it: nothing is committed that is not free, or on a node that takes nothing.
fn takeable(view: &View, lease: &Lease) -> Result<(), BridgeError> {
    let mut occupancy = view.occupancy();
    for held in &lease.held {
        occupancy.take(view.fleet(), &held.assignment)?;
        let node = &held.assignment.node;
        let state = view.node(node).map(|(node, _)| node.state);
        if state != Some(NodeState::Up) {
            return Err(BridgeError::Bad(format!("node {node} takes no VMs: it is {state:?}")));
        }
    }
    let taken: std::collections::HashSet<_> =
        view.leases().values().flat_map(|known| known.lease.vms()).collect();
    if let Some(vm) = lease.vms().find(|vm| taken.contains(vm)) {
        return Err(BridgeError::Bad(format!(
            "VM {vm} is part of another lease: VM names are unique in a fleet"
        )));
    }
    Ok(())
}

fn grant_txn(view: &View, lease: &Lease) -> Txn {
    let key = keys::lease(&lease.id);
    let mut txn = Txn::default().expect(&key, Expect::Absent).put(key, json(lease));
    for node in lease.nodes() {
        txn = guarded(txn, view, &node);
    }
    txn
}

/// Makes a transaction fail if anything was taken on this node, or the node changed, since the view.
pub(super) fn guarded(txn: Txn, view: &View, node: &NodeName) -> Txn {
    let key = keys::guard(node);
    txn.expect(&key, Expect::seen(view.guard(node))).put(key, "")
}

/// Ends a lease, and writes its record in the same transaction: exactly one.
pub(super) fn end_txn(
    lease: &Lease,
    revision: crate::store::Revision,
    end: End,
    now: &crate::clock::Stamp,
) -> (Txn, Record) {
    let mut lease = lease.clone();
    lease.count(now);
    let record = Record::of(&lease, end);
    let key = keys::lease(&lease.id);
    let txn = Txn::default()
        .expect(&key, Expect::At(revision))
        .delete(key)
        .put(keys::record(now.wall_ms, &lease.id), json(&record));
    (txn, record)
}

/// Our own types always make JSON.
pub(super) fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
