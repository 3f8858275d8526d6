//! `vfork promote`, and what `vmove migrate` does first.

use std::sync::Arc;

use vmove_clone::disk;
use vmove_clone::rehome::{self, Rehomed};
use vmove_migrate::vm::VmRecord;
use vmove_qmp::Client;
use vmove_qmp::inspect::VmFacts;

use super::Forks;
use super::problem::clone_problem;
use crate::api::forks::{DiskChain, Promoted};
use crate::api::problem::Problem;
use crate::server::registry::store_problem;

impl Forks {
    /// Gives a VM memory of its own, if it has none.
    pub async fn promote(self: Arc<Self>, name: String) -> Result<Promoted, Problem> {
        let _busy = self.claim(&name)?;
        self.registry.not_in_session(&name)?;
        let record = self.registry.vms.get(&name).map_err(|e| store_problem(&e))?;
        let private = self.members.get(&record).is_some_and(|m| !m.private.is_empty());
        let (client, facts) = self.registry.inspect(&record).await?;
        let disks = disk::chains(&client).await.map_err(|e| clone_problem(&e))?;
        let done = if private { self.rehome(&record, &client, &facts).await? } else { Rehomed::default() };
        Ok(Promoted {
            vm: name,
            was_private: private,
            bytes: done.bytes,
            rounds: done.rounds,
            pause_ms: done.pause_ms,
            total_ms: done.total_ms,
            disks: disks
                .into_iter()
                .map(|chain| DiskChain { device: chain.device, files: chain.files })
                .collect(),
        })
    }

    /// Memory of its own for a VM that is known to have none. The caller has claimed it.
    pub(super) async fn rehome(
        &self,
        record: &VmRecord,
        client: &Client,
        facts: &VmFacts,
    ) -> Result<Rehomed, Problem> {
        let Some(mut member) = self.members.get(record) else { return Ok(Rehomed::default()) };
        let done = rehome::rehome(record, &member.private, client, facts).await;
        let done = done.map_err(|e| clone_problem(&e))?;
        member.private = Vec::new();
        self.members.put(&member).map_err(|e| clone_problem(&e))?;
        tracing::info!(vm = %record.name, bytes = done.bytes, rounds = done.rounds, pause_ms = done.pause_ms,
            total_ms = done.total_ms, "memory of its own again");
        Ok(done)
    }
}
