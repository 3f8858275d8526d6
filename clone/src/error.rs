//! Why something did not work.

use std::io;
use std::path::{Path, PathBuf};

use vmove_hooks::ForbiddenByHook;
use vmove_memory::{KeepFailure, MemoryError};
use vmove_node::blocking::spawn_blocking;
use vmove_qmp::QmpError;
use vmove_qmp::cmdline::CommandLineError;
use vmove_qmp::hotplug::HotplugError;
use vmove_qmp::process::ProcessError;
use vmove_qmp::switchover::SwitchoverError;
use vmove_types::check::Blocker;
use vmove_types::problem::{Code, chain};

use crate::chunks::ChunksError;

/// Why a fork, or a part of it, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloneError {
    /// Something stands in the way; nothing was changed.
    #[error("This guest cannot be forked:{}", list(.0))]
    Refused(Vec<Blocker>),
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A device that is plugged in, or is to be.
    #[error(transparent)]
    Hotplug(#[from] HotplugError),
    /// A QEMU's monitor.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Saving or loading device state.
    #[error(transparent)]
    Switchover(#[from] SwitchoverError),
    /// Starting or ending a QEMU.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Deriving a child's command line.
    #[error(transparent)]
    CommandLine(#[from] CommandLineError),
    /// Too many children for the memory that is there.
    #[error("{0}")]
    NoRoom(String),
    /// A file.
    #[error("Could not {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A template that cannot be used.
    #[error("Template {path} cannot be used: {why}")]
    Template {
        /// Its folder.
        path: PathBuf,
        /// What was expected, what was found.
        why: String,
    },
    /// A child's memory is not what the template holds.
    #[error(
        "The memory of {child:?} differs from the template in {pages} pages, first at byte {first:#x} of {file}: it was not run"
    )]
    Differs {
        /// The child.
        child: String,
        /// RAM block.
        file: String,
        /// Pages of 4 KiB that differ.
        pages: u64,
        /// First byte that differs.
        first: u64,
    },
    /// The operator's hook.
    #[error("{child:?} may not run, and was ended before its network came up: {why}")]
    Hook {
        /// The child.
        child: String,
        /// The hook, and its reason.
        why: ForbiddenByHook,
    },
    /// The copy of a guest's memory could not be made.
    #[error(
        "The copy of {vm:?} as it was at the fork was given up with {kept} of {of} MiB looked at and {stored} MiB kept: {why}. The guest \
         runs on with its memory, and nothing is left of the template. {hint}"
    )]
    NotKept {
        /// The guest.
        vm: String,
        /// MiB of its memory that had been dealt with.
        kept: u64,
        /// MiB of its memory.
        of: u64,
        /// MiB that the template had taken.
        stored: u64,
        /// What was in the way.
        why: KeepFailure,
        /// What to do.
        hint: &'static str,
    },
    /// The guest is gone.
    #[error(
        "QEMU of {vm:?} ended while it was being forked: no child of it was made, and nothing is left of the fork. {log} tells what QEMU said"
    )]
    ParentEnded {
        /// The guest.
        vm: String,
        /// What QEMU wrote.
        log: PathBuf,
        /// What failed for that reason.
        #[source]
        error: Box<Self>,
    },
    /// The guest stands still.
    #[error(
        "The fork failed, and {vm:?} could not be set running again yet: {}. vmoved tries again until it can; `vmove list` shows when it \
         runs, and `vmove stop --force` ends it",
        chain(&**.why)
    )]
    ParentNotBack {
        /// The guest.
        vm: String,
        /// Why it could not be brought back.
        why: Box<Self>,
        /// Why the fork failed.
        #[source]
        error: Box<Self>,
    },
    /// A template that is on its way.
    #[error(transparent)]
    Chunks(#[from] ChunksError),
    /// A task of ours ended without an answer.
    #[error("A task ended early: {0}; see the log of vmoved")]
    Task(String),
}

impl CloneError {
    /// The stable word by which programs know it.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::Refused(_) => Code::NotMovable,
            Self::NoRoom(_) => Code::NoRoom,
            Self::NotKept { .. } => Code::NoMemory,
            Self::Template { .. } => Code::BadTemplate,
            Self::Qmp(_) => Code::QmpFailed,
            Self::Process(_) | Self::ParentEnded { .. } => Code::QemuFailed,
            Self::ParentNotBack { .. } => Code::ParentNotBack,
            Self::CommandLine(_) => Code::BadCommandLine,
            _ => Code::ForkFailed,
        }
    }

    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

fn list(blockers: &[Blocker]) -> String {
    blockers.iter().map(|blocker| format!("\n  {}: {}", blocker.code, blocker.message)).collect()
}

/// Runs what blocks (ptrace, files, page scans) off the threads that serve connections.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CloneError> + Send + 'static,
) -> Result<T, CloneError> {
    spawn_blocking(work).await.map_err(|error| CloneError::Task(error.to_string()))?
}
