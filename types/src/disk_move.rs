//! A disk gets another image on its host, while its guest runs.

use serde::{Deserialize, Serialize};

use crate::disk::{DiskPace, DiskProgress, SourceDisks};
use crate::disk_latency::DiskLatency;

/// `POST /v1/vms/{name}/disks/{disk}/move`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MoveDiskRequest {
    /// The new image: a file that is not there yet, or a block device of the disk's size. An absolute path.
    pub to: String,
    /// Limit of the copy in bytes per second.
    #[serde(default)]
    pub bandwidth: Option<u64>,
    /// The share of its pace that the guest keeps at the disk meanwhile. Per cent, 0 to 95; default 75.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(value_type = u8))]
    pub disk_pace: DiskPace,
    /// What becomes of the old image in the end.
    #[serde(default)]
    pub source_disks: SourceDisks,
}

/// Where a move of a disk stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum DiskMoveState {
    /// The new image is being made, and filled while the guest works on the old one.
    #[default]
    Copying,
    /// The guest gets the new image: its requests wait meanwhile. It can no longer be cancelled.
    Switching,
    /// The guest works on the new image; the old one is being closed and put aside.
    Closing,
    /// The guest has the new image.
    Moved,
    /// The guest has the old image, and nothing is left of the new one.
    Cancelled,
    /// It has failed; `error` says why, and which image the guest has.
    Failed,
}

impl DiskMoveState {
    /// Whether it has ended.
    #[must_use]
    pub const fn has_ended(self) -> bool {
        matches!(self, Self::Moved | Self::Cancelled | Self::Failed)
    }
}

/// A move of a disk: how far it is, or what came of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct DiskMove {
    /// Its id.
    pub id: String,
    /// The VM.
    pub vm: String,
    /// The disk.
    pub disk: String,
    /// All names that it answers to.
    pub names: Vec<String>,
    /// The old image.
    pub from: String,
    /// The new image.
    pub to: String,
    /// `raw` or `qcow2`.
    pub format: String,
    /// Where it stands.
    pub state: DiskMoveState,
    /// When it began, in UTC, as RFC 3339 has it.
    pub began_at: String,
    /// How far the copy is.
    pub progress: DiskProgress,
    /// How long the guest stood still when the copy began, in milliseconds. 0 with QEMUs before 8.0 and from 11.1 on,
    /// and if it was paused.
    pub begin_pause_ms: f64,
    /// From its begin until the copy was in step, in milliseconds.
    pub copy_ms: Option<f64>,
    /// How long the switch took, in milliseconds: requests of the guest to this disk waited at most that long. The guest itself does not stop.
    pub switch_ms: Option<f64>,
    /// How long the guest's requests to this disk took, before, during and after.
    pub latency: DiskLatency,
    /// Where the old image is now; `None` if it was deleted, or is still the guest's.
    pub left_at: Option<String>,
    /// What could not be done after the switch.
    pub problem: Option<String>,
    /// Why it failed.
    pub error: Option<String>,
}

/// A disk of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct VmDisk {
    /// Its name.
    pub name: String,
    /// All names that it answers to.
    pub names: Vec<String>,
    /// Its file, device or server.
    pub file: String,
    /// Such as `raw` or `qcow2`.
    pub format: String,
    /// Size that the guest sees, in bytes.
    pub size_bytes: u64,
    /// Bytes that the image takes, those of the images below it included.
    pub allocated_bytes: u64,
    /// The guest can only read it.
    pub read_only: bool,
    /// Why it can neither be moved nor copied along; empty if it can.
    pub obstacles: Vec<String>,
}

/// `GET /v1/vms/{name}/disks`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct VmDisks {
    /// The disks that the guest has now.
    pub disks: Vec<VmDisk>,
    /// Moves of its disks since the daemon was started, the newest first.
    pub moves: Vec<DiskMove>,
}
