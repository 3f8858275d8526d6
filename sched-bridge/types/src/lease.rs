//! What leases are made of.

use std::fmt;
use std::str::FromStr;

use sched_bridge::model::Assignment;
use serde::{Deserialize, Serialize};

/// Id of a lease or plan. A client may choose it, so that a request repeated after an error returns the same lease.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(try_from = "String", into = "String")]
pub struct LeaseId(String);

/// A text that is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an id: expected 1 to 64 of the characters A-Z a-z 0-9 . _ -")]
pub struct BadId(String);

impl LeaseId {
    /// A new random id.
    #[must_use]
    pub fn unique() -> Self {
        Self(uuid::Uuid::new_v4().to_string())
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for LeaseId {
    type Err = BadId;

    fn from_str(text: &str) -> Result<Self, BadId> {
        let good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if (1..=64).contains(&text.len()) && text.bytes().all(good) {
            Ok(Self(text.to_owned()))
        } else {
            Err(BadId(text.to_owned()))
        }
    }
}

impl TryFrom<String> for LeaseId {
    type Error = BadId;
    fn try_from(text: String) -> Result<Self, BadId> {
        text.parse()
    }
}

impl From<LeaseId> for String {
    fn from(id: LeaseId) -> Self {
        id.0
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a node's resources are held for a VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// The VM runs, or will run, on this node.
    #[default]
    Home,
    /// The VM is to move to this node; its home is held as well.
    Incoming,
}

/// Resources of one node that a lease holds for one VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Held {
    /// The resources and the node.
    #[serde(flatten)]
    pub assignment: Assignment,
    /// Why they are held.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub part: Part,
    /// The VM is known to run on this node: it was started or listed there, or has arrived. While that is so, the lease needs no heartbeat.
    /// When the VM ends, these resources are released.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub seen: bool,
    /// The cluster was grown by this VM, and no node has said yet that it runs: growing it again starts it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub growing: bool,
}

/// Usage: amounts of resources times the duration of the lease. Unit: the amount times milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Usage {
    /// Duration of the lease. Unit: milliseconds.
    pub held_ms: u64,
    /// GPUs times time.
    pub gpu_ms: u64,
    /// Adapters and their virtual functions times time.
    pub adapter_ms: u64,
    /// vGPUs and MIG slices times time. 0 in records of older versions.
    #[serde(default)]
    pub gpu_share_ms: u64,
    /// Remote GPUs times time. 0 in records of older versions.
    #[serde(default)]
    pub remote_gpu_ms: u64,
    /// Cores times time.
    pub core_ms: u64,
    /// Mebibytes (in and outside huge pages) times time.
    pub memory_mib_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_cannot_break_keys() {
        for bad in ["", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert!(bad.parse::<LeaseId>().is_err(), "{bad}");
        }
        LeaseId::unique().as_str().parse::<LeaseId>().unwrap();
    }
}
