//! Virtual clusters as a whole: what their VMs do, and what is done with all of them: they grow and shrink, are forked, kept at one moment, and run
//! again from there.

mod barrier;
mod checkpoint;
mod fork;
mod resize;
mod restore;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use sched_bridge::model::{Fleet, NodeName, VmName};
use vmove_bridge_types::cluster::{ClusterHops, ClusterInfo, ClusterSummary, ClusterVm, VmState};

pub use checkpoint::{make as make_checkpoint, remove as remove_checkpoint};
pub use fork::fork;
pub use resize::resize;
pub use restore::restore;

use crate::bridge::{Bridge, BridgeError, View};
use crate::driver::VmDriver;
use crate::lease::{Lease, Part};
use crate::vms::{StartError, list_all};

/// What works on clusters.
#[derive(Debug, Clone)]
pub struct Clusters {
    /// The bridge.
    pub bridge: Arc<Bridge>,
    /// Controls the VMs.
    pub driver: Arc<dyn VmDriver>,
}

/// Why something was not done with a cluster. It is as it was before then, unless the message says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// The store does not answer, there is no such lease, or no room.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// VMs do not start or stop.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The request contradicts the cluster.
    #[error("{0}")]
    Invalid(String),
    /// A node refused, or does not answer.
    #[error("{0}")]
    Node(String),
    /// VMs that would be there twice.
    #[error("{0}")]
    StillRuns(String),
}

impl Clusters {
    /// A cluster and its VMs, as their nodes say now.
    pub async fn info(&self, view: &View, lease: &Lease) -> ClusterInfo {
        let listed = list_all(&self.driver, lease.nodes()).await;
        let member = |held: &crate::lease::Held| {
            let home = &held.assignment;
            let (state, why) = match listed.get(&home.node) {
                Some(Ok(vms)) => match vms.get(home.vm.as_str()) {
                    Some(vm) if vm.migrating => (VmState::Moving, None),
                    Some(vm) if !vm.ended => (VmState::Running, None),
                    _ => (VmState::Absent, None),
                },
                Some(Err(why)) => (VmState::Unknown, Some(why.clone())),
                None => (VmState::Unknown, None),
            };
            let devices = home.devices.iter().map(|device| device.address.to_string()).collect();
            ClusterVm { vm: home.vm.clone(), node: home.node.clone(), state, devices, why }
        };
        let mut members: Vec<ClusterVm> = lease.at_home().map(member).collect();
        members.sort_by_key(|one| natural(&one.vm));
        let running =
            members.iter().filter(|vm| matches!(vm.state, VmState::Running | VmState::Moving)).count();
        let checkpoints = view.checkpoints().iter().filter(|(_, (known, _))| known.info.id == lease.id);
        ClusterInfo {
            summary: ClusterSummary { running, ..self.summary(view, lease) },
            members,
            can_grow: lease.start.is_some() && lease.request.is_some(),
            checkpoints: checkpoints.map(|(name, _)| name.to_string()).collect(),
        }
    }

    /// A cluster in a line, as the store knows it.
    #[must_use]
    pub fn summary(&self, view: &View, lease: &Lease) -> ClusterSummary {
        let homes = lease.at_home();
        ClusterSummary {
            id: lease.id.clone(),
            cluster: lease.cluster.clone(),
            holder: lease.holder.clone(),
            vms: homes.clone().count(),
            running: homes.filter(|held| held.seen).count(),
            nodes: lease.nodes(),
            hops: hops(view.fleet(), lease),
            ends_in_ms: self.bridge.info(lease).ends_in_ms,
        }
    }
}

/// Hops between the VMs of a lease.
fn hops(fleet: &Fleet, lease: &Lease) -> ClusterHops {
    // Counted by node: there are fewer of them than VMs.
    let mut counts: BTreeMap<&NodeName, u64> = BTreeMap::new();
    for held in lease.at_home() {
        *counts.entry(&held.assignment.node).or_default() += 1;
    }
    let all: Vec<(&NodeName, u64)> = counts.into_iter().collect();
    let mut found = ClusterHops { most: Some(0), sum: 0 };
    for (at, (a, first)) in all.iter().enumerate() {
        for (b, second) in &all[at + 1..] {
            let both = fleet.find(a.as_str()).zip(fleet.find(b.as_str()));
            match both.and_then(|(a, b)| fleet.hops(a, b)) {
                Some(hops) => {
                    found.sum += u64::from(hops) * first * second;
                    found.most = found.most.map(|most| most.max(hops));
                }
                None => found.most = None,
            }
        }
    }
    found
}

/// Sorts `vm-2` before `vm-10`.
fn natural(vm: &VmName) -> (String, u64) {
    let text = vm.as_str();
    let digits = text.len() - text.bytes().rev().take_while(u8::is_ascii_digit).count();
    (text[..digits].to_owned(), text[digits..].parse().unwrap_or(0))
}

/// The VMs of a lease with their nodes, in the order of the request. All must be at home: none may be on its way.
fn homes(lease: &Lease) -> Result<Vec<(VmName, NodeName)>, ClusterError> {
    match lease.held.iter().find(|held| held.part == Part::Incoming) {
        Some(held) => Err(BridgeError::moving(held).into()),
        None => Ok(lease.places()),
    }
}

/// What was done for some VMs, and why not for others.
fn done_and_failed<T>(results: Vec<Result<T, String>>) -> (Vec<T>, Vec<String>) {
    let (mut done, mut failed) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(one) => done.push(one),
            Err(why) => failed.push(why),
        }
    }
    (done, failed)
}

/// Several errors in one text.
fn joined(errors: &[String]) -> Result<(), ClusterError> {
    if errors.is_empty() { Ok(()) } else { Err(ClusterError::Node(errors.join("; "))) }
}
