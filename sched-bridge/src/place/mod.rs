//! Compact placement: all VMs of a virtual cluster or none, as close together as the free resources allow.
//!
//! ```
//! use sched_bridge::model::{ClusterName, Fleet, MemoryMib, Node, NodeName, Occupancy};
//! use sched_bridge::place::{Alternative, ClusterRequest, Options, PlaceError, VmGroup, place};
//! use sched_bridge::topology::Topology;
//!
//! let fleet = Fleet::new(vec![Node::plain(NodeName::new("n1")?, 8, MemoryMib(16384))], Topology::default())?;
//! let needs = Alternative { vcpus: 4, memory: MemoryMib(4096), ..Alternative::default() };
//! let group = VmGroup { name: "vm".to_owned(), count: 2, alternatives: vec![needs] };
//! let mut request = ClusterRequest::new(ClusterName::new("small")?, vec![group]);
//! let used = Occupancy::new(&fleet);
//! assert_eq!(place(&fleet, &used, &request, &Options::default())?.score.max_hops, 0);
//! request.groups[0].count = 3;
//! let refused = place(&fleet, &used, &request, &Options::default());
//! assert!(matches!(refused, Err(PlaceError::NoRoom { vms: 3, fit: 2, .. })));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod devices;
mod error;
mod explain;
mod fit;
mod grant;
mod heuristic;
mod nearest;
mod net;
mod packer;
mod placement;
mod pool;
mod reasons;
mod remote;
mod request;
mod score;
mod search;
mod solve;
mod space;
mod task;
mod tree;
mod view;
mod wanted;

pub use error::PlaceError;
pub use explain::{Explanation, NodeVerdict, Verdict, explain};
pub use nearest::{Change, Fit, Nearest, nearest};
pub use placement::{Method, Placement, Score};
pub use request::{
    Affinity, Alternative, AntiAffinity, ClusterRequest, Compactness, DeviceFilter, DeviceNeed, Domain, Mode,
    Near, NearTo, NodeCondition, NumaPolicy, Pages, VmGroup,
};
pub use score::{obeys, score};
pub use solve::{capacities, place_at};

use crate::model::{Fleet, Occupancy};

/// Options of the search.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// States of the exact search (the product of the numbers of VMs, each plus one, over all groups) above which the heuristic is used.
    pub exact_states: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { exact_states: 1024 }
    }
}

/// Finds a node, devices, cores and memory for every VM of a cluster. Nothing is taken: that is up to the caller, by
/// [`Occupancy::take`] or a lease.
///
/// # Errors
/// A request that contradicts itself, or that does not fit; see [`PlaceError`].
pub fn place(
    fleet: &Fleet,
    used: &Occupancy,
    request: &ClusterRequest,
    options: &Options,
) -> Result<Placement, PlaceError> {
    solve::solve(fleet, used, request, options)
}
