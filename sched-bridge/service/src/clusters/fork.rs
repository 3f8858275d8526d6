//! A copy of a running cluster: each VM forked once, at one moment, to where a cluster of its shape is placed now.

use std::sync::Arc;
use std::time::Instant;

use sched_bridge::model::{NodeName, VmName};
use sched_bridge::place::ClusterRequest;
use tokio::task::JoinSet;
use vmove_bridge_types::cluster::{ClusterForked, ForkClusterRequest, ForkedMember};
use vmove_grant::GrantedDevice;

use super::barrier::Barrier;
use super::{ClusterError, Clusters, homes};
use crate::bridge::{GrantRequest, Granted, Wanted, resident};
use crate::driver::Forked;
use crate::lease::{Lease, LeaseId};
use crate::quota::Quota;
use crate::together::in_their_roles;
use crate::vms::{StartError, stop_all};

/// One VM that is to be forked.
#[derive(Debug, Clone)]
struct Order {
    parent: (NodeName, VmName),
    child: (NodeName, VmName),
    devices: Vec<GrantedDevice>,
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
    let parents = homes(&lease)?;
    clusters.may_be_frozen(&lease, request.each_alone, &parents).await?;
    let wanted = copy_of(&lease, request)?;
    let granted = clusters.bridge.grant(GrantRequest { quota, ..wanted }).await?;
    if granted.again {
        return Err(ClusterError::Invalid(format!(
            "there is a lease {} already: choose another id",
            granted.lease.id
        )));
    }
    match clusters.fork_all(&lease, &granted, request.each_alone).await {
        Ok((members, notes)) => {
            let places: Vec<(VmName, NodeName)> =
                members.iter().map(|member| (member.vm.clone(), member.node.clone())).collect();
            let lease = clusters.bridge.mark_running(&granted.lease.id, &places, true).await?;
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
    let cluster = ClusterRequest { name: request.name.clone(), ..resident(lease)?.request };
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
        vms: &[(NodeName, VmName)],
    ) -> Result<(), ClusterError> {
        let listed = self.list(lease.nodes()).await;
        for (node, vm) in vms {
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
        for held in lease.held.iter().filter(|held| !held.assignment.devices.is_empty()) {
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
        each_alone: bool,
    ) -> Result<(Vec<ForkedMember>, Vec<String>), ClusterError> {
        let orders = self.orders(lease, &granted.lease).await?;
        let parents: Vec<(NodeName, VmName)> = orders.iter().map(|order| order.parent.clone()).collect();
        let barrier = if each_alone { None } else { Some(self.raise_barrier(&parents).await?) };
        let barrier = barrier.map(Arc::new);
        let mut work = JoinSet::new();
        for order in orders {
            let (driver, barrier) = (Arc::clone(&self.driver), barrier.clone());
            work.spawn(async move {
                let asked = Instant::now();
                let Order { parent: (from, vm), child: (to, child), devices } = &order;
                let forked = driver.fork((from, vm), (to, child), devices).await;
                let forked =
                    forked.map_err(|why| format!("VM {vm} on node {from} is not forked to {to}: {why}"));
                forked.map(|forked| member(&order, forked, barrier.as_deref(), asked))
            });
        }
        let (mut members, mut notes, mut errors) = (Vec::new(), Vec::new(), Vec::new());
        for done in work.join_all().await {
            match done {
                Ok((member, told)) => {
                    members.push(member);
                    notes.extend(told);
                }
                Err(why) => errors.push(why),
            }
        }
        if !errors.is_empty() {
            if let Some(barrier) = barrier.and_then(Arc::into_inner) {
                barrier.lift().await;
            }
            return Err(ClusterError::Node(errors.join("; ")));
        }
        members.sort_by_key(|one: &ForkedMember| super::natural(&one.vm));
        Ok((members, notes))
    }

    /// Which VM becomes which: the first of a group the first of that group, and so on.
    async fn orders(&self, lease: &Lease, copy: &Lease) -> Result<Vec<Order>, ClusterError> {
        let (old, new) = (resident(lease)?, resident(copy)?);
        let mut orders = Vec::new();
        for (from, to) in old.assignments.iter().zip(&new.assignments) {
            let devices = if from.devices.is_empty() {
                Vec::new()
            } else {
                let owned = self.driver.owned(&from.node).await.map_err(ClusterError::Node)?;
                in_their_roles(owned.get(from.vm.as_str()).map_or(&[], Vec::as_slice), from, to)
            };
            let (parent, child) = ((from.node.clone(), from.vm.clone()), (to.node.clone(), to.vm.clone()));
            orders.push(Order { parent, child, devices });
        }
        Ok(orders)
    }

    /// Ends what came to be of a copy that is not whole, and gives its lease back.
    pub(super) async fn without_copies(&self, copy: &Lease, error: ClusterError) -> ClusterError {
        let places = copy.held.iter().map(|held| (held.assignment.vm.clone(), held.assignment.node.clone()));
        if let Err(reasons) = stop_all(&self.driver, places.collect()).await {
            return StartError::StillRunning { reasons: format!("{error}; {reasons}") }.into();
        }
        match self.bridge.release(&copy.id).await {
            Ok(_) => error,
            Err(release) => {
                ClusterError::Node(format!("{error}; lease {} could not be given back ({release})", copy.id))
            }
        }
    }
}

fn member(
    order: &Order,
    forked: Forked,
    barrier: Option<&Barrier>,
    asked: Instant,
) -> (ForkedMember, Vec<String>) {
    let Order { parent: (parent_node, parent), child: (node, vm), .. } = order.clone();
    let stood_still = match (barrier, forked.ran_on) {
        (Some(barrier), Some(ran_on)) => barrier.stood_still(asked, ran_on),
        _ => forked.stood_still,
    };
    let notes = forked.notes.iter().map(|note| format!("VM {parent}: {note}")).collect();
    let member = ForkedMember {
        parent,
        parent_node,
        vm,
        node,
        stood_still_ms: stood_still.as_secs_f64() * 1000.0,
        network: forked.network,
        nics: forked.nics,
    };
    (member, notes)
}
