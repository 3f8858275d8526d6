//! The VMs of this node: started, taken in, watched, ended.

mod adopt;
mod ask;
mod end;
mod look;
mod pause;
mod run;
pub mod starting;
mod supervise;

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vmove_migrate::monitors::Monitors;
use vmove_migrate::vm::{VmRecord, VmStore, VmStoreError, check_name};

use crate::api::problem::{Code, Problem, chain};
use crate::server::sessions::Sessions;

/// How long a monitor may take to answer a small question.
const ASK: Duration = Duration::from_secs(2);
/// How many VMs that ended are remembered for `vmove list`.
const REMEMBERED: usize = 100;

/// All VMs of this node.
#[derive(Debug)]
pub struct Registry {
    pub(in crate::server) vms: Arc<VmStore>,
    pub(in crate::server) monitors: Arc<Monitors>,
    sessions: Arc<Sessions>,
    pub(in crate::server) run_dir: PathBuf,
    pub(in crate::server) memory_dir: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Names that a `run` or `adopt` is at work on: the record comes last.
    reserved: HashSet<String>,
    /// Processes that have a watching task.
    watched: HashSet<Identity>,
    /// VMs that are being ended on request or cleaned up after: one task at a time does that.
    ending: HashSet<String>,
    /// VMs whose QEMU has ended by itself, until their name is used again.
    ended: BTreeMap<String, Ended>,
}

/// A VM that is no more.
#[derive(Debug, Clone)]
struct Ended {
    record: VmRecord,
    /// Why this daemon ended it.
    why: Option<String>,
}

/// A process that cannot be mistaken for another.
type Identity = (String, i32, u64);

fn identity(record: &VmRecord) -> Identity {
    (record.name.clone(), record.pid, record.pid_start)
}

impl Registry {
    pub fn new(
        vms: Arc<VmStore>,
        monitors: Arc<Monitors>,
        sessions: Arc<Sessions>,
        run_dir: PathBuf,
        memory_dir: PathBuf,
    ) -> Arc<Self> {
        Arc::new(Self { vms, monitors, sessions, run_dir, memory_dir, state: Mutex::default() })
    }

    /// How many VMs are here.
    pub fn count(&self) -> usize {
        self.vms.list().len()
    }

    /// All records.
    pub fn records(&self) -> Vec<VmRecord> {
        self.vms.list()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is a single insertion or removal: a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a name for a VM that is about to come.
    pub fn reserve(self: &Arc<Self>, name: &str) -> Result<Reserved, Problem> {
        check_name(name).map_err(|e| store_problem(&e))?;
        let taken = || store_problem(&VmStoreError::Exists(name.to_owned()));
        if !self.lock().reserved.insert(name.to_owned()) {
            return Err(taken());
        }
        let reserved = Reserved { registry: self.clone(), name: name.to_owned() };
        // An incoming migration has its record only later: it must not find its name taken then. Asked first, since it may
        // end between the two questions and leave the record.
        if self.sessions.of_vm(name).is_some() || self.vms.get(name).is_ok() {
            return Err(taken());
        }
        Ok(reserved)
    }

    /// Refuses while a migration holds the VM.
    pub fn not_in_session(&self, name: &str) -> Result<(), Problem> {
        match self.sessions.of_vm(name) {
            None => Ok(()),
            Some(p) => Err(Problem::new(
                Code::Busy,
                format!("{name:?} is in migration {0}: wait for its end, or `vmove cancel {0}`", p.id),
            )),
        }
    }

    /// Adds the record, which makes the VM real, and watches it.
    pub async fn enter(self: &Arc<Self>, record: VmRecord) -> Result<(), Problem> {
        let vms = self.vms.clone();
        let new = record.clone();
        off_worker(move || vms.insert(new)).await?.map_err(|e| store_problem(&e))?;
        self.lock().ended.remove(&record.name);
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

/// A name that nobody else can take until this is dropped.
#[derive(Debug)]
pub struct Reserved {
    registry: Arc<Registry>,
    name: String,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.registry.lock().reserved.remove(&self.name);
    }
}

/// Runs what blocks (files, forks, mounts) where no connection waits behind it.
pub async fn off_worker<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Problem> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Problem::new(Code::Internal, format!("A task of vmoved failed ({e}): see its log")))
}

/// A store error as an answer.
pub fn store_problem(error: &VmStoreError) -> Problem {
    let code = match error {
        VmStoreError::BadName { .. } => Code::BadName,
        VmStoreError::Exists(_) => Code::NameTaken,
        VmStoreError::Unknown(_) => Code::UnknownVm,
        _ => Code::Internal,
    };
    Problem::new(code, chain(error))
}

/// The process of a record, if it is still that one.
pub fn process_of(record: &VmRecord) -> Option<vmove_memory::Process> {
    let pid = u32::try_from(record.pid).ok()?;
    vmove_memory::Process::reopen(pid, record.pid_start).ok().filter(vmove_memory::Process::alive)
}
