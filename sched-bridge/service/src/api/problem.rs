//! The one form in which a request is refused.

use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use sched_bridge::place::PlaceError;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::bridge::BridgeError;
use crate::store::StoreError;

/// Why a request was refused, as a stable word. New words may be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// The request is not well-formed, or contradicts itself.
    BadRequest,
    /// No such path.
    UnknownPath,
    /// The path is there, the method is not.
    MethodNotAllowed,
    /// The bearer token is missing or wrong.
    Unauthorized,
    /// No such lease, or it has ended.
    UnknownLease,
    /// No such node.
    UnknownNode,
    /// No such plan.
    UnknownPlan,
    /// No lease has such a VM.
    UnknownVm,
    /// It does not fit now.
    NoRoom,
    /// Named resources are taken.
    Taken,
    /// The id of the lease is somebody else's.
    IdTaken,
    /// Something is on the node.
    NodeInUse,
    /// The VM, or the plan, is at work already.
    Busy,
    /// Other bridges were faster again and again.
    Contended,
    /// The store does not answer.
    StoreUnreachable,
    /// The store stopped answering in the middle: repeat the request with the same id.
    OutcomeUnknown,
    /// A daemon did not start a VM; those of the request that had been started were stopped.
    NotStarted,
    /// VMs that should have ended may still run.
    NotStopped,
    /// Slurm does not answer, and the request would be on its nodes.
    SlurmUnreachable,
    /// The store refused, or a file failed.
    Internal,
    /// No bridge answers (only made by `vmove`).
    BridgeUnreachable,
}

impl Code {
    /// HTTP status and exit code of `vmove`: 1 failed, 2 wrong usage, 3 refused, 5 unreachable.
    #[must_use]
    pub const fn mapping(self) -> (u16, u8) {
        match self {
            Self::BadRequest => (400, 2),
            Self::Unauthorized => (401, 2),
            Self::UnknownPath => (404, 2),
            Self::MethodNotAllowed => (405, 2),
            Self::UnknownLease | Self::UnknownNode | Self::UnknownPlan | Self::UnknownVm => (404, 1),
            Self::NoRoom | Self::Taken => (409, 3),
            Self::IdTaken | Self::NodeInUse | Self::Busy => (409, 1),
            Self::Contended | Self::SlurmUnreachable => (503, 1),
            Self::StoreUnreachable | Self::OutcomeUnknown | Self::BridgeUnreachable => (503, 5),
            Self::NotStarted | Self::NotStopped => (502, 1),
            Self::Internal => (500, 1),
        }
    }
}

/// A refused request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Stable word for programs.
    pub code: Code,
    /// What was expected, what was found, what to do next: for people.
    pub message: String,
    /// What `vmove` exits with.
    pub exit_code: u8,
    /// HTTP status.
    pub status: u16,
}

impl Problem {
    /// A problem with the status and exit code of its word.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        let (status, exit_code) = code.mapping();
        Self { code, message: message.into(), exit_code, status }
    }

    /// A malformed request.
    #[must_use]
    pub fn bad(message: impl std::fmt::Display) -> Self {
        Self::new(Code::BadRequest, message.to_string())
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Problem {}

impl From<BridgeError> for Problem {
    fn from(error: BridgeError) -> Self {
        let code = match &error {
            BridgeError::Store(StoreError::Unreachable { .. }) | BridgeError::OutOfTouch { .. } => {
                Code::StoreUnreachable
            }
            BridgeError::Store(StoreError::Unknown { .. }) => Code::OutcomeUnknown,
            BridgeError::Store(StoreError::TooLarge { .. }) => Code::BadRequest,
            BridgeError::Store(_) => Code::Internal,
            BridgeError::Contended { .. } => Code::Contended,
            BridgeError::Place(PlaceError::NoRoom { .. }) | BridgeError::NoPlan(_) => Code::NoRoom,
            BridgeError::Place(_) | BridgeError::Fleet(_) | BridgeError::Bad(_) => Code::BadRequest,
            BridgeError::Taken(_) => Code::Taken,
            BridgeError::IdTaken { .. } => Code::IdTaken,
            BridgeError::UnknownLease(_) => Code::UnknownLease,
            BridgeError::UnknownNode(_) => Code::UnknownNode,
            BridgeError::UnknownPlan(_) => Code::UnknownPlan,
            BridgeError::UnknownVm(_) => Code::UnknownVm,
            BridgeError::NodeInUse { .. } => Code::NodeInUse,
            BridgeError::Moving { .. } => Code::Busy,
        };
        Self::new(code, error.to_string())
    }
}

/// A problem on its way out.
#[derive(Debug)]
pub struct Refusal(pub Problem);

impl<E: Into<Problem>> From<E> for Refusal {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if status.is_server_error() {
            tracing::warn!(code = ?self.0.code, message = %self.0.message, "request failed");
        }
        let body = serde_json::to_string(&self.0).unwrap_or_default();
        (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response()
    }
}

/// What every handler answers.
pub type Answer<T> = Result<axum::Json<T>, Refusal>;

/// A JSON body.
#[derive(Debug, FromRequest)]
#[from_request(via(axum::Json), rejection(Refusal))]
pub struct Json<T>(pub T);

/// A query.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(Refusal))]
pub struct Query<T>(pub T);

/// Parts of the path, percent-decoded.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(Refusal))]
pub struct Path<T>(pub T);

impl From<JsonRejection> for Problem {
    fn from(rejection: JsonRejection) -> Self {
        Self::bad(rejection.body_text())
    }
}

impl From<QueryRejection> for Problem {
    fn from(rejection: QueryRejection) -> Self {
        Self::bad(rejection.body_text())
    }
}

impl From<PathRejection> for Problem {
    fn from(rejection: PathRejection) -> Self {
        Self::bad(rejection.body_text())
    }
}
