//! Moves, starts and stops VMs through the daemons of the nodes: by `vmove --json`, here or on another machine by ssh.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use async_trait::async_trait;
use sched_bridge::model::{NodeName, VmName};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::process::Command;

use crate::start::StartVm;

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

    /// Starts a VM on a node.
    ///
    /// # Errors
    /// Its daemon refuses, or whether it runs is not known; with what it said.
    async fn start(&self, node: &NodeName, vm: &StartVm) -> Result<(), String>;

    /// Ends a VM on a node.
    ///
    /// # Errors
    /// It may still run; with what its daemon said.
    async fn stop(&self, node: &NodeName, vm: &VmName) -> Result<(), String>;
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
        // ssh gives what it is given to a shell, as one line.
        let shell = Path::new(program).file_name().is_some_and(|name| name == "ssh");
        let arguments = arguments.iter().map(|word| if shell { quoted(word) } else { (*word).to_owned() });
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

impl CommandMover {
    async fn done(&self, node: &NodeName, arguments: &[&str]) -> Result<(), String> {
        let (code, answer, said) = self.run(node, arguments).await?;
        if code == Some(0) { Ok(()) } else { Err(answer["error"].as_str().map_or(said, str::to_owned)) }
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

    async fn start(&self, node: &NodeName, vm: &StartVm) -> Result<(), String> {
        let mut arguments = vec!["run", "--name", vm.vm.as_str(), "--memory", &vm.memory, "--"];
        arguments.extend(vm.command_line.iter().map(String::as_str));
        self.done(node, &arguments).await
    }

    async fn stop(&self, node: &NodeName, vm: &VmName) -> Result<(), String> {
        self.done(node, &["stop", vm.as_str()]).await
    }
}

/// A word that a shell takes as it is.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Times of a report are far below 2^53.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn milli(value: &Value, factor: f64) -> u64 {
    (value.as_f64().unwrap_or(0.0) * factor).round().max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn words_come_through_a_shell_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        // As ssh does it: all words but the first in one line, for a shell.
        let ssh = dir.path().join("ssh");
        std::fs::write(&ssh, "#!/bin/sh\nshift\nexec sh -c \"$*\"\n").unwrap();
        let mut mode = std::fs::metadata(&ssh).unwrap().permissions();
        std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
        std::fs::set_permissions(&ssh, mode).unwrap();
        let out = dir.path().join("out");
        let script = dir.path().join("vmove");
        std::fs::write(&script, format!("for word; do printf '%s\\n' \"$word\"; done >{}\n", out.display()))
            .unwrap();
        let command =
            [ssh.to_str().unwrap(), "{node}", "sh", script.to_str().unwrap()].map(str::to_owned).to_vec();
        let mover = CommandMover::new(command, Vec::new(), BTreeMap::new());
        let words = ["qemu", "-append", "a b 'c' $HOME; \"d\"", "", "x=1,y=2"];
        let vm = StartVm {
            vm: VmName::new("v").unwrap(),
            command_line: words.map(str::to_owned).to_vec(),
            memory: "thp".to_owned(),
        };
        mover.start(&NodeName::new("n1").unwrap(), &vm).await.unwrap();
        let told = std::fs::read_to_string(out).unwrap();
        let wanted = ["--json", "run", "--name", "v", "--memory", "thp", "--"].into_iter().chain(words);
        assert_eq!(told.lines().collect::<Vec<_>>(), wanted.collect::<Vec<_>>());
    }
}
