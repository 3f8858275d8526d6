//! `/v1/migrations`.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::body::Frame;
use tokio::sync::{mpsc, watch};
use vmove_migrate::progress::Progress;

use super::error::{Answer, Json, Path, Refusal, engine_problem};
use crate::api::is_end;
use crate::api::problem::{Code, Problem};
use crate::api::schema;
use crate::api::types::{MigrateRequest, MigrationList, Taken};
use crate::server::{App, detached};

/// Snapshots closer together than this are of no use to people or programs.
const PACE: Duration = Duration::from_millis(50);

/// All migrations this node remembers: those at work first, then newest first.
#[utoipa::path(get, path = "/v1/migrations", operation_id = "listMigrations", tag = "migrations", responses((status = 200, body = MigrationList)))]
pub async fn list(State(app): State<Arc<App>>) -> Answer<MigrationList> {
    Ok(axum::Json(MigrationList { migrations: app.sessions.all().await? }))
}

/// Moves a VM to another node. Follow it by its events.
#[utoipa::path(post, path = "/v1/migrations", operation_id = "startMigration", tag = "migrations", request_body = MigrateRequest,
    responses((status = 202, body = Taken), (status = 404, body = Problem), (status = 409, body = Problem), (status = 422, body = Problem)))]
pub async fn start(
    State(app): State<Arc<App>>,
    Json(request): Json<MigrateRequest>,
) -> Result<(StatusCode, axum::Json<Taken>), Refusal> {
    request.options.validate().map_err(|why| Problem::new(Code::BadOption, why))?;
    let to = app.target(&request.to)?;
    let (engine, forks) = (app.engine.clone(), app.forks.clone());
    let (id, promoted) = detached(async move {
        // Private memory since a fork cannot be moved: memory of its own first.
        let promoted = forks.promote(request.vm.clone()).await?;
        let id = engine.start(&request.vm, to, request.options).await.map_err(|e| engine_problem(&e))?;
        Ok((id, promoted))
    })
    .await?;
    app.sessions.add(id);
    let note = promoted.was_private.then(|| {
        format!(
            "the memory of {:?} was private since a fork: it was given memory of its own first ({:.0} ms, guest paused for {:.1} ms)",
            promoted.vm, promoted.total_ms, promoted.pause_ms
        )
    });
    Ok((StatusCode::ACCEPTED, axum::Json(Taken { id: id.to_string(), note })))
}

/// One migration now.
#[utoipa::path(get, path = "/v1/migrations/{id}", operation_id = "showMigration", tag = "migrations",
    params(("id" = String, Path, description = "Id, may be cut short")),
    responses((status = 200, body = schema::Progress), (status = 404, body = Problem)))]
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
    act(app, id, false).await
}

/// Takes up a migration that gave up, on the node that owns the guest.
#[utoipa::path(post, path = "/v1/migrations/{id}/recover", operation_id = "recoverMigration", tag = "migrations",
    params(("id" = String, Path, description = "Id, may be cut short")),
    responses((status = 202, body = Taken), (status = 404, body = Problem), (status = 409, body = Problem)))]
pub async fn recover(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<(StatusCode, axum::Json<Taken>), Refusal> {
    act(app, id, true).await
}

async fn act(app: Arc<App>, id: String, recover: bool) -> Result<(StatusCode, axum::Json<Taken>), Refusal> {
    // The answer names it in full.
    let full = app.sessions.find(&id).await?.id;
    let (engine, target) = (app.engine.clone(), full.clone());
    detached(async move {
        let done = if recover { engine.recover(&target).await } else { engine.cancel(&target).await };
        done.map_err(|e| engine_problem(&e))
    })
    .await?;
    app.sessions.add(&full);
    Ok((StatusCode::ACCEPTED, axum::Json(Taken { id: full, note: None })))
}

/// Snapshots of a migration as they come, one JSON object a line, until it has ended.
#[utoipa::path(get, path = "/v1/migrations/{id}/events", operation_id = "followMigration", tag = "migrations",
    params(("id" = String, Path, description = "Id, may be cut short")),
    responses((status = 200, body = schema::Progress, content_type = "application/x-ndjson"), (status = 404, body = Problem)))]
pub async fn events(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, Refusal> {
    let (lines, body) = mpsc::channel(4);
    match app.engine.progress(&id) {
        Ok(progress) => drop(tokio::spawn(pump(progress, lines))),
        // One of the past: its end is all there is to tell.
        Err(_) => {
            let last = app.sessions.find(&id).await?;
            drop(tokio::spawn(pump(watch::channel(last).1, lines)));
        }
    }
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson"), (header::CACHE_CONTROL, "no-store")];
    Ok((kind, Body::new(LineBody(body))).into_response())
}

/// Sends each snapshot until the last one, or until nobody listens.
async fn pump(mut progress: watch::Receiver<Progress>, lines: mpsc::Sender<Bytes>) {
    loop {
        let now = progress.borrow_and_update().clone();
        let Ok(mut line) = serde_json::to_vec(&now) else { return };
        line.push(b'\n');
        if lines.send(line.into()).await.is_err() || is_end(&now.outcome) {
            return;
        }
        tokio::time::sleep(PACE).await;
        tokio::select! {
            changed = progress.changed() => if changed.is_err() { return },
            () = lines.closed() => return,
        }
    }
}

/// A body that ends when its sender is dropped.
struct LineBody(mpsc::Receiver<Bytes>);

impl hyper::body::Body for LineBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|line| line.map(|bytes| Ok(Frame::data(bytes))))
    }
}
