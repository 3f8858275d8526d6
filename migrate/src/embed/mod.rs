//! A node inside a program: VMs are started or taken in, and migrated to other nodes, without a daemon.
//!
//! It does what `vmoved` does with the same journals: a program that is killed takes its migrations up when it builds the node over the same folders
//! again. It has no REST, no TLS (keep its port on a trusted network), no forks and no passed-through devices. It speaks the protocol of `vmoved`, so a
//! guest moves between the two as well. Needs root, or the rights that `docs/operations.md` names for `vmoved`.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use vmove_migrate::embed::Node;
//! use vmove_types::spec::MigrationSpec;
//!
//! let a = Node::builder("a", "/var/lib/mine/a", "/run/mine/a").start().await?;
//! let b = Node::builder("b", "/var/lib/mine/b", "/run/mine/b").start().await?;
//! a.run("web", ["qemu-system-x86_64", "-m", "1024", "-nodefaults", "-display", "none"]).await?;
//! let report = a.migrate("web", b.address(), MigrationSpec::default()).await?;
//! println!("paused for {:.1} ms", report.downtime_ms);
//! # Ok(())
//! # }
//! ```

mod port;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use vmove_node::admission::AdmitsAll;
use vmove_node::devices::NoDevices;
use vmove_node::disk::KernelDisk;
use vmove_node::domains::Domains;
use vmove_node::embed::{self, Ground, GroundError};
use vmove_node::lock::StateLock;
use vmove_node::migrations::{Abandoning, Migrations, Moved, QemuId};
use vmove_node::peer::{PeerPolicy, PeerTarget, SessionId};
use vmove_node::record::VmRecord;
use vmove_node::registry::{Registry, RegistryError};
use vmove_qmp::confine::Confinement;
use vmove_types::check::Blocker;
use vmove_types::progress::{Outcome, Progress};
use vmove_types::report::Report;
use vmove_types::spec::MigrationSpec;
use vmove_types::vm::VmDetail;

use crate::engine::{Engine, EngineConfig, EngineError};
use crate::vmm::Qemu;
use port::{Port, TcpDialer};

/// Why a node, or something that it was asked for, did not come about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbedError {
    /// The engine of migrations.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A VM.
    #[error(transparent)]
    Vm(#[from] RegistryError),
    /// The folders.
    #[error(transparent)]
    Ground(#[from] GroundError),
    /// The port, or the fabric behind it.
    #[error("Could not listen on {address}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The migration was refused; the guest runs on at the source.
    #[error("Migration {id} was refused: {}", .blockers.iter().map(|one| one.message.as_str()).collect::<Vec<_>>().join("; "))]
    Refused {
        /// Its ID.
        id: String,
        /// Everything that stands in the way.
        blockers: Vec<Blocker>,
    },
    /// The migration failed, or its peer is lost. [`Progress`] says where the guest is.
    #[error("Migration {id} has not arrived: {why}")]
    NotArrived {
        /// Its ID.
        id: String,
        /// Why.
        why: String,
        /// Where it stands.
        progress: Box<Progress>,
    },
}

/// What a node is made of. See [`Node::builder`].
#[derive(Debug, Clone)]
pub struct Builder {
    name: String,
    state_dir: PathBuf,
    run_dir: PathBuf,
    listen: SocketAddr,
    confinement: Confinement,
    peers: PeerPolicy,
    bulk_connections: u8,
}

impl Builder {
    /// Where other nodes reach this one. Default: a free port of 127.0.0.1.
    #[must_use]
    pub const fn listen(mut self, address: SocketAddr) -> Self {
        self.listen = address;
        self
    }

    /// With which rights QEMUs run. Default: those of this program.
    #[must_use]
    pub fn confinement(mut self, confinement: Confinement) -> Self {
        self.confinement = confinement;
        self
    }

    /// What guests that other nodes bring may be: the rules of `[peers]` in the configuration of `vmoved`, with its defaults.
    #[must_use]
    pub fn peers(mut self, policy: PeerPolicy) -> Self {
        self.peers = policy;
        self
    }

    /// Bulk connections of each migration to here: 1 to 16, default 2.
    #[must_use]
    pub const fn bulk_connections(mut self, count: u8) -> Self {
        self.bulk_connections = count;
        self
    }

    /// Makes the node. Guests that an earlier one over the same folders had are taken up: those that lack pages before anything else.
    ///
    /// # Errors
    /// A folder or the port cannot be used. [`GroundError::Taken`] while another node uses the state folder.
    pub async fn start(self) -> Result<Node, EmbedError> {
        let Self { name, state_dir, run_dir, listen, confinement, peers, bulk_connections } = self;
        let failed = |source| EmbedError::Listen { address: listen, source };
        let ground = Ground::take(&state_dir, &run_dir, confinement)?;
        let dialer = Arc::new(TcpDialer::new().map_err(failed)?);
        let port = Port::bind(listen, dialer.fabric()).await.map_err(failed)?;
        let (starter, confinement) = (ground.starter.clone(), ground.confinement.clone());
        // Of libvirt nothing is known here.
        let domains = Domains::new(Arc::clone(&ground.monitors), Vec::new());
        let engine = Engine::open(
            EngineConfig {
                node: name,
                sessions_dir: ground.state_dir.join("sessions"),
                run_dir: ground.vms_dir.clone(),
                memory_dir: ground.memory_dir.clone(),
                reservations: Arc::clone(&ground.reservations),
                confinement: confinement.clone(),
                peers: Arc::new(peers.beside(&confinement)),
                admission: Arc::new(AdmitsAll),
                vmm: Arc::new(Qemu::new(Arc::clone(&ground.monitors), starter, confinement, domains)),
                devices: Arc::new(NoDevices),
                disk: Arc::new(KernelDisk),
                dialer,
                port: Some(port.address().port()),
                bulk_connections: bulk_connections.clamp(1, 16),
                reconnect_for: Duration::from_secs(600),
                keep_migrations: 1000,
            },
            Arc::clone(&ground.vms),
        )?;
        let migrations: Arc<dyn Migrations> = Arc::new(OfEngine(Arc::clone(&engine)));
        let registry = ground.registry(migrations);
        engine.resume_owners();
        let address = port.address();
        let mut tasks = JoinSet::new();
        tasks.spawn(port.serve(Arc::clone(&engine)));
        registry.readopt();
        engine.resume_others();
        tasks.spawn(Arc::clone(&registry).supervise());
        Ok(Node { engine, registry, address, _tasks: tasks, _lock: Arc::clone(ground.lock()) })
    }
}

/// A node. When it is dropped its port is closed, and its guests run on.
#[derive(Debug)]
pub struct Node {
    engine: Arc<Engine>,
    registry: Arc<Registry>,
    address: SocketAddr,
    _tasks: JoinSet<()>,
    /// After the tasks.
    _lock: Arc<StateLock>,
}

impl Node {
    /// A node of this name. `state_dir` has its journals, and must outlive a reboot; `run_dir` has sockets and the memory of its guests (tmpfs is mounted in it).
    pub fn builder(
        name: impl Into<String>,
        state_dir: impl Into<PathBuf>,
        run_dir: impl Into<PathBuf>,
    ) -> Builder {
        Builder {
            name: name.into(),
            state_dir: state_dir.into(),
            run_dir: run_dir.into(),
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            confinement: Confinement::default(),
            peers: PeerPolicy::default(),
            bulk_connections: 2,
        }
    }

    /// Where other nodes reach it.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The engine behind it: check, cancel, recover, groups.
    #[must_use]
    pub const fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Its VMs: list, pause, stop.
    #[must_use]
    pub const fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Starts a VM: QEMU and its arguments, in which `{vmdir}` and `{name}` are replaced on every node that it comes to.
    ///
    /// # Errors
    /// It does not start, or could not be moved. Nothing is left then.
    pub async fn run<S: Into<String>>(
        &self,
        name: &str,
        command_line: impl IntoIterator<Item = S>,
    ) -> Result<VmDetail, EmbedError> {
        Ok(embed::run(&self.registry, name, command_line).await?)
    }

    /// Takes in a QEMU that runs already, by a QMP socket of its own. Its RAM must be a shared file.
    ///
    /// # Errors
    /// It cannot be moved; it is as it was then.
    pub async fn adopt(&self, name: &str, qmp: impl Into<PathBuf>) -> Result<VmDetail, EmbedError> {
        Ok(embed::adopt(&self.registry, name, qmp).await?)
    }

    /// Moves a VM to another node, and waits for the end.
    ///
    /// # Errors
    /// It was refused, or has not arrived. Its [`Progress`] says where the guest is.
    pub async fn migrate(&self, vm: &str, to: SocketAddr, spec: MigrationSpec) -> Result<Report, EmbedError> {
        let target = PeerTarget { name: to.to_string(), address: to.to_string() };
        let id = self.engine.start(vm, target, spec).await?.to_string();
        let mut progress = self.engine.progress(&id)?;
        // The publisher lives as long as the session; what it said last stands.
        let _ = progress.wait_for(|now| now.outcome.is_end()).await;
        let last = progress.borrow().clone();
        let why = match &last.outcome {
            Outcome::Done { report } => return Ok((**report).clone()),
            Outcome::Refused { blockers } => {
                return Err(EmbedError::Refused { id, blockers: blockers.clone() });
            }
            Outcome::Failed { error, .. } | Outcome::Reconnecting { error, .. } => error.clone(),
            Outcome::Running => "it was given up".to_owned(),
        };
        Err(EmbedError::NotArrived { id, why, progress: Box::new(last) })
    }
}

/// What the registry of VMs asks of migrations.
#[derive(Debug)]
struct OfEngine(Arc<Engine>);

impl Migrations for OfEngine {
    fn of_vm(&self, name: &str) -> Option<Progress> {
        self.0.sessions().into_iter().find(|one| one.vm == name && one.outcome.holds_vm())
    }

    fn moving_disk(&self, name: &str) -> Option<String> {
        self.0.moving_disk(name)
    }

    fn begins_disk_move(&self, name: &str) -> bool {
        self.0.begins_disk_move(name)
    }

    fn abandon<'a>(&'a self, name: &'a str) -> Abandoning<'a> {
        Box::pin(self.0.abandon(name))
    }

    fn moved(&self) -> HashMap<QemuId, Moved> {
        self.0.moved()
    }

    fn came(&self, session: SessionId) -> Option<VmRecord> {
        self.0.came(session)
    }
}
