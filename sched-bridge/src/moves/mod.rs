//! Plans of migrations: empty a node, bring clusters closer together or elsewhere, make room for a request. Clusters that grow and shrink.
//!
//! A plan is a list of steps. The destination of a step is free when all steps before it are done. Where VMs wait for each other's
//! places, one of them goes to a spare place first.
//!
//! ```
//! use sched_bridge::model::{ClusterName, Fleet, MemoryMib, Node, NodeName, Occupancy};
//! use sched_bridge::moves::{Resident, evacuate};
//! use sched_bridge::place::{Alternative, ClusterRequest, Options, VmGroup, place};
//! use sched_bridge::topology::{Format, import};
//!
//! let topology = import("SwitchName=leaf Nodes=n[1-2]\n", Format::SlurmConf, &[])?.topology;
//! let node = |name| NodeName::new(name).map(|name| Node::plain(name, 8, MemoryMib(16384)));
//! let fleet = Fleet::new(vec![node("n1")?, node("n2")?], topology)?;
//! let needs = Alternative { vcpus: 4, memory: MemoryMib(4096), ..Alternative::default() };
//! let group = VmGroup { name: "vm".to_owned(), count: 2, alternatives: vec![needs] };
//! let request = ClusterRequest::new(ClusterName::new("small")?, vec![group]);
//! let assignments = place(&fleet, &Occupancy::new(&fleet), &request, &Options::default())?.assignments;
//!
//! let from = assignments[0].node.clone();
//! let plan = evacuate(&fleet, &[Resident { request, assignments, pinned: Vec::new() }], &from)?;
//! assert_eq!((plan.steps.len(), plan.memory), (2, MemoryMib(8192)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod changes;
mod compact;
mod evacuate;
mod make_room;
mod relocate;
mod resize;
mod sequence;

pub use compact::compact;
pub use evacuate::evacuate;
pub use make_room::make_room;
pub use relocate::relocate;
pub use resize::{grow, shrink};

use serde::{Deserialize, Serialize};

use crate::model::{Assignment, ClusterName, Fleet, MemoryMib, NodeName, Occupancy, OccupancyError, VmName};
use crate::place::{ClusterRequest, PlaceError};

/// A placed cluster: its request, and where its VMs are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resident {
    /// Its request.
    pub request: ClusterRequest,
    /// Its VMs, in the order of [`ClusterRequest::vm_names`].
    pub assignments: Vec<Assignment>,
    /// VMs that cannot move now (because of a device, or a running migration).
    #[serde(default)]
    pub pinned: Vec<VmName>,
}

impl Resident {
    /// Whether all its VMs can move.
    fn may_move(&self) -> bool {
        self.pinned.is_empty() && self.staying().is_none()
    }

    /// A VM that stays on its node because of a device, and why.
    fn staying(&self) -> Option<(&Assignment, &'static str)> {
        self.assignments.iter().find_map(|vm| Some((vm, vm.stays()?)))
    }
}

/// A note on a VM that stays.
fn stays(vm: &Assignment, why: &str) -> String {
    format!("VM {} stays on {}: {why}; stop it to free the node", vm.vm, vm.node)
}

/// Notes on clusters that stay because of a device of one of their VMs.
fn clusters_that_stay<'a>(residents: impl Iterator<Item = &'a Resident>) -> Vec<String> {
    let note = |resident: &Resident| {
        let (vm, why) = resident.staying()?;
        Some(format!(
            "cluster {} stays as it is: VM {} on {} does not move, {why}",
            resident.request.name, vm.vm, vm.node
        ))
    };
    residents.filter_map(note).collect()
}

/// One migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Index in the plan.
    pub id: usize,
    /// The cluster.
    pub cluster: ClusterName,
    /// The VM's node, and what it has there.
    pub from: Assignment,
    /// Its destination, and what it gets there.
    pub to: Assignment,
    /// Memory to be moved.
    pub memory: MemoryMib,
    /// Steps that must be done before, because they free what this one takes. Steps that do not wait for each other may run at the same
    /// time.
    pub after: Vec<usize>,
    /// The destination is a spare place, because VMs wait for each other's places; a later step moves the VM on.
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

/// Migrations, in a feasible sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The migrations.
    pub steps: Vec<Step>,
    /// Memory of all steps.
    pub memory: MemoryMib,
    /// Hops of the clusters that move.
    pub hops: Hops,
    /// What could not be planned, in words.
    pub notes: Vec<String>,
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// No such node or cluster.
    #[error("there is no {what} {name}")]
    Unknown {
        /// `node` or `cluster`.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// The given assignments contradict each other.
    #[error("the assignments of placed VMs contradict each other")]
    Occupancy(#[from] OccupancyError),
    /// A VM that has to move cannot.
    #[error("VM {vm} cannot leave node {node}: {reason}")]
    Stuck {
        /// The VM.
        vm: VmName,
        /// Its node.
        node: NodeName,
        /// Why.
        reason: String,
    },
    /// The request does not fit, even if other clusters move.
    #[error("no moves make room for cluster {cluster}: {reason}")]
    NoRoom {
        /// The cluster.
        cluster: ClusterName,
        /// Why the last attempt failed.
        reason: String,
    },
    /// VMs wait for each other's places, and there is no spare place.
    #[error(
        "{vms} VMs wait for each other's places, and there is no spare place for any of them; free a node, or move fewer VMs"
    )]
    Deadlock {
        /// Number of these VMs.
        vms: usize,
    },
    /// A request that contradicts itself.
    #[error(transparent)]
    Place(#[from] PlaceError),
}

/// What all placed clusters have taken.
///
/// # Errors
/// Two VMs that have the same.
pub fn occupancy(fleet: &Fleet, residents: &[Resident]) -> Result<Occupancy, PlanError> {
    let all = residents.iter().flat_map(|resident| &resident.assignments);
    Ok(Occupancy::with(fleet, all)?)
}
