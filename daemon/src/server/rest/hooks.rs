//! `/v1/hooks`.

use std::sync::Arc;

use axum::extract::State;
use vmove_hooks::{Node, TrialError};
use vmove_http::{Answer, Json, Path};
use vmove_types::hook::{HookList, HookTest, HookTestRequest};
use vmove_types::problem::{Code, Problem};

use crate::server::hooks::OfNode;
use crate::server::problem::IntoProblem;
use crate::server::{App, detached};

/// Hooks in the order in which they run, and what came of them since the daemon was started.
#[utoipa::path(get, path = "/v1/hooks", operation_id = "listHooks", tag = "hooks", responses((status = 200, body = HookList)))]
pub async fn list(State(app): State<Arc<App>>) -> axum::Json<HookList> {
    axum::Json(HookList {
        hooks: app.hooks.infos(),
        events_dropped: app.hooks.events_dropped(),
        warnings: app.hooks.warnings().to_vec(),
    })
}

/// Tries a hook with an event that is made up: says what it would do, or does it.
#[utoipa::path(post, path = "/v1/hooks/{name}/test", operation_id = "testHook", tag = "hooks",
    params(("name" = String, Path, description = "Name of the hook")), request_body = HookTestRequest,
    responses((status = 200, body = HookTest), (status = 400, body = Problem), (status = 404, body = Problem)))]
pub async fn test(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    Json(request): Json<HookTestRequest>,
) -> Answer<HookTest> {
    let node: Arc<dyn Node> = Arc::new(OfNode(app.clone()));
    Ok(axum::Json(detached(async move { app.hooks.test(&name, request, &node).await }).await?))
}

impl IntoProblem for TrialError {
    fn into_problem(self) -> Problem {
        let code = match &self {
            Self::UnknownHook { .. } => Code::UnknownHook,
            Self::UnknownVm(_) => Code::UnknownVm,
            Self::NoObject(_) => Code::BadRequest,
        };
        Problem::from_error(code, &self)
    }
}
