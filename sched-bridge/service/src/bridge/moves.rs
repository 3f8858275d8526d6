//! A VM changes its node: the new place is taken before it moves, the old one given back after.

use sched_bridge::model::{Assignment, NodeName, VmName};

use super::grant::{guarded, json};
use super::{Bridge, BridgeError, Step};
use crate::keys;
use crate::lease::{Held, Lease, LeaseId, Part};
use crate::store::{Expect, Txn};

/// How a move ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// The VM runs at the new place.
    Arrived,
    /// It stayed where it was.
    Stayed,
}

impl Bridge {
    /// Takes the place that a VM is to move to, under its own lease. Its home stays taken. Asked again for the same place, it is
    /// already done.
    ///
    /// # Errors
    /// The place is not free, the VM is already on its way elsewhere, or the store does not answer.
    pub async fn reserve_move(&self, to: &Assignment) -> Result<LeaseId, BridgeError> {
        self.change(|view| {
            let known = view.lease_of(&to.vm)?;
            let mut lease = Lease::clone(&known.lease);
            let incoming =
                lease.held.iter().find(|held| held.part == Part::Incoming && held.assignment.vm == to.vm);
            match incoming {
                Some(held) if held.assignment == *to => return Ok(Step::Done(lease.id)),
                Some(held) => {
                    return Err(BridgeError::Moving { vm: to.vm.clone(), to: held.assignment.node.clone() });
                }
                None => {}
            }
            view.occupancy().take(view.fleet(), to)?;
            lease.count(&self.clock.stamp());
            lease.held.push(Held { assignment: to.clone(), part: Part::Incoming, seen: false });
            let key = keys::lease(&lease.id);
            let txn = Txn::default().expect(&key, Expect::At(known.revision)).put(key, json(&lease));
            Ok(Step::Commit(guarded(txn, view, &to.node), lease.id))
        })
        .await
    }

    /// Gives back the place that a VM left, or the one that it did not go to.
    ///
    /// # Errors
    /// The VM's lease has ended, or the store does not answer.
    pub async fn settle_move(&self, vm: &VmName, to: &NodeName, arrival: Arrival) -> Result<(), BridgeError> {
        self.change(|view| {
            let known = view.lease_of(vm)?;
            let mut lease = Lease::clone(&known.lease);
            let mine = |held: &Held| held.assignment.vm == *vm;
            let Some(at) = lease
                .held
                .iter()
                .position(|held| mine(held) && held.part == Part::Incoming && held.assignment.node == *to)
            else {
                return Ok(Step::Done(()));
            };
            lease.count(&self.clock.stamp());
            let incoming = lease.held.remove(at);
            if arrival == Arrival::Arrived {
                // In the place of the old one: the order of VMs is the order of the request.
                if let Some(home) = lease.held.iter_mut().find(|held| mine(held)) {
                    // Not seen there yet: a list of that node's VMs may be older than the move.
                    *home = Held { part: Part::Home, seen: false, ..incoming };
                }
            }
            let key = keys::lease(&lease.id);
            let txn = Txn::default().expect(&key, Expect::At(known.revision)).put(key, json(&lease));
            Ok(Step::Commit(txn, ()))
        })
        .await
    }
}
