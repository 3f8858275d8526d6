//! `vbridged` under test, and the commands of `vmove` that use it.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::daemon::Node;
use crate::places;
use crate::process::Guarded;

/// Checks that a bridge can move and start guests here: this needs root, the guest image and the programs.
///
/// # Errors
/// What is missing first, and what to do about it.
pub fn ready_for_guests() -> Result<()> {
    places::root()?;
    places::guest_initrd()?;
    for program in ["vmoved", "vmove", "vbridged"] {
        places::product(program)?;
    }
    Ok(())
}
use crate::sandbox::Sandbox;

/// Timeout for short operations on a machine that may be very busy.
const REPLY_TIMEOUT: Duration = Duration::from_secs(120);

/// Waits until a condition holds.
///
/// # Panics
/// If the condition does not hold after two minutes.
pub fn until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + REPLY_TIMEOUT;
    while !is() {
        assert!(Instant::now() < deadline, "after {REPLY_TIMEOUT:?}, not so: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A bridge and its socket.
#[derive(Debug)]
pub struct Bridge {
    folder: PathBuf,
    process: Option<Guarded>,
}

impl Bridge {
    /// Starts a bridge that knows these daemons.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(sandbox: &Sandbox, nodes: &[Node]) -> Result<Self> {
        Self::start_with(sandbox, nodes, "")
    }

    /// As [`Self::start`], with more in its configuration.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_with(sandbox: &Sandbox, nodes: &[Node], more: &str) -> Result<Self> {
        let folder = sandbox.folder("bridge")?;
        let daemons: String = nodes
            .iter()
            .map(|n| {
                format!("[daemons.{}]\ncontrol = {:?}\naddress = \"{}\"\n", n.name(), n.control(), n.listen())
            })
            .collect();
        let vmove = places::product("vmove")?;
        let look = if more.contains("look_s") { "" } else { "look_s = 1\n" };
        let config = format!(
            "store = \"redb:{0}/state.redb\"\ncontrol = \"{0}/c.sock\"\n{look}{more}\n[moves]\ncommand = [{vmove:?}, \"--control\", \"{{control}}\"]\noptions = [\"--mode\", \"postcopy\", \"--verify\"]\n{daemons}",
            folder.display()
        );
        std::fs::write(folder.join("vbridged.toml"), config)?;
        let mut bridge = Self { folder, process: None };
        bridge.run()?;
        Ok(bridge)
    }

    /// As [`Self::start_with`], with four nodes of two GPUs below two leaf switches, whose daemons nobody has started.
    ///
    /// # Errors
    /// It does not start.
    pub fn of_four_nodes(sandbox: &Sandbox, more: &str) -> Result<Self> {
        let bridge = Self::start_with(sandbox, &[], more)?;
        let gpu = |at: u8| json!({ "address": format!("0000:0{at}:00.0"), "kind": "gpu", "id": "10de:2330" });
        let numa = json!([{ "id": 0, "socket": 0, "cores": 8, "memory": 4096 }]);
        let node =
            |number| json!({ "name": format!("n{number}"), "numa": numa, "devices": [gpu(1), gpu(2)] });
        let nodes: String = (1..=4).map(|number| node(number).to_string()).collect();
        let nodes = bridge.write("nodes.json", &nodes)?;
        bridge.ask(&["fleet", "publish", &nodes])?;
        bridge.publish_topology(
            "SwitchName=l1 Nodes=n[1-2]\nSwitchName=l2 Nodes=n[3-4]\nSwitchName=s Switches=l[1-2]\n",
        )?;
        Ok(bridge)
    }

    /// As [`Self::of_four_nodes`], over TCP too, where bob is a tenant. Returns its address there, and the file of bob's token.
    ///
    /// # Errors
    /// It does not start.
    pub fn with_tenant(sandbox: &Sandbox) -> Result<(Self, String, PathBuf)> {
        let token = sandbox.path().join("bob.token");
        std::fs::write(&token, "0123456789abcdef-bob\n")?;
        let address = vmove_skip::free_port();
        let more = format!("listen = \"{address}\"\n[tokens.bob]\nrole = \"tenant\"\nfile = {token:?}\n");
        Ok((Self::of_four_nodes(sandbox, &more)?, format!("http://{address}"), token))
    }

    /// Starts it again.
    ///
    /// # Errors
    /// It does not answer.
    pub fn run(&mut self) -> Result<()> {
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join("log"))?;
        let child = Command::new(places::product("vbridged")?)
            .arg("--config")
            .arg(self.folder.join("vbridged.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        self.process = Some(child.into());
        let deadline = Instant::now() + REPLY_TIMEOUT;
        while self.ask(&["fleet", "list"]).is_err() {
            if Instant::now() > deadline {
                bail!("vbridged does not answer: {}", std::fs::read_to_string(self.folder.join("log"))?);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Kills it, like a crash.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// It does not run.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process.as_ref().context("it does not run")?.signal(signal)
    }

    /// `vmove --json` with this bridge.
    ///
    /// # Errors
    /// It is not built.
    pub fn command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(places::product("vmove")?);
        command.env("VBRIDGE", self.socket()).arg("--json").args(arguments).stdin(Stdio::null());
        Ok(command)
    }

    /// Its address, as `--bridge` takes it.
    #[must_use]
    pub fn socket(&self) -> String {
        format!("unix:{}", self.folder.join("c.sock").display())
    }

    /// The bridge's answer.
    ///
    /// # Errors
    /// The bridge refuses; the error has its message.
    pub fn ask(&self, arguments: &[&str]) -> Result<Value> {
        let output = self.command(arguments)?.output()?;
        if !output.status.success() {
            bail!(
                "vmove {arguments:?}: {} {}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        serde_json::from_slice(&output.stdout).context("vmove answered no JSON")
    }

    /// Publishes a node of one NUMA node with so many cores and MiB of memory.
    ///
    /// # Errors
    /// The bridge refuses.
    pub fn publish(&self, node: &Node, cores: u32, memory_mib: u32) -> Result<()> {
        let numa = json!([{ "id": 0, "socket": 0, "cores": cores, "memory": memory_mib }]);
        let inventory = json!({ "name": node.name(), "numa": numa }).to_string();
        let file = self.write(node.name(), &inventory)?;
        self.ask(&["fleet", "publish", &file]).map(drop)
    }

    /// Publishes a topology, as Slurm's `topology.conf` has it.
    ///
    /// # Errors
    /// The bridge refuses.
    pub fn publish_topology(&self, text: &str) -> Result<()> {
        let file = self.write("topology.conf", text)?;
        self.ask(&["topology", "--import", &file, "--publish"]).map(drop)
    }

    /// Writes a file in the bridge's folder and returns its path.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, name: &str, text: &str) -> Result<String> {
        let path = self.folder.join(name);
        std::fs::write(&path, text)?;
        Ok(path.to_string_lossy().into_owned())
    }
}
