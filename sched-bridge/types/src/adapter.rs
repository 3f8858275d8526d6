//! Adapters: programs that run what `vmoved` does not, such as the containers and bare-metal environments of a blueprint.
//!
//! The contract: the program is started once for each request. It reads one [`Request`] as JSON from standard input and writes one
//! [`Answer`] to standard output. Its exit code is 0 if it has answered, even if environments have failed; any other is a failure of
//! the adapter, whose standard error is shown. Requests can be repeated: `start` of an environment that exists answers with its
//! status. Adapters ignore unknown fields, and refuse unknown actions and versions.

use serde::{Deserialize, Serialize};

/// Version of the contract.
pub const VERSION: u32 = 1;

/// What an adapter is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(as = AdapterAction))]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Start environments. Those that exist are left as they are.
    Start,
    /// Report their status.
    Status,
    /// Stop them. Stopping one that does not exist succeeds.
    Stop,
}

/// A request to an adapter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(as = AdapterRequest))]
pub struct Request {
    /// Version of the contract: 1.
    pub version: u32,
    /// What to do.
    pub action: Action,
    /// The blueprint or cluster. With an environment's name it identifies what runs.
    pub cluster: String,
    /// The environments concerned.
    pub environments: Vec<Environment>,
}

/// One environment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(as = AdapterEnvironment))]
#[serde(default)]
pub struct Environment {
    /// Name, unique in the cluster.
    pub name: String,
    /// `container`, `bare-metal` or `network`.
    pub kind: String,
    /// A command line, or an image and a command line.
    pub artifact: String,
    /// The nodes where it was placed; any, if there are none.
    pub nodes: Vec<String>,
    /// The nodes of VMs that it is connected with: it should run close to them.
    pub near: Vec<String>,
    /// Hardware threads.
    pub cores: u32,
    /// Memory. Unit: MiB.
    pub memory_mib: u64,
    /// Number of GPUs.
    pub gpus: u32,
    /// Names of its networks.
    pub networks: Vec<String>,
    /// Of a container: the network namespace (`ip netns`) of its node in which it runs, and which the adapter `network` has made. One of its
    /// own, if empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Of a network: `private` (of its members alone) or `public` (that of the hosts). Empty for others.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mode: String,
    /// Of a network: who is on it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<Member>,
}

/// A VM or a container on a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(as = AdapterMember))]
#[serde(default)]
pub struct Member {
    /// Its name, by which others on the network reach it.
    pub name: String,
    /// Further names.
    pub aliases: Vec<String>,
    /// Its node.
    pub node: String,
    /// Name of its tap interface on the nodes of the network; of a container, of the interface that leads to it.
    pub interface: String,
    /// MAC address of its network card.
    pub mac: String,
    /// Its IPv4 address; empty if somebody else gives it one.
    pub address: String,
    /// Of a container: the network namespace on its node that has its end of the interface. Empty for a VM.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
}

/// An adapter's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(as = AdapterAnswer))]
pub struct Answer {
    /// Version of the contract: 1.
    pub version: u32,
    /// One for each environment of the request, in the same sequence.
    pub environments: Vec<Status>,
}

/// Status of an environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(as = AdapterStatus))]
pub struct Status {
    /// Its name.
    pub name: String,
    /// What it does.
    pub state: State,
    /// The adapter's own name for it (`slurm:17`).
    #[serde(default)]
    pub handle: String,
    /// Nodes where it runs.
    #[serde(default)]
    pub nodes: Vec<String>,
    /// Why, if it has failed.
    #[serde(default)]
    pub message: String,
}

impl Status {
    /// A status without a name, which who answers for several environments fills in.
    #[must_use]
    pub fn unnamed(state: State, handle: impl Into<String>, message: impl Into<String>) -> Self {
        Self { name: String::new(), state, handle: handle.into(), nodes: Vec::new(), message: message.into() }
    }
}

/// What an environment does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(as = AdapterState))]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It was accepted, and waits for a place.
    Waiting,
    /// It runs.
    Running,
    /// It ran, and has ended by itself or was stopped.
    Ended,
    /// It could not be started, or has ended with an error: the message says why.
    Failed,
    /// There is none.
    Absent,
}

impl State {
    /// Whether something of it may still use a node.
    #[must_use]
    pub const fn is_alive(self) -> bool {
        matches!(self, Self::Waiting | Self::Running)
    }

    /// The word of the contract.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Ended => "ended",
            Self::Failed => "failed",
            Self::Absent => "absent",
        }
    }
}
