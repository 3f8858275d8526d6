//! Requests and answers as JSON.

#[cfg(feature = "bridge")]
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::{Method, Response, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use vmove_http::client::{Endpoint, HttpClient, HttpError, Lines};
#[cfg(feature = "bridge")]
use vmove_http::tls::{TlsError, client_config};
use vmove_http::tls_refusal::TlsRefusal;
use vmove_types::problem::ProblemCode;

use crate::Error;

/// A daemon, and the connections to it.
#[derive(Debug, Clone)]
pub(crate) struct Connection {
    http: HttpClient,
    daemon: &'static str,
}

impl Connection {
    pub(crate) fn new(
        endpoint: Endpoint,
        timeout: Duration,
        token: Option<&str>,
        daemon: &'static str,
    ) -> Self {
        Self { http: HttpClient::new(endpoint, timeout).with_token(token), daemon }
    }

    pub(crate) const fn of(http: HttpClient, daemon: &'static str) -> Self {
        Self { http, daemon }
    }

    /// Checks an `https` endpoint by the authorities in this file.
    #[cfg(feature = "bridge")]
    pub(crate) fn with_authority(mut self, authorities: &Path) -> Result<Self, TlsError> {
        self.http = self.http.with_tls(Some(client_config(authorities)?));
        Ok(self)
    }

    pub(crate) async fn get<C: ProblemCode, T: DeserializeOwned>(&self, path: &str) -> Result<T, Error<C>> {
        self.json(Method::GET, path, Bytes::new()).await
    }

    pub(crate) async fn delete<C: ProblemCode, T: DeserializeOwned>(
        &self,
        path: &str,
    ) -> Result<T, Error<C>> {
        self.json(Method::DELETE, path, Bytes::new()).await
    }

    /// A request for an act that needs no body.
    pub(crate) async fn act<C: ProblemCode, T: DeserializeOwned>(&self, path: &str) -> Result<T, Error<C>> {
        self.json(Method::POST, path, Bytes::new()).await
    }

    pub(crate) async fn post<C: ProblemCode, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<T, Error<C>> {
        let body = serde_json::to_vec(body).map_err(Error::Request)?;
        self.json(Method::POST, path, body.into()).await
    }

    pub(crate) async fn put<C: ProblemCode, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<T, Error<C>> {
        let body = serde_json::to_vec(body).map_err(Error::Request)?;
        self.json(Method::PUT, path, body.into()).await
    }

    async fn json<C: ProblemCode, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<T, Error<C>> {
        let answer = self.bytes(method, path, body).await?;
        serde_json::from_slice(&answer).map_err(|error| self.unexpected(error.to_string()))
    }

    /// The body of a successful answer as it is.
    pub(crate) async fn bytes<C: ProblemCode>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Bytes, Error<C>> {
        let (status, answer) =
            self.http.send(method, path, body).await.map_err(|error| self.failed(error))?;
        if status.is_success() { Ok(answer) } else { Err(self.refused(status, &answer)) }
    }

    /// An answer of whatever status, as it is.
    pub(crate) async fn whole<C: ProblemCode>(
        &self,
        method: Method,
        path: &str,
    ) -> Result<(StatusCode, Bytes), Error<C>> {
        self.http.send(method, path, Bytes::new()).await.map_err(|error| self.failed(error))
    }

    /// An answer of whatever status as server-sent events.
    pub(crate) async fn events<C: ProblemCode>(
        &self,
        path: &str,
        last_id: Option<&str>,
    ) -> Result<Response<Incoming>, Error<C>> {
        self.http.events(path, last_id).await.map_err(|error| self.failed(error))
    }

    /// The lines of a streamed answer.
    pub(crate) async fn lines<C: ProblemCode>(&self, path: &str) -> Result<Lines, Error<C>> {
        let sent = self.http.stream(Method::GET, path, Bytes::new()).await;
        let response = sent.map_err(|error| self.failed(error))?;
        let status = response.status();
        let mut lines = Lines::new(response);
        if status.is_success() {
            return Ok(lines);
        }
        let problem = lines.rest().await.map_err(|error| self.failed(error))?;
        Err(self.refused(status, &problem))
    }

    fn refused<C: ProblemCode>(&self, status: StatusCode, body: &[u8]) -> Error<C> {
        serde_json::from_slice(body).map_or_else(|_| self.unexpected(unknown(status, body)), Error::Refused)
    }

    pub(crate) fn failed<C: ProblemCode>(&self, error: HttpError) -> Error<C> {
        let (daemon, endpoint) = (self.daemon, self.http.endpoint().clone());
        if let Some(why) = TlsRefusal::of(&error) {
            return Error::Tls { daemon, endpoint, why };
        }
        match error {
            HttpError::Connect { source, .. } => Error::Unreachable { daemon, endpoint, source },
            source => Error::Lost { daemon, endpoint, source },
        }
    }

    pub(crate) fn unexpected<C: ProblemCode>(&self, found: String) -> Error<C> {
        Error::Unexpected { daemon: self.daemon, endpoint: self.http.endpoint().clone(), found }
    }
}

/// A refusal in words that this version does not know, or none at all.
fn unknown(status: StatusCode, body: &[u8]) -> String {
    let problem: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let word = |key: &str| problem.as_ref().and_then(|problem| problem[key].as_str());
    match (word("code"), word("message")) {
        (Some(code), Some(message)) => format!("HTTP status {status}, {code}: {message}"),
        _ => format!("HTTP status {status}"),
    }
}
