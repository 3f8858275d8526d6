//! Where QEMU says a migration stands.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// `MigrationStatus` of QMP. Open: a status of a newer QEMU is kept by name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
#[non_exhaustive]
pub enum MigrationStatus {
    /// No migration has taken place.
    None,
    /// Being set up.
    Setup,
    /// Under way, guest running.
    Active,
    /// The guest is stopped and drained, QEMU waits for `migrate-continue`.
    PreSwitchover,
    /// Device state is being saved.
    Device,
    /// Being cancelled.
    Cancelling,
    /// Cancelled.
    Cancelled,
    /// Everything was sent (source) or loaded (destination).
    Completed,
    /// Gave up.
    Failed,
    /// Anything else, by QEMU's name.
    Other(String),
}

impl MigrationStatus {
    /// Whether QEMU is done with the migration, well or badly.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, Self::None | Self::Cancelled | Self::Completed | Self::Failed)
    }

    /// QEMU's name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::None => "none",
            Self::Setup => "setup",
            Self::Active => "active",
            Self::PreSwitchover => "pre-switchover",
            Self::Device => "device",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Other(name) => name,
        }
    }
}

impl From<String> for MigrationStatus {
    fn from(name: String) -> Self {
        match name.as_str() {
            "none" => Self::None,
            "setup" => Self::Setup,
            "active" => Self::Active,
            "pre-switchover" => Self::PreSwitchover,
            "device" => Self::Device,
            "cancelling" => Self::Cancelling,
            "cancelled" => Self::Cancelled,
            "completed" => Self::Completed,
            "failed" => Self::Failed,
            _ => Self::Other(name),
        }
    }
}

impl From<MigrationStatus> for String {
    fn from(status: MigrationStatus) -> Self {
        status.name().to_owned()
    }
}

impl fmt::Display for MigrationStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The part of `query-migrate` that vmove needs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MigrationInfo {
    /// Where it stands.
    pub status: MigrationStatus,
    /// QEMU's words on a failure.
    pub error: Option<String>,
    /// What stands in the way of any migration of this guest, in QEMU's words.
    pub blocked: Vec<String>,
}

impl MigrationInfo {
    pub(crate) fn from_reply(reply: &Value) -> Self {
        let text = |name: &str| reply.get(name).and_then(Value::as_str).map(str::to_owned);
        let blocked = reply.get("blocked-reasons").and_then(Value::as_array);
        Self {
            // Before the first migration the reply has no status at all.
            status: text("status").unwrap_or_else(|| "none".to_owned()).into(),
            error: text("error-desc"),
            blocked: blocked
                .map(|all| all.iter().filter_map(|one| one.as_str().map(str::to_owned)).collect())
                .unwrap_or_default(),
        }
    }
}
