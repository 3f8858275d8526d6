//! The keys of the store.
//!
//! `lease/ID` is the one truth of who has what. `guard/NODE` is written whenever something is taken on a node, or the node itself
//! changes; a grant expects the guards of its nodes as it saw them. So of two bridges that grant at the same time on one
//! node, one fails and looks again. What is given back needs no guard: nobody is hurt who has not seen it yet.

use sched_bridge::model::NodeName;

use crate::lease::LeaseId;

/// All switches, as JSON.
pub const TOPOLOGY: &str = "topology";
/// What it begins with, if it is a node's inventory.
pub const NODES: &str = "node/";
/// A node's guard.
pub const GUARDS: &str = "guard/";
/// A lease.
pub const LEASES: &str = "lease/";
/// An accounting record.
pub const RECORDS: &str = "record/";
/// A move plan.
pub const PLANS: &str = "plan/";

/// A node's inventory.
#[must_use]
pub fn node(name: &NodeName) -> String {
    format!("{NODES}{name}")
}

/// A node's guard.
#[must_use]
pub fn guard(name: &NodeName) -> String {
    format!("{GUARDS}{name}")
}

/// A lease.
#[must_use]
pub fn lease(id: &LeaseId) -> String {
    format!("{LEASES}{id}")
}

/// The record of a lease that ended: sorted by time, one per lease.
#[must_use]
pub fn record(wall_ms: u64, id: &LeaseId) -> String {
    format!("{RECORDS}{wall_ms:015}-{id}")
}

/// A plan.
#[must_use]
pub fn plan(id: &LeaseId) -> String {
    format!("{PLANS}{id}")
}

/// Written to learn the number of the last transaction, by a bridge that catches up before it refuses something.
pub const PULSE: &str = "pulse";
