//! `/v1/plans`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use vmove_bridge_types::plan::{Plan, PlanRequest};
use vmove_bridge_types::requests::PlanList;
use vmove_http::{Answer, Json, Path, Refusal};

use super::problem::{Code, Problem};
use super::{App, to_its_end};
use crate::executor::{self, RunError};
use crate::lease::LeaseId;
use crate::planner;

/// All plans.
#[utoipa::path(get, path = "/v1/plans", operation_id = "listPlans", tag = "plans",
    responses((status = 200, body = PlanList), (status = "5XX", body = Problem)))]
pub async fn list(State(app): State<Arc<App>>) -> Answer<PlanList> {
    let view = app.bridge.view()?;
    let plans = view.plans().keys().filter_map(|id| app.bridge.plan(id).ok()).collect();
    Ok(axum::Json(PlanList { plans }))
}

/// Makes a plan. Running it is another request. A node that is to be evacuated is drained at once.
#[utoipa::path(post, path = "/v1/plans", operation_id = "makePlan", tag = "plans", request_body = PlanRequest,
    responses((status = 201, body = Plan), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn make(
    State(app): State<Arc<App>>,
    Json(request): Json<PlanRequest>,
) -> Result<(StatusCode, axum::Json<Plan>), Refusal> {
    let plan = planner::make_and_keep(&app.bridge, &request, &app.types.current()).await?;
    Ok((StatusCode::CREATED, axum::Json(plan)))
}

/// A plan, with the state of each step.
#[utoipa::path(get, path = "/v1/plans/{id}", operation_id = "showPlan", tag = "plans", params(("id" = String, Path, description = "Id of the plan")),
    responses((status = 200, body = Plan), (status = 404, body = Problem), (status = "5XX", body = Problem)))]
pub async fn show(State(app): State<Arc<App>>, Path(id): Path<LeaseId>) -> Answer<Plan> {
    Ok(axum::Json(app.bridge.plan(&id)?))
}

/// Deletes a plan that is not being run.
#[utoipa::path(delete, path = "/v1/plans/{id}", operation_id = "removePlan", tag = "plans", params(("id" = String, Path, description = "Id of the plan")),
    responses((status = 204), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn remove(State(app): State<Arc<App>>, Path(id): Path<LeaseId>) -> Result<StatusCode, Refusal> {
    app.bridge.remove_plan(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Runs a plan, or continues it. Answers when it is done or a step has failed; continues if the client hangs up.
#[utoipa::path(post, path = "/v1/plans/{id}/run", operation_id = "runPlan", tag = "plans", params(("id" = String, Path, description = "Id of the plan")),
    responses((status = 200, body = Plan), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn run(State(app): State<Arc<App>>, Path(id): Path<LeaseId>) -> Answer<Plan> {
    let run = async move { executor::run(&app.bridge, Arc::clone(&app.driver), &id, app.limits).await };
    Ok(axum::Json(to_its_end(run).await?))
}

impl From<RunError> for Problem {
    fn from(error: RunError) -> Self {
        match error {
            RunError::Bridge(error) => error.into(),
            RunError::AlreadyRunning(_) => Self::new(Code::Busy, error.to_string()),
        }
    }
}

impl From<RunError> for Refusal {
    fn from(error: RunError) -> Self {
        Problem::from(error).into()
    }
}
