//! Disks of forks: records follow what QEMU has, and prepared children lie over images that are still the parent's.

use vmove_clone::disk::{self, Disk, Step};
use vmove_clone::record::ForkRecord;
use vmove_clone::report::FrozenDisk;
use vmove_migrate::journal::Journal;
use vmove_qmp::Client;

use super::Forks;
use super::children::Prepared;
use super::problem::clone_problem;
use crate::api::problem::Problem;
use crate::server::registry::{off_worker, store_problem};

impl Forks {
    /// Writes down which overlays a VM has got: its command line names them from now on.
    pub(super) async fn follow_disks(
        &self,
        vm: &str,
        client: &Client,
        steps: &[Step],
    ) -> Result<(), Problem> {
        let done = disk::switched(client, steps).await.map_err(|e| clone_problem(&e))?;
        if done.is_empty() {
            return Ok(());
        }
        let record = self.registry.vms.get(vm).map_err(|e| store_problem(&e))?;
        let followed = disk::follow(&record, &done).map_err(|e| clone_problem(&e))?;
        let vms = self.registry.vms.clone();
        off_worker(move || vms.put(followed)).await?.map_err(|e| store_problem(&e))
    }

    /// Ends prepared children whose overlays lie over other images than the parent has now: it was forked in between.
    pub(super) fn drop_outdated(&self, prepared: &mut Vec<Prepared>, disks: &[Disk]) {
        let (useful, outdated): (Vec<_>, Vec<_>) =
            prepared.drain(..).partition(|one| one.child.plan.is_over(disks));
        *prepared = useful;
        for one in outdated {
            tokio::spawn(one.discard());
        }
    }
}

/// What a fork's report says of disks.
pub(super) fn frozen_disks(journal: &Journal<ForkRecord>) -> Vec<FrozenDisk> {
    let frozen = |step: &Step| FrozenDisk {
        device: step.disk.device.clone(),
        base: step.disk.file.clone(),
        overlay: step.overlay.path.clone(),
    };
    journal.record().disks.iter().map(frozen).collect()
}
