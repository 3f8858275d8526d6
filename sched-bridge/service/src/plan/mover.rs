//! Moves VMs through the daemons of the nodes: by `vmove --json`, here or on another machine by ssh.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;

use async_trait::async_trait;
use sched_bridge::model::{NodeName, VmName};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::process::Command;

/// How a migration ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Moved {
    /// The VM runs at the new place.
    Arrived {
        /// Unit: milliseconds.
        total_ms: u64,
        /// Unit: microseconds.
        downtime_us: u64,
    },
    /// It still runs where it was.
    Stayed(String),
    /// Where it is, or whether it runs, must be looked at.
    Unclear(String),
}

/// A VM on a node, as its daemon lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// A migration holds it.
    pub moving: bool,
    /// Its QEMU has ended.
    pub ended: bool,
}

/// Moves VMs, and says where they are.
#[async_trait]
pub trait Mover: std::fmt::Debug + Send + Sync {
    /// Moves a VM and waits for the end.
    async fn migrate(&self, vm: &VmName, from: &NodeName, to: &NodeName) -> Moved;

    /// VMs of a node by name.
    ///
    /// # Errors
    /// Its daemon does not answer; with what it said.
    async fn list(&self, node: &NodeName) -> Result<BTreeMap<String, Listed>, String>;
}

/// Where the daemon of a node is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Daemon {
    /// Its control socket, for `{control}` in the command.
    #[serde(default = "default_control")]
    pub control: PathBuf,
    /// Its peer port, `HOST:PORT`: where others send VMs. The node's name if left out, which the sending daemon must then know.
    #[serde(default)]
    pub address: Option<String>,
}

fn default_control() -> PathBuf {
    PathBuf::from("/run/vmove/vmoved.sock")
}

/// Runs a command for every request.
#[derive(Debug, Clone)]
pub struct CommandMover {
    command: Vec<String>,
    options: Vec<String>,
    daemons: BTreeMap<NodeName, Daemon>,
}

impl CommandMover {
    /// `command` is `vmove` and what comes before its own arguments; `{node}` and `{control}` are replaced. `options` are given to
    /// `vmove migrate`.
    #[must_use]
    pub fn new(command: Vec<String>, options: Vec<String>, daemons: BTreeMap<NodeName, Daemon>) -> Self {
        Self { command, options, daemons }
    }

    async fn run(&self, node: &NodeName, arguments: &[&str]) -> Result<(Option<i32>, Value, String), String> {
        let control = self.daemons.get(node).map_or_else(default_control, |daemon| daemon.control.clone());
        let fill = |word: &String| {
            word.replace("{node}", node.as_str()).replace("{control}", &control.to_string_lossy())
        };
        let words: Vec<String> = self.command.iter().map(fill).collect();
        let (program, first) =
            words.split_first().ok_or("the command for moves is empty: see [moves] command")?;
        let output = Command::new(program)
            .args(first)
            .arg("--json")
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .await
            .map_err(|e| format!("could not run {program}: {e}"))?;
        let last = serde_json::Deserializer::from_slice(&output.stdout)
            .into_iter::<Value>()
            .filter_map(Result::ok)
            .last();
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Ok((output.status.code(), last.unwrap_or_default(), said))
    }
}

#[async_trait]
impl Mover for CommandMover {
    async fn migrate(&self, vm: &VmName, from: &NodeName, to: &NodeName) -> Moved {
        let address = self.daemons.get(to).and_then(|daemon| daemon.address.clone());
        let address = address.unwrap_or_else(|| to.to_string());
        let mut arguments = vec!["migrate", vm.as_str(), "--to", &address];
        arguments.extend(self.options.iter().map(String::as_str));
        let (code, answer, said) = match self.run(from, &arguments).await {
            Ok(ended) => ended,
            Err(reason) => return Moved::Stayed(reason),
        };
        let reason = answer["error"].as_str().map_or(said, str::to_owned);
        match code {
            Some(0) => Moved::Arrived {
                total_ms: milli(&answer["total_ms"], 1.0),
                downtime_us: milli(&answer["downtime_ms"], 1000.0),
            },
            // 1: failed, still runs where it was; 2: wrong use; 3: refused by the check.
            Some(1..=3) => Moved::Stayed(reason),
            _ => Moved::Unclear(reason),
        }
    }

    async fn list(&self, node: &NodeName) -> Result<BTreeMap<String, Listed>, String> {
        let (code, answer, said) = self.run(node, &["list"]).await?;
        let Some(vms) = answer["vms"].as_array().filter(|_| code == Some(0)) else {
            return Err(format!("node {node} does not list its VMs: {said}"));
        };
        let listed = |vm: &Value| {
            let moving =
                vm["migration"].is_string() || vm["status"] == "inmigrate" || vm["status"] == "migrating";
            Some((vm["name"].as_str()?.to_owned(), Listed { moving, ended: vm["status"] == "ended" }))
        };
        Ok(vms.iter().filter_map(listed).collect())
    }
}

/// Times of a report are far below 2^53.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn milli(value: &Value, factor: f64) -> u64 {
    (value.as_f64().unwrap_or(0.0) * factor).round().max(0.0) as u64
}
