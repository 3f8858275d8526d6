//! Compact placement: all VMs of a virtual cluster or none, as close together as the free resources allow.

mod error;
mod request;
mod result;

pub use error::PlaceError;
pub use request::{
    Affinity, Alternative, AntiAffinity, Closeness, ClusterRequest, Compactness, DeviceFilter, DeviceNeed,
    Domain, Mode, Near, NearTo, NodeCondition, NumaPolicy, Pages, VmGroup,
};
pub use result::{Method, Placement, Score};

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
    let _ = (fleet, used, options);
    request.check()?;
    Err(PlaceError::NoRoom { vms: request.count(), fit: 0, reason: "not written yet".to_owned() })
}
