//! The questions of the page, passed on to the daemon. Of its interface these, and no others: nothing that changes or loads anything.

use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, RawQuery, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::json;
use vmove_client::{Client, Error};

use crate::args::Global;
use crate::failure::Failure;

/// The daemon, asked with the caller's rights.
#[derive(Debug)]
pub(super) struct Daemon {
    global: Global,
    client: Mutex<Client>,
}

impl Daemon {
    pub(super) fn new(global: Global) -> Result<Self, Failure> {
        let client = Mutex::new(global.client()?);
        Ok(Self { global, client })
    }

    fn client(&self) -> Client {
        self.client.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// After a refusal: the files of the certificate are read again, since they may have been renewed.
    fn renew(&self) {
        if self.global.elsewhere.at.is_some()
            && let Ok(client) = self.global.client()
        {
            *self.client.lock().unwrap_or_else(PoisonError::into_inner) = client;
        }
    }

    /// The answer to a question, or that the daemon gives none.
    async fn ask(&self, path: &str) -> Response {
        match self.client().ask(path).await {
            Ok((status, body)) => {
                if status == StatusCode::FORBIDDEN {
                    self.renew();
                }
                (status, [(CONTENT_TYPE, "application/json")], body).into_response()
            }
            Err(error) => self.no_answer(error),
        }
    }

    fn no_answer(&self, error: Error) -> Response {
        if matches!(error, Error::Tls { .. }) {
            self.renew();
        }
        let failure = Failure::from(error);
        let told = json!({ "code": failure.code, "message": failure.message });
        (StatusCode::BAD_GATEWAY, axum::Json(told)).into_response()
    }

    async fn follow(&self, path: &str, headers: &HeaderMap) -> Response {
        let last_id = headers.get("last-event-id").and_then(|id| id.to_str().ok());
        match self.client().ask_for_events(path, last_id).await {
            Ok(answer) => {
                let kind = answer.headers().get(CONTENT_TYPE).cloned();
                let kind = kind.map(|kind| [(CONTENT_TYPE, kind)]);
                (answer.status(), kind, Body::new(answer.into_body())).into_response()
            }
            Err(error) => self.no_answer(error),
        }
    }
}

type Asked = State<Arc<Daemon>>;

pub(super) fn router(daemon: Arc<Daemon>) -> Router {
    let plain = ["/v1/node", "/v1/vms", "/v1/migrations", "/v1/forks"];
    let router = plain.into_iter().fold(Router::new(), |router, path| {
        router.route(path, get(move |State(daemon): Asked| async move { daemon.ask(path).await }))
    });
    router
        .route("/v1/vms/{name}/tree", get(tree))
        .route("/v1/migrations/{id}/events", get(events))
        .with_state(daemon)
}

async fn tree(State(daemon): Asked, Path(name): Path<String>, RawQuery(query): RawQuery) -> Response {
    let ask = if query.as_deref() == Some("ask=true") { "?ask=true" } else { "" };
    daemon.ask(&format!("/v1/vms/{}/tree{ask}", vmove_client::encoded(&name))).await
}

async fn events(State(daemon): Asked, Path(id): Path<String>, headers: HeaderMap) -> Response {
    daemon.follow(&format!("/v1/migrations/{}/events", vmove_client::encoded(&id)), &headers).await
}
