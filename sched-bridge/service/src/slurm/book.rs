//! Bookings on nodes that Slurm has, too: looked at with Slurm itself, at the moment of the booking.
//!
//! Before something is placed, nodes on which Slurm's jobs run are taken out. After, the nodes of the new lease are reserved at once:
//! from then on Slurm starts no job there. Whatever it had started until then is seen by the look that follows, and the booking is
//! made anew somewhere else. So no job and no VM come onto one node, whoever is first.

use std::collections::BTreeSet;
use std::sync::Arc;

use sched_bridge::model::NodeName;

use super::SlurmError;
use super::follow::{Follow, RESERVATION};
use crate::bridge::{Ask, Bridge, BridgeError, Granted, Want};
use crate::lease::LeaseId;

/// How often a booking is made anew because Slurm was faster.
const TRIES: u32 = 4;

/// Why nothing was booked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BookError {
    /// The bridge refuses.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// Slurm does not answer. What was booked is given back.
    #[error("on nodes of Slurm nothing is booked without it: {0}")]
    Slurm(SlurmError),
    /// Slurm was faster each time.
    #[error(
        "Slurm started jobs on the nodes that had just been chosen, {TRIES} times; nothing is booked: ask again"
    )]
    Overtaken,
}

impl From<SlurmError> for BookError {
    fn from(error: SlurmError) -> Self {
        match error {
            SlurmError::Bridge(error) => Self::Bridge(error),
            error => Self::Slurm(error),
        }
    }
}

impl Follow {
    /// Gives a lease as [`Bridge::grant`] does, on nodes on which no job of Slurm's runs, and keeps Slurm off them.
    ///
    /// # Errors
    /// It does not fit, or Slurm does not answer.
    pub async fn book(&self, bridge: &Arc<Bridge>, ask: Ask) -> Result<Granted, BookError> {
        let _alone = self.alone.lock().await;
        for _ in 0..TRIES {
            self.keep_off_jobs(bridge).await?;
            let granted = bridge.grant(ask.clone()).await?;
            if granted.again {
                return Ok(granted);
            }
            match self.reserve(bridge, &granted).await {
                Ok(true) => return Ok(granted),
                Ok(false) => self.give_back(bridge, &granted).await?,
                Err(error) => {
                    self.give_back(bridge, &granted).await?;
                    return Err(error.into());
                }
            }
            // What the caller has placed himself is not placed anew.
            if matches!(ask.want, Want::Exactly(..)) {
                break;
            }
        }
        Err(BookError::Overtaken)
    }

    /// Keeps Slurm off the nodes of a lease; false if it had started a job there before.
    async fn reserve(&self, bridge: &Bridge, granted: &Granted) -> Result<bool, SlurmError> {
        let known: BTreeSet<NodeName> = self.slurm.nodes().await?.into_iter().map(|node| node.name).collect();
        let nodes: Vec<NodeName> =
            granted.lease.nodes().into_iter().filter(|node| known.contains(node)).collect();
        if nodes.is_empty() {
            return Ok(true);
        }
        // Where VMs of others are, a job that was there before is left alone.
        let others = |node: &NodeName, view: &crate::bridge::View| {
            let on = |held: &crate::lease::Held| held.assignment.node == *node;
            view.leases()
                .values()
                .any(|own| own.lease.id != granted.lease.id && own.lease.held.iter().any(on))
        };
        let name = format!("{RESERVATION}{}", granted.lease.id);
        if self.slurm.hold(&name, &nodes, &self.users).await.is_err() {
            // That of an earlier lease of this name may still be there.
            self.slurm.hold_instead(&name, &nodes).await?;
        }
        let (busy, view) = (self.busy().await?, bridge.view()?);
        Ok(!nodes.iter().any(|node| busy.contains(node) && !others(node, &view)))
    }

    /// Lets Slurm have the nodes of a lease that has ended, at once. What cannot be deleted now is deleted by the next look.
    pub async fn ended(&self, id: &LeaseId) {
        let _alone = self.alone.lock().await;
        if let Err(error) = self.slurm.let_go(&format!("{RESERVATION}{id}")).await {
            tracing::debug!(lease = %id, %error, "a reservation stays until the next look");
        }
    }

    async fn give_back(&self, bridge: &Bridge, granted: &Granted) -> Result<(), BookError> {
        bridge.release(&granted.lease.id).await?;
        // What cannot be deleted now is deleted by the next look.
        let _ = self.slurm.let_go(&format!("{RESERVATION}{}", granted.lease.id)).await;
        Ok(())
    }
}
