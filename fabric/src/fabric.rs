//! A back end: registers memory, opens connections.

use std::time::Duration;

use crate::address::{Class, FabricKind, PeerAddress};
use crate::endpoint::Endpoint;
use crate::error::FabricError;
use crate::region::{Access, MemoryArea, Region};

/// Most bytes of greeting that a connection may open with.
pub const MAX_GREETING: usize = 4096;

/// A back end. Regions and endpoints of one fabric belong together: a region of another fabric is refused.
pub trait Fabric: Send + Sync + std::fmt::Debug {
    /// Which back end this is.
    fn kind(&self) -> FabricKind;

    /// Makes `area` usable for READ and WRITE of this side, and for the peers' as far as `access` goes, until
    /// the last clone of the region is dropped. That drop waits until no transfer touches the memory any more.
    ///
    /// # Errors
    /// [`FabricError::Register`].
    fn register(&self, area: MemoryArea, access: Access) -> Result<Region, FabricError>;

    /// Connects to a fabric of the same kind that [`accept`](Self::accept)s. `greeting` (at most
    /// [`MAX_GREETING`] bytes) is for the accepting side to know what the connection is for.
    ///
    /// # Errors
    /// [`FabricError::Connect`], [`FabricError::WrongAddress`], [`FabricError::Protocol`].
    fn connect(
        &self,
        peer: &PeerAddress,
        class: Class,
        greeting: &[u8],
    ) -> Result<Box<dyn Endpoint>, FabricError>;

    /// Waits for a peer to connect. A peer that connects and does not greet properly is dropped, and the wait
    /// goes on.
    ///
    /// # Errors
    /// [`FabricError::Timeout`]; [`FabricError::Unsupported`] if the fabric does not listen.
    fn accept(&self, timeout: Duration) -> Result<Incoming, FabricError>;
}

/// A connection that a peer opened.
#[derive(Debug)]
pub struct Incoming {
    /// The peer's intended use of the connection.
    pub class: Class,
    /// The data that the peer sent when it connected.
    pub greeting: Vec<u8>,
    /// The connection.
    pub endpoint: Box<dyn Endpoint>,
}
