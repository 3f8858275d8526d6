//! `/v1/groups`: VMs that move at one barrier.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use vmove_http::events::{Sender, Wanted};
use vmove_http::{Answer, Json, Path, Refusal};
use vmove_migrate::groups::GroupMember;
use vmove_node::blocking::run_blocking;
use vmove_types::group::{GroupList, GroupProgress, GroupRequest, GroupTaken};
use vmove_types::migration::Taken;
use vmove_types::problem::{Code, Problem};

use crate::server::hooks::begin_group;
use crate::server::problem::IntoProblem;
use crate::server::{App, detached};

/// Between two snapshots.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(100);

/// All groups this node remembers: those at work first.
#[utoipa::path(get, path = "/v1/groups", operation_id = "listGroups", tag = "groups", responses((status = 200, body = GroupList)))]
pub async fn list(State(app): State<Arc<App>>) -> Answer<GroupList> {
    let engine = app.engine.clone();
    let groups = run_blocking(move || engine.groups()).await.map_err(IntoProblem::into_problem)?;
    Ok(axum::Json(GroupList { groups }))
}

/// Moves several VMs of this node at one barrier: all of them, or none. Follow the group by its events.
#[utoipa::path(post, path = "/v1/groups", operation_id = "startGroup", tag = "groups", request_body = GroupRequest,
    responses((status = 202, body = GroupTaken), (status = 403, body = Problem), (status = 404, body = Problem), (status = 409, body = Problem), (status = 422, body = Problem)))]
pub async fn start(
    State(app): State<Arc<App>>,
    Json(request): Json<GroupRequest>,
) -> Result<(StatusCode, axum::Json<GroupTaken>), Refusal> {
    let mut members = Vec::new();
    for member in request.members {
        let bad = |why| Problem::new(Code::BadOption, format!("{}: {why}", member.vm));
        member.options.validate().map_err(bad)?;
        let to = app.known.target(&member.to).map_err(IntoProblem::into_problem)?;
        members.push(GroupMember { vm: member.vm, to, spec: member.options });
    }
    let taken = detached(async move { begin_group(&app, members).await }).await?;
    Ok((StatusCode::ACCEPTED, axum::Json(taken)))
}

/// One group now.
#[utoipa::path(get, path = "/v1/groups/{id}", operation_id = "showGroup", tag = "groups",
    params(("id" = String, Path, description = "Id, may be cut short")),
    responses((status = 200, body = GroupProgress), (status = 404, body = Problem)))]
pub async fn show(State(app): State<Arc<App>>, Path(id): Path<String>) -> Answer<GroupProgress> {
    Ok(axum::Json(find(&app, &id).await?))
}

/// Calls a group off: every guest goes on at the source. Refused once the group is decided.
#[utoipa::path(delete, path = "/v1/groups/{id}", operation_id = "cancelGroup", tag = "groups",
    params(("id" = String, Path, description = "Id, may be cut short")),
    responses((status = 202, body = Taken), (status = 404, body = Problem), (status = 409, body = Problem)))]
pub async fn cancel(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<(StatusCode, axum::Json<Taken>), Refusal> {
    let engine = app.engine.clone();
    let id = detached(async move { engine.cancel_group(&id).await }).await?;
    Ok((StatusCode::ACCEPTED, axum::Json(Taken { id: id.to_string(), note: None, choice: None })))
}

/// Snapshots of a group as they come, until it has ended: one JSON object a line, or server-sent events (`Accept: text/event-stream`). Who comes back
/// with `Last-Event-ID` is not sent the same again, and is answered 204 when it has the last.
#[utoipa::path(get, path = "/v1/groups/{id}/events", operation_id = "followGroup", tag = "groups",
    params(("id" = String, Path, description = "Id, may be cut short")),
    responses((status = 200, content((GroupProgress = "application/x-ndjson"), (GroupProgress = "text/event-stream"))),
        (status = 204, description = "the client has the last snapshot"), (status = 404, body = Problem)))]
pub async fn events(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    wanted: Wanted,
) -> Result<Response, Refusal> {
    let first = find(&app, &id).await?;
    let (snapshots, answer) = wanted.begin(&first, first.outcome.is_end());
    if let Some(snapshots) = snapshots {
        drop(tokio::spawn(pump(app, first, snapshots)));
    }
    Ok(answer)
}

async fn pump(app: Arc<App>, mut now: GroupProgress, mut snapshots: Sender) {
    loop {
        if !snapshots.send(&now).await || now.outcome.is_end() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(SNAPSHOT_INTERVAL) => {}
            () = snapshots.closed() => return,
        }
        let Ok(next) = find(&app, &now.id).await else { return };
        now = next;
    }
}

/// A group of the past may be read from the disk.
async fn find(app: &App, id: &str) -> Result<GroupProgress, Problem> {
    let (engine, id) = (app.engine.clone(), id.to_owned());
    let found = run_blocking(move || engine.group(&id)).await.map_err(IntoProblem::into_problem)?;
    found.map_err(IntoProblem::into_problem)
}
