//! `/v1/migrations`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use tokio::sync::watch;
use vmove_http::events::{Sender, Wanted};
use vmove_http::{Answer, Json, Path, Query, Refusal};
use vmove_migrate::engine::{Engine, EngineError};
use vmove_node::peer::PeerTarget;
use vmove_types::progress::Progress;
use vmove_types::spec::Visit;

use crate::server::hooks::begin_migration;
use crate::server::problem::IntoProblem;
use crate::server::{App, detached};
use vmove_types::go_home::GoHome;
use vmove_types::migration::{ListQuery, MigrateRequest, MigrationList, ReclaimRequest, Taken};
use vmove_types::problem::{Code, Problem};

/// Snapshots closer together than this are of no use to people or programs.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(50);

/// All migrations this node remembers: those at work first, then newest first.
#[utoipa::path(get, path = "/v1/migrations", operation_id = "listMigrations", tag = "migrations", params(ListQuery),
    responses((status = 200, body = MigrationList)))]
pub async fn list(State(app): State<Arc<App>>, Query(query): Query<ListQuery>) -> Answer<MigrationList> {
    let migrations = if query.live {
        app.sessions.live()
    } else {
        app.sessions.all().await.map_err(IntoProblem::into_problem)?
    };
    Ok(axum::Json(MigrationList { migrations }))
}

/// Moves a VM to another node. Follow it by its events. With `reads_bytes` it may be refused as `stays`: then it reads faster from where it is.
#[utoipa::path(post, path = "/v1/migrations", operation_id = "startMigration", tag = "migrations", request_body = MigrateRequest,
    responses((status = 202, body = Taken), (status = 403, body = Problem), (status = 404, body = Problem), (status = 409, body = Problem), (status = 422, body = Problem)))]
pub async fn start(
    State(app): State<Arc<App>>,
    Json(request): Json<MigrateRequest>,
) -> Result<(StatusCode, axum::Json<Taken>), Refusal> {
    request.options.validate().map_err(|why| Problem::new(Code::BadOption, why))?;
    let to = target(&app, &request)?;
    let taken =
        detached(async move { begin_migration(&app, &request.vm, to, request.options).await }).await?;
    Ok((StatusCode::ACCEPTED, axum::Json(taken)))
}

/// Where to. The home of a guest that visits needs no address in the configuration: it has given its own.
fn target(app: &App, request: &MigrateRequest) -> Result<PeerTarget, Problem> {
    let target = app.known.target(&request.to);
    if target.is_err() && request.options.visit == Visit::Back {
        let home = app.engine.visit_by(&request.vm).filter(|visit| visit.home == request.to);
        if let Some(address) = home.and_then(|visit| visit.home_address) {
            return Ok(PeerTarget { name: request.to.clone(), address });
        }
    }
    target.map_err(IntoProblem::into_problem)
}

/// One migration now.
#[utoipa::path(get, path = "/v1/migrations/{id}", operation_id = "showMigration", tag = "migrations",
    params(("id" = String, Path, description = "Id, may be cut short")),
    responses((status = 200, body = Progress), (status = 404, body = Problem)))]
pub async fn show(State(app): State<Arc<App>>, Path(id): Path<String>) -> Answer<Progress> {
    Ok(axum::Json(app.sessions.find(&id).await?))
}

/// Calls a migration off; the guest goes on at the source.
#[utoipa::path(delete, path = "/v1/migrations/{id}", operation_id = "cancelMigration", tag = "migrations",
    params(("id" = String, Path, description = "Id, may be cut short")),
    responses((status = 202, body = Taken), (status = 404, body = Problem), (status = 409, body = Problem)))]
pub async fn cancel(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<(StatusCode, axum::Json<Taken>), Refusal> {
    act(app, id, |engine, id| async move { engine.cancel(&id).await }).await
}

/// Takes up a migration that gave up, on the node that owns the guest.
#[utoipa::path(post, path = "/v1/migrations/{id}/recover", operation_id = "recoverMigration", tag = "migrations",
    params(("id" = String, Path, description = "Id, may be cut short")),
    responses((status = 202, body = Taken), (status = 404, body = Problem), (status = 409, body = Problem)))]
pub async fn recover(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<(StatusCode, axum::Json<Taken>), Refusal> {
    act(app, id, |engine, id| async move { engine.recover(&id).await }).await
}

/// Has a guest that came for a visit stay, on the node where it is: the rest of its memory is fetched.
#[utoipa::path(post, path = "/v1/migrations/{id}/stay", operation_id = "stayVisitor", tag = "migrations",
    params(("id" = String, Path, description = "Id, may be cut short")),
    responses((status = 202, body = Taken), (status = 404, body = Problem), (status = 409, body = Problem)))]
pub async fn stay(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<(StatusCode, axum::Json<Taken>), Refusal> {
    act(app, id, |engine, id| async move { engine.stay(&id) }).await
}

/// Turns the migration that brings a guest into a visit, on the node where the guest is: its home keeps its memory, and no more is fetched than the guest
/// touches. Answers when it is one. The guest's memory must still be following it.
#[utoipa::path(post, path = "/v1/migrations/{id}/visit", operation_id = "turnIntoVisit", tag = "migrations",
    params(("id" = String, Path, description = "Id, may be cut short")),
    request_body = GoHome,
    responses((status = 202, body = Taken), (status = 404, body = Problem), (status = 409, body = Problem), (status = 400, body = Problem)))]
pub async fn turn_into_visit(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    Json(go_home): Json<GoHome>,
) -> Result<(StatusCode, axum::Json<Taken>), Refusal> {
    act(app, id, |engine, id| async move { engine.turn_into_visit(&id, go_home).await }).await
}

/// Has the guest's copy at the source run again, on the node that the guest came from. What the guest did since is lost.
#[utoipa::path(post, path = "/v1/migrations/{id}/reclaim", operation_id = "reclaimMigration", tag = "migrations",
    params(("id" = String, Path, description = "Id, may be cut short")),
    request_body = ReclaimRequest,
    responses((status = 200, body = Taken), (status = 404, body = Problem), (status = 409, body = Problem), (status = 400, body = Problem)))]
pub async fn reclaim(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    Json(request): Json<ReclaimRequest>,
) -> Answer<Taken> {
    if !request.guest_is_lost {
        let why = "guest_is_lost must be true: a guest that still runs at the destination would run twice";
        return Err(Problem::new(Code::BadOption, why).into());
    }
    let full = app.sessions.find(&id).await?.id;
    let (engine, target) = (app.engine.clone(), full.clone());
    let note = detached(async move { engine.reclaim(&target).await }).await?;
    Ok(axum::Json(Taken { id: full, note: Some(note), choice: None }))
}

/// Does something about a migration, which is told by its full id.
async fn act<F>(
    app: Arc<App>,
    id: String,
    what: impl FnOnce(Arc<Engine>, String) -> F,
) -> Result<(StatusCode, axum::Json<Taken>), Refusal>
where
    F: Future<Output = Result<(), EngineError>> + Send + 'static,
{
    // The answer names it in full.
    let full = app.sessions.find(&id).await?.id;
    detached(what(app.engine.clone(), full.clone())).await?;
    Ok((StatusCode::ACCEPTED, axum::Json(Taken { id: full, note: None, choice: None })))
}

/// Snapshots of a migration as they come, until it has ended: one JSON object a line, or server-sent events (`Accept: text/event-stream`). Who comes back
/// with `Last-Event-ID` is not sent the same again, and is answered 204 when it has the last.
#[utoipa::path(get, path = "/v1/migrations/{id}/events", operation_id = "followMigration", tag = "migrations",
    params(("id" = String, Path, description = "Id, may be cut short")),
    responses((status = 200, content((Progress = "application/x-ndjson"), (Progress = "text/event-stream"))),
        (status = 204, description = "the client has the last snapshot"), (status = 404, body = Problem)))]
pub async fn events(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    wanted: Wanted,
) -> Result<Response, Refusal> {
    let progress = match app.engine.progress(&id) {
        Ok(progress) => progress,
        // One of the past: its end is all there is to tell.
        Err(_) => watch::channel(app.sessions.find(&id).await?).1,
    };
    let now = progress.borrow().clone();
    let (snapshots, answer) = wanted.begin(&now, now.outcome.is_end());
    if let Some(snapshots) = snapshots {
        drop(tokio::spawn(pump(progress, snapshots)));
    }
    Ok(answer)
}

/// Sends each snapshot until the last one, or until nobody listens.
async fn pump(mut progress: watch::Receiver<Progress>, mut snapshots: Sender) {
    loop {
        let now = progress.borrow_and_update().clone();
        if !snapshots.send(&now).await || now.outcome.is_end() {
            return;
        }
        tokio::time::sleep(SNAPSHOT_INTERVAL).await;
        tokio::select! {
            changed = progress.changed() => if changed.is_err() { return },
            () = snapshots.closed() => return,
        }
    }
}
