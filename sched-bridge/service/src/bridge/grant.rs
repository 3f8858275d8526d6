//! Places virtual clusters, and grants, renews and releases leases.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use sched_bridge::model::{Assignment, ClusterName, NodeName, NodeState, VmName};
use sched_bridge::place::{
    ClusterRequest, Explanation, Nearest, Options, PlaceError, Placement, explain, nearest, place,
};
use tokio::time::Instant;

use super::transactions::{end_lease, grant_lease, one_grant_at_a_time, update_lease};
use super::{Attempt, Bridge, BridgeError, View};
use crate::account::{End, Record};
use crate::lease::{Held, Lease, LeaseId, MAX_TTL_MS, MIN_TTL_MS, Part, Usage};
use crate::metrics;
use crate::quota::Quota;
use vmove_bridge_types::requests::StartAll;

/// A request for a lease.
#[derive(Debug, Clone)]
pub struct GrantRequest {
    /// Id of the new lease. A repeated request with the same id returns the same lease.
    pub id: LeaseId,
    /// The user or job that holds it.
    pub holder: String,
    /// The project on whose account it goes.
    pub project: Option<String>,
    /// What it is to contain.
    pub wanted: Wanted,
    /// Time to live without a heartbeat. Unit: milliseconds.
    pub ttl_ms: u64,
    /// Its VMs move together, though they own no devices.
    pub together: bool,
    /// How its VMs are to be started, if all are in one way.
    pub start: Option<StartAll>,
    /// What its holder may have leased at once; none: as much as there is.
    pub quota: Option<Quota>,
}

/// What a lease is to contain.
#[derive(Debug, Clone)]
pub enum Wanted {
    /// A virtual cluster, placed by the bridge.
    Cluster(Box<ClusterRequest>),
    /// These resources, chosen by the caller for a virtual cluster.
    Assignments(ClusterName, Vec<Assignment>),
}

impl Wanted {
    /// The virtual cluster.
    #[must_use]
    pub fn cluster(&self) -> &ClusterName {
        match self {
            Self::Cluster(request) => &request.name,
            Self::Assignments(name, _) => name,
        }
    }
}

/// A granted lease.
#[derive(Debug, Clone)]
pub struct Granted {
    /// The lease.
    pub lease: Arc<Lease>,
    /// Where the bridge placed it. None if the caller chose the resources, or for a repeated request.
    pub placement: Option<Placement>,
    /// The lease existed already: the request was a repeated one.
    pub again: bool,
}

impl Bridge {
    /// Where a virtual cluster would be placed now. Nothing is leased.
    ///
    /// # Errors
    /// It does not fit, or the store does not answer.
    #[tracing::instrument(name = "placement", skip_all, fields(cluster = %request.name))]
    pub async fn what_if(&self, request: ClusterRequest) -> Result<Placement, BridgeError> {
        let view = self.view_since(Instant::now()).await?;
        placed(&view, &request).await
    }

    /// As [`Bridge::what_if`], with an explanation for every node, also if the request does not fit.
    ///
    /// # Errors
    /// The request contradicts itself, or the store does not answer.
    #[tracing::instrument(name = "placement", skip_all, fields(cluster = %request.name))]
    pub async fn explain(
        &self,
        request: ClusterRequest,
    ) -> Result<(Result<Placement, PlaceError>, Explanation), BridgeError> {
        let view = self.view_since(Instant::now()).await?;
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
            Err(error) => Err(BridgeError::Invalid(format!(
                "the placement could not be explained ({error}): please report this request"
            ))),
        }
    }

    /// With which changes a request that does not fit would fit. Placements are tried until `until`.
    ///
    /// # Errors
    /// The store does not answer.
    pub async fn nearest(
        &self,
        request: ClusterRequest,
        until: std::time::Instant,
    ) -> Result<Nearest, BridgeError> {
        let view = self.view_since(Instant::now()).await?;
        let work = move || {
            let (fleet, occupancy) = (Arc::clone(view.fleet()), view.occupancy());
            // Whoever applies the next change to the view need not copy it.
            drop(view);
            let mut may_go_on = || std::time::Instant::now() < until;
            nearest(&fleet, &occupancy, &request, &Options::default(), &mut may_go_on)
        };
        tokio::task::spawn_blocking(work).await.map_err(|error| {
            BridgeError::Invalid(format!("no change could be tried ({error}): please report this request"))
        })
    }

    /// Grants a lease: all of it or nothing.
    ///
    /// # Errors
    /// It does not fit, another holder has the id, or the store does not answer.
    #[tracing::instrument(name = "placement", skip_all, fields(lease = %request.id, cluster = %request.wanted.cluster()))]
    pub async fn grant(&self, request: GrantRequest) -> Result<Granted, BridgeError> {
        let result = self.try_grant(request).await;
        match &result {
            Ok(Granted { again: true, .. }) => tracing::debug!("the lease exists already"),
            Ok(Granted { lease, .. }) => {
                metrics::lease_granted();
                let (vms, nodes) = (lease.held.len(), nodes_of(lease));
                tracing::info!(holder = lease.holder, vms, nodes, "the lease is granted");
            }
            Err(error) => {
                metrics::lease_refused(error.label());
                tracing::info!(%error, "no lease is granted");
            }
        }
        result
    }

    async fn try_grant(&self, request: GrantRequest) -> Result<Granted, BridgeError> {
        check(&request)?;
        let start = Instant::now();
        loop {
            let view = self.view_since(start).await?;
            if let Some(entry) = view.leases().get(&request.id) {
                return repeated(&request, &entry.lease);
            }
            let (lease, placement) = match self.new_lease(&view, &request).await {
                Ok(new) => new,
                Err(_) if self.catch_up(&view, start).await? => continue,
                Err(error) => return Err(error),
            };
            let mut txn = grant_lease(&view, &lease);
            if request.quota.is_some() {
                txn = one_grant_at_a_time(txn, &view, &request.holder);
            }
            if self.commit(txn, &view, start).await? {
                return Ok(Granted { lease: Arc::new(lease), placement, again: false });
            }
        }
    }

    /// A lease that could be granted according to the view.
    async fn new_lease(
        &self,
        view: &Arc<View>,
        request: &GrantRequest,
    ) -> Result<(Lease, Option<Placement>), BridgeError> {
        let (cluster_request, assignments, placement) = match &request.wanted {
            Wanted::Cluster(wanted) => {
                let placement = placed(view, wanted).await?;
                (Some(ClusterRequest::clone(wanted)), placement.assignments.clone(), Some(placement))
            }
            Wanted::Assignments(_, assignments) => (None, assignments.clone(), None),
        };
        if let Some(quota) = &request.quota {
            quota.check(view.all_leases(), &request.holder, &assignments)?;
        }
        let now = self.clock.stamp();
        let held = |assignment| Held { assignment, part: Part::Home, seen: false, growing: false };
        let lease = Lease {
            id: request.id.clone(),
            holder: request.holder.clone(),
            project: request.project.clone(),
            cluster: request.wanted.cluster().clone(),
            request: cluster_request,
            held: assignments.into_iter().map(held).collect(),
            ttl_ms: request.ttl_ms,
            together: request.together,
            start: request.start.clone(),
            beats: 0,
            granted: now.clone(),
            counted: now,
            usage: Usage::default(),
            vms: std::collections::BTreeMap::new(),
            exact: true,
        };
        check_free(view, &lease)?;
        Ok((lease, placement))
    }

    /// Records a heartbeat of a lease's holder.
    ///
    /// # Errors
    /// The lease has ended: its holder must stop using everything in it. Or the store does not answer.
    pub async fn renew(&self, id: &LeaseId) -> Result<Arc<Lease>, BridgeError> {
        self.renew_if(id, |_| true).await
    }

    /// As [`Bridge::renew`], if the lease has a holder that `may` accepts. Otherwise there is no such lease.
    ///
    /// # Errors
    /// As [`Bridge::renew`].
    pub async fn renew_if(
        &self,
        id: &LeaseId,
        may: impl Fn(&str) -> bool,
    ) -> Result<Arc<Lease>, BridgeError> {
        self.change(|view| {
            let entry = view.lease(id)?;
            if !may(&entry.lease.holder) {
                return Err(BridgeError::UnknownLease(id.clone()));
            }
            let mut lease = Lease::clone(&entry.lease);
            lease.count(&self.clock.stamp());
            lease.beats += 1;
            Ok(Attempt::Commit(update_lease(&lease, entry.revision), Arc::new(lease)))
        })
        .await
    }

    /// Records that VMs of a lease were started on their nodes, or have been stopped there. While one runs, the lease needs no heartbeat.
    ///
    /// # Errors
    /// The lease has ended, a VM has another home by now, or the store does not answer.
    pub async fn mark_running(
        &self,
        id: &LeaseId,
        vms: &[(VmName, NodeName)],
        runs: bool,
    ) -> Result<Arc<Lease>, BridgeError> {
        self.change(|view| {
            let entry = view.lease(id)?;
            let mut lease = Lease::clone(&entry.lease);
            lease.count(&self.clock.stamp());
            lease.beats += 1;
            for (vm, node) in vms {
                let home = lease.held.iter_mut().find(|held| {
                    held.part == Part::Home && held.assignment.vm == *vm && held.assignment.node == *node
                });
                match home {
                    Some(home) => (home.seen, home.growing) = (runs, false),
                    // It was given back, which is as well.
                    None if !runs => {}
                    None => {
                        return Err(BridgeError::Invalid(format!(
                            "lease {id} has no place for VM {vm} on node {node} any more"
                        )));
                    }
                }
            }
            Ok(Attempt::Commit(update_lease(&lease, entry.revision), Arc::new(lease)))
        })
        .await
    }

    /// Ends a lease for its holder. Not while one of its VMs is moved by a plan: when the plan has ended, or was run to its end by another bridge, the
    /// lease can be released.
    ///
    /// # Errors
    /// There is no such lease, a VM of it is being moved, or the store does not answer.
    pub async fn release(&self, id: &LeaseId) -> Result<Record, BridgeError> {
        self.release_if(id, |_| true).await
    }

    /// As [`Bridge::release`], if the lease has a holder that `may` accepts. Otherwise there is no such lease.
    ///
    /// # Errors
    /// As [`Bridge::release`].
    pub async fn release_if(&self, id: &LeaseId, may: impl Fn(&str) -> bool) -> Result<Record, BridgeError> {
        let mut ended = None;
        let record = self
            .change(|view| match (view.lease(id), ended.take()) {
                (Ok(entry), None) if !may(&entry.lease.holder) => Err(BridgeError::UnknownLease(id.clone())),
                (Ok(entry), _) => {
                    // Its devices on both nodes are the VM's until it is known where it ended: nobody else may have them before.
                    let moving = entry.lease.held.iter().find(|held| held.part == Part::Incoming);
                    if let Some(held) = moving {
                        return Err(BridgeError::moving(held));
                    }
                    let now = self.clock.stamp();
                    let (txn, record) = end_lease(&entry.lease, entry.revision, End::Released, &now);
                    ended = Some(record.clone());
                    Ok(Attempt::Commit(txn, record))
                }
                // The answer to the commit was lost, but it was committed.
                (Err(_), Some(record)) => Ok(Attempt::Done(record)),
                (Err(error), None) => Err(error),
            })
            .await?;
        metrics::lease_ended(End::Released);
        tracing::info!(lease = %id, holder = record.holder, "the lease is released");
        Ok(record)
    }
}

/// The nodes of a lease, each once: the first ones, and how many more there are.
fn nodes_of(lease: &Lease) -> String {
    const MOST: usize = 32;
    let nodes: BTreeSet<&str> = lease.held.iter().map(|held| held.assignment.node.as_str()).collect();
    let mut text = nodes.iter().take(MOST).copied().collect::<Vec<_>>().join(" ");
    if nodes.len() > MOST {
        text.push_str(&format!(" and {} more", nodes.len() - MOST));
    }
    text
}

/// Places a request on a thread for long computations.
async fn placed(view: &Arc<View>, request: &ClusterRequest) -> Result<Placement, BridgeError> {
    let (fleet, view, request) = (Arc::clone(view.fleet()), Arc::clone(view), request.clone());
    let start = std::time::Instant::now();
    let work = move || {
        let occupancy = view.occupancy();
        // Whoever applies the next change to the view need not copy it.
        drop(view);
        place(&fleet, &occupancy, &request, &Options::default())
    };
    let placement = match tokio::task::spawn_blocking(work).await {
        Ok(placement) => placement.map_err(BridgeError::from),
        Err(error) => {
            Err(BridgeError::Invalid(format!("the placement failed ({error}): please report this request")))
        }
    };
    let elapsed = start.elapsed();
    metrics::placement_took(elapsed, placement.is_ok());
    tracing::debug!(
        elapsed_s = elapsed.as_secs_f64(),
        placed = placement.is_ok(),
        "searched for a placement"
    );
    placement
}

fn check(request: &GrantRequest) -> Result<(), BridgeError> {
    let names = [("holder", Some(&request.holder)), ("project", request.project.as_ref())];
    for (what, name) in names.into_iter().filter_map(|(what, name)| Some((what, name?))) {
        if name.trim().is_empty() || name.len() > 128 || name.chars().any(char::is_control) {
            return Err(BridgeError::Invalid(format!(
                "{what} {name:?}: expected 1 to 128 bytes without control characters"
            )));
        }
    }
    if !(MIN_TTL_MS..=MAX_TTL_MS).contains(&request.ttl_ms) {
        return Err(BridgeError::Invalid(format!(
            "time to live {} ms: expected {MIN_TTL_MS} to {MAX_TTL_MS} ms",
            request.ttl_ms
        )));
    }
    if matches!(&request.wanted, Wanted::Assignments(_, assignments) if assignments.is_empty()) {
        return Err(BridgeError::Invalid("no assignments: expected at least one VM on a node".to_owned()));
    }
    Ok(())
}

/// The answer to a request whose lease exists: the same lease, unless the request differs.
fn repeated(request: &GrantRequest, lease: &Arc<Lease>) -> Result<Granted, BridgeError> {
    if lease.holder != request.holder || lease.cluster != *request.wanted.cluster() {
        return Err(BridgeError::IdTaken {
            id: request.id.clone(),
            holder: lease.holder.clone(),
            cluster: lease.cluster.to_string(),
        });
    }
    Ok(Granted { lease: Arc::clone(lease), placement: None, again: true })
}

/// Whoever chose its resources: a lease is granted only if they are free, and on nodes that take VMs.
fn check_free(view: &View, lease: &Lease) -> Result<(), BridgeError> {
    let mut occupancy = view.occupancy();
    for held in &lease.held {
        occupancy.take(view.fleet(), &held.assignment)?;
        let node = &held.assignment.node;
        match view.node(node).map(|(node, _)| node.state) {
            Some(NodeState::Up) => {}
            Some(state) => {
                return Err(BridgeError::Invalid(format!("node {node} takes no VMs: it is {state}")));
            }
            None => return Err(BridgeError::Invalid(format!("node {node} is not in the fleet"))),
        }
    }
    check_names(view, lease.vms())
}

/// VM names are unique in a fleet: none of these may be part of a lease.
pub(super) fn check_names<'a>(
    view: &View,
    mut vms: impl Iterator<Item = &'a VmName>,
) -> Result<(), BridgeError> {
    let leased: HashSet<_> = view.all_leases().flat_map(Lease::vms).collect();
    match vms.find(|vm| leased.contains(vm)) {
        Some(vm) => Err(BridgeError::Invalid(format!(
            "VM {vm} is part of another lease: VM names are unique in a fleet"
        ))),
        None => Ok(()),
    }
}
