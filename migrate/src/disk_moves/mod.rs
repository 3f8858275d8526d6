//! A disk gets another image on its host, while its guest runs: `vmove move-disk`.
//!
//! QEMU copies the disk into a new image (`blockdev-mirror`), and gives it to the guest once it lacks nothing. Until that switch the guest's
//! disk is the old image, whatever becomes of the new one. Each step is in a journal before it is taken; after a restart of the daemon QEMU
//! says which image the guest has.

mod begin;
mod error;
mod record;
mod run;

use std::path::PathBuf;
use std::sync::Arc;

use vmove_node::journal::Journal;
use vmove_types::disk_move::{DiskMove, DiskMoveState, VmDisk, VmDisks};
use vmove_types::problem::chain;

pub use begin::DiskHold;
pub use error::MoveDiskError;

use crate::disk_holds::Told;
use crate::engine::Engine;
use crate::node::Node;
use crate::source::disk_choice;
use record::{MoveRecord, Step};
use run::Mover;

/// The journals of moves: one file for each that has not ended.
fn journals(node: &Node) -> PathBuf {
    node.config.sessions_dir.with_file_name("disk-moves")
}

impl Engine {
    /// The disks of a guest, and the moves of its disks since this process began.
    ///
    /// # Errors
    /// [`MoveDiskError`].
    pub async fn disks(&self, vm: &str) -> Result<VmDisks, MoveDiskError> {
        let record = self.node.vms.get(vm)?;
        let monitor = self.node.config.vmm.monitor(&record).await?;
        let told = |disk: disk_choice::Known| VmDisk {
            name: disk.fact.name,
            names: disk.fact.names,
            file: disk.fact.file,
            format: disk.fact.format,
            size_bytes: disk.fact.size,
            allocated_bytes: disk.fact.allocated,
            read_only: disk.fact.read_only,
            obstacles: disk.obstacles.into_iter().map(|blocker| blocker.message).collect(),
        };
        let known = disk_choice::known(&record, monitor.disks().await?)?;
        let devices: Vec<String> = known.iter().map(|disk| disk.fact.device.clone()).collect();
        let counters = monitor.io_counters(&devices).await.unwrap_or_default();
        let moves = self.node.disk_moves.all_of(vm).iter().map(|told| told.now_with(&counters)).collect();
        Ok(VmDisks { disks: known.into_iter().map(told).collect(), moves })
    }

    /// The disk of this VM that gets another image now.
    #[must_use]
    pub fn moving_disk(&self, vm: &str) -> Option<String> {
        self.node.disk_moves.of(vm)
    }

    /// Whether a disk of this VM is about to be copied: the guest may stand still for that.
    #[must_use]
    pub fn begins_disk_move(&self, vm: &str) -> bool {
        self.node.disk_moves.begins(vm)
    }

    /// Calls the move of a disk off. Returns at once: [`Engine::disks`] tells its end.
    ///
    /// # Errors
    /// [`MoveDiskError::NotMoving`], [`MoveDiskError::TooLate`].
    pub fn cancel_disk_move(&self, vm: &str, disk: &str) -> Result<DiskMove, MoveDiskError> {
        let all = self.node.disk_moves.all_of(vm);
        let is_it = |told: &&Arc<Told>| {
            let now = told.now();
            (now.disk == disk || now.names.iter().any(|name| name == disk)) && !now.state.has_ended()
        };
        let not_moving = || MoveDiskError::NotMoving { vm: vm.to_owned(), disk: disk.to_owned() };
        let told = all.iter().find(is_it).ok_or_else(not_moving)?;
        let now = told.now();
        if now.state != DiskMoveState::Copying {
            return Err(MoveDiskError::TooLate { vm: vm.to_owned(), disk: disk.to_owned() });
        }
        told.cancel.cancel();
        Ok(now)
    }

    /// Takes up the moves that an earlier process of this daemon left. Each holds its VM from here on.
    pub fn resume_disk_moves(self: &Arc<Self>) {
        let dir = journals(&self.node);
        let names = self.node.disk().list(&dir).unwrap_or_default();
        for path in names.into_iter().map(|entry| dir.join(entry.name)) {
            match Journal::<MoveRecord>::open_begun_on(self.node.disk(), &path) {
                Ok(Some(journal)) if journal.record().step == Step::Done => {
                    drop(self.node.disk().remove_file(&path));
                }
                Ok(Some(journal)) => self.resume(journal),
                // Its first step was not taken.
                Ok(None) => drop(self.node.disk().remove_file(&path)),
                Err(error) => {
                    let (path, error) = (path.display(), chain(&error));
                    tracing::error!(%path, error, "cannot read the journal of a move of a disk: see which image its QEMU has open");
                }
            }
        }
    }

    fn resume(&self, journal: Journal<MoveRecord>) {
        let record = journal.record();
        let (id, vm) = (record.id, record.vm.name.clone());
        let told = Told::new(record.told());
        if let Err(disk) = self.node.disk_moves.enter(Arc::clone(&told)) {
            tracing::error!(vm, disk, %id, "two disks of a VM move at once: the second is left as it is");
            return;
        }
        tracing::info!(vm, disk = record.disk, %id, step = ?record.step, "the move of a disk is taken up");
        Mover::new(Arc::clone(&self.node), journal, told).spawn();
    }
}
