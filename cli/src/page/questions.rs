//! The questions of a node's page, passed on to its daemon. Of its interface these, and no others: nothing that changes or loads anything.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, RawQuery, State};
use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use vmove_client::{Client, encoded};

use super::asked::Asked;

type Daemon = State<Arc<Asked<Client>>>;

pub(super) fn router(daemon: Asked<Client>) -> Router {
    let plain = ["/v1/node", "/v1/vms", "/v1/migrations", "/v1/forks"];
    let router = plain.into_iter().fold(Router::new(), |router, path| {
        router.route(path, get(move |State(daemon): Daemon| async move { daemon.ask(path).await }))
    });
    router
        .route("/v1/vms/{name}/tree", get(tree))
        .route("/v1/migrations/{id}/events", get(events))
        .with_state(Arc::new(daemon))
}

async fn tree(State(daemon): Daemon, Path(name): Path<String>, RawQuery(query): RawQuery) -> Response {
    let ask = if query.as_deref() == Some("ask=true") { "?ask=true" } else { "" };
    daemon.ask(&format!("/v1/vms/{}/tree{ask}", encoded(&name))).await
}

async fn events(State(daemon): Daemon, Path(id): Path<String>, headers: HeaderMap) -> Response {
    let path = format!("/v1/migrations/{}/events", encoded(&id));
    let last_id = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    match daemon.client().ask_for_events(&path, last_id).await {
        Ok(answer) => {
            let kind = answer.headers().get(CONTENT_TYPE).cloned();
            let kind = kind.map(|kind| [(CONTENT_TYPE, kind)]);
            (answer.status(), kind, Body::new(answer.into_body())).into_response()
        }
        Err(error) => daemon.no_answer(error),
    }
}
