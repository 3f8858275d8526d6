//! Guests that were left without their devices: by a daemon that was killed, or by a fork that is not undone yet.

use std::sync::Arc;
use std::time::Duration;

use vmove_node::registry::process_of;

use super::owed::Owed;
use crate::engine::{Claim, ForkEngine};

/// Between looks whether a guest may be held.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Between tries to reach a QEMU that does not answer.
const ASK_AGAIN: Duration = Duration::from_secs(5);

impl ForkEngine {
    /// Takes up what an earlier life of the daemon left. Call this when the forks of that life hold their VMs.
    pub(in crate::engine) fn recover_devices(self: &Arc<Self>) {
        for owed in Owed::left(&self.owed_devices()) {
            tokio::spawn(self.clone().return_when_free(owed));
        }
    }

    /// Gives guests what is owed to them, as soon as no fork is at work on them.
    pub(super) async fn return_when_free(self: Arc<Self>, owed: Owed) {
        let record = owed.record();
        let journal = self.journals.join(format!("{}.jsonl", record.id));
        for guest in record.guests {
            let claim = self.claimed_at_last(&guest.vm).await;
            while journal.exists() {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            self.return_to(&owed, &guest.vm).await;
            drop(claim);
        }
    }

    async fn claimed_at_last(self: &Arc<Self>, vm: &str) -> Claim {
        loop {
            if let Ok(claim) = self.claim(vm) {
                return claim;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    async fn return_to(self: &Arc<Self>, owed: &Owed, vm: &str) {
        loop {
            let lives = self.registry.vms().get(vm).is_ok_and(|record| process_of(&record).is_some());
            if !lives {
                return owed.settle(vm);
            }
            let returned = self.return_owed(owed, vm).await;
            if owed.of(vm) == vmove_node::guest_devices::Detached::default() {
                let (devices, lacks) = (returned.devices.len(), returned.missing.len());
                tracing::warn!(
                    vm,
                    devices,
                    lacks,
                    "a guest that an interrupted fork had asked for its devices was seen to"
                );
                return;
            }
            tracing::error!(vm, missing = ?returned.missing, "a guest could not be given its devices back: trying again");
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }
}
