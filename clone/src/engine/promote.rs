//! Memory of its own for a VM whose memory is private since a fork: right after the fork, and by `vfork promote`.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::CloneError;
use crate::disk;
use crate::rehome::{HowFar, Rehome};
use vmove_node::blocking::run_blocking;
use vmove_node::record::VmRecord;
use vmove_node::registry::process_of;
use vmove_node::reservations::{Reservation, Wanted};
use vmove_qmp::Client;
use vmove_qmp::inspect::VmFacts;
use vmove_types::Backing;

use super::ForkEngine;
use super::devices::Returned;
use super::error::ForkError;
use vmove_types::fork::{DiskChain, Promoted};
use vmove_types::fork_devices::Parting;
use vmove_types::fork_report::OwnMemory;

/// For `cont`, on a machine that is busy.
const RESUME_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a fork tells how far its guest is.
const TELL_INTERVAL: Duration = Duration::from_millis(100);

/// A guest that was forked, and whose memory is private since.
#[derive(Debug, Clone)]
pub(super) struct Forked {
    pub(super) record: VmRecord,
    pub(super) client: Client,
    pub(super) facts: VmFacts,
}

impl ForkEngine {
    /// Gives a VM memory of its own, if it has none.
    ///
    /// # Errors
    /// [`ForkError`]: the guest runs on with what it has.
    pub async fn promote(self: Arc<Self>, name: String) -> Result<Promoted, ForkError> {
        let _claim = self.claim_at_home(&name).await?;
        self.registry.not_at_work(&name)?;
        let record = self.registry.vms().get(&name)?;
        let (client, facts) = self.registry.inspect(&record).await?;
        let disks = disk::chains(&client).await?;
        let was_private = self.members.get(&record).is_some_and(|m| !m.private.is_empty());
        let (own_memory, returned) = self.rehome_without_devices(&record, &client, &facts).await?;
        Ok(Promoted {
            vm: name,
            was_private,
            own_memory,
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
    ) -> Result<(Option<OwnMemory>, Returned), ForkError> {
        if self.members.get(record).is_none_or(|member| member.private.is_empty()) {
            return Ok((None, Returned::default()));
        }
        let id = uuid::Uuid::new_v4().simple().to_string();
        let mut away = self.stays_with_devices(&id, &record.name, Parting::default());
        let done = match self.detach_devices(&mut away, record, client).await {
            Ok(()) => self.rehome(None, record, client, facts).await,
            Err(error) => Err(error),
        };
        match done {
            Ok(done) => Ok((done, self.return_devices(away).await)),
            Err(error) => Err(self.return_after(away, &id, error).await),
        }
    }

    /// Memory of its own for a VM that has none; `None` if it has. The caller has claimed it, and no device of the node is plugged in: what
    /// such a device writes is not seen, and its mapping would stay as it was. `fork` tells how far it is, if it is done for one.
    pub(super) async fn rehome(
        &self,
        fork: Option<&str>,
        record: &VmRecord,
        client: &Client,
        facts: &VmFacts,
    ) -> Result<Option<OwnMemory>, ForkError> {
        let Some(mut member) = self.members.get(record).filter(|m| !m.private.is_empty()) else {
            return Ok(None);
        };
        let rehome = Rehome::look(record, &member.private).await?;
        // It may have been done before, and that could not be written down.
        let done = if rehome.is_done() {
            None
        } else {
            let room = self.room_of_its_own(record, rehome.needed()?).await?;
            let note = |stops| {
                member.stopped_to_move = stops;
                self.members.put(&member)
            };
            let far = Arc::new(HowFar::default());
            let work = rehome.run(&self.registry, client, facts, self.standby.as_deref(), &far, note);
            let done = self.telling(fork, &far, work).await;
            drop(room);
            if member.stopped_to_move && done.is_err() {
                member.stopped_to_move = false;
                self.members.put(&member)?;
            }
            Some(done?)
        };
        (member.private, member.stopped_to_move) = (Vec::new(), false);
        self.members.put(&member)?;
        tracing::info!(vm = %record.name, ?done, "memory of its own again");
        Ok(done)
    }

    /// Does the work while the fork tells how far it is.
    async fn telling<T>(&self, fork: Option<&str>, far: &HowFar, work: impl Future<Output = T>) -> T {
        let Some(fork) = fork else { return work.await };
        let mut work = std::pin::pin!(work);
        loop {
            self.update(fork, |p| p.rehome = far.progress());
            tokio::select! {
                done = &mut work => return done,
                () = sleep(TELL_INTERVAL) => {}
            }
        }
    }

    /// As [`Self::rehome`], right after a fork. Says why if it cannot be done: then it is done when the guest is next forked or moved.
    pub(super) async fn rehome_after_fork(
        &self,
        fork: &str,
        guest: &Forked,
    ) -> (Option<OwnMemory>, Option<String>) {
        self.update(fork, |p| p.phase = "rehome".to_owned());
        match self.rehome(Some(fork), &guest.record, &guest.client, &guest.facts).await {
            Ok(done) => (done, None),
            // Then nothing is left to be said of its memory.
            Err(_) if process_of(&guest.record).is_none() => (None, None),
            Err(error) => {
                let (vm, why) = (&guest.record.name, error.message());
                tracing::warn!(%fork, %vm, %why, "the guest has no memory of its own after a fork");
                let warning = format!(
                    "{vm} runs on with private memory, over that of its children; it gets memory of its own when it is next forked or \
                     moved, or by `vfork promote {vm}`. Now it could not: {why}"
                );
                (None, Some(warning))
            }
        }
    }

    /// Sets VMs running whose memory an earlier life of the daemon was moving while it had them stopped for a moment.
    pub(super) async fn resume_stopped(&self) {
        for mut member in self.members.list().into_iter().filter(|member| member.stopped_to_move) {
            let Ok(record) = self.registry.vms().get(&member.vm) else { continue };
            if self.members.get(&record).is_none() {
                continue;
            }
            member.stopped_to_move = false;
            let resumed = async {
                let client = self.registry.monitor(&record).await?;
                client
                    .execute_raw("cont", serde_json::Value::Null, RESUME_TIMEOUT)
                    .await
                    .map_err(CloneError::from)?;
                Ok::<_, ForkError>(self.members.put(&member)?)
            };
            if let Err(error) = resumed.await {
                tracing::error!(vm = %member.vm, why = %error.message(), "a VM may be paused since its memory was moved: `vmove resume` sets it running");
            }
        }
    }

    async fn room_of_its_own(&self, record: &VmRecord, needed: u64) -> Result<Reservation, ForkError> {
        let reservations = self.registry.reservations().clone();
        let holder = format!("memory of its own for {:?}", record.name);
        let (backing, files) = (record.backing, record.ram.iter().map(|ram| ram.path.clone()).collect());
        let wanted = Wanted { backing, guest_bytes: needed, host_bytes: 0 };
        let work = move || {
            let fits = |rooms: &vmove_node::reservations::Rooms| {
                let mib = needed.div_ceil(1 << 20);
                let (what, hint) = match backing {
                    Backing::Thp => ("memory", "free some, or end children that share its memory as it was"),
                    _ => ("free huge pages", "reserve more with vm.nr_hugepages"),
                };
                if needed <= rooms.guest.left() {
                    return Ok(());
                }
                let text =
                    format!("memory of its own needs {mib} MiB of {what}, found {}: {hint}", rooms.guest);
                Err(CloneError::NoRoom(text))
            };
            let reserved = reservations.reserve(&holder, wanted, fits).map_err(CloneError::from)??;
            reserved.in_files(files);
            Ok::<_, CloneError>(reserved)
        };
        Ok(run_blocking(work).await??)
    }
}
