//! The keys of the store.
//!
//! Only `lease/ID` says which resources are leased. `guard/NODE` is written whenever resources of a node are leased, or the node
//! changes; a grant requires that the guards of its nodes have not changed. So of two bridges that lease resources of one node at the
//! same time, one fails and tries again. Releasing resources needs no guard: a bridge that has not seen it yet only leases less.
//! In the same way, `holder/NAME` is written whenever a holder with a quota is granted a lease.

use sched_bridge::model::NodeName;

use crate::lease::LeaseId;

/// The topology, as JSON.
pub const TOPOLOGY: &str = "topology";
/// Prefix of inventories.
pub const NODES: &str = "node/";
/// Prefix of guards.
pub const GUARDS: &str = "guard/";
/// Stands for the remote GPUs, which are of no node, among the guards.
pub const REMOTE_GPUS: &str = "remote-gpus";
/// Prefix of guards of holders with a quota.
pub const HOLDERS: &str = "holder/";
/// Prefix of leases.
pub const LEASES: &str = "lease/";
/// Prefix of accounting records.
pub const RECORDS: &str = "record/";
/// Prefix of checkpoints of clusters.
pub const CHECKPOINTS: &str = "checkpoint/";
/// Prefix of move plans.
pub const PLANS: &str = "plan/";

/// Key of a node's inventory.
#[must_use]
pub fn node(name: &NodeName) -> String {
    format!("{NODES}{name}")
}

/// Key of a node's guard.
#[must_use]
pub fn guard(name: &NodeName) -> String {
    format!("{GUARDS}{name}")
}

/// Key of the guard of a holder with a quota.
#[must_use]
pub fn holder(name: &str) -> String {
    format!("{HOLDERS}{name}")
}

/// Key of a lease.
#[must_use]
pub fn lease(id: &LeaseId) -> String {
    format!("{LEASES}{id}")
}

/// Key of the record of a lease that ended at `wall_ms`; keys sort by time.
#[must_use]
pub fn record(wall_ms: u64, id: &LeaseId) -> String {
    format!("{RECORDS}{wall_ms:015}-{id}")
}

/// Key of a plan.
#[must_use]
pub fn plan(id: &LeaseId) -> String {
    format!("{PLANS}{id}")
}

/// Key of a checkpoint.
#[must_use]
pub fn checkpoint(name: &LeaseId) -> String {
    format!("{CHECKPOINTS}{name}")
}

/// Written by a bridge that catches up before it refuses a request: the commit has the highest revision.
pub const PULSE: &str = "pulse";
