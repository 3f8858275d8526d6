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
use vmove_grant::{Grant, GrantedDevice, SecretKey};

use crate::program::{self, ProgramError};

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
    /// What it gets there in place of the devices that it owns.
    pub devices: Vec<GrantedDevice>,
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
pub trait VmDriver: std::fmt::Debug + Send + Sync {
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
    /// Its control socket, for `{control}` in the command.
    #[serde(default = "default_control")]
    pub control: PathBuf,
    /// Its peer port, `HOST:PORT`, to which other daemons migrate VMs. Without it, the name of the node, which the source's daemon must
    /// then know.
    #[serde(default)]
    pub address: Option<String>,
}

fn default_control() -> PathBuf {
    PathBuf::from(vmove_types::node::DEFAULT_CONTROL)
}

/// `vmove` on this host, unless another command is configured.
pub const HERE: [&str; 3] = ["vmove", "--control", "{control}"];
/// The same on other nodes.
pub const BY_SSH: [&str; 7] = ["ssh", "-o", "BatchMode=yes", "{node}", "vmove", "--control", "{control}"];

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

    /// A grant for one start, as an argument of `vmove`. None without a key.
    fn signed(&self, grant: &Grant) -> Result<Option<String>, String> {
        let Some(key) = &self.key else { return Ok(None) };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let end = now + self.time_limits.act + GRANT_SLACK;
        let serial = SecretKey::serial().map_err(|e| e.to_string())?;
        let expires_ms = u64::try_from(end.as_millis()).unwrap_or(u64::MAX);
        let text = key.sign(&Grant { serial, expires_ms, ..grant.clone() }).map_err(|e| e.to_string())?;
        Ok(Some(format!("--grant={text}")))
    }

    fn migrate_arguments(&self, moves: &[VmMove]) -> Vec<String> {
        let address = |to: &NodeName| {
            let address = self.daemons.get(to).and_then(|daemon| daemon.address.clone());
            address.unwrap_or_else(|| to.to_string())
        };
        let mut arguments = vec!["migrate".to_owned()];
        arguments.extend(moves.first().map(|first| format!("--to={}", address(&first.to))));
        for one in moves {
            let is_alone = moves.len() == 1;
            arguments.extend((!is_alone).then(|| format!("--to-of={}={}", one.vm, address(&one.to))));
            let of = if is_alone { String::new() } else { format!("{}:", one.vm) };
            let devices = one.devices.iter();
            arguments
                .extend(devices.map(|device| format!("--device={of}{}={}", device.role, device.address)));
        }
        arguments.extend(self.options.iter().cloned());
        arguments.push("--".to_owned());
        arguments.extend(moves.iter().map(|one| one.vm.to_string()));
        arguments
    }

    async fn run(&self, node: &NodeName, arguments: &[&str], limit: Duration) -> Result<Ended, ProgramError> {
        if self.reach(node) == Reach::Not {
            let reason = io::Error::other(format!(
                "no daemon of it is configured: add [daemons.{node}] to the configuration of vbridged, or a [moves] command that reaches \
                 nodes by their names ({{node}})"
            ));
            return Err(ProgramError::NotRun { program: format!("vmove for node {node}"), reason });
        }
        let control = self.daemons.get(node).map_or_else(default_control, |daemon| daemon.control.clone());
        let fill = |word: &String| {
            word.replace("{node}", node.as_str()).replace("{control}", &control.to_string_lossy())
        };
        let command = if *node.as_str() == *self.host { &self.here } else { &self.elsewhere };
        let words: Vec<String> = command.iter().map(fill).collect();
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
        let arguments = self.migrate_arguments(moves);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let all = |end: MigrationEnd| vec![end; moves.len()];
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
        let listed = self.run(node, &["list"], self.time_limits.look).await.map_err(|e| e.to_string())?;
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
        let signed = self.signed(grant).map_err(NotStarted::Refused)?;
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
    arguments.extend(signed);
    arguments.push("--".to_owned());
    arguments.extend(vm.command_line.iter().filter(|word| *word != DEVICES).cloned());
    arguments
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
mod tests {
    use super::*;

    fn grant() -> Grant {
        Grant {
            lease: "l".to_owned(),
            holder: "alice".to_owned(),
            node: "n1".to_owned(),
            vm: "v".to_owned(),
            serial: 0,
            expires_ms: 0,
            cores: 1,
            memory_mib: 64,
            huge_2m_mib: 0,
            huge_1g_mib: 0,
            devices: Vec::new(),
        }
    }

    #[test]
    fn leased_devices_are_given_by_their_roles_where_the_command_line_asks_for_them() {
        let device = |role: &str, address: &str| vmove_grant::GrantedDevice {
            role: role.to_owned(),
            address: address.to_owned(),
        };
        let devices = vec![device("gpu0", "0000:17:00.0"), device("nic1", "0000:18:00.2")];
        let grant = Grant { devices, ..grant() };
        let told = |words: &[&str]| {
            let words = words.iter().map(|word| (*word).to_owned()).collect();
            let vm = StartVm::by_command_line(VmName::new("v").unwrap(), words);
            run_arguments(&vm, &grant, Some("--grant=g".to_owned())).join(" ")
        };
        let given = "--device=gpu0=0000:17:00.0 --device=nic1=0000:18:00.2";
        assert_eq!(
            told(&["qemu", "{devices}", "-S"]),
            format!("run --name=v --memory=thp {given} --grant=g -- qemu -S")
        );
        assert_eq!(told(&["qemu", "-S"]), "run --name=v --memory=thp --grant=g -- qemu -S");
    }

    #[test]
    fn each_start_has_a_grant_of_its_own_if_the_bridge_has_a_key() {
        let driver = VmoveCommand::new(None, Vec::new(), BTreeMap::new(), TimeLimits::default());
        assert_eq!(driver.signed(&grant()), Ok(None));
        let (key, _) = SecretKey::generate().unwrap();
        let public = key.public();
        let driver = driver.with_key(Some(Arc::new(key)));
        let signed = || {
            let argument = driver.signed(&grant()).unwrap().unwrap();
            public.read(argument.strip_prefix("--grant=").unwrap()).unwrap()
        };
        let (one, two) = (signed(), signed());
        assert_ne!(one.serial, two.serial);
        assert!(one.expires_ms > 0);
        assert_eq!(Grant { serial: 0, expires_ms: 0, ..one }, grant());
    }

    #[test]
    fn several_vms_are_told_apart_and_what_is_said_of_each_is_heard() {
        let device = GrantedDevice { role: "net0".to_owned(), address: "0000:09:00.5".to_owned() };
        let moves = [("a", "n2", vec![device]), ("b", "n3", Vec::new())].map(|(vm, to, devices)| VmMove {
            vm: VmName::new(vm).unwrap(),
            to: NodeName::new(to).unwrap(),
            devices,
        });
        let driver =
            VmoveCommand::new(None, vec!["--verify".to_owned()], BTreeMap::new(), TimeLimits::default());
        assert_eq!(
            driver.migrate_arguments(&moves).join(" "),
            "migrate --to=n2 --to-of=a=n2 --device=a:net0=0000:09:00.5 --to-of=b=n3 --verify -- a b"
        );
        assert_eq!(
            driver.migrate_arguments(&moves[..1]).join(" "),
            "migrate --to=n2 --device=net0=0000:09:00.5 --verify -- a"
        );
        let members = serde_json::json!([
            { "vm": "b", "exit_code": 1 }, { "vm": "a", "exit_code": 0, "total_ms": 9.6, "downtime_ms": 2.5 },
        ]);
        let answer = |error: &str| serde_json::json!({ "group": { "error": error }, "members": members });
        let arrived = MigrationEnd::Arrived { total_ms: 10, downtime_us: 2500 };
        let stayed = |why: &str| MigrationEnd::Stayed(why.to_owned());
        assert_eq!(ends_of_group(&moves, Some(0), &answer(""), "")[0], arrived);
        assert_eq!(
            ends_of_group(&moves, Some(1), &answer("b: cut"), ""),
            [stayed("b: cut"), stayed("b: cut")]
        );
        assert_eq!(
            ends_of_group(&moves, Some(4), &answer("b is at the source"), ""),
            [arrived, stayed("b is at the source")]
        );
        let lost = ends_of_group(&moves, None, &Value::Null, "killed");
        assert_eq!(lost, vec![MigrationEnd::Unknown("killed".to_owned()); 2]);
    }

    #[tokio::test]
    async fn arguments_pass_through_a_shell_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        // Like ssh: passes all arguments but `--` and the host to a shell, as one line.
        let ssh = dir.path().join("ssh");
        std::fs::write(&ssh, "#!/bin/sh\nshift 2\nexec sh -c \"$*\"\n").unwrap();
        let mut mode = std::fs::metadata(&ssh).unwrap().permissions();
        std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
        std::fs::set_permissions(&ssh, mode).unwrap();
        let out = dir.path().join("out");
        let script = dir.path().join("vmove");
        std::fs::write(&script, format!("for word; do printf '%s\\n' \"$word\"; done >{}\n", out.display()))
            .unwrap();
        let command =
            [ssh.to_str().unwrap(), "{node}", "sh", script.to_str().unwrap()].map(str::to_owned).to_vec();
        let driver = VmoveCommand::new(Some(command), Vec::new(), BTreeMap::new(), TimeLimits::default());
        let words = ["qemu", "-append", "a b 'c' $HOME; \"d\"", "", "x=1,y=2"];
        let vm = StartVm::by_command_line(VmName::new("v").unwrap(), words.map(str::to_owned).to_vec());
        driver.start(&NodeName::new("n1").unwrap(), &vm, &grant()).await.unwrap();
        let told = std::fs::read_to_string(out).unwrap();
        let wanted = ["--json", "run", "--name=v", "--memory=thp", "--"].into_iter().chain(words);
        assert_eq!(told.lines().collect::<Vec<_>>(), wanted.collect::<Vec<_>>());
    }

    #[test]
    fn the_host_is_no_option_of_ssh() {
        for (command, wanted) in [
            ("ssh {node} vmove", "ssh -- {node} vmove"),
            ("/usr/bin/ssh -p 22 -v root@{node} vmove -x", "/usr/bin/ssh -p 22 -v -- root@{node} vmove -x"),
            ("ssh -p22 -o BatchMode=yes {node} vmove", "ssh -p22 -o BatchMode=yes -- {node} vmove"),
            ("ssh -- {node} vmove", "ssh -- {node} vmove"),
            ("vmove --control {control}", "vmove --control {control}"),
        ] {
            let words = command.split(' ').map(str::to_owned).collect();
            assert_eq!(with_end_of_options(words).join(" "), wanted);
        }
    }

    #[tokio::test]
    async fn a_node_without_a_daemon_is_not_taken_for_this_host() {
        let command = ["true", "{control}"].map(str::to_owned).to_vec();
        let daemons = BTreeMap::from([(NodeName::new("n1").unwrap(), DaemonAddress::default())]);
        let driver = VmoveCommand::new(Some(command), Vec::new(), daemons, TimeLimits::default());
        let reach = |node: &str| driver.reach(&NodeName::new(node).unwrap());
        assert_eq!([reach("n1"), reach(&host_name()), reach("n2")], [Reach::Known, Reach::Known, Reach::Not]);
        let vm = StartVm::by_command_line(VmName::new("v").unwrap(), vec!["qemu".to_owned()]);
        let refused =
            driver.start(&NodeName::new("n2").unwrap(), &vm, &grant()).await.unwrap_err().to_string();
        assert!(refused.contains("[daemons.n2]"), "{refused}");
        // Unless configured otherwise, others are reached by ssh.
        let driver = VmoveCommand::new(None, Vec::new(), BTreeMap::new(), TimeLimits::default());
        let reach = |node: &str| driver.reach(&NodeName::new(node).unwrap());
        assert_eq!([reach(&host_name()), reach("n2")], [Reach::Known, Reach::ByName]);
        assert_eq!((driver.here[0].as_str(), driver.elsewhere[3].as_str()), ("vmove", "--"));
    }

    #[tokio::test]
    async fn what_hangs_ends_in_time_and_is_not_taken_for_an_answer() {
        let short = Duration::from_millis(200);
        let limits = TimeLimits { look: short, act: short, migrate: short };
        // `sh -c SCRIPT` takes the arguments of `vmove` as its own.
        let command = ["sh", "-c", "sleep 1000 # {node}"].map(str::to_owned).to_vec();
        let driver = VmoveCommand::new(Some(command), Vec::new(), BTreeMap::new(), limits);
        let (n1, n2) = (NodeName::new("n1").unwrap(), NodeName::new("n2").unwrap());
        let vm = VmName::new("v").unwrap();
        let message = driver.list(&n1).await.unwrap_err();
        assert_eq!(message, "sh for node n1 has not ended within 0.2 s and was killed");
        let end = driver.migrate(&n1, &[VmMove { vm: vm.clone(), to: n2, devices: Vec::new() }]).await;
        let [MigrationEnd::Unknown(reason)] = &end[..] else { panic!("{end:?}") };
        assert!(reason.contains("was killed"), "{reason}");
        let vm = StartVm::by_command_line(vm, vec!["qemu".to_owned()]);
        let error = driver.start(&n1, &vm, &grant()).await.unwrap_err();
        assert!(matches!(&error, NotStarted::Unknown(_)), "{error}");
    }
}
