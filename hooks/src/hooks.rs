//! All hooks of a node.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Semaphore, mpsc};
use vmove_types::hook::HookInfo;

use crate::Event;
use crate::config::{Hook, warnings};
use crate::event::Name;
use crate::journal::Journal;
use crate::loops::Loops;
use crate::metrics;
use crate::own::Own;
use crate::state::{Kept, Outcome};
use crate::trigger::Trigger;

/// Events that wait for their turn. Those that come when so many wait are dropped, and counted.
const QUEUE: usize = 4096;
/// Events that hooks run for at the same time, or wait to. Those that come when so many are at work are dropped, and counted.
pub(crate) const EVENTS_AT_WORK: usize = 256;
/// Programs and actions at the same time.
const RUNS_AT_ONCE: usize = 8;

/// Where hooks are.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of the node.
    pub node: String,
    /// Control socket of the daemon, for programs that use `vmove`.
    pub control: PathBuf,
    /// Runs that were begun are noted in this folder.
    pub journal: PathBuf,
}

/// All hooks of a node: events go in, and nobody who tells of one waits for anything.
#[derive(Debug)]
pub struct Hooks {
    pub(crate) settings: Settings,
    /// In the order in which they run.
    pub(crate) hooks: Vec<Arc<Kept>>,
    qmp: HashSet<String>,
    own: HashSet<Own>,
    sender: mpsc::Sender<Event>,
    pub(crate) receiver: Mutex<Option<mpsc::Receiver<Event>>>,
    pub(crate) journal: Journal,
    pub(crate) loops: Loops,
    dropped: AtomicU64,
    pub(crate) events_at_work: Arc<Semaphore>,
    pub(crate) runs_at_once: Semaphore,
    warnings: Vec<String>,
}

impl Hooks {
    /// Opens the journal, and is ready to be told of events. They are heeded once [`Hooks::serve`] runs.
    ///
    /// # Errors
    /// The folder of the journal cannot be made.
    pub fn open(settings: Settings, hooks: Vec<Hook>) -> io::Result<Arc<Self>> {
        let warnings = warnings(&hooks);
        for warning in &warnings {
            tracing::warn!("{warning}");
        }
        let outcomes = Outcome::ALL.map(Outcome::word);
        hooks.iter().for_each(|hook| metrics::begin(&hook.name, outcomes));
        let (sender, receiver) = mpsc::channel(QUEUE);
        let qmp = hooks.iter().filter_map(|hook| match &hook.on {
            Trigger::Qmp(name) => Some(name.clone()),
            _ => None,
        });
        let own = hooks.iter().filter_map(|hook| match hook.on {
            Trigger::Own(own) => Some(own),
            _ => None,
        });
        Ok(Arc::new(Self {
            qmp: qmp.collect(),
            own: own.collect(),
            journal: Journal::open(&settings.journal)?,
            settings,
            hooks: hooks.into_iter().map(|hook| Arc::new(Kept::new(hook))).collect(),
            sender,
            receiver: Mutex::new(Some(receiver)),
            loops: Loops::default(),
            dropped: AtomicU64::new(0),
            events_at_work: Arc::new(Semaphore::new(EVENTS_AT_WORK)),
            runs_at_once: Semaphore::new(RUNS_AT_ONCE),
            warnings,
        }))
    }

    /// Tells of an event. Never waits: when too many events came, this one is dropped and counted.
    pub fn tell(&self, event: Event) {
        if !self.wants(&event.name) {
            return;
        }
        if self.sender.try_send(event).is_err() {
            self.count_dropped();
        }
    }

    /// Whether any hook waits for such an event.
    #[must_use]
    pub fn wants(&self, name: &Name) -> bool {
        match name {
            Name::Qmp(name) => self.qmp.contains(name),
            Name::Own(own) => self.own.contains(own),
            _ => true,
        }
    }

    /// Names of QMP events that hooks wait for.
    #[must_use]
    pub const fn qmp_events(&self) -> &HashSet<String> {
        &self.qmp
    }

    /// Whether a hook waits for this event of our own.
    #[must_use]
    pub fn wants_own(&self, own: Own) -> bool {
        self.own.contains(&own)
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.hooks.is_empty()
    }

    /// All hooks in the order in which they run, and what came of them since the daemon was started.
    #[must_use]
    pub fn infos(&self) -> Vec<HookInfo> {
        self.hooks.iter().map(|kept| kept.info()).collect()
    }

    /// What they wait for, by the name of the hook.
    pub fn triggers(&self) -> impl Iterator<Item = (&str, &Trigger)> {
        self.hooks.iter().map(|kept| (kept.hook.name.as_str(), &kept.hook.on))
    }

    /// Hooks whose actions on this VM are at work, or were a moment ago: what is asked of the VM now, they have probably led to.
    #[must_use]
    pub fn at_work_on(&self, vm: &str) -> Vec<String> {
        self.loops.at_work_on(vm)
    }

    /// What the operator should know of them.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Events that no hook heard of.
    #[must_use]
    pub fn events_dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    pub(crate) fn count_dropped(&self) {
        if self.dropped.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                "events come faster than hooks can heed them: some are dropped, and counted (vmove hook list)"
            );
        }
        metrics::dropped();
    }

    pub(crate) fn take_receiver(&self) -> Option<mpsc::Receiver<Event>> {
        self.receiver.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
