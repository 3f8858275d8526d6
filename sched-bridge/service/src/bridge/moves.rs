//! Leases follow migrations: the destination is leased before a VM moves, the source released after.

use sched_bridge::model::{Assignment, NodeName, VmName};

use super::transactions::{guarded, update_lease};
use super::{Attempt, Bridge, BridgeError};
use crate::lease::{Held, Lease, LeaseId, Part};

/// Where a VM runs after a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// On the destination.
    Arrived,
    /// Still on the source.
    Stayed,
}

impl Bridge {
    /// Leases the destination of a VM's migration, in addition to its home and under the same lease. Repeating the call changes
    /// nothing.
    ///
    /// # Errors
    /// The destination is not free, the VM is being moved elsewhere, or the store does not answer.
    pub async fn reserve_move(&self, to: &Assignment) -> Result<LeaseId, BridgeError> {
        // Its remote GPUs stay with its home until it has arrived, and then go on with it.
        let to = &to.without_remote();
        self.change(|view| {
            let entry = view.lease_of(&to.vm)?;
            let mut lease = Lease::clone(&entry.lease);
            let incoming =
                lease.held.iter().find(|held| held.part == Part::Incoming && held.assignment.vm == to.vm);
            match incoming {
                Some(held) if held.assignment == *to => return Ok(Attempt::Done(lease.id)),
                Some(held) => return Err(BridgeError::moving(held)),
                None => {}
            }
            view.occupancy().take(view.fleet(), to)?;
            lease.count(&self.clock.stamp());
            lease.held.push(Held {
                assignment: to.clone(),
                part: Part::Incoming,
                seen: false,
                growing: false,
            });
            let txn = guarded(update_lease(&lease, entry.revision), view, &to.node);
            Ok(Attempt::Commit(txn, lease.id))
        })
        .await
    }

    /// After a migration: releases the source if the VM has arrived, the destination if it stayed.
    ///
    /// # Errors
    /// The VM's lease has ended, or the store does not answer.
    pub async fn settle_move(&self, vm: &VmName, to: &NodeName, arrival: Arrival) -> Result<(), BridgeError> {
        self.change(|view| {
            let entry = view.lease_of(vm)?;
            let mut lease = Lease::clone(&entry.lease);
            let of_vm = |held: &Held| held.assignment.vm == *vm;
            let incoming =
                |held: &Held| of_vm(held) && held.part == Part::Incoming && held.assignment.node == *to;
            let Some(at) = lease.held.iter().position(incoming) else { return Ok(Attempt::Done(())) };
            lease.count(&self.clock.stamp());
            let incoming = lease.held.remove(at);
            if arrival == Arrival::Arrived {
                // In place: VMs stay in the sequence of the request.
                if let Some(home) = lease.held.iter_mut().find(|held| of_vm(held)) {
                    // What ran there runs here: the lease is kept. A list of this node's VMs that is older than the migration ends
                    // nothing, because the VM was not known here when it was asked for.
                    let assignment = incoming.assignment.with_remote_of(&home.assignment);
                    *home = Held { assignment, part: Part::Home, seen: home.seen, growing: home.growing };
                }
            }
            Ok(Attempt::Commit(update_lease(&lease, entry.revision), ()))
        })
        .await
    }
}
