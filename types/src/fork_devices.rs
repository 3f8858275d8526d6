//! Devices of guests that are forked: how the guest lets them go, and what is told of them.

use serde::{Deserialize, Serialize};

use crate::spec::MigrationSpec;

/// How a guest is asked for its devices, and what is run in it before and after.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parting {
    /// Run in the guest before it is asked.
    pub quiesce: Option<String>,
    /// Run in the guest, and in each child, once it has its devices.
    pub resume: Option<String>,
    /// Longest time that each of the two may take, in milliseconds.
    pub script_timeout_ms: u64,
    /// Longest time that the guest may take to let a device go, in milliseconds.
    pub unplug_timeout_ms: u64,
}

impl Default for Parting {
    fn default() -> Self {
        let MigrationSpec { script_timeout_ms, unplug_timeout_ms, .. } = MigrationSpec::default();
        Self { quiesce: None, resume: None, script_timeout_ms, unplug_timeout_ms }
    }
}

/// How a request has a guest asked for its devices. What it leaves out is as for migrations.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PartingRequest {
    /// Run in the guest by its agent (`/bin/sh -c`) before it is asked to let its devices go, such as to stop a job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesce: Option<String>,
    /// Run in the guest by its agent (`/bin/sh -c`) when it has its devices again, and in each child when it has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume: Option<String>,
    /// Longest time that each of the two may take. Unit: milliseconds; 1 to 600,000; default 30,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub script_timeout_ms: Option<u64>,
    /// Longest time that the guest may take to let a device go. Unit: milliseconds; 1,000 to 600,000; default 20,000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unplug_timeout_ms: Option<u64>,
}

impl PartingRequest {
    /// With what it leaves out.
    ///
    /// # Errors
    /// A time is out of range.
    pub fn parting(&self) -> Result<Parting, String> {
        let usual = MigrationSpec::default();
        let asked = MigrationSpec {
            quiesce: self.quiesce.clone(),
            resume: self.resume.clone(),
            script_timeout_ms: self.script_timeout_ms.unwrap_or(usual.script_timeout_ms),
            unplug_timeout_ms: self.unplug_timeout_ms.unwrap_or(usual.unplug_timeout_ms),
            ..usual
        };
        asked.validate()?;
        let MigrationSpec { quiesce, resume, script_timeout_ms, unplug_timeout_ms, .. } = asked;
        Ok(Parting { quiesce, resume, script_timeout_ms, unplug_timeout_ms })
    }
}

/// A device that a guest let go so that its memory could be frozen or mapped anew, and got back. Times are in milliseconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ParentDevice {
    /// What it is to the guest.
    pub role: String,
    /// Its address.
    pub address: String,
    /// From the first request to the guest until it had let the device go.
    pub unplug_ms: f64,
    /// From then until it was about to be plugged in again. Absent if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub away_ms: Option<f64>,
    /// Until it was plugged in. QEMU's main loop stands meanwhile: all guest memory is pinned, and what is private is copied. Absent if it
    /// was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plug_ms: Option<f64>,
    /// The three together: how long the guest was without it, apart from the time that it stood still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outage_ms: Option<f64>,
    /// Why the guest lacks it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The command that gives it to the guest then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}

/// A device of a child.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ChildDeviceReport {
    /// What it is to the guest.
    pub role: String,
    /// Its address on the child's node.
    pub address: String,
    /// Its MAC address, if vmove gave it one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// How long it took to plug it in, in milliseconds; absent if that failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plug_ms: Option<f64>,
    /// Why the child lacks it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The command that gives it to the child then, on the child's node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}
