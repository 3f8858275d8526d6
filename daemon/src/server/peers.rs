//! The peer port: daemons and HTTP on one TCP port, told apart by their first bytes.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::ConnectInfo;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use metrics::counter;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use vmove_clone::engine::{ForkEngine, read_opening};
use vmove_migrate::domains::Carrier;
use vmove_migrate::engine::Engine;
use vmove_node::peer::Link;
use vmove_node::peer::hello::{MAGIC, answer};
use vmove_node::peer::{
    BoxedStream, Caller, Hello, HelloError, LinkKind, PROTOCOL_VERSION, Status, Stream, Token,
};
use vmove_types::problem::chain;

use super::access::{Access, Certificate, NotANode, Origin};
use super::dialer::notice_death;
use super::endpoint::EndpointError;
use super::fabric_check::Visits;
use super::fabrics::Fabrics;
use super::places::{Limits, Place, Places};
use super::tls::{ALPN_HTTP, Tls};

/// For TLS and greeting together. A peer that means it needs milliseconds.
const GREETING: Duration = Duration::from_secs(10);
/// Connections that have not greeted yet.
const NOT_GREETED: Limits = Limits { all: 512, of_one_address: 64 };
/// HTTP connections. They have places of their own: whoever asks must not keep peers out.
const HTTP: Limits = Limits { all: 256, of_one_address: 64 };
/// First byte of a TLS record that begins a handshake.
const TLS_HANDSHAKE: u8 = 0x16;
/// A fatal `handshake_failure`, for a client that expects TLS where there is none.
const TLS_REFUSAL: [u8; 7] = [0x15, 3, 1, 0, 2, 2, 40];

/// A connection from another daemon.
enum Wire {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Wire {
    fn stream(&mut self) -> &mut dyn Stream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => stream.as_mut(),
        }
    }

    fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }

    fn boxed(self) -> BoxedStream {
        match self {
            Self::Plain(stream) => Box::new(stream),
            Self::Tls(stream) => stream,
        }
    }

    /// The socket, and what encrypts it.
    fn apart(self) -> (TcpStream, Option<rustls::Connection>) {
        match self {
            Self::Plain(stream) => (stream, None),
            Self::Tls(stream) => {
                let (stream, tls) = stream.into_inner();
                (stream, Some(tls.into()))
            }
        }
    }
}

/// What the listeners need to serve a connection.
#[derive(Clone)]
pub struct PeerPort {
    pub engine: Arc<Engine>,
    pub forks: Arc<ForkEngine>,
    /// Answers nodes at which QEMUs of libvirt's wait.
    pub carrier: Arc<Carrier>,
    pub fabrics: Arc<Fabrics>,
    pub tls: Option<Arc<Tls>>,
    /// Which certificates are those of clients, and not of nodes.
    pub access: Arc<Access>,
    /// Answers HTTP, as far as the caller may ask.
    pub router: axum::Router,
    pub places: Arc<Places>,
    pub http_places: Arc<Places>,
    /// Peers that try a fabric.
    pub visits: Visits,
}

impl PeerPort {
    pub fn new(
        engine: Arc<Engine>,
        forks: Arc<ForkEngine>,
        fabrics: Arc<Fabrics>,
        carrier: Arc<Carrier>,
        (tls, access): (Option<Arc<Tls>>, Arc<Access>),
        router: axum::Router,
    ) -> Self {
        Self {
            engine,
            forks,
            carrier,
            fabrics,
            tls,
            access,
            router,
            places: Places::new("that have not greeted", NOT_GREETED),
            http_places: Places::new("for HTTP", HTTP),
            visits: Visits::default(),
        }
    }

    /// Serves the TCP port for ever.
    pub async fn serve_tcp(self, listener: TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    let port = self.clone();
                    let place = self.places.take(from.ip());
                    tokio::spawn(while_it_may_stay(place.must_leave(), port.tcp(stream, from, place)));
                }
                Err(error) => accept_failed(&error).await,
            }
        }
    }

    /// Serves the socket for daemons on the same kernel for ever. Only they can open it: connections are not counted.
    pub async fn serve_unix(self, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let port = self.clone();
                    tokio::spawn(async move { port.unix(stream).await });
                }
                Err(error) => accept_failed(&error).await,
            }
        }
    }

    async fn tcp(self, stream: TcpStream, from: SocketAddr, place: Place) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%from, %error, "peer connection is gone already");
            return;
        }
        let first = match tokio::time::timeout(GREETING, first_bytes(&stream)).await {
            Ok(Ok(first)) => first,
            Ok(Err(_)) | Err(_) => return,
        };
        match (&self.tls, first) {
            (None, First::Greeting) => {
                self.peer(Wire::Plain(stream), Caller::default().from(from.ip().to_canonical()), from, place)
                    .await;
            }
            (None, First::Http) => self.http(stream, Origin::Plain(from), from, place).await,
            (None, First::Tls) => refuse_tls(stream, from).await,
            (Some(tls), First::Tls) => {
                let acceptor = TlsAcceptor::from(tls.configs().server);
                self.tls_peer(acceptor, stream, from, place).await;
            }
            (Some(_), First::Greeting) => refuse_plain_peer(stream, from).await,
            (Some(_), First::Http) => refuse_plain_http(stream).await,
        }
    }

    async fn tls_peer(self, acceptor: TlsAcceptor, stream: TcpStream, from: SocketAddr, place: Place) {
        let accepting = acceptor.accept(stream).into_fallible();
        let stream = match tokio::time::timeout(GREETING, accepting).await {
            Ok(Ok(stream)) => stream,
            Ok(Err((error, mut stream))) => {
                counter!("vmove_peer_connections_total", "result" => "tls_refused").increment(1);
                tracing::warn!(%from, %error, "TLS failed; both nodes need certificates of the same authority");
                // The other end has sent its request already: it must not overtake the reason.
                return drain(&mut stream).await;
            }
            Err(_) => return,
        };
        self.places.know(from.ip());
        let shown = stream.get_ref().1;
        let Some(certificate) = Certificate::of(shown.peer_certificates()) else {
            counter!("vmove_peer_connections_total", "result" => "tls_refused").increment(1);
            return tracing::warn!(%from, "the certificate has a form that cannot be read");
        };
        if shown.alpn_protocol().is_none_or(|protocol| protocol == ALPN_HTTP) {
            let origin = Origin::Tls(Arc::new(certificate), from);
            return self.http(stream, origin, from, place).await;
        }
        if let Err(why) = self.access.check_node(&certificate) {
            return refuse_client(stream, from, &why).await;
        }
        self.peer(
            Wire::Tls(Box::new(stream)),
            certificate.caller().from(from.ip().to_canonical()),
            from,
            place,
        )
        .await;
    }

    /// Another daemon.
    async fn peer(self, mut wire: Wire, caller: Caller, from: SocketAddr, place: Place) {
        let Some(hello) = self.greeted(&mut wire.stream(), &from.to_string()).await else { return };
        let place = self.kept_place(&hello, from, place);
        if matches!(hello.kind, LinkKind::Disk | LinkKind::ForkDisk) {
            notice_death(wire.tcp());
        }
        let link = match hello.kind {
            LinkKind::Control | LinkKind::State | LinkKind::Disk | LinkKind::Frames => {
                Link::Stream(wire.boxed())
            }
            LinkKind::Fork => {
                drop(place);
                return self.forks.serve_order(hello, wire.boxed(), (from.ip().to_canonical(), caller)).await;
            }
            LinkKind::Domain => {
                drop(place);
                return self.carrier.serve(hello, wire.boxed(), (from.ip().to_canonical(), caller)).await;
            }
            LinkKind::ForkDisk => {
                drop(place);
                return self.forks.serve_disk(hello, wire.boxed()).await;
            }
            LinkKind::ForkMemory => {
                let Ok(Ok((class, greeting))) =
                    tokio::time::timeout(GREETING, read_opening(&mut wire.stream())).await
                else {
                    return;
                };
                let (stream, tls) = wire.apart();
                let made = self.fabrics.adopt_as(&hello, class, stream, tls).await;
                let Some(endpoint) = adopted(made, &from.to_string()) else { return };
                return self.forks.accept_memory(&hello, class, greeting, endpoint);
            }
            LinkKind::Urgent | LinkKind::Bulk | LinkKind::Trial => {
                let (stream, tls) = wire.apart();
                let made = self.fabrics.adopt(&hello, stream, tls).await;
                let Some(endpoint) = adopted(made, &from.to_string()) else { return };
                if hello.kind == LinkKind::Trial {
                    return self.visits.receive(&self.fabrics, hello.token, endpoint, &from.to_string());
                }
                Link::Endpoint(endpoint)
            }
        };
        drop(place);
        self.engine.accept(hello, link, caller).await;
    }

    async fn unix(self, mut stream: UnixStream) {
        let from = "this host";
        let Some(hello) = self.greeted(&mut stream, from).await else { return };
        if matches!(hello.kind, LinkKind::Fork | LinkKind::ForkMemory | LinkKind::ForkDisk | LinkKind::Domain)
        {
            return tracing::warn!(
                "a fork is begun on the TCP port, not here, and so is a question for a domain"
            );
        }
        let Some(endpoint) = adopted(self.fabrics.adopt_local(stream, hello.kind.class()).await, from) else {
            return;
        };
        self.engine.accept(hello, Link::Endpoint(endpoint), Caller::default()).await;
    }

    fn wants(&self, hello: &Hello) -> Result<(), (Status, String)> {
        match hello.kind {
            LinkKind::Fork | LinkKind::ForkMemory | LinkKind::ForkDisk => self.forks.wants(hello),
            LinkKind::Domain => Ok(()),
            _ => self.engine.wants(hello),
        }
    }

    /// Frees the place of a connection whose greeting was wanted, if it has shown the secret of a session: then its address is that of a
    /// peer.
    fn kept_place(&self, hello: &Hello, from: SocketAddr, place: Place) -> Option<Place> {
        let secret_shown = !matches!(hello.kind, LinkKind::Trial | LinkKind::Fork | LinkKind::Domain)
            && hello.token != Token::default();
        if !secret_shown {
            return Some(place);
        }
        self.places.know(from.ip());
        None
    }

    /// Reads and answers a greeting; `None` when the connection is not wanted.
    async fn greeted<S>(&self, stream: &mut S, from: &str) -> Option<Hello>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let read = tokio::time::timeout(GREETING, Hello::read(stream)).await.ok()?;
        let (status, text, hello) = match read {
            Ok(mut hello) => match self.wants(&hello) {
                // A secret that nobody has checked must not lead to the memory of the session that has it.
                Ok(()) if hello.kind == LinkKind::Trial => {
                    hello.token = Token::random();
                    (Status::Welcome, String::new(), Some(hello))
                }
                Ok(()) => (Status::Welcome, String::new(), Some(hello)),
                Err((status, text)) => (status, text, None),
            },
            Err(HelloError::Version(found)) => {
                let text = format!("expected protocol version {PROTOCOL_VERSION}, found {found}");
                (Status::OtherVersion, text, None)
            }
            Err(error) => {
                tracing::warn!(%from, %error, "not a usable greeting");
                return None;
            }
        };
        let result = if hello.is_some() { "welcome" } else { "refused" };
        counter!("vmove_peer_connections_total", "result" => result).increment(1);
        if hello.is_none() {
            tracing::warn!(%from, reason = %text, "peer connection refused");
        }
        answer(stream, status, &text).await.ok()?;
        if hello.is_none() {
            drain(stream).await;
        }
        hello
    }

    async fn http<S>(self, stream: S, origin: Origin, from: SocketAddr, place: Place)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        drop(place);
        let place = self.http_places.take(from.ip());
        let must_leave = place.must_leave();
        let service = TowerToHyperService::new(self.router.layer(Extension(ConnectInfo(origin))));
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(hyper_util::rt::TokioTimer::new()).header_read_timeout(GREETING);
        let served = async move {
            let _place = place;
            if let Err(error) = http.serve_connection(TokioIo::new(stream), service).await {
                tracing::debug!(%from, %error, "HTTP connection ended");
            }
        };
        while_it_may_stay(must_leave, served).await;
    }
}

/// Serves a connection, unless it has to give way to another one first.
async fn while_it_may_stay(must_leave: CancellationToken, served: impl Future<Output = ()>) {
    tokio::select! {
        () = must_leave.cancelled() => {}
        () = served => {}
    }
}

/// What a connection begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum First {
    Greeting,
    Tls,
    Http,
}

/// Looks at the first bytes without taking them. Two are enough: no HTTP method begins like the greeting.
async fn first_bytes(stream: &TcpStream) -> std::io::Result<First> {
    let mut bytes = [0; 2];
    let mut patience = 50;
    loop {
        let seen = stream.peek(&mut bytes).await?;
        match (seen, bytes) {
            (0, _) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            (_, [TLS_HANDSHAKE, _]) => return Ok(First::Tls),
            // One byte of a greeting: the rest is on its way, or this is none.
            (1, [first, _]) if first == MAGIC[0] && patience > 0 => {
                patience -= 1;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            (_, both) if both == MAGIC[..2] => return Ok(First::Greeting),
            _ => return Ok(First::Http),
        }
    }
}

/// Tells a peer without TLS, in its own language, that we want it.
async fn refuse_plain_peer(mut stream: TcpStream, from: SocketAddr) {
    tracing::warn!(%from, "peer without TLS refused: this node has TLS, that one runs with --insecure");
    counter!("vmove_peer_connections_total", "result" => "tls_refused").increment(1);
    let text = "this node expects TLS, found none: start both daemons with --tls-cert, --tls-key and --tls-ca, or both with --insecure";
    let _ = answer(&mut stream, Status::Busy, text).await;
    drain(&mut stream).await;
}

/// Tells a client that it may not open sessions between nodes.
async fn refuse_client(mut stream: TlsStream<TcpStream>, from: SocketAddr, why: &NotANode) {
    tracing::warn!(%from, %why, "peer connection refused");
    counter!("vmove_peer_connections_total", "result" => "refused").increment(1);
    let _ = answer(&mut stream, Status::Busy, &why.to_string()).await;
    drain(&mut stream).await;
}

/// Tells a TLS client that there is none here.
async fn refuse_tls(mut stream: TcpStream, from: SocketAddr) {
    tracing::warn!(%from, "TLS connection refused: this node runs with --insecure, that one has TLS");
    counter!("vmove_peer_connections_total", "result" => "tls_refused").increment(1);
    let _ = stream.write_all(&TLS_REFUSAL).await;
    drain(&mut stream).await;
}

async fn refuse_plain_http(mut stream: TcpStream) {
    let _ = stream
        .write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 48\r\nconnection: close\r\n\r\n\
                     This port expects https, with a certificate here")
        .await;
    drain(&mut stream).await;
}

/// Takes what the other end still sends: closing with unread bytes would reset the connection, and the refusal with it.
async fn drain<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) {
    let _ = stream.shutdown().await;
    let mut sink = tokio::io::sink();
    let _ = tokio::time::timeout(Duration::from_secs(1), tokio::io::copy(stream, &mut sink)).await;
}

fn adopted(
    made: Result<Box<dyn vmove_fabric::Endpoint>, EndpointError>,
    from: &str,
) -> Option<Box<dyn vmove_fabric::Endpoint>> {
    made.inspect_err(|why| tracing::warn!(%from, why = %chain(why), "page connection could not be set up"))
        .ok()
}

async fn accept_failed(error: &std::io::Error) {
    tracing::error!(%error, "could not accept a connection");
    // Out of descriptors, most likely: trying again at once would only spin.
    tokio::time::sleep(Duration::from_millis(100)).await;
}
