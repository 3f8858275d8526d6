//! Which migrations are at work, without asking the disk.
//!
//! The engine lists all it remembers, and reads the journals of the past for it. That is right for `vmove history`; but
//! supervision, metrics and `vmove list` only need the present. Every id enters here before its session does anything: the engine
//! tells of each, whoever asked for it.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmove_migrate::engine::{Engine, EngineError};
use vmove_types::progress::Progress;

use vmove_node::blocking::{TaskFailed, run_blocking};
use vmove_node::migrations::{Abandoning, Migrations, Moved, QemuId};
use vmove_node::peer::SessionId;
use vmove_node::record::VmRecord;
use vmove_types::problem::Problem;

use super::hooks;
use super::problem::IntoProblem;
use vmove_hooks::Hooks;

/// Ids of migrations that may be at work.
#[derive(Debug)]
pub struct Sessions {
    engine: Arc<Engine>,
    ids: Mutex<HashSet<String>>,
    hooks: Arc<Hooks>,
    /// Those of which hooks are being told.
    followed: Arc<Mutex<HashSet<String>>>,
}

impl Sessions {
    pub fn new(engine: Arc<Engine>, hooks: Arc<Hooks>) -> Arc<Self> {
        let sessions = Arc::new(Self { engine, ids: Mutex::default(), hooks, followed: Arc::default() });
        // The engine does not keep alive what keeps it.
        let weak = Arc::downgrade(&sessions);
        sessions.engine.on_entered(move |id| {
            if let Some(sessions) = weak.upgrade() {
                sessions.add(id.to_string());
            }
        });
        sessions
    }

    fn add(&self, id: String) {
        self.lock().insert(id.clone());
        self.tell_hooks(id);
    }

    /// Has hooks hear of a migration, to its end. A connection of one that they hear of already changes nothing.
    fn tell_hooks(&self, id: String) {
        let lock = |followed: &Mutex<HashSet<String>>, change: &dyn Fn(&mut HashSet<String>) -> bool| {
            change(&mut followed.lock().unwrap_or_else(PoisonError::into_inner))
        };
        if !hooks::wanted(&self.hooks) || !lock(&self.followed, &|all| all.insert(id.clone())) {
            return;
        }
        let (engine, hooks, followed) = (self.engine.clone(), self.hooks.clone(), Arc::clone(&self.followed));
        tokio::spawn(async move {
            hooks::follow(engine, hooks, id.clone()).await;
            lock(&followed, &|all| all.remove(&id));
        });
    }

    /// Snapshots of those at work, of those that hold a paused guest, and of those that ended a moment ago.
    pub fn live(&self) -> Vec<Progress> {
        let mut ids = self.lock();
        let mut found = Vec::new();
        ids.retain(|id| {
            let progress = self.engine.progress(id);
            found.extend(progress.iter().map(|progress| progress.borrow().clone()));
            progress.is_ok()
        });
        found
    }

    /// Forgets those that are over. Their last snapshot has been counted.
    pub fn settle(&self, counted: &[Progress]) {
        let mut ids = self.lock();
        for session in counted.iter().filter(|p| p.outcome.is_end() && !p.outcome.holds_vm()) {
            ids.remove(&session.id);
        }
    }

    /// All that the node remembers, from the disk, too.
    pub async fn all(&self) -> Result<Vec<Progress>, TaskFailed> {
        let engine = self.engine.clone();
        run_blocking(move || engine.sessions()).await
    }

    /// One migration by the beginning of its id, of the past, too.
    pub async fn find(&self, id: &str) -> Result<Progress, Problem> {
        let unknown = match self.engine.progress(id) {
            Ok(progress) => return Ok(progress.borrow().clone()),
            Err(error @ EngineError::UnknownSession(_)) => error.into_problem(),
            Err(error) => return Err(error.into_problem()),
        };
        let mut matching = self
            .all()
            .await
            .map_err(IntoProblem::into_problem)?
            .into_iter()
            .filter(|p| !id.is_empty() && p.id.starts_with(id));
        match (matching.next(), matching.next()) {
            (Some(only), None) => Ok(only),
            _ => Err(unknown),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<String>> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Migrations for Sessions {
    fn of_vm(&self, name: &str) -> Option<Progress> {
        self.live().into_iter().find(|p| p.vm == name && p.outcome.holds_vm())
    }

    fn moving_disk(&self, name: &str) -> Option<String> {
        self.engine.moving_disk(name)
    }

    fn begins_disk_move(&self, name: &str) -> bool {
        self.engine.begins_disk_move(name)
    }

    fn abandon<'a>(&'a self, name: &'a str) -> Abandoning<'a> {
        Box::pin(self.engine.abandon(name))
    }

    fn moved(&self) -> HashMap<QemuId, Moved> {
        self.engine.moved()
    }

    fn came(&self, session: SessionId) -> Option<VmRecord> {
        self.engine.came(session)
    }
}
