//! All sessions of one daemon: the interface between `vmoved` and the session machines.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::check::CheckReport;
use crate::link::{Dialer, Link, PeerTarget};
use crate::progress::Progress;
use crate::proto::hello::{Hello, SessionId, Status};
use crate::spec::MigrationSpec;
use crate::vm::{VmStore, VmStoreError};

/// Settings of the engine.
pub struct EngineConfig {
    /// Name of this node.
    pub node: String,
    /// Journals and page maps of sessions.
    pub sessions_dir: PathBuf,
    /// Runtime folders of VMs (`vm_dir` is made below it).
    pub run_dir: PathBuf,
    /// RAM files of VMs, by backing, are made below it.
    pub memory_dir: PathBuf,
    /// Opens connections to peers.
    pub dialer: Arc<dyn Dialer>,
    /// Bulk connections per session.
    pub bulk_connections: u8,
    /// How long a session that lost its peer after the hand-over goes on trying.
    pub reconnect_for: Duration,
}

impl std::fmt::Debug for EngineConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineConfig").field("node", &self.node).finish_non_exhaustive()
    }
}

/// Why a request was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Unknown VM, or its record cannot be used.
    #[error(transparent)]
    Vm(#[from] VmStoreError),
    /// The VM is in a migration already.
    #[error("{vm:?} is in migration {session} already: see `vmove status`, or `vmove cancel {session}`")]
    Busy {
        /// The VM.
        vm: String,
        /// The session.
        session: SessionId,
    },
    /// No such session.
    #[error("No migration {0} on this node: `vmove history` shows those there were")]
    UnknownSession(String),
    /// Too late.
    #[error("Migration {0} has handed the guest over and can no longer be cancelled: it runs at the destination")]
    TooLate(SessionId),
    /// The options are out of range.
    #[error("{0}")]
    BadSpec(String),
    /// Nothing to recover.
    #[error("Migration {0} needs no recovery: it is {1}")]
    NothingToRecover(SessionId, String),
    /// The state directory cannot be used.
    #[error("Could not use {path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
}

/// All sessions of one daemon.
#[derive(Debug)]
pub struct Engine {
    _config: EngineConfig,
}

impl Engine {
    /// Opens the state directory. Call [`Engine::resume_unfinished`] once the listener is up.
    ///
    /// # Errors
    /// [`EngineError::Io`].
    pub fn open(config: EngineConfig, vms: Arc<VmStore>) -> Result<Arc<Self>, EngineError> {
        let _ = vms;
        Ok(Arc::new(Self { _config: config }))
    }

    /// Takes up the sessions that an earlier process of this daemon left behind, each where its journal says it stands.
    pub async fn resume_unfinished(self: &Arc<Self>) {}

    /// Starts a migration from this node.
    ///
    /// # Errors
    /// [`EngineError`]; nothing was changed then.
    pub async fn start(self: &Arc<Self>, vm: &str, to: PeerTarget, spec: MigrationSpec) -> Result<SessionId, EngineError> {
        let _ = (vm, to, spec);
        Err(EngineError::BadSpec("under construction".to_owned()))
    }

    /// Looks for everything that stands in the way; changes nothing.
    ///
    /// # Errors
    /// [`EngineError::Vm`]; an unreachable peer is a blocker in the report.
    pub async fn check(self: &Arc<Self>, vm: &str, to: PeerTarget) -> Result<CheckReport, EngineError> {
        let _ = (vm, to);
        Err(EngineError::BadSpec("under construction".to_owned()))
    }

    /// Calls a migration off; the guest goes on at the source.
    ///
    /// # Errors
    /// [`EngineError::UnknownSession`] or [`EngineError::TooLate`].
    pub async fn cancel(self: &Arc<Self>, id: &str) -> Result<(), EngineError> {
        Err(EngineError::UnknownSession(id.to_owned()))
    }

    /// `vmove recover`: tries again what a session gave up on, on the side that owns the guest.
    ///
    /// # Errors
    /// [`EngineError::UnknownSession`] or [`EngineError::NothingToRecover`].
    pub async fn recover(self: &Arc<Self>, id: &str) -> Result<(), EngineError> {
        Err(EngineError::UnknownSession(id.to_owned()))
    }

    /// The newest snapshot of a session and those to come. `id` may be any unambiguous prefix.
    ///
    /// # Errors
    /// [`EngineError::UnknownSession`].
    pub fn progress(&self, id: &str) -> Result<watch::Receiver<Progress>, EngineError> {
        Err(EngineError::UnknownSession(id.to_owned()))
    }

    /// The newest snapshot of every session that this daemon knows, running ones first, then newest first.
    #[must_use]
    pub fn sessions(&self) -> Vec<Progress> {
        Vec::new()
    }

    /// Whether a connection with this greeting is wanted. Called before [`Engine::accept`], to answer the greeting.
    ///
    /// # Errors
    /// The status and the sentence for the peer.
    pub fn wants(&self, hello: &Hello) -> Result<(), (Status, String)> {
        let _ = hello;
        Ok(())
    }

    /// Takes a connection whose greeting was wanted.
    pub async fn accept(self: &Arc<Self>, hello: Hello, link: Link) {
        let _ = (hello, link);
    }
}
