//! Requests over TCP or a Unix socket, by connections that are kept.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// A server that takes longer for a connection, TLS included, is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A host that says nothing for so long while it is waited for is gone.
const SILENCE: Duration = Duration::from_secs(30);
/// Idle connections that are kept.
const KEPT_CONNECTIONS: usize = 32;
/// Characters that need no encoding anywhere in a URI.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A text as one segment of a path, or as a value of a query: `two words` becomes `two%20words`.
#[must_use]
pub fn encoded(text: &str) -> String {
    utf8_percent_encode(text, ENCODED).to_string()
}

/// Where a server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// `host:port`, plain HTTP.
    Tcp(String),
    /// `host:port`, HTTP over TLS.
    Tls(String),
    /// A Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}"),
            Self::Tls(address) => write!(f, "https://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A text that is not an [`Endpoint`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected http://HOST:PORT, https://HOST:PORT or unix:/PATH, found \"{0}\"")]
pub struct BadEndpoint(String);

impl FromStr for Endpoint {
    type Err = BadEndpoint;

    fn from_str(text: &str) -> Result<Self, BadEndpoint> {
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(Self::Unix(Path::new(path).to_owned()));
        }
        if text.starts_with('/') {
            return Ok(Self::Unix(Path::new(text).to_owned()));
        }
        let https = text.strip_prefix("https://");
        let address = https.or_else(|| text.strip_prefix("http://")).unwrap_or(text).trim_end_matches('/');
        let port = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        if port.is_none() || address.contains('/') {
            return Err(BadEndpoint(text.to_owned()));
        }
        Ok(if https.is_some() { Self::Tls(address.to_owned()) } else { Self::Tcp(address.to_owned()) })
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// There is no connection, so the server has not seen the request.
    #[error("{endpoint}: {source}")]
    Connect {
        /// Where the server should be.
        endpoint: Endpoint,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The server broke the connection off before it took a request.
    #[error("{endpoint}: {source}")]
    Handshake {
        /// Where the server is.
        endpoint: Endpoint,
        /// What went wrong.
        source: hyper::Error,
    },
    /// The request cannot be written, so the server has not seen it.
    #[error("the request cannot be sent: {0}")]
    Request(#[from] hyper::http::Error),
    /// The connection broke after the server may have seen the request.
    #[error("{0}")]
    Lost(#[source] hyper::Error),
    /// The server may have seen the request, and has not answered in time.
    #[error("{endpoint} has not answered in {} s", .after.as_secs_f32())]
    Timeout {
        /// Where the server is.
        endpoint: Endpoint,
        /// How long the answer was waited for.
        after: Duration,
    },
}

impl HttpError {
    /// Whether the server may have acted on the request.
    #[must_use]
    pub const fn may_have_been_seen(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Handshake { .. } | Self::Request(_) => false,
            Self::Lost(_) | Self::Timeout { .. } => true,
        }
    }
}

type Sender = SendRequest<Full<Bytes>>;
/// What a connection ends with.
type Served = JoinHandle<Result<(), hyper::Error>>;

/// A client of one server. Clones share its connections.
#[derive(Debug, Clone)]
pub struct HttpClient {
    endpoint: Endpoint,
    authorization: Option<Arc<str>>,
    tls: Option<Arc<ClientConfig>>,
    server_name: Option<ServerName<'static>>,
    timeout: Duration,
    idle: Arc<Mutex<Vec<Sender>>>,
}

impl HttpClient {
    /// A client that gives a request `timeout` to be answered.
    #[must_use]
    pub fn new(endpoint: Endpoint, timeout: Duration) -> Self {
        Self { endpoint, authorization: None, tls: None, server_name: None, timeout, idle: Arc::default() }
    }

    /// Sends this bearer token with every request.
    #[must_use]
    pub fn with_token(mut self, token: Option<&str>) -> Self {
        self.authorization = token.map(|token| format!("Bearer {token}").into());
        self
    }

    /// Sends this value of the header `authorization` with every request, for servers that take other words than tokens.
    #[must_use]
    pub fn with_authorization(mut self, value: Option<&str>) -> Self {
        self.authorization = value.map(Arc::from);
        self
    }

    /// Checks servers at `https` endpoints in this way ([`crate::tls::client_config`]).
    #[must_use]
    pub fn with_tls(mut self, tls: Option<Arc<ClientConfig>>) -> Self {
        self.tls = tls;
        self
    }

    /// Expects this name in the certificate of an `https` endpoint, instead of its host.
    #[must_use]
    pub fn with_server_name(mut self, name: Option<ServerName<'static>>) -> Self {
        self.server_name = name;
        self
    }

    /// Where the server is.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Sends a JSON request and gives the whole answer.
    ///
    /// # Errors
    /// No connection, or no answer in time.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(StatusCode, Bytes), HttpError> {
        let whole = async {
            let (response, sender) = self.start(method, path, body, &[]).await?;
            let status = response.status();
            let bytes = response.into_body().collect().await.map_err(HttpError::Lost)?.to_bytes();
            self.keep(sender);
            Ok((status, bytes))
        };
        match tokio::time::timeout(self.timeout, whole).await {
            Ok(answer) => answer,
            Err(_) => Err(self.timed_out()),
        }
    }

    /// Sends a request whose answer is a stream without an end. Only its beginning must come in time.
    ///
    /// # Errors
    /// No connection, or no beginning of an answer in time.
    pub async fn stream(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, HttpError> {
        self.streamed(method, path, body, &[]).await
    }

    /// Asks for a stream of server-sent events; `last_id` is that of the last event that is there already.
    ///
    /// # Errors
    /// No connection, no beginning of an answer in time, or an ID that cannot be sent.
    pub async fn events(&self, path: &str, last_id: Option<&str>) -> Result<Response<Incoming>, HttpError> {
        let last_id = last_id.map(|id| ("last-event-id", id));
        let headers: Vec<_> = [("accept", "text/event-stream")].into_iter().chain(last_id).collect();
        self.streamed(Method::GET, path, Bytes::new(), &headers).await
    }

    async fn streamed(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        headers: &[(&str, &str)],
    ) -> Result<Response<Incoming>, HttpError> {
        match tokio::time::timeout(self.timeout, self.start(method, path, body, headers)).await {
            Ok(answer) => answer.map(|(response, _)| response),
            Err(_) => Err(self.timed_out()),
        }
    }

    async fn start(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        headers: &[(&str, &str)],
    ) -> Result<(Response<Incoming>, Sender), HttpError> {
        let host = match &self.endpoint {
            Endpoint::Tcp(address) | Endpoint::Tls(address) => address.as_str(),
            Endpoint::Unix(_) => "localhost",
        };
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", host)
            .header("content-type", "application/json");
        if let Some(value) = &self.authorization {
            request = request.header("authorization", value.as_ref());
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut request = request.body(Full::new(body))?;
        // A kept connection may have been closed meanwhile: then the request was not sent, and comes back.
        while let Some(mut sender) = self.kept() {
            match sender.try_send_request(request).await {
                Ok(response) => return Ok((response, sender)),
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(HttpError::Lost(error.into_error())),
                },
            }
        }
        let (mut sender, connection) = self.connect().await?;
        match sender.send_request(request).await {
            Ok(response) => Ok((response, sender)),
            // The connection ended before it took the request, and it alone knows why: the server may have refused our certificate.
            Err(error) if error.is_canceled() => {
                let why = connection.await.ok().and_then(Result::err);
                Err(HttpError::Lost(why.unwrap_or(error)))
            }
            Err(error) => Err(HttpError::Lost(error)),
        }
    }

    fn timed_out(&self) -> HttpError {
        HttpError::Timeout { endpoint: self.endpoint.clone(), after: self.timeout }
    }

    async fn connect(&self) -> Result<(Sender, Served), HttpError> {
        let refused = |source| HttpError::Connect { endpoint: self.endpoint.clone(), source };
        let broken = |source| HttpError::Handshake { endpoint: self.endpoint.clone(), source };
        match &self.endpoint {
            Endpoint::Tcp(address) => {
                let stream = in_time(connect_tcp(address)).await.map_err(refused)?;
                handshake(TokioIo::new(stream)).await.map_err(broken)
            }
            Endpoint::Tls(address) => {
                let stream = in_time(self.connect_tls(address)).await.map_err(refused)?;
                handshake(TokioIo::new(stream)).await.map_err(broken)
            }
            Endpoint::Unix(path) => {
                let stream = UnixStream::connect(path).await.map_err(refused)?;
                handshake(TokioIo::new(stream)).await.map_err(broken)
            }
        }
    }

    async fn connect_tls(&self, address: &str) -> io::Result<TlsStream<TcpStream>> {
        let tls = self.tls.clone().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "expected a certificate authority for https, found none",
            )
        })?;
        let name = match &self.server_name {
            Some(name) => name.clone(),
            None => host_of(address)?,
        };
        let stream = connect_tcp(address).await?;
        TlsConnector::from(tls).connect(name, stream).await
    }

    fn kept(&self) -> Option<Sender> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(sender) = idle.pop() {
            if sender.is_ready() {
                return Some(sender);
            }
        }
        None
    }

    fn keep(&self, sender: Sender) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < KEPT_CONNECTIONS && !sender.is_closed() {
            idle.push(sender);
        }
    }
}

async fn in_time<T>(connecting: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let late = |_| {
        io::Error::new(io::ErrorKind::TimedOut, format!("no connection in {} s", CONNECT_TIMEOUT.as_secs()))
    };
    tokio::time::timeout(CONNECT_TIMEOUT, connecting).await.map_err(late)?
}

async fn connect_tcp(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    let _ = stream.set_nodelay(true);
    // A host that loses its power says nothing, and an answer may take any time.
    let _ = notice_death(&stream);
    Ok(stream)
}

fn notice_death(stream: &TcpStream) -> rustix::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_tcp_user_timeout(stream, SILENCE.as_millis().try_into().unwrap_or(u32::MAX))?;
    sockopt::set_tcp_keepidle(stream, SILENCE / 2)?;
    sockopt::set_tcp_keepintvl(stream, SILENCE / 10)?;
    sockopt::set_socket_keepalive(stream, true)
}

/// The name that the certificate of a server at `host:port` must have.
fn host_of(address: &str) -> io::Result<ServerName<'static>> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    ServerName::try_from(host.to_owned()).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

async fn handshake<S>(stream: TokioIo<S>) -> Result<(Sender, Served), hyper::Error>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = hyper::client::conn::http1::handshake(stream).await?;
    Ok((sender, tokio::spawn(connection)))
}

/// Reads JSON values, one a line, from a streamed answer.
#[derive(Debug)]
pub struct Lines {
    body: Incoming,
    buffer: Vec<u8>,
    searched: usize,
}

impl Lines {
    /// The lines of an answer.
    #[must_use]
    pub fn new(response: Response<Incoming>) -> Self {
        Self { body: response.into_body(), buffer: Vec::new(), searched: 0 }
    }

    /// Everything that is left, as it is.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn rest(&mut self) -> Result<Vec<u8>, HttpError> {
        self.searched = 0;
        while let Some(frame) = self.body.frame().await {
            let frame = frame.map_err(HttpError::Lost)?;
            self.buffer.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
        }
        Ok(std::mem::take(&mut self.buffer))
    }

    /// The next line that is not empty; `None` when the server ended the stream.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, HttpError> {
        loop {
            if let Some(end) = self.buffer[self.searched..].iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=self.searched + end).collect();
                self.searched = 0;
                if !line.trim_ascii().is_empty() {
                    return Ok(Some(line));
                }
                continue;
            }
            self.searched = self.buffer.len();
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(HttpError::Lost(error)),
                Some(Ok(frame)) => self.buffer.extend_from_slice(frame.data_ref().map_or(&[][..], |d| d)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_told_apart() {
        assert_eq!("http://127.0.0.1:2379/".parse(), Ok(Endpoint::Tcp("127.0.0.1:2379".into())));
        assert_eq!("https://b.example:7430".parse(), Ok(Endpoint::Tls("b.example:7430".into())));
        assert_eq!("unix:/run/b.sock".parse(), Ok(Endpoint::Unix("/run/b.sock".into())));
        assert_eq!("/run/b.sock".parse(), Ok(Endpoint::Unix("/run/b.sock".into())));
        for bad in ["https://a", "a", "http://a", "a:1/b", "a:99999"] {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
    }

    #[test]
    fn names_of_any_script_become_one_segment() {
        assert_eq!(encoded("two words"), "two%20words");
        assert_eq!(encoded("機械?#%"), "%E6%A9%9F%E6%A2%B0%3F%23%25");
        assert_eq!(encoded("a&b=c+d"), "a%26b%3Dc%2Bd");
    }
}
