//! Snapshots of something that is under way, as they come, until it has ended: JSON values, one a line (`application/x-ndjson`), or server-sent events
//! (`text/event-stream`, [HTML standard, 9.2](https://html.spec.whatwg.org/multipage/server-sent-events.html)) for who asks for them.
//!
//! A snapshot is whole, so a client that has missed some lacks nothing once it has the newest. The ID of an event is a checksum of its snapshot: who comes
//! back with the ID of the newest is not sent it again, and is answered 204 when there will be no other. Browsers and libraries stop asking then. Any other
//! ID, also one of long ago, gives the newest snapshot.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::body::Frame;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::{Interval, interval};
use xxhash_rust::xxh3::xxh3_64;

/// Snapshots that wait for a slow client.
const QUEUED: usize = 4;
/// Proxies take a connection on which nothing comes for a dead one. Lines need none: their clients are on this host or wait.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
const KEEP_ALIVE_COMMENT: &[u8] = b": still here\n\n";

/// In which form a client wants snapshots, and what it has already.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    events: bool,
    last_id: Option<String>,
}

impl<S: Sync> FromRequestParts<S> for Wanted {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        Ok(Self::of(&parts.headers))
    }
}

impl Wanted {
    fn of(headers: &HeaderMap) -> Self {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let accepts = text(header::ACCEPT).unwrap_or_default();
        let events = accepts.split(',').any(|kind| kind.trim().starts_with("text/event-stream"));
        let last_id = text(header::HeaderName::from_static("last-event-id")).map(str::to_owned);
        Self { events, last_id: last_id.filter(|_| events) }
    }

    /// The answer to a client, by the snapshot of this moment: a stream, and what it is sent by; or nothing more, if that is the last snapshot and the
    /// client has it.
    pub fn begin<T: Serialize>(self, now: &T, is_last: bool) -> (Option<Sender>, Response) {
        let has = |json: Vec<u8>| self.last_id.as_ref().is_some_and(|id| *id == id_of(&json));
        if is_last && serde_json::to_vec(now).is_ok_and(has) {
            return (None, StatusCode::NO_CONTENT.into_response());
        }
        let (sender, answer) = self.stream();
        (Some(sender), answer)
    }

    /// An answer that is a stream, and what its snapshots are sent by.
    #[must_use]
    pub fn stream(self) -> (Sender, Response) {
        let (sender, parts) = mpsc::channel(QUEUED);
        let kind = if self.events { "text/event-stream" } else { "application/x-ndjson" };
        let keep_alive = self.events.then(|| interval(KEEP_ALIVE));
        let headers = [(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "no-store")];
        let body = Body::new(Stream { parts, keep_alive });
        (Sender { parts: sender, wanted: self }, (headers, body).into_response())
    }
}

/// Of a snapshot as JSON.
fn id_of(json: &[u8]) -> String {
    format!("{:016x}", xxh3_64(json))
}

/// Sends the snapshots of a stream. The stream ends when it is dropped.
#[derive(Debug)]
pub struct Sender {
    parts: mpsc::Sender<Bytes>,
    wanted: Wanted,
}

impl Sender {
    /// Sends a snapshot, unless it is the one that the client has. Returns whether the client still listens.
    pub async fn send<T: Serialize + Sync>(&mut self, snapshot: &T) -> bool {
        let Ok(mut json) = serde_json::to_vec(snapshot) else { return false };
        if self.wanted.events {
            let id = id_of(&json);
            if self.wanted.last_id.as_ref() == Some(&id) {
                return !self.parts.is_closed();
            }
            // JSON as it is written here has no line feed.
            json.splice(0..0, format!("id: {id}\ndata: ").into_bytes());
            json.push(b'\n');
            self.wanted.last_id = Some(id);
        }
        json.push(b'\n');
        self.parts.send(json.into()).await.is_ok()
    }

    /// Returns when the client has gone.
    pub async fn closed(&self) {
        self.parts.closed().await;
    }
}

/// A body that ends when its sender is dropped.
struct Stream {
    parts: mpsc::Receiver<Bytes>,
    keep_alive: Option<Interval>,
}

impl hyper::body::Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Poll::Ready(part) = self.parts.poll_recv(context) {
            if let Some(keep_alive) = &mut self.keep_alive {
                keep_alive.reset();
            }
            return Poll::Ready(part.map(|bytes| Ok(Frame::data(bytes))));
        }
        let Some(keep_alive) = &mut self.keep_alive else { return Poll::Pending };
        keep_alive.poll_tick(context).map(|_| Some(Ok(Frame::data(Bytes::from_static(KEEP_ALIVE_COMMENT)))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn body(response: Response) -> String {
        let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    fn wanted(headers: &[(&'static str, &str)]) -> Wanted {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        Wanted::of(&headers.collect())
    }

    /// What a client with these headers gets of the snapshots 1 and "a\nb".
    async fn told(headers: &[(&'static str, &str)]) -> String {
        let (mut sender, response) = wanted(headers).stream();
        tokio::spawn(async move {
            // One that has not changed is not an event; a line it is.
            assert!(sender.send(&1).await && sender.send(&"a\nb").await);
        });
        body(response).await
    }

    const SSE: (&str, &str) = ("accept", "application/json;q=0.5, text/event-stream");

    #[tokio::test]
    async fn each_snapshot_is_a_line_until_the_sender_is_dropped() {
        assert_eq!(told(&[]).await, "1\n\"a\\nb\"\n");
        assert_eq!(told(&[("last-event-id", &id_of(b"1"))]).await, "1\n\"a\\nb\"\n", "lines have no IDs");
    }

    #[tokio::test]
    async fn events_have_ids_and_one_that_the_client_has_is_not_sent_again() {
        let (one, two) = (id_of(b"1"), id_of(br#""a\nb""#));
        let second = format!("id: {two}\ndata: \"a\\nb\"\n\n");
        // A stream begins with a comment, by which a client knows that it is open.
        let whole = format!(": still here\n\nid: {one}\ndata: 1\n\n{second}");
        let all = told(&[SSE]).await;
        assert!(all == whole || all == whole[": still here\n\n".len()..], "{all}");
        assert!(told(&[SSE, ("last-event-id", &one)]).await.ends_with(&second));
        assert!(!told(&[SSE, ("last-event-id", &one)]).await.contains("data: 1"));
        // What is no ID of these gives everything.
        assert!(told(&[SSE, ("last-event-id", "0")]).await.ends_with(&whole[": still here\n\n".len()..]));
    }

    #[tokio::test]
    async fn what_has_not_changed_is_no_event() {
        let (mut sender, response) = wanted(&[SSE, ("last-event-id", &id_of(b"1"))]).stream();
        tokio::spawn(async move {
            for snapshot in [1, 2, 2, 1] {
                assert!(sender.send(&snapshot).await);
            }
        });
        let told = body(response).await;
        let data: Vec<&str> = told.lines().filter(|line| line.starts_with("data")).collect();
        assert_eq!(data, ["data: 2", "data: 1"]);
    }

    #[tokio::test]
    async fn who_has_the_last_one_is_told_to_ask_no_more() {
        let id = id_of(b"7");
        let has = [SSE, ("last-event-id", id.as_str())];
        let (sender, answer) = wanted(&has).begin(&7, true);
        assert_eq!((sender.is_none(), answer.status()), (true, StatusCode::NO_CONTENT));
        assert!(wanted(&has).begin(&8, true).0.is_some());
        assert!(wanted(&has).begin(&7, false).0.is_some(), "there will be others");
        assert!(wanted(&has[1..]).begin(&7, true).0.is_some(), "lines have no IDs");
    }

    #[tokio::test]
    async fn a_client_that_has_gone_is_noticed() {
        for headers in [&[][..], &[SSE]] {
            let (mut sender, response) = wanted(headers).stream();
            drop(response);
            sender.closed().await;
            assert!(!sender.send(&1).await);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_of_events_is_kept_open() {
        let (mut sender, response) = wanted(&[SSE]).stream();
        tokio::spawn(async move {
            tokio::time::sleep(KEEP_ALIVE * 2 + KEEP_ALIVE / 2).await;
            sender.send(&1).await;
        });
        let told = body(response).await;
        assert!(told.matches(": still here").count() >= 2 && told.contains("data: 1"), "{told}");
    }
}
