//! What hooks hear of.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use vmove_types::time::Mono;

use crate::own::Own;

/// The name of an event: of QEMU, of our own, or of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Name {
    /// A QMP event, such as `MEMORY_FAILURE`.
    Qmp(String),
    /// Of this daemon.
    Own(Own),
    /// A memory error that the kernel has counted (EDAC).
    MemoryError,
    /// A line of NVIDIA's driver in the kernel log.
    GpuXid,
    /// A line of the kernel log.
    KernelLog,
    /// A file has appeared.
    File(std::path::PathBuf),
    /// The time of a timer has come. Each hook has its own.
    Timer {
        /// Name of the hook.
        hook: String,
    },
}

impl Name {
    /// As in the configuration.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Qmp(name) => name,
            Self::Own(own) => own.as_str(),
            Self::MemoryError => "memory-error",
            Self::GpuXid => "gpu-xid",
            Self::KernelLog => "kernel-log",
            Self::File(_) => "file",
            Self::Timer { .. } => "timer",
        }
    }

    /// Whether an action of a hook can cause it. What hardware, a guest or an operator's file does is never taken for a loop.
    pub(crate) fn can_be_caused(&self) -> bool {
        match self {
            Self::Own(_) => true,
            Self::Qmp(name) => CAUSED.contains(&name.as_str()),
            _ => false,
        }
    }
}

/// QMP events that moves, forks, pauses and ends make by themselves.
const CAUSED: &[&str] = &[
    "BLOCK_JOB_COMPLETED",
    "DEVICE_DELETED",
    "JOB_STATUS_CHANGE",
    "MIGRATION",
    "MIGRATION_PASS",
    "RESET",
    "RESUME",
    "SHUTDOWN",
    "STOP",
];

/// Something has happened, or is about to.
#[derive(Debug, Clone)]
pub struct Event {
    /// What.
    pub name: Name,
    /// The VM that it is about; none for an event of the host.
    pub vm: Option<String>,
    /// Labels of that VM, where whoever tells of the event knows them.
    pub labels: Option<BTreeMap<String, String>>,
    /// The facts, by name.
    pub data: Map<String, Value>,
    /// Hooks whose actions have led to it, the first one first.
    pub cause: Vec<String>,
    /// When this daemon heard of it.
    pub at: Mono,
}

impl Event {
    /// An event of the host.
    #[must_use]
    pub fn of_host(name: Name, data: Map<String, Value>) -> Self {
        Self { name, vm: None, labels: None, data, cause: Vec::new(), at: Mono::now() }
    }

    /// An event of our own, about a VM. `data` is an object.
    #[must_use]
    pub fn own(own: Own, vm: &str, data: Value) -> Self {
        let data = object(data);
        let (vm, at) = (Some(vm.to_owned()), Mono::now());
        Self { name: Name::Own(own), vm, labels: None, data, cause: Vec::new(), at }
    }

    /// An event of a VM's QEMU.
    #[must_use]
    pub fn qmp(event: &Arc<vmove_qmp::Event>, vm: &str) -> Self {
        let (vm, data) = (Some(vm.to_owned()), object(event.data.clone()));
        Self { name: Name::Qmp(event.name.clone()), vm, labels: None, data, cause: Vec::new(), at: event.at }
    }

    /// The same, which those hooks have led to.
    #[must_use]
    pub fn caused_by(mut self, cause: Vec<String>) -> Self {
        self.cause = cause;
        self
    }

    /// The same, with the labels of its VM.
    #[must_use]
    pub fn with_labels(mut self, labels: BTreeMap<String, String>) -> Self {
        self.labels = Some(labels);
        self
    }

    /// How long ago it was.
    pub(crate) fn age(&self) -> Duration {
        Mono::now().since(self.at)
    }
}

fn object(data: Value) -> Map<String, Value> {
    match data {
        Value::Object(map) => map,
        Value::Null => Map::new(),
        other => Map::from_iter([("value".to_owned(), other)]),
    }
}
