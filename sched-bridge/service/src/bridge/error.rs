//! Why an operation was refused. Nothing has changed then, unless the message says otherwise.

use std::time::Duration;

use sched_bridge::model::{FleetError, NodeName, OccupancyError, VmName};
use sched_bridge::place::PlaceError;

use crate::lease::LeaseId;
use crate::store::StoreError;

/// See the [module](self).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BridgeError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The view of the store may be old.
    #[error(
        "this bridge is out of touch with its store: {reason}. Leases stay as they are, and none expires meanwhile"
    )]
    OutOfTouch {
        /// What the store said.
        reason: String,
    },
    /// Others were always faster.
    #[error(
        "other bridges changed the same nodes again and again for {waited:?}: nothing was granted; ask again"
    )]
    Contended {
        /// How long it was tried.
        waited: Duration,
    },
    /// No placement.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// Named resources are not free.
    #[error(transparent)]
    Taken(#[from] OccupancyError),
    /// The nodes make no fleet.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// The id is somebody else's.
    #[error(
        "lease {id} belongs to {holder:?} for cluster {cluster}: choose another id, or repeat the request as it was"
    )]
    IdTaken {
        /// The id.
        id: LeaseId,
        /// Whose it is.
        holder: String,
        /// What for.
        cluster: String,
    },
    /// No such lease.
    #[error(
        "there is no lease {0}: it was given back, or it ended because no heartbeat came in time (`vmove account` knows)"
    )]
    UnknownLease(LeaseId),
    /// No such node.
    #[error("there is no node {0}: publish its inventory first (`vmove inventory --publish`)")]
    UnknownNode(NodeName),
    /// No such plan.
    #[error("there is no plan {0} (`vmove plan list` shows all)")]
    UnknownPlan(LeaseId),
    /// The VM is not part of any lease.
    #[error("no lease has a VM {0}")]
    UnknownVm(VmName),
    /// A node that still holds something.
    #[error(
        "node {node} cannot be removed: leases {leases} are on it; evacuate it first (`vmove plan evacuate {node}`)"
    )]
    NodeInUse {
        /// The node.
        node: NodeName,
        /// Who is on it.
        leases: String,
    },
    /// No moves do what is wanted.
    #[error("{0}")]
    NoPlan(String),
    /// Something in the request.
    #[error("{0}")]
    Bad(String),
    /// The VM is already on the move.
    #[error("VM {vm} is already on its way to {to}: wait for its end, or look at `vmove plan list`")]
    Moving {
        /// The VM.
        vm: VmName,
        /// Where to.
        to: NodeName,
    },
}
