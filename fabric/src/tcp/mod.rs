//! Sockets, plain or TLS.
//!
//! The peer's processor takes part: a READ is a request that the peer's endpoint answers while it polls or
//! [serves](crate::Endpoint::serve). Payload is sent from the registered memory and received into it, without a copy
//! in between (over TLS: one on each side).

mod listener;
mod options;

use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use options::TcpOptions;

use crate::accept::read_exactly;
use crate::socket::Socket;
use crate::stream::{StreamEndpoint, Transport, Urgency};
use crate::table::RegionTable;
use crate::wire::{Hello, REPLY_LEN, Reply};
use crate::{
    Access, Class, Endpoint, Fabric, FabricError, FabricKind, Incoming, MemoryArea, PeerAddress, Region,
};
use listener::Listener;

/// READ and WRITE over TCP connections.
#[derive(Debug)]
pub struct TcpFabric {
    table: Arc<RegionTable>,
    urgency: Arc<Urgency>,
    options: TcpOptions,
    listening: Option<Listening>,
}

/// An address where peers connect.
#[derive(Debug)]
pub(crate) struct Listening {
    listener: Mutex<Listener>,
    address: SocketAddr,
}

impl Listening {
    pub(crate) fn bind(address: SocketAddr) -> Result<Self, FabricError> {
        let (listener, address) = Listener::bind(address)?;
        Ok(Self { listener: Mutex::new(listener), address })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for a peer that greets as it should.
    pub(crate) fn accept(&self, timeout: Duration) -> Result<(TcpStream, Class, Vec<u8>), FabricError> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner).accept(timeout)
    }
}

/// Connects to where a fabric of this kind listens, and greets.
pub(crate) fn dial(
    kind: FabricKind,
    peer: &PeerAddress,
    class: Class,
    greeting: &[u8],
    options: &TcpOptions,
) -> Result<TcpStream, FabricError> {
    let PeerAddress::Tcp(address) = peer else {
        return Err(FabricError::WrongAddress { kind, peer: peer.clone() });
    };
    let hello = Hello::encode(class, greeting)?;
    let stream = listener::dial(*address, &hello, options.connect_timeout)
        .map_err(|source| FabricError::Connect { peer: peer.clone(), source })?;
    let reply: [u8; REPLY_LEN] = read_exactly(&stream, REPLY_LEN, Instant::now() + options.connect_timeout)
        .ok()
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or_else(|| FabricError::protocol(format!("{peer} took the connection and did not answer")))?;
    Reply::decode(&reply)?;
    Ok(stream)
}

impl TcpFabric {
    /// A fabric that does not listen: its connections are dialled or adopted.
    ///
    /// # Errors
    /// Out of memory for the table of regions.
    pub fn new(options: TcpOptions) -> Result<Self, FabricError> {
        let table = RegionTable::private()?;
        Ok(Self { table, urgency: Arc::default(), options, listening: None })
    }

    /// A fabric that listens at `address` (port 0: any free port, see [`local_addr`](Self::local_addr)). Whoever can
    /// reach the address can connect, unencrypted: for anything but a trusted network accept connections elsewhere
    /// and [`adopt_tls`](Self::adopt_tls) them.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn bind(address: SocketAddr, options: TcpOptions) -> Result<Self, FabricError> {
        let listening = Listening::bind(address)?;
        Ok(Self { listening: Some(listening), ..Self::new(options)? })
    }

    /// Where the fabric listens, if it does.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.listening.as_ref().map(Listening::address)
    }

    /// The regions of this fabric, for what moves bytes beside its connections.
    pub(crate) fn table(&self) -> Arc<RegionTable> {
        Arc::clone(&self.table)
    }

    /// Makes an endpoint of a connected socket. Both sides must do so, and neither may have read bytes beyond what
    /// they exchanged before.
    ///
    /// # Errors
    /// The socket options cannot be set.
    pub fn adopt(&self, stream: TcpStream, class: Class) -> Result<Box<dyn Endpoint>, FabricError> {
        self.options.configure(&stream, class)?;
        self.endpoint(Transport::plain(Socket::Tcp(stream)), class)
    }

    /// The same over TLS: `tls` has finished its handshake on `stream`, and may hold bytes already received.
    ///
    /// # Errors
    /// The handshake is not complete; the socket options cannot be set.
    pub fn adopt_tls(
        &self,
        stream: TcpStream,
        tls: rustls::Connection,
        class: Class,
    ) -> Result<Box<dyn Endpoint>, FabricError> {
        if tls.is_handshaking() {
            return Err(FabricError::protocol(
                "a TLS connection whose handshake is not complete; finish it first",
            ));
        }
        self.options.configure(&stream, class)?;
        self.endpoint(Transport::tls(Socket::Tcp(stream), tls), class)
    }

    fn endpoint(&self, transport: Transport, class: Class) -> Result<Box<dyn Endpoint>, FabricError> {
        let tuning = self.options.tuning(class);
        Ok(Box::new(StreamEndpoint::over(
            FabricKind::Tcp,
            class,
            transport,
            &self.table,
            tuning,
            &self.urgency,
        )?))
    }
}

impl Fabric for TcpFabric {
    fn kind(&self) -> FabricKind {
        FabricKind::Tcp
    }

    fn register(&self, area: MemoryArea, access: Access) -> Result<Region, FabricError> {
        self.table.register(area, access)
    }

    fn connect(
        &self,
        peer: &PeerAddress,
        class: Class,
        greeting: &[u8],
    ) -> Result<Box<dyn Endpoint>, FabricError> {
        let stream = dial(FabricKind::Tcp, peer, class, greeting, &self.options)?;
        self.adopt(stream, class)
    }

    fn accept(&self, timeout: Duration) -> Result<Incoming, FabricError> {
        let Some(listening) = &self.listening else {
            return Err(FabricError::Unsupported { what: "accepting without a listening address" });
        };
        let (stream, class, greeting) = listening.accept(timeout)?;
        Ok(Incoming { class, greeting, endpoint: self.adopt(stream, class)? })
    }
}
