//! Why an operation was refused. Nothing has changed then, unless the message says otherwise.

use std::time::Duration;

use sched_bridge::model::{FleetError, NodeName, OccupancyError, VmName};
use sched_bridge::place::PlaceError;

use crate::lease::{Held, LeaseId};
use crate::quota::OverQuota;
use crate::store::StoreError;

/// See the [module](self).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BridgeError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The view of the store may be old.
    #[error(
        "this bridge is out of touch with its store: {reason}. Leases stay as they are, and none expires meanwhile"
    )]
    OutOfTouch {
        /// The error of the store.
        reason: String,
    },
    /// Other bridges were faster each time.
    #[error(
        "other bridges changed the same nodes again and again for {waited:?}: nothing was granted; repeat the request"
    )]
    Contended {
        /// For how long it was tried.
        waited: Duration,
    },
    /// The request cannot be placed.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// Resources that the caller chose are not free.
    #[error(transparent)]
    Taken(#[from] OccupancyError),
    /// The holder would have more than its quota.
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
    /// The inventory contradicts itself.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// Another holder or cluster has this id.
    #[error(
        "{holder:?} holds lease {id} for cluster {cluster}: choose another id, or repeat the original request unchanged"
    )]
    IdTaken {
        /// The id.
        id: LeaseId,
        /// The holder of the lease.
        holder: String,
        /// Its cluster.
        cluster: String,
    },
    /// No such lease.
    #[error(
        "there is no lease {0}: it was released, or it ended because no heartbeat came in time (see `vmove account`)"
    )]
    UnknownLease(LeaseId),
    /// No such node.
    #[error("there is no node {0}: publish its inventory first (`vmove inventory --publish`)")]
    UnknownNode(NodeName),
    /// No such plan.
    #[error("there is no plan {0} (`vmove plan list` shows all)")]
    UnknownPlan(LeaseId),
    /// No such checkpoint.
    #[error("there is no checkpoint {0} (`vmove cluster checkpoints` lists all)")]
    UnknownCheckpoint(LeaseId),
    /// A checkpoint of this name.
    #[error("there is a checkpoint {0}: choose another name, or remove it (`vmove cluster forget {0}`)")]
    CheckpointExists(LeaseId),
    /// No lease contains the VM.
    #[error("no lease has a VM {0}")]
    UnknownVm(VmName),
    /// Leases hold something on the node.
    #[error(
        "node {node} cannot be removed: leases {leases} hold resources on it; evacuate it first (`vmove plan evacuate {node}`)"
    )]
    NodeInUse {
        /// The node.
        node: NodeName,
        /// Ids of the leases.
        leases: String,
    },
    /// No migrations achieve what a plan was asked for.
    #[error("{0}")]
    NoPlan(String),
    /// The request is not valid.
    #[error("{0}")]
    Invalid(String),
    /// The VM is being moved already.
    #[error(
        "VM {vm} is being moved to {to}: wait for its plan (`vmove plan list`), or end it by `vmove plan run` if it has stopped"
    )]
    Moving {
        /// The VM.
        vm: VmName,
        /// Its destination.
        to: NodeName,
    },
}

impl BridgeError {
    /// A VM is being moved to where this is leased for it.
    pub(crate) fn moving(incoming: &Held) -> Self {
        Self::Moving { vm: incoming.assignment.vm.clone(), to: incoming.assignment.node.clone() }
    }

    /// The kind of error, as a label of metrics: one of [`REASONS`](crate::metrics::REASONS).
    pub(crate) const fn label(&self) -> &'static str {
        match self {
            Self::Store(_) | Self::OutOfTouch { .. } => "store",
            Self::Contended { .. } => "contended",
            Self::Place(PlaceError::NoRoom { .. }) | Self::NoPlan(_) => "no-room",
            Self::Taken(_) | Self::Moving { .. } => "taken",
            Self::IdTaken { .. } => "id-taken",
            Self::OverQuota(_) => "over-quota",
            _ => "invalid",
        }
    }
}
