//! What types of the library look like in JSON, for OpenAPI. They are described here and nowhere else, so that the library needs no
//! crate for descriptions; a test holds them against what it writes.

#![allow(dead_code, reason = "described, never made")]

use serde::Serialize;
use utoipa::ToSchema;

use crate::lease::Part;

/// A device given to a VM.
#[derive(Debug, Serialize, ToSchema)]
pub struct Granted {
    /// PCI address: `DDDD:BB:DD.F`.
    pub address: String,
    /// `gpu`, `hca` or `vf`.
    pub kind: String,
}

/// Huge pages by size.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct HugePages {
    /// Pages of 2 MiB.
    pub pages_2m: u64,
    /// Pages of 1 GiB.
    pub pages_1g: u64,
}

/// What a VM has of one NUMA node.
#[derive(Debug, Serialize, ToSchema)]
pub struct NumaShare {
    /// The NUMA node.
    pub numa: u16,
    /// Hardware threads.
    pub cores: u32,
    /// Memory outside huge pages. Unit: MiB.
    pub memory: u64,
    /// Huge pages.
    #[serde(default)]
    pub huge: HugePages,
}

/// What one VM has, and where.
#[derive(Debug, Serialize, ToSchema)]
pub struct Assignment {
    /// The VM.
    pub vm: String,
    /// Its node.
    pub node: String,
    /// Devices.
    #[serde(default)]
    pub devices: Vec<Granted>,
    /// Cores, memory and huge pages, by NUMA node.
    #[serde(default)]
    pub shares: Vec<NumaShare>,
}

/// What one VM has on one node, under a lease.
#[derive(Debug, Serialize, ToSchema)]
pub struct Held {
    /// The VM.
    pub vm: String,
    /// The node.
    pub node: String,
    /// Devices.
    pub devices: Vec<Granted>,
    /// Cores, memory and huge pages, by NUMA node.
    pub shares: Vec<NumaShare>,
    /// Why it is held.
    pub part: Part,
    /// The VM was seen running.
    pub seen: bool,
}

/// How good a placement is: smaller is better, and what comes first matters most.
#[derive(Debug, Serialize, ToSchema)]
pub struct Score {
    /// Most switches between two VMs.
    pub max_hops: u32,
    /// Switches between two VMs, summed over all pairs.
    pub sum_hops: u64,
    /// Leaf switches in use.
    pub leaf_switches: u32,
    /// Switches between VMs and what the cluster is to be near to.
    pub near_hops: u64,
    /// Big free blocks that are lost.
    pub fragmentation: u64,
    /// Distance of GPUs from adapters.
    pub device_distance: u64,
}

/// Where a cluster goes.
#[derive(Debug, Serialize, ToSchema)]
pub struct Placement {
    /// The cluster.
    pub cluster: String,
    /// One for each VM.
    pub assignments: Vec<Assignment>,
    /// How good it is.
    pub score: Score,
    /// `exact` or `heuristic`.
    pub method: String,
}
