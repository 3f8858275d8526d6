//! The engine of forks of one node: what a request for a fork starts, here and on other nodes.
//!
//! | Module | Owns |
//! |---|---|
//! | `parent` | the parent's side of a fork: check, call hosts, freeze, make children, report |
//! | `host` | a child's host: what it does when a parent's node orders children |
//! | `origin` | where children come from: a guest or a template, looked at |
//! | `children` | children on this node: planned, started, loaded, run |
//! | `devices` | devices of the node: away from the parent for the freeze, and those of children |
//! | `prepared` | children that are started before the fork, here and on other nodes |
//! | `distribution` | a template's memory, from the parent's node to the hosts |
//! | `images` | disks of children on other hosts |
//! | `hooks` | what the operator's hooks are told of forks, and asked
//! | `guest` | guests that fork themselves, over a virtio-serial port |
//! | `descendants` | what came of a guest: the tree, which children live, their end |
//! | `templates`, `promote` | templates kept by name; memory of its own for a VM |
//! | `recover` | forks that an earlier life of the daemon did not finish |
//! | `progress` | how far forks are, and how the last ones went |
//! | `unreadable` | forks whose journals cannot be read |
//! | `message` | what the daemons of two nodes say to each other about a fork |
//! | `peers` | other nodes: how they are named and reached, and connections of a fork that come in |
//! | [`ForkError`] | why something failed |

mod children;
mod descendants;
mod devices;
mod distribution;
mod error;
#[cfg(test)]
mod formats;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod guest;
mod hooks;
mod host;
mod images;
mod message;
pub mod metrics;
mod options;
mod origin;
mod parent;
mod peers;
mod prepared;
mod progress;
mod promote;
mod recover;
mod templates;
mod unreadable;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use vmove_fabric::{Class, Incoming};
use vmove_hooks::Hooks;
use vmove_node::admission::Admission;
use vmove_node::peer::{BoxedStream, Hello, LinkKind, PeerPolicy, Status};
use vmove_node::registry::Registry;

pub use self::distribution::read_opening;
pub use self::error::{
    DistributionError, DivisionError, ForkError, ImageError, PeersError, Refusal, TalkError, VerbsError,
};
pub use self::hooks::ChildOf;
pub use self::options::{EngineOptions, ForkDialer, ForkPolicy, SELF};

use self::children::Prepared;
use self::guest::Guests;
use self::images::ServedImages;
use self::peers::Peers;
use self::prepared::{AwaySet, HostedSet};
use self::progress::Timed;
use self::unreadable::Unreadable;
use crate::CloneError;
use crate::record::Members;

/// Between looks whether a VM has been given memory of its own.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// All forks of a node.
#[derive(Debug)]
pub struct ForkEngine {
    registry: Arc<Registry>,
    members: Arc<Members>,
    node: String,
    policy: ForkPolicy,
    /// What other nodes may do here.
    peer_policy: Arc<PeerPolicy>,
    admission: Arc<dyn Admission>,
    /// Journals of forks.
    journals: PathBuf,
    /// Templates on disk.
    saved: PathBuf,
    /// How many QEMUs are started, or load, at the same time: more would only slow each other down.
    at_work: Arc<Semaphore>,
    guests: Guests,
    /// Other nodes.
    peers: Arc<Peers>,
    /// Disks of children elsewhere, and of children here whose images are elsewhere.
    images: Arc<ServedImages>,
    /// See [`EngineOptions::standby`].
    standby: Option<PathBuf>,
    hooks: Arc<Hooks>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// VMs and templates that a fork or a promotion is at work on.
    claimed: HashSet<String>,
    /// Those of them whose fork has been answered already, and which are given memory of their own: whoever comes next waits.
    coming_home: HashSet<String>,
    /// Children whose memory is still on its way, and the node that it comes from.
    fetching: HashMap<String, String>,
    /// Prepared children by the name of their parent.
    prepared: HashMap<String, Vec<Prepared>>,
    /// Those on other nodes, by the same.
    away: HashMap<String, Vec<AwaySet>>,
    /// Those here of guests of other nodes, by the id of their set.
    hosted: HashMap<String, HostedSet>,
    /// Forks, oldest first.
    progress: Vec<Timed>,
    /// Forks whose journals cannot be read.
    unreadable: Vec<Unreadable>,
}

/// The right to change a VM's memory, until this is dropped.
#[derive(Debug)]
struct Claim {
    engine: Arc<ForkEngine>,
    name: String,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.engine.lock();
        state.claimed.remove(&self.name);
        state.coming_home.remove(&self.name);
    }
}

/// Children whose memory is on its way, until this is dropped.
#[derive(Debug)]
struct Fetching {
    engine: Arc<ForkEngine>,
    children: Vec<String>,
}

impl Drop for Fetching {
    fn drop(&mut self) {
        let mut state = self.engine.lock();
        self.children.iter().for_each(|child| drop(state.fetching.remove(child)));
    }
}

impl ForkEngine {
    /// Opens the records of a node's forks.
    ///
    /// # Errors
    /// The state folder cannot be used.
    pub fn open(options: EngineOptions, registry: Arc<Registry>) -> Result<Arc<Self>, CloneError> {
        let dir = options.state_dir.join("forks");
        let members = Arc::new(Members::open(&dir.join("members"))?);
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let (node, policy) = (options.node.clone(), options.policy.clone());
        let (peer_policy, admission) = (options.peers.clone(), options.admission.clone());
        let saved = policy.template_dir.clone().unwrap_or_else(|| options.state_dir.join("templates"));
        let hooks = Arc::clone(&options.hooks);
        let guests = Guests::new(&dir);
        let images =
            ServedImages::new(&dir.join("disks"), options.reconnect_for, registry.confinement().clone());
        Ok(Arc::new(Self {
            registry,
            members,
            node,
            policy,
            peer_policy,
            admission,
            journals: dir,
            saved,
            at_work: Arc::new(Semaphore::new(2 * cores)),
            guests,
            standby: options.standby.clone(),
            peers: Peers::new(options),
            images: Arc::new(images),
            hooks,
            state: Mutex::default(),
        }))
    }

    /// Whether a connection with this greeting, of a kind of its own for forks, is wanted.
    ///
    /// # Errors
    /// The status and the sentence for the peer.
    pub fn wants(&self, hello: &Hello) -> Result<(), (Status, String)> {
        match hello.kind {
            LinkKind::ForkMemory => self.peers.wants(hello),
            LinkKind::ForkDisk => self.images.wants(hello),
            // The order that follows is judged.
            _ => Ok(()),
        }
    }

    /// Takes a connection for memory of a fork whose greeting was [wanted](Self::wants); `class` and `greeting` are what
    /// [`read_opening`] has found on it.
    pub fn accept_memory(
        &self,
        hello: &Hello,
        class: Class,
        greeting: Vec<u8>,
        endpoint: Box<dyn vmove_fabric::Endpoint>,
    ) {
        self.peers.take(hello, Incoming { class, greeting, endpoint });
    }

    /// Serves a connection for a disk of a child elsewhere whose greeting was [wanted](Self::wants), until it ends.
    pub async fn serve_disk(&self, hello: Hello, stream: BoxedStream) {
        self.images.serve(hello, stream).await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claim(self: &Arc<Self>, name: &str) -> Result<Claim, ForkError> {
        self.is_readable(name)?;
        if let Some(node) = self.lock().fetching.get(name) {
            return Err(ForkError::Fetching { vm: name.to_owned(), node: node.clone() });
        }
        if !self.lock().claimed.insert(name.to_owned()) {
            return Err(ForkError::Busy(name.to_owned()));
        }
        Ok(Claim { engine: self.clone(), name: name.to_owned() })
    }

    /// Refuses while a fork or a promotion is at work on a VM.
    ///
    /// # Errors
    /// [`ForkError::Busy`].
    pub fn not_at_work(&self, name: &str) -> Result<(), ForkError> {
        if self.lock().claimed.contains(name) { Err(ForkError::Busy(name.to_owned())) } else { Ok(()) }
    }

    /// As [`Self::claim`], but waits for a VM that is being given memory of its own after a fork.
    async fn claim_at_home(self: &Arc<Self>, name: &str) -> Result<Claim, ForkError> {
        while self.lock().coming_home.contains(name) {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        self.claim(name)
    }

    /// Says of children that their memory is still on its way from `node`.
    fn fetching(self: &Arc<Self>, children: Vec<String>, node: &str) -> Fetching {
        let mut state = self.lock();
        state.fetching.extend(children.iter().map(|child| (child.clone(), node.to_owned())));
        Fetching { engine: self.clone(), children }
    }

    /// Refuses what cannot be the id of a fork, and more children than are allowed.
    fn allowed(&self, id: &str, count: usize) -> Result<(), ForkError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if id.is_empty() || id.len() > 64 || !id.chars().all(plain) {
            return Err(ForkError::BadId(id.to_owned()));
        }
        if count == 0 {
            return Err(ForkError::NoChildren);
        }
        let most = self.policy.max_children;
        if count > most {
            return Err(ForkError::TooManyChildren { asked: count, allowed: most });
        }
        Ok(())
    }
}
