//! What the engine is told when it is opened: its node, what it may do, and how it reaches other nodes.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::Deserialize;
use vmove_fabric::tcp::TcpFabric;
use vmove_fabric::{Class, Endpoint, FabricKind, Multicast};
use vmove_hooks::Hooks;
use vmove_node::admission::Admission;
use vmove_node::peer::{Dialer, Hello, KnownPeers, LinkError, PeerPolicy, PeerTarget, Token};

/// This node, in `from-guest-to`.
pub const SELF: &str = "self";

/// What forks may do, and what is done for them: `[fork]` of the daemon's configuration.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ForkPolicy {
    /// Most children that one request may ask for; 0 forbids forks.
    pub max_children: usize,
    /// Program that is run for each child before the child is: a hook on `child-start`, in short.
    pub child_start: Option<PathBuf>,
    /// Children that are kept prepared after a fork, for the next one.
    pub warm: usize,
    /// Guests may fork themselves over their port `org.vmove.fork`, within `max-children`.
    pub from_guest: bool,
    /// Most children that all guests together may have by forking themselves; without it, `max-children`.
    pub from_guest_max_children: Option<usize>,
    /// Most MiB that the children of such guests may take together, if each writes all of its memory; without it, as much as is free.
    pub from_guest_max_mib: Option<u64>,
    /// Nodes that children of guests that fork themselves are dealt out to in turn: `self` is this one. At least one.
    pub from_guest_to: Vec<String>,
    /// How deep guests may fork themselves: 1 lets children fork no further.
    pub from_guest_max_depth: u32,
    /// Seconds for which a node with children of a guest may be out of reach before they count as lost.
    pub from_guest_lost_after_s: u64,
    /// Folder for the overlays of disks; that of each image without it.
    pub overlay_dir: Option<PathBuf>,
    /// Folder for saved templates, such as one on storage that all nodes see; `templates` of the state folder without it.
    pub template_dir: Option<PathBuf>,
    /// Most MiB that the copy of a guest's memory may take where its memory cannot be remapped; without it, as much as is free.
    pub copy_limit_mib: Option<u64>,
    /// Group and port of the datagrams by which memory goes to several nodes at once; without it, none does. Equal on all nodes.
    pub multicast_group: Option<SocketAddrV4>,
    /// Address of the interface for it; without it, that of the peer port.
    pub multicast_interface: Option<Ipv4Addr>,
    /// Most megabits per second of datagrams; without it, eight tenths of the link.
    pub multicast_mbit: Option<u64>,
    /// Megabits per second of a node's link, for the choice of the way.
    pub link_mbit: u64,
    /// Megabits per second from one leaf switch to others; without it, as many as its nodes can use.
    pub uplink_mbit: Option<u64>,
    /// Leaf switch of this node; those of the others are in `[nodes]`.
    pub leaf: Option<String>,
    /// The cluster's topology, in any format that `vmove topology` reads: leaf switches of nodes for which none is given.
    pub topology: Option<PathBuf>,
}

impl Default for ForkPolicy {
    fn default() -> Self {
        Self {
            max_children: 256,
            child_start: None,
            warm: 0,
            from_guest: false,
            from_guest_max_children: None,
            from_guest_max_mib: None,
            from_guest_to: vec![SELF.to_owned()],
            from_guest_max_depth: 4,
            from_guest_lost_after_s: 600,
            overlay_dir: None,
            template_dir: None,
            copy_limit_mib: None,
            multicast_group: None,
            multicast_interface: None,
            multicast_mbit: None,
            link_mbit: 10_000,
            uplink_mbit: None,
            leaf: None,
            topology: None,
        }
    }
}

/// Opens the connections that forks have beside those of migrations. The daemon implements it, with its TLS material and its fabrics.
#[async_trait]
pub trait ForkDialer: Dialer {
    /// Opens a connection for memory of a fork: sends `hello`, waits for a welcome, sends `opening`, which says what the connection is
    /// for, and makes an endpoint of it: over RDMA if `hello` says so.
    async fn fork_memory(
        &self,
        to: &PeerTarget,
        hello: &Hello,
        class: Class,
        opening: &[u8],
    ) -> Result<Box<dyn Endpoint>, LinkError>;

    /// Datagrams of the session with this secret to many nodes, beside the fabric of this kind, where there is an RDMA device for it.
    fn multicast(&self, kind: FabricKind, secret: Token) -> Option<Box<dyn Multicast>>;

    /// Fabric tcp itself, unless it is switched off.
    fn tcp(&self) -> Option<Arc<TcpFabric>>;
}

/// What the engine is opened with.
pub struct EngineOptions {
    /// Name of this node.
    pub node: String,
    /// What forks may do.
    pub policy: ForkPolicy,
    /// What other nodes may do here.
    pub peers: Arc<PeerPolicy>,
    /// Which children this node takes.
    pub admission: Arc<dyn Admission>,
    /// The nodes that the configuration names.
    pub known: KnownPeers,
    /// Where this node's peer port listens.
    pub listen: SocketAddr,
    /// Connections between nodes are protected by TLS.
    pub tls: bool,
    /// The state folder: journals of forks and templates on disk are below it.
    pub state_dir: PathBuf,
    /// How long a guest that reads a disk of another node waits for a lost connection.
    pub reconnect_for: Duration,
    /// Opens connections to other nodes.
    pub dialer: Arc<dyn ForkDialer>,
    /// A program that calls [`vmove_memory::stand_by`] when its first argument is [`vmove_memory::STAND_BY`]: then a guest runs while it
    /// gets memory of its own. Without it, the guest is stopped for a few pieces at a time.
    pub standby: Option<PathBuf>,
    /// What the operator wants done before and after forks, and before a child runs.
    pub hooks: Arc<Hooks>,
}

impl fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineOptions").field("node", &self.node).finish_non_exhaustive()
    }
}
