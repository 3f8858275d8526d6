//! Everything that stands in the way of a migration, found before anything is changed.

pub(crate) mod destination;
pub mod fabric;
pub(crate) mod source;

pub use destination::learn_qemus;
use serde::{Deserialize, Serialize};

/// One reason why a VM cannot move as asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocker {
    /// A stable word for programs: `ram-not-shared`, `vhost-user`, `vfio`, `qemu-version`, `machine-type`,
    /// `no-pagemap-scan`, `memory`, `huge-pages`, `disk-not-shared`, `direct-io`, `name-taken`, `busy`, ...
    pub code: String,
    /// What was expected, what was found, what to do: for people.
    pub message: String,
    /// The device, block node, memory backend or file it is about, if any.
    pub subject: Option<String>,
    /// It only rules out these modes (empty: it rules out all). Example: `no-pagemap-scan` leaves `postcopy`.
    pub modes: Vec<String>,
}

impl Blocker {
    /// A blocker for every mode.
    #[must_use]
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), subject: None, modes: Vec::new() }
    }

    /// Names what it is about.
    #[must_use]
    pub fn about(mut self, subject: impl Into<String>) -> Self {
        self.subject = Some(subject.into());
        self
    }

    /// Restricts it to some modes.
    #[must_use]
    pub fn only_for(mut self, modes: &[crate::spec::Mode]) -> Self {
        self.modes = modes.iter().map(|m| m.to_string()).collect();
        self
    }

    /// Whether it rules out `mode`.
    #[must_use]
    pub fn rules_out(&self, mode: crate::spec::Mode) -> bool {
        self.modes.is_empty() || self.modes.iter().any(|m| m == mode.as_str())
    }
}

/// The answer to `vmove check`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Name of the VM.
    pub vm: String,
    /// The node asked about.
    pub destination: String,
    /// All blockers; empty when the VM can move in every mode.
    pub blockers: Vec<Blocker>,
    /// What is not a blocker but should be known (direct I/O, slow backing, ...).
    pub warnings: Vec<String>,
    /// Modes that remain.
    pub modes: Vec<String>,
    /// Fabric that would be used and why.
    pub fabric: String,
}
