//! What there is besides the daemons: QEMUs, the guest, disks, the network's state; and what is written down of all that happens.

pub(crate) mod cards;
pub(crate) mod daemon;
pub(crate) mod disk;
pub(crate) mod guest;
pub(crate) mod journals;
pub(crate) mod net;
pub(crate) mod operator;
pub(crate) mod played_disks;
mod plug;
pub(crate) mod qemu;
pub(crate) mod running;
pub(crate) mod status;
pub(crate) mod vmm;
mod writes;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::Instant;
use vmove_fabric::simulated::Memories;
use vmove_node::peer::PROTOCOL_VERSION;

use crate::life::Life;
use crate::plan::{Blow, Manner, Moment, NODES, NodeIndex, Planned, Schedule};
use crate::rng::Rng;
use crate::world::cards::Card;
use crate::world::disk::{DiskFault, Files};
use crate::world::guest::Guest;
use crate::world::net::Wire;
use crate::world::qemu::Machine;
use crate::world::running::Daemon;

/// Everything, shared by all that takes part in one schedule.
#[derive(Clone)]
pub struct World(Arc<Shared>);

struct Shared {
    memories: Memories,
    began: Instant,
    /// Real files of guest memory are below it.
    memory_dir: PathBuf,
    state: Mutex<State>,
    /// Sessions that daemons were told of by their engines.
    told: Told,
}

/// Ids of sessions.
pub type Told = Arc<Mutex<BTreeSet<String>>>;

/// What changes.
#[derive(Debug)]
pub struct State {
    pub rng: Rng,
    pub schedule: Schedule,
    pub nodes: [Node; 2],
    pub machines: Vec<Machine>,
    /// Those that are to move together.
    pub guests: Vec<Guest>,
    /// How the guest takes it to be asked for its device now.
    pub manner: Manner,
    pub wires: Vec<Weak<Wire>>,
    pub partition_until: Option<Instant>,
    /// Blows that have not come.
    blows: Vec<Planned>,
    /// How many have.
    pub struck: usize,
    /// How often a guest was told to go on though another of its group lacked its device.
    pub early_resumes: usize,
    violations: Vec<String>,
    log: Log,
    next_pid: i32,
}

/// A node, whatever becomes of its daemons.
#[derive(Debug)]
pub struct Node {
    pub files: Arc<Mutex<Files>>,
    pub disk_fault: Option<DiskFault>,
    /// A device that VMs can have.
    pub card: Card,
    /// The process of the daemon that there is now.
    pub life: Option<Arc<Life>>,
    /// The same, once it is reached by others.
    pub daemon: Option<Daemon>,
    pub lives: u64,
    /// What all daemons of this node have done so far.
    steps: u64,
}

/// What happened.
#[derive(Debug)]
struct Log {
    /// Of everything that was written down (FNV-1a).
    hash: u64,
    prints: bool,
}

/// What becomes of something that a daemon is about to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It does it.
    Done,
    /// It is dead; so many percent of it are done.
    Dies(u64),
}

impl World {
    /// Before anything has happened. `prints`: all that happens.
    #[must_use]
    pub fn new(schedule: Schedule, memory_dir: &Path, prints: bool) -> Self {
        let node = |index| Node {
            files: Arc::default(),
            disk_fault: None,
            card: Card::of(index),
            life: None,
            daemon: None,
            lives: 0,
            steps: 0,
        };
        let state = State {
            rng: Rng::new(schedule.seed),
            nodes: [node(0), node(1)],
            machines: Vec::new(),
            guests: (0..schedule.guests).map(|_| Guest::default()).collect(),
            manner: schedule.manner,
            wires: Vec::new(),
            partition_until: None,
            blows: Vec::new(),
            struck: 0,
            early_resumes: 0,
            violations: Vec::new(),
            log: Log { hash: 0xcbf2_9ce4_8422_2325, prints },
            next_pid: 1000,
            schedule,
        };
        Self(Arc::new(Shared {
            memories: Memories::default(),
            began: Instant::now(),
            memory_dir: memory_dir.to_owned(),
            state: Mutex::new(state),
            told: Told::default(),
        }))
    }

    /// Looks at the state, or changes it. Never across an `await`.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of everything: daemons know the world, and the world knows them.
    pub fn end(&self) {
        let (machines, nodes) = {
            let mut state = self.state();
            let nodes = state.nodes.each_mut().map(|node| (node.daemon.take(), node.life.take()));
            (std::mem::take(&mut state.machines), nodes)
        };
        drop((machines, nodes));
    }

    /// What is registered with fabrics.
    #[must_use]
    pub fn memories(&self) -> &Memories {
        &self.0.memories
    }

    /// Where a node's guest memory is.
    #[must_use]
    pub fn memory_dir(&self, node: NodeIndex) -> PathBuf {
        self.0.memory_dir.join(NODES[node])
    }

    /// Writes something down.
    pub fn note(&self, who: &'static str, what: impl Into<String>) {
        let what = what.into();
        let us = u64::try_from(self.0.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        let log = &mut self.state().log;
        let mut add = |bytes: &[u8]| {
            for byte in bytes {
                log.hash = (log.hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
            }
        };
        add(&us.to_le_bytes());
        add(who.as_bytes());
        add(what.as_bytes());
        if log.prints {
            println!("{:7}.{:03} ms {who:>5}  {what}", us / 1000, us % 1000);
        }
    }

    /// Sessions that daemons were told of.
    pub fn told(&self) -> Told {
        Arc::clone(&self.0.told)
    }

    /// Writes down what must not be.
    pub fn violation(&self, what: impl Into<String>) {
        let what = what.into();
        self.note("world", format!("VIOLATION: {what}"));
        self.state().violations.push(what);
    }

    /// What must not be and was, so far.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.state().violations.clone()
    }

    /// Equal for two runs in which the same happened at the same times.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.state().log.hash
    }

    /// What the daemons of each node have done so far.
    #[must_use]
    pub fn steps(&self) -> [u64; 2] {
        let state = self.state();
        [state.nodes[0].steps, state.nodes[1].steps]
    }

    /// Virtual time since the beginning.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.0.began.elapsed()
    }

    /// A time between these, in microseconds.
    #[must_use]
    pub fn micros(&self, from: u64, to: u64) -> Duration {
        Duration::from_micros(self.state().rng.between(from, to))
    }

    /// How long a message takes.
    #[must_use]
    pub fn latency(&self) -> Duration {
        let slowest = self.state().schedule.latency_ms;
        self.micros(50, slowest * 1000)
    }

    /// Until when nothing passes, if that is so now.
    #[must_use]
    pub fn partitioned_until(&self) -> Option<Instant> {
        self.state().partition_until.filter(|until| Instant::now() < *until)
    }

    /// A process id that nobody has.
    #[must_use]
    pub fn new_pid(&self) -> i32 {
        let mut state = self.state();
        state.next_pid += 1;
        state.next_pid
    }

    /// A daemon is about to do something that another, or a later life of it, may see.
    pub fn step(&self, life: &Life, what: impl Into<String>) -> Fate {
        if !life.is_alive() {
            return Fate::Dies(0);
        }
        let step = {
            let mut state = self.state();
            let node = &mut state.nodes[life.node()];
            node.steps += 1;
            node.steps
        };
        let what = what.into();
        let due = self.take_due(|when| match when {
            Moment::Step(node, number) => (node, number) == (life.node(), step),
            Moment::Doing(node, part) => node == life.node() && what.contains(part),
            Moment::Millis(_) => false,
        });
        self.note(life.name(), what);
        let mut written = 0;
        for blow in due {
            if let Blow::Kill { node, written_percent, .. } = blow
                && node == life.node()
            {
                written = written_percent;
            }
            self.strike(blow);
        }
        if life.is_alive() { Fate::Done } else { Fate::Dies(written) }
    }

    /// As [`World::step`], for what is done or not: whoever is dead stops here.
    pub async fn may(&self, life: &Life, what: impl Into<String>) {
        if let Fate::Dies(_) = self.step(life, what) {
            std::future::pending::<()>().await;
        }
    }

    fn take_due(&self, is_due: impl Fn(Moment) -> bool) -> Vec<Blow> {
        let mut state = self.state();
        let (due, left): (Vec<Planned>, Vec<Planned>) =
            std::mem::take(&mut state.blows).into_iter().partition(|planned| is_due(planned.when));
        state.blows = left;
        due.into_iter().map(|planned| planned.blow).collect()
    }

    /// From here on blows come: steps and times count from now.
    pub fn begin_blows(&self) {
        let times: Vec<u64> = {
            let mut state = self.state();
            state.nodes.iter_mut().for_each(|node| node.steps = 0);
            state.blows = state.schedule.blows.clone();
            let millis = |planned: &Planned| match planned.when {
                Moment::Millis(ms) => Some(ms),
                Moment::Step(..) | Moment::Doing(..) => None,
            };
            let mut times: Vec<u64> = state.blows.iter().filter_map(millis).collect();
            times.sort_unstable();
            times
        };
        let world = self.clone();
        tokio::spawn(async move {
            let began = Instant::now();
            for ms in times {
                tokio::time::sleep_until(began + Duration::from_millis(ms)).await;
                for blow in world.take_due(|when| when == Moment::Millis(ms)) {
                    world.strike(blow);
                }
            }
        });
    }

    /// No other blows come.
    pub fn no_more_blows(&self) {
        let mut state = self.state();
        state.blows.clear();
        state.manner = Manner::LetsGo;
    }

    /// Whether nothing lasts any more of the blows that came.
    #[must_use]
    pub fn is_calm(&self) -> bool {
        let state = self.state();
        let now = Instant::now();
        let quiet = |node: &Node| {
            let daemon = node.daemon.as_ref();
            daemon.is_some_and(|daemon| daemon.life.version() == PROTOCOL_VERSION)
                && node.disk_fault.is_none_or(|fault| fault.until <= now)
        };
        state.nodes.iter().all(quiet) && state.partition_until.is_none_or(|until| until <= now)
    }

    fn strike(&self, blow: Blow) {
        self.note("world", format!("{blow:?}"));
        self.state().struck += 1;
        match blow {
            Blow::Kill { node, down_ms, other_version, .. } => {
                crate::world::daemon::kill(self, node, Duration::from_millis(down_ms), other_version);
            }
            Blow::Reset => self.reset(|_| true),
            Blow::PagesBreak => self.reset(Wire::carries_pages),
            Blow::Partition { ms } => self.partition(Duration::from_millis(ms)),
            Blow::Disk { node, error, ms, written_percent, cuts_fail, reads_fail } => {
                let until = Instant::now() + Duration::from_millis(ms);
                self.state().nodes[node].disk_fault =
                    Some(DiskFault { error, until, written_percent, cuts_fail, reads_fail });
            }
            Blow::QemuDies { node } => crate::world::qemu::kill_all_of(self, node),
            Blow::Cancel => crate::world::operator::cancel(self),
            Blow::ClockJump { ms } => {
                tokio::spawn(async move { tokio::time::advance(Duration::from_millis(ms)).await });
            }
        }
    }

    fn open_wires(&self) -> Vec<Arc<Wire>> {
        let mut state = self.state();
        state.wires.retain(|wire| wire.strong_count() > 0);
        state.wires.iter().filter_map(Weak::upgrade).collect()
    }

    /// Connections that somebody still holds.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.open_wires().len()
    }

    fn reset(&self, which: impl Fn(&Wire) -> bool) {
        self.open_wires().iter().filter(|wire| which(wire)).for_each(|wire| wire.reset());
    }

    /// TCP notices after ten seconds.
    fn partition(&self, how_long: Duration) {
        const NOTICED: Duration = Duration::from_secs(10);
        let until = {
            let mut state = self.state();
            let until = state.partition_until.unwrap_or_else(Instant::now).max(Instant::now() + how_long);
            state.partition_until = Some(until);
            until
        };
        let world = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(how_long.min(NOTICED)).await;
            if how_long >= NOTICED {
                world.reset(|_| true);
            }
            tokio::time::sleep_until(until).await;
            // What was held back passes now.
            world.open_wires().iter().for_each(|wire| wire.wake());
        });
    }
}
