//! Requests and answers about migrations.

use serde::{Deserialize, Serialize};

use crate::choice::Choice;
use crate::progress::Progress;
use crate::spec::{MigrationSpec, ModeRequest};

/// Where a VM shall go.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub struct CheckQuery {
    /// Name from the configuration, or `host:port`.
    pub to: String,
    /// Devices of the other node for those that the guest owns, each as in the options of a migration, with `;` between them.
    #[serde(default)]
    pub devices: Option<String>,
    /// Disks that are to move along, as in the options of a migration, with `;` between them.
    #[serde(default)]
    pub disks: Option<String>,
    /// Where they are to be, each `NAME=PATH`, with `;` between them.
    #[serde(default)]
    pub disk_map: Option<String>,
    /// Whether the disks are to follow the guest, as in the options of a migration.
    #[serde(default)]
    pub disks_after: Option<bool>,
    /// How memory is to cross: `auto` (default), `precopy`, `postcopy` or `hybrid`.
    #[serde(default)]
    pub mode: Option<ModeRequest>,
    /// As in the options of a migration.
    #[serde(default)]
    pub bandwidth: Option<u64>,
    /// As in the options of a migration.
    #[serde(default)]
    pub max_downtime_ms: Option<u64>,
    /// As in the goals of a migration.
    #[serde(default)]
    pub max_pause_ms: Option<u64>,
    /// As in the goals of a migration.
    #[serde(default)]
    pub within_ms: Option<u64>,
    /// As in the options of a migration.
    #[serde(default)]
    pub reads_bytes: Option<u64>,
    /// As in the options of a migration.
    #[serde(default)]
    pub reads_near_bytes_per_s: Option<u64>,
    /// As in the goals of a migration.
    #[serde(default)]
    pub host_cpu_percent: Option<u64>,
}

/// Starts a migration.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// Name of the VM.
    pub vm: String,
    /// Name from the configuration, or `host:port`.
    pub to: String,
    /// Options; what is left out has its default.
    #[serde(default)]
    pub options: MigrationSpec,
}

/// A request was taken.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Taken {
    /// Id of the migration.
    pub id: String,
    /// What was done first (a guest whose memory is private since a fork was given memory of its own), or what the request has cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// How the guest goes, if that was chosen by what it is to read there: a visit, or a migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice: Option<Choice>,
}

/// Has the guest's copy at the source run again.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReclaimRequest {
    /// Must be true: the caller knows that the guest has ended at the destination. It would run twice otherwise.
    pub guest_is_lost: bool,
}

/// Which migrations are listed.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
pub struct ListQuery {
    /// Only those at work, those that hold a paused guest, and those that have just ended: nothing is read from the disk.
    #[serde(default)]
    pub live: bool,
}

/// Migrations of a node, running ones first, then newest first.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MigrationList {
    /// Snapshots.
    pub migrations: Vec<Progress>,
}
