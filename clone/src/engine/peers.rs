//! Other nodes: how they are named and reached, by which fabrics, and the connections for memory of a fork that they open.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use vmove_fabric::udp::{UdpMulticast, UdpOptions};
use vmove_fabric::{FabricError, FabricKind, Incoming, Multicast, Session};
use vmove_node::peer::{
    Channel, FabricOffer, Hello, KnownPeers, LinkKind, PROTOCOL_VERSION, PeerTarget, SessionId, Status, Token,
};

use vmove_types::fork::ForkWay;

use super::error::{ForkError, PeersError, TalkError};
use super::message::{ToHost, ToParent};
use super::options::{EngineOptions, ForkDialer, ForkPolicy};

/// For an answer; QEMU may take a while to end.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(40);

/// What this node needs for forks to other nodes, and from them.
pub struct Peers {
    pub node: String,
    pub policy: ForkPolicy,
    known: KnownPeers,
    pub listen: SocketAddr,
    /// Connections are protected.
    tls: bool,
    pub dialer: Arc<dyn ForkDialer>,
    /// Forks under way whose hosts connect to this node for memory.
    forks: Mutex<HashMap<SessionId, Arrivals>>,
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peers").field("node", &self.node).finish_non_exhaustive()
    }
}

/// Where connections for memory of a fork go.
#[derive(Debug)]
struct Arrivals {
    token: Token,
    to: mpsc::Sender<Incoming>,
}

/// A fork whose connections for memory are let in, until this is dropped.
#[derive(Debug)]
pub struct OpenFork {
    peers: Arc<Peers>,
    pub session: SessionId,
    pub token: Token,
}

impl Drop for OpenFork {
    fn drop(&mut self) {
        self.peers.lock().remove(&self.session);
    }
}

impl Peers {
    pub fn new(options: EngineOptions) -> Arc<Self> {
        Arc::new(Self {
            node: options.node,
            policy: options.policy,
            known: options.known,
            listen: options.listen,
            tls: options.tls,
            dialer: options.dialer,
            forks: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Arrivals>> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.forks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets connections of a fork in.
    pub fn open(self: &Arc<Self>, session: SessionId, token: Token) -> (OpenFork, mpsc::Receiver<Incoming>) {
        let (to, from) = mpsc::channel();
        self.lock().insert(session, Arrivals { token, to });
        (OpenFork { peers: self.clone(), session, token }, from)
    }

    /// Whether a connection for memory belongs to a fork that is under way here.
    pub fn wants(&self, hello: &Hello) -> Result<(), (Status, String)> {
        if self.lock().get(&hello.session).is_some_and(|fork| fork.token == hello.token) {
            return Ok(());
        }
        Err((Status::UnknownSession, format!("{} knows no fork {}", self.node, hello.session)))
    }

    /// Takes a connection that [`wants`](Self::wants) let in.
    pub fn take(&self, hello: &Hello, incoming: Incoming) {
        if let Some(fork) = self.lock().get(&hello.session) {
            // Nobody listens any more: the connection is closed.
            let _ = fork.to.send(incoming);
        }
    }

    pub fn hello(&self, kind: LinkKind, session: SessionId, token: Token) -> Hello {
        Hello {
            version: PROTOCOL_VERSION,
            kind,
            rdma: false,
            index: 0,
            session,
            token,
            node: self.node.clone(),
        }
    }

    /// The node that a request names.
    pub fn target(&self, name: &str) -> Result<PeerTarget, ForkError> {
        Ok(self.known.target(name)?)
    }

    /// A node that another one names: as our own configuration knows it, or at the address that the other one gave.
    pub fn named_by_peer(&self, target: &PeerTarget) -> PeerTarget {
        self.known.named_by_peer(&target.name, &target.address)
    }

    /// Where the parent's node is, seen from a host: an order came from `from`, and names the port.
    pub fn parent_of(&self, node: &str, from: IpAddr, port: u16) -> PeerTarget {
        self.known.named_by_peer(node, &SocketAddr::new(from, port).to_string())
    }

    pub fn leaf(&self, node: &str) -> Option<&str> {
        self.known.leaf(node)
    }

    /// Opens a connection to a node's engine and sends the first message.
    pub async fn call(
        &self,
        target: &PeerTarget,
        session: SessionId,
        token: Token,
        message: &ToHost,
    ) -> Result<Channel<ToParent>, TalkError> {
        let hello = self.hello(LinkKind::Fork, session, token);
        let mut channel = Channel::new(self.dialer.stream(target, &hello).await?);
        channel.send(message).await?;
        Ok(channel)
    }

    /// Asks a node one question.
    pub async fn ask(&self, target: &PeerTarget, question: ToHost) -> Result<ToParent, ForkError> {
        self.ask_within(target, question, ANSWER_TIMEOUT).await
    }

    /// As [`Self::ask`], with so much time for the answer.
    pub async fn ask_within(
        &self,
        target: &PeerTarget,
        question: ToHost,
        timeout: Duration,
    ) -> Result<ToParent, ForkError> {
        let failed = |source| ForkError::Host { host: target.clone(), act: "cannot be asked", source };
        let called = self.call(target, SessionId::random(), Token::random(), &question).await;
        let mut channel = called.map_err(failed)?;
        let answer = answer(&mut channel, timeout).await.map_err(failed)?;
        Ok(answer.unless_refused(target)?)
    }

    /// The fabrics by which this node can take part in a fork with others, best first.
    pub fn offers(&self) -> Vec<FabricOffer> {
        let across = |offer: &FabricOffer| matches!(offer.kind, FabricKind::Verbs | FabricKind::Tcp);
        self.dialer.fabrics().into_iter().filter(across).collect()
    }

    /// Those for a fork that is asked to go by `way`. Encrypted datagrams go beside tcp only.
    pub fn offers_for(&self, way: Option<ForkWay>) -> Vec<FabricOffer> {
        let mut offers = self.offers();
        if self.tls && way == Some(ForkWay::Multicast) {
            offers.retain(|offer| offer.kind == FabricKind::Tcp);
        }
        offers
    }

    /// Whether there is such a fabric, or why not.
    pub fn able(&self) -> Result<(), PeersError> {
        let usable = self.offers().iter().any(|offer| offer.why_not.is_none());
        usable.then_some(()).ok_or(PeersError::NoFabric)
    }

    /// The group that datagrams may go to, by RDMA or UDP, or why there is none.
    pub fn group(&self) -> Result<SocketAddrV4, PeersError> {
        self.policy.multicast_group.ok_or_else(|| PeersError::NoGroup(self.node.clone()))
    }

    /// Draws the session of a fork's datagrams: encrypted, with a key of their own, where connections are.
    pub fn draw_session(&self) -> Result<Session, FabricError> {
        if self.tls { Session::draw_sealed() } else { Session::draw() }
    }

    /// Whether datagrams could be sent by the best fabric of this node, or why not.
    pub fn can_send(&self) -> Result<(), PeersError> {
        let verbs = self.offers().iter().any(|o| o.kind == FabricKind::Verbs && o.why_not.is_none());
        let kind = if verbs { FabricKind::Verbs } else { FabricKind::Tcp };
        let any = Token::random();
        self.multicast(kind, any)
            .or_else(|why| self.multicast(FabricKind::Tcp, any).map_err(|_| why))
            .map(drop)
    }

    /// What sends datagrams of the fork with this secret and hears them beside a fabric, or why nothing does.
    pub fn multicast(&self, kind: FabricKind, secret: Token) -> Result<Box<dyn Multicast>, PeersError> {
        self.group()?;
        if kind == FabricKind::Verbs {
            if self.tls {
                return Err(PeersError::RdmaInClear);
            }
            return self.dialer.multicast(kind, secret).ok_or(PeersError::NoRdma);
        }
        let tcp = self.dialer.tcp().ok_or(PeersError::NoTcp)?;
        let own = match self.listen.ip() {
            IpAddr::V4(address) if !address.is_unspecified() => Some(address),
            _ => None,
        };
        let interface = self.policy.multicast_interface.or(own);
        let none = || PeersError::NoInterface { node: self.node.clone(), listen: self.listen };
        let interface: Ipv4Addr = interface.ok_or_else(none)?;
        Ok(Box::new(UdpMulticast::new(&tcp, UdpOptions::on(interface))))
    }
}

/// Waits for the answer to what was sent.
pub async fn answer(channel: &mut Channel<ToParent>, timeout: Duration) -> Result<ToParent, TalkError> {
    match tokio::time::timeout(timeout, channel.receive()).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(TalkError::Silent(timeout)),
    }
}
