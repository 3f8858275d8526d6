//! `/v1/leases/{id}/vms`: starts and ends the VMs of a lease through the daemons of their nodes.

use std::sync::Arc;

use axum::extract::State;
use sched_bridge::model::VmName;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::App;
use super::problem::{Answer, Code, Json, Path, Problem};
use crate::lease::LeaseId;
use crate::start::{self, StartError, StartVm, StartedVm};

/// VMs to be started.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartRequest {
    /// Each of them, once.
    pub vms: Vec<StartVm>,
}

/// VMs that run.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct StartAnswer {
    /// In the order of the request.
    pub vms: Vec<StartedVm>,
}

/// VMs to be ended, and those that have.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopVms {
    /// By name; all of the lease if there is none.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub vms: Vec<VmName>,
}

/// Starts VMs of a lease where they were placed: all of them or none. Those that run already are left as they are.
#[utoipa::path(post, path = "/v1/leases/{id}/vms", operation_id = "startVms", tag = "leases", params(("id" = String, Path, description = "Id of the lease")),
    request_body = StartRequest,
    responses((status = 200, body = StartAnswer), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn start(
    State(app): State<Arc<App>>,
    Path(id): Path<LeaseId>,
    Json(request): Json<StartRequest>,
) -> Answer<StartAnswer> {
    // The client may hang up; what was begun is finished or undone.
    let work = async move { start::start(&app.bridge, &app.mover, &id, &request.vms).await };
    let vms = tokio::spawn(work).await.map_err(|e| Problem::new(Code::Internal, e.to_string()))??;
    Ok(axum::Json(StartAnswer { vms }))
}

/// Ends VMs of a lease. The lease stays.
#[utoipa::path(post, path = "/v1/leases/{id}/vms/stop", operation_id = "stopVms", tag = "leases", params(("id" = String, Path, description = "Id of the lease")),
    request_body = StopVms,
    responses((status = 200, body = StopVms), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn stop(
    State(app): State<Arc<App>>,
    Path(id): Path<LeaseId>,
    Json(request): Json<StopVms>,
) -> Answer<StopVms> {
    let work = async move { start::stop(&app.bridge, &app.mover, &id, &request.vms).await };
    let vms = tokio::spawn(work).await.map_err(|e| Problem::new(Code::Internal, e.to_string()))??;
    Ok(axum::Json(StopVms { vms }))
}

impl From<StartError> for Problem {
    fn from(error: StartError) -> Self {
        let code = match error {
            StartError::Bridge(error) => return error.into(),
            StartError::NotInLease { .. } => Code::UnknownVm,
            StartError::Refused { .. } => Code::NotStarted,
            StartError::Left { .. } => Code::NotStopped,
        };
        Self::new(code, error.to_string())
    }
}
