//! Leases that get more VMs, or fewer.

use std::collections::BTreeSet;
use std::sync::Arc;

use sched_bridge::model::{Assignment, VmName};
use sched_bridge::moves::{self, PlanError, Resident};
use sched_bridge::place::ClusterRequest;
use tokio::time::Instant;

use super::grant::check_names;
use super::transactions::{guarded, guarded_remote, one_grant_at_a_time, update_lease};
use super::{Attempt, Bridge, BridgeError, View};
use crate::lease::{Held, Lease, LeaseId, Part};
use crate::quota::Quota;

/// More VMs for a lease.
#[derive(Debug, Clone)]
pub struct GrowRequest {
    /// The lease.
    pub id: LeaseId,
    /// The group of its VMs, by number.
    pub group: usize,
    /// How many more.
    pub more: usize,
    /// What its holder may have leased at once.
    pub quota: Option<Quota>,
}

impl Bridge {
    /// Leases further VMs of a group, placed close to the others, which stay where they are: all of them or none.
    ///
    /// # Errors
    /// They do not fit, the lease was granted without a request, or the store does not answer.
    pub async fn grow(&self, wanted: &GrowRequest) -> Result<Vec<Assignment>, BridgeError> {
        let start = Instant::now();
        loop {
            let view = self.view_since(start).await?;
            let entry = view.lease(&wanted.id)?;
            let (lease, revision) = (Arc::clone(&entry.lease), entry.revision);
            let (searched, order) = (Arc::clone(&view), wanted.clone());
            let search = move || placed(&searched, &lease, &order);
            let found = tokio::task::spawn_blocking(search).await.map_err(|error| {
                BridgeError::Invalid(format!("the placement failed ({error}): please report this request"))
            })?;
            let (mut lease, added) = match found {
                Ok(found) => found,
                Err(_) if self.catch_up(&view, start).await? => continue,
                Err(error) => return Err(error),
            };
            if let Some(quota) = &wanted.quota {
                quota.check(view.all_leases(), &lease.holder, &added)?;
            }
            lease.count(&self.clock.stamp());
            lease.beats += 1;
            let held = |assignment: &Assignment| Held {
                assignment: assignment.clone(),
                part: Part::Home,
                seen: false,
                growing: true,
            };
            lease.held.extend(added.iter().map(held));
            let nodes: BTreeSet<_> = added.iter().map(|one| &one.node).collect();
            let txn = update_lease(&lease, revision);
            let mut txn = nodes.into_iter().fold(txn, |txn, node| guarded(txn, &view, node));
            txn = guarded_remote(txn, &view, &added);
            if wanted.quota.is_some() {
                txn = one_grant_at_a_time(txn, &view, &lease.holder);
            }
            if self.commit(txn, &view, start).await? {
                return Ok(added);
            }
        }
    }

    /// Gives back what a lease has for VMs that do not run any more. Those that it does not have are passed over.
    ///
    /// # Errors
    /// There is no such lease, a VM of it is being moved, or the store does not answer.
    pub async fn give_back(&self, id: &LeaseId, vms: &[VmName]) -> Result<(), BridgeError> {
        self.change(|view| {
            let entry = view.lease(id)?;
            let mut lease = Lease::clone(&entry.lease);
            let leaves = |held: &Held| vms.contains(&held.assignment.vm);
            if let Some(held) = lease.held.iter().find(|held| leaves(held) && held.part == Part::Incoming) {
                return Err(BridgeError::moving(held));
            }
            lease.count(&self.clock.stamp());
            lease.beats += 1;
            lease.held.retain(|held| !leaves(held));
            Ok(Attempt::Commit(update_lease(&lease, entry.revision), ()))
        })
        .await
    }
}

/// The lease with a request for more VMs, and where they are placed.
fn placed(view: &View, lease: &Lease, wanted: &GrowRequest) -> Result<(Lease, Vec<Assignment>), BridgeError> {
    let resident = resident(lease)?;
    let mut lease = lease.clone();
    let names = next_names(&lease, wanted.group, wanted.more)?;
    if let Some(request) = &mut lease.request {
        request.groups[wanted.group].count = count_with(request, wanted.group, &names);
    }
    check_names(view, names.iter())?;
    let found = moves::grow(view.fleet(), &view.occupancy(), &resident, wanted.group, &names);
    match found {
        Ok(added) => Ok((lease, added)),
        Err(PlanError::Place(error)) => Err(error.into()),
        Err(error) => Err(BridgeError::NoPlan(error.to_string())),
    }
}

/// A lease as the library knows clusters: a request for the VMs that there are, and where they are.
///
/// # Errors
/// It was granted without a request.
pub(crate) fn resident(lease: &Lease) -> Result<Resident, BridgeError> {
    let request = lease.request.as_ref().ok_or_else(|| {
        BridgeError::Invalid(format!(
            "lease {} was granted for resources that its holder chose, without a request: its cluster cannot be resized, forked or kept",
            lease.id
        ))
    })?;
    let names = request.vm_names()?;
    let mut request = request.clone();
    let mut assignments = Vec::new();
    for (at, group) in request.groups.iter_mut().enumerate() {
        let before = assignments.len();
        let of_group = names.iter().filter(|(_, group)| *group == at).map(|(name, _)| name);
        assignments.extend(of_group.filter_map(|vm| lease.home(vm)).map(|held| held.assignment.clone()));
        group.count = u32::try_from(assignments.len() - before).unwrap_or(u32::MAX);
    }
    Ok(Resident { request, assignments, pinned: Vec::new() })
}

/// Names for further VMs of a group: the lowest numbers that no VM of the lease has.
fn next_names(lease: &Lease, group: usize, more: usize) -> Result<Vec<VmName>, BridgeError> {
    let Some(mut request) = lease.request.clone() else { return Ok(Vec::new()) };
    let known = request.groups.get_mut(group);
    let known = known.ok_or_else(|| BridgeError::Invalid(format!("there is no group {group}")))?;
    known.count = known.count.saturating_add(u32::try_from(more).unwrap_or(u32::MAX));
    request.check()?;
    let names = request.vm_names()?.into_iter();
    let free = names.filter(|(name, at)| *at == group && lease.home(name).is_none());
    Ok(free.map(|(name, _)| name).take(more).collect())
}

/// The count of a group whose names include these.
fn count_with(request: &ClusterRequest, group: usize, names: &[VmName]) -> u32 {
    let numbers = names.iter().filter_map(|name| request.place_in_group(name)).map(|(_, number)| number + 1);
    numbers.max().unwrap_or(0).max(request.groups[group].count)
}
