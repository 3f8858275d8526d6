//! Errors as problems: the one place where they get their code, and with it their HTTP status and exit code.

use sched_bridge::place::PlaceError;
use serde_json::json;
pub use vmove_bridge_types::problem::{Code, Problem};
use vmove_http::Refusal;

use crate::bridge::BridgeError;
use crate::store::StoreError;

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
            BridgeError::Place(_) | BridgeError::Fleet(_) | BridgeError::Invalid(_) => Code::BadRequest,
            BridgeError::Taken(_) => Code::Taken,
            BridgeError::IdTaken { .. } | BridgeError::CheckpointExists(_) => Code::IdTaken,
            BridgeError::OverQuota(_) => Code::OverQuota,
            BridgeError::UnknownLease(_) => Code::UnknownLease,
            BridgeError::UnknownNode(_) => Code::UnknownNode,
            BridgeError::UnknownPlan(_) => Code::UnknownPlan,
            BridgeError::UnknownCheckpoint(_) => Code::UnknownCheckpoint,
            BridgeError::UnknownVm(_) => Code::UnknownVm,
            BridgeError::NodeInUse { .. } => Code::NodeInUse,
            BridgeError::Moving { .. } => Code::Busy,
        };
        let details = match &error {
            BridgeError::OverQuota(over) => Some(json!({ "quota": over.exceeded })),
            _ => None,
        };
        Self { details, ..Self::new(code, error.to_string()) }
    }
}

impl From<BridgeError> for Refusal {
    fn from(error: BridgeError) -> Self {
        Problem::from(error).into()
    }
}
