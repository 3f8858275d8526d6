//! HTTP to the daemon over its Unix socket.

use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::api::problem::{Code, Problem};

/// A daemon, as seen from `vmove`. One connection per request: they are few.
#[derive(Debug, Clone)]
pub struct Client {
    control: PathBuf,
}

impl Client {
    pub fn new(control: &Path) -> Self {
        Self { control: control.to_owned() }
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Problem> {
        self.request(Method::GET, path, None::<&()>).await
    }

    pub async fn post<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: Option<&B>,
    ) -> Result<T, Problem> {
        self.request(Method::POST, path, body).await
    }

    pub async fn put<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T, Problem> {
        self.request(Method::PUT, path, Some(body)).await
    }

    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, Problem> {
        self.request(Method::DELETE, path, None::<&()>).await
    }

    /// A stream of JSON lines.
    pub async fn lines(&self, path: &str) -> Result<Lines, Problem> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        let response = self.good(response).await?;
        Ok(Lines { body: response.into_body(), buffer: Vec::new(), control: self.control.clone() })
    }

    async fn request<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&B>,
    ) -> Result<T, Problem> {
        let body = match body {
            Some(body) => {
                Bytes::from(serde_json::to_vec(body).map_err(|e| Problem::from_error(Code::Internal, &e))?)
            }
            None => Bytes::new(),
        };
        let response = self.send(method, path, body).await?;
        let response = self.good(response).await?;
        let text = response.into_body().collect().await.map_err(|e| self.lost(&e))?.to_bytes();
        serde_json::from_slice(&text).map_err(|e| self.not_vmoved(&e.to_string()))
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, Problem> {
        let stream = UnixStream::connect(&self.control).await.map_err(|e| self.unreachable(&e))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| self.lost(&e))?;
        // Ends with the response or with the sender, whichever is later.
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "vmoved")
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|e| Problem::from_error(Code::Internal, &e))?;
        sender.send_request(request).await.map_err(|e| self.lost(&e))
    }

    /// The response if it is a success, the daemon's problem otherwise.
    async fn good(&self, response: Response<Incoming>) -> Result<Response<Incoming>, Problem> {
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let text = response.into_body().collect().await.map_err(|e| self.lost(&e))?.to_bytes();
        Err(serde_json::from_slice(&text)
            .unwrap_or_else(|_| self.not_vmoved(&format!("HTTP status {status}"))))
    }

    fn unreachable(&self, error: &io::Error) -> Problem {
        let socket = self.control.display();
        let next = match error.kind() {
            io::ErrorKind::PermissionDenied => {
                "only the user that vmoved runs as (root, normally) may use it"
            }
            _ => "start it (systemctl start vmoved), or name its socket by --control or VMOVE_CONTROL",
        };
        Problem::new(Code::DaemonUnreachable, format!("Expected vmoved at {socket}, found: {error}; {next}"))
    }

    fn lost(&self, error: &dyn std::error::Error) -> Problem {
        let socket = self.control.display();
        Problem::new(
            Code::DaemonUnreachable,
            format!(
                "Lost the connection to vmoved at {socket} ({error}): see its log (journalctl -u vmoved); \
                     guests and migrations go on, or are taken up when it runs again"
            ),
        )
    }

    fn not_vmoved(&self, found: &str) -> Problem {
        let socket = self.control.display();
        Problem::new(
            Code::DaemonUnreachable,
            format!(
                "Expected vmoved of this version at {socket}, found something else ({found}): check --control"
            ),
        )
    }
}

/// Lines of a streamed answer.
#[derive(Debug)]
pub struct Lines {
    body: Incoming,
    buffer: Vec<u8>,
    control: PathBuf,
}

impl Lines {
    /// The next value; `None` when the daemon has ended the stream.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Problem> {
        let client = Client { control: self.control.clone() };
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(|e| client.not_vmoved(&e.to_string()));
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(client.lost(&error)),
                Some(Ok(frame)) => self.buffer.extend_from_slice(frame.data_ref().map_or(&[][..], |d| d)),
            }
        }
    }
}
