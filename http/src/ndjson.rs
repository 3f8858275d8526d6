//! Streams of JSON values, one a line (`application/x-ndjson`).

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::body::Frame;
use serde::Serialize;
use tokio::sync::mpsc;

/// Lines that wait for a slow client.
const QUEUED_LINES: usize = 4;

/// Sends the lines of a stream. The stream ends when it is dropped.
#[derive(Debug, Clone)]
pub struct LineSender(mpsc::Sender<Bytes>);

impl LineSender {
    /// Sends a value as a line. Returns whether the client still listens.
    pub async fn send<T: Serialize + Sync>(&self, value: &T) -> bool {
        let Ok(mut line) = serde_json::to_vec(value) else { return false };
        line.push(b'\n');
        self.0.send(line.into()).await.is_ok()
    }

    /// Returns when the client has gone.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}

/// An answer that is a stream, and what its lines are sent by.
#[must_use]
pub fn stream() -> (LineSender, Response) {
    let (sender, lines) = mpsc::channel(QUEUED_LINES);
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson"), (header::CACHE_CONTROL, "no-store")];
    (LineSender(sender), (kind, Body::new(LineBody(lines))).into_response())
}

/// A body that ends when its sender is dropped.
struct LineBody(mpsc::Receiver<Bytes>);

impl hyper::body::Body for LineBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|line| line.map(|bytes| Ok(Frame::data(bytes))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_value_is_a_line_until_the_sender_is_dropped() {
        let (sender, response) = stream();
        tokio::spawn(async move {
            assert!(sender.send(&1).await && sender.send(&"a\nb").await);
        });
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        assert_eq!(body, "1\n\"a\\nb\"\n");
    }

    #[tokio::test]
    async fn a_client_that_has_gone_is_noticed() {
        let (sender, response) = stream();
        drop(response);
        sender.closed().await;
        assert!(!sender.send(&1).await);
    }
}
