//! Sockets, plain or TLS.

mod options;

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

pub use options::TcpOptions;

use crate::{
    Access, Class, Endpoint, Fabric, FabricError, FabricKind, Incoming, MemoryArea, PeerAddress, Region,
};

/// READ and WRITE over TCP connections.
#[derive(Debug)]
pub struct TcpFabric {
    #[allow(dead_code)]
    options: TcpOptions,
}

const TODO: FabricError = FabricError::Unsupported { what: "this back end, for now," };

impl TcpFabric {
    /// A fabric that does not listen: its connections are dialled or adopted.
    #[must_use]
    pub fn new(options: TcpOptions) -> Self {
        Self { options }
    }

    /// A fabric that listens at `address` (port 0: any free port, see [`local_addr`](Self::local_addr)).
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn bind(address: SocketAddr, options: TcpOptions) -> Result<Self, FabricError> {
        let _ = (address, options);
        Err(TODO)
    }

    /// Where the fabric listens, if it does.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        None
    }

    /// Makes an endpoint of a connected socket. Both sides must do so, and neither may have read bytes beyond
    /// what they exchanged before.
    ///
    /// # Errors
    /// The socket options cannot be set.
    pub fn adopt(&self, stream: TcpStream, class: Class) -> Result<Box<dyn Endpoint>, FabricError> {
        let _ = (stream, class);
        Err(TODO)
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
        let _ = (stream, tls, class);
        Err(TODO)
    }
}

impl Fabric for TcpFabric {
    fn kind(&self) -> FabricKind {
        FabricKind::Tcp
    }

    fn register(&self, _area: MemoryArea, _access: Access) -> Result<Region, FabricError> {
        Err(TODO)
    }

    fn connect(
        &self,
        _peer: &PeerAddress,
        _class: Class,
        _greeting: &[u8],
    ) -> Result<Box<dyn Endpoint>, FabricError> {
        Err(TODO)
    }

    fn accept(&self, _timeout: Duration) -> Result<Incoming, FabricError> {
        Err(TODO)
    }
}
