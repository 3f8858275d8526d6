//! A copy of a running cluster: each VM forked once, at one moment, to where a cluster of its shape is placed now.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use sched_bridge::model::{Assignment, NodeName, VmName};
use sched_bridge::place::{ClusterRequest, VmGroup};
use tokio::task::JoinSet;
use vmove_bridge_types::cluster::{ClusterForked, ForkClusterRequest, ForkOne, ForkedMember};
use vmove_grant::Grant;

use super::barrier::{Barrier, stood_still};
use super::{ClusterError, Clusters, done_and_failed, homes, joined};
use crate::bridge::{BridgeError, GrantRequest, Granted, Wanted, resident};
use crate::driver::{Forked, ForkedChild, WantedChild};
use crate::lease::{Lease, LeaseId};
use crate::quota::Quota;
use crate::together::in_their_roles;
use crate::vms::{StartError, grant_of, list_all, stop_all};

/// One VM that is to be forked.
#[derive(Debug, Clone)]
struct Order {
    node: NodeName,
    vm: VmName,
    children: Vec<WantedChild>,
}

/// Forks a cluster: all of its VMs or none.
///
/// # Errors
/// There is no room for the copy, or a VM cannot be forked: then no copy is left, and the cluster runs on.
pub async fn fork(
    clusters: &Clusters,
    id: &LeaseId,
    request: &ForkClusterRequest,
    quota: Option<Quota>,
) -> Result<ClusterForked, ClusterError> {
    let lease = Arc::clone(&clusters.bridge.view()?.lease(id)?.lease);
    let mut parents = homes(&lease)?;
    if let Some(ForkOne { vm, .. }) = &request.only {
        parents.retain(|(known, _)| known == vm);
        if parents.is_empty() {
            return Err(BridgeError::UnknownVm(vm.clone()).into());
        }
    }
    // One guest alone needs no barrier.
    let each_alone = request.each_alone || parents.len() == 1;
    clusters.may_be_frozen(&lease, each_alone, &parents).await?;
    let wanted = copy_of(&lease, request)?;
    let granted = clusters.bridge.grant(GrantRequest { quota, ..wanted }).await?;
    if granted.again {
        return Err(ClusterError::Invalid(format!(
            "there is a lease {} already: choose another id",
            granted.lease.id
        )));
    }
    match clusters.fork_all(&lease, &granted, (request.only.as_ref(), each_alone)).await {
        Ok((members, notes)) => {
            let lease = &granted.lease;
            let lease = clusters.bridge.mark_running(&lease.id, &lease.places(), true).await?;
            Ok(ClusterForked { lease: clusters.bridge.info(&lease), members, notes })
        }
        Err(error) => Err(clusters.without_copies(&granted.lease, error).await),
    }
}

/// A request for a lease like this one.
fn copy_of(lease: &Lease, request: &ForkClusterRequest) -> Result<GrantRequest, ClusterError> {
    let id = match &request.id {
        Some(id) => id.clone(),
        None => request.name.as_str().parse().map_err(|error| ClusterError::Invalid(format!("{error}")))?,
    };
    let mut cluster = resident(lease)?.request;
    if let Some(ForkOne { vm, count }) = &request.only {
        let (group, _) = cluster.place_in_group(vm).ok_or_else(|| BridgeError::UnknownVm(vm.clone()))?;
        cluster.groups = vec![VmGroup { count: *count, ..cluster.groups[group].clone() }];
    }
    let cluster = ClusterRequest { name: request.name.clone(), ..cluster };
    Ok(GrantRequest {
        id,
        holder: lease.holder.clone(),
        project: lease.project.clone(),
        wanted: Wanted::Cluster(Box::new(cluster)),
        ttl_ms: lease.ttl_ms,
        together: lease.together,
        start: lease.start.clone(),
        quota: None,
    })
}

impl Clusters {
    /// Refuses a cluster whose VMs do not all run; and one whose guests have devices, at a barrier: a guest that is paused lets none go.
    pub(super) async fn may_be_frozen(
        &self,
        lease: &Lease,
        each_alone: bool,
        vms: &[(VmName, NodeName)],
    ) -> Result<(), ClusterError> {
        let listed = list_all(&self.driver, lease.nodes()).await;
        for (vm, node) in vms {
            match listed.get(node) {
                Some(Ok(known)) if known.get(vm.as_str()).is_some_and(|vm| !vm.ended) => {}
                Some(Err(why)) => return Err(ClusterError::Node(why.clone())),
                _ => {
                    return Err(ClusterError::Node(format!(
                        "VM {vm} does not run on node {node}: all VMs of {} must run",
                        lease.id
                    )));
                }
            }
        }
        if each_alone {
            return Ok(());
        }
        for held in lease.held.iter().filter(|held| held.assignment.plugged().next().is_some()) {
            let owned = self.driver.owned(&held.assignment.node).await.map_err(ClusterError::Node)?;
            let vm = &held.assignment.vm;
            if owned.get(vm.as_str()).is_some_and(|devices| !devices.is_empty()) {
                return Err(ClusterError::Invalid(format!(
                    "VM {vm} has devices, which its guest can only let go while it runs, so that not all VMs can stand still at once: with \
                     --each-alone each is frozen at a moment of its own"
                )));
            }
        }
        Ok(())
    }

    async fn fork_all(
        &self,
        lease: &Lease,
        granted: &Granted,
        (only, each_alone): (Option<&ForkOne>, bool),
    ) -> Result<(Vec<ForkedMember>, Vec<String>), ClusterError> {
        let orders = self.orders(lease, &granted.lease, only).await?;
        let parents: Vec<(VmName, NodeName)> =
            orders.iter().map(|order| (order.vm.clone(), order.node.clone())).collect();
        let barrier = if each_alone { None } else { Some(self.raise_barrier(&parents).await?) };
        let barrier = barrier.map(Arc::new);
        let mut work = JoinSet::new();
        for order in orders {
            let (driver, barrier) = (Arc::clone(&self.driver), barrier.clone());
            work.spawn(async move {
                let asked = Instant::now();
                let forked = driver.fork(&order.node, &order.vm, &order.children).await;
                let Order { node, vm, .. } = &order;
                let forked = forked.map_err(|why| format!("VM {vm} on node {node} is not forked: {why}"));
                forked.map(|forked| members_of(&order, forked, barrier.as_deref(), asked))
            });
        }
        let (forked, errors) = done_and_failed(work.join_all().await);
        if let (false, Some(barrier)) = (errors.is_empty(), barrier.and_then(Arc::into_inner)) {
            barrier.lift().await;
        }
        joined(&errors)?;
        let (members, notes): (Vec<_>, Vec<_>) = forked.into_iter().unzip();
        let (mut members, notes) = (members.concat(), notes.concat());
        members.sort_by_key(|one: &ForkedMember| super::natural(&one.vm));
        Ok((members, notes))
    }

    /// Which VM becomes which: the first of a group the first of that group, and so on; or one of them all.
    async fn orders(
        &self,
        lease: &Lease,
        copy: &Lease,
        only: Option<&ForkOne>,
    ) -> Result<Vec<Order>, ClusterError> {
        let (old, new) = (resident(lease)?.assignments, resident(copy)?.assignments);
        let parents: Vec<&Assignment> = match only {
            Some(ForkOne { vm, .. }) => {
                let parent = old.iter().find(|one| one.vm == *vm);
                vec![parent.ok_or_else(|| BridgeError::UnknownVm(vm.clone()))?; new.len()]
            }
            None => old.iter().collect(),
        };
        let mut orders: Vec<Order> = Vec::new();
        for (from, to) in parents.into_iter().zip(&new) {
            let devices = if from.plugged().next().is_none() {
                Vec::new()
            } else {
                let owned = self.driver.owned(&from.node).await.map_err(ClusterError::Node)?;
                in_their_roles(owned.get(from.vm.as_str()).map_or(&[], Vec::as_slice), from, to)
            };
            // Its roles are those that the guest knows.
            let grant = Grant { devices: devices.clone(), ..grant_of(copy, to) };
            let child = WantedChild { node: to.node.clone(), vm: to.vm.clone(), devices, grant };
            match orders.iter_mut().find(|order| order.vm == from.vm) {
                Some(order) => order.children.push(child),
                None => {
                    let (node, vm) = (from.node.clone(), from.vm.clone());
                    orders.push(Order { node, vm, children: vec![child] });
                }
            }
        }
        Ok(orders)
    }

    /// Ends what came to be of a copy that is not whole, and gives its lease back.
    pub(super) async fn without_copies(&self, copy: &Lease, error: ClusterError) -> ClusterError {
        let places = copy.held.iter().map(|held| (held.assignment.vm.clone(), held.assignment.node.clone()));
        if let Err(reasons) = stop_all(&self.driver, places.collect()).await {
            let reasons = format!("{error}; {reasons}");
            return StartError::StillRunning { reasons, failed: BTreeMap::new() }.into();
        }
        match self.bridge.release(&copy.id).await {
            Ok(_) => error,
            Err(release) => {
                ClusterError::Node(format!("{error}; lease {} could not be given back ({release})", copy.id))
            }
        }
    }
}

fn members_of(
    order: &Order,
    forked: Forked,
    barrier: Option<&Barrier>,
    asked: Instant,
) -> (Vec<ForkedMember>, Vec<String>) {
    let stood_still = stood_still(barrier, asked, forked.ran_on, forked.stood_still);
    let notes = forked.notes.iter().map(|note| format!("VM {}: {note}", order.vm)).collect();
    let member = |(wanted, made): (&WantedChild, ForkedChild)| ForkedMember {
        parent: order.vm.clone(),
        parent_node: order.node.clone(),
        vm: wanted.vm.clone(),
        node: wanted.node.clone(),
        stood_still_ms: stood_still.as_secs_f64() * 1000.0,
        network: made.network,
        nics: made.nics,
    };
    (order.children.iter().zip(forked.children).map(member).collect(), notes)
}
