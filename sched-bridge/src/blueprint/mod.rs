//! Blueprints: execution environments (VMs, containers, bare metal), artifacts, and connections, in YAML or XML; and how they are
//! taken apart.
//!
//! Environments of one kind and adapter make an *environment group*; environments that are connected, directly or through others,
//! make a *connectivity group*, which is placed together. VMs become a [`crate::place::ClusterRequest`] for each connectivity group; containers
//! and bare metal are handed to the adapter that they name, with the nodes of their group as a hint.

mod parts;
mod text;

pub use parts::{Decomposed, EnvironmentGroup, Handed, Network, Started, Together, decompose};
pub use text::{Language, read};

use serde::{Deserialize, Serialize};

use crate::request::RequestError;

/// What an environment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Kind {
    /// A virtual machine, for our daemons.
    Vm,
    /// A container, for an adapter.
    Container,
    /// A whole machine, for an adapter.
    BareMetal,
}

/// How connected environments see each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum NetworkMode {
    /// A network of their own.
    #[default]
    Private,
    /// The network of the hosts.
    Bridge,
}

/// An execution environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Environment {
    /// Its name in the blueprint.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// How many of it.
    #[serde(default = "one")]
    pub count: u32,
    /// What each needs, as an extended instance type; VMs must have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// Who starts it; containers and bare metal must have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Artifacts that it needs, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub artifacts: Vec<String>,
    /// Only for VMs: QEMU and its arguments, as for `vmove run`. `{artifact:NAME}` stands for the source of one of its artifacts. A VM
    /// without it gets its place, and is started by somebody else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
}

/// An image, a package, a data set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Artifact {
    /// Its name in the blueprint.
    pub name: String,
    /// Where it comes from.
    pub source: String,
}

/// Two environments that talk to each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Connection {
    /// One environment.
    pub from: String,
    /// The other.
    pub to: String,
    /// Over what.
    #[serde(default)]
    pub network: NetworkMode,
}

/// A blueprint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blueprint {
    /// Its name.
    pub name: String,
    /// Execution environments.
    pub environments: Vec<Environment>,
    /// Artifacts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub artifacts: Vec<Artifact>,
    /// Connections.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub connections: Vec<Connection>,
}

fn one() -> u32 {
    1
}

/// Why a blueprint was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlueprintError {
    /// YAML or XML that is none, or has other elements.
    #[error(
        "{place}: {reason}; expected a blueprint: name, environments (name, kind, count, request, adapter, artifacts, command), artifacts (name, source), connections (from, to, network)"
    )]
    Syntax {
        /// Line and column, if they are known.
        place: String,
        /// What is there.
        reason: String,
    },
    /// Something that is named, but not there.
    #[error("{place}: there is no {what} {name:?}; expected one of: {known}")]
    Nowhere {
        /// Which connection or environment names it.
        place: String,
        /// Environment or artifact.
        what: &'static str,
        /// Its name.
        name: String,
        /// What there is.
        known: String,
    },
    /// Something that is there twice, or lacks what its kind needs.
    #[error("{place}: {reason}; expected {expected}")]
    Bad {
        /// Which environment.
        place: String,
        /// What is wrong.
        reason: String,
        /// What was expected.
        expected: &'static str,
    },
    /// A request that was not understood.
    #[error("environment {environment:?}: request")]
    Request {
        /// Of which environment.
        environment: String,
        /// What is wrong with it.
        #[source]
        source: RequestError,
    },
}
