//! Blueprints: execution environments (VMs, containers, bare metal), artifacts, and connections, in YAML or XML; and how they are
//! decomposed.
//!
//! Environments of one kind and adapter make an *environment group*. Environments that are connected, directly or through others,
//! make a *connectivity group*, which is placed together: its VMs become one [`crate::place::ClusterRequest`], its containers and
//! bare metal go to the adapters that they name, with the nodes of the VMs as a hint.
//!
//! ```
//! use sched_bridge::blueprint::{Language, decompose, read};
//! use sched_bridge::request::Catalog;
//!
//! let text = "
//! name: app
//! environments:
//! - {name: solver, kind: vm, count: 8, request: m1.large}
//! - {name: view, kind: container, adapter: slurm}
//! connections:
//! - {from: solver, to: view}
//! ";
//! let parts = decompose(&read(text, Language::guess(text))?, &Catalog::default())?;
//! assert_eq!(parts.together[0].environments, ["solver", "view"]);
//! # Ok::<(), sched_bridge::blueprint::BlueprintError>(())
//! ```

mod parts;
mod text;

pub use parts::{
    AdapterEnvironment, ConnectivityGroup, Decomposed, EnvironmentGroup, Network, VmCommand, decompose,
};
pub use text::{Language, read};

use serde::{Deserialize, Serialize};

use crate::model::NodeName;
use crate::request::RequestError;

/// Kind of an environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Kind {
    /// A virtual machine, started by the daemons of the nodes.
    Vm,
    /// A container, started by an adapter.
    Container,
    /// A whole machine, started by an adapter.
    BareMetal,
}

/// Kind of a network between environments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum NetworkMode {
    /// A network of their own.
    #[default]
    Private,
    /// The network of the hosts; `public` in a blueprint means the same.
    #[serde(alias = "public")]
    Bridge,
}

/// An execution environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Environment {
    /// Its name in the blueprint.
    pub name: String,
    /// Its kind.
    pub kind: Kind,
    /// Number of instances; 1, if it is not given.
    #[serde(default = "one")]
    pub count: u32,
    /// What each instance needs, as an extended instance type; required for VMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// The adapter that starts it; required for containers and bare metal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Only for containers: the host on which its adapter runs it, where it is put on the private network of its group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schema(value_type = Option<String>))]
    pub node: Option<NodeName>,
    /// Artifacts that it needs, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub artifacts: Vec<String>,
    /// Only for VMs: QEMU and its arguments, as for `vmove run`. `{artifact:NAME}` is replaced by the source of one of its artifacts. A
    /// VM without a command gets its place and is started by somebody else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
}

impl Environment {
    /// The name of an instance, by its number from 0: that of the environment, if it is the only one.
    #[must_use]
    pub fn instance(&self, number: u32) -> String {
        if self.count == 1 { self.name.clone() } else { format!("{}-{number}", self.name) }
    }
}

/// An image, a package, a data set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Artifact {
    /// Its name in the blueprint.
    pub name: String,
    /// Path or URL.
    pub source: String,
}

/// Two environments that talk to each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Connection {
    /// One environment.
    pub from: String,
    /// The other.
    pub to: String,
    /// Kind of network; `private`, if it is not given.
    #[serde(default)]
    pub network: NetworkMode,
}

/// A blueprint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema))]
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

/// Why a blueprint is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlueprintError {
    /// Invalid YAML or XML, or other elements.
    #[error("{place}: {reason}; expected {expected}")]
    Syntax {
        /// Line and column, if they are known.
        place: String,
        /// What is there.
        reason: String,
        /// What should be there.
        expected: String,
    },
    /// A name that is not defined.
    #[error("{place}: there is no {what} {name:?}; expected one of: {known}")]
    Undefined {
        /// Which connection or environment names it.
        place: String,
        /// Environment or artifact.
        what: &'static str,
        /// Its name.
        name: String,
        /// Names that are defined.
        known: String,
    },
    /// A name that is used twice, or something that an environment of its kind needs or must not have.
    #[error("{place}: {reason}; expected {expected}")]
    Bad {
        /// Which environment.
        place: String,
        /// What is wrong.
        reason: String,
        /// What was expected.
        expected: &'static str,
    },
    /// A request that is refused.
    #[error("environment {environment:?}: request: {source}")]
    Request {
        /// Of which environment.
        environment: String,
        /// What is wrong with it.
        #[source]
        source: RequestError,
    },
}

#[cfg(test)]
mod tests {
    use vmove_skip::installed::is_current;
    use vmove_skip::reference::{keys_page, type_named};

    use super::*;

    /// `VMOVE_WRITE_DOCS=1 cargo test -p vmove-sched --lib the_checked_in` writes it.
    #[test]
    fn the_checked_in_page_of_keys_is_current() {
        let types = [
            type_named::<Blueprint>(),
            type_named::<Environment>(),
            type_named::<Kind>(),
            type_named::<Artifact>(),
            type_named::<Connection>(),
            type_named::<NetworkMode>(),
        ];
        let about = "A file for `vmove blueprint`, in YAML or XML: [Blueprints](../sched-bridge.md#blueprints), [an example](../../examples/blueprint/app.yaml). \
            The file is a [Blueprint](#blueprint). In XML, keys are attributes of `<environment>`, `<artifact>` and `<connection>`; `<request>`, `<artifact>` and \
            `<argument>` (a word of `command`) are elements of an environment.";
        let page = keys_page("Keys of blueprints", about, &types);
        is_current("docs/reference/blueprints.md", page.as_bytes(), "vmove-sched");
    }
}
