//! Serves HTTP over TCP, with or without TLS, within bounds: of connections, and of the time that a client may let the server wait.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

/// What clients may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Connections at once. Further ones wait until one of these has ended.
    pub connections: usize,
    /// For the handshake of TLS.
    pub handshake: Duration,
    /// For a request up to the end of its headers; a connection that is kept without requests ends after it, too.
    pub headers: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { connections: 512, handshake: Duration::from_secs(10), headers: Duration::from_secs(30) }
    }
}

/// After a connection could not be accepted: trying again at once would only spin.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(100);

/// Serves a router until the task is dropped.
pub async fn serve(listener: TcpListener, tls: Option<Arc<ServerConfig>>, router: Router, bounds: Bounds) {
    let tls = tls.map(TlsAcceptor::from);
    let connections = Arc::new(Semaphore::new(bounds.connections));
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, from)) => {
                let (tls, router) = (tls.clone(), router.clone());
                tokio::spawn(async move {
                    if let Err(error) = connection(stream, tls, router, bounds).await {
                        tracing::debug!(%from, %error, "a connection has ended");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::error!(%error, "could not accept a connection");
                tokio::time::sleep(ACCEPT_INTERVAL).await;
            }
        }
    }
}

type Broken = Box<dyn std::error::Error + Send + Sync>;

async fn connection(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    router: Router,
    bounds: Bounds,
) -> Result<(), Broken> {
    stream.set_nodelay(true)?;
    let Some(tls) = tls else { return http(stream, router, bounds).await };
    let stream = tokio::time::timeout(bounds.handshake, tls.accept(stream)).await??;
    http(stream, router, bounds).await
}

async fn http<S>(stream: S, router: Router, bounds: Bounds) -> Result<(), Broken>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(bounds.headers);
    http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::client::{Endpoint, HttpClient, HttpError};

    const LONG: Duration = Duration::from_secs(120);

    /// A server that answers `/`, and its address.
    async fn server(connections: usize, headers: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(|| async { "here" }));
        let bounds = Bounds { connections, headers, ..Bounds::default() };
        tokio::spawn(serve(listener, None, router, bounds));
        address
    }

    async fn ask(address: SocketAddr, timeout: Duration) -> Result<u16, HttpError> {
        let client = HttpClient::new(Endpoint::Tcp(address.to_string()), timeout);
        let answer = client.send(hyper::Method::GET, "/", bytes::Bytes::new()).await;
        answer.map(|(status, _)| status.as_u16())
    }

    #[tokio::test]
    async fn further_connections_wait_until_one_has_ended() {
        let address = server(2, LONG).await;
        let mut open = Vec::new();
        for _ in 0..2 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            // Its request is answered, so the server has taken the connection.
            stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            stream.read_u8().await.unwrap();
            open.push(stream);
        }
        let third = ask(address, Duration::from_millis(500)).await;
        assert!(matches!(third, Err(HttpError::Timeout { .. })), "{third:?}");
        open.pop();
        assert_eq!(ask(address, LONG).await.unwrap(), 200);
    }

    #[tokio::test]
    async fn who_says_nothing_or_half_of_it_is_cut_off() {
        let address = server(1, Duration::from_millis(200)).await;
        for said in ["", "GET / HTTP/1.1\r\nhost: x\r\nx-slow: "] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(said.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            let ended = tokio::time::timeout(LONG, stream.read_to_end(&mut answer)).await;
            assert!(ended.is_ok(), "the server waits for the rest of {said:?}");
        }
        assert_eq!(ask(address, LONG).await.unwrap(), 200);
    }
}
