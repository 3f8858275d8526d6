//! Why a node inside a program, or something that it was asked for, did not come about.

use std::path::PathBuf;

use vmove_hooks::config::HookError;
use vmove_node::embed::GroundError;
use vmove_node::registry::RegistryError;

use crate::CloneError;
use crate::engine::ForkError;

/// Why a node, or something that it was asked for, did not come about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbedError {
    /// The folders.
    #[error(transparent)]
    Ground(#[from] GroundError),
    /// A node with migrations has used the state folder: what they hold of its VMs is not known here.
    #[error(
        "The state folder has journals of migrations ({}): give the node a folder of its own, or open this one with vmoved", path.display()
    )]
    Migrations {
        /// Where they are.
        path: PathBuf,
    },
    /// The journals of forks.
    #[error(transparent)]
    Journals(#[from] CloneError),
    /// The program that is run for each child.
    #[error("Expected a program that can be run for each child (child_start)")]
    ChildStart(#[source] HookError),
    /// The journal of that program.
    #[error("Could not use {}", path.display())]
    Hooks {
        /// The folder.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
    /// Children on other hosts.
    #[error(
        "Children on other hosts ({}) need vmoved on this host and on those: fork there with `vfork create VM --count N --to NODE`, \
         or from a program with `vmove_client::Client`", nodes.join(", ")
    )]
    OtherHosts {
        /// The nodes that were named.
        nodes: Vec<String>,
    },
    /// A fork or a template.
    #[error(transparent)]
    Fork(#[from] ForkError),
    /// A VM.
    #[error(transparent)]
    Vm(#[from] RegistryError),
}
