//! The fabric of one fork: memory is registered with one of the node's, connections are those of the peer port, with its greeting and its TLS.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::runtime::Handle;
use vmove_fabric::fabric::MAX_GREETING;
use vmove_fabric::{
    Access, Class, Endpoint, Fabric, FabricError, FabricKind, Incoming, MemoryArea, PeerAddress, Region,
};
use vmove_node::peer::PeerTarget;
use vmove_node::peer::{Hello, LinkKind, SessionId, Token};

use crate::engine::peers::{OpenFork, Peers};
use vmove_types::problem::chain;

/// What follows the greeting of a connection for memory: class `u8`, length `u16`, and so many bytes for the distribution.
pub fn opening(class: Class, greeting: &[u8]) -> io::Result<Vec<u8>> {
    let too_long = || io::Error::other("a greeting that is too long");
    let len = u16::try_from(greeting.len()).ok().filter(|len| usize::from(*len) <= MAX_GREETING);
    let mut bytes = vec![class as u8];
    bytes.extend(len.ok_or_else(too_long)?.to_le_bytes());
    bytes.extend(greeting);
    Ok(bytes)
}

/// Reads what follows the greeting of a connection for memory: its class, and the greeting for the distribution.
///
/// # Errors
/// The connection breaks, or what comes is no opening.
pub async fn read_opening<R: AsyncRead + Unpin>(from: &mut R) -> io::Result<(Class, Vec<u8>)> {
    let mut fixed = [0; 3];
    from.read_exact(&mut fixed).await?;
    let class = Class::from_wire(fixed[0]).ok_or_else(|| io::Error::other("an unknown class"))?;
    let len = usize::from(u16::from_le_bytes([fixed[1], fixed[2]]));
    if len > MAX_GREETING {
        return Err(io::Error::other("a greeting that is too long"));
    }
    let mut greeting = vec![0; len];
    from.read_exact(&mut greeting).await?;
    Ok((class, greeting))
}

/// Connects the hosts of one fork by one of the node's fabrics. Used from threads of the distribution, not from tasks.
#[derive(Debug)]
pub struct ForkFabric {
    /// Registers memory.
    fabric: Arc<dyn Fabric>,
    connections: Arc<Connections>,
}

/// Where the connections of a fork arrive and how others are reached, whatever fabric they are of.
#[derive(Debug)]
pub struct Connections {
    peers: Arc<Peers>,
    fork: OpenFork,
    runtime: Handle,
    /// By the names that the distribution gives them.
    hosts: BTreeMap<String, PeerTarget>,
    incoming: Mutex<mpsc::Receiver<Incoming>>,
}

impl Connections {
    /// Lets connections of fork `session` in; call it in a task.
    pub fn open(
        peers: &Arc<Peers>,
        session: SessionId,
        token: Token,
        hosts: BTreeMap<String, PeerTarget>,
    ) -> Arc<Self> {
        let (fork, incoming) = peers.open(session, token);
        let (peers, runtime, incoming) = (peers.clone(), Handle::current(), Mutex::new(incoming));
        Arc::new(Self { peers, fork, runtime, hosts, incoming })
    }

    /// This fork by one of the node's fabrics, if that can be used here.
    pub fn by(self: &Arc<Self>, kind: FabricKind) -> Option<Arc<ForkFabric>> {
        let fabric = self.peers.dialer.fabric(kind, self.fork.token)?;
        Some(Arc::new(ForkFabric { fabric, connections: self.clone() }))
    }
}

impl ForkFabric {
    /// The secret of the fork.
    pub fn secret(&self) -> Token {
        self.connections.fork.token
    }
}

impl Fabric for ForkFabric {
    fn kind(&self) -> FabricKind {
        self.fabric.kind()
    }

    fn register(&self, area: MemoryArea, access: Access) -> Result<Region, FabricError> {
        self.fabric.register(area, access)
    }

    fn connect(
        &self,
        peer: &PeerAddress,
        class: Class,
        greeting: &[u8],
    ) -> Result<Box<dyn Endpoint>, FabricError> {
        let failed = |source| FabricError::Connect { peer: peer.clone(), source };
        let PeerAddress::Named(name) = peer else {
            return Err(FabricError::WrongAddress { kind: self.kind(), peer: peer.clone() });
        };
        let Connections { peers, fork, runtime, hosts, .. } = &*self.connections;
        let unknown = || io::Error::new(io::ErrorKind::NotFound, format!("no host {name} in this fork"));
        let target = hosts.get(name).ok_or_else(unknown).map_err(failed)?;
        let rdma = self.kind() == FabricKind::Verbs;
        let hello = Hello { rdma, ..peers.hello(LinkKind::ForkMemory, fork.session, fork.token) };
        let opening = opening(class, greeting).map_err(failed)?;
        let made = runtime.block_on(peers.dialer.fork_memory(target, &hello, class, &opening));
        made.map_err(|error| failed(io::Error::other(chain(&error))))
    }

    fn accept(&self, timeout: Duration) -> Result<Incoming, FabricError> {
        let incoming = self.connections.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        let waited_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        incoming
            .recv_timeout(timeout)
            .map_err(|_| FabricError::Timeout { what: "a connection of this fork", waited_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_opening_comes_back_and_nonsense_is_refused() {
        let bytes = opening(Class::Bulk, b"who").unwrap();
        assert_eq!(read_opening(&mut bytes.as_slice()).await.unwrap(), (Class::Bulk, b"who".to_vec()));
        for bad in [&[9, 0, 0][..], &[1, 255, 255], &[1, 4, 0, 1], &[]] {
            read_opening(&mut &bad[..]).await.unwrap_err();
        }
        opening(Class::Bulk, &[0; MAX_GREETING + 1]).unwrap_err();
    }
}
