//! Plans of migrations: empty a node, bring clusters closer together, make room for a request.
//!
//! A plan is a list of steps. Each step's destination is free when its turn comes, if all steps before it are done; where VMs wait
//! for each other's places, one of them goes to a spare place first.

mod order;
mod plans;

pub use plans::{compact, evacuate, make_room};

use serde::{Deserialize, Serialize};

use crate::model::{Assignment, ClusterName, Fleet, MemoryMib, NodeName, Occupancy, OccupancyError, VmName};
use crate::place::{ClusterRequest, PlaceError};

/// A cluster that is there: what it asked for, and where its VMs are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resident {
    /// What it asked for.
    pub request: ClusterRequest,
    /// Its VMs, in the order of [`ClusterRequest::vm_names`].
    pub assignments: Vec<Assignment>,
    /// VMs that cannot move now (a device that cannot be detached, a migration at work).
    #[serde(default)]
    pub pinned: Vec<VmName>,
}

/// One migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Place in the plan, from 0.
    pub id: usize,
    /// The cluster.
    pub cluster: ClusterName,
    /// Where the VM is, and what it has there.
    pub from: Assignment,
    /// Where it goes, and what it gets there.
    pub to: Assignment,
    /// Memory to be moved.
    pub memory: MemoryMib,
    /// Steps that must be done before: those that free what this one takes. Steps that do not wait for each other may run at once.
    pub after: Vec<usize>,
    /// A place to wait in, because VMs wait for each other's places; a later step takes the VM on.
    pub spare: bool,
}

/// Hops of clusters, summed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hops {
    /// Before the plan.
    pub before: u64,
    /// After it.
    pub after: u64,
}

/// Migrations, in an order in which they can be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The migrations.
    pub steps: Vec<Step>,
    /// Memory of all of them; none if there is nothing to move.
    pub memory: MemoryMib,
    /// Sum of hops of the clusters that move.
    pub hops: Hops,
    /// What could not be done, in words.
    pub notes: Vec<String>,
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The node or cluster is not there.
    #[error("there is no {what} {name}; expected one of those that are there")]
    Unknown {
        /// Node or cluster.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// What is said to be there contradicts itself.
    #[error("the VMs that are there cannot be where they are said to be")]
    Occupancy(#[from] OccupancyError),
    /// A VM that has to move has nowhere to go.
    #[error("VM {vm} cannot leave node {node}: {reason}")]
    Stuck {
        /// The VM.
        vm: VmName,
        /// Where it is.
        node: NodeName,
        /// Why.
        reason: String,
    },
    /// The request does not fit, even if others move.
    #[error("no moves make room for cluster {cluster}: {reason}")]
    NoRoom {
        /// The cluster.
        cluster: ClusterName,
        /// What was tried.
        reason: String,
    },
    /// VMs wait for each other's places, and nothing is free for one of them to wait in.
    #[error(
        "{vms} VMs wait for each other's places, and there is no spare place for any of them; free one, or move fewer"
    )]
    Deadlock {
        /// How many.
        vms: usize,
    },
    /// A request that contradicts itself.
    #[error(transparent)]
    Place(#[from] PlaceError),
}

/// What is taken by all clusters that are there.
///
/// # Errors
/// Two that have the same.
pub fn occupancy(fleet: &Fleet, residents: &[Resident]) -> Result<Occupancy, PlanError> {
    let all = residents.iter().flat_map(|resident| &resident.assignments);
    Ok(Occupancy::with(fleet, all)?)
}
