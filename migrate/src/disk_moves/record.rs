//! What a move of a disk must find again after a restart of the daemon.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmove_node::peer::SessionId;
use vmove_node::record::VmRecord;
use vmove_qmp::disks::DiskCounters;
use vmove_types::disk::{DiskPace, DiskProgress, SourceDisks};
use vmove_types::disk_move::{DiskMove, DiskMoveState};

use crate::records::LeftImage;

/// Bytes of an id that QEMU is told: its names have 31 at most.
const SHORT: usize = 12;

/// Where a move stands. Each step is written down before it is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Step {
    /// The new image is made; QEMU knows nothing of it.
    Making,
    /// It is filled, and the guest's disk is the old one.
    Copying,
    /// QEMU was asked to give the guest the new image. Which one the guest has, its QEMU knows.
    Switching,
    /// The guest has the new image.
    Moved,
    /// Nothing is left to do, but for the removal of this journal.
    Done,
}

/// A move of a disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct MoveRecord {
    pub id: SessionId,
    /// The VM as it was when the move began.
    pub vm: VmRecord,
    /// The disk's name.
    pub disk: String,
    pub names: Vec<String>,
    /// Its node before the switch.
    pub node: String,
    /// Its file as QEMU names it.
    pub file: PathBuf,
    /// The files of the images below it, as QEMU names them.
    pub below: Vec<PathBuf>,
    /// Its file as the command line has it.
    pub image: String,
    /// Its path, with the links that lead to it.
    pub written: PathBuf,
    pub from: LeftImage,
    pub to: LeftImage,
    /// The new image is a block device.
    pub is_device: bool,
    pub format: String,
    /// The old image was made for this VM alone, and goes when that ends.
    pub own: bool,
    pub source_disks: SourceDisks,
    /// The most that the copy may take, in bytes per second.
    #[serde(default)]
    pub bandwidth: Option<u64>,
    /// What the guest keeps of its pace. Journals of older versions have neither.
    #[serde(default)]
    pub disk_pace: Option<DiskPace>,
    /// The guest ran, and may stand still since the copy begins: then it runs again.
    pub stops_guest: bool,
    pub began_at: String,
    /// By which QEMU's commands know its front end.
    #[serde(default)]
    pub device: String,
    /// What the guest had done with it by then.
    #[serde(default)]
    pub counted: Option<DiskCounters>,
    pub step: Step,
}

impl MoveRecord {
    /// The name by which QEMU knows the move.
    pub(super) fn short_id(&self) -> String {
        let mut id = self.id.to_string().replace('-', "");
        id.truncate(SHORT);
        id
    }

    /// What is told of it when it is taken up.
    pub(super) fn told(&self) -> DiskMove {
        let shown = |path: &Path| path.to_string_lossy().into_owned();
        DiskMove {
            id: self.id.to_string(),
            vm: self.vm.name.clone(),
            disk: self.disk.clone(),
            names: self.names.clone(),
            from: shown(&self.from.path),
            to: shown(&self.to.path),
            format: self.format.clone(),
            state: match self.step {
                Step::Making | Step::Copying => DiskMoveState::Copying,
                Step::Switching => DiskMoveState::Switching,
                Step::Moved | Step::Done => DiskMoveState::Closing,
            },
            began_at: self.began_at.clone(),
            progress: DiskProgress { name: self.disk.clone(), ..DiskProgress::default() },
            ..DiskMove::default()
        }
    }
}
