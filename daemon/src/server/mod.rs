//! `vmoved`: start, run, end.

mod access;
mod devices;
mod dialer;
mod doctor;
mod endpoint;
mod fabric_check;
mod fabrics;
mod folders;
mod going_home;
mod grants;
mod hooks;
mod libvirt;
mod metrics;
mod peers;
mod places;
mod problem;
mod proxmox;
#[cfg(feature = "verbs")]
mod rdma;
mod rest;
mod sessions;
mod tls;
mod traces;
mod tuning;

use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;
use metrics_exporter_prometheus::PrometheusHandle;
use nix::sys::signal::{SigSet, Signal};
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tracing::Instrument;

use crate::server::going_home::Visitors;
use vmove_clone::engine::{EngineOptions, ForkEngine};
use vmove_hooks::Hooks;
use vmove_hooks::hooks::Settings;
use vmove_http::systemd::{self, NotifyState};
use vmove_migrate::domains::Carrier;
use vmove_migrate::engine::{Engine, EngineConfig};
use vmove_migrate::vmm::Qemu;
use vmove_node::admission::Admission;
use vmove_node::blocking::run_blocking;
use vmove_node::control_groups::{ControlGroups, GroupsError};
use vmove_node::disk::KernelDisk;
use vmove_node::domains::{Domains, Manager, Monitored};
use vmove_node::files::own_dir;
use vmove_node::lock::StateLock;
use vmove_node::monitors::Monitors;
use vmove_node::peer::{KnownPeer, KnownPeers};
use vmove_node::registry::{Means, Registry};
use vmove_node::reservations::Reservations;
use vmove_node::starter::Starter;
use vmove_node::store::VmStore;

use crate::config::{Config, Flags, KnownNode, Security, qemu_user_note};
use crate::leaf_switches;
use access::{Access, Audit, Origin};
use devices::{LeasedDevices, LedgerDevices};
use dialer::PeerDialer;
use fabrics::Fabrics;
use grants::Grants;
use peers::PeerPort;
use problem::IntoProblem;
use sessions::Sessions;
use tls::Tls;
use traces::Traces;
use tuning::Tuning;
use vmove_types::problem::{Code, Problem};

/// Tasks that block for moments (a look at `/proc`, a small file) must not stall page connections' set-up.
const WORKERS_AT_LEAST: usize = 4;
/// How long requests that are at work when the daemon is told to end may take.
const LAST_REQUESTS: Duration = Duration::from_secs(2);
/// After its start a daemon has more urgent things to do than to look at QEMUs.
const LEARN_AFTER: Duration = Duration::from_secs(1);

/// What requests need.
struct App {
    config: Config,
    engine: Arc<Engine>,
    sessions: Arc<Sessions>,
    registry: Arc<Registry>,
    forks: Arc<ForkEngine>,
    grants: Option<Arc<Grants>>,
    /// Processors that VMs have for themselves.
    pub tuning: Arc<Tuning>,
    hooks: Arc<Hooks>,
    /// Guests that go home from visits by themselves.
    visitors: Arc<Visitors>,
    carrier: Arc<Carrier>,
    known: KnownPeers,
    fabrics: Arc<Fabrics>,
    dialer: Arc<PeerDialer>,
    access: Arc<Access>,
    metrics: PrometheusHandle,
    started: Instant,
    /// As bound: the port may have been left to the kernel.
    listen: SocketAddr,
    no_dirty_tracking: Option<String>,
    shared_disk: Option<String>,
}

impl App {
    fn security_word(&self) -> &'static str {
        match self.config.security {
            Security::MutualTls(_) => "mutual-tls",
            Security::Insecure => "insecure",
        }
    }
}

/// Runs `vmoved` with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let flags = Flags::parse();
    if flags.doctor {
        return tell_diagnosis();
    }
    let config = Config::load(flags).and_then(|mut config| {
        vmove_log::start("VMOVE_LOG", config.log_format);
        if let Some(path) = config.fork.topology.clone() {
            leaf_switches::fill(&mut config, &path)?;
        }
        Ok(config)
    });
    let config = match config {
        Ok(config) => config,
        Err(error) => {
            say(&format!("vmoved: {}", vmove_types::problem::chain(&error)));
            return ExitCode::from(2);
        }
    };
    let workers =
        std::thread::available_parallelism().map_or(WORKERS_AT_LEAST, |n| n.get().max(WORKERS_AT_LEAST));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build();
    let ended = runtime.context("Could not start worker threads").and_then(|runtime| {
        let ended = runtime.block_on(run(config));
        // Sessions are journaled: whatever thread is still at work may be cut off at any instruction.
        runtime.shutdown_timeout(Duration::from_millis(100));
        ended
    });
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("vmoved: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

async fn run(mut config: Config) -> anyhow::Result<()> {
    config.state_dir = own_dir("state", &config.state_dir)?;
    let _lock = StateLock::take(&config.state_dir)?;
    config.run_dir = own_dir("run", &config.run_dir)?;
    config.memory_dir = own_dir("memory", &config.memory_dir)?;
    folders::open_for_qemu(&config)?;
    let tls = match &config.security {
        Security::MutualTls(files) => Some(Arc::new(Tls::load(files)?)),
        Security::Insecure => {
            warn_of_no_tls(config.listen);
            None
        }
    };
    let metrics = metrics::install(&config.node).context("Could not set metrics up")?;
    let fabric_socket = config.state_dir.join("fabric.sock");
    let fabrics = Arc::new(Fabrics::new(config.fabric, &config.rdma, &fabric_socket)?);
    let peers = TcpListener::bind(config.listen)
        .await
        .with_context(|| format!("Could not listen on {} for peers: give another --listen", config.listen))?;
    let app = assemble(config, tls.clone(), fabrics.clone(), metrics, peers.local_addr()?).await?;

    // First: guests that lack pages may stand still until the sources that have them can dial. Nothing before the listener waits for a QEMU.
    app.engine.resume_owners();
    // Each holds its VM: nothing else may begin with it.
    app.engine.resume_disk_moves();
    // Whoever can reach us may ask for a fork.
    app.forks.recover().await;
    let port = PeerPort::new(
        app.engine.clone(),
        app.forks.clone(),
        fabrics.clone(),
        app.carrier.clone(),
        (tls.clone(), app.access.clone()),
        rest::router(app.clone()),
    );
    let mut tasks = tokio::task::JoinSet::new();
    if fabrics.has_local() {
        let (listener, held) = vmove_http::socket::listen(&fabric_socket)?;
        let port = port.clone();
        tasks.spawn(async move {
            let _held = held;
            port.serve_unix(listener).await;
        });
    }
    // Before anybody can start a VM: what was being started then is left over.
    app.registry.readopt();
    tasks.spawn(port.serve_tcp(peers));
    app.engine.resume_others();
    let domains = app.carrier.domains.clone();
    tasks.spawn(async move { domains.clear_left_over().await });
    if let Some(address) = app.config.metrics {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("Could not listen on {address} for metrics: give another --metrics"))?;
        let metrics = app.metrics.clone();
        tasks.spawn(vmove_http::metrics::serve(listener, move || metrics.render()));
    }
    tasks.spawn(app.registry.clone().supervise());
    if let Some(grants) = app.grants.clone() {
        tasks.spawn(grants.keep_book(app.registry.clone()));
    }
    tasks.spawn(app.tuning.clone().keep(app.registry.clone()));
    tasks.spawn(app.forks.clone().serve_guests());
    tasks.spawn(app.forks.clone().serve_disks());
    let traces = app.config.traces.clone().map(|collector| {
        let (traces, delivery) = Traces::to(collector, &app.config.node);
        tasks.spawn(delivery);
        traces
    });
    tasks.spawn(metrics::sample(app.clone(), app.metrics.clone(), traces));
    tasks.spawn(learn_qemus());
    tasks.spawn(proxmox::look_after_vms());
    hooks::start(&app, &mut tasks);
    tasks.spawn(going_home::take_home(app.clone()));
    tasks.spawn(reload_on_hangup(tls, app.access.clone()));
    // Last: whoever can connect here gets answers.
    let control = &app.config.control;
    if let Some(dir) = control.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        vmove_node::files::make_private_dir(dir)
            .with_context(|| format!("Could not make {}", dir.display()))?;
    }
    let (listener, control) = vmove_http::socket::listen(control)?;
    let asked_at = app.config.control.clone();
    tasks.spawn(async move { systemd::tell_watchdog(&asked_at).await });
    serve_until_told(&app, listener).await?;
    drop(control);
    tasks.shutdown().await;
    Ok(())
}

/// Why guests can stop the journals, if run and state folders share a file system.
fn shared_disk(config: &Config) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let device = |dir: &PathBuf| std::fs::metadata(dir).map(|found| found.dev()).ok();
    (device(&config.run_dir)? == device(&config.state_dir)?).then(|| {
        format!(
            "run folder {} and state folder {} share a file system: a guest that fills it through a file in its folder \
             (-serial file:) stops the journals of all; give --run-dir on another one",
            config.run_dir.display(),
            config.state_dir.display()
        )
    })
}

/// What it means that this daemon has no TLS.
fn warn_of_no_tls(listen: SocketAddr) {
    if listen.ip().to_canonical().is_loopback() {
        tracing::warn!(
            "--insecure: the peer port {listen} is open to this host only, and whoever reaches it can read and replace guests; \
             for peers on other hosts give --tls-cert, --tls-key and --tls-ca, or --listen ADDR:PORT on a network that you trust"
        );
    } else {
        tracing::warn!("--insecure: whoever reaches {listen} can read and replace guests");
    }
}

/// After a moment, looks at the QEMUs of this machine's kind that the node has: starting them to ask what they are takes 0.1 to some seconds,
/// which the first migration to this node should not have to wait for.
async fn learn_qemus() {
    tokio::time::sleep(LEARN_AFTER).await;
    vmove_migrate::qemu_binaries::learn_qemus(&native_qemus()).await;
}

/// The QEMUs of this host that have its own kind of processor.
fn native_qemus() -> Vec<PathBuf> {
    let own = format!("qemu-system-{}", std::env::consts::ARCH);
    let wanted = |path: &PathBuf| path.file_name().is_some_and(|name| name == "qemu-kvm" || *name == *own);
    let mut found = vmove_qmp::inspect::find_qemus(std::env::var_os("PATH").as_deref());
    found.retain(wanted);
    found
}

/// Prints what this host has and lacks, as one JSON object.
fn tell_diagnosis() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let diagnosis = runtime
        .context("Could not start worker threads")
        .and_then(|runtime| Ok(runtime.block_on(doctor::diagnose(Flags::parse, &native_qemus()))?));
    let told =
        diagnosis.and_then(|diagnosis| Ok(serde_json::to_writer(std::io::stdout().lock(), &diagnosis)?));
    match told {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("vmoved: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Where VMs get control groups, if they do.
fn control_groups(config: &Config) -> Arc<ControlGroups> {
    match ControlGroups::take(&config.groups) {
        Ok(groups) => {
            let below = groups.root().map(Path::display);
            tracing::info!(
                below = below.map(tracing::field::display),
                controllers = groups.controllers(),
                "each VM gets a control group"
            );
            groups
        }
        Err(GroupsError::Off) => ControlGroups::none(),
        Err(error) => {
            let why = vmove_types::problem::chain(&error);
            tracing::info!(why, "VMs get no control groups of their own: they are in that of vmoved");
            ControlGroups::none()
        }
    }
}

/// The nodes that the configuration names.
fn known_peers(config: &Config) -> KnownPeers {
    let known = |node: &KnownNode| KnownPeer { address: node.address.clone(), leaf: node.leaf.clone() };
    KnownPeers::new(
        config.nodes.iter().map(|(name, node)| (name.clone(), known(node))).collect(),
        config.node.clone(),
    )
}

/// What is done by itself when something happens. Runs that an earlier daemon has begun are noted in the state folder.
fn open_hooks(config: &Config) -> anyhow::Result<Arc<Hooks>> {
    let journal = config.state_dir.join("hooks");
    let settings = Settings { node: config.node.clone(), control: config.control.clone(), journal };
    Hooks::open(settings, config.hooks.clone())
        .context("Could not open the journal of hooks in the state folder")
}

/// State, engines and registry.
async fn assemble(
    config: Config,
    tls: Option<Arc<Tls>>,
    fabrics: Arc<Fabrics>,
    metrics: PrometheusHandle,
    listen: SocketAddr,
) -> anyhow::Result<Arc<App>> {
    let vms = Arc::new(VmStore::open(&config.state_dir.join("vms"))?);
    let monitors = Arc::new(Monitors::default());
    let hooks = open_hooks(&config)?;
    let visitors = Arc::new(Visitors::default());
    monitors.hear(hooks::listener(&hooks, &vms).into_iter().chain([visitors.listener()]).collect());
    let audit = config.audit_log.as_deref().map(|path| {
        Audit::open(path)
            .with_context(|| format!("Could not open the audit log {} (audit-log)", path.display()))
    });
    let access = Access::new(&config.node, config.file.clone(), tls.is_some(), config.clients.clone());
    let access = Arc::new(access.with_audit(audit.transpose()?));
    let tls = tls.map(|tls| (tls, access.clone()));
    let dialer = Arc::new(PeerDialer::new(tls, &config.nodes, fabrics.clone()));
    let peers = Arc::new(config.peers.clone().beside(&config.qemu));
    let reservations = if config.overcommit_memory {
        Reservations::overcommitting(config.memory_dir.clone())
    } else {
        Reservations::new(config.memory_dir.clone())
    };
    let groups = control_groups(&config);
    let devices = LedgerDevices::open(&config.state_dir, config.qemu.owner()).with_context(|| {
        format!("Could not open the journal of devices in {}", config.state_dir.display())
    })?;
    let grants = Grants::open(&config.grants, &config.node, &config.state_dir)?;
    let devices = LeasedDevices::beside(devices, grants.as_ref());
    let tuning = Tuning::open(config.tuning.clone(), grants.clone(), &config.state_dir)?;
    let admission: Arc<dyn Admission> = tuning.clone();
    let starter = Starter { groups, pins: tuning.pins().clone() };
    let monitored =
        [(Manager::Libvirt, vmove_libvirt::SOCKETS), (Manager::Proxmox, vmove_types::proxmox::MONITORS)];
    let monitored = monitored.map(|(by, folder)| Monitored { by, folder: folder.into() });
    let domains = Domains::new(monitors.clone(), monitored.into());
    let settings = EngineConfig {
        node: config.node.clone(),
        sessions_dir: config.state_dir.join("sessions"),
        run_dir: config.run_dir.clone(),
        memory_dir: config.memory_dir.clone(),
        reservations: reservations.clone(),
        confinement: config.qemu.clone(),
        peers: peers.clone(),
        admission: admission.clone(),
        vmm: Arc::new(Qemu::new(monitors.clone(), starter.clone(), config.qemu.clone(), domains.clone())),
        devices: devices.clone(),
        disk: Arc::new(KernelDisk),
        dialer: dialer.clone(),
        port: Some(listen.port()),
        bulk_connections: config.bulk_connections,
        reconnect_for: config.reconnect_for,
        keep_migrations: config.keep_migrations,
    };
    let engine = Engine::open(settings, vms.clone())?;
    let sessions = Sessions::new(engine.clone(), hooks.clone());
    let registry = Registry::new(
        vms,
        monitors,
        sessions.clone(),
        Means {
            run_dir: config.run_dir.clone(),
            reservations,
            starter,
            devices,
            confinement: config.qemu.clone(),
            keep_stopped: config.keep_stopped,
        },
    );
    let known = known_peers(&config);
    let carrier = Arc::new(Carrier {
        domains,
        engine: engine.clone(),
        dialer: dialer.clone(),
        known: known.clone(),
        policy: peers.clone(),
        node: config.node.clone(),
        port: listen.port(),
        announced: Mutex::default(),
    });
    let options = EngineOptions {
        admission,
        node: config.node.clone(),
        policy: config.fork.clone(),
        peers,
        known: known.clone(),
        listen,
        tls: matches!(config.security, Security::MutualTls(_)),
        state_dir: config.state_dir.clone(),
        reconnect_for: config.reconnect_for,
        dialer: dialer.clone(),
        // The program that runs, also when an update has put another in its place.
        standby: Some("/proc/self/exe".into()),
        hooks: hooks.clone(),
    };
    let forks = ForkEngine::open(options, registry.clone())?;
    let probe = run_blocking(vmove_memory::DirtyTracker::supported).await;
    let no_dirty_tracking = probe.ok().and_then(|found| found.err().map(|why| why.to_string()));
    if let Some(why) = &no_dirty_tracking {
        tracing::warn!(%why, "only post-copy is possible on this node");
    }
    let shared_disk = shared_disk(&config);
    if let Some(why) = &shared_disk {
        tracing::warn!("{why}");
    }
    if let Some(note) = qemu_user_note(&config.qemu) {
        tracing::warn!("{note}");
    }
    let started = Instant::now();
    Ok(Arc::new(App {
        config,
        engine,
        sessions,
        registry,
        forks,
        grants,
        tuning,
        hooks,
        visitors,
        carrier,
        known,
        fabrics,
        dialer,
        access,
        metrics,
        started,
        listen,
        no_dirty_tracking,
        shared_disk,
    }))
}

/// Serves the control socket until SIGTERM or SIGINT. QEMUs and sessions stay for the next daemon.
async fn serve_until_told(app: &Arc<App>, listener: UnixListener) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // Who starts us may block them, and we inherit that: SIGTERM would wait for ever.
    SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]).thread_unblock()?;
    let stop = tokio_util::sync::CancellationToken::new();
    let stopped = stop.clone();
    let server =
        axum::serve(listener, rest::router(app.clone()).into_make_service_with_connect_info::<Origin>())
            .with_graceful_shutdown(async move { stopped.cancelled().await });
    let mut server = tokio::spawn(server.into_future());
    tracing::info!(
        node = %app.config.node,
        listen = %app.listen,
        control = %app.config.control.display(),
        security = app.security_word(),
        qemu_user = app.config.qemu.whose(),
        qemu_sandbox = app.config.qemu.sandbox,
        vms = app.registry.count(),
        "vmoved is ready"
    );
    systemd::tell(&[NotifyState::Ready, NotifyState::Status("Ready")]);
    tokio::select! {
        _ = terminate.recv() => tracing::info!("SIGTERM: ending; QEMUs stay, migrations are taken up by the next vmoved"),
        _ = interrupt.recv() => tracing::info!("SIGINT: ending; QEMUs stay, migrations are taken up by the next vmoved"),
        ended = &mut server => anyhow::bail!("The control socket stopped serving: {ended:?}"),
    }
    systemd::tell(&[NotifyState::Stopping]);
    // Nobody could find them again.
    let _ = tokio::time::timeout(LAST_REQUESTS, app.forks.end_prepared()).await;
    stop.cancel();
    // Streams of events would never end by themselves.
    let _ = tokio::time::timeout(LAST_REQUESTS, server).await;
    Ok(())
}

/// SIGHUP: certificates were renewed, or clients changed.
async fn reload_on_hangup(tls: Option<Arc<Tls>>, access: Arc<Access>) {
    let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
    while hangup.recv().await.is_some() {
        let (tls, access) = (tls.clone(), access.clone());
        let read = run_blocking(move || {
            match tls.map(|tls| tls.reload()) {
                Some(Ok(())) => tracing::info!("certificates read again"),
                Some(Err(error)) => tracing::error!(%error, "certificates stay as they were"),
                None => {}
            }
            match access.reload() {
                Ok(clients) => tracing::info!(clients, "clients read again"),
                Err(error) => {
                    let why = vmove_types::problem::chain(&error);
                    tracing::error!(why, "clients stay as they were");
                }
            }
        });
        if let Err(error) = read.await {
            tracing::error!(%error, "certificates and clients may be as they were");
        }
    }
}

/// Runs work that must be finished even when the client that asked for it goes away.
async fn detached<T: Send + 'static, E: IntoProblem + Send + 'static>(
    work: impl Future<Output = Result<T, E>> + Send + 'static,
) -> Result<T, Problem> {
    match tokio::spawn(work.in_current_span()).await {
        Ok(result) => result.map_err(IntoProblem::into_problem),
        Err(error) => {
            Err(Problem::new(Code::Internal, format!("A task of vmoved failed ({error}): see its log")))
        }
    }
}

/// The last words, also where no log is kept.
fn say(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
