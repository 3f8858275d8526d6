//! `vfork promote`, and what `vmove migrate` does first.

use std::sync::Arc;

use crate::check;
use crate::disk;
use crate::rehome::{self, Rehomed};
use vmove_node::blocking::run_blocking;
use vmove_node::record::VmRecord;
use vmove_qmp::Client;
use vmove_qmp::inspect::VmFacts;

use super::ForkEngine;
use super::devices::Returned;
use super::error::ForkError;
use vmove_types::fork::{DiskChain, Promoted};
use vmove_types::fork_devices::Parting;

impl ForkEngine {
    /// Gives a VM memory of its own, if it has none.
    ///
    /// # Errors
    /// [`ForkError`]: its memory is what it was then.
    pub async fn promote(self: Arc<Self>, name: String) -> Result<Promoted, ForkError> {
        let _claim = self.claim(&name)?;
        self.registry.not_in_session(&name)?;
        let record = self.registry.vms().get(&name)?;
        let private = self.members.get(&record).is_some_and(|m| !m.private.is_empty());
        let (client, facts) = self.registry.inspect(&record).await?;
        let disks = disk::chains(&client).await?;
        let (done, returned) = if private {
            self.rehome_without_devices(&record, &client, &facts).await?
        } else {
            (Rehomed::default(), Returned::default())
        };
        Ok(Promoted {
            vm: name,
            was_private: private,
            bytes: done.bytes,
            rounds: done.rounds,
            pause_ms: done.pause_ms,
            total_ms: done.total_ms,
            devices: returned.devices,
            disks: disks
                .into_iter()
                .map(|chain| DiskChain { device: chain.device, files: chain.files })
                .collect(),
        })
    }

    /// The same once the guest has let its devices go, which it gets back.
    async fn rehome_without_devices(
        self: &Arc<Self>,
        record: &VmRecord,
        client: &Client,
        facts: &VmFacts,
    ) -> Result<(Rehomed, Returned), ForkError> {
        let id = uuid::Uuid::new_v4().simple().to_string();
        let mut away = self.stays_with_devices(&id, &record.name, Parting::default());
        let done = match self.detach_devices(&mut away, record, client).await {
            Ok(()) => self.rehome(record, client, facts).await,
            Err(error) => Err(error),
        };
        match done {
            Ok(done) => Ok((done, self.return_devices(away).await)),
            Err(error) => Err(self.return_after(away, &id, error).await),
        }
    }

    /// Memory of its own for a VM that is known to have none, and has no device of the node plugged in: what such a device writes is not seen, and
    /// its mapping would stay as it was. The caller has claimed it.
    pub(super) async fn rehome(
        &self,
        record: &VmRecord,
        client: &Client,
        facts: &VmFacts,
    ) -> Result<Rehomed, ForkError> {
        let Some(mut member) = self.members.get(record) else { return Ok(Rehomed::default()) };
        // It may have been done before, and that could not be written down.
        let looked_at = record.clone();
        let private = run_blocking(move || check::is_private(&looked_at)).await??;
        let done = if private {
            rehome::rehome(record, &member.private, client, facts).await?
        } else {
            Rehomed::default()
        };
        member.private = Vec::new();
        self.members.put(&member)?;
        tracing::info!(vm = %record.name, bytes = done.bytes, rounds = done.rounds, pause_ms = done.pause_ms,
            total_ms = done.total_ms, "memory of its own again");
        Ok(done)
    }
}
