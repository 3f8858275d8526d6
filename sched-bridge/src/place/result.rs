//! What a placement is, and how good.

use serde::{Deserialize, Serialize};

use crate::model::{Assignment, ClusterName};

/// How a placement was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Method {
    /// No placement has a better score.
    Exact,
    /// There may be a better one.
    Heuristic,
}

/// How good a placement is: smaller is better, and what comes first matters most.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Score {
    /// Most switches between two VMs.
    pub max_hops: u32,
    /// Switches between two VMs, summed over all pairs.
    pub sum_hops: u64,
    /// Leaf switches in use.
    pub leaf_switches: u32,
    /// Switches between each VM and what the cluster is to be near to, summed; 0 if there is nothing.
    pub near_hops: u64,
    /// Big free blocks that are lost: the sum over all nodes and switches of the squares of free GPUs (cores, if no GPU is asked
    /// for), of the cubes for leaf switches, before less after. Of several alternatives of a VM the one that takes least is counted.
    pub fragmentation: u64,
    /// Distance of each GPU from the nearest adapter of its VM (0 same PCIe root, 1 same NUMA node, 2 further), summed, and one
    /// for each NUMA node more than one that the devices of a VM are on.
    pub device_distance: u64,
}

/// Where a cluster goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The cluster.
    pub cluster: ClusterName,
    /// One for each VM, in the order of [`super::ClusterRequest::vm_names`].
    pub assignments: Vec<Assignment>,
    /// How good it is.
    pub score: Score,
    /// How it was found.
    pub method: Method,
}
