//! A Slurm cluster, through its own commands: nodes, GRES and topology are read from it, nodes are held by reservations, and a node
//! that it drains is drained here.

pub mod booking;
pub mod follower;
mod scontrol;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::time::Duration;

use sched_bridge::model::{Node, NodeName, NodeState};
use sched_bridge::topology::Topology;
use tokio::process::Command;

use crate::bridge::{Bridge, BridgeError};
use vmove_adapter::program::{self, ProgramError};

/// For how long one of Slurm's commands may run, unless something else is configured.
pub const DEFAULT_TIME_LIMIT: Duration = Duration::from_secs(30);

/// Why a command of Slurm failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlurmError {
    /// The command cannot be run.
    #[error("{0}. Install slurm-client, and let SLURM_CONF name the cluster's slurm.conf")]
    NotRun(ProgramError),
    /// The command has not ended in time.
    #[error("{0}: does slurmctld answer (`scontrol ping`)? command_limit_s in [slurm] is the time limit")]
    TimedOut(ProgramError),
    /// The command ended with an error.
    #[error("{command} failed: {output}")]
    Refused {
        /// The command.
        command: String,
        /// Its output.
        output: String,
    },
    /// Its output has an unexpected form.
    #[error("{command}, line {line}: expected {expected}, found {found:?}")]
    Output {
        /// The command.
        command: &'static str,
        /// The line, from 1.
        line: usize,
        /// The text there.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// The bridge refuses, or its store does not answer.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
}

/// A Slurm cluster.
#[derive(Debug, Clone)]
pub struct Slurm {
    environment: Vec<(String, String)>,
    time_limit: Duration,
}

impl Default for Slurm {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

impl From<ProgramError> for SlurmError {
    fn from(error: ProgramError) -> Self {
        match error {
            ProgramError::NotRun { .. } => Self::NotRun(error),
            ProgramError::TimedOut { .. } => Self::TimedOut(error),
        }
    }
}

impl Slurm {
    /// The cluster of commands with these environment variables (`SLURM_CONF`, `PATH`).
    #[must_use]
    pub fn new(environment: Vec<(String, String)>) -> Self {
        Self { environment, time_limit: DEFAULT_TIME_LIMIT }
    }

    /// The same cluster; each of its commands may run for so long.
    #[must_use]
    pub fn with_time_limit(mut self, time_limit: Duration) -> Self {
        self.time_limit = time_limit;
        self
    }

    /// Runs one of Slurm's commands and returns its output.
    ///
    /// # Errors
    /// It cannot be run, ended with an error, or did not end in time.
    pub async fn run(&self, words: &[&str]) -> Result<String, SlurmError> {
        // The program is looked for in the PATH of the cluster's environment, not in ours.
        let path = self.environment.iter().find(|(key, _)| key == "PATH").map(|(_, value)| value.clone());
        let path = path.or_else(|| std::env::var("PATH").ok()).unwrap_or_default();
        let program = std::env::split_paths(&path).map(|dir| dir.join(words[0])).find(|file| file.is_file());
        let program = program.unwrap_or_else(|| words[0].into());
        let mut command = Command::new(program);
        command.args(&words[1..]).envs(self.environment.iter().cloned());
        let output = program::run(&mut command, words[0], self.time_limit).await?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let texts =
            [&output.stderr, &output.stdout].map(|bytes| String::from_utf8_lossy(bytes).trim().to_owned());
        Err(SlurmError::Refused { command: words.join(" "), output: texts.join(" ").trim().to_owned() })
    }

    /// Nodes with their processors, memory, GPUs (`gres/gpu`) and states, by `scontrol -o show node`.
    ///
    /// # Errors
    /// Slurm does not answer, or its output has an unexpected form.
    pub async fn nodes(&self) -> Result<Vec<Node>, SlurmError> {
        scontrol::nodes(&self.run(&["scontrol", "-o", "show", "node"]).await?)
    }

    /// Free processors of each node now, by `scontrol -o show node`.
    ///
    /// # Errors
    /// Slurm does not answer, or its output has an unexpected form.
    pub async fn capacity(&self) -> Result<Vec<NodeCapacity>, SlurmError> {
        scontrol::capacity(&self.run(&["scontrol", "-o", "show", "node"]).await?)
    }

    /// Switches, by `scontrol -o show topology`; hostlists are expanded by Slurm itself.
    ///
    /// # Errors
    /// Slurm does not answer, or its output has an unexpected form.
    pub async fn topology(&self) -> Result<Topology, SlurmError> {
        let text = self.run(&["scontrol", "-o", "show", "topology"]).await?;
        let mut lists: BTreeSet<String> = BTreeSet::new();
        for line in text.lines() {
            lists.extend(scontrol::hostlists(line).map(str::to_owned));
        }
        let mut names = std::collections::HashMap::new();
        for list in lists {
            let expanded = self.hostnames(&list).await?;
            names.insert(list, expanded.lines().map(str::to_owned).collect::<Vec<_>>());
        }
        scontrol::topology(&text, &names)
    }

    /// The names of a hostlist, one a line.
    ///
    /// # Errors
    /// It is no hostlist.
    pub async fn hostnames(&self, list: &str) -> Result<String, SlurmError> {
        if list.starts_with('-') {
            return Err(SlurmError::Output {
                command: "scontrol show hostnames",
                line: 1,
                found: list.chars().take(60).collect(),
                expected: "a list of nodes, which does not begin with -".to_owned(),
            });
        }
        self.run(&["scontrol", "show", "hostnames", list]).await
    }

    /// Reserves nodes for `users`. Jobs that run there already are left alone.
    ///
    /// # Errors
    /// Slurm refuses, for example because a reservation has this name.
    pub async fn create_reservation(
        &self,
        name: &str,
        nodes: &[NodeName],
        users: &str,
    ) -> Result<(), SlurmError> {
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

    /// Replaces the nodes of a reservation.
    ///
    /// # Errors
    /// There is no such reservation.
    pub async fn update_reservation(&self, name: &str, nodes: &[NodeName]) -> Result<(), SlurmError> {
        let nodes: Vec<&str> = nodes.iter().map(NodeName::as_str).collect();
        let (name, nodes) = (format!("ReservationName={name}"), format!("Nodes={}", nodes.join(",")));
        self.run(&["scontrol", "update", &name, &nodes]).await.map(drop)
    }

    /// The nodes of a hostlist, expanded by Slurm itself.
    ///
    /// # Errors
    /// It is no hostlist.
    pub async fn expand_hostlist(&self, list: &str) -> Result<BTreeSet<NodeName>, SlurmError> {
        if list.is_empty() || list == "(null)" {
            return Ok(BTreeSet::new());
        }
        let text = self.hostnames(list).await?;
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

    /// Deletes a reservation.
    ///
    /// # Errors
    /// There is no such reservation, or jobs run in it.
    pub async fn delete_reservation(&self, name: &str) -> Result<(), SlurmError> {
        self.run(&["scontrol", "delete", &format!("ReservationName={name}")]).await.map(drop)
    }

    /// Publishes Slurm's nodes, topology and states at a bridge. A node that Slurm drains is drained at the bridge. One that Slurm
    /// resumes stays drained: an operator may have drained it at the bridge. Returns the nodes that this call has drained.
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
            // An inventory that the node itself published says more than Slurm does.
            if bridge.view()?.node(&name).is_none_or(|(known, _)| known.labels.contains_key(FROM_SLURM_LABEL))
            {
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

/// Processors of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeCapacity {
    /// The node.
    pub node: NodeName,
    /// All processors.
    pub cpus: u32,
    /// Processors that no job uses.
    pub free_cpus: u32,
    /// Slurm starts jobs there: it is up and not reserved.
    pub accepts_jobs: bool,
}

/// Label of nodes that were published from Slurm's data, not by themselves.
pub const FROM_SLURM_LABEL: &str = "vmove.io/from-slurm";
