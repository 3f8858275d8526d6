//! Forks to other hosts: the parent's daemon freezes the guest once and spreads the template; each other daemon makes its
//! children of it.
//!
//! ```text
//! parent's daemon                         another daemon
//! Order (who, how many, how large) ---->  policy, version of QEMU, memory; QEMUs are started
//!                                  <----  Accepted, or Refused
//! freezes the guest
//! Alive (if that takes long)       ---->
//! Begin (manifest, device state)   ---->  joins the distribution: connections for memory, greeted like all others
//!                                         children loaded, all of them or none, and run; what they touch is brought first
//!                                  <----  Progress
//!                                         template whole
//!                                  <----  Done, or Failed
//! Release                          ---->  stops serving other hosts
//! ```

mod ask;
mod call;
mod choose;
mod deal;
mod disks;
mod early;
mod fabric;
mod follow;
mod host;
mod make;
mod memory;
mod message;
mod moved;
mod order;
mod record;
mod root;
mod warm;

pub use call::{Away, Outline};
pub use fabric::read_opening;
pub use memory::allocated;
pub use warm::{AwaySet, HostedSet};

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use vmove_fabric::udp::{UdpMulticast, UdpOptions};
use vmove_fabric::{FabricKind, Incoming, Multicast};
use vmove_migrate::link::{FabricOffer, PeerTarget};
use vmove_migrate::proto::hello::{Hello, LinkKind, PROTOCOL_VERSION, SessionId, Status, Token};

use self::disks::Disks;
use crate::api::problem::{Code, Problem};
use crate::config::{Config, ForkPolicy, KnownNode, Security, split_address};
use crate::server::dialer::PeerDialer;
use crate::server::fabrics::Fabrics;

/// What this node needs for forks to others, and from others.
#[derive(Debug)]
pub struct Remote {
    node: String,
    policy: ForkPolicy,
    nodes: BTreeMap<String, KnownNode>,
    listen: SocketAddr,
    /// Connections are protected.
    tls: bool,
    dialer: Arc<PeerDialer>,
    fabrics: Arc<Fabrics>,
    doors: Mutex<HashMap<SessionId, Door>>,
    /// Disks of children elsewhere, and of children here whose images are elsewhere.
    pub disks: Disks,
}

/// Where connections for memory of a fork go.
#[derive(Debug)]
struct Door {
    token: Token,
    to: mpsc::Sender<Incoming>,
}

/// An open door. Dropping it closes it.
#[derive(Debug)]
struct Opened {
    remote: Arc<Remote>,
    session: SessionId,
    token: Token,
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.remote.lock().remove(&self.session);
    }
}

impl Remote {
    pub fn new(
        config: &Config,
        listen: SocketAddr,
        dialer: Arc<PeerDialer>,
        fabrics: Arc<Fabrics>,
    ) -> Arc<Self> {
        Arc::new(Self {
            node: config.node.clone(),
            policy: config.fork.clone(),
            nodes: config.nodes.clone(),
            listen,
            tls: matches!(config.security, Security::MutualTls(_)),
            dialer,
            fabrics,
            doors: Mutex::default(),
            disks: Disks::new(config),
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Door>> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets connections of a fork in.
    fn open(self: &Arc<Self>, session: SessionId, token: Token) -> (Opened, mpsc::Receiver<Incoming>) {
        let (to, from) = mpsc::channel();
        self.lock().insert(session, Door { token, to });
        (Opened { remote: self.clone(), session, token }, from)
    }

    /// Whether a connection for memory belongs to a fork that is under way here.
    pub fn wants(&self, hello: &Hello) -> Result<(), (Status, String)> {
        if self.lock().get(&hello.session).is_some_and(|door| door.token == hello.token) {
            return Ok(());
        }
        Err((Status::UnknownSession, format!("{} knows no fork {}", self.node, hello.session)))
    }

    /// Takes a connection that [`wants`](Self::wants) let in.
    pub fn take(&self, hello: &Hello, incoming: Incoming) {
        if let Some(door) = self.lock().get(&hello.session) {
            // Nobody listens any more: the connection is closed.
            let _ = door.to.send(incoming);
        }
    }

    fn hello(&self, kind: LinkKind, session: SessionId, token: Token) -> Hello {
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
    fn target(&self, name: &str) -> Result<PeerTarget, Problem> {
        if let Some(node) = self.nodes.get(name) {
            return Ok(PeerTarget { name: name.to_owned(), address: node.address.clone() });
        }
        if split_address(name).is_some() {
            return Ok(PeerTarget { name: name.to_owned(), address: name.to_owned() });
        }
        let known: Vec<&str> = self.nodes.keys().map(String::as_str).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        let text = format!("Expected host:port or a node of the configuration ({known}), found {name:?}");
        Err(Problem::new(Code::UnknownNode, text))
    }

    /// A node that another one names: as our own configuration knows it, or at the address that the other one gave.
    fn peer(&self, name: &str, address: &str) -> PeerTarget {
        let address = self.nodes.get(name).map_or(address, |node| node.address.as_str());
        PeerTarget { name: name.to_owned(), address: address.to_owned() }
    }

    fn leaf(&self, node: &str) -> Option<&str> {
        self.nodes.get(node).and_then(|node| node.leaf.as_deref())
    }

    /// The fabrics by which this node can take part in a fork with others, best first.
    fn offers(&self) -> Vec<FabricOffer> {
        let across = |offer: &FabricOffer| matches!(offer.kind, FabricKind::Verbs | FabricKind::Tcp);
        self.fabrics.offers().into_iter().filter(across).collect()
    }

    /// Whether there is such a fabric, or why not.
    fn able(&self) -> Result<(), String> {
        let why =
            "forks to other nodes need fabric verbs or tcp, and neither can be used here: use --fabric auto";
        let usable = self.offers().iter().any(|offer| offer.why_not.is_none());
        usable.then_some(()).ok_or_else(|| why.to_owned())
    }

    /// The group that datagrams may go to, by RDMA or UDP, or why there is none.
    fn group(&self) -> Result<SocketAddrV4, String> {
        let Some(group) = self.policy.multicast_group else {
            return Err(format!("{} does not allow it: set multicast-group in [fork]", self.node));
        };
        if self.tls {
            let why = "datagrams are not encrypted, and this node protects its connections by TLS: use another --way";
            return Err(why.to_owned());
        }
        Ok(group)
    }

    /// Whether datagrams could be sent by the best fabric of this node, or why not.
    fn can_send(&self) -> Result<(), String> {
        let verbs = self.offers().iter().any(|o| o.kind == FabricKind::Verbs && o.why_not.is_none());
        let kind = if verbs { FabricKind::Verbs } else { FabricKind::Tcp };
        self.multicast(kind).or_else(|why| self.multicast(FabricKind::Tcp).map_err(|_| why)).map(drop)
    }

    /// What sends datagrams and hears them beside a fabric, or why nothing does.
    fn multicast(&self, kind: FabricKind) -> Result<Box<dyn Multicast>, String> {
        self.group()?;
        if kind == FabricKind::Verbs {
            return self.fabrics.multicast(kind).ok_or_else(|| "RDMA cannot be used (any more)".to_owned());
        }
        let tcp = self.fabrics.tcp().ok_or("fabric tcp is switched off here (--fabric)")?;
        let own = match self.listen.ip() {
            IpAddr::V4(address) if !address.is_unspecified() => Some(address),
            _ => None,
        };
        let interface = self.policy.multicast_interface.or(own);
        let why = || format!("{} listens on {}: set multicast-interface in [fork]", self.node, self.listen);
        let interface: Ipv4Addr = interface.ok_or_else(why)?;
        Ok(Box::new(UdpMulticast::new(&tcp, UdpOptions::on(interface))))
    }
}
