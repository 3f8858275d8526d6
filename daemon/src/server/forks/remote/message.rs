//! What the parent's daemon and those of other hosts say to each other about one fork.
//!
//! Reports and manifests cross as JSON: their optional fields are left out where they have no value.

use std::net::SocketAddrV4;

use serde::{Deserialize, Serialize};
use vmove_migrate::link::{FabricOffer, PeerTarget};
use vmove_migrate::proto::hello::SessionId;
use vmove_spread::HostTotals;

use super::disks::{OrderDisk, Reached};
use super::memory::Part;
use super::moved::Came;
use crate::api::problem::{Code, Problem};

/// From the parent's daemon.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToHost {
    /// First: what is asked.
    Order(Box<Order>),
    /// The guest is frozen.
    Begin(Box<Begin>),
    /// Nothing new.
    Alive,
    /// Nobody reads from this host any more.
    Release,
    /// There will be no children, and why.
    GiveUp(String),
    /// Instead of an order: which of these live?
    Which(Vec<Kin>),
    /// Instead of an order: end this one.
    End(Kin),
    /// Instead of an order: does this one live, or end it.
    Came(Came),
    /// Instead of an order: does anybody read the images of this fork?
    Reads(SessionId),
    /// Instead of an order: prepare children for one. They are kept until `Release`, or the end of the connection.
    Warm(Box<WarmOrder>),
}

/// What must be the same for a child that was prepared and one that is ordered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kind {
    pub command_line: Vec<String>,
    pub environment: Vec<(String, String)>,
    pub machine: String,
    /// QEMU that writes the device state.
    pub qemu: String,
    pub backing: String,
}

/// Children that are to be prepared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmOrder {
    /// Id of the set, by which an order names it.
    pub id: String,
    /// Name of the VM.
    pub parent: String,
    /// Its node.
    pub node: String,
    /// Numbers of the children.
    pub indexes: Vec<u32>,
    pub kind: Kind,
}

/// A child that came of an order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kin {
    /// Name of the VM.
    pub name: String,
    /// Id of the fork that it came from.
    pub fork: String,
}

/// To the parent's daemon.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToParent {
    /// It can be done here.
    Accepted(Taken),
    /// It cannot: a [`Problem`] as JSON.
    Refused(String),
    /// How far the host is.
    Progress(At),
    /// All children run, and the template is whole.
    Done(Box<Done>),
    /// There are no children here (any more), and why.
    Failed(String),
    /// Names of those that live.
    Living(Vec<String>),
    /// It has ended, and how.
    Ended(String),
    /// Whether somebody does.
    Reads(bool),
    /// Children wait.
    Prepared,
}

impl ToParent {
    pub fn refused(problem: &Problem) -> Self {
        Self::Refused(serde_json::to_string(problem).unwrap_or_default())
    }

    /// The answer of a node, unless it refuses.
    pub fn unless_refused(self, node: &impl std::fmt::Display) -> Result<Self, Problem> {
        let Self::Refused(problem) = self else { return Ok(self) };
        let without = || Problem::new(Code::ForkFailed, format!("{node} refused without a reason"));
        Err(serde_json::from_str(&problem).unwrap_or_else(|_| without()))
    }
}

/// How a host would get the template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// Over RDMA; the path was tried.
    pub verbs: bool,
    /// Why that, or why not.
    pub why: String,
    /// Datagrams of the group would be taken, of the same kind of network.
    pub hears: bool,
    /// How children get at the images of their disks, if the guest writes to any.
    pub disks: Option<Reached>,
}

/// What a host is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    Fetch,
    Load,
    /// Children run, while the rest of the template is on its way.
    Run,
}

impl Phase {
    pub const fn word(self) -> &'static str {
        match self {
            Self::Fetch => "fetch",
            Self::Load => "load",
            Self::Run => "run",
        }
    }
}

/// How far a host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct At {
    pub phase: Phase,
    /// Chunks of the template; 0 before it knows.
    pub chunks: u32,
    /// Those that it misses.
    pub missing: u32,
    /// Children that run.
    pub running: u32,
    pub pieces: Pieces,
}

/// Where a host's pieces came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pieces {
    pub by_multicast: u64,
    pub from_root: u64,
    pub from_peers: u64,
    /// Those of them that were read because datagrams were lost.
    pub repaired: u64,
}

impl From<HostTotals> for Pieces {
    fn from(totals: HostTotals) -> Self {
        let HostTotals { by_multicast, from_root, from_peers, repaired, .. } = totals;
        Self { by_multicast, from_root, from_peers, repaired }
    }
}

/// Children that are to be made of a template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// Id of the fork.
    pub fork: String,
    /// Name of the VM or template.
    pub parent: String,
    /// The parent's node.
    pub node: String,
    /// Port of its daemon; the address is that which the order came from, unless the configuration knows the node.
    pub port: u16,
    /// Numbers of the children.
    pub indexes: Vec<u32>,
    pub verify: bool,
    /// Children run only when the whole template is there.
    pub whole: bool,
    pub expect_written: Option<u64>,
    pub kind: Kind,
    /// Sets of prepared children that these numbers are of.
    pub warm: Vec<String>,
    /// Bytes of guest memory.
    pub guest_bytes: u64,
    /// Bytes of it that have memory now.
    pub live_bytes: u64,
    /// Bytes of its RAM files that would be registered, which RDMA pins.
    pub registered_bytes: u64,
    /// By what the parent's node can be read, best first.
    pub offers: Vec<FabricOffer>,
    /// Where datagrams would go.
    pub group: Option<SocketAddrV4>,
    /// Disks that the guest writes to.
    pub disks: Vec<OrderDisk>,
    /// Why the parent's node cannot serve their images; `None`: it can.
    pub no_export: Option<String>,
}

/// What a host needs to fetch the template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Begin {
    /// Which host it is, from 1.
    pub me: u32,
    /// Others read from it.
    pub listens: bool,
    /// Other hosts by the names that the distribution gives them.
    pub peers: Vec<(String, PeerTarget)>,
    /// [`Manifest`](vmove_clone::template::Manifest) as JSON.
    pub manifest: String,
    /// Device state.
    pub state: Vec<u8>,
    /// Checksum over all memory, to be compared in the end.
    pub checksum: Option<u64>,
    /// What of the RAM blocks has memory: the regions of the distribution.
    pub parts: Vec<Part>,
    /// Why the parent's node does not let its memory be read over RDMA after all; `None`: it does, and datagrams go that way, too.
    pub no_verbs: Option<String>,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// [`ChildReport`](vmove_clone::report::ChildReport)s as JSON. Times count from the arrival of the order.
    pub children: String,
    /// From the arrival of the order until the template was whole, in milliseconds.
    pub template_ms: f64,
    pub pieces: Pieces,
    pub wrong: u64,
    /// Chunks that were read because a child waited for them.
    pub wanted: u64,
    /// By which memory was read from the parent's node in the end, and why.
    pub fabric: String,
    pub fabric_reason: String,
    /// [`FaultStats`](vmove_migrate::report::FaultStats) as JSON, of children that ran before the template was whole.
    pub faults: Option<String>,
}

/// What the distribution calls the parent's node, and a host.
pub fn address_of(host: u32) -> String {
    if host == 0 { "root".to_owned() } else { format!("host-{host}") }
}
