//! `/v1/forks`, `/v1/templates`, and what concerns forks of one VM.

use std::sync::Arc;

use axum::extract::State;
use vmove_http::{Answer, Json, Path, Query};
use vmove_types::fork_report::{ForkProgress, ForkReport};

use crate::server::problem::IntoProblem;
use crate::server::{App, detached};
use vmove_types::fork::{
    ForkList, ForkNode, ForkRecovered, ForkRequest, Promoted, Removed, RestoreRequest, Restored,
    TemplateInfo, TemplateList, TemplateRequest, TreeQuery, Warm, WarmRequest,
};
use vmove_types::problem::Problem;
use vmove_types::vm::Stopped;

/// Forks a guest, or a template. Answers when everything is done; see `/v1/forks/{id}` meanwhile.
#[utoipa::path(post, path = "/v1/forks", operation_id = "createFork", tag = "forks", request_body = ForkRequest,
    responses((status = 200, body = ForkReport), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn create(State(app): State<Arc<App>>, Json(request): Json<ForkRequest>) -> Answer<ForkReport> {
    let forks = app.forks.clone();
    Ok(axum::Json(detached(forks.create(request)).await?))
}

/// Forks of this node: those whose journals cannot be read first, then the newest.
#[utoipa::path(get, path = "/v1/forks", operation_id = "listForks", tag = "forks", responses((status = 200, body = ForkList)))]
pub async fn list(State(app): State<Arc<App>>) -> axum::Json<ForkList> {
    axum::Json(app.forks.list())
}

/// Takes up a fork whose journal could not be read: where it stands by the last line that can be read.
#[utoipa::path(post, path = "/v1/forks/{id}/recover", operation_id = "recoverFork", tag = "forks",
    params(("id" = String, Path, description = "Id of the fork")),
    responses((status = 200, body = ForkRecovered), (status = 409, body = Problem), (status = "5XX", body = Problem)))]
pub async fn recover(State(app): State<Arc<App>>, Path(id): Path<String>) -> Answer<ForkRecovered> {
    Ok(axum::Json(detached(app.forks.clone().recover_fork(id)).await?))
}

/// Where a fork stands. The daemon remembers the last ones.
#[utoipa::path(get, path = "/v1/forks/{id}", operation_id = "showFork", tag = "forks",
    params(("id" = String, Path, description = "Id of the fork")),
    responses((status = 200, body = ForkProgress), (status = 404, body = Problem)))]
pub async fn show(State(app): State<Arc<App>>, Path(id): Path<String>) -> Answer<ForkProgress> {
    Ok(axum::Json(app.forks.progress(&id).map_err(IntoProblem::into_problem)?))
}

/// A VM and everything that came from it.
#[utoipa::path(get, path = "/v1/vms/{name}/tree", operation_id = "showForkTree", tag = "forks",
    params(("name" = String, Path, description = "Name of the VM or template"), TreeQuery),
    responses((status = 200, body = ForkNode), (status = 404, body = Problem)))]
pub async fn tree(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    Query(query): Query<TreeQuery>,
) -> Answer<ForkNode> {
    Ok(axum::Json(app.forks.whole_tree(&name, query.ask).await.map_err(IntoProblem::into_problem)?))
}

/// Ends a child at once, also one on another node.
#[utoipa::path(delete, path = "/v1/children/{name}", operation_id = "killChild", tag = "forks",
    params(("name" = String, Path, description = "Name of the child")),
    responses((status = 200, body = Stopped), (status = 404, body = Problem), (status = "5XX", body = Problem)))]
pub async fn kill(State(app): State<Arc<App>>, Path(name): Path<String>) -> Answer<Stopped> {
    Ok(axum::Json(detached(app.forks.clone().kill(name)).await?))
}

/// Gives a VM memory of its own, so that it can be moved or forked again.
#[utoipa::path(post, path = "/v1/vms/{name}/promote", operation_id = "promoteVm", tag = "forks",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, body = Promoted), (status = 404, body = Problem), (status = 409, body = Problem), (status = "5XX", body = Problem)))]
pub async fn promote(State(app): State<Arc<App>>, Path(name): Path<String>) -> Answer<Promoted> {
    Ok(axum::Json(detached(app.forks.clone().promote(name)).await?))
}

/// Keeps children of a VM prepared for its next fork.
#[utoipa::path(put, path = "/v1/vms/{name}/warm", operation_id = "prepareChildren", tag = "forks",
    params(("name" = String, Path, description = "Name of the VM")), request_body = WarmRequest,
    responses((status = 200, body = Warm), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn warm(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    Json(request): Json<WarmRequest>,
) -> Answer<Warm> {
    Ok(axum::Json(detached(app.forks.clone().prepare(name, request)).await?))
}

/// Templates in memory and on disk.
#[utoipa::path(get, path = "/v1/templates", operation_id = "listTemplates", tag = "forks",
    responses((status = 200, body = TemplateList)))]
pub async fn templates(State(app): State<Arc<App>>) -> Answer<TemplateList> {
    Ok(axum::Json(app.forks.templates().await.map_err(IntoProblem::into_problem)?))
}

/// Freezes a guest as it is now and writes it to disk; the guest runs on.
#[utoipa::path(post, path = "/v1/templates", operation_id = "saveTemplate", tag = "forks", request_body = TemplateRequest,
    responses((status = 200, body = TemplateInfo), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn save(State(app): State<Arc<App>>, Json(request): Json<TemplateRequest>) -> Answer<TemplateInfo> {
    Ok(axum::Json(detached(app.forks.clone().save_template(request)).await?))
}

/// Brings a template from disk into memory, verified.
#[utoipa::path(post, path = "/v1/templates/{name}/load", operation_id = "loadTemplate", tag = "forks",
    params(("name" = String, Path, description = "Name of the template")),
    responses((status = 200, body = TemplateInfo), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn load(State(app): State<Arc<App>>, Path(name): Path<String>) -> Answer<TemplateInfo> {
    Ok(axum::Json(detached(app.forks.clone().load_template(name)).await?))
}

/// Lets the guest of a template run again on this node, as it was when the template was made: with its UUID and MAC addresses, and a new VM
/// Generation ID. What it did later is lost. Nothing else must run as this guest any more.
#[utoipa::path(post, path = "/v1/templates/{name}/restore", operation_id = "restoreTemplate", tag = "forks",
    params(("name" = String, Path, description = "Name of the template")), request_body = RestoreRequest,
    responses((status = 200, body = Restored), (status = "4XX", body = Problem), (status = "5XX", body = Problem)))]
pub async fn restore(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    Json(request): Json<RestoreRequest>,
) -> Answer<Restored> {
    Ok(axum::Json(detached(app.forks.clone().restore_template(name, request)).await?))
}

/// Removes a template from memory and disk.
#[utoipa::path(delete, path = "/v1/templates/{name}", operation_id = "removeTemplate", tag = "forks",
    params(("name" = String, Path, description = "Name of the template")),
    responses((status = 200, body = Removed), (status = 404, body = Problem), (status = "5XX", body = Problem)))]
pub async fn remove(State(app): State<Arc<App>>, Path(name): Path<String>) -> Answer<Removed> {
    Ok(axum::Json(detached(app.forks.clone().remove_template(name)).await?))
}
