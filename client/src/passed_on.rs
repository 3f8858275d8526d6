//! Answers as the daemon gave them, for who passes them on.

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::{Method, Response, StatusCode};

use crate::{Client, Error};

/// Questions whose answers are not read here: what a newer daemon says more is not lost. A refusal is an answer, too.
impl Client {
    /// The answer to `GET path`, such as `/v1/vms`.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn ask(&self, path: &str) -> Result<(StatusCode, Bytes), Error> {
        self.0.whole(Method::GET, path).await
    }

    /// The answer to `GET path` as a stream of server-sent events, such as of `/v1/migrations/ID/events`. `last_id`: the ID of the last event that the
    /// receiver has.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn ask_for_events(
        &self,
        path: &str,
        last_id: Option<&str>,
    ) -> Result<Response<Incoming>, Error> {
        self.0.events(path, last_id).await
    }
}
