//! Why `vbridged` refuses a request.

use serde::{Deserialize, Serialize};
use vmove_types::problem::{Exit, ProblemCode};

/// Why a request was refused, as a stable word. New words may be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// The request is not well-formed, or contradicts itself.
    BadRequest,
    /// There is no such path.
    UnknownPath,
    /// The path does not take this method.
    MethodNotAllowed,
    /// The bearer token is missing or wrong.
    Unauthorized,
    /// The role of the token does not allow this.
    Forbidden,
    /// There is no such lease, or it has ended.
    UnknownLease,
    /// There is no such node.
    UnknownNode,
    /// There is no such plan.
    UnknownPlan,
    /// There is no such checkpoint.
    UnknownCheckpoint,
    /// No lease has such a VM.
    UnknownVm,
    /// The request does not fit now.
    NoRoom,
    /// Resources that the caller chose are not free.
    Taken,
    /// The holder would have more than its quota.
    OverQuota,
    /// Another holder or cluster has this lease id.
    IdTaken,
    /// Leases hold resources of the node.
    NodeInUse,
    /// The VM is being moved, or the plan is being run, already.
    Busy,
    /// Other bridges were faster each time.
    Contended,
    /// The store does not answer.
    StoreUnreachable,
    /// The store stopped answering during a transaction: repeat the request with the same id.
    OutcomeUnknown,
    /// A VM did not start; VMs that the request had started were stopped.
    NotStarted,
    /// VMs that should have stopped may still run.
    NotStopped,
    /// A node refused, or does not answer; what was begun is undone.
    NodeFailed,
    /// Slurm does not answer, so nothing is leased on its nodes.
    SlurmUnreachable,
    /// The store refused, or a file failed.
    Internal,
    /// An adapter failed, or broke its contract (only reported by `vmove`).
    AdapterFailed,
    /// No bridge answers (only reported by `vmove`).
    BridgeUnreachable,
}

impl ProblemCode for Code {
    const BAD_REQUEST: Self = Self::BadRequest;

    // One match, without a wildcard: a new code cannot be forgotten.
    fn mapping(self) -> (u16, Exit) {
        match self {
            Self::BadRequest => (400, Exit::Usage),
            Self::Unauthorized => (401, Exit::Usage),
            Self::Forbidden => (403, Exit::Usage),
            Self::UnknownPath => (404, Exit::Usage),
            Self::MethodNotAllowed => (405, Exit::Usage),
            Self::UnknownLease
            | Self::UnknownNode
            | Self::UnknownPlan
            | Self::UnknownCheckpoint
            | Self::UnknownVm => (404, Exit::Failed),
            Self::NoRoom | Self::Taken => (409, Exit::Refused),
            Self::OverQuota => (403, Exit::Refused),
            Self::IdTaken | Self::NodeInUse | Self::Busy => (409, Exit::Failed),
            Self::Contended | Self::SlurmUnreachable => (503, Exit::Failed),
            Self::StoreUnreachable | Self::OutcomeUnknown | Self::BridgeUnreachable => {
                (503, Exit::Unreachable)
            }
            Self::NotStarted | Self::NotStopped | Self::NodeFailed | Self::AdapterFailed => {
                (502, Exit::Failed)
            }
            Self::Internal => (500, Exit::Failed),
        }
    }
}

/// A request that `vbridged` refused.
pub type Problem = vmove_types::problem::Problem<Code>;
