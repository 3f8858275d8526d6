//! Compact placement: all VMs of a virtual cluster or none, as close together as the free resources allow.

mod devices;
mod error;
mod explain;
mod fit;
mod grant;
mod heuristic;
mod net;
mod packer;
mod request;
mod result;
mod score;
mod search;
mod solve;
mod space;
mod tree;
mod view;

pub use error::PlaceError;
pub use explain::{Explanation, NodeVerdict, Verdict, explain, free_blocks};
pub use request::{
    Affinity, Alternative, AntiAffinity, Closeness, ClusterRequest, Compactness, DeviceFilter, DeviceNeed,
    Domain, Mode, Near, NearTo, NodeCondition, NumaPolicy, Pages, VmGroup,
};
pub use result::{Method, Placement, Score};
pub use score::{obeys, score};
pub use solve::{capacities, place_at};

use crate::model::{Fleet, Occupancy};

/// How hard to try.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// States of the exact search (products of the numbers of VMs of each kind) above which the heuristic takes over.
    pub exact_states: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { exact_states: 1024 }
    }
}

/// Finds a node, devices, cores and memory for every VM of a cluster. Takes nothing: that is the caller's, with
/// [`Occupancy::take`] or a lease.
///
/// # Errors
/// A request that contradicts itself, or that does not fit now or ever; see [`PlaceError`].
pub fn place(
    fleet: &Fleet,
    used: &Occupancy,
    request: &ClusterRequest,
    options: &Options,
) -> Result<Placement, PlaceError> {
    solve::solve(fleet, used, request, options)
}
