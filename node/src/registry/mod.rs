//! The VMs of this node: started, taken in, watched, ended.

pub(crate) mod adopt;
mod elsewhere;
mod error;
mod monitor;
mod news;
mod past;
mod pause;
mod run;
pub(crate) mod show;
pub mod starting;
mod stop;
mod supervise;

pub use error::RegistryError;
pub use news::News;

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::devices::Devices;
use crate::monitors::Monitors;
use crate::record::VmRecord;
use crate::reservations::Reservations;
use crate::starter::Starter;
use crate::store::{HeldName, VmStore, VmStoreError, check_name};

use crate::blocking::run_blocking;
use crate::migrations::Migrations;
use vmove_qmp::confine::Confinement;
use vmove_types::progress::Outcome;

/// How long a monitor may take to answer a small question.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long it is waited for a QEMU that has ended to close its devices.
const GIVE_BACK: Duration = Duration::from_secs(10);
/// How many VMs that ended are remembered for `vmove list`.
const REMEMBERED: usize = 100;

/// All VMs of this node.
#[derive(Debug)]
pub struct Registry {
    vms: Arc<VmStore>,
    monitors: Arc<Monitors>,
    migrations: Arc<dyn Migrations>,
    run_dir: PathBuf,
    reservations: Arc<Reservations>,
    starter: Starter,
    devices: Arc<dyn Devices>,
    confinement: Confinement,
    keep_stopped: Duration,
    news: news::Tell,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Processes that have a watching task.
    watched: HashSet<Identity>,
    /// VMs that are being ended on request or cleaned up after: one task at a time does that.
    ending: HashSet<String>,
    /// Locks of those who stop or resume a VM (see `pause`).
    stopping: BTreeMap<String, Arc<tokio::sync::Mutex<()>>>,
    /// VMs that are to run on by themselves after a time, and by which request (see `pause`).
    paused_for: BTreeMap<String, u64>,
    /// Such requests so far.
    pauses: u64,
    /// VMs whose QEMU has ended by itself, until their name is used again.
    ended: BTreeMap<String, Ended>,
}

/// A VM that is no more.
#[derive(Debug, Clone)]
struct Ended {
    record: VmRecord,
    /// Why this daemon ended it, or the kernel did.
    why: Option<String>,
}

/// A process that cannot be mistaken for another.
type Identity = (String, i32, u64);

fn identity(record: &VmRecord) -> Identity {
    (record.name.clone(), record.pid, record.pid_start)
}

/// What a node starts VMs with.
#[derive(Debug)]
pub struct Means {
    /// The folder below which VMs have their files.
    pub run_dir: PathBuf,
    /// The memory for them.
    pub reservations: Arc<Reservations>,
    /// How their QEMUs are started.
    pub starter: Starter,
    /// Their devices.
    pub devices: Arc<dyn Devices>,
    /// The rights of their QEMUs.
    pub confinement: Confinement,
    /// How long the folders of those that are no more are kept. [`Duration::MAX`]: for ever.
    pub keep_stopped: Duration,
}

impl Registry {
    /// What runs on this node by `vms`.
    #[must_use]
    pub fn new(
        vms: Arc<VmStore>,
        monitors: Arc<Monitors>,
        migrations: Arc<dyn Migrations>,
        means: Means,
    ) -> Arc<Self> {
        let Means { run_dir, reservations, starter, devices, confinement, keep_stopped } = means;
        Arc::new(Self {
            vms,
            monitors,
            migrations,
            run_dir,
            reservations,
            starter,
            devices,
            confinement,
            keep_stopped,
            news: news::Tell::default(),
            state: Mutex::default(),
        })
    }

    /// Records of the VMs, in the state folder.
    #[must_use]
    pub const fn vms(&self) -> &Arc<VmStore> {
        &self.vms
    }

    /// Connections to the monitors of the VMs.
    #[must_use]
    pub const fn monitors(&self) -> &Arc<Monitors> {
        &self.monitors
    }

    /// Below it each VM has its folder.
    #[must_use]
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Below it are the RAM files of the VMs, by the kind of their memory.
    #[must_use]
    pub fn memory_dir(&self) -> &Path {
        self.reservations.memory_dir()
    }

    /// The rights that QEMUs are started with here.
    #[must_use]
    pub const fn confinement(&self) -> &Confinement {
        &self.confinement
    }

    /// Memory that guests on their way here were promised.
    #[must_use]
    pub const fn reservations(&self) -> &Arc<Reservations> {
        &self.reservations
    }

    /// How QEMUs are started here.
    #[must_use]
    pub const fn starter(&self) -> &Starter {
        &self.starter
    }

    /// Devices of the node that VMs have.
    #[must_use]
    pub const fn devices(&self) -> &Arc<dyn Devices> {
        &self.devices
    }

    /// The migrations to and from this node.
    #[must_use]
    pub const fn migrations(&self) -> &Arc<dyn Migrations> {
        &self.migrations
    }

    /// How many VMs are here.
    #[must_use]
    pub fn count(&self) -> usize {
        self.vms.list().len()
    }

    /// All records.
    #[must_use]
    pub fn records(&self) -> Vec<VmRecord> {
        self.vms.list()
    }

    /// Whether a VM of this name had ended by itself, and nobody is starting another one. It is told of once.
    fn forget_end(&self, name: &str) -> bool {
        !self.vms.is_name_held(name) && self.lock().ended.remove(name).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is a single insertion or removal: a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a name for a VM that is about to come.
    ///
    /// # Errors
    /// It cannot be a name, or is taken.
    pub fn reserve(self: &Arc<Self>, name: &str) -> Result<HeldName, RegistryError> {
        check_name(name)?;
        let reserved = self.vms.hold_name(name).ok_or_else(|| VmStoreError::Held(name.to_owned()))?;
        // An incoming migration has its record only later: it must not find its name taken then. Asked first, since it may
        // end between the two questions and leave the record.
        if self.migrations.of_vm(name).is_some() || self.vms.has(name) {
            return Err(VmStoreError::Exists(name.to_owned()).into());
        }
        Ok(reserved)
    }

    /// Whether a VM of this name is about to be here: it is being started, made as a child, or a migration holds it.
    #[must_use]
    pub fn is_expected(&self, name: &str) -> bool {
        self.vms.is_name_held(name) || self.migrations.of_vm(name).is_some()
    }

    /// Refuses while a migration holds the VM.
    ///
    /// # Errors
    /// [`RegistryError::InMigration`] or [`RegistryError::PeerLost`].
    pub fn not_in_session(&self, name: &str) -> Result<(), RegistryError> {
        match self.migrations.of_vm(name) {
            None => Ok(()),
            Some(found) if matches!(found.outcome, Outcome::Running) => {
                Err(RegistryError::InMigration { vm: name.to_owned(), migration: found.id })
            }
            Some(found) => {
                Err(RegistryError::PeerLost { vm: name.to_owned(), migration: found.id, peer: found.peer })
            }
        }
    }

    /// Refuses while a migration holds the VM, or one of its disks gets another image.
    ///
    /// # Errors
    /// As [`Registry::not_in_session`]; [`RegistryError::DiskMoves`].
    pub fn not_at_work(&self, name: &str) -> Result<(), RegistryError> {
        self.not_in_session(name)?;
        let moving = self.migrations.moving_disk(name);
        moving.map_or(Ok(()), |disk| Err(RegistryError::DiskMoves { vm: name.to_owned(), disk }))
    }

    /// Adds the record, which makes the VM real, and watches it.
    ///
    /// # Errors
    /// The record cannot be written, or there is one of this name.
    pub async fn enter(self: &Arc<Self>, record: VmRecord) -> Result<(), RegistryError> {
        let vms = self.vms.clone();
        let new = record.clone();
        run_blocking(move || vms.insert(new)).await??;
        self.lock().ended.remove(&record.name);
        self.news.tell(News::Started(record.clone()));
        self.watch(record);
        Ok(())
    }
}

/// The right to end a VM and to clean up after it, until this is dropped.
#[derive(Debug)]
struct Ending {
    registry: Arc<Registry>,
    name: String,
}

impl Ending {
    /// Waits for whoever does it now. What the holder knew of the VM before must be looked up again.
    async fn of(registry: &Arc<Registry>, name: &str) -> Self {
        while !registry.lock().ending.insert(name.to_owned()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Self { registry: registry.clone(), name: name.to_owned() }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.registry.lock().ending.remove(&self.name);
    }
}

/// The process of a record, if it is still that one.
#[must_use]
pub fn process_of(record: &VmRecord) -> Option<vmove_memory::Process> {
    let pid = u32::try_from(record.pid).ok()?;
    vmove_memory::Process::reopen(pid, record.pid_start).ok().filter(vmove_memory::Process::alive)
}
