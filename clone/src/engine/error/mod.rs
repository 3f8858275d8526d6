//! Why a fork failed, or was refused.

mod distribution;
mod images;
mod peers;

use std::path::PathBuf;
use std::time::Duration;

use vmove_hooks::ForbiddenByHook;
use vmove_node::blocking::TaskFailed;
use vmove_node::devices::DevicesError;
use vmove_node::guest_devices::detach::DetachError;
use vmove_node::guest_devices::script::ScriptError;
use vmove_node::guest_devices::told;
use vmove_node::peer::codec::CodecError;
use vmove_node::peer::{LinkError, NoCommonFabric, Objection, PeerTarget, SessionId, UnknownPeer};
use vmove_node::registry::RegistryError;
use vmove_node::store::VmStoreError;
use vmove_types::fork_report::ForkFailure;
use vmove_types::problem::{Code, Problem, ProblemCode, chain};
use vmove_types::progress::MissingDevice;
use vmove_types::units::number_of;

pub use self::distribution::{DistributionError, VerbsError};
pub use self::images::ImageError;
pub use self::peers::PeersError;
use crate::CloneError;

/// Why a fork, or a request about forks, failed. [`ForkError::code`] gives the stable word for programs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForkError {
    /// An id that cannot be one.
    #[error("Expected an id of 1 to 64 letters, digits and dashes, found {0:?}")]
    BadId(String),
    /// An id that was used before.
    #[error("There is a fork {0:?} already: choose another id")]
    IdTaken(String),
    /// A request that names no parent, or two.
    #[error("Expected either vm or template, found both or none")]
    NoSingleParent,
    /// A request for no children.
    #[error("Expected at least one child, found 0; to keep a guest as it is now, see `vfork template save`")]
    NoChildren,
    /// Names for other children than there are to be.
    #[error("Expected a name for each of the {children} children, found {names}")]
    OtherNumberOfNames {
        /// Names of the request.
        names: usize,
        /// Its children.
        children: usize,
    },
    /// One name for two children.
    #[error("Expected another name for each child, found {0:?} twice")]
    NameTwice(String),
    /// A guest as it was, and more than one of it.
    #[error(
        "A guest as it was comes from a template, alone, on the node of the template: two of it would have the same addresses"
    )]
    NotAsItWas,
    /// A guest of a template that could not be made to run.
    #[error("VM {vm:?} does not run: {why}")]
    NotRestored {
        /// Its name.
        vm: String,
        /// Why.
        why: String,
    },
    /// Children that stay paused, on other nodes.
    #[error(
        "Expected no nodes with paused children, found some: children that stay paused are made on the node of the parent"
    )]
    PausedElsewhere,
    /// This node does not take a child.
    #[error(transparent)]
    NotAdmitted(Problem),
    /// A hook of the operator.
    #[error(transparent)]
    Hook(#[from] ForbiddenByHook),
    /// More children than the policy allows.
    #[error(
        "{} asked for, this node allows {allowed} (max-children in [fork])",
        number_of(*asked as u64, "child was", "children were")
    )]
    TooManyChildren {
        /// Children of the request.
        asked: usize,
        /// Most that are allowed.
        allowed: usize,
    },
    /// More prepared children than the policy allows.
    #[error("{asked} prepared children were asked for, this node allows {allowed} (max-children in [fork])")]
    TooManyPrepared {
        /// Children of the request.
        asked: usize,
        /// Most that are allowed.
        allowed: usize,
    },
    /// Children cannot be divided among nodes as asked.
    #[error(transparent)]
    Division(#[from] DivisionError),
    /// A word that names no node.
    #[error(transparent)]
    UnknownPeer(#[from] UnknownPeer),
    /// No fork of this id.
    #[error("No fork {0:?} of this daemon")]
    UnknownFork(String),
    /// The VM has not all of its memory yet.
    #[error("The memory of {vm:?} is still on its way from {node}: wait until `vfork tree` shows it as here")]
    Fetching {
        /// The child.
        vm: String,
        /// The parent's node.
        node: String,
    },
    /// The journal of a fork of the VM cannot be read.
    #[error(
        "How fork {fork} of {vm:?} stands is not known, see {path}: put the file right, or give up what cannot be read; then `vfork recover {fork}`"
    )]
    Unreadable {
        /// The VM.
        vm: String,
        /// Id of the fork.
        fork: String,
        /// Its journal.
        path: PathBuf,
    },
    /// What is noted of the VM's forks cannot be read.
    #[error(
        "Whether the memory of {vm:?} is private since a fork is not known, see {path}: put the file right, or move it away. Without it, a VM \
         whose memory is private can be neither moved nor forked"
    )]
    UnreadableMember {
        /// The VM.
        vm: String,
        /// The file.
        path: PathBuf,
    },
    /// The journal of this fork can be read, or there is none.
    #[error("Fork {0:?} needs no recovery: `vfork list` shows those whose journals cannot be read")]
    NothingToRecover(String),
    /// Another request changes the VM.
    #[error("{0:?} is being forked or promoted already: wait for the end of that")]
    Busy(String),

    /// A template of this name is there.
    #[error("There is a template {0:?} already: choose another name, or `vfork template rm` it")]
    TemplateExists(String),
    /// No template of this name.
    #[error("No template {0:?} on this node: `vfork template list` shows those there are")]
    UnknownTemplate(String),
    /// The template is not in memory.
    #[error("Template {0:?} is on disk only: `vfork template load {0}` brings it into memory")]
    TemplateOnDisk(String),

    /// An act on this node: freezing a guest, making a child.
    #[error(transparent)]
    Act(#[from] CloneError),
    /// The VMs of this node.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A task broke off.
    #[error(transparent)]
    Task(#[from] TaskFailed),

    /// Times that a guest is given for its devices.
    #[error("{0}")]
    Parting(String),
    /// A template is asked for what only a guest can do.
    #[error(
        "Expected no --quiesce with a template, found {0:?}: nothing runs in a template; --resume runs in the children"
    )]
    QuiesceTemplate(String),
    /// Devices of this node.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// A guest did not let a device go.
    #[error("The guest did not let its device {role} go")]
    Detach {
        /// What it is to the guest.
        role: String,
        /// Why.
        #[source]
        source: DetachError,
    },
    /// A program in the guest.
    #[error(transparent)]
    Script(#[from] ScriptError),
    /// It failed, and the guest lacks devices that it had.
    #[error("{}; {}", chain(&**.source), told(.missing))]
    DevicesMissing {
        /// The devices.
        missing: Vec<MissingDevice>,
        /// Why it failed.
        source: Box<ForkError>,
    },
    /// What another node orders of devices.
    #[error("The devices that the parent's node orders cannot be read")]
    OrderOfDevices(#[source] serde_json::Error),

    /// This node cannot take part in forks between nodes.
    #[error(transparent)]
    Peers(PeersError),
    /// Multicast was asked for and cannot be had.
    #[error("Multicast is not possible: {0}")]
    NoMulticast(#[source] PeersError),
    /// A template whose children would need disks of this node.
    #[error("This template has disks that can be written, and its children stay on this node")]
    TemplateWithDisks,
    /// Children of a guest with disks cannot be prepared on other nodes.
    #[error(
        "{0} writes to disks, and what children on other nodes have of them is known when it is forked: prepare children on this node \
         only, or none"
    )]
    PreparedWithDisks(String),
    /// A talk with another host failed.
    #[error("{host} {act}")]
    Host {
        /// The host.
        host: PeerTarget,
        /// What it did not do.
        act: &'static str,
        /// Why.
        #[source]
        source: TalkError,
    },
    /// Another host refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// No host takes part.
    #[error("{}", by_host(.0))]
    NoHost(Vec<(String, ForkError)>),

    /// This node does not take it from the parent's.
    #[error("{0}")]
    NotTaken(#[source] Objection),
    /// The two nodes have no fabric in common.
    #[error(transparent)]
    NoCommonFabric(#[from] NoCommonFabric),
    /// The template cannot be read by RDMA.
    #[error(transparent)]
    NoVerbs(VerbsError),
    /// The parent's node is gone.
    #[error("the parent's node is gone")]
    ParentLost(#[source] TalkError),
    /// The parent's node gave the fork up.
    #[error("{0}")]
    GivenUp(String),
    /// The template did not arrive whole.
    #[error("{source}, with {missing} chunks of 4 KiB missing")]
    Incomplete {
        /// Chunks that are not here.
        missing: u32,
        /// Why.
        #[source]
        source: Box<ForkError>,
    },
    /// The manifest of the template cannot be read.
    #[error("its manifest: {0}")]
    Manifest(serde_json::Error),
    /// The template is not what was ordered.
    #[error("Expected a template of {expected}, found {found}")]
    OtherTemplate {
        /// Bytes and kind of memory of the order.
        expected: String,
        /// The same of the template.
        found: String,
    },
    /// The images of a child's disks cannot be reached here.
    #[error("Its disks cannot be reached: {}", chain(.0))]
    NoImages(ImageError),
    /// Sockets that lead to the images of another node.
    #[error(transparent)]
    Images(ImageError),
    /// The distribution of the template.
    #[error(transparent)]
    Distribution(#[from] DistributionError),
    /// One child of an order failed, and so all of them.
    #[error("a child did not come to be, so none is there: {0}")]
    ChildFailed(String),
    /// Children ran and cannot go on.
    #[error("{children} children that ran were ended, since their memory can never be complete: {}", chain(.source))]
    Ended {
        /// How many.
        children: usize,
        /// Why.
        source: Box<ForkError>,
    },
    /// An id of prepared children that is known.
    #[error("Expected a new id for prepared children, found {0:?} again")]
    SetKnown(String),
    /// A node that asked itself.
    #[error("{0} was asked by itself: name this node as itself")]
    AskedItself(String),
    /// The order names a fork that this node has itself.
    #[error("{node} has a fork {fork:?} already: name this node as itself, or choose another id")]
    OwnFork {
        /// This node.
        node: String,
        /// Id of the fork.
        fork: String,
    },
    /// The daemon of this node ends.
    #[error("vmoved of {0} is ending")]
    Ending(String),

    /// This node has no such child.
    #[error("{node} has no child {child:?} of that fork (any more)")]
    NoChild {
        /// This node.
        node: String,
        /// The child.
        child: String,
    },
    /// This node knows of no migration that brought the guest.
    #[error("{node} knows no migration {session} that brought a guest")]
    UnknownMigration {
        /// This node.
        node: String,
        /// The migration.
        session: SessionId,
    },
    /// The guest that a migration brought has ended.
    #[error("It has ended on {0}")]
    HasEnded(String),
    /// A guest was moved from node to node too often to be followed.
    #[error("It was moved on more than {most} times: ask {to}")]
    MovedTooOften {
        /// Nodes that are asked at most.
        most: u8,
        /// The next one.
        to: PeerTarget,
    },
}

impl From<VmStoreError> for ForkError {
    fn from(error: VmStoreError) -> Self {
        Self::Registry(error.into())
    }
}

impl ForkError {
    /// The stable word by which programs know it.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::BadId(_)
            | Self::IdTaken(_)
            | Self::NoSingleParent
            | Self::SetKnown(_)
            | Self::OrderOfDevices(_)
            | Self::AskedItself(_)
            | Self::OwnFork { .. } => Code::BadRequest,
            Self::NoChildren
            | Self::PausedElsewhere
            | Self::OtherNumberOfNames { .. }
            | Self::NameTwice(_)
            | Self::NotAsItWas
            | Self::Division(_)
            | Self::Parting(_)
            | Self::QuiesceTemplate(_) => Code::BadOption,
            Self::Devices(error) => error.code(),
            Self::DevicesMissing { .. } => Code::DeviceMissing,
            Self::Hook(_) => Code::ForbiddenByHook,
            Self::NotAdmitted(why) => why.code,
            Self::TooManyChildren { .. }
            | Self::TooManyPrepared { .. }
            | Self::Peers(_)
            | Self::NoMulticast(_)
            | Self::NotTaken(_)
            | Self::NoCommonFabric(_) => Code::Forbidden,
            Self::UnknownPeer(_) => Code::UnknownNode,
            Self::UnknownFork(_) | Self::UnknownMigration { .. } => Code::UnknownMigration,
            Self::Fetching { .. }
            | Self::Busy(_)
            | Self::Unreadable { .. }
            | Self::UnreadableMember { .. } => Code::Busy,
            Self::NothingToRecover(_) => Code::NothingToRecover,
            Self::TemplateExists(_) => Code::NameTaken,
            Self::UnknownTemplate(_) | Self::TemplateOnDisk(_) => Code::UnknownTemplate,
            Self::Manifest(_) | Self::OtherTemplate { .. } => Code::BadTemplate,
            Self::TemplateWithDisks | Self::PreparedWithDisks(_) | Self::NoImages(_) => Code::NotMovable,
            Self::NoChild { .. } | Self::HasEnded(_) => Code::UnknownVm,
            Self::Task(_) => Code::Internal,
            Self::Act(error) => error.code(),
            Self::Registry(error) => error.code(),
            Self::Refused(refusal) => refusal.code,
            Self::NoHost(all) => all.last().map_or(Code::ForkFailed, |(_, error)| error.code()),
            Self::Ended { source, .. } => source.code(),
            Self::Host { .. }
            | Self::NoVerbs(_)
            | Self::ParentLost(_)
            | Self::Detach { .. }
            | Self::Script(_)
            | Self::GivenUp(_)
            | Self::Incomplete { .. }
            | Self::Images(_)
            | Self::Distribution(_)
            | Self::ChildFailed(_)
            | Self::NotRestored { .. }
            | Self::Ending(_)
            | Self::MovedTooOften { .. } => Code::ForkFailed,
        }
    }

    /// Its message with those of its causes.
    #[must_use]
    pub fn message(&self) -> String {
        chain(self)
    }

    /// As the progress of a fork tells it.
    pub(super) fn failure(&self) -> ForkFailure {
        let code = self.code();
        ForkFailure { code: code.word(), message: self.message(), exit_code: code.mapping().1.code() }
    }
}

fn by_host(errors: &[(String, ForkError)]) -> String {
    let all: Vec<String> =
        errors.iter().map(|(host, error)| format!("{host}: {}", error.message())).collect();
    all.join("; ")
}

/// Why two daemons did not come to the end of what they had to say to each other.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TalkError {
    /// No connection.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The connection broke.
    #[error("the connection to it is lost: {0}")]
    Codec(#[from] CodecError),
    /// No answer.
    #[error("no answer within {} s", .0.as_secs())]
    Silent(Duration),
    /// Nothing was heard for too long.
    #[error("nothing was heard of it for {} s", .0.as_secs())]
    NotHeard(Duration),
    /// Another message than was expected.
    #[error("expected {expected}, found {found}")]
    Unexpected {
        /// What was expected.
        expected: &'static str,
        /// The kind of message that came.
        found: &'static str,
    },
    /// What the other side says of its failure.
    #[error("{0}")]
    Said(String),
}

/// What another host refuses with: its own code and words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The stable word.
    pub code: Code,
    /// For people.
    pub message: String,
}

impl From<&ForkError> for Refusal {
    fn from(error: &ForkError) -> Self {
        Self { code: error.code(), message: error.message() }
    }
}

/// Why children cannot be divided among nodes as a request has it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DivisionError {
    /// A node is named twice.
    #[error("Expected each node once, found {0:?} twice")]
    Twice(String),
    /// Some children are to be here, and no node is named for the others.
    #[error("{here} of {count} children are to be here: name the nodes of the others")]
    NoNodes {
        /// Children that are to be here.
        here: usize,
        /// All children.
        count: usize,
    },
    /// More children are to be here than there are.
    #[error("Expected at most {count} children here, found {here}")]
    TooManyHere {
        /// Children that are to be here.
        here: usize,
        /// All children.
        count: usize,
    },
    /// Shares that do not divide the children.
    #[error(
        "Expected a share for each of the {nodes} nodes, {count} children in all with those here, found {shares} shares and {all} children"
    )]
    Shares {
        /// Shares of the request.
        shares: usize,
        /// Its nodes.
        nodes: usize,
        /// The children of these shares, with those here.
        all: usize,
        /// The children of the request.
        count: usize,
    },
    /// Some children are to be elsewhere, and only this node is named.
    #[error("{} to be elsewhere, and no other node is named", number_of(*.0 as u64, "child is", "children are"))]
    NoOthers(usize),
}
