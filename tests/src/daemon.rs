//! `vmoved` and `vmove` as a user runs them: the real programs, used only through their command lines.

use std::fs::File;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::beacon::{self, BeaconPage};
use crate::guest::{BOOT_TIMEOUT, Guest};
use crate::old_kernel::{Before, spawn_before};
use crate::places;
use crate::process::Guarded;
use crate::sandbox::Sandbox;

/// Settings of a node. Most tests use [`NodeOptions::default`].
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Fabric back end.
    pub fabric: &'static str,
    /// Peers that `--to` accepts by name.
    pub peers: Vec<(String, SocketAddr)>,
    /// Further arguments of `vmoved`, such as `--tls-cert`. Without arguments about TLS, `--insecure` is added.
    pub extra: Vec<String>,
    /// Further environment variables of `vmoved`.
    pub environment: Vec<(String, String)>,
    /// Further text of its configuration file, such as a `[fork]` table. `[nodes.NAME]` takes precedence over an entry in `peers`, and
    /// `[nodes]` over all of them.
    pub config: String,
    /// The program, if not the one that was built.
    pub program: Option<PathBuf>,
    /// Listen address for peers, if not a free port of the loopback interface.
    pub listen: Option<SocketAddr>,
    /// Which older kernel the daemon and its QEMUs see.
    pub old_kernel: Option<Before>,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self {
            fabric: "tcp",
            peers: Vec::new(),
            extra: Vec::new(),
            environment: Vec::new(),
            config: String::new(),
            program: None,
            listen: None,
            old_kernel: None,
        }
    }
}

/// A node: the folders of a `vmoved`, and its process while it runs. Killing and restarting it simulates a crash and the recovery
/// from it.
#[derive(Debug)]
pub struct Node {
    name: String,
    folder: PathBuf,
    listen: SocketAddr,
    options: NodeOptions,
    process: Option<Guarded>,
}

impl Node {
    /// Makes the folders of node `name` in `sandbox`, finds a free port, and starts its daemon.
    ///
    /// # Errors
    /// When it does not start; the error has its output.
    pub fn start(sandbox: &Sandbox, name: &str, options: NodeOptions) -> Result<Self> {
        let mut node = Self::prepare(sandbox, name, options)?;
        node.run()?;
        Ok(node)
    }

    /// As [`Node::start`], but does not start the daemon: for nodes that must know each other's ports first.
    ///
    /// # Errors
    /// When the folders cannot be made.
    pub fn prepare(sandbox: &Sandbox, name: &str, options: NodeOptions) -> Result<Self> {
        let folder = sandbox.folder(name)?;
        let listen = options.listen.unwrap_or_else(vmove_skip::free_port);
        Ok(Self { name: name.to_owned(), folder, listen, options, process: None })
    }

    /// Two nodes `a` and `b` that know each other by name.
    ///
    /// # Errors
    /// When one does not start.
    pub fn pair(sandbox: &Sandbox, options: &NodeOptions) -> Result<(Self, Self)> {
        let mut a = Self::prepare(sandbox, "a", options.clone())?;
        let mut b = Self::prepare(sandbox, "b", options.clone())?;
        a.options.peers.push(("b".into(), b.listen));
        b.options.peers.push(("a".into(), a.listen));
        a.run()?;
        b.run()?;
        Ok((a, b))
    }

    /// Where other nodes reach it.
    #[must_use]
    pub const fn listens_at(&self) -> SocketAddr {
        self.listen
    }

    /// Has it know another node by name, from its next start on.
    pub fn add_peer(&mut self, name: &str, at: SocketAddr) {
        self.options.peers.push((name.to_owned(), at));
    }

    /// Starts the daemon, which is not running, and waits until it answers.
    ///
    /// # Errors
    /// When it does not start; the error has its output.
    pub fn run(&mut self) -> Result<()> {
        let program = match &self.options.program {
            Some(program) => program.clone(),
            None => places::product("vmoved")?,
        };
        let config = self.folder.join("vmoved.toml");
        let told = |name: &str| self.options.config.contains(&format!("[nodes.{name}]"));
        let peers = self.options.peers.iter().filter(|(name, _)| !told(name));
        let peers: String = peers.map(|(name, at)| format!("{name:?} = \"{at}\"\n")).collect();
        let own_table = self.options.config.lines().any(|line| line == "[nodes]");
        let nodes = if own_table { String::new() } else { format!("\n[nodes]\n{peers}") };
        std::fs::write(&config, format!("{}{nodes}", self.options.config))?;
        let log = File::options().create(true).append(true).open(self.log_path())?;
        // As systemd does: settings of the daemon's session must not affect ours.
        let mut command = Command::new("setsid");
        command.arg(&program).arg("--config").arg(&config).args([
            "--node",
            &self.name,
            "--fabric",
            self.options.fabric,
        ]);
        command.arg("--control").arg(self.control()).args(["--listen", &self.listen.to_string()]);
        command.arg("--state-dir").arg(self.folder.join("state")).arg("--memory-dir").arg(self.memory());
        command.arg("--run-dir").arg(self.folder.join("run"));
        let secured = self.options.extra.iter().any(|a| a.starts_with("--tls") || a == "--insecure");
        if !secured && !self.options.config.contains("[tls]") {
            command.arg("--insecure");
        }
        if !self.options.config.contains("[qemu]") {
            command.args(vmove_skip::user_of_qemus());
        }
        command.env("PATH", places::path_with(places::booted_guests().as_deref()));
        command.args(&self.options.extra).envs(self.options.environment.iter().cloned());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = match self.options.old_kernel {
            Some(kernel) => spawn_before(kernel, command),
            None => command.spawn().map_err(Into::into),
        };
        self.process = Some(child.with_context(|| format!("could not start {}", program.display()))?.into());
        self.wait_ready(Duration::from_secs(20))
    }

    fn wait_ready(&mut self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        while UnixStream::connect(self.control()).is_err() {
            let ended = self.process.as_mut().map_or(Ok(None), Guarded::ended)?;
            if let Some(status) = ended {
                bail!("vmoved of node {} ended ({status}): {}", self.name, self.log());
            }
            if Instant::now() > deadline {
                bail!("vmoved of node {} does not answer after {timeout:?}: {}", self.name, self.log());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Kills the daemon, like a crash. Its QEMUs keep running.
    pub fn crash(&mut self) {
        self.process = None;
    }

    /// Tells the daemon to end, as an upgrade does. Its QEMUs keep running.
    ///
    /// # Errors
    /// When it does not end within 10 s.
    pub fn stop(&mut self) -> Result<()> {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        process.signal(Signal::SIGTERM)?;
        match process.wait(Duration::from_secs(10))? {
            Some(_) => Ok(()),
            None => bail!("vmoved of node {} did not end on SIGTERM: {}", self.name, self.log()),
        }
    }

    /// Name of the node.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Address on which it listens for peers.
    #[must_use]
    pub const fn listen(&self) -> SocketAddr {
        self.listen
    }

    /// Process id of the daemon, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.process.as_ref().map(Guarded::pid)
    }

    /// Folder with all files of this node.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Folder of guest memory.
    #[must_use]
    pub fn memory(&self) -> PathBuf {
        self.folder.join("mem")
    }

    /// The control socket.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.folder.join("ctl.sock")
    }

    fn log_path(&self) -> PathBuf {
        self.folder.join("vmoved.log")
    }

    /// What the daemon logged.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn command(&self, arguments: &[&str]) -> Result<Command> {
        self.command_of("vmove", arguments)
    }

    fn command_of(&self, program: &str, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(places::product(program)?);
        command.arg("--control").arg(self.control()).args(arguments).stdin(Stdio::null());
        Ok(command)
    }

    /// Runs `vmove` with these arguments and waits for its end.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn vmove(&self, arguments: &[&str]) -> Result<Output> {
        Ok(self.command(arguments)?.output()?)
    }

    /// Runs `vfork` with these arguments and waits for its end.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn vfork(&self, arguments: &[&str]) -> Result<Output> {
        Ok(self.command_of("vfork", arguments)?.output()?)
    }

    /// Runs `vmove --json` and returns its answer.
    ///
    /// # Errors
    /// When its exit code is not 0, or its answer is not JSON.
    pub fn ask(&self, arguments: &[&str]) -> Result<Value> {
        let output = self.vmove(&[&["--json"], arguments].concat())?;
        self.answer(arguments, &output)
    }

    /// As [`Node::ask`]; what `vmove` shows on a terminal appears on ours.
    ///
    /// # Errors
    /// As [`Node::ask`].
    pub fn ask_shown(&self, arguments: &[&str]) -> Result<Value> {
        let mut command = self.command(&[&["--json"], arguments].concat())?;
        let output = command.stderr(Stdio::inherit()).output()?;
        self.answer(arguments, &output)
    }

    fn answer(&self, arguments: &[&str], output: &Output) -> Result<Value> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if !output.status.success() {
            bail!(
                "vmove {} ended with {}: {}{}; node {}: {}",
                arguments.join(" "),
                output.status,
                text(&output.stdout),
                text(&output.stderr),
                self.name,
                tail(&self.log())
            );
        }
        last_json(&output.stdout).with_context(|| format!("vmove {} answered no JSON", arguments.join(" ")))
    }

    /// Sends an HTTP request to the daemon's control socket and returns status and answer. If `body` is null, no body is sent. An answer
    /// may take two minutes.
    ///
    /// # Errors
    /// When the daemon cannot be reached, or its answer is not JSON.
    pub fn rest(&self, method: &str, path: &str, body: &Value) -> Result<(u16, Value)> {
        let (status, answer) = self.exchange(method, path, body)?;
        let answer =
            serde_json::from_str(&answer).with_context(|| format!("{method} {path}: {status} {answer}"))?;
        Ok((status, answer))
    }

    /// All metrics, as Prometheus reads them.
    ///
    /// # Errors
    /// When the daemon cannot be reached.
    pub fn metrics(&self) -> Result<String> {
        Ok(self.exchange("GET", "/metrics", &Value::Null)?.1)
    }

    /// The value of the metric with this name and these labels, written as in `/metrics`; 0 if there is none yet.
    ///
    /// # Errors
    /// When the daemon cannot be reached, or the value is not a number.
    pub fn metric(&self, name: &str) -> Result<f64> {
        let text = self.metrics()?;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.map_or(Ok(0.0), |value| value.parse().with_context(|| format!("{name} {value}")))
    }

    fn exchange(&self, method: &str, path: &str, body: &Value) -> Result<(u16, String)> {
        let mut stream = UnixStream::connect(self.control())?;
        stream.set_read_timeout(Some(Duration::from_secs(120)))?;
        let body = if body.is_null() { String::new() } else { body.to_string() };
        // Head and body in one write: the daemon may answer and close before it reads a body that it does not need.
        let asked = format!(
            "{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(asked.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let (head, answer) = text.split_once("\r\n\r\n").context("an answer without an end of its head")?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok((status.with_context(|| format!("no status in {head:?}"))?, answer.to_owned()))
    }

    /// Starts `vmove` without waiting for its end; its output can be read from the child.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn vmove_in_background(&self, arguments: &[&str]) -> Result<Child> {
        Ok(self.command(arguments)?.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
    }

    /// The answer of a `vmove --json` that was started [in the background](Self::vmove_in_background).
    ///
    /// # Errors
    /// As [`Node::ask`].
    pub fn answer_of(&self, child: Child) -> Result<Value> {
        self.answer(&["in the background"], &child.wait_with_output()?)
    }

    /// Starts `guest` as VM `name` with `memory` (`thp`, `hugetlb-2m`) and waits until it works.
    ///
    /// # Errors
    /// When it does not start, or does not begin to work.
    pub fn run_guest(&self, name: &str, memory: &str, guest: &Guest) -> Result<Vm> {
        let line = guest.command_line("{vmdir}/serial.log")?;
        let mut arguments = vec!["run", "--name", name, "--memory", memory, "--"];
        arguments.extend(line.iter().map(String::as_str));
        self.ask(&arguments)?;
        let vm = self.vm(name)?;
        let ram = vm.ram_files();
        let (_, page) = beacon::wait_running(|| ram.clone(), BOOT_TIMEOUT)
            .with_context(|| format!("VM {name}: {}", tail(&vm.console())))?;
        drop(page);
        Ok(vm)
    }

    /// The VM of this name on this node.
    ///
    /// # Errors
    /// When the node has no VM of this name.
    pub fn vm(&self, name: &str) -> Result<Vm> {
        let shown = self.ask(&["show", name])?;
        serde_json::from_value(shown.clone()).with_context(|| format!("`vmove show` answered {shown}"))
    }

    /// Whether this node has the VM, and its guest runs.
    #[must_use]
    pub fn runs(&self, name: &str) -> bool {
        self.vm(name).is_ok_and(|vm| vm.status == "running")
    }

    /// Names of all VMs on this node.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn vms(&self) -> Result<Vec<String>> {
        let list = self.ask(&["list"])?;
        let names = list["vms"].as_array().context("`vmove list` gives `vms`")?;
        Ok(names.iter().filter_map(|vm| vm["name"].as_str().map(str::to_owned)).collect())
    }

    /// Moves VM `name` to `to`, with further options of `vmove migrate`.
    ///
    /// # Errors
    /// When it does not succeed.
    pub fn migrate(&self, name: &str, to: &str, options: &[&str]) -> Result<MigrateReport> {
        let answer = self.ask(&[&["migrate", name, "--to", to], options].concat())?;
        MigrateReport::read(&answer)
    }
}

/// The part of the output of `vmove show` that tests need.
#[derive(Debug, Clone, Deserialize)]
pub struct Vm {
    /// Name.
    pub name: String,
    /// Process id of QEMU.
    pub pid: i32,
    /// `running`, `paused`, ...
    pub status: String,
    /// Monitor socket.
    pub qmp: PathBuf,
    /// Working folder of QEMU.
    pub dir: PathBuf,
    /// Files of guest memory.
    pub ram: Vec<Ram>,
}

/// A file of guest memory.
#[derive(Debug, Clone, Deserialize)]
pub struct Ram {
    /// Where it is.
    pub path: PathBuf,
}

impl Vm {
    /// Files of its memory.
    #[must_use]
    pub fn ram_files(&self) -> Vec<PathBuf> {
        self.ram.iter().map(|ram| ram.path.clone()).collect()
    }

    /// A value in KiB that the kernel reports for the mapping of guest memory, such as `Rss`.
    ///
    /// # Panics
    /// When the kernel does not report this value.
    #[must_use]
    pub fn smaps(&self, word: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps", self.pid)).expect("it runs");
        let path = self.ram[0].path.to_string_lossy().into_owned();
        let lines = text.lines().skip_while(|line| !line.ends_with(&path)).skip(1);
        let value =
            lines.take_while(|l| !l.contains('/')).find_map(|l| l.strip_prefix(word)?.strip_prefix(':'));
        let value = value.unwrap_or_else(|| panic!("no {word} of {path} in {text}"));
        value.split_ascii_whitespace().next().and_then(|kib| kib.parse().ok()).expect("a number")
    }

    /// The guest's beacon.
    ///
    /// # Errors
    /// When there is none.
    pub fn beacon(&self) -> Result<BeaconPage> {
        Ok(beacon::find(&self.ram_files())?.1)
    }

    /// What the guest has printed since this QEMU was started.
    #[must_use]
    pub fn console(&self) -> String {
        std::fs::read(self.dir.join("serial.log"))
            .map_or_else(|_| String::new(), |text| String::from_utf8_lossy(&text).into_owned())
    }
}

/// The part of the last object of `vmove migrate --json` that tests and the bench need. The names are part of the interface.
#[derive(Debug, Clone, Default, Deserialize)]
#[allow(missing_docs)]
pub struct MigrateReport {
    pub id: String,
    pub vm: String,
    pub mode: String,
    pub mode_reason: String,
    pub fabric: String,
    pub memory: String,
    pub total_ms: f64,
    pub downtime_ms: f64,
    pub setup_ms: f64,
    pub bytes_sent: u64,
    pub pages_total: u64,
    pub pages_zero: u64,
    pub faults: Faults,
    #[serde(default)]
    pub slowest_faults: Vec<SlowFault>,
    pub phases: Vec<Phase>,
    #[serde(default)]
    pub pause: Vec<Phase>,
    #[serde(default)]
    pub verified: Option<bool>,
    #[serde(default)]
    pub scan_us_per_gib: f64,
}

/// Page faults at the destination.
#[derive(Debug, Clone, Default, Deserialize)]
#[allow(missing_docs)]
pub struct Faults {
    pub count: u64,
    /// Page faults for which a page was fetched.
    pub fetched: u64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
}

/// One of the slowest page faults: where its time went, in microseconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct SlowFault {
    pub at_ms: f64,
    pub block: String,
    pub offset: u64,
    pub total_us: f64,
    pub asked_us: f64,
    pub read_us: f64,
    pub map_us: f64,
    pub own_read: bool,
}

/// One phase of a migration.
#[derive(Debug, Clone, Default, Deserialize)]
#[allow(missing_docs)]
pub struct Phase {
    pub name: String,
    pub start_ms: f64,
    pub duration_ms: f64,
}

impl MigrateReport {
    /// Reads the report from an answer: either the answer is the report, or it contains the report.
    ///
    /// # Errors
    /// When a field of the interface is missing.
    pub fn read(answer: &Value) -> Result<Self> {
        let report = answer.get("report").filter(|r| r.is_object()).unwrap_or(answer);
        serde_json::from_value(report.clone()).with_context(|| format!("no report in {answer}"))
    }
}

/// The last JSON value in `output`. Progress may come before it, with one value per line.
fn last_json(output: &[u8]) -> Result<Value> {
    let values = serde_json::Deserializer::from_slice(output).into_iter::<Value>();
    values.last().context("nothing was printed")?.map_err(Into::into)
}

/// The end of a log, for messages.
fn tail(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_json_value_is_the_answer() {
        assert_eq!(last_json(b"{\"a\":1}\n{\"b\": [2]}\n").expect("JSON"), serde_json::json!({"b": [2]}));
        last_json(b"").expect_err("no JSON");
        last_json(b"{\"a\":").expect_err("half a value");
    }
}
