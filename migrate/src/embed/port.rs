//! Connections of an embedded node to others and from them: plain TCP, for control and for pages.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use vmove_fabric::tcp::{TcpFabric, TcpOptions};
use vmove_fabric::{Class, Endpoint, Fabric, FabricKind};
use vmove_node::peer::hello::{answer, read_answer};
use vmove_node::peer::{
    BoxedStream, Caller, Dialer, FabricOffer, Hello, HelloError, Link, LinkError, LinkKind, PROTOCOL_VERSION,
    PeerTarget, Status, Token,
};

use crate::engine::Engine;

/// For reaching a peer, and for its greeting.
const CONNECT: Duration = Duration::from_secs(5);
/// Between two attempts to take a connection, when the kernel has none to give.
const AGAIN: Duration = Duration::from_millis(100);

/// Makes an endpoint of a connection that has been greeted.
fn adopted(fabric: &TcpFabric, stream: TcpStream, kind: LinkKind) -> io::Result<Box<dyn Endpoint>> {
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    fabric.adopt(stream, kind.class()).map_err(io::Error::other)
}

/// Opens connections to other nodes.
#[derive(Debug)]
pub(super) struct TcpDialer(Arc<TcpFabric>);

impl TcpDialer {
    pub(super) fn new() -> io::Result<Self> {
        let fabric = TcpFabric::new(TcpOptions::default()).map_err(io::Error::other)?;
        Ok(Self(Arc::new(fabric)))
    }

    pub(super) fn fabric(&self) -> Arc<TcpFabric> {
        Arc::clone(&self.0)
    }

    /// Connects, and greets.
    async fn greeted(to: &PeerTarget, hello: &Hello) -> Result<TcpStream, LinkError> {
        let unreachable = |why: String| LinkError::Unreachable { peer: to.to_string(), why };
        let attempt = async {
            let mut stream = TcpStream::connect(&to.address).await.map_err(|e| unreachable(e.to_string()))?;
            // Small control messages would wait for acknowledgements.
            stream.set_nodelay(true).map_err(|e| unreachable(e.to_string()))?;
            let refused = |source| LinkError::Hello { peer: to.to_string(), source };
            stream.write_all(&hello.encode()).await.map_err(|e| refused(HelloError::Io(e)))?;
            read_answer(&mut stream).await.map_err(refused)?;
            Ok(stream)
        };
        match timeout(CONNECT, attempt).await {
            Ok(done) => done,
            Err(_) => Err(unreachable(format!("no answer within {CONNECT:?}"))),
        }
    }
}

#[async_trait]
impl Dialer for TcpDialer {
    async fn stream(&self, to: &PeerTarget, hello: &Hello) -> Result<BoxedStream, LinkError> {
        Ok(Box::new(Self::greeted(to, hello).await?))
    }

    async fn endpoint(
        &self,
        to: &PeerTarget,
        _: FabricKind,
        hello: &Hello,
    ) -> Result<Box<dyn Endpoint>, LinkError> {
        let stream = Self::greeted(to, hello).await?;
        adopted(&self.0, stream, hello.kind)
            .map_err(|error| LinkError::Fabric { peer: to.to_string(), why: error.to_string() })
    }

    fn fabrics(&self) -> Vec<FabricOffer> {
        vec![FabricOffer::tcp()]
    }

    fn fabric(&self, kind: FabricKind, _: Token) -> Option<Arc<dyn Fabric>> {
        (kind == FabricKind::Tcp).then(|| Arc::clone(&self.0) as Arc<dyn Fabric>)
    }
}

/// Where other nodes come.
#[derive(Debug)]
pub(super) struct Port {
    listener: TcpListener,
    address: SocketAddr,
    fabric: Arc<TcpFabric>,
}

impl Port {
    pub(super) async fn bind(address: SocketAddr, fabric: Arc<TcpFabric>) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        Ok(Self { address: listener.local_addr()?, listener, fabric })
    }

    pub(super) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes connections. Never returns.
    pub(super) async fn serve(self, engine: Arc<Engine>) {
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    drop(connections.spawn(take(stream, Arc::clone(&engine), Arc::clone(&self.fabric))));
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection cannot be taken");
                    tokio::time::sleep(AGAIN).await;
                }
            }
        }
    }
}

/// Reads and answers the greeting of a connection, and hands it to its session.
async fn take(mut stream: TcpStream, engine: Arc<Engine>, fabric: Arc<TcpFabric>) {
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let hello = match timeout(CONNECT, Hello::read(&mut stream)).await {
        Ok(Ok(hello)) => hello,
        Ok(Err(HelloError::Version(found))) => {
            let text = format!("expected protocol version {PROTOCOL_VERSION}, found {found}");
            return refuse(stream, Status::OtherVersion, &text).await;
        }
        _ => return,
    };
    if let Err((status, text)) = engine.wants(&hello) {
        return refuse(stream, status, &text).await;
    }
    if !hello.kind.is_of_migration() {
        return refuse(stream, Status::Busy, "this node takes migrations only").await;
    }
    if answer(&mut stream, Status::Welcome, "").await.is_err() {
        return;
    }
    let link = match hello.kind {
        kind if kind.class() == Class::Message => Link::Stream(Box::new(stream)),
        kind => match adopted(&fabric, stream, kind) {
            Ok(endpoint) => Link::Endpoint(endpoint),
            Err(error) => return tracing::warn!(%error, "a page connection cannot be used"),
        },
    };
    engine.accept(hello, link, Caller::default()).await;
}

/// The answer is to arrive before the connection ends.
async fn refuse(mut stream: TcpStream, status: Status, text: &str) {
    tracing::warn!(reason = text, "peer connection refused");
    if answer(&mut stream, status, text).await.is_ok() {
        let _ = stream.shutdown().await;
        let _ = timeout(Duration::from_secs(1), tokio::io::copy(&mut stream, &mut tokio::io::sink())).await;
    }
}
