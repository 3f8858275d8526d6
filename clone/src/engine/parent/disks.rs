//! Disks of forks: records follow what QEMU has, and prepared children lie over images that are still the parent's.

use std::time::Duration;

use crate::disk::{self, Disk, Step};
use crate::record::ForkRecord;
use vmove_node::journal::Journal;
use vmove_qmp::Client;
use vmove_types::fork_report::FrozenDisk;

use crate::engine::ForkEngine;
use crate::engine::children::Prepared;
use crate::engine::error::ForkError;
use vmove_node::blocking::run_blocking;

/// Between looks at a record that could not be written.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

impl ForkEngine {
    /// Writes down which overlays a VM has got: its command line names them from now on.
    pub(in crate::engine) async fn follow_disks(
        &self,
        vm: &str,
        client: &Client,
        steps: &[Step],
    ) -> Result<(), ForkError> {
        let done = disk::switched(client, steps).await?;
        if done.is_empty() {
            return Ok(());
        }
        let record = self.registry.vms().get(vm)?;
        let followed = disk::follow(&record, &done)?;
        let vms = self.registry.vms().clone();
        // The guest writes there already: whoever moves it must know, whether this can be written down or not.
        Ok(run_blocking(move || vms.put_owing(followed)).await??)
    }

    /// Waits until the record of a VM is on the disk. As long as it is not, the journal of its fork must stay: by that the next life finds out
    /// which disks the VM has.
    pub(in crate::engine) async fn until_written(&self, vm: &str) {
        while self.registry.vms().owed(vm).is_some() {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
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
