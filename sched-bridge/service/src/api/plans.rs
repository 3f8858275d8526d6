//! `/v1/plans`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::App;
use super::problem::{Answer, Code, Json, Path, Problem, Refusal};
use super::types::RequestText;
use crate::lease::LeaseId;
use crate::plan::run::RunError;
use crate::plan::{Plan, make as planning};

/// Plans.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct PlanList {
    /// By id.
    pub plans: Vec<Plan>,
}

/// What a plan is wanted for.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, tag = "for")]
pub enum PlanRequest {
    /// Nothing is left on a node.
    Evacuate {
        /// The node.
        node: String,
    },
    /// A cluster sits closer together, or all do.
    Compact {
        /// The cluster; all, if left out.
        #[serde(default)]
        cluster: Option<String>,
    },
    /// A request that does not fit now will fit.
    MakeRoom {
        /// The request.
        text: RequestText,
        /// Name of the virtual cluster, where the text has none.
        #[serde(default)]
        cluster: Option<String>,
    },
}

/// All plans.
#[utoipa::path(get, path = "/v1/plans", operation_id = "listPlans", tag = "plans",
    responses((status = 200, body = PlanList), (status = "5XX", body = Problem)))]
pub async fn list(State(app): State<Arc<App>>) -> Answer<PlanList> {
    let view = app.bridge.view()?;
    let plans = view.plans().keys().filter_map(|id| app.bridge.plan(id).ok()).collect();
    Ok(axum::Json(PlanList { plans }))
}

/// Makes a plan. Nothing moves yet.
#[utoipa::path(post, path = "/v1/plans", operation_id = "makePlan", tag = "plans", request_body = PlanRequest,
    responses((status = 201, body = Plan), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn make(
    State(app): State<Arc<App>>,
    Json(request): Json<PlanRequest>,
) -> Result<(StatusCode, axum::Json<Plan>), Refusal> {
    let plan = planning::make(&app.bridge, &request).await?;
    app.bridge.put_plan(&plan, None).await?;
    Ok((StatusCode::CREATED, axum::Json(plan)))
}

/// A plan, and how far it is.
#[utoipa::path(get, path = "/v1/plans/{id}", operation_id = "showPlan", tag = "plans", params(("id" = String, Path, description = "Id of the plan")),
    responses((status = 200, body = Plan), (status = 404, body = Problem), (status = "5XX", body = Problem)))]
pub async fn show(State(app): State<Arc<App>>, Path(id): Path<LeaseId>) -> Answer<Plan> {
    Ok(axum::Json(app.bridge.plan(&id)?))
}

/// Forgets a plan that is not being run.
#[utoipa::path(delete, path = "/v1/plans/{id}", operation_id = "removePlan", tag = "plans", params(("id" = String, Path, description = "Id of the plan")),
    responses((status = 204), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn remove(State(app): State<Arc<App>>, Path(id): Path<LeaseId>) -> Result<StatusCode, Refusal> {
    app.bridge.remove_plan(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Runs a plan, or goes on with it; answers when it is done or a step has failed. The run goes on when the client hangs up.
#[utoipa::path(post, path = "/v1/plans/{id}/run", operation_id = "runPlan", tag = "plans", params(("id" = String, Path, description = "Id of the plan")),
    responses((status = 200, body = Plan), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn run(State(app): State<Arc<App>>, Path(id): Path<LeaseId>) -> Answer<Plan> {
    let work = {
        let app = Arc::clone(&app);
        async move { crate::plan::run::run(&app.bridge, Arc::clone(&app.mover), &id, app.limits).await }
    };
    let ended = tokio::spawn(work).await.map_err(|e| Problem::new(Code::Internal, e.to_string()))?;
    Ok(axum::Json(ended?))
}

impl From<RunError> for Problem {
    fn from(error: RunError) -> Self {
        match error {
            RunError::Bridge(error) => error.into(),
            RunError::Running(_) => Self::new(Code::Busy, error.to_string()),
        }
    }
}
