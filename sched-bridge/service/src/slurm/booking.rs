//! Leases on nodes that Slurm uses as well: checked with Slurm at the moment of the booking.
//!
//! First, nodes on which Slurm's jobs run are leased, so that nothing is placed there. Then the request is placed, and its nodes are
//! reserved at once: from then on Slurm starts no job there. Jobs that Slurm had started by then are found by another look, and the
//! request is placed again. So no job and no VM come onto one node, whichever is first.

use std::collections::BTreeSet;
use std::sync::Arc;

use sched_bridge::model::NodeName;

use super::SlurmError;
use super::follower::{RESERVATION_PREFIX, SlurmFollower};
use crate::bridge::{Bridge, BridgeError, GrantRequest, Granted, View, Wanted};
use crate::lease::LeaseId;

/// Attempts to book while Slurm is faster.
const MAX_ATTEMPTS: u32 = 4;

/// Why nothing was booked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BookingError {
    /// The bridge refuses.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// Slurm does not answer. What was booked has been released.
    #[error("nodes of Slurm are leased only while Slurm answers: {0}")]
    Slurm(SlurmError),
    /// Slurm was faster each time.
    #[error(
        "Slurm started jobs on the chosen nodes {MAX_ATTEMPTS} times in a row; nothing was reserved: repeat the request"
    )]
    Overtaken,
}

impl From<SlurmError> for BookingError {
    fn from(error: SlurmError) -> Self {
        match error {
            SlurmError::Bridge(error) => Self::Bridge(error),
            error => Self::Slurm(error),
        }
    }
}

impl SlurmFollower {
    /// Grants a lease as [`Bridge::grant`] does, on nodes without jobs of Slurm, and reserves these nodes in Slurm.
    ///
    /// # Errors
    /// It does not fit, or Slurm does not answer.
    pub async fn book(&self, bridge: &Arc<Bridge>, request: GrantRequest) -> Result<Granted, BookingError> {
        let _exclusive = self.exclusive.lock().await;
        for _ in 0..MAX_ATTEMPTS {
            self.lease_busy_nodes(bridge).await?;
            let granted = bridge.grant(request.clone()).await?;
            if granted.again {
                return Ok(granted);
            }
            match self.reserve(bridge, &granted).await {
                Ok(true) => return Ok(granted),
                Ok(false) => self.undo(bridge, &granted).await?,
                Err(error) => {
                    self.undo(bridge, &granted).await?;
                    return Err(error.into());
                }
            }
            // The caller chose the nodes: there is no other placement.
            if matches!(request.wanted, Wanted::Assignments(..)) {
                break;
            }
        }
        Err(BookingError::Overtaken)
    }

    /// Reserves the nodes of a new lease in Slurm. False if Slurm had started a job on one of them before.
    async fn reserve(&self, bridge: &Bridge, granted: &Granted) -> Result<bool, SlurmError> {
        let slurm_nodes: BTreeSet<NodeName> =
            self.slurm.nodes().await?.into_iter().map(|node| node.name).collect();
        let nodes: Vec<NodeName> =
            granted.lease.nodes().into_iter().filter(|node| slurm_nodes.contains(node)).collect();
        if nodes.is_empty() {
            return Ok(true);
        }
        let name = format!("{RESERVATION_PREFIX}{}", granted.lease.id);
        if self.slurm.create_reservation(&name, &nodes, &self.users).await.is_err() {
            // The one of an earlier lease of this id may still exist.
            self.slurm.update_reservation(&name, &nodes).await?;
        }
        let (busy, view) = (self.busy_nodes().await?, bridge.view()?);
        // A job on a node with VMs of other leases was there before them, and is left alone.
        let has_others = |node: &NodeName, view: &View| {
            let mut leases = view.leases().values();
            leases.any(|entry| entry.lease.id != granted.lease.id && entry.lease.nodes().contains(node))
        };
        Ok(!nodes.iter().any(|node| busy.contains(node) && !has_others(node, &view)))
    }

    /// Deletes the reservation of a lease that has ended. If that fails, the next synchronization does so.
    pub async fn lease_ended(&self, id: &LeaseId) {
        let _exclusive = self.exclusive.lock().await;
        if let Err(error) = self.slurm.delete_reservation(&format!("{RESERVATION_PREFIX}{id}")).await {
            tracing::debug!(lease = %id, %error, "could not delete the reservation of an ended lease yet");
        }
    }

    /// Releases a new lease again.
    async fn undo(&self, bridge: &Bridge, granted: &Granted) -> Result<(), BookingError> {
        bridge.release(&granted.lease.id).await?;
        // If that fails, the next synchronization deletes it.
        let _ = self.slurm.delete_reservation(&format!("{RESERVATION_PREFIX}{}", granted.lease.id)).await;
        Ok(())
    }
}
