//! A Slurm cluster, through its own commands: nodes, GRES and topology are read from it, nodes are held by reservations, and a node
//! that it drains is drained here.

pub mod book;
pub mod follow;
mod read;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::process::Stdio;

use sched_bridge::model::{Node, NodeName, NodeState};
use sched_bridge::topology::Topology;
use tokio::process::Command;

use crate::bridge::{Bridge, BridgeError};

/// Why Slurm did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlurmError {
    /// The command is not there.
    #[error(
        "could not run {command}: {reason}. Install slurm-client, and let SLURM_CONF name the cluster's slurm.conf"
    )]
    Command {
        /// The command.
        command: String,
        /// What the system said.
        reason: std::io::Error,
    },
    /// It ended with an error.
    #[error("{command} failed: {said}")]
    Refused {
        /// The command.
        command: String,
        /// What it printed.
        said: String,
    },
    /// It printed something unexpected.
    #[error("{command}, line {line}: {found:?}: expected {expected}")]
    Output {
        /// The command.
        command: &'static str,
        /// The line, from 1.
        line: usize,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
    },
    /// The bridge.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
}

/// A cluster, named by environment variables.
#[derive(Debug, Clone, Default)]
pub struct Slurm {
    environment: Vec<(String, String)>,
}

impl Slurm {
    /// The cluster that commands with these variables (`SLURM_CONF`, `PATH`) speak with.
    #[must_use]
    pub fn new(environment: Vec<(String, String)>) -> Self {
        Self { environment }
    }

    /// Runs one of Slurm's commands and gives what it printed.
    ///
    /// # Errors
    /// It is not there, or ended with an error.
    pub async fn run(&self, words: &[&str]) -> Result<String, SlurmError> {
        // The program is looked for in the PATH of the cluster's environment, not in ours.
        let path = self.environment.iter().find(|(key, _)| key == "PATH").map(|(_, value)| value.clone());
        let path = path.or_else(|| std::env::var("PATH").ok()).unwrap_or_default();
        let program = std::env::split_paths(&path).map(|dir| dir.join(words[0])).find(|file| file.is_file());
        let program = program.unwrap_or_else(|| words[0].into());
        let output = Command::new(program)
            .args(&words[1..])
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .output()
            .await
            .map_err(|reason| SlurmError::Command { command: words[0].to_owned(), reason })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said =
            [&output.stderr, &output.stdout].map(|bytes| String::from_utf8_lossy(bytes).trim().to_owned());
        Err(SlurmError::Refused { command: words.join(" "), said: said.join(" ").trim().to_owned() })
    }

    /// Nodes with their processors, memory, GPUs (`gres/gpu`) and states, by `scontrol -o show node`.
    ///
    /// # Errors
    /// Slurm does not answer, or something unexpected.
    pub async fn nodes(&self) -> Result<Vec<Node>, SlurmError> {
        read::nodes(&self.run(&["scontrol", "-o", "show", "node"]).await?)
    }

    /// What is free on each node now, by `scontrol -o show node`.
    ///
    /// # Errors
    /// Slurm does not answer, or something unexpected.
    pub async fn room(&self) -> Result<Vec<Room>, SlurmError> {
        read::room(&self.run(&["scontrol", "-o", "show", "node"]).await?)
    }

    /// Switches, by `scontrol -o show topology`; hostlists are expanded by Slurm itself.
    ///
    /// # Errors
    /// Slurm does not answer, or something unexpected.
    pub async fn topology(&self) -> Result<Topology, SlurmError> {
        let text = self.run(&["scontrol", "-o", "show", "topology"]).await?;
        let mut lists: BTreeSet<String> = BTreeSet::new();
        for line in text.lines() {
            lists.extend(read::hostlists(line).map(str::to_owned));
        }
        let mut names = std::collections::HashMap::new();
        for list in lists {
            let expanded = self.run(&["scontrol", "show", "hostnames", &list]).await?;
            names.insert(list, expanded.lines().map(str::to_owned).collect::<Vec<_>>());
        }
        read::topology(&text, &names)
    }

    /// Keeps Slurm's jobs off nodes, under a name. What already runs there is left alone.
    ///
    /// # Errors
    /// Slurm refuses, for example because the name is taken.
    pub async fn hold(&self, name: &str, nodes: &[NodeName], users: &str) -> Result<(), SlurmError> {
        let nodes: Vec<&str> = nodes.iter().map(NodeName::as_str).collect();
        let (name, nodes) = (format!("ReservationName={name}"), format!("Nodes={}", nodes.join(",")));
        let users = format!("Users={users}");
        // Leases may share a node, and each has a reservation.
        let flags = "Flags=IGNORE_JOBS,OVERLAP";
        self.run(&[
            "scontrol",
            "create",
            "reservation",
            &name,
            "StartTime=now",
            "Duration=UNLIMITED",
            &nodes,
            &users,
            flags,
        ])
        .await
        .map(drop)
    }

    /// Holds other nodes under a name that is there already.
    ///
    /// # Errors
    /// Slurm knows no such reservation.
    pub async fn hold_instead(&self, name: &str, nodes: &[NodeName]) -> Result<(), SlurmError> {
        let nodes: Vec<&str> = nodes.iter().map(NodeName::as_str).collect();
        let (name, nodes) = (format!("ReservationName={name}"), format!("Nodes={}", nodes.join(",")));
        self.run(&["scontrol", "update", &name, &nodes]).await.map(drop)
    }

    /// The nodes of a hostlist, expanded by Slurm itself.
    ///
    /// # Errors
    /// Slurm does not understand it.
    pub async fn hosts(&self, list: &str) -> Result<BTreeSet<NodeName>, SlurmError> {
        if list.is_empty() || list == "(null)" {
            return Ok(BTreeSet::new());
        }
        let text = self.run(&["scontrol", "show", "hostnames", list]).await?;
        let name = |(at, line): (usize, &str)| {
            NodeName::new(line).map_err(|e| SlurmError::Output {
                command: "scontrol show hostnames",
                line: at + 1,
                found: line.chars().take(60).collect(),
                expected: e.to_string(),
            })
        };
        text.lines().enumerate().map(name).collect()
    }

    /// Gives back what was held under a name.
    ///
    /// # Errors
    /// Slurm knows no such reservation.
    pub async fn let_go(&self, name: &str) -> Result<(), SlurmError> {
        self.run(&["scontrol", "delete", &format!("ReservationName={name}")]).await.map(drop)
    }

    /// Takes over nodes, topology and states. A node that Slurm drains is drained here; one that it resumes is not resumed if it was
    /// an operator who drained it here. Says which nodes were drained by this call.
    ///
    /// # Errors
    /// Slurm or the store does not answer.
    pub async fn publish(&self, bridge: &Bridge) -> Result<Vec<NodeName>, SlurmError> {
        let (topology, nodes) = (self.topology().await?, self.nodes().await?);
        bridge.put_topology(&topology).await?;
        let mut drained = Vec::new();
        for node in nodes {
            let known = bridge.view()?.node(&node.name).map(|(known, _)| known.state);
            let (name, state) = (node.name.clone(), node.state);
            // What a node's own agent published knows more than Slurm does.
            if bridge.view()?.node(&name).is_none_or(|(known, _)| known.labels.contains_key(FROM)) {
                bridge.put_node(node).await?;
            }
            if known.is_some_and(|known| known == NodeState::Up) && state != NodeState::Up {
                bridge.set_node_state(&name, state).await?;
                drained.push(name);
            }
        }
        Ok(drained)
    }
}

/// What is free on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// The node.
    pub node: NodeName,
    /// Processors, all.
    pub cpus: u32,
    /// Processors that no job has.
    pub free: u32,
    /// Slurm starts jobs there: it is up, and not reserved.
    pub open: bool,
}

/// Label of nodes of which only Slurm has told.
pub const FROM: &str = "vmove.io/from-slurm";
