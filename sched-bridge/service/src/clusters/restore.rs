//! A cluster that runs again as it was at its checkpoint, on nodes that there are now.

use std::collections::BTreeSet;
use std::sync::Arc;

use sched_bridge::model::{NodeName, NodeState, VmName};
use tokio::task::JoinSet;
use vmove_bridge_types::cluster::{CheckpointVm, ClusterRestored, RestoreClusterRequest, RestoredMember};

use super::{ClusterError, Clusters, done_and_failed, joined};
use crate::bridge::{BridgeError, GrantRequest, Wanted, resident};
use crate::checkpoint::Checkpoint;
use crate::driver::WantedChild;
use crate::lease::{Lease, LeaseId};
use crate::quota::Quota;
use crate::vms::{grant_of, list_all, running};

/// Lets a cluster run again: its lease is given back if there is still one, and it is placed anew. All VMs run, or none.
///
/// # Errors
/// A VM of it may still run, there is no room, or one cannot be restored; then none is left, and the checkpoint is as it was.
pub async fn restore(
    clusters: &Clusters,
    name: &LeaseId,
    request: &RestoreClusterRequest,
    quota: Option<Quota>,
) -> Result<ClusterRestored, ClusterError> {
    let checkpoint = clusters.bridge.checkpoint(name)?;
    let taken_up = clusters.taken_up(&checkpoint)?;
    clusters.runs_nowhere(&checkpoint, &request.lost, taken_up.as_deref()).await?;
    let lease = match taken_up {
        Some(lease) => lease,
        None => {
            for node in &request.lost {
                clusters.bridge.set_node_state(node, NodeState::Down).await?;
            }
            clusters.bridge.note_lost(name, &request.lost).await?;
            match clusters.bridge.release(&checkpoint.info.id).await {
                Ok(_) | Err(BridgeError::UnknownLease(_)) => {}
                Err(error) => return Err(error.into()),
            }
            let wanted = GrantRequest { quota, ..again(&checkpoint) };
            clusters.bridge.grant(wanted).await?.lease
        }
    };
    match clusters.restore_all(&checkpoint, &lease).await {
        Ok(members) => {
            let lease = clusters.bridge.mark_running(&lease.id, &lease.places(), true).await?;
            let made_wall_ms = checkpoint.info.made_wall_ms;
            Ok(ClusterRestored { lease: clusters.bridge.info(&lease), made_wall_ms, members })
        }
        Err(error) => Err(clusters.without_copies(&lease, error).await),
    }
}

/// A request for the lease that the cluster had.
pub(super) fn again(checkpoint: &Checkpoint) -> GrantRequest {
    GrantRequest {
        id: checkpoint.info.id.clone(),
        holder: checkpoint.info.holder.clone(),
        project: checkpoint.project.clone(),
        wanted: Wanted::Cluster(Box::new(checkpoint.request.clone())),
        ttl_ms: checkpoint.ttl_ms,
        together: checkpoint.together,
        start: checkpoint.start.clone(),
        quota: None,
    }
}

impl Clusters {
    /// The lease of a request that was cut off after the cluster was placed anew: none of its VMs was marked as running yet.
    fn taken_up(&self, checkpoint: &Checkpoint) -> Result<Option<Arc<Lease>>, ClusterError> {
        let view = self.bridge.view()?;
        let Ok(entry) = view.lease(&checkpoint.info.id) else { return Ok(None) };
        let lease = Arc::clone(&entry.lease);
        let is_new = lease.granted.wall_ms >= checkpoint.info.made_wall_ms && !lease.runs();
        Ok(is_new.then_some(lease))
    }

    /// No VM of the checkpoint may run any more: it would be there twice. One that a request which was cut off has restored may, where its lease says.
    async fn runs_nowhere(
        &self,
        checkpoint: &Checkpoint,
        lost: &[NodeName],
        taken_up: Option<&Lease>,
    ) -> Result<(), ClusterError> {
        let view = self.bridge.view()?;
        let mut places: BTreeSet<NodeName> =
            checkpoint.info.members.iter().map(|member| member.node.clone()).collect();
        // Said before. A VM that came to such a node later is in the lease.
        places.retain(|node| !checkpoint.lost.contains(node));
        if let Ok(entry) = view.lease(&checkpoint.info.id) {
            places.extend(entry.lease.nodes());
        }
        if let Some(node) = lost.iter().find(|node| view.node(node).is_none()) {
            return Err(BridgeError::UnknownNode(node.clone()).into());
        }
        places.retain(|node| !lost.contains(node));
        for (node, listed) in list_all(&self.driver, places).await {
            let listed = listed.map_err(|why| {
                ClusterError::StillRuns(format!(
                    "VMs of {} may run on node {node}, which does not answer ({why}): power it off, then say so by --lost {node}",
                    checkpoint.info.id
                ))
            })?;
            let restored = |vm: &VmName| {
                let home = taken_up.and_then(|lease| lease.home(vm));
                home.is_some_and(|home| home.assignment.node == node)
            };
            let there = checkpoint.info.members.iter().find(|member| {
                listed.get(member.vm.as_str()).is_some_and(|vm| !vm.ended) && !restored(&member.vm)
            });
            if let Some(CheckpointVm { vm, .. }) = there {
                return Err(ClusterError::StillRuns(format!(
                    "VM {vm} runs on node {node}: end the cluster first (`vmove cluster stop {}`), what its VMs did since the checkpoint is lost",
                    checkpoint.info.id
                )));
            }
        }
        Ok(())
    }

    async fn restore_all(
        &self,
        checkpoint: &Checkpoint,
        lease: &Lease,
    ) -> Result<Vec<RestoredMember>, ClusterError> {
        let placed = resident(lease)?.assignments;
        let there =
            running(&self.driver, placed.iter().map(|one| &one.node)).await.map_err(ClusterError::Node)?;
        let mut work = JoinSet::new();
        // The first of a group is the first of that group again, whatever their numbers were.
        for (home, kept) in placed.into_iter().zip(in_order(checkpoint)?) {
            let again = there.contains(&(home.node.clone(), home.vm.to_string()));
            let grant = grant_of(lease, &home);
            let mut devices = grant.devices.clone();
            devices.retain(|device| kept.roles.contains(&device.role));
            let wanted = WantedChild { node: home.node.clone(), vm: home.vm.clone(), devices, grant };
            let (driver, template) = (Arc::clone(&self.driver), kept.template.clone());
            work.spawn(async move {
                let (vm, node) = (home.vm, home.node);
                if again {
                    return Ok(RestoredMember { vm, node, network: String::new(), again });
                }
                match driver.restore(&template, &wanted).await {
                    Ok(restored) => Ok(RestoredMember { vm, node, network: restored.network, again }),
                    Err(why) => Err(format!("VM {vm} does not run again on node {node}: {why}")),
                }
            });
        }
        let (mut members, errors) = done_and_failed(work.join_all().await);
        joined(&errors)?;
        members.sort_by_key(|one: &RestoredMember| super::natural(&one.vm));
        Ok(members)
    }
}

/// The VMs of a checkpoint by group and number.
fn in_order(checkpoint: &Checkpoint) -> Result<Vec<&CheckpointVm>, ClusterError> {
    let mut all = Vec::new();
    for member in &checkpoint.info.members {
        let place = checkpoint.request.place_in_group(&member.vm).ok_or_else(|| {
            ClusterError::Invalid(format!(
                "VM {} of checkpoint {} is of no group",
                member.vm, checkpoint.info.name
            ))
        })?;
        all.push((place, member));
    }
    all.sort_by_key(|(place, _)| *place);
    Ok(all.into_iter().map(|(_, member)| member).collect())
}
