//! Transactions that several operations make.

use sched_bridge::model::{Assignment, NodeName};

use super::View;
use crate::account::{End, Record, record_of};
use crate::clock::Stamp;
use crate::keys;
use crate::lease::Lease;
use crate::store::{Expect, Revision, Txn};

/// Makes a transaction fail if something was taken on a node, or the node has changed, since the view.
pub(super) fn guarded(txn: Txn, view: &View, node: &NodeName) -> Txn {
    let key = keys::guard(node);
    txn.expect(&key, Expect::seen(view.guard(node))).put(key, "")
}

/// Writes a new lease, provided that nothing was taken on its nodes since the view.
pub(super) fn grant_lease(view: &View, lease: &Lease) -> Txn {
    let key = keys::lease(&lease.id);
    let txn = Txn::default().expect(&key, Expect::Absent).put(key, json(lease));
    let txn = lease.nodes().iter().fold(txn, |txn, node| guarded(txn, view, node));
    guarded_remote(txn, view, lease.held.iter().map(|held| &held.assignment))
}

/// Makes a transaction fail if remote GPUs were taken since the view, if these assignments have some: they are of no node, so no node's guard tells.
pub(super) fn guarded_remote<'a>(
    txn: Txn,
    view: &View,
    assignments: impl IntoIterator<Item = &'a Assignment>,
) -> Txn {
    let any = assignments.into_iter().any(|assignment| assignment.remote().next().is_some());
    let name = NodeName::new(keys::REMOTE_GPUS).ok().filter(|_| any);
    name.iter().fold(txn, |txn, name| guarded(txn, view, name))
}

/// Makes a transaction fail if the holder was granted anything since the view, so that two requests do not exceed a quota together.
pub(super) fn one_grant_at_a_time(txn: Txn, view: &View, holder: &str) -> Txn {
    let key = keys::holder(holder);
    txn.expect(&key, Expect::seen(view.holder(holder))).put(key, "")
}

/// Replaces a lease, provided that it is still the one written at `revision`.
pub(super) fn update_lease(lease: &Lease, revision: Revision) -> Txn {
    let key = keys::lease(&lease.id);
    Txn::default().expect(&key, Expect::At(revision)).put(key, json(lease))
}

/// Ends a lease, and writes its one accounting record in the same transaction.
pub(super) fn end_lease(lease: &Lease, revision: Revision, end: End, now: &Stamp) -> (Txn, Record) {
    let mut lease = lease.clone();
    lease.count(now);
    let record = record_of(&lease, end);
    let key = keys::lease(&lease.id);
    let txn = Txn::default()
        .expect(&key, Expect::At(revision))
        .delete(key)
        .put(keys::record(now.wall_ms, &lease.id), json(&record));
    (txn, record)
}

/// The JSON that is stored. Serializing the types of this crate cannot fail.
pub(super) fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
