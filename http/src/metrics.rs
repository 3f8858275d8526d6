//! Metrics as Prometheus reads them.

use axum::Router;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;

/// An answer with metrics in Prometheus' text format.
#[must_use]
pub fn answer(text: String) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// Serves `/metrics` with what `render` returns at the time.
pub async fn serve(listener: TcpListener, render: impl Fn() -> String + Clone + Send + Sync + 'static) {
    let handler = move || async move { answer(render()) };
    if let Err(error) = axum::serve(listener, Router::new().route("/metrics", get(handler))).await {
        tracing::error!(%error, "metrics are no longer served");
    }
}
