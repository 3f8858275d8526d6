//! Connections to peers that we open.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use vmove_clone::engine::ForkDialer;
use vmove_fabric::tcp::TcpFabric;
use vmove_fabric::{Class, Endpoint, Fabric, FabricKind, Multicast};
use vmove_node::peer::hello::read_answer;
use vmove_node::peer::{BoxedStream, Dialer, FabricOffer, LinkError, PeerTarget, Token};
use vmove_node::peer::{Hello, HelloError, LinkKind};

use super::access::{Access, Certificate};
use super::endpoint::EndpointError;
use super::fabrics::Fabrics;
use super::tls::Tls;
use vmove_node::peer::split_address;
use vmove_types::problem::chain;

use crate::config::KnownNode;

/// For reaching a peer, and again for TLS and greeting.
const CONNECT: Duration = Duration::from_secs(5);

/// How long a host may be silent before it counts as dead, where nothing else tells.
const SILENCE: Duration = Duration::from_secs(10);

/// Opens connections with this node's TLS material and fabrics.
#[derive(Debug)]
pub struct PeerDialer {
    tls: Option<(Arc<Tls>, Arc<Access>)>,
    /// Names that certificates must carry, by address, where that is not the host part.
    server_names: BTreeMap<String, String>,
    fabrics: Arc<Fabrics>,
}

/// A TCP connection as it is before it becomes a stream or an endpoint.
enum Wire {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl PeerDialer {
    /// With TLS, the other end must have the certificate of a node, not that of a client.
    pub fn new(
        tls: Option<(Arc<Tls>, Arc<Access>)>,
        nodes: &BTreeMap<String, KnownNode>,
        fabrics: Arc<Fabrics>,
    ) -> Self {
        let named = nodes.values().filter_map(|n| Some((n.address.clone(), n.server_name.clone()?)));
        Self { tls, server_names: named.collect(), fabrics }
    }

    /// Connects and secures.
    async fn wire(&self, to: &PeerTarget) -> Result<Wire, LinkError> {
        let stream = connect(to).await?;
        // Without it, small control messages would wait for acknowledgements.
        stream.set_nodelay(true).map_err(|e| unreachable(to, e.to_string()))?;
        let Some((tls, access)) = &self.tls else { return Ok(Wire::Plain(stream)) };
        let name = self.server_name(to)?;
        let connector = TlsConnector::from(tls.configs().client);
        match tokio::time::timeout(CONNECT, connector.connect(name, stream)).await {
            Ok(Ok(stream)) => {
                let refused = |why: String| LinkError::Tls { peer: to.to_string(), why };
                let shown = Certificate::of(stream.get_ref().1.peer_certificates())
                    .ok_or_else(|| refused("its certificate has a form that cannot be read".to_owned()))?;
                access.check_node(&shown).map_err(|why| refused(why.to_string()))?;
                Ok(Wire::Tls(Box::new(stream)))
            }
            Ok(Err(error)) => Err(tls_failed(to, &error)),
            Err(_) => {
                Err(LinkError::Tls { peer: to.to_string(), why: format!("no TLS answer within {CONNECT:?}") })
            }
        }
    }

    fn server_name(&self, to: &PeerTarget) -> Result<ServerName<'static>, LinkError> {
        let host = match self.server_names.get(&to.address) {
            Some(name) => name.as_str(),
            None => split_address(&to.address).map_or(to.address.as_str(), |(host, _)| host),
        };
        ServerName::try_from(host.to_owned()).map_err(|_| LinkError::Tls {
            peer: to.to_string(),
            why: format!("\"{host}\" is neither a host name nor an address, so no certificate can carry it"),
        })
    }
}

#[async_trait]
impl Dialer for PeerDialer {
    async fn stream(&self, to: &PeerTarget, hello: &Hello) -> Result<BoxedStream, LinkError> {
        let mut wire = self.wire(to).await?;
        if matches!(hello.kind, LinkKind::ForkDisk | LinkKind::Disk) {
            notice_death(match &wire {
                Wire::Plain(stream) => stream,
                Wire::Tls(stream) => stream.get_ref().0,
            });
        }
        match &mut wire {
            Wire::Plain(stream) => greet(stream, to, hello).await?,
            Wire::Tls(stream) => greet(stream.as_mut(), to, hello).await?,
        }
        Ok(match wire {
            Wire::Plain(stream) => Box::new(stream),
            Wire::Tls(stream) => stream,
        })
    }

    async fn endpoint(
        &self,
        to: &PeerTarget,
        fabric: FabricKind,
        hello: &Hello,
    ) -> Result<Box<dyn Endpoint>, LinkError> {
        let failed = |error: EndpointError| LinkError::Fabric { peer: to.to_string(), why: chain(&error) };
        match fabric {
            FabricKind::Local => {
                let mut stream = connect_local(to).await?;
                greet(&mut stream, to, hello).await?;
                self.fabrics.adopt_local(stream, hello.kind.class()).await.map_err(failed)
            }
            FabricKind::Tcp | FabricKind::Verbs => match self.wire(to).await? {
                Wire::Plain(mut stream) => {
                    greet(&mut stream, to, hello).await?;
                    self.fabrics.adopt(hello, stream, None).await.map_err(failed)
                }
                Wire::Tls(mut stream) => {
                    greet(stream.as_mut(), to, hello).await?;
                    let (stream, tls) = stream.into_inner();
                    self.fabrics.adopt(hello, stream, Some(tls.into())).await.map_err(failed)
                }
            },
            other => Err(failed(EndpointError::UnknownFabric(other))),
        }
    }

    fn fabrics(&self) -> Vec<FabricOffer> {
        self.fabrics.offers()
    }

    fn fabric(&self, kind: FabricKind, secret: Token) -> Option<Arc<dyn Fabric>> {
        self.fabrics.fabric(kind, secret)
    }
}

#[async_trait]
impl ForkDialer for PeerDialer {
    async fn fork_memory(
        &self,
        to: &PeerTarget,
        hello: &Hello,
        class: Class,
        opening: &[u8],
    ) -> Result<Box<dyn Endpoint>, LinkError> {
        let failed = |error: EndpointError| LinkError::Fabric { peer: to.to_string(), why: chain(&error) };
        match self.wire(to).await? {
            Wire::Plain(mut stream) => {
                greet(&mut stream, to, hello).await?;
                tell(&mut stream, opening).await.map_err(|e| failed(e.into()))?;
                self.fabrics.adopt_as(hello, class, stream, None).await.map_err(failed)
            }
            Wire::Tls(mut stream) => {
                greet(stream.as_mut(), to, hello).await?;
                tell(stream.as_mut(), opening).await.map_err(|e| failed(e.into()))?;
                let (stream, tls) = stream.into_inner();
                self.fabrics.adopt_as(hello, class, stream, Some(tls.into())).await.map_err(failed)
            }
        }
    }

    fn multicast(&self, kind: FabricKind, secret: Token) -> Option<Box<dyn Multicast>> {
        self.fabrics.multicast(kind, secret)
    }

    fn tcp(&self) -> Option<Arc<TcpFabric>> {
        self.fabrics.tcp()
    }
}

/// A connection over which nothing may be said for long: the kernel is to notice that the other host is dead.
pub fn notice_death(stream: &TcpStream) {
    use rustix::net::sockopt;
    let set = || -> rustix::io::Result<()> {
        sockopt::set_tcp_user_timeout(stream, SILENCE.as_millis().try_into().unwrap_or(u32::MAX))?;
        sockopt::set_tcp_keepidle(stream, SILENCE / 2)?;
        sockopt::set_tcp_keepintvl(stream, SILENCE / 10)?;
        sockopt::set_socket_keepalive(stream, true)
    };
    if let Err(error) = set() {
        tracing::warn!(%error, "the death of a host may be noticed late");
    }
}

async fn connect(to: &PeerTarget) -> Result<TcpStream, LinkError> {
    let Some((host, port)) = split_address(&to.address) else {
        return Err(unreachable(to, format!("expected host:port, found \"{}\"", to.address)));
    };
    let attempt = async {
        let found: Vec<_> = tokio::net::lookup_host((host, port))
            .await
            .map_err(|e| {
                unreachable(
                    to,
                    format!("the name \"{host}\" cannot be resolved ({e}); check DNS or use an address"),
                )
            })?
            .collect();
        let mut last = unreachable(to, format!("the name \"{host}\" has no address"));
        for address in found {
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = unreachable(to, connect_error(&error)),
            }
        }
        Err(last)
    };
    match tokio::time::timeout(CONNECT, attempt).await {
        Ok(result) => result,
        Err(_) => {
            Err(unreachable(to, format!("no answer within {CONNECT:?}; check address, routes and firewalls")))
        }
    }
}

async fn connect_local(to: &PeerTarget) -> Result<UnixStream, LinkError> {
    match tokio::time::timeout(CONNECT, UnixStream::connect(&to.address)).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => Err(unreachable(to, connect_error(&error))),
        Err(_) => Err(unreachable(to, format!("no answer within {CONNECT:?}"))),
    }
}

async fn tell<S: AsyncWrite + Unpin>(stream: &mut S, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(bytes).await?;
    stream.flush().await
}

/// Sends the greeting and waits for a welcome.
async fn greet<S>(stream: &mut S, to: &PeerTarget, hello: &Hello) -> Result<(), LinkError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let exchange = async {
        stream.write_all(&hello.encode()).await?;
        stream.flush().await?;
        read_answer(stream).await
    };
    match tokio::time::timeout(CONNECT, exchange).await {
        Ok(Ok(())) => Ok(()),
        // With TLS 1.3 a refused certificate shows only now.
        Ok(Err(HelloError::Io(error))) if is_tls(&error) => Err(tls_failed(to, &error)),
        // Whatever closes on our greeting does not know it.
        Ok(Err(HelloError::Io(error))) if is_hangup(&error) => {
            Err(LinkError::Hello { peer: to.to_string(), source: HelloError::NotVmove })
        }
        Ok(Err(source)) => Err(LinkError::Hello { peer: to.to_string(), source }),
        Err(_) => Err(unreachable(
            to,
            format!(
                "it took the connection but sent no greeting within {CONNECT:?}; is it a vmoved, and does it hang?"
            ),
        )),
    }
}

fn unreachable(to: &PeerTarget, why: String) -> LinkError {
    LinkError::Unreachable { peer: to.to_string(), why }
}

fn connect_error(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            "connection refused; is vmoved running there, and does it listen on this port?".to_owned()
        }
        _ => format!("{error}; check address, routes and firewalls"),
    }
}

fn is_tls(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>())
}

fn is_hangup(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
    )
}

fn tls_failed(to: &PeerTarget, error: &io::Error) -> LinkError {
    let peer = to.to_string();
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let why = match inner {
        Some(rustls::Error::InvalidMessage(_)) => "the other end does not speak TLS".to_owned(),
        Some(rustls::Error::AlertReceived(alert)) => format!("the peer refused us ({alert:?})"),
        Some(rustls::Error::InvalidCertificate(why)) => {
            format!("its certificate is not acceptable here: {why}")
        }
        Some(other) => other.to_string(),
        None if is_hangup(error) => "the other end closed the connection; it may run without TLS".to_owned(),
        None => error.to_string(),
    };
    LinkError::Tls { peer, why }
}

#[cfg(test)]
#[path = "dialer_tests.rs"]
mod tests;
