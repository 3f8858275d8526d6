//! What nodes inside programs are made of: their folders, and the VMs in them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vmove_memory::{MemoryDir, MemoryError};
use vmove_qmp::confine::Confinement;
use vmove_types::Backing;
use vmove_types::vm::{AdoptRequest, RunRequest, VmDetail};

use crate::devices::NoDevices;
use crate::files::{OwnDirError, own_dir};
use crate::layout;
use crate::lock::{LockError, StateLock};
use crate::migrations::Migrations;
use crate::monitors::Monitors;
use crate::registry::{Means, Registry, RegistryError};
use crate::reservations::Reservations;
use crate::starter::Starter;
use crate::store::{VmStore, VmStoreError};

/// Why the folders of a node cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroundError {
    /// A folder is not the node's own.
    #[error(transparent)]
    Folder(#[from] OwnDirError),
    /// Another node uses the state folder.
    #[error(transparent)]
    Taken(#[from] LockError),
    /// The records of VMs.
    #[error(transparent)]
    Store(#[from] VmStoreError),
    /// The folder of guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The folders of a node, and what looks after the VMs in them. It has no passed-through devices.
#[derive(Debug)]
pub struct Ground {
    /// Journals, without symbolic links.
    pub state_dir: PathBuf,
    /// A folder for each VM.
    pub vms_dir: PathBuf,
    /// Guest memory: tmpfs is mounted in it.
    pub memory_dir: PathBuf,
    /// Records of VMs.
    pub vms: Arc<VmStore>,
    /// Connections to QEMUs.
    pub monitors: Arc<Monitors>,
    /// Starts QEMUs.
    pub starter: Starter,
    /// Memory that was promised.
    pub reservations: Arc<Reservations>,
    /// With which rights QEMUs run.
    pub confinement: Confinement,
    lock: Arc<StateLock>,
}

impl Ground {
    /// Takes the folders, which are made if need be. `state_dir` must outlive a reboot.
    ///
    /// # Errors
    /// [`GroundError`]; [`GroundError::Taken`] while another node uses the state folder. Waits up to two seconds for one whose process has ended.
    pub fn take(state_dir: &Path, run_dir: &Path, confinement: Confinement) -> Result<Self, GroundError> {
        let state_dir = own_dir("state", state_dir)?;
        let lock = Arc::new(StateLock::take(&state_dir)?);
        let run_dir = own_dir("run", run_dir)?;
        let memory_dir = run_dir.join("memory");
        MemoryDir::prepare(&layout::memory_dir(&memory_dir, Backing::Thp), Backing::Thp)?;
        Ok(Self {
            vms: Arc::new(VmStore::open(&state_dir.join("vms"))?),
            monitors: Arc::new(Monitors::default()),
            starter: Starter::plain(),
            reservations: Reservations::new(memory_dir.clone()),
            vms_dir: run_dir.join("vms"),
            state_dir,
            memory_dir,
            confinement,
            lock,
        })
    }

    /// Its VMs. `migrations` may hold some of them.
    #[must_use]
    pub fn registry(&self, migrations: Arc<dyn Migrations>) -> Arc<Registry> {
        let means = Means {
            run_dir: self.vms_dir.clone(),
            reservations: Arc::clone(&self.reservations),
            starter: self.starter.clone(),
            devices: Arc::new(NoDevices),
            confinement: self.confinement.clone(),
            keep_stopped: Duration::MAX,
        };
        Registry::new(Arc::clone(&self.vms), Arc::clone(&self.monitors), migrations, means)
    }

    /// Keeps other nodes away from the state folder, until the last clone is dropped.
    #[must_use]
    pub const fn lock(&self) -> &Arc<StateLock> {
        &self.lock
    }
}

/// Starts a VM: QEMU and its arguments, in which `{vmdir}` and `{name}` are replaced. Its memory has transparent huge pages.
///
/// # Errors
/// It does not start, or could not be moved. Nothing is left then.
pub async fn run<S: Into<String>>(
    registry: &Arc<Registry>,
    name: &str,
    command_line: impl IntoIterator<Item = S>,
) -> Result<VmDetail, RegistryError> {
    let request = RunRequest {
        name: name.to_owned(),
        memory: Backing::Thp.name().to_owned(),
        command_line: command_line.into_iter().map(Into::into).collect(),
        environment: BTreeMap::new(),
        devices: Vec::new(),
        grant: None,
        pin: None,
    };
    registry.run(request).await
}

/// Takes in a QEMU that runs already, by a QMP socket of its own. Its RAM must be a shared file.
///
/// # Errors
/// It cannot be taken in; it is as it was then.
pub async fn adopt(
    registry: &Arc<Registry>,
    name: &str,
    qmp: impl Into<PathBuf>,
) -> Result<VmDetail, RegistryError> {
    registry.adopt(AdoptRequest { name: name.to_owned(), qmp: qmp.into() }).await
}
