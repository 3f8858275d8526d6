//! What the parent's daemon and those of other hosts say to each other about one fork.
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
//!
//! Messages are frames of postcard: the order of variants and fields is the format. Reports, manifests and refusals cross as JSON: their
//! optional fields are left out where they have no value.

use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmove_node::peer::SessionId;
use vmove_node::peer::{FabricOffer, PeerTarget};
use vmove_spread::HostTotals;
use vmove_types::Backing;
use vmove_types::problem::{Code, Problem};

use super::error::{ForkError, Refusal};
use crate::disk::Disk;
use crate::identity::child_name;

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
    /// Instead of an order: what has become of the children of a guest that forked itself?
    Ticket(AskTicket),
}

/// A question about the children that a guest of the asking node has here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskTicket {
    /// Id of the fork.
    pub ticket: String,
    pub act: TicketAct,
    /// Numbers of children whose ends the asking node has written down.
    pub taken: Vec<u32>,
}

/// What is to be done about the children of a ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TicketAct {
    /// Answer when another of them has ended, or after a while.
    Wait,
    /// End those that live.
    Kill,
    /// Nobody waits for them any more.
    Forget,
}

/// What has become of the children of a ticket on a node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TicketEnds {
    /// The node has the ticket.
    pub known: bool,
    /// Children that live, or are being made.
    pub living: u32,
    /// Ends that the asking node did not have: the child's number, and a JSON object with `result` or `lost`. Perhaps not all of them.
    pub ends: Vec<(u32, String)>,
}

/// Children that a guest has asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfGuest {
    /// The guest that forked itself first: `NODE/VM`.
    pub root: String,
    /// 1 for its children, 2 for theirs.
    pub depth: u32,
}

/// What children are told that a guest has asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Numbers {
    /// Of the first child of this host, among the children on all nodes. From 1 on.
    pub first: u32,
    /// Children on all nodes.
    pub size: u32,
}

/// What must be the same for a child that was prepared and one that is ordered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kind {
    pub command_line: Vec<String>,
    pub environment: Vec<(String, String)>,
    pub machine: String,
    /// QEMU that writes the device state.
    pub qemu: String,
    pub backing: Backing,
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
    /// What has become of the children of a guest.
    Ends(TicketEnds),
}

impl ToHost {
    /// The kind of message, for errors.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Order(_) => "an order",
            Self::Begin(_) => "a template",
            Self::Alive => "a sign of life",
            Self::Release => "a release",
            Self::GiveUp(_) => "the end of the fork",
            Self::Which(_) | Self::End(_) | Self::Came(_) | Self::Reads(_) | Self::Ticket(_) => "a question",
            Self::Warm(_) => "an order for prepared children",
        }
    }
}

impl ToParent {
    /// The refusal of what was asked.
    pub fn refused(error: &ForkError) -> Self {
        let Refusal { code, message } = error.into();
        Self::Refused(serde_json::to_string(&Problem::new(code, message)).unwrap_or_default())
    }

    /// The answer of a node, unless it refuses.
    pub fn unless_refused(self, node: &impl std::fmt::Display) -> Result<Self, Refusal> {
        let Self::Refused(text) = self else { return Ok(self) };
        let without =
            || Refusal { code: Code::ForkFailed, message: format!("{node} refused without a reason") };
        let found: Problem = serde_json::from_str(&text).map_err(|_| without())?;
        Err(Refusal { code: found.code, message: found.message })
    }

    /// The kind of message, for errors.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Accepted(_) => "an acceptance",
            Self::Refused(_) => "a refusal",
            Self::Progress(_) => "progress",
            Self::Done(_) => "the end of its part",
            Self::Failed(_) => "a failure",
            Self::Living(_) => "names of children",
            Self::Ended(_) => "the end of a child",
            Self::Reads(_) => "whether it reads images",
            Self::Prepared => "prepared children",
            Self::Ends(_) => "ends of children",
        }
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
    /// Their names, in the same order; none: `PARENT.NUMBER`.
    pub names: Vec<String>,
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
    /// Devices of the host that the children get, as JSON; `None`: none.
    pub devices: Option<String>,
    /// What a bridge lets them have there, by name.
    pub grants: BTreeMap<String, String>,
    /// A guest has asked for them.
    pub guest: Option<OfGuest>,
}

impl Order {
    /// Numbers and names of the children.
    pub fn children(&self) -> impl Iterator<Item = (u32, String)> + '_ {
        let name = |(place, index): (usize, &u32)| {
            let name = self.names.get(place).cloned();
            (*index, name.unwrap_or_else(|| child_name(&self.parent, *index)))
        };
        self.indexes.iter().enumerate().map(name)
    }
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
    /// [`Manifest`](crate::template::Manifest) as JSON.
    pub manifest: String,
    /// Device state.
    pub state: Vec<u8>,
    /// Checksum over all memory, to be compared in the end.
    pub checksum: Option<u64>,
    /// What of the RAM blocks has memory: the regions of the distribution.
    pub parts: Vec<RamPart>,
    /// Why the parent's node does not let its memory be read over RDMA after all; `None`: it does, and datagrams go that way, too.
    pub no_verbs: Option<String>,
    /// What the children are told, if a guest has asked for them.
    pub numbers: Option<Numbers>,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// [`ChildReport`](vmove_types::fork_report::ChildReport)s as JSON. Times count from the arrival of the order.
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
    /// [`FaultStats`](vmove_types::report::FaultStats) as JSON, of children that ran before the template was whole.
    pub faults: Option<String>,
}

/// A part of a RAM block that has memory: one of the regions of the distribution. The rest is zero, and registered nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamPart {
    /// Which RAM block.
    pub ram: u16,
    /// In bytes, a whole number of chunks.
    pub start: u64,
    /// In bytes.
    pub len: u64,
}

impl RamPart {
    /// Where it ends, in bytes.
    pub const fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// A disk that children on another host are to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderDisk {
    /// The disk, as the parent's node has it.
    pub disk: Disk,
    /// The files that it is made of, each with a second name by which it is known; or why it cannot be seen elsewhere.
    pub layers: Sights,
}

/// What a host needs to find the files of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sights {
    /// All of them.
    Of(Vec<Sight>),
    /// They cannot be seen elsewhere: why.
    None(String),
}

/// A file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sight {
    /// As QEMU opens it.
    pub path: PathBuf,
    /// Its second name.
    pub link: PathBuf,
    /// Number of its inode at the parent's node.
    pub inode: u64,
}

/// How a host's children get at the images of their disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reached {
    /// It sees the same files; otherwise through the parent's node.
    pub shared: bool,
    /// Why so.
    pub why: String,
}

impl Reached {
    /// As reports have it.
    pub const fn word(&self) -> &'static str {
        if self.shared { "shared path" } else { "nbd" }
    }
}

/// A guest that came to a node by a migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Came {
    /// The migration.
    pub session: SessionId,
    /// Nodes that have been asked before.
    pub passed: u8,
    /// It is to be ended.
    pub end: bool,
}

/// What the distribution calls the parent's node, and a host.
pub fn address_of(host: u32) -> String {
    if host == 0 { "root".to_owned() } else { format!("host-{host}") }
}
