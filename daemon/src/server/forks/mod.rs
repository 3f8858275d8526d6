//! Forks of this node's guests: one parent, many children, templates.

mod children;
mod create;
mod disks;
mod freeze;
mod guest;
mod problem;
mod promote;
mod recover;
pub mod remote;
mod templates;
mod tree;
mod warm;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;
use vmove_clone::record::Members;
use vmove_clone::report::ForkProgress;
use vmove_migrate::engine::Engine;

use self::children::Prepared;
use self::guest::Guests;
use self::remote::{AwaySet, HostedSet, Remote};
use super::registry::Registry;
use crate::api::problem::{Code, Problem};
use crate::config::{Config, ForkPolicy};

/// Forks that are remembered for whoever asks how they went.
const REMEMBERED: usize = 64;

/// All forks of this node.
#[derive(Debug)]
pub struct Forks {
    registry: Arc<Registry>,
    members: Arc<Members>,
    /// Knows where guests were moved.
    engine: Arc<Engine>,
    node: String,
    policy: ForkPolicy,
    /// Journals of forks.
    journals: PathBuf,
    /// Templates on disk.
    saved: PathBuf,
    /// How many QEMUs are started, or load, at the same time: more would only slow each other down.
    at_work: Arc<Semaphore>,
    guests: Guests,
    /// Forks to and from other nodes.
    pub remote: Arc<Remote>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// VMs and templates that a fork or a promotion is at work on.
    busy: HashSet<String>,
    /// Children whose memory is still on its way, and the node that it comes from.
    fetching: HashMap<String, String>,
    /// Prepared children by the name of their parent.
    warm: HashMap<String, Vec<Prepared>>,
    /// Those on other nodes, by the same.
    away: HashMap<String, Vec<AwaySet>>,
    /// Those here of guests of other nodes, by the id of their set.
    hosted: HashMap<String, HostedSet>,
    /// Forks, oldest first.
    progress: Vec<ForkProgress>,
}

/// The right to change a VM's memory, until this is dropped.
#[derive(Debug)]
struct Busy {
    forks: Arc<Forks>,
    name: String,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.forks.lock().busy.remove(&self.name);
    }
}

/// Children whose memory is on its way, until this is dropped.
#[derive(Debug)]
struct Fetching {
    forks: Arc<Forks>,
    children: Vec<String>,
}

impl Drop for Fetching {
    fn drop(&mut self) {
        let mut state = self.forks.lock();
        self.children.iter().for_each(|child| drop(state.fetching.remove(child)));
    }
}

impl Forks {
    pub fn open(
        config: &Config,
        registry: Arc<Registry>,
        remote: Arc<Remote>,
        engine: Arc<Engine>,
    ) -> anyhow::Result<Arc<Self>> {
        let dir = config.state_dir.join("forks");
        let members = Arc::new(Members::open(&dir.join("members"))?);
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        Ok(Arc::new(Self {
            registry,
            members,
            engine,
            node: config.node.clone(),
            policy: config.fork.clone(),
            journals: dir,
            saved: config.state_dir.join("templates"),
            at_work: Arc::new(Semaphore::new(2 * cores)),
            guests: Guests::default(),
            remote,
            state: Mutex::default(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claim(self: &Arc<Self>, name: &str) -> Result<Busy, Problem> {
        if let Some(node) = self.lock().fetching.get(name) {
            let text = format!(
                "The memory of {name:?} is still on its way from {node}: wait until `vfork tree` shows it as here"
            );
            return Err(Problem::new(Code::Busy, text));
        }
        if !self.lock().busy.insert(name.to_owned()) {
            return Err(Problem::new(
                Code::Busy,
                format!("{name:?} is being forked or promoted already: wait for the end of that"),
            ));
        }
        Ok(Busy { forks: self.clone(), name: name.to_owned() })
    }

    /// Says of children that their memory is still on its way from `node`.
    fn fetching(self: &Arc<Self>, children: Vec<String>, node: &str) -> Fetching {
        let mut state = self.lock();
        state.fetching.extend(children.iter().map(|child| (child.clone(), node.to_owned())));
        Fetching { forks: self.clone(), children }
    }

    /// Where a fork stands.
    pub fn progress(&self, id: &str) -> Result<ForkProgress, Problem> {
        let found = self.lock().progress.iter().find(|p| p.id == id).cloned();
        found.ok_or_else(|| Problem::new(Code::UnknownMigration, format!("No fork {id:?} of this daemon")))
    }

    fn begin_progress(&self, progress: ForkProgress) -> Result<(), Problem> {
        let mut state = self.lock();
        if state.progress.iter().any(|p| p.id == progress.id) {
            let text = format!("There is a fork {:?} already: choose another id", progress.id);
            return Err(Problem::new(Code::BadRequest, text));
        }
        if state.progress.len() >= REMEMBERED {
            let oldest = state.progress.iter().position(ForkProgress::is_end).unwrap_or(0);
            state.progress.remove(oldest);
        }
        state.progress.push(progress);
        Ok(())
    }

    fn update(&self, id: &str, change: impl FnOnce(&mut ForkProgress)) {
        if let Some(progress) = self.lock().progress.iter_mut().find(|p| p.id == id) {
            change(progress);
        }
    }
}
