//! Configuration of `vbridged`: a TOML file, overridden by the command line.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Parser;
use rustls::ServerConfig;
use sched_bridge::model::NodeName;
use serde::Deserialize;
use vmove_grant::SecretKey;
use vmove_http::tls::server_config;
use vmove_log::LogFormat;
use vmove_types::typo;

pub use self::store::{StoreChoice, open_store};

use crate::access::{Access, Caller, Role, Token};
use crate::bridge::Retention;
use crate::driver::{CONTROL, DaemonAddress, TimeLimits};
use crate::executor::Limits;
use crate::instance_types::InstanceTypes;
use crate::quota::Quotas;
use crate::slurm::follower::{JOBS_HOLDER, SlurmFollower};
use crate::slurm::{DEFAULT_TIME_LIMIT, Slurm};
use crate::store::etcd::DEFAULT_MAX_TXN_OPS;
use crate::template::{Template, Templates};

mod store;

/// The default control socket.
pub const DEFAULT_CONTROL: &str = "/run/vbridged/control.sock";
/// The default store.
const DEFAULT_STORE: &str = "redb:/var/lib/vbridged/state.redb";

/// Keeps leases of virtual clusters and runs move plans
#[derive(Debug, Parser)]
#[command(
    name = "vbridged",
    version,
    after_help = "Examples:
  vbridged --store redb:/var/lib/vbridged/state.redb
  vbridged --store etcd:http://10.0.0.1:2379,http://10.0.0.2:2379 --listen 0.0.0.0:7430 --token-file /etc/vbridged/token \\
    --tls-cert /etc/vbridged/cert.pem --tls-key /etc/vbridged/key.pem"
)]
pub struct Arguments {
    /// Configuration file (TOML); options on the command line take precedence
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Unix socket for all requests; only its owner may use it
    #[arg(long, value_name = "SOCK")]
    pub control: Option<PathBuf>,
    /// TCP address for all requests; needs --tls-cert and --tls-key, unless it is a loopback address, and a token; or --insecure
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: Option<SocketAddr>,
    /// File whose first line is a bearer token with which TCP clients may do everything; `tokens` in the configuration has others
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Certificate chain of the bridge for TLS on TCP (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Accept TCP requests without a token, if none is configured, and without TLS. Only for a network that you trust
    #[arg(long)]
    pub insecure: bool,
    /// Where the state is kept: redb:FILE for one bridge, etcd:URL[,URL...] for several
    #[arg(long, value_name = "STORE")]
    pub store: Option<String>,
    /// The --max-txn-ops that etcd was started with: it limits on how many nodes one request is placed
    #[arg(long, value_name = "COUNT")]
    pub etcd_max_txn_ops: Option<usize>,
    /// Serve Prometheus metrics here, at /metrics
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Form of the log: text, or json with one object a line
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
}

/// The configuration file. Keys were written with `_` before, and still may be.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
struct File {
    control: Option<PathBuf>,
    listen: Option<SocketAddr>,
    #[serde(alias = "token_file")]
    token_file: Option<PathBuf>,
    /// Tokens with roles, by the names of their bearers.
    tokens: BTreeMap<String, TokenFile>,
    insecure: bool,
    tls: Option<TlsFiles>,
    store: Option<String>,
    #[serde(alias = "etcd_max_txn_ops")]
    etcd_max_txn_ops: Option<usize>,
    metrics: Option<SocketAddr>,
    #[serde(alias = "log_format")]
    log_format: Option<LogFormat>,
    /// Seconds between two lists of the VMs of each node in `[daemons]`; 0 for never.
    #[serde(alias = "look_s")]
    look_s: Option<u64>,
    moves: Moves,
    account: Account,
    /// Command lines of VMs that anybody with a lease may use.
    templates: BTreeMap<String, Template>,
    /// Files with instance types, keys and aliases; `*` stands for any text.
    #[serde(alias = "instance_types")]
    instance_types: Vec<String>,
    /// What holders may have leased at once, by their names; `*` stands for all others.
    quota: Quotas,
    slurm: Option<SlurmCluster>,
    /// File of the key that signs grants; made if it is not there.
    #[serde(alias = "grant_key")]
    grant_key: Option<PathBuf>,
    daemons: BTreeMap<NodeName, DaemonAddress>,
}

/// `[tls]`: what the bridge shows to TCP clients.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsFiles {
    /// Certificate chain.
    cert: PathBuf,
    /// Private key.
    key: PathBuf,
}

/// A token of `[tokens]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenFile {
    /// What its bearer may do.
    role: Role,
    /// The file whose first line it is.
    file: PathBuf,
}

/// Accounting records.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
struct Account {
    /// Days for which they are kept after the end of the lease; forever if absent.
    #[serde(alias = "keep_days")]
    keep_days: Option<u32>,
    /// File to which they are appended before they are deleted.
    archive: Option<PathBuf>,
}

impl Account {
    fn retention(self) -> anyhow::Result<Option<Retention>> {
        match (self.keep_days, self.archive) {
            (Some(0), _) => {
                bail!("[account]: keep-days must be at least 1; omit it to keep all records")
            }
            (Some(days), archive) => {
                let keep = Duration::from_secs(u64::from(days) * 86_400);
                Ok(Some(Retention { keep, archive }))
            }
            (None, Some(_)) => {
                bail!("[account]: archive is written only when records are deleted: set keep-days as well")
            }
            (None, None) => Ok(None),
        }
    }
}

/// A Slurm cluster that is followed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
struct SlurmCluster {
    /// Its `slurm.conf`; if absent, the one that Slurm's commands find by themselves.
    conf: Option<PathBuf>,
    /// Seconds between two synchronizations.
    #[serde(alias = "every_s")]
    every_s: u64,
    /// Who may use the reservations of leases.
    users: String,
    /// Whether VMs leave nodes that Slurm drains.
    evacuate: bool,
    /// Seconds for which one of Slurm's commands may run.
    #[serde(alias = "command_limit_s")]
    command_limit_s: u64,
}

impl Default for SlurmCluster {
    fn default() -> Self {
        let command_limit_s = DEFAULT_TIME_LIMIT.as_secs();
        Self { conf: None, every_s: 5, users: "root".to_owned(), evacuate: true, command_limit_s }
    }
}

impl From<SlurmCluster> for SlurmFollower {
    fn from(cluster: SlurmCluster) -> Self {
        let conf = cluster.conf.map(|path| ("SLURM_CONF".to_owned(), path.to_string_lossy().into_owned()));
        Self {
            slurm: Slurm::new(conf.into_iter().collect())
                .with_time_limit(Duration::from_secs(cluster.command_limit_s.max(1))),
            users: cluster.users,
            interval: Duration::from_secs(cluster.every_s.max(1)),
            evacuate: cluster.evacuate,
            exclusive: Arc::default(),
        }
    }
}

/// How VMs are migrated.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
struct Moves {
    command: Option<Vec<String>>,
    options: Vec<String>,
    #[serde(alias = "per_node")]
    per_node: usize,
    #[serde(alias = "per_uplink")]
    per_uplink: usize,
    /// Seconds for which `vmove` may take to list the VMs of a node.
    #[serde(alias = "look_limit_s")]
    look_limit_s: u64,
    /// The same to start or to stop a VM.
    #[serde(alias = "start_limit_s")]
    start_limit_s: u64,
    /// The same to migrate one.
    #[serde(alias = "move_limit_s")]
    move_limit_s: u64,
}

impl Moves {
    fn time_limits(&self) -> TimeLimits {
        let seconds = |seconds: u64| Duration::from_secs(seconds.max(1));
        TimeLimits {
            look: seconds(self.look_limit_s),
            act: seconds(self.start_limit_s),
            migrate: seconds(self.move_limit_s),
        }
    }
}

impl Default for Moves {
    fn default() -> Self {
        let (limits, time_limits) = (Limits::default(), TimeLimits::default());
        Self {
            command: None,
            options: Vec::new(),
            per_node: limits.per_node,
            per_uplink: limits.per_uplink,
            look_limit_s: time_limits.look.as_secs(),
            start_limit_s: time_limits.act.as_secs(),
            move_limit_s: time_limits.migrate.as_secs(),
        }
    }
}

/// The configuration of the daemon.
#[derive(Debug)]
pub struct Config {
    /// Unix socket for requests.
    pub control: PathBuf,
    /// TCP address for requests.
    pub listen: Option<SocketAddr>,
    /// Who may send requests over TCP.
    pub access: Access,
    /// TLS of TCP requests; none: plain HTTP.
    pub tls: Option<Arc<ServerConfig>>,
    /// TCP requests may come without a token, or without TLS from other machines.
    pub insecure: bool,
    /// Which store.
    pub store: StoreChoice,
    /// TCP address of the metrics.
    pub metrics: Option<SocketAddr>,
    /// Form of the log.
    pub log_format: LogFormat,
    /// Between two lists of the VMs of each node; none: they are not listed.
    pub list_interval: Option<Duration>,
    /// Command that runs `vmove`, if not the usual one.
    pub command: Option<Vec<String>>,
    /// Further arguments of `vmove migrate`.
    pub options: Vec<String>,
    /// How many migrations may run at once.
    pub limits: Limits,
    /// For how long `vmove` may run.
    pub time_limits: TimeLimits,
    /// The Slurm cluster to follow.
    pub slurm: Option<SlurmFollower>,
    /// How long accounting records are kept; none: forever.
    pub retention: Option<Retention>,
    /// Command lines of VMs that anybody with a lease may use.
    pub templates: Templates,
    /// Instance types that requests may name.
    pub types: Arc<InstanceTypes>,
    /// What holders may have leased at once.
    pub quotas: Quotas,
    /// Daemons of nodes.
    pub daemons: BTreeMap<NodeName, DaemonAddress>,
    /// File of the key that signs what VMs may have on their nodes.
    pub grant_key: Option<PathBuf>,
}

impl Config {
    /// Combines file and arguments. Nothing is opened or made: another try cannot help against an error.
    ///
    /// # Errors
    /// The configuration is not valid, with file, line and what was expected.
    pub fn load(arguments: Arguments) -> anyhow::Result<Self> {
        let file = match &arguments.config {
            Some(path) => read(path)?,
            None => File::default(),
        };
        let listen = arguments.listen.or(file.listen);
        let within = |error: anyhow::Error| match &arguments.config {
            Some(path) => error.context(path.display().to_string()),
            None => error,
        };
        let access = read_tokens(arguments.token_file.or(file.token_file), &file.tokens).map_err(within)?;
        let flags = arguments.tls_cert.zip(arguments.tls_key).map(|(cert, key)| TlsFiles { cert, key });
        let tls = flags.or(file.tls).map(|files| server_config(&files.cert, &files.key)).transpose()?;
        let insecure = arguments.insecure || file.insecure;
        if let Some(address) = listen.filter(|_| !insecure) {
            check_listener(address, &access, tls.is_some())?;
        }
        if file.moves.per_node == 0
            || file.moves.per_uplink == 0
            || file.moves.command.as_ref().is_some_and(Vec::is_empty)
        {
            let why = "[moves]: per-node and per-uplink must be at least 1, and command must not be empty";
            return Err(within(anyhow!(why)));
        }
        check_daemons(&file.moves, &file.daemons).map_err(within)?;
        let store = arguments.store.or(file.store).unwrap_or_else(|| DEFAULT_STORE.to_owned());
        let max_txn_ops = arguments.etcd_max_txn_ops.or(file.etcd_max_txn_ops).unwrap_or(DEFAULT_MAX_TXN_OPS);
        Ok(Self {
            control: arguments.control.or(file.control).unwrap_or_else(|| DEFAULT_CONTROL.into()),
            listen,
            access,
            tls,
            insecure,
            store: StoreChoice::read(&store, max_txn_ops)?,
            metrics: arguments.metrics.or(file.metrics),
            log_format: arguments.log_format.or(file.log_format).unwrap_or_default(),
            list_interval: Some(file.look_s.unwrap_or(5)).filter(|s| *s > 0).map(Duration::from_secs),
            slurm: file.slurm.map(SlurmFollower::from),
            retention: file.account.retention().map_err(within)?,
            time_limits: file.moves.time_limits(),
            command: file.moves.command,
            options: file.moves.options,
            limits: Limits { per_node: file.moves.per_node, per_uplink: file.moves.per_uplink },
            templates: Templates::new(file.templates).map_err(|error| within(error.into()))?,
            types: Arc::new(InstanceTypes::read(file.instance_types).map_err(|error| within(error.into()))?),
            quotas: file.quota,
            daemons: file.daemons,
            grant_key: file.grant_key,
        })
    }
}

/// A control socket that the command does not use would be another node's: its VMs would be taken for those of this one.
fn check_daemons(moves: &Moves, daemons: &BTreeMap<NodeName, DaemonAddress>) -> anyhow::Result<()> {
    let Some(command) = moves.command.as_ref().filter(|words| !words.iter().any(|w| w.contains(CONTROL)))
    else {
        return Ok(());
    };
    let Some(node) = daemons.iter().find_map(|(node, daemon)| daemon.control.as_ref().map(|_| node)) else {
        return Ok(());
    };
    let with_control = [&command[..], &["--control".to_owned(), CONTROL.to_owned()]].concat();
    bail!(
        "[daemons.{node}] control: expected a [moves] command with {CONTROL}, which stands for that socket, found {command:?}: every node would \
         be asked at the same socket. Write command = {with_control:?} in [moves], or leave that key out for the default"
    )
}

/// Whether requests on this address are protected.
fn check_listener(address: SocketAddr, access: &Access, tls: bool) -> anyhow::Result<()> {
    if access.is_open() {
        bail!(
            "on TCP, everybody could grant and end leases: set --token-file, [tokens] in the configuration, or --insecure"
        );
    }
    if !tls && !address.ip().is_loopback() {
        bail!(
            "--listen {address}: without TLS, whoever sees the traffic has the tokens: set --tls-cert and --tls-key, or --insecure on a network that you trust"
        );
    }
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<File> {
    let text = std::fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))?;
    toml::from_str(&text).map_err(|error| {
        let why = typo::hinted(error.to_string().trim_end());
        anyhow!("{} is not a valid configuration: {why}", path.display())
    })
}

/// The token that may do everything, and those with roles.
fn read_tokens(of_operator: Option<PathBuf>, others: &BTreeMap<String, TokenFile>) -> anyhow::Result<Access> {
    let of_operator = of_operator.map(|path| ("token-file", path, Caller::Operator));
    let others =
        others.iter().map(|(name, token)| (&**name, token.file.clone(), Caller::new(name, token.role)));
    let mut tokens: Vec<(Token, Caller)> = Vec::new();
    for (name, path, caller) in of_operator.into_iter().chain(others) {
        if caller == Caller::new(JOBS_HOLDER, Role::Tenant) {
            bail!(
                "[tokens.{name}]: leases that stand for jobs of Slurm have this holder; choose another name"
            );
        }
        let token = Token::new(read_token(&path)?);
        if tokens.iter().any(|(known, _)| *known == token) {
            bail!(
                "[tokens.{name}]: {} has a token that another one has as well; make a new one",
                path.display()
            );
        }
        tokens.push((token, caller));
    }
    Ok(Access::new(tokens))
}

fn read_token(path: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("could not read the token in {}", path.display()))?;
    let token = text.lines().next().unwrap_or("").trim();
    if token.len() < 16 {
        bail!(
            "{}: expected a token of at least 16 characters on the first line (openssl rand -hex 32)",
            path.display()
        );
    }
    Ok(token.to_owned())
}

/// The key in a file, which is made if it is not there. Its public half is written beside it, for the configuration of nodes.
///
/// # Errors
/// It is no key, or cannot be read or written.
pub fn grant_key(path: &Path) -> anyhow::Result<Arc<SecretKey>> {
    let key = match std::fs::read_to_string(path) {
        Ok(text) => text.parse::<SecretKey>().with_context(|| format!("grant-key {}", path.display()))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let (key, text) = SecretKey::generate()?;
            let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
            let written = file.and_then(|mut file| {
                file.write_all(text.as_bytes())?;
                file.sync_all()
            });
            written.with_context(|| format!("could not write {}", path.display()))?;
            key
        }
        Err(error) => return Err(error).with_context(|| format!("could not read {}", path.display())),
    };
    let mut public = path.as_os_str().to_owned();
    public.push(".pub");
    std::fs::write(&public, format!("{}\n", key.public()))
        .with_context(|| format!("could not write {}", Path::new(&public).display()))?;
    Ok(Arc::new(key))
}

#[cfg(test)]
mod tests;
