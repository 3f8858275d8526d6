//! Makes plans, by the library's planner.

use std::sync::Arc;

use crate::api::plans::PlanRequest;
use crate::bridge::{Bridge, BridgeError};
use crate::plan::Plan;

/// Makes a plan for what is wanted, from who sits where now.
///
/// # Errors
/// There is no way, or the view is old.
pub async fn make(_bridge: &Arc<Bridge>, request: &PlanRequest) -> Result<Plan, BridgeError> {
    Err(BridgeError::Bad(format!("{request:?}: not planned yet")))
}
