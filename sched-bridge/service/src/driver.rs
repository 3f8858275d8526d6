//! Migrates, starts, stops and lists VMs through the daemons of the nodes: by `vmove --json`, on this machine or by ssh on another.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use sched_bridge::model::{NodeName, VmName};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::process::Command;
use tokio::sync::Semaphore;
use vmove_bridge_types::requests::StartVm;
use vmove_grant::{Grant, GrantedDevice, GrantedShare, SecretKey};

use vmove_adapter::program::{self, ProgramError};

mod identity;
mod snapshots;

use identity::Identities;
pub use snapshots::{Forked, ForkedChild, Restored, Saved, Snapshots, WantedChild};

/// Programs that list VMs at once. Beyond that, nodes wait for each other.
const MOST_LOOKS: usize = 32;
/// Programs that start and stop VMs at once.
const MOST_ACTS: usize = 32;

/// The clocks of a node and of the bridge may differ by so much.
const GRANT_SLACK: Duration = Duration::from_secs(60);

/// A VM that is to leave a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmMove {
    /// The VM.
    pub vm: VmName,
    /// Its destination.
    pub to: NodeName,
    /// What it may have there: its devices are those that it gets in place of its own. Serial number and end are the driver's to set.
    pub grant: Grant,
}

/// How a migration ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MigrationEnd {
    /// The VM runs on the destination.
    Arrived {
        /// Duration of the migration. Unit: milliseconds.
        total_ms: u64,
        /// Unit: microseconds.
        downtime_us: u64,
    },
    /// It still runs on the source. With the daemon's message.
    Stayed(String),
    /// Where it runs, or whether it does, is not known. With the daemon's message.
    Unknown(String),
}

/// A VM on a node, as its daemon lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedVm {
    /// It is part of a migration.
    pub migrating: bool,
    /// Its QEMU has ended.
    pub ended: bool,
}

/// Why a VM was not started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotStarted {
    /// It does not run. With the daemon's message.
    #[error("{0}")]
    Refused(String),
    /// It may run, or begin to run: there was no answer in time.
    #[error("{0}; it may start nevertheless")]
    Unknown(String),
}

/// For how long a program may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeLimits {
    /// To list the VMs of a node.
    pub look: Duration,
    /// To start or to stop a VM.
    pub act: Duration,
    /// To migrate a VM.
    pub migrate: Duration,
}

impl Default for TimeLimits {
    fn default() -> Self {
        Self {
            look: Duration::from_secs(10),
            act: Duration::from_secs(300),
            migrate: Duration::from_secs(3600),
        }
    }
}

/// Whether the daemon of a node can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// The configuration names it, or it is that of this host.
    Known,
    /// By the name of the node alone.
    ByName,
    /// No: it would be another node's.
    Not,
}

/// Controls the VMs of all nodes.
#[async_trait]
pub trait VmDriver: Snapshots + std::fmt::Debug + Send + Sync {
    /// Whether the daemon of a node can be reached.
    fn reach(&self, node: &NodeName) -> Reach;

    /// Migrates a VM, or several at one barrier, and waits for the end: that of each, in their order.
    async fn migrate(&self, from: &NodeName, moves: &[VmMove]) -> Vec<MigrationEnd>;

    /// The devices that VMs on a node own, by VM.
    ///
    /// # Errors
    /// The message of its daemon, or why it does not answer.
    async fn owned(&self, node: &NodeName) -> Result<BTreeMap<String, Vec<GrantedDevice>>, String>;

    /// The VMs on a node, by name.
    ///
    /// # Errors
    /// The message of its daemon, or why it does not answer.
    async fn list(&self, node: &NodeName) -> Result<BTreeMap<String, ListedVm>, String>;

    /// Starts a VM on a node. It may have there what `grant` says, whose serial number and end are the driver's to set.
    ///
    /// # Errors
    /// Its daemon refuses, or whether the VM runs is not known.
    async fn start(&self, node: &NodeName, vm: &StartVm, grant: &Grant) -> Result<(), NotStarted>;

    /// Stops a VM on a node.
    ///
    /// # Errors
    /// The message of its daemon: the VM may still run.
    async fn stop(&self, node: &NodeName, vm: &VmName) -> Result<(), String>;
}

/// How the daemon of a node is reached.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DaemonAddress {
    /// Its control socket, for `{control}` in the command; without it, that of a daemon which was not told otherwise.
    #[serde(default)]
    pub control: Option<PathBuf>,
    /// Its peer port, `HOST:PORT`, to which other daemons migrate VMs. Without it, the name of the node, which the source's daemon must
    /// then know.
    #[serde(default)]
    pub address: Option<String>,
}

fn default_control() -> PathBuf {
    PathBuf::from(vmove_types::node::DEFAULT_CONTROL)
}

/// Stands in the command for the control socket of a daemon.
pub(crate) const CONTROL: &str = "{control}";

/// `vmove` on this host, unless another command is configured.
pub const HERE: [&str; 3] = ["vmove", "--control", "{control}"];
/// The same on other nodes.
pub const BY_SSH: [&str; 7] = ["ssh", "-o", "BatchMode=yes", "{node}", "vmove", "--control", "{control}"];

/// The program that is run, as `command` has it.
const VMOVE: &str = "vmove";

/// Stands in a command line for the devices that the lease has for the VM.
const DEVICES: &str = "{devices}";

/// Runs `vmove` for every request.
#[derive(Debug, Clone)]
pub struct VmoveCommand {
    /// On this host.
    here: Vec<String>,
    /// On other nodes.
    elsewhere: Vec<String>,
    options: Vec<String>,
    daemons: BTreeMap<NodeName, DaemonAddress>,
    host: String,
    identities: Arc<Identities>,
    time_limits: TimeLimits,
    /// Signs what VMs may have.
    key: Option<Arc<SecretKey>>,
    /// Bound how many programs run at once. A look never waits for an act.
    looks: Arc<Semaphore>,
    acts: Arc<Semaphore>,
}

/// What `vmove` did.
struct Ended {
    exit_code: Option<i32>,
    /// The last JSON value on its standard output; null without one.
    answer: Value,
    stderr: String,
}

impl Ended {
    /// The reported error.
    fn message(&self) -> String {
        self.answer["error"].as_str().map_or_else(|| self.stderr.clone(), str::to_owned)
    }
}

impl VmoveCommand {
    /// `command` is `vmove` and everything before its arguments; in it, `{node}` and `{control}` are replaced. Without one, it is [`HERE`] for
    /// the node of this host, and [`BY_SSH`] for others. `options` are further arguments of `vmove migrate`.
    #[must_use]
    pub fn new(
        command: Option<Vec<String>>,
        options: Vec<String>,
        daemons: BTreeMap<NodeName, DaemonAddress>,
        time_limits: TimeLimits,
    ) -> Self {
        let (here, elsewhere) = match command {
            Some(command) => (command.clone(), command),
            None => (HERE.map(str::to_owned).to_vec(), BY_SSH.map(str::to_owned).to_vec()),
        };
        Self {
            here: with_end_of_options(here),
            elsewhere: with_end_of_options(elsewhere),
            options,
            daemons,
            host: host_name(),
            identities: Arc::default(),
            time_limits,
            key: None,
            looks: Arc::new(Semaphore::new(MOST_LOOKS)),
            acts: Arc::new(Semaphore::new(MOST_ACTS)),
        }
    }

    /// The same, with the key by which nodes know this bridge.
    #[must_use]
    pub fn with_key(self, key: Option<Arc<SecretKey>>) -> Self {
        Self { key, ..self }
    }

    /// A grant for one start or arrival. None without a key.
    fn signed(&self, grant: &Grant) -> Result<Option<String>, String> {
        let Some(key) = &self.key else { return Ok(None) };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let end = now + self.time_limits.act + GRANT_SLACK;
        let serial = SecretKey::serial().map_err(|e| e.to_string())?;
        let expires_ms = u64::try_from(end.as_millis()).unwrap_or(u64::MAX);
        key.sign(&Grant { serial, expires_ms, ..grant.clone() }).map(Some).map_err(|e| e.to_string())
    }

    /// Where other daemons reach that of a node.
    fn address(&self, node: &NodeName) -> String {
        let address = self.daemons.get(node).and_then(|daemon| daemon.address.clone());
        address.unwrap_or_else(|| node.to_string())
    }

    fn migrate_arguments(&self, moves: &[VmMove]) -> Result<Vec<String>, String> {
        let mut arguments = vec!["migrate".to_owned()];
        arguments.extend(moves.first().map(|first| format!("--to={}", self.address(&first.to))));
        for one in moves {
            let is_alone = moves.len() == 1;
            arguments.extend((!is_alone).then(|| format!("--to-of={}={}", one.vm, self.address(&one.to))));
            let of = if is_alone { String::new() } else { format!("{}:", one.vm) };
            let devices = one.grant.devices.iter();
            arguments
                .extend(devices.map(|device| format!("--device={of}{}={}", device.role, device.address)));
            arguments.extend(self.signed(&one.grant)?.map(|text| format!("--grant={of}{text}")));
        }
        arguments.extend(self.options.iter().cloned());
        arguments.push("--".to_owned());
        arguments.extend(moves.iter().map(|one| one.vm.to_string()));
        Ok(arguments)
    }

    async fn run(&self, node: &NodeName, arguments: &[&str], limit: Duration) -> Result<Ended, ProgramError> {
        self.run_program(node, VMOVE, arguments, limit).await
    }

    /// The same by another program that is beside `vmove`, if it is this node that answers.
    async fn run_program(
        &self,
        node: &NodeName,
        name: &str,
        arguments: &[&str],
        limit: Duration,
    ) -> Result<Ended, ProgramError> {
        if !self.identities.is_trusted(node) {
            // What is not answered says nothing.
            let _ = self.listed(node).await;
        }
        if let Some(why) = self.identities.refusal(node) {
            let reason = io::Error::other(why);
            return Err(ProgramError::NotRun { program: format!("{name} for node {node}"), reason });
        }
        self.run_at(node, name, arguments, limit).await
    }

    /// What `vmove list` says, by which a daemon tells whose it is.
    async fn listed(&self, node: &NodeName) -> Result<Ended, ProgramError> {
        let listed = self.run_at(node, VMOVE, &["list"], self.time_limits.look).await?;
        self.identities.note(node, &listed.answer);
        Ok(listed)
    }

    async fn run_at(
        &self,
        node: &NodeName,
        name: &str,
        arguments: &[&str],
        limit: Duration,
    ) -> Result<Ended, ProgramError> {
        if self.reach(node) == Reach::Not {
            let reason = io::Error::other(format!(
                "no daemon of it is configured: add [daemons.{node}] to the configuration of vbridged, or a [moves] command that reaches \
                 nodes by their names ({{node}})"
            ));
            return Err(ProgramError::NotRun { program: format!("vmove for node {node}"), reason });
        }
        let control = self.daemons.get(node).and_then(|daemon| daemon.control.clone());
        let control = control.unwrap_or_else(default_control);
        let fill = |word: &String| {
            word.replace("{node}", node.as_str()).replace(CONTROL, &control.to_string_lossy())
        };
        let command = if *node.as_str() == *self.host { &self.here } else { &self.elsewhere };
        let mut words: Vec<String> = command.iter().map(fill).collect();
        if name != VMOVE {
            let beside =
                words.iter_mut().find(|word| Path::new(word).file_name().is_some_and(|n| n == VMOVE));
            match beside {
                Some(word) => *word = Path::new(&word).with_file_name(name).to_string_lossy().into_owned(),
                None => {
                    let reason = io::Error::other(format!(
                        "the [moves] command has no word {VMOVE}, beside which {name} would be"
                    ));
                    return Err(ProgramError::NotRun { program: format!("{name} for node {node}"), reason });
                }
            }
        }
        // The configuration has none that is empty.
        let (program, first) = words.split_first().ok_or_else(|| ProgramError::NotRun {
            program: String::new(),
            reason: io::ErrorKind::InvalidInput.into(),
        })?;
        // ssh passes its arguments to a shell, as one line.
        let by_shell = is_ssh(program);
        let arguments =
            arguments.iter().map(|word| if by_shell { shell_quoted(word) } else { (*word).to_owned() });
        let mut command = Command::new(program);
        command.args(first).arg("--json").args(arguments);
        let output = program::run(&mut command, &format!("{program} for node {node}"), limit).await?;
        let values = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
        Ok(Ended {
            exit_code: output.status.code(),
            answer: values.filter_map(Result::ok).last().unwrap_or_default(),
            stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }
}

#[async_trait]
impl VmDriver for VmoveCommand {
    fn reach(&self, node: &NodeName) -> Reach {
        if self.daemons.contains_key(node) || *node.as_str() == *self.host {
            Reach::Known
        } else if self.elsewhere.iter().any(|word| word.contains("{node}")) {
            Reach::ByName
        } else {
            Reach::Not
        }
    }

    async fn migrate(&self, from: &NodeName, moves: &[VmMove]) -> Vec<MigrationEnd> {
        let all = |end: MigrationEnd| vec![end; moves.len()];
        let arguments = match self.migrate_arguments(moves) {
            Ok(arguments) => arguments,
            Err(why) => return all(MigrationEnd::Stayed(why)),
        };
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let ended = match self.run(from, &arguments, self.time_limits.migrate).await {
            Ok(ended) => ended,
            Err(error @ ProgramError::TimedOut { .. }) => {
                return all(MigrationEnd::Unknown(error.to_string()));
            }
            Err(error) => return all(MigrationEnd::Stayed(error.to_string())),
        };
        match moves {
            [_] => vec![end_of(ended.exit_code, &ended.answer, ended.message())],
            _ => ends_of_group(moves, ended.exit_code, &ended.answer, &ended.message()),
        }
    }

    async fn owned(&self, node: &NodeName) -> Result<BTreeMap<String, Vec<GrantedDevice>>, String> {
        let _permit = self.looks.acquire().await;
        let listed = self.run(node, &["devices"], self.time_limits.look).await.map_err(|e| e.to_string())?;
        let Some(devices) = listed.answer["devices"].as_array().filter(|_| listed.exit_code == Some(0))
        else {
            return Err(format!("node {node} does not list its devices: {}", listed.stderr));
        };
        let mut owned = BTreeMap::<String, Vec<GrantedDevice>>::new();
        for device in devices.iter().filter(|device| device["owner"]["held"] == true) {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let (vm, role) = (text(&device["owner"]["vm"]), text(&device["owner"]["role"]));
            owned.entry(vm).or_default().push(GrantedDevice { role, address: text(&device["address"]) });
        }
        Ok(owned)
    }

    async fn list(&self, node: &NodeName) -> Result<BTreeMap<String, ListedVm>, String> {
        let _permit = self.looks.acquire().await;
        let listed = self.listed(node).await.map_err(|e| e.to_string())?;
        if let Some(why) = self.identities.refusal(node) {
            return Err(why);
        }
        let Some(vms) = listed.answer["vms"].as_array().filter(|_| listed.exit_code == Some(0)) else {
            return Err(format!("node {node} does not list its VMs: {}", listed.stderr));
        };
        let vm = |vm: &Value| {
            let migrating =
                vm["migration"].is_string() || vm["status"] == "inmigrate" || vm["status"] == "migrating";
            Some((vm["name"].as_str()?.to_owned(), ListedVm { migrating, ended: vm["status"] == "ended" }))
        };
        Ok(vms.iter().filter_map(vm).collect())
    }

    async fn start(&self, node: &NodeName, vm: &StartVm, grant: &Grant) -> Result<(), NotStarted> {
        let _permit = self.acts.acquire().await;
        let signed = self.signed(grant).map_err(NotStarted::Refused)?.map(|text| format!("--grant={text}"));
        let arguments = run_arguments(vm, grant, signed);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        match self.run(node, &arguments, self.time_limits.act).await {
            Ok(ended) if ended.exit_code == Some(0) => Ok(()),
            Ok(ended) => Err(NotStarted::Refused(ended.message())),
            Err(error @ ProgramError::TimedOut { .. }) => Err(NotStarted::Unknown(error.to_string())),
            Err(error) => Err(NotStarted::Refused(error.to_string())),
        }
    }

    async fn stop(&self, node: &NodeName, vm: &VmName) -> Result<(), String> {
        let _permit = self.acts.acquire().await;
        let arguments = ["stop", "--", vm.as_str()];
        let ended = self.run(node, &arguments, self.time_limits.act).await.map_err(|e| e.to_string())?;
        if ended.exit_code == Some(0) { Ok(()) } else { Err(ended.message()) }
    }
}

/// How the migration of one VM ended, by what `vmove migrate` says of it.
fn end_of(exit_code: Option<i32>, told: &Value, message: String) -> MigrationEnd {
    match exit_code {
        Some(0) => MigrationEnd::Arrived {
            total_ms: rounded(&told["total_ms"], 1.0),
            downtime_us: rounded(&told["downtime_ms"], 1000.0),
        },
        // 1: failed, the VM runs at the source; 2: wrong usage; 3: refused by the check.
        Some(1..=3) => MigrationEnd::Stayed(message),
        _ => MigrationEnd::Unknown(message),
    }
}

/// The same for each of several. What is not told of one is as it is told of all.
fn ends_of_group(
    moves: &[VmMove],
    exit_code: Option<i32>,
    answer: &Value,
    message: &str,
) -> Vec<MigrationEnd> {
    let why = answer["group"]["error"].as_str().unwrap_or(message);
    let end = |one: &VmMove| {
        let members = answer["members"].as_array().into_iter().flatten();
        let own = members.clone().find(|member| member["vm"] == one.vm.as_str());
        let code = own.and_then(|own| own["exit_code"].as_i64()).and_then(|code| i32::try_from(code).ok());
        let all_or_none = exit_code.filter(|code| (0..=3).contains(code));
        end_of(all_or_none.or(code), own.unwrap_or(&Value::Null), why.to_owned())
    };
    moves.iter().map(end).collect()
}

/// What `vmove` is told to start a VM: where its command line has `{devices}`, it gets the devices of its grant, each in its role.
fn run_arguments(vm: &StartVm, grant: &Grant, signed: Option<String>) -> Vec<String> {
    let mut arguments =
        vec!["run".to_owned(), format!("--name={}", vm.vm), format!("--memory={}", vm.memory)];
    if vm.command_line.iter().any(|word| word == DEVICES) {
        let devices = grant.devices.iter();
        arguments.extend(devices.map(|device| format!("--device={}={}", device.role, device.address)));
    }
    if let Some(shares) = pin_of(grant) {
        arguments.push(format!("--prefer-pin={shares}"));
    }
    arguments.extend(signed);
    arguments.push("--".to_owned());
    arguments.extend(vm.command_line.iter().filter(|word| *word != DEVICES).cloned());
    arguments
}

/// Which processors and NUMA nodes the placement has chosen. With its own grant, a node finds them there, too.
fn pin_of(grant: &Grant) -> Option<String> {
    let share = |of: &GrantedShare| format!("{}:{}:{}", of.node, of.cores, of.memory_mib);
    let shares: Vec<String> = grant.numa.iter().map(share).collect();
    (!shares.is_empty()).then(|| shares.join(","))
}

/// The name under which this host publishes its inventory, unless another is given.
fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.split('.').next().unwrap_or_default().to_owned()
}

fn is_ssh(program: &str) -> bool {
    Path::new(program).file_name().is_some_and(|name| name == "ssh")
}

/// Options of `ssh` that take the next word as their value.
const SSH_OPTIONS_WITH_VALUE: &str = "BbcDEeFIiJLlmOoPpQRSWw";

/// The command with `--` before the host that `ssh` is to connect to: whatever the name of a node is, it is no option there.
fn with_end_of_options(mut command: Vec<String>) -> Vec<String> {
    if !command.first().is_some_and(|program| is_ssh(program)) {
        return command;
    }
    let mut at = 1;
    while let Some(word) = command.get(at) {
        match word.strip_prefix('-') {
            Some("-") => break,
            // `-p 22`, but not `-p22`.
            Some(option) => {
                let alone = option.len() == 1 && SSH_OPTIONS_WITH_VALUE.contains(option);
                at += if alone { 2 } else { 1 };
            }
            None => {
                command.insert(at, "--".to_owned());
                break;
            }
        }
    }
    command
}

/// A word that a shell leaves as it is.
fn shell_quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// A time of a report, in a smaller unit.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are far below 2^53")]
fn rounded(value: &Value, factor: f64) -> u64 {
    (value.as_f64().unwrap_or(0.0) * factor).round().max(0.0) as u64
}

#[cfg(test)]
mod tests;
