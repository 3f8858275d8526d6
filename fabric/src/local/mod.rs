//! Two processes of one host.
//!
//! READ and WRITE copy between the two address spaces by `process_vm_readv(2)` and `process_vm_writev(2)`: one copy, made
//! by the side that asks, straight into place; the peer's program does not run. The kernel permits this between
//! processes of one user (unless the Yama module forbids it) and with `CAP_SYS_PTRACE`. Messages go over a Unix socket,
//! which also tells when the peer goes away.
//!
//! What the peer has registered is looked up in a table that the peer shares; see `table` for how its deregistration
//! ends all use. The keys therefore guard against mistakes and stale requests, not against a hostile peer: a process
//! that may use these system calls on another needs no key.

mod endpoint;
mod handshake;
mod peer;

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::accept::{GREETING_TIMEOUT, accept};
use crate::table::RegionTable;
use crate::{
    Access, Class, Endpoint, Fabric, FabricError, FabricKind, Incoming, MemoryArea, PeerAddress, Region,
};
use endpoint::LocalEndpoint;
use handshake::Hello;
#[cfg(feature = "fuzzing")]
pub(crate) use handshake::any_hello;

/// How long a peer may take to answer a first message.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// READ and WRITE by `process_vm_readv(2)` and `process_vm_writev(2)`; messages over a Unix socket.
#[derive(Debug)]
pub struct LocalFabric {
    table: Arc<RegionTable>,
    listener: Option<Listening>,
}

/// A listening socket that goes away with its path.
#[derive(Debug)]
struct Listening {
    socket: UnixListener,
    path: PathBuf,
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl LocalFabric {
    /// A fabric that does not listen: its connections are dialled or adopted.
    ///
    /// # Errors
    /// The table of regions that peers look into cannot be made.
    pub fn new() -> Result<Self, FabricError> {
        Ok(Self { table: RegionTable::shared()?, listener: None })
    }

    /// A fabric that listens on a Unix socket at `path`, which is removed when the fabric is dropped.
    ///
    /// # Errors
    /// The path cannot be bound; see also [`new`](Self::new).
    pub fn bind(path: &Path) -> Result<Self, FabricError> {
        let socket = UnixListener::bind(path).map_err(FabricError::io("listen at the fabric's path"))?;
        socket.set_nonblocking(true).map_err(FabricError::io("make the listening socket non-blocking"))?;
        let listener = Some(Listening { socket, path: path.to_owned() });
        Ok(Self { table: RegionTable::shared()?, listener })
    }

    /// Makes an endpoint of a connected Unix stream socket. Both sides must do so at the same time, since they exchange
    /// a first message here. Whether this side may access the peer's memory shows with its first READ or WRITE
    /// ([`FabricError::Permission`]); a side that only answers needs no permission.
    ///
    /// # Errors
    /// [`FabricError::Protocol`], [`FabricError::PeerGone`], [`FabricError::Timeout`].
    pub fn adopt(&self, stream: UnixStream, class: Class) -> Result<Box<dyn Endpoint>, FabricError> {
        let opening = handshake::Opening::new(&self.table)?;
        handshake::send(&stream, &opening.hello(class, b""), opening.table_fd()?)?;
        let (hello, table) = handshake::receive(&stream, HANDSHAKE_TIMEOUT)?;
        Ok(Box::new(LocalEndpoint::met(stream, class, opening, &hello, table, &self.table)?))
    }

    fn greet(&self, stream: UnixStream) -> Result<Incoming, FabricError> {
        let (hello, table) = handshake::receive(&stream, GREETING_TIMEOUT)?;
        let opening = handshake::Opening::new(&self.table)?;
        let answer = opening.hello(hello.class, b"");
        handshake::send(&stream, &answer, opening.table_fd()?)?;
        let class = hello.class;
        let endpoint = LocalEndpoint::met(stream, class, opening, &hello, table, &self.table)?;
        Ok(Incoming { class, greeting: hello.greeting, endpoint: Box::new(endpoint) })
    }
}

impl Fabric for LocalFabric {
    fn kind(&self) -> FabricKind {
        FabricKind::Local
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
        let PeerAddress::Unix(path) = peer else {
            return Err(FabricError::WrongAddress { kind: FabricKind::Local, peer: peer.clone() });
        };
        Hello::check_greeting(greeting)?;
        let stream = UnixStream::connect(path)
            .map_err(|source| FabricError::Connect { peer: peer.clone(), source })?;
        let opening = handshake::Opening::new(&self.table)?;
        let hello = opening.hello(class, greeting);
        handshake::send(&stream, &hello, opening.table_fd()?)?;
        let (answer, table) = handshake::receive(&stream, HANDSHAKE_TIMEOUT)?;
        let endpoint = LocalEndpoint::met(stream, class, opening, &answer, table, &self.table)?;
        // Who dials wants to read or write: say at once if that is not permitted.
        endpoint.probe()?;
        Ok(Box::new(endpoint))
    }

    fn accept(&self, timeout: Duration) -> Result<Incoming, FabricError> {
        let Some(listening) = &self.listener else {
            return Err(FabricError::Unsupported { what: "accepting without a listening path" });
        };
        let greet = |(stream, _)| {
            let greeted = self.greet(stream);
            greeted
                .inspect_err(|error| tracing::warn!(%error, "dropped a connection that did not greet"))
                .ok()
        };
        accept(listening.socket.as_fd(), timeout, || listening.socket.accept(), greet)
    }
}
