//! A placement and its score.

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

/// How good a placement is: smaller is better, and earlier fields matter more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Score {
    /// Most hops between two VMs.
    pub max_hops: u32,
    /// Hops between two VMs, summed over all pairs.
    pub sum_hops: u64,
    /// Leaf switches in use.
    pub leaf_switches: u32,
    /// Hops between each VM and what the cluster is to be near, summed; 0 without such.
    pub near_hops: u64,
    /// Loss of large free blocks: the sum over all nodes and switches of the squares of the free GPUs below them (cores, if the request
    /// has no GPUs), cubes for leaf switches, before the placement minus after it. Of several alternatives of a VM, the one that takes
    /// least is counted.
    pub fragmentation: u64,
    /// Distance of each GPU from the nearest adapter of its VM (0 same PCIe root, 1 same NUMA node, 2 else), summed; and 1 for each
    /// further NUMA node that the devices of a VM are on.
    pub device_distance: u64,
}

/// Where a cluster goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Placement {
    /// The cluster.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub cluster: ClusterName,
    /// One for each VM, in the order of [`super::ClusterRequest::vm_names`].
    pub assignments: Vec<Assignment>,
    /// Its score.
    pub score: Score,
    /// How it was found: `exact` or `heuristic`.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub method: Method,
}
