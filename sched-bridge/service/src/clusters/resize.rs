//! Clusters that get more VMs, or fewer.

use std::sync::Arc;

use sched_bridge::model::VmName;
use sched_bridge::moves::{self, Resident};
use vmove_bridge_types::cluster::{ClusterHops, ResizeRequest, Resized};
use vmove_bridge_types::requests::{StartAll, StartVm, StartedVm};

use super::{ClusterError, Clusters, hops};
use crate::bridge::{GrowRequest, resident};
use crate::lease::{Lease, LeaseId};
use crate::quota::Quota;
use crate::vms::{self, StartError};

/// Gives a group of a cluster as many VMs as are asked for. New ones are placed close to the others and started: all of them, or none. Those
/// that are farthest from the others leave first. VMs that an earlier request has placed, and of whose start no node has answered, are started first: so
/// that request can be made again.
///
/// # Errors
/// There is no such group, no room, or VMs do not start or stop.
pub async fn resize(
    clusters: &Clusters,
    id: &LeaseId,
    request: &ResizeRequest,
    start: Option<StartAll>,
    quota: Option<Quota>,
) -> Result<Resized, ClusterError> {
    let lease = Arc::clone(&clusters.bridge.view()?.lease(id)?.lease);
    let resident = resident(&lease)?;
    let group = group_of(&lease, &resident, request)?;
    let before = clusters.hops_of(&lease)?;
    let now = resident.request.groups[group].count;
    let (mut added, mut removed) = (Vec::new(), Vec::new());
    if request.count >= now {
        let completed = clusters.complete(&lease, start.as_ref()).await;
        added = completed.map_err(|error| with_the_way_out(error, id, request.count))?;
    }
    if request.count > now {
        let more = (request.count - now) as usize;
        let order = GrowRequest { id: id.clone(), group, more, quota };
        let grown = clusters.grow(&lease, &order, start).await;
        added.extend(grown.map_err(|error| with_the_way_out(error, id, request.count))?);
    } else {
        removed = clusters.shrink(&lease, &resident, group, (now - request.count) as usize).await?;
    }
    let lease = Arc::clone(&clusters.bridge.view()?.lease(id)?.lease);
    let after = clusters.hops_of(&lease)?;
    Ok(Resized { lease: clusters.bridge.info(&lease), added, removed, before, after })
}

/// VMs that may run keep their places, and the same request goes on with them.
fn with_the_way_out(error: ClusterError, id: &LeaseId, count: u32) -> ClusterError {
    match error {
        ClusterError::Start(StartError::StillRunning { reasons, failed }) => StartError::StillRunning {
            failed,
            reasons: format!(
                "{reasons}; `vmove cluster resize {id} {count}` goes on with them when their nodes answer again"
            ),
        }
        .into(),
        other => other,
    }
}

fn group_of(lease: &Lease, resident: &Resident, request: &ResizeRequest) -> Result<usize, ClusterError> {
    let names: Vec<&str> = resident.request.groups.iter().map(|group| group.name.as_str()).collect();
    if request.count == 0 {
        return Err(ClusterError::Invalid(format!(
            "expected 1 VM or more, found 0: `vmove cluster stop {}` ends the cluster",
            lease.id
        )));
    }
    let found = match (&request.group, names.as_slice()) {
        (None, [_]) => Some(0),
        (Some(wanted), _) => names.iter().position(|name| name == wanted),
        (None, _) => None,
    };
    found.ok_or_else(|| {
        let found = request.group.as_deref().unwrap_or("none");
        let names = names.join(", ");
        ClusterError::Invalid(format!("expected a group of {} ({names}), found {found}", lease.id))
    })
}

impl Clusters {
    fn hops_of(&self, lease: &Lease) -> Result<ClusterHops, ClusterError> {
        Ok(hops(self.bridge.view()?.fleet(), lease))
    }

    /// Starts the VMs of an earlier growth of which no node has said that they run.
    async fn complete(
        &self,
        lease: &Lease,
        start: Option<&StartAll>,
    ) -> Result<Vec<StartedVm>, ClusterError> {
        let growing: Vec<VmName> =
            lease.at_home().filter(|held| held.growing).map(|held| held.assignment.vm.clone()).collect();
        let Some(start) = start.or(lease.start.as_ref()).filter(|_| !growing.is_empty()) else {
            return Ok(Vec::new());
        };
        let wanted: Vec<StartVm> = growing.into_iter().map(|vm| start.of(vm)).collect();
        Ok(vms::start(&self.bridge, &self.driver, &lease.id, &wanted).await?)
    }

    async fn grow(
        &self,
        lease: &Lease,
        order: &GrowRequest,
        start: Option<StartAll>,
    ) -> Result<Vec<StartedVm>, ClusterError> {
        let start = start.or_else(|| lease.start.clone()).ok_or_else(|| {
            ClusterError::Invalid(format!(
                "it is not known how further VMs of {} are started, since it was not started as a whole: give a template, or QEMU's command \
                 line behind --",
                lease.id
            ))
        })?;
        let added = self.bridge.grow(order).await?;
        let wanted: Vec<StartVm> = added.iter().map(|one| start.of(one.vm.clone())).collect();
        let error = match vms::start(&self.bridge, &self.driver, &order.id, &wanted).await {
            Ok(started) => return Ok(started),
            Err(error) => error,
        };
        // What may still run keeps its place.
        if !matches!(error, StartError::StillRunning { .. }) {
            let names: Vec<VmName> = added.into_iter().map(|one| one.vm).collect();
            self.bridge.give_back(&order.id, &names).await?;
        }
        Err(error.into())
    }

    async fn shrink(
        &self,
        lease: &Lease,
        resident: &Resident,
        group: usize,
        count: usize,
    ) -> Result<Vec<VmName>, ClusterError> {
        if count == 0 {
            return Ok(Vec::new());
        }
        super::homes(lease)?;
        let leave = moves::shrink(self.bridge.view()?.fleet(), resident, group, count);
        vms::stop(&self.bridge, &self.driver, &lease.id, &leave).await?;
        self.bridge.give_back(&lease.id, &leave).await?;
        Ok(leave)
    }
}
