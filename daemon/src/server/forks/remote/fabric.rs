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
use vmove_migrate::link::PeerTarget;
use vmove_migrate::proto::hello::{Hello, LinkKind, SessionId, Token};

use super::{Opened, Remote};
use crate::api::problem::chain;

/// What follows the greeting of a connection for memory: class `u8`, length `u16`, and so many bytes for the distribution.
pub fn opening(class: Class, greeting: &[u8]) -> io::Result<Vec<u8>> {
    let too_long = || io::Error::other("a greeting that is too long");
    let len = u16::try_from(greeting.len()).ok().filter(|len| usize::from(*len) <= MAX_GREETING);
    let mut bytes = vec![class as u8];
    bytes.extend(len.ok_or_else(too_long)?.to_le_bytes());
    bytes.extend(greeting);
    Ok(bytes)
}

/// Reads it.
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
    door: Arc<Door>,
}

/// Where the connections of a fork arrive and how others are reached, whatever fabric they are of.
#[derive(Debug)]
pub struct Door {
    remote: Arc<Remote>,
    opened: Opened,
    runtime: Handle,
    /// By the names that the distribution gives them.
    peers: BTreeMap<String, PeerTarget>,
    incoming: Mutex<mpsc::Receiver<Incoming>>,
}

impl Door {
    /// Opens the door of fork `session`; call it in a task.
    pub fn open(
        remote: &Arc<Remote>,
        session: SessionId,
        token: Token,
        peers: BTreeMap<String, PeerTarget>,
    ) -> Arc<Self> {
        let (opened, incoming) = remote.open(session, token);
        let (remote, runtime, incoming) = (remote.clone(), Handle::current(), Mutex::new(incoming));
        Arc::new(Self { remote, opened, runtime, peers, incoming })
    }

    /// This fork by one of the node's fabrics, if that can be used here.
    pub fn by(self: &Arc<Self>, kind: FabricKind) -> Option<Arc<ForkFabric>> {
        let fabric = self.remote.fabrics.fabric(kind)?;
        Some(Arc::new(ForkFabric { fabric, door: self.clone() }))
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
        let Door { remote, opened, runtime, peers, .. } = &*self.door;
        let unknown = || io::Error::new(io::ErrorKind::NotFound, format!("no host {name} in this fork"));
        let target = peers.get(name).ok_or_else(unknown).map_err(failed)?;
        let rdma = self.kind() == FabricKind::Verbs;
        let hello = Hello { rdma, ..remote.hello(LinkKind::ForkMemory, opened.session, opened.token) };
        let opening = opening(class, greeting).map_err(failed)?;
        let made = runtime.block_on(remote.dialer.fork_memory(target, &hello, class, &opening));
        made.map_err(|error| failed(io::Error::other(chain(&error))))
    }

    fn accept(&self, timeout: Duration) -> Result<Incoming, FabricError> {
        let incoming = self.door.incoming.lock().unwrap_or_else(PoisonError::into_inner);
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
