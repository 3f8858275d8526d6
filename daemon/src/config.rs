//! Settings of `vmoved`: flags over a TOML file over defaults.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

pub use self::clients::{Client, ClientError, Named, Rate, Role, read_clients};
pub use self::hooks::BridgeConfig;
pub use self::nodes::KnownNode;
pub use self::place::Place;
pub use self::qemu::{QemuFlags, qemu_user_note};
#[cfg(feature = "verbs")]
pub use self::rdma::OnDemand;
pub use self::rdma::{RdmaConfig, RdmaFlags};
pub use vmove_clone::engine::ForkPolicy;
use vmove_clone::engine::SELF;
use vmove_hooks::config::{Hook, HookEntry, HookError};
use vmove_hooks::signals::Sources;
use vmove_http::client::Endpoint;
use vmove_log::LogFormat;
use vmove_node::control_groups::GroupPolicy;
use vmove_node::peer::{PeerPolicy, split_address};
use vmove_node::pins::TuningPolicy;
use vmove_qmp::confine::Confinement;
use vmove_types::node::{DEFAULT_CONTROL, DEFAULT_PORT};
use vmove_types::{typo, units};

use self::clients::ClientEntry;
pub use self::grants::GrantPolicy;
use self::hooks::SignalsConfig;
use self::nodes::NodeEntry;
use self::qemu::QemuConfig;
use self::traces::TracesConfig;

mod clients;
mod grants;
mod hooks;
mod nodes;
mod place;
mod qemu;
mod rdma;
mod traces;

/// Where a daemon with TLS listens, unless told otherwise: every address of the host, IPv4 too.
const EVERYWHERE: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), DEFAULT_PORT);
/// Where one without TLS listens, unless told otherwise. One socket cannot have `::1` as well.
const THIS_HOST: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), DEFAULT_PORT);
const DEFAULT_STATE_DIR: &str = "/var/lib/vmove";

/// Moves running QEMU guests between nodes. One per node.
#[derive(Debug, Default, Parser)]
#[command(name = "vmoved", version, long_about = LONG_ABOUT, after_help = EXAMPLES)]
pub struct Flags {
    /// Settings from a TOML file; flags override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Name of this node, shown to peers and in reports [default: host name]
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    /// Unix socket for vmove, mode 0600 [default: VMOVE_CONTROL, or /run/vmove/control.sock]
    #[arg(long, value_name = "SOCK")]
    pub control: Option<PathBuf>,
    /// Address and port for peer daemons and for HTTP [default: `[::]:7420`; with --insecure 127.0.0.1:7420]
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: Option<SocketAddr>,
    /// Records of VMs and migrations; must survive a restart [default: /var/lib/vmove]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Guest memory: tmpfs and hugetlbfs are mounted below it [default: memory/ in the state folder]
    #[arg(long, value_name = "DIR")]
    pub memory_dir: Option<PathBuf>,
    /// Working folders, sockets and logs of VMs [default: run/ in the state folder]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// How pages cross; auto takes the best that both ends have
    #[arg(long, value_enum)]
    pub fabric: Option<FabricChoice>,
    #[command(flatten)]
    pub qemu: QemuFlags,
    #[command(flatten)]
    pub rdma: RdmaFlags,
    /// Certificate chain of this node, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of this node, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Authority that signs every node's certificate, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// No TLS: anyone who reaches the port can read and replace guests. Listens on 127.0.0.1 only, unless --listen is given
    #[arg(long)]
    pub insecure: bool,
    /// Serve Prometheus metrics here
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Form of the log: text, or json with one object a line [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
    /// Say as JSON what this host has and lacks, and end; `vmove doctor` shows it
    #[arg(long)]
    pub doctor: bool,
}

const LONG_ABOUT: &str = "Moves running QEMU guests between nodes. One vmoved runs on each node, as root; \
`vmove` talks to it over a Unix socket, and the daemons talk to each other over one TCP port.\n\n\
Ending vmoved (SIGTERM, or a crash) leaves its QEMUs running; the next vmoved on the same state folder takes them \
and unfinished migrations up again.";

const EXAMPLES: &str = "Examples:
  vmoved --config /etc/vmove/vmoved.toml
  vmoved --listen 192.0.2.1:7420 --tls-cert node1.pem --tls-key node1.key --tls-ca ca.pem
  vmoved --node a --control /tmp/a.sock --listen 127.0.0.1:7421 --state-dir /tmp/a --insecure

Log filter: VMOVE_LOG=debug, or VMOVE_LOG=vmove_migrate=trace,info. Default: info.";

/// Which fabric back end to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum FabricChoice {
    /// The best that both ends have
    #[default]
    Auto,
    /// Both daemons on one kernel (tests, moving between NUMA nodes)
    Local,
    /// RDMA verbs
    Verbs,
    /// TCP, with or without TLS
    Tcp,
}

/// Fewer would hide what a client has just asked for; more would make each look through the history slow.
const KEPT_MIGRATIONS: std::ops::RangeInclusive<usize> = 10..=1_000_000;

/// The TOML file. Every key is optional.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ConfigFile {
    node: Option<String>,
    control: Option<PathBuf>,
    listen: Option<SocketAddr>,
    state_dir: Option<PathBuf>,
    memory_dir: Option<PathBuf>,
    run_dir: Option<PathBuf>,
    fabric: Option<FabricChoice>,
    rdma: RdmaConfig,
    metrics: Option<SocketAddr>,
    audit_log: Option<PathBuf>,
    log_format: Option<LogFormat>,
    insecure: Option<bool>,
    tls: Option<TlsFiles>,
    bulk_connections: Option<u8>,
    reconnect_for: Option<String>,
    keep_migrations: Option<usize>,
    keep_stopped: Option<String>,
    overcommit_memory: Option<bool>,
    fork: ForkPolicy,
    qemu: QemuConfig,
    peers: PeerPolicy,
    control_groups: GroupPolicy,
    tuning: TuningPolicy,
    grants: GrantPolicy,
    nodes: BTreeMap<String, NodeEntry>,
    client: Vec<ClientEntry>,
    hook: Vec<HookEntry>,
    host_signals: SignalsConfig,
    bridge: Option<BridgeConfig>,
    traces: TracesConfig,
}

/// `[fork]`, if it is within its ranges, and the nodes that it names are `known`.
fn checked(policy: ForkPolicy, own: &str, known: impl Fn(&str) -> bool) -> Result<ForkPolicy, ConfigError> {
    if let Some(group) = policy.multicast_group.filter(|g| !g.ip().is_multicast() || g.port() == 0) {
        let why = format!("expected an address of 224.0.0.0/4 and a port, found {group}");
        return Err(value("fork.multicast-group", why));
    }
    let none = [Some(policy.link_mbit), policy.uplink_mbit, policy.multicast_mbit].contains(&Some(0));
    if none {
        return Err(value("fork", "expected rates of at least 1 megabit per second, found 0".to_owned()));
    }
    let to = &policy.from_guest_to;
    let is_node = |node: &String| node == SELF || node == own || known(node);
    if let Some(node) = to.iter().find(|node| !is_node(node)) {
        let why = format!("expected {SELF:?} and names of [nodes], found {node:?}");
        return Err(value("fork.from-guest-to", why));
    }
    if to.is_empty() {
        let why = format!("expected one node at least, such as {SELF:?}, found none");
        return Err(value("fork.from-guest-to", why));
    }
    Ok(policy)
}

/// Files for mutual TLS, all PEM.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// Certificate chain of this node.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Authority that signs every node's certificate.
    pub ca: PathBuf,
}

/// How connections between daemons are protected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Security {
    /// Both ends show a certificate of the same authority.
    MutualTls(TlsFiles),
    /// Not at all.
    Insecure,
}

/// Settings, complete and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Name of this node.
    pub node: String,
    /// Control socket.
    pub control: PathBuf,
    /// Peer port.
    pub listen: SocketAddr,
    /// State folder.
    pub state_dir: PathBuf,
    /// Guest memory.
    pub memory_dir: PathBuf,
    /// Working folders of VMs.
    pub run_dir: PathBuf,
    /// Fabric.
    pub fabric: FabricChoice,
    /// How RDMA is used.
    pub rdma: RdmaConfig,
    /// Protection of the peer port.
    pub security: Security,
    /// Metrics port.
    pub metrics: Option<SocketAddr>,
    /// Who asked for what: one JSON object a line.
    pub audit_log: Option<PathBuf>,
    /// Form of the log.
    pub log_format: LogFormat,
    /// Bulk connections per migration, 1 to 16.
    pub bulk_connections: u8,
    /// How long a migration that lost its peer after the hand-over goes on trying.
    pub reconnect_for: Duration,
    /// Migrations of the past that are remembered, 10 to 1,000,000.
    pub keep_migrations: usize,
    /// How long the folders of VMs that are no more are kept.
    pub keep_stopped: Duration,
    /// Guests may be larger than the memory of this node: of each counts what it holds.
    pub overcommit_memory: bool,
    /// Forks.
    pub fork: ForkPolicy,
    /// With which rights QEMUs run.
    pub qemu: Confinement,
    /// What other nodes may do here.
    pub peers: PeerPolicy,
    /// Control groups of VMs.
    pub groups: GroupPolicy,
    /// Which processors VMs may have for themselves.
    pub tuning: TuningPolicy,
    /// Whose grants are taken.
    pub grants: GrantPolicy,
    /// Peers by name.
    pub nodes: BTreeMap<String, KnownNode>,
    /// Where the settings are from, to be read again.
    pub file: Option<PathBuf>,
    /// Who may give commands over the peer port.
    pub clients: Vec<Client>,
    /// What is done by itself when something happens, in the order in which it is done.
    pub hooks: Vec<Hook>,
    /// Where the host tells things that hooks wait for.
    pub signals: Sources,
    /// The bridge that says where hooks move VMs.
    pub bridge: Option<BridgeConfig>,
    /// Collector of OpenTelemetry for traces of migrations and forks.
    pub traces: Option<Endpoint>,
}

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("Could not read the configuration {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
    /// The file is not valid.
    #[error("{path} is not a valid configuration: {why}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why, with the nearest right key.
        why: String,
    },
    /// Neither TLS nor its absence was asked for.
    #[error(
        "Nothing says how connections between daemons are protected: give --tls-cert, --tls-key and --tls-ca \
         (or [tls] in the configuration), or --insecure on a network that you trust"
    )]
    NoSecurity,
    /// Both were asked for.
    #[error("Both TLS files and --insecure are given: leave one of them out")]
    BothSecurities,
    /// Not all of the files.
    #[error("TLS needs --tls-cert, --tls-key and --tls-ca: {0} is missing")]
    PartialTls(&'static str),
    /// A hook cannot be used.
    #[error("{place}{why}")]
    Hook {
        /// In the file.
        place: Place,
        /// Its place, its key, expected and found.
        why: HookError,
    },
    /// A client cannot be used.
    #[error("{place}{why}")]
    Client {
        /// In the file.
        place: Place,
        /// Its place, its key, expected and found.
        why: ClientError,
    },
    /// A value is out of range.
    #[error("{place}{key}: {why}")]
    Value {
        /// In the file, if it is from there.
        place: Place,
        /// Its key in the file.
        key: String,
        /// Expected and found.
        why: String,
    },
}

impl Config {
    /// Reads the file that `flags` name, if any, and puts the flags over it.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn load(flags: Flags) -> Result<Self, ConfigError> {
        let Some(path) = flags.config.clone() else { return Self::merge(flags, ConfigFile::default()) };
        let text = read(&path)?;
        let file = ConfigFile::parse(&path, &text)?;
        let given = flags.values();
        Self::merge(flags, file).map_err(|error| match error {
            // The file does not have it, or has another one.
            ConfigError::Value { ref key, .. } if given.contains(&key.as_str()) => error,
            error => error.within(&path, &text),
        })
    }

    fn merge(flags: Flags, file: ConfigFile) -> Result<Self, ConfigError> {
        let security = security(&flags, &file)?;
        let node = flags.node.or(file.node).unwrap_or_else(host_name);
        if node.is_empty()
            || node.len() > vmove_node::peer::MAX_NODE_NAME
            || node.chars().any(char::is_control)
        {
            return Err(value(
                "node",
                format!("expected 1 to 64 bytes without control characters, found {node:?}"),
            ));
        }
        let state_dir =
            absolute(flags.state_dir.or(file.state_dir).unwrap_or_else(|| DEFAULT_STATE_DIR.into()));
        let below = |name: &str| state_dir.join(name);
        let bulk_connections = file.bulk_connections.unwrap_or(2);
        if !(1..=16).contains(&bulk_connections) {
            return Err(value("bulk-connections", format!("expected 1 to 16, found {bulk_connections}")));
        }
        let reconnect_for = match file.reconnect_for {
            None => Duration::from_secs(600),
            Some(text) => units::parse_duration(&text).map_err(|why| value("reconnect-for", why))?,
        };
        let keep_stopped = match file.keep_stopped {
            None => Duration::from_secs(86400),
            Some(text) => units::parse_duration(&text).map_err(|why| value("keep-stopped", why))?,
        };
        let keep_migrations = file.keep_migrations.unwrap_or(1000);
        if !KEPT_MIGRATIONS.contains(&keep_migrations) {
            let (least, most) = (KEPT_MIGRATIONS.start(), KEPT_MIGRATIONS.end());
            return Err(value(
                "keep-migrations",
                format!("expected {least} to {most}, found {keep_migrations}"),
            ));
        }
        let nodes: BTreeMap<String, KnownNode> = file
            .nodes
            .into_iter()
            .map(|(name, entry)| entry.checked(&name).map(|node| (name, node)))
            .collect::<Result<_, ConfigError>>()?;
        let known = |node: &str| nodes.contains_key(node) || split_address(node).is_some();
        let hooks = hooks::check(file.hook, file.fork.child_start.clone(), known, file.bridge.is_some());
        let hooks = hooks.map_err(|why| ConfigError::Hook { place: Place::default(), why })?;
        let clients = clients::check(file.client, security != Security::Insecure)
            .map_err(|why| ConfigError::Client { place: Place::default(), why })?;
        let fork = checked(file.fork, &node, known)?;
        let peers = file.peers;
        if peers.accept_from.is_some() && security == Security::Insecure {
            return Err(value(
                "peers.accept-from",
                "expected TLS, found insecure: without certificates nobody knows who a peer is".to_owned(),
            ));
        }
        Ok(Self {
            node,
            control: absolute(control(flags.control, file.control, std::env::var_os("VMOVE_CONTROL"))),
            listen: flags.listen.or(file.listen).unwrap_or(match security {
                Security::MutualTls(_) => EVERYWHERE,
                Security::Insecure => THIS_HOST,
            }),
            memory_dir: absolute(flags.memory_dir.or(file.memory_dir).unwrap_or_else(|| below("memory"))),
            run_dir: absolute(flags.run_dir.or(file.run_dir).unwrap_or_else(|| below("run"))),
            state_dir,
            fabric: flags.fabric.or(file.fabric).unwrap_or_default(),
            rdma: file.rdma.overridden(flags.rdma).checked()?,
            security,
            metrics: flags.metrics.or(file.metrics),
            audit_log: file.audit_log.map(absolute),
            log_format: flags.log_format.or(file.log_format).unwrap_or_default(),
            bulk_connections,
            reconnect_for,
            keep_migrations,
            keep_stopped,
            overcommit_memory: file.overcommit_memory.unwrap_or(false),
            fork,
            qemu: file.qemu.overridden(flags.qemu)?,
            peers,
            groups: file.control_groups,
            tuning: file.tuning,
            grants: file.grants.checked()?,
            hooks,
            signals: file.host_signals.sources(),
            bridge: file.bridge,
            traces: file.traces.collector()?,
            nodes,
            file: flags.config.map(absolute),
            clients,
        })
    }
}

impl ConfigError {
    /// The same of the text of a file.
    fn within(self, path: &Path, text: &str) -> Self {
        match self {
            Self::Value { key, why, .. } => Self::Value { place: Place::of(path, text, &key), key, why },
            Self::Hook { why, .. } => {
                let key = format!("hook[{}].{}", why.number, why.key);
                Self::Hook { place: Place::near(path, text, &key), why }
            }
            Self::Client { why, .. } => Self::Client { place: Place::near(path, text, &why.place()), why },
            other => other,
        }
    }
}

impl Flags {
    /// Keys of the file whose values flags give, and which are checked after both are one.
    fn values(&self) -> Vec<&'static str> {
        let all = [
            ("node", self.node.is_some()),
            ("qemu.user", self.qemu.qemu_user.is_some()),
            ("rdma.service-level", self.rdma.rdma_service_level.is_some()),
        ];
        all.into_iter().filter_map(|(key, given)| given.then_some(key)).collect()
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })
}

impl ConfigFile {
    fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        toml::from_str(text).map_err(|error| ConfigError::Parse {
            path: path.to_owned(),
            why: typo::hinted(error.to_string().trim_end()),
        })
    }
}

/// Flags, as a group, over the file: `--insecure` on the command line is not contradicted by `[tls]` in the file.
fn security(flags: &Flags, file: &ConfigFile) -> Result<Security, ConfigError> {
    let any_tls_flag = flags.tls_cert.is_some() || flags.tls_key.is_some() || flags.tls_ca.is_some();
    if flags.insecure {
        return if any_tls_flag { Err(ConfigError::BothSecurities) } else { Ok(Security::Insecure) };
    }
    if any_tls_flag {
        let part = |flag: &Option<PathBuf>, of_file: fn(&TlsFiles) -> &PathBuf, name| {
            flag.clone()
                .or_else(|| file.tls.as_ref().map(|t| of_file(t).clone()))
                .map(absolute)
                .ok_or(ConfigError::PartialTls(name))
        };
        return Ok(Security::MutualTls(TlsFiles {
            cert: part(&flags.tls_cert, |t| &t.cert, "--tls-cert")?,
            key: part(&flags.tls_key, |t| &t.key, "--tls-key")?,
            ca: part(&flags.tls_ca, |t| &t.ca, "--tls-ca")?,
        }));
    }
    match (&file.tls, file.insecure.unwrap_or(false)) {
        (Some(_), true) => Err(ConfigError::BothSecurities),
        (Some(tls), false) => Ok(Security::MutualTls(TlsFiles {
            cert: absolute(tls.cert.clone()),
            key: absolute(tls.key.clone()),
            ca: absolute(tls.ca.clone()),
        })),
        (None, true) => Ok(Security::Insecure),
        (None, false) => Err(ConfigError::NoSecurity),
    }
}

fn value(key: impl Into<String>, why: String) -> ConfigError {
    ConfigError::Value { place: Place::default(), key: key.into(), why }
}

/// The environment is of whoever starts the daemon, perhaps for `vmove` in the same shell: it counts where nothing else is said.
fn control(flag: Option<PathBuf>, file: Option<PathBuf>, environment: Option<OsString>) -> PathBuf {
    let environment = environment.filter(|path| !path.is_empty()).map(PathBuf::from);
    flag.or(file).or(environment).unwrap_or_else(|| DEFAULT_CONTROL.into())
}

fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
pub(crate) mod tests;
