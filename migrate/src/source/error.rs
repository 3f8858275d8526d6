//! Why the source cannot send the guest away, or cannot go on with it.

use std::io;
use std::path::PathBuf;

use vmove_fabric::{FabricError, FabricKind};
use vmove_memory::MemoryError;
use vmove_node::peer::codec::CodecError;
use vmove_node::peer::{LinkError, PeerTarget};
use vmove_node::store::VmStoreError;
use vmove_qmp::QmpError;
use vmove_qmp::cmdline::CommandLineError;
use vmove_qmp::disks::CopyError;
use vmove_qmp::hotplug::HotplugError;
use vmove_qmp::process::ProcessError;
use vmove_qmp::switchover::SwitchoverError;
use vmove_types::check::Blocker;
use vmove_types::problem::chain;

use crate::devices::detach::DetachError;
use crate::devices::script::ScriptError;
use crate::ownership::{IllegalStep, SourceState};
use crate::proto::message::ToSource;

/// Why the way to the hand-over ended early.
#[derive(Debug)]
pub(super) enum Stop {
    /// Blockers; nothing was changed.
    Refused(Vec<Blocker>),
    /// An operator asked.
    Cancelled,
    /// Something did not work.
    Failed(SourceError),
}

impl<E: Into<SourceError>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl Stop {
    /// For those that are called off with it.
    pub(super) fn why_told(&self) -> String {
        match self {
            Self::Refused(blockers) => {
                let all: Vec<&str> = blockers.iter().map(|blocker| blocker.message.as_str()).collect();
                format!("refused: {}", all.join("; "))
            }
            other => other.why(),
        }
    }

    /// For the operator and the destination.
    pub(super) fn why(&self) -> String {
        match self {
            Self::Refused(_) => "refused".to_owned(),
            Self::Cancelled => "cancelled by the operator".to_owned(),
            Self::Failed(error) => chain(error),
        }
    }
}

/// What ends a session, or its work with one connection. Each message says which side it is about.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SourceError {
    #[error("Could not write the journal {} at the source", path.display())]
    Journal { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Illegal(#[from] IllegalStep),
    #[error("QEMU at the source could not be asked what it is")]
    Monitor(#[source] QmpError),
    #[error("QEMU at the source did not {command} the guest")]
    StopOrCont { command: &'static str, source: QmpError },
    #[error("QEMU at the source could not {act}")]
    Qemu { act: &'static str, source: SwitchoverError },
    #[error("Could not {act} at the source")]
    Memory { act: &'static str, source: MemoryError },
    #[error("Could not name the guest's pages at the source")]
    Naming(#[from] NamingError),
    #[error("The destination was lost")]
    Lost(#[from] CodecError),
    #[error("The destination was lost: nothing heard from it for {0} s")]
    Silence(u64),
    #[error("{to} did not answer within {seconds} s")]
    NoAnswer { to: PeerTarget, seconds: u64 },
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("{to} does not know the session: {why}")]
    UnknownSession { to: PeerTarget, why: String },
    /// What the destination says of itself.
    #[error("{to}: {why}")]
    AtDestination { to: PeerTarget, why: String },
    #[error("Protocol violation by {to}: {message} in state {state}")]
    OutOfOrder { to: PeerTarget, message: &'static str, state: SourceState },
    #[error("{0} lost the guest's QEMU before the guest ran there; it goes on at the source")]
    GivenBack(PeerTarget),
    #[error("{0} gives back a guest that has run there")]
    GivenBackTooLate(PeerTarget),
    #[error("Called off with its group: {0}")]
    Group(String),
    #[error("The guest was not handed over within {0} ms")]
    TimedOut(u64),
    #[error("{vm} {why}")]
    NotConverging { vm: String, why: String },
    #[error("Page connections failed {times} times; the last time: {why}")]
    PagesLostTooOften { times: u32, why: String },
    #[error(transparent)]
    Fabric(#[from] FabricFailure),
    #[error("Could not serve pages at the source")]
    Serve(#[source] FabricError),
    #[error("This daemon was started anew")]
    StartedAnew,
    #[error("An operator no longer waits for the destination")]
    Abandoned,
    #[error("The journal names no fabric: the guest's memory cannot be served again")]
    NoFabric,
    #[error("The guest's devices could not be looked at")]
    Devices(#[source] HotplugError),
    #[error("The guest keeps its device {role}")]
    Detach { role: String, source: DetachError },
    #[error(transparent)]
    Script(#[from] ScriptError),
    #[error("The guest runs at {to}, but its old QEMU could not be ended")]
    NotReleased { to: PeerTarget, source: Box<ReleaseError> },
    #[error("The guest has more than 256 disks that are to move")]
    TooManyDisks,
    #[error("Could not listen for QEMU on {} at the source", path.display())]
    DiskSocket { path: PathBuf, source: io::Error },
    #[error("QEMU at the source could not begin to copy disk {name}")]
    DiskCopy { name: String, source: QmpError },
    #[error("The copy of disk {name} to the destination ended: {why}; the guest keeps its disk here")]
    DiskCopyEnded { name: String, why: String },
    #[error("The copies of the disks could not be ended; the guest keeps its disks here")]
    DisksNotWhole(#[from] CopyError),
    #[error("Could not look at the image {} at the source", path.display())]
    DiskImage { path: PathBuf, source: io::Error },
    #[error("The command line of the guest cannot be read")]
    CommandLine(#[from] CommandLineError),
    #[error("A task at the source ended without a result")]
    Task(#[from] tokio::task::JoinError),
}

/// Why what the guest had at the source could not be freed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReleaseError {
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error("Could not remove {}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Record(#[from] VmStoreError),
}

/// Why pages could not be named as zero or data.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NamingError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("The guest has more than 65535 RAM blocks")]
    TooManyBlocks,
}

/// Why the guest's memory cannot be read over a fabric. Another one may do. The text is also the reason in reports.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FabricFailure {
    #[error("{0} is not open here (any more)")]
    NotOpen(FabricKind),
    #[error(transparent)]
    Register(#[from] FabricError),
    #[error("{0}")]
    Dial(String),
}

impl SourceError {
    /// It came about on this side alone. What the destination says then is what it saw of that.
    pub(super) fn is_ours(&self) -> bool {
        matches!(
            self,
            Self::Qemu { source: SwitchoverError::Qmp { .. }, .. }
                | Self::Memory { .. }
                | Self::Journal { .. }
                | Self::Detach { .. }
                | Self::Script(_)
        )
    }

    /// For `map_err`: what was being done with memory.
    pub(super) fn memory(act: &'static str) -> impl Fn(MemoryError) -> Self + Copy {
        move |source| Self::Memory { act, source }
    }

    /// For `map_err`: what QEMU was to do.
    pub(super) fn qemu(act: &'static str) -> impl Fn(SwitchoverError) -> Self + Copy {
        move |source| Self::Qemu { act, source }
    }
}

/// A message that ends the phase: the destination's own reason, or one that may not come now.
pub(super) fn unexpected(to: &PeerTarget, state: SourceState, message: &ToSource) -> Stop {
    let to = to.clone();
    match message {
        ToSource::Failed(why) => SourceError::AtDestination { to, why: why.clone() }.into(),
        ToSource::Refused(blockers) => Stop::Refused(blockers.clone()),
        other => SourceError::OutOfOrder { to, message: other.name(), state }.into(),
    }
}
