//! Checkpoints of clusters, as they are kept in the store.

use std::collections::BTreeSet;

use sched_bridge::model::NodeName;
use sched_bridge::place::ClusterRequest;
use serde::{Deserialize, Serialize};
use vmove_bridge_types::cluster::CheckpointInfo;
use vmove_bridge_types::requests::StartAll;

use crate::lease::Lease;

/// A checkpoint, as it is kept in the store: what is told of it, and what its cluster needs to run again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// What is told of it.
    #[serde(flatten)]
    pub info: CheckpointInfo,
    /// The project on whose account the cluster went.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// What the cluster was placed by.
    pub request: ClusterRequest,
    /// How its VMs were started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartAll>,
    /// Its VMs move at one barrier.
    #[serde(default)]
    pub together: bool,
    /// Time to live of its lease without a heartbeat. Unit: milliseconds.
    pub ttl_ms: u64,
    /// Nodes that were lost since it was made: no VM that it has ran on there.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub lost: BTreeSet<NodeName>,
}

impl Checkpoint {
    /// What a cluster needs to run again, beside `info`.
    #[must_use]
    pub fn of(lease: &Lease, request: ClusterRequest, info: CheckpointInfo) -> Self {
        Self {
            info,
            project: lease.project.clone(),
            request,
            start: lease.start.clone(),
            together: lease.together,
            ttl_ms: lease.ttl_ms,
            lost: BTreeSet::new(),
        }
    }
}
