//! Configuration of `vbridged`: a TOML file, overridden by the command line.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use rustls::ServerConfig;
use sched_bridge::model::NodeName;
use serde::Deserialize;
use vmove_grant::SecretKey;
use vmove_http::client::{BadEndpoint, Endpoint};
use vmove_http::tls::server_config;
use vmove_log::LogFormat;

use crate::access::{Access, Caller, Role, Token};
use crate::bridge::Retention;
use crate::driver::{DaemonAddress, TimeLimits};
use crate::executor::Limits;
use crate::instance_types::InstanceTypes;
use crate::quota::Quotas;
use crate::slurm::follower::{JOBS_HOLDER, SlurmFollower};
use crate::slurm::{DEFAULT_TIME_LIMIT, Slurm};
use crate::store::{Embedded, Etcd, Store, etcd::DEFAULT_MAX_TXN_OPS};
use crate::template::{Template, Templates};

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

/// The configuration file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    control: Option<PathBuf>,
    listen: Option<SocketAddr>,
    token_file: Option<PathBuf>,
    /// Tokens with roles, by the names of their bearers.
    tokens: BTreeMap<String, TokenFile>,
    insecure: bool,
    tls: Option<TlsFiles>,
    store: Option<String>,
    etcd_max_txn_ops: Option<usize>,
    metrics: Option<SocketAddr>,
    #[serde(alias = "log-format")]
    log_format: Option<LogFormat>,
    /// Seconds between two lists of the VMs of each node in `[daemons]`; 0 for never.
    look_s: Option<u64>,
    moves: Moves,
    account: Account,
    /// Command lines of VMs that anybody with a lease may use.
    templates: BTreeMap<String, Template>,
    /// Files with instance types, keys and aliases; `*` stands for any text.
    instance_types: Vec<String>,
    /// What holders may have leased at once, by their names; `*` stands for all others.
    quota: Quotas,
    slurm: Option<SlurmCluster>,
    /// File of the key that signs grants; made if it is not there.
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
#[serde(deny_unknown_fields, default)]
struct Account {
    /// Days for which they are kept after the end of the lease; forever if absent.
    keep_days: Option<u32>,
    /// File to which they are appended before they are deleted.
    archive: Option<PathBuf>,
}

impl Account {
    fn retention(self) -> anyhow::Result<Option<Retention>> {
        match (self.keep_days, self.archive) {
            (Some(0), _) => {
                bail!("[account]: keep_days must be at least 1; omit it to keep all records")
            }
            (Some(days), archive) => {
                let keep = Duration::from_secs(u64::from(days) * 86_400);
                Ok(Some(Retention { keep, archive }))
            }
            (None, Some(_)) => {
                bail!("[account]: archive is written only when records are deleted: set keep_days as well")
            }
            (None, None) => Ok(None),
        }
    }
}

/// A Slurm cluster that is followed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct SlurmCluster {
    /// Its `slurm.conf`; if absent, the one that Slurm's commands find by themselves.
    conf: Option<PathBuf>,
    /// Seconds between two synchronizations.
    every_s: u64,
    /// Who may use the reservations of leases.
    users: String,
    /// Whether VMs leave nodes that Slurm drains.
    evacuate: bool,
    /// Seconds for which one of Slurm's commands may run.
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
#[serde(deny_unknown_fields, default)]
struct Moves {
    command: Option<Vec<String>>,
    options: Vec<String>,
    per_node: usize,
    per_uplink: usize,
    /// Seconds for which `vmove` may take to list the VMs of a node.
    look_limit_s: u64,
    /// The same to start or to stop a VM.
    start_limit_s: u64,
    /// The same to migrate one.
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
    /// The store.
    pub store: Arc<dyn Store>,
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
    /// Signs what VMs may have on their nodes.
    pub grant_key: Option<Arc<SecretKey>>,
}

impl Config {
    /// Combines file and arguments, and opens the store.
    ///
    /// # Errors
    /// The configuration is not valid, with file, line and what was expected; or the store cannot be opened.
    pub fn load(arguments: Arguments) -> anyhow::Result<Self> {
        let file = match &arguments.config {
            Some(path) => read(path)?,
            None => File::default(),
        };
        let listen = arguments.listen.or(file.listen);
        let access = read_tokens(arguments.token_file.or(file.token_file), &file.tokens)?;
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
            bail!("[moves]: per_node and per_uplink must be at least 1, and command must not be empty");
        }
        let store = arguments.store.or(file.store).unwrap_or_else(|| DEFAULT_STORE.to_owned());
        let max_txn_ops = arguments.etcd_max_txn_ops.or(file.etcd_max_txn_ops).unwrap_or(DEFAULT_MAX_TXN_OPS);
        Ok(Self {
            control: arguments.control.or(file.control).unwrap_or_else(|| DEFAULT_CONTROL.into()),
            listen,
            access,
            tls,
            insecure,
            store: open_store(&store, max_txn_ops)?,
            metrics: arguments.metrics.or(file.metrics),
            log_format: arguments.log_format.or(file.log_format).unwrap_or_default(),
            list_interval: Some(file.look_s.unwrap_or(5)).filter(|s| *s > 0).map(Duration::from_secs),
            slurm: file.slurm.map(SlurmFollower::from),
            retention: file.account.retention()?,
            time_limits: file.moves.time_limits(),
            command: file.moves.command,
            options: file.moves.options,
            limits: Limits { per_node: file.moves.per_node, per_uplink: file.moves.per_uplink },
            templates: Templates::new(file.templates)?,
            types: Arc::new(InstanceTypes::read(file.instance_types)?),
            quotas: file.quota,
            daemons: file.daemons,
            grant_key: file.grant_key.as_deref().map(grant_key).transpose()?,
        })
    }
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
    toml::from_str(&text).with_context(|| format!("{} is not a valid configuration", path.display()))
}

/// The token that may do everything, and those with roles.
fn read_tokens(of_operator: Option<PathBuf>, others: &BTreeMap<String, TokenFile>) -> anyhow::Result<Access> {
    let of_operator = of_operator.map(|path| ("token_file", path, Caller::Operator));
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
fn grant_key(path: &Path) -> anyhow::Result<Arc<SecretKey>> {
    let key = match std::fs::read_to_string(path) {
        Ok(text) => text.parse::<SecretKey>().with_context(|| format!("grant_key {}", path.display()))?,
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

/// Opens `redb:FILE` or `etcd:URL[,URL...]`.
///
/// # Errors
/// It is neither, or the file cannot be opened.
pub fn open_store(text: &str, max_txn_ops: usize) -> anyhow::Result<Arc<dyn Store>> {
    if let Some(path) = text.strip_prefix("redb:") {
        return Ok(Arc::new(Embedded::open(Path::new(path))?));
    }
    let Some(urls) = text.strip_prefix("etcd:") else {
        bail!("--store {text:?}: expected redb:FILE or etcd:http://HOST:PORT[,http://HOST:PORT...]");
    };
    let members: Result<Vec<Endpoint>, BadEndpoint> = urls.split(',').map(str::parse).collect();
    let members = members.map_err(|e| anyhow::anyhow!("--store {text:?}: {e}"))?;
    if members.iter().any(|member| matches!(member, Endpoint::Tls(_))) {
        bail!("--store {text:?}: etcd is asked by plain HTTP: expected http://HOST:PORT");
    }
    Ok(Arc::new(Etcd::new(members, "/vmove/bridge/", Duration::from_secs(5)).with_max_txn_ops(max_txn_ops)))
}

#[cfg(test)]
mod tests {
    use vmove_skip::installed::{has_every_key, is_current};
    use vmove_skip::reference::settings_page;

    use super::*;

    #[test]
    fn what_cannot_be_is_said() {
        for (text, wanted) in [
            ("etcd:https://a:1", "expected http://HOST:PORT"),
            ("sqlite:x", "expected redb:FILE or etcd:"),
            ("etcd:", "expected http://HOST:PORT"),
        ] {
            let error = open_store(text, 1).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        std::fs::write(&path, "store = \"x\"\nlisten_on = 3\n").unwrap();
        let error = format!("{:#}", read(&path).unwrap_err());
        assert!(error.contains("line 2") && error.contains("listen_on"), "{error}");
        std::fs::write(&path, "[daemons.\"-oProxyCommand=x\"]\ncontrol = \"/c\"\n").unwrap();
        let error = format!("{:#}", read(&path).unwrap_err());
        assert!(error.contains("a host name"), "{error}");
        std::fs::write(&path, "short\n").unwrap();
        read_token(&path).unwrap_err();
        let open =
            Arguments::parse_from(["vbridged", "--listen", "127.0.0.1:1", "--store", "redb:/nonexistent/x"]);
        assert!(Config::load(open).unwrap_err().to_string().contains("--token-file"));
        let key = dir.path().join("key");
        std::fs::write(&key, "0123456789abcdef\n").unwrap();
        let plain = ["vbridged", "--listen", "192.0.2.1:1", "--token-file", key.to_str().unwrap()];
        let error = Config::load(Arguments::parse_from(plain)).unwrap_err().to_string();
        assert!(error.contains("--tls-cert") && error.contains("--insecure"), "{error}");
        let files = ["--tls-cert", "/nonexistent/c.pem", "--tls-key", "/nonexistent/k.pem"];
        let error = Config::load(Arguments::parse_from(plain.into_iter().chain(files))).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/c.pem"), "{error}");
        let access = Access::new(vec![(Token::new("t"), Caller::Operator)]);
        check_listener("127.0.0.1:1".parse().unwrap(), &access, false).unwrap();
        check_listener("192.0.2.1:1".parse().unwrap(), &access, true).unwrap();
    }

    #[test]
    fn the_example_that_is_installed_can_be_used() {
        let example = include_str!("../dist/vbridged.toml");
        let shown: File = toml::from_str(example).unwrap();
        let (moves, defaults) = (format!("{:?}", shown.moves), format!("{:?}", Moves::default()));
        assert_eq!(moves, defaults, "the example shows the defaults");
        assert_eq!((shown.look_s, shown.control), (Some(5), Some(DEFAULT_CONTROL.into())));
        assert_eq!(shown.store.as_deref(), Some(DEFAULT_STORE));
        // What is commented out is valid, too.
        let all: File = toml::from_str(&vmove_skip::installed::uncommented(example)).unwrap();
        assert!(all.slurm.is_some() && all.tls.is_some() && all.grant_key.is_some() && all.listen.is_some());
        assert!(all.tokens.contains_key("alice") && all.daemons.len() == 1 && all.moves.command.is_some());
        assert_eq!(all.account.keep_days, Some(400));
    }

    #[test]
    fn every_key_is_in_the_example() {
        let example = include_str!("../dist/vbridged.toml");
        for table in [
            "",
            "tls",
            "moves",
            "account",
            "slurm",
            "tokens.alice",
            "daemons.node7",
            "quota.\"*\"",
            "templates.small",
        ] {
            has_every_key(example, table, |text| toml::from_str::<File>(text));
        }
    }

    #[test]
    fn the_checked_in_page_of_settings_is_current() {
        let page =
            settings_page("vbridged", "/etc/vbridged/vbridged.toml", include_str!("../dist/vbridged.toml"));
        is_current("docs/reference/vbridged-settings.md", page.as_bytes(), "vmove-bridge");
    }

    /// `VMOVE_WRITE_DOCS=1 cargo test -p vmove-bridge --lib the_checked_in` writes it. `vmove man` installs it with the others.
    #[test]
    fn the_checked_in_man_page_is_current() {
        use clap::CommandFactory;
        let mut page = Vec::new();
        clap_mangen::Man::new(Arguments::command()).render(&mut page).unwrap();
        is_current("sched-bridge/service/dist/vbridged.1", &page, "vmove-bridge");
    }

    #[test]
    fn each_token_has_a_role_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let token = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let (one, two) = (token("one", "0123456789abcdef\n"), token("two", "fedcba9876543210\n"));
        let tenants = |name: &str, file: &Path| {
            let token = TokenFile { role: Role::Tenant, file: file.to_owned() };
            BTreeMap::from([(name.to_owned(), token)])
        };
        let access = read_tokens(Some(one.clone()), &tenants("alice", &two)).unwrap();
        assert_eq!(access.caller(Some("0123456789abcdef")), Some(Caller::Operator));
        assert_eq!(access.caller(Some("fedcba9876543210")), Some(Caller::new("alice", Role::Tenant)));
        assert_eq!((access.caller(Some("other")), access.caller(None)), (None, None));
        for (wrong, wanted) in
            [(tenants("alice", &one), "another one has as well"), (tenants("slurm", &two), "jobs of Slurm")]
        {
            let error = read_tokens(Some(one.clone()), &wrong).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let path = token("c.toml", "[tokens.alice]\nrole = \"king\"\nfile = \"/f\"\n");
        let error = format!("{:#}", read(&path).unwrap_err());
        assert!(error.contains("viewer") && error.contains("tenant"), "{error}");
    }

    /// The examples of the operators' guide are valid.
    #[test]
    fn the_guide_tells_the_truth() {
        let guide = include_str!("../../../docs/sched-bridge.md");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        for from in [
            "    store = ",
            "    [tokens.alice]",
            "    [templates.small]",
            "    [quota.alice]",
            "    [account]",
            "    [slurm]",
        ] {
            let start = guide.find(from).unwrap();
            // Up to the text behind it.
            let lines = guide[start..].lines().take_while(|line| line.is_empty() || line.starts_with("    "));
            let text: String = lines.map(|line| format!("{}\n", line.trim())).collect();
            std::fs::write(&path, &text).unwrap();
            let file = read(&path).unwrap();
            let set = file.store.is_some() || file.slurm.is_some() || file.account.keep_days.is_some();
            let templates = file.templates.len();
            Templates::new(file.templates).unwrap();
            let quotas = file.quota.of("alice").is_some();
            assert!(set || quotas || !file.tokens.is_empty() || templates > 0, "{text}");
        }
    }
}
