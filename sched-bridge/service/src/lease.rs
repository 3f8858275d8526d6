//! Leases: who has which devices, cores, memory and huge pages, and until when.

use std::fmt;
use std::str::FromStr;

use sched_bridge::model::{Assignment, ClusterName, DeviceKind, NodeName, VmName};
use sched_bridge::place::ClusterRequest;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::clock::Stamp;

/// Shortest time to live that a lease may have: a heartbeat must fit in.
pub const MIN_TTL_MS: u64 = 500;
/// Longest: 30 days.
pub const MAX_TTL_MS: u64 = 30 * 24 * 3600 * 1000;
/// What is taken if nobody says.
pub const DEFAULT_TTL_MS: u64 = 60_000;

/// An id that the holder may choose, so that a request that is repeated after an error gets the same lease again.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
pub struct LeaseId(String);

/// An id that cannot be one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no id: expected 1 to 64 of the characters A-Z a-z 0-9 . _ -")]
pub struct BadId(String);

impl LeaseId {
    /// An id that nobody else has.
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

/// Why a part of a lease is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// The VM is, or will be, here.
    #[default]
    Home,
    /// The VM is about to move here; its home is held, too.
    Incoming,
}

/// What one VM has on one node, under a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// What, and where.
    #[serde(flatten)]
    pub assignment: Assignment,
    /// Why.
    #[serde(default)]
    pub part: Part,
    /// The VM was seen running: from now on its end gives this part back.
    #[serde(default)]
    pub seen: bool,
}

/// What was used, as products of amount and time. Unit: milliseconds times the amount.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// Time that the lease was held.
    pub held_ms: u64,
    /// GPUs times time.
    pub gpu_ms: u64,
    /// Adapters and their virtual functions times time.
    pub adapter_ms: u64,
    /// Cores times time.
    pub core_ms: u64,
    /// Mebibytes (in and outside huge pages) times time.
    pub memory_mib_ms: u64,
}

/// A lease, as it is kept in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Its id.
    pub id: LeaseId,
    /// Who has it: a user, a job, a scheduler's name for it.
    pub holder: String,
    /// The virtual cluster.
    pub cluster: ClusterName,
    /// What was asked for, for plans that place it anew. Absent where the holder named nodes and devices itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<ClusterRequest>,
    /// What is held.
    pub held: Vec<Held>,
    /// Without a heartbeat for so long, it ends. Unit: milliseconds.
    pub ttl_ms: u64,
    /// Heartbeats so far.
    #[serde(default)]
    pub beats: u64,
    /// When it was granted.
    pub granted: Stamp,
    /// Up to when usage is counted.
    pub counted: Stamp,
    /// What was used until then.
    #[serde(default)]
    pub usage: Usage,
    /// All of the usage is by clocks that do not jump.
    #[serde(default)]
    pub exact: bool,
}

impl Lease {
    /// Counts usage up to now, before something changes.
    pub fn count(&mut self, now: &Stamp) {
        let (ms, exact) = self.counted.until(now, self.ttl_ms.saturating_mul(2));
        let sum = |of: &dyn Fn(&Assignment) -> u64| -> u64 {
            self.held
                .iter()
                .fold(0, |sum: u64, held| sum.saturating_add(of(&held.assignment)))
                .saturating_mul(ms)
        };
        let devices = |a: &Assignment, network: bool| {
            a.devices
                .iter()
                .filter(|d| d.kind.is_network() == network && (network || d.kind == DeviceKind::Gpu))
                .count() as u64
        };
        let (gpu, adapter) = (sum(&|a| devices(a, false)), sum(&|a| devices(a, true)));
        let (core, memory) = (sum(&|a| u64::from(a.cores())), sum(&|a| a.memory().0));
        let usage = &mut self.usage;
        usage.held_ms = usage.held_ms.saturating_add(ms);
        usage.gpu_ms = usage.gpu_ms.saturating_add(gpu);
        usage.adapter_ms = usage.adapter_ms.saturating_add(adapter);
        usage.core_ms = usage.core_ms.saturating_add(core);
        usage.memory_mib_ms = usage.memory_mib_ms.saturating_add(memory);
        self.exact &= exact;
        self.counted = now.clone();
    }

    /// The nodes that something is held on, each once, by name.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeName> {
        let mut nodes: Vec<NodeName> = self.held.iter().map(|held| held.assignment.node.clone()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// What a VM has at home.
    #[must_use]
    pub fn home(&self, vm: &VmName) -> Option<&Held> {
        self.held.iter().find(|held| held.part == Part::Home && held.assignment.vm == *vm)
    }

    /// Names of VMs, at home.
    pub fn vms(&self) -> impl Iterator<Item = &VmName> {
        self.held.iter().filter(|held| held.part == Part::Home).map(|held| &held.assignment.vm)
    }
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
