//! Why a request about a VM of this node was not done.

use std::ffi::OsString;
use std::path::PathBuf;

use vmove_memory::{ByteLen, MemoryError};
use vmove_qmp::QmpError;
use vmove_qmp::cmdline::CommandLineError;
use vmove_qmp::process::ProcessError;
use vmove_types::problem::Code;
use vmove_types::units::format_bytes;
use vmove_types::{Backing, UnknownBacking};

use crate::blocking::TaskFailed;
use crate::devices::DevicesError;
use crate::migrations::AbandonError;
use crate::reservations::Room;
use crate::store::VmStoreError;

/// Why a VM could not be started, adopted, shown, changed or ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// Its name, or its record.
    #[error(transparent)]
    Store(#[from] VmStoreError),
    /// A migration holds it.
    #[error("{vm:?} is in migration {migration}: wait for its end, or `vmove cancel {migration}`")]
    InMigration {
        /// Name of the VM.
        vm: String,
        /// Id of the migration.
        migration: String,
    },
    /// One of its disks gets another image.
    #[error(
        "Disk {disk} of {vm:?} is on its way to another image: wait for its end, or `vmove move-disk {vm} {disk} --cancel`"
    )]
    DiskMoves {
        /// Name of the VM.
        vm: String,
        /// The disk.
        disk: String,
    },
    /// A migration holds it, and the other node is lost.
    #[error(
        "{vm:?} is in migration {migration}, which has lost {peer}: wait until that is back, or `vmove stop --force {vm}` ends the VM although memory is missing"
    )]
    PeerLost {
        /// Name of the VM.
        vm: String,
        /// Id of the migration.
        migration: String,
        /// Name of the node.
        peer: String,
    },
    /// A migration still holds it though it was to be ended by force.
    #[error("{vm:?} could not be taken from its migration")]
    NotAbandoned {
        /// Name of the VM.
        vm: String,
        /// Why.
        #[source]
        source: AbandonError,
    },
    /// This QEMU is a VM of this node already.
    #[error("That QEMU (pid {pid}) is on this node already, as {vm:?}: see `vmove show`")]
    KnownQemu {
        /// Its process.
        pid: u32,
        /// The name that it has.
        vm: String,
    },
    /// It was adopted, and this is done to such VMs only if it is forced.
    #[error(
        "{0:?} was adopted, somebody else started it: `vmove forget` releases it, `vmove stop --force` ends it"
    )]
    Adopted(String),
    /// It was not adopted, and this is done to adopted ones only.
    #[error("{0:?} was not adopted, its memory belongs to vmoved: end it by `vmove stop`, or move it")]
    NotAdopted(String),
    /// This QEMU could never be moved, for these reasons.
    #[error("This QEMU could never be moved:{}", list(.0))]
    NotMovable(Vec<String>),
    /// Its command line.
    #[error(transparent)]
    CommandLine(#[from] CommandLineError),
    /// A word of its command line.
    #[error("The command line holds {0:?}, which is not UTF-8: start it with UTF-8 names")]
    NotUtf8(OsString),
    /// An unknown kind of memory.
    #[error(transparent)]
    Backing(#[from] UnknownBacking),
    /// There is not enough memory of this kind.
    #[error(
        "Expected {} for guest memory, found {room} free; {}",
        format_bytes(.wanted.0), give_room(*.backing)
    )]
    NoMemory {
        /// The kind.
        backing: Backing,
        /// What the guest needs.
        wanted: ByteLen,
        /// What there is, and for whom it is reserved.
        room: Room,
    },
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// QEMU did not start, or does not end.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// QEMU could not be ended by a signal.
    #[error(transparent)]
    Kill(MemoryError),
    /// QEMU's monitor.
    #[error(transparent)]
    Monitor(#[from] QmpError),
    /// QEMU's monitor does not answer when it is to end.
    #[error("The monitor of {vm:?} (pid {pid}) does not answer: `vmove stop --force` ends it by a signal")]
    NoAnswer {
        /// Name of the VM.
        vm: String,
        /// Its process.
        pid: u32,
    },
    /// The user as whom QEMU runs may not do what the command line asks for.
    #[error("QEMU would not run with the rights that it has here:{}", list(.0))]
    Denied(Vec<String>),
    /// What that user may do could not be found out.
    #[error("Could not ask the kernel what QEMU's user may open: check that setpriv (util-linux) is in PATH")]
    NotAsked(#[source] std::io::Error),
    /// The folder of the VM.
    #[error("Could not make {path}: {source}")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
    /// A device of the node.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// A task broke off.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

impl RegistryError {
    /// The stable word by which programs know it.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::Store(error) => error.code(),
            Self::InMigration { .. } | Self::PeerLost { .. } | Self::DiskMoves { .. } => Code::Busy,
            Self::NotAbandoned { source: AbandonError::AtWork { .. }, .. } => Code::Busy,
            Self::NotAbandoned { .. } => Code::Internal,
            Self::KnownQemu { .. } => Code::NameTaken,
            Self::Adopted(_) => Code::Adopted,
            Self::NotAdopted(_) => Code::NotAdopted,
            Self::NotMovable(_) | Self::CommandLine(CommandLineError::NotMovable(_)) => Code::NotMovable,
            Self::CommandLine(CommandLineError::Proc { .. }) | Self::Process(ProcessError::Log { .. }) => {
                Code::Internal
            }
            Self::CommandLine(_) | Self::NotUtf8(_) | Self::Process(ProcessError::NoProgram) => {
                Code::BadCommandLine
            }
            Self::Devices(error) => error.code(),
            Self::Denied(_) => Code::QemuUser,
            Self::Backing(_) => Code::BadOption,
            Self::NoMemory { .. } | Self::Memory(_) => Code::NoMemory,
            Self::Process(_) | Self::Kill(_) => Code::QemuFailed,
            Self::Monitor(_) | Self::NoAnswer { .. } => Code::QmpFailed,
            Self::Folder { .. } | Self::NotAsked(_) | Self::Task(_) => Code::Internal,
        }
    }
}

fn list(reasons: &[String]) -> String {
    reasons.iter().map(|reason| format!("\n  {reason}")).collect()
}

const fn give_room(backing: Backing) -> &'static str {
    match backing {
        Backing::Thp => "give the guest less (-m), or end other guests",
        _ => "reserve more huge pages (sysctl vm.nr_hugepages), or use --memory thp",
    }
}
