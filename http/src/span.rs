//! A span for each request.

use std::time::Instant;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument;

/// Handles a request inside the span `request` with its method and path. A layer: `axum::middleware::from_fn(span::of_request)`.
pub async fn of_request(request: Request, next: Next) -> Response {
    let span = tracing::info_span!("request", method = %request.method(), path = request.uri().path());
    async {
        let begun = Instant::now();
        let response = next.run(request).await;
        let (status, took) = (response.status().as_u16(), begun.elapsed());
        tracing::debug!(status, ms = took.as_secs_f64() * 1e3, "answered");
        response
    }
    .instrument(span)
    .await
}
