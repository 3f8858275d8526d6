//! Why memory did not get to other hosts.

use vmove_fabric::{FabricError, FabricKind};
use vmove_memory::MemoryError;
use vmove_node::blocking::TaskFailed;
use vmove_spread::SpreadError;
use vmove_spread::plan::PlanError;

use crate::CloneError;

/// Why a template was not distributed, or did not arrive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DistributionError {
    /// A RAM file of the template.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The template.
    #[error(transparent)]
    Template(#[from] CloneError),
    /// Registering memory, or a group for datagrams.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The choice of the way.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The distribution itself.
    #[error(transparent)]
    Spread(#[from] SpreadError),
    /// The fabric that was agreed on.
    #[error("fabric {0} cannot be used here (any more)")]
    NoFabric(FabricKind),
    /// No host takes it.
    #[error("no host takes it")]
    NotTaken,
    /// Neither fabric can be used.
    #[error("{verbs}; {tcp}")]
    Neither {
        /// Why not verbs.
        verbs: Box<DistributionError>,
        /// Why not tcp.
        tcp: Box<DistributionError>,
    },
    /// It ended before anything was known of it.
    #[error("the distribution ended before it began")]
    NotBegun,
    /// A task broke off.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

/// Why a host does not read the template by RDMA.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// RDMA pins what is registered, holes included.
    #[error("no verbs, which would pin holes: {0}")]
    NoRoom(String),
    /// A connection was tried.
    #[error("no verbs: {0}")]
    NotReached(String),
}
