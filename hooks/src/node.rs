//! Who carries out what hooks do to VMs.

use std::collections::BTreeMap;

use async_trait::async_trait;

use crate::Action;

/// A VM of the node, as hooks see it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// What the operator has said of it.
    pub labels: BTreeMap<String, String>,
    /// The hook whose fork made it, if one did.
    pub made_by: Option<String>,
}

/// What a hook wants done to a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// Id of the run.
    pub run: String,
    /// The hook.
    pub hook: String,
    /// The VM.
    pub vm: String,
    /// Hooks that have led to it, this one last.
    pub cause: Vec<String>,
    /// An earlier daemon had begun it.
    pub again: bool,
}

/// Why it was not done.
#[derive(Debug, thiserror::Error)]
pub enum ActError {
    /// Something else is being done to the VM. Its end is waited for.
    #[error("{0}")]
    Busy(String),
    /// The VM is not here any more. Nothing is left to be done.
    #[error("{0}")]
    Gone(String),
    /// It did not work.
    #[error("{0}")]
    Failed(String),
}

/// Carries out what hooks do to the VMs of a node.
#[async_trait]
pub trait Node: Send + Sync {
    /// A VM by its name.
    fn vm(&self, name: &str) -> Option<Vm>;

    /// All VMs.
    fn vms(&self) -> Vec<Vm>;

    /// Carries out any action but [`Action::Run`], to its end. Says what came of it. What was begun goes on if the future is dropped.
    async fn act(&self, action: &Action, order: Order) -> Result<String, ActError>;
}
