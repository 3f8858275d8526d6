//! Two processes of one host.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::{
    Access, Class, Endpoint, Fabric, FabricError, FabricKind, Incoming, MemoryArea, PeerAddress, Region,
};

/// READ and WRITE by `process_vm_readv(2)` and `process_vm_writev(2)`; messages over a Unix socket.
#[derive(Debug)]
pub struct LocalFabric {}

const TODO: FabricError = FabricError::Unsupported { what: "this back end, for now," };

impl LocalFabric {
    /// A fabric that does not listen: its connections are dialled or adopted.
    ///
    /// # Errors
    /// The table of regions that peers look into cannot be made.
    pub fn new() -> Result<Self, FabricError> {
        Err(TODO)
    }

    /// A fabric that listens on a Unix socket at `path`, which is removed when the fabric is dropped.
    ///
    /// # Errors
    /// The path cannot be bound; see also [`new`](Self::new).
    pub fn bind(path: &Path) -> Result<Self, FabricError> {
        let _ = path;
        Err(TODO)
    }

    /// Makes an endpoint of a connected Unix stream socket. Both sides must do so at the same time, since they
    /// exchange a first message here.
    ///
    /// # Errors
    /// [`FabricError::Protocol`], [`FabricError::Permission`], [`FabricError::Timeout`].
    pub fn adopt(&self, stream: UnixStream, class: Class) -> Result<Box<dyn Endpoint>, FabricError> {
        let _ = (stream, class);
        Err(TODO)
    }
}

impl Fabric for LocalFabric {
    fn kind(&self) -> FabricKind {
        FabricKind::Local
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
