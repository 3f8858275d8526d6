//! Serves HTTP over TCP, with or without TLS.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// A client gets so long for the handshake of TLS.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// After a connection could not be accepted: trying again at once would only spin.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(100);

/// Serves a router until the task is dropped.
pub async fn serve(listener: TcpListener, tls: Option<Arc<ServerConfig>>, router: Router) {
    let tls = tls.map(TlsAcceptor::from);
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let (tls, router) = (tls.clone(), router.clone());
                tokio::spawn(async move {
                    if let Err(error) = connection(stream, tls, router).await {
                        tracing::debug!(%from, %error, "a connection has ended");
                    }
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

async fn connection(stream: TcpStream, tls: Option<TlsAcceptor>, router: Router) -> Result<(), Broken> {
    stream.set_nodelay(true)?;
    match tls {
        None => http(stream, router).await,
        Some(tls) => http(tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await??, router).await,
    }
}

async fn http<S>(stream: S, router: Router) -> Result<(), Broken>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new());
    http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).await?;
    Ok(())
}
