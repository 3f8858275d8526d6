//! What a host could do better for its VMs, with the command that does it.
//!
//! Sources: A. J. Younge, "Architectural principles and experimentation of distributed high performance virtual clusters" (2016): VMs on the
//! NUMA socket of their GPU and adapter, huge pages, an IOMMU, no over-commitment of processors; Red Hat, "Optimizing virtual machine performance"; AMD, "EPYC
//! tuning guides: virtualization"; the kernel's `admin-guide/pm/cpuidle.rst`, `admin-guide/mm/transhuge.rst`, `admin-guide/sysctl/kernel.rst`
//! (`numa_balancing`) and `core-api/irq/irq-affinity.rst`.

mod host;
mod interrupts;
mod vm;

use std::io;
use std::path::PathBuf;

use vmove_types::tuning::{Advice, AdviceState};

pub use self::host::of_host;
pub use self::vm::{Looked, of_vm};

use crate::cpus::Cpus;
use crate::host::Host;

/// The host that is looked at.
#[derive(Debug)]
pub struct Look<'a> {
    /// Where its `/sys` and `/proc` are.
    pub root: PathBuf,
    /// Its processors and memory.
    pub host: &'a Host,
    /// Processors that VMs have for themselves.
    pub dedicated: Cpus,
    /// Whether a VM has a device of the host, or could have one.
    pub passthrough: bool,
}

impl Look<'_> {
    /// The trimmed text of a file, if it can be read.
    fn read(&self, path: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.root.join(path)).ok()?;
        Some(text.trim().to_owned())
    }

    /// Names in a folder, sorted.
    fn list(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }
}

/// One thing that was looked at, and the files that make it better.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What is told.
    pub advice: Advice,
    writes: Vec<(PathBuf, String)>,
}

impl Finding {
    fn new(topic: &str, state: AdviceState, found: impl Into<String>) -> Self {
        let advice = Advice {
            topic: topic.to_owned(),
            vm: None,
            state,
            found: found.into(),
            better: None,
            command: None,
        };
        Self { advice, writes: Vec::new() }
    }

    fn good(topic: &str, found: impl Into<String>) -> Self {
        Self::new(topic, AdviceState::Good, found)
    }

    fn unknown(topic: &str, found: impl Into<String>) -> Self {
        Self::new(topic, AdviceState::Unknown, found)
    }

    /// It could be better, by this command of the operator.
    fn better(topic: &str, found: impl Into<String>, why: &str, command: impl Into<String>) -> Self {
        let mut this = Self::new(topic, AdviceState::Better, found);
        this.advice.better = Some(why.to_owned());
        this.advice.command = Some(command.into());
        this
    }

    /// It could be better, by these files with these contents.
    fn writes(
        topic: &str,
        found: impl Into<String>,
        why: &str,
        files: Vec<(PathBuf, String)>,
        command: String,
    ) -> Self {
        let mut this = Self::better(topic, found, why, command);
        this.advice.state = AdviceState::CanApply;
        this.writes = files;
        this
    }

    /// Writes the files. What cannot be written is told in place of what would be better.
    pub fn apply(&mut self) {
        if self.writes.is_empty() {
            return;
        }
        let written: io::Result<()> =
            self.writes.iter().try_for_each(|(path, text)| std::fs::write(path, text));
        match written {
            Ok(()) => self.advice.state = AdviceState::Applied,
            Err(error) => {
                self.advice.state = AdviceState::Better;
                let why = self.advice.better.take().unwrap_or_default();
                self.advice.better = Some(format!("{why}; could not be applied: {error}"));
            }
        }
    }
}
