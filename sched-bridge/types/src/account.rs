//! Accounting records.

use std::collections::BTreeMap;

use sched_bridge::model::VmName;
use serde::{Deserialize, Serialize};

use crate::lease::{LeaseId, Usage};

/// How a lease ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// Its holder released it.
    Released,
    /// No heartbeat came in time.
    Expired,
    /// All its VMs have ended.
    VmsEnded,
}

/// The record of a lease that has ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Record {
    /// The lease.
    pub lease: LeaseId,
    /// Its holder.
    pub holder: String,
    /// The project, if the request named one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// The virtual cluster.
    pub cluster: String,
    /// How it ended.
    pub end: End,
    /// When it was granted, by the time of day. Unit: milliseconds since 1970-01-01 00:00 UTC.
    pub granted_wall_ms: u64,
    /// When it ended, likewise. If the time of day has jumped, the difference of the two is wrong; `usage` is not.
    pub ended_wall_ms: u64,
    /// What was used.
    pub usage: Usage,
    /// GPU-hours: `usage.gpu_ms` / 3 600 000.
    pub gpu_hours: f64,
    /// Adapter-hours, of whole adapters and virtual functions: `usage.adapter_ms` / 3 600 000. 0 in records of older versions.
    #[serde(default)]
    pub adapter_hours: f64,
    /// Hours of vGPUs and MIG slices: `usage.gpu_share_ms` / 3 600 000. 0 in records of older versions.
    #[serde(default)]
    pub gpu_share_hours: f64,
    /// Hours of remote GPUs: `usage.remote_gpu_ms` / 3 600 000. 0 in records of older versions.
    #[serde(default)]
    pub remote_gpu_hours: f64,
    /// The usage of each VM, by name. Empty in records of older versions.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(value_type = BTreeMap<String, Usage>))]
    pub vms: BTreeMap<VmName, Usage>,
    /// All of the usage was measured by clocks that do not jump. Otherwise a part of it spans a reboot or several machines and was
    /// measured by the time of day, at most twice the time to live for each gap.
    pub exact: bool,
}
