//! A cluster kept as it is at one moment: a template of each VM, all frozen behind one barrier.

use std::sync::Arc;
use std::time::Instant;

use sched_bridge::model::{NodeName, NodeState, VmName};
use tokio::task::JoinSet;
use vmove_bridge_types::cluster::{CheckpointInfo, CheckpointRequest, CheckpointVm};

use super::barrier::stood_still;
use super::{ClusterError, Clusters, done_and_failed, homes, joined};
use crate::bridge::{BridgeError, resident};
use crate::checkpoint::Checkpoint;
use crate::lease::LeaseId;

/// Longest name of a template.
const LONGEST_NAME: usize = 64;
/// Other nodes that are asked to remove a template.
const MOST_ASKED: usize = 3;

/// Keeps all VMs of a cluster as they are now: all of them or none.
///
/// # Errors
/// A VM does not run, or cannot be kept; then no template is left, and the cluster runs on.
pub async fn make(
    clusters: &Clusters,
    id: &LeaseId,
    request: &CheckpointRequest,
) -> Result<CheckpointInfo, ClusterError> {
    let view = clusters.bridge.view()?;
    if view.checkpoints().contains_key(&request.name) {
        return Err(BridgeError::CheckpointExists(request.name.clone()).into());
    }
    let lease = Arc::clone(&view.lease(id)?.lease);
    let vms = homes(&lease)?;
    let shape = resident(&lease)?.request;
    if let Some((vm, _)) = vms.iter().find(|(vm, _)| template(&request.name, vm).len() > LONGEST_NAME) {
        return Err(ClusterError::Invalid(format!(
            "{} is longer than {LONGEST_NAME} bytes, and would be the name of a template: choose a shorter name",
            template(&request.name, vm)
        )));
    }
    clusters.may_be_frozen(&lease, request.each_alone, &vms).await?;
    let (members, errors) = clusters.save_all(&request.name, &vms, request.each_alone).await?;
    let mut info = CheckpointInfo {
        name: request.name.clone(),
        id: lease.id.clone(),
        cluster: lease.cluster.clone(),
        holder: lease.holder.clone(),
        made_wall_ms: clusters.bridge.clock().stamp().wall_ms,
        at_barrier: !request.each_alone,
        members,
        notes: Vec::new(),
    };
    let kept = match joined(&errors) {
        Ok(()) => {
            info.notes = clusters.only_there(&info.members).await;
            let checkpoint = Checkpoint::of(&lease, shape, info.clone());
            clusters.bridge.put_checkpoint(&checkpoint).await.map_err(ClusterError::from)
        }
        Err(error) => Err(error),
    };
    match kept {
        Ok(()) => Ok(info),
        Err(error) => {
            clusters.remove_templates(&info.members).await;
            Err(error)
        }
    }
}

/// Deletes a checkpoint and its templates. Nodes that do not answer keep theirs.
///
/// # Errors
/// There is no such checkpoint, or the store does not answer.
pub async fn remove(clusters: &Clusters, name: &LeaseId) -> Result<(), ClusterError> {
    let checkpoint = clusters.bridge.checkpoint(name)?;
    clusters.bridge.remove_checkpoint(name).await?;
    clusters.remove_templates(&checkpoint.info.members).await;
    Ok(())
}

fn template(checkpoint: &LeaseId, vm: &VmName) -> String {
    format!("{checkpoint}.{vm}")
}

impl Clusters {
    /// Those that were kept, and why others were not.
    async fn save_all(
        &self,
        name: &LeaseId,
        vms: &[(VmName, NodeName)],
        each_alone: bool,
    ) -> Result<(Vec<CheckpointVm>, Vec<String>), ClusterError> {
        let barrier = if each_alone { None } else { Some(Arc::new(self.raise_barrier(vms).await?)) };
        let mut work = JoinSet::new();
        for (vm, node) in vms.iter().cloned() {
            let (driver, barrier, template) =
                (Arc::clone(&self.driver), barrier.clone(), template(name, &vm));
            work.spawn(async move {
                let asked = Instant::now();
                let saved = driver.save(&node, &vm, &template).await;
                let saved = saved.map_err(|why| format!("VM {vm} on node {node} is not kept: {why}"))?;
                let stood_still = stood_still(barrier.as_deref(), asked, saved.ran_on, saved.stood_still);
                let stood_still_ms = stood_still.as_secs_f64() * 1000.0;
                let (disk_bytes, roles) = (saved.disk_bytes, saved.roles);
                Ok(CheckpointVm { vm, node, template, disk_bytes, roles, stood_still_ms })
            });
        }
        let (mut members, errors) = done_and_failed(work.join_all().await);
        if let (false, Some(barrier)) = (errors.is_empty(), barrier.and_then(Arc::into_inner)) {
            barrier.lift().await;
        }
        members.sort_by_key(|one: &CheckpointVm| super::natural(&one.vm));
        Ok((members, errors))
    }

    /// What is said of templates that only their own node has.
    async fn only_there(&self, members: &[CheckpointVm]) -> Vec<String> {
        let up = self.nodes_up();
        let mut notes = Vec::new();
        let mut told: Vec<&NodeName> = Vec::new();
        for member in members.iter().filter(|member| member.disk_bytes > 0) {
            if told.contains(&&member.node) {
                continue;
            }
            told.push(&member.node);
            let Some(other) = up.iter().find(|name| **name != member.node) else { continue };
            match self.driver.templates(other).await {
                Ok(seen) if seen.contains(&member.template) => {}
                Ok(_) => notes.push(format!(
                    "node {other} does not see the templates of node {}: if that node is lost, they are, too. Set template-dir in [fork] of the \
                     nodes to a folder that all of them see",
                    member.node
                )),
                Err(why) => notes.push(format!("whether other nodes see the templates of node {} is not known: {why}", member.node)),
            }
        }
        notes
    }

    /// The nodes that take VMs; none, if the store does not answer.
    fn nodes_up(&self) -> Vec<NodeName> {
        let Ok(view) = self.bridge.view() else { return Vec::new() };
        let up = view.fleet().nodes().iter().filter(|node| node.state == NodeState::Up);
        up.map(|node| node.name.clone()).collect()
    }

    async fn remove_templates(&self, members: &[CheckpointVm]) {
        let up = self.nodes_up();
        for member in members {
            let Err(why) = self.driver.remove_template(&member.node, &member.template).await else {
                continue;
            };
            // Its node is lost, perhaps. Where it lies in a folder that all nodes share, any of them removes it.
            for node in up.iter().filter(|node| **node != member.node).take(MOST_ASKED) {
                if self.driver.remove_template(node, &member.template).await.is_ok() {
                    break;
                }
            }
            tracing::warn!(template = member.template, node = %member.node, why, "a node does not remove its template: others were asked");
        }
    }
}
