//! What a node inside a program is made of, and what an earlier one over the same folders left.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use vmove_hooks::Hooks;
use vmove_hooks::hooks::Settings;
use vmove_node::admission::AdmitsAll;
use vmove_node::embed::Ground;
use vmove_node::migrations::NoMigrations;
use vmove_node::peer::{KnownPeers, PeerPolicy};
use vmove_qmp::confine::Confinement;

use super::alone::Alone;
use super::error::EmbedError;
use super::node::Node;
use crate::engine::{EngineOptions, ForkEngine, ForkPolicy, SELF};

/// How long a guest would wait for the disk of another node: there is none.
const RECONNECT_FOR: Duration = Duration::from_secs(600);

/// What a node is made of. See [`Node::builder`].
#[derive(Debug, Clone)]
pub struct Builder {
    name: String,
    state_dir: PathBuf,
    run_dir: PathBuf,
    confinement: Confinement,
    policy: ForkPolicy,
    standby: Option<PathBuf>,
}

impl Node {
    /// A node of this name. `state_dir` has its journals and templates, and must outlive a reboot; `run_dir` has sockets and the memory of its guests
    /// (tmpfs is mounted in it). No other node may use them at the same time.
    pub fn builder(
        name: impl Into<String>,
        state_dir: impl Into<PathBuf>,
        run_dir: impl Into<PathBuf>,
    ) -> Builder {
        Builder::new(name.into(), state_dir.into(), run_dir.into())
    }
}

impl Builder {
    pub(super) fn new(name: String, state_dir: PathBuf, run_dir: PathBuf) -> Self {
        let (confinement, policy) = (Confinement::default(), ForkPolicy::default());
        Self { name, state_dir, run_dir, confinement, policy, standby: None }
    }

    /// With which rights QEMUs run. Default: those of this program.
    #[must_use]
    pub fn confinement(mut self, confinement: Confinement) -> Self {
        self.confinement = confinement;
        self
    }

    /// What forks may do, and what is done for them: `[fork]` in the configuration of `vmoved`, with its defaults. What it says of other nodes has no
    /// effect, but `from_guest_to` must name none.
    #[must_use]
    pub fn policy(mut self, policy: ForkPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// A program that calls [`stand_by`](super::stand_by) when its first argument is [`STAND_BY`](super::STAND_BY): `/proc/self/exe` if this
    /// one does. With it, a guest that was forked runs while it gets memory of its own; default: none, and the guest is stopped for a few
    /// pieces of memory at a time.
    #[must_use]
    pub fn standby(mut self, program: impl Into<PathBuf>) -> Self {
        self.standby = Some(program.into());
        self
    }

    /// Makes the node. Forks that an earlier one over the same folders did not finish are taken up: their guests run on, and what never became a
    /// child is removed. VMs of such a fork are busy until then: see [`Node::at_rest`].
    ///
    /// # Errors
    /// A folder cannot be used: [`EmbedError::Ground`], while another node uses it, too; [`EmbedError::Migrations`] if it had one with migrations.
    /// [`EmbedError::OtherHosts`], [`EmbedError::ChildStart`]: the policy.
    pub async fn start(self) -> Result<Node, EmbedError> {
        let Self { name, state_dir, run_dir, confinement, policy, standby } = self;
        let others = |node: &&String| ![SELF, &name].contains(&node.as_str());
        let nodes: Vec<String> = policy.from_guest_to.iter().filter(others).cloned().collect();
        if !nodes.is_empty() {
            return Err(EmbedError::OtherHosts { nodes });
        }
        let hooks = vmove_hooks::config::check(Vec::new(), policy.child_start.clone());
        let hooks = hooks.map_err(EmbedError::ChildStart)?;
        let ground = Ground::take(&state_dir, &run_dir, confinement)?;
        had_no_migrations(&ground.state_dir)?;
        let path = ground.state_dir.join("hooks");
        // Nobody serves requests of such programs.
        let settings = Settings { node: name.clone(), control: PathBuf::new(), journal: path.clone() };
        let hooks = Hooks::open(settings, hooks).map_err(|source| EmbedError::Hooks { path, source })?;
        let registry = ground.registry(Arc::new(NoMigrations));
        let options = EngineOptions {
            node: name.clone(),
            policy,
            peers: Arc::new(PeerPolicy::default()),
            admission: Arc::new(AdmitsAll),
            known: KnownPeers::default(),
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            tls: false,
            state_dir: ground.state_dir.clone(),
            reconnect_for: RECONNECT_FOR,
            dialer: Arc::new(Alone),
            standby,
            hooks,
        };
        let forks = ForkEngine::open(options, Arc::clone(&registry))?;
        // Before anybody can ask for a fork.
        forks.recover().await;
        registry.readopt();
        let mut tasks = JoinSet::new();
        tasks.spawn(Arc::clone(&registry).supervise());
        tasks.spawn(Arc::clone(&forks).serve_guests());
        tasks.spawn(Arc::clone(&forks).serve_disks());
        Ok(Node::new(name, forks, registry, tasks, Arc::clone(ground.lock())))
    }
}

/// Refuses a folder whose VMs a migration may hold: a guest that runs elsewhere would be brought back here, too.
fn had_no_migrations(state_dir: &Path) -> Result<(), EmbedError> {
    let path = state_dir.join("sessions");
    let entries = std::fs::read_dir(&path).into_iter().flatten().flatten();
    if entries.map(|entry| entry.path()).any(|entry| entry.is_dir()) {
        return Err(EmbedError::Migrations { path });
    }
    Ok(())
}
