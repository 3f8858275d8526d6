//! What sessions ask of QEMU about disks that move with their guest. By default it moves none: somebody else sees to its disks.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use vmove_qmp::QmpError;
use vmove_qmp::disks::{
    CopyError, CopyOrder, CopyState, DiskCounters, DiskFact, ExportOrder, MoveOrder, MoveState, OldImage,
    StreamState,
};
use vmove_types::disk_latency::DiskIo;

fn moves_none(command: &str) -> QmpError {
    let (class, description) =
        ("GenericError".to_owned(), "vmove does not move the disks of this QEMU".to_owned());
    QmpError::Refused { command: command.to_owned(), class, description }
}

/// The source's side.
#[async_trait]
pub trait CopiesDisks: Send + Sync + fmt::Debug {
    /// All media in the guest's drives.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn disks(&self) -> Result<Vec<DiskFact>, QmpError> {
        Ok(Vec::new())
    }

    /// Begins copies, each of no more than `speed` bytes per second (0: no limit). How long the guest stood still for it.
    ///
    /// # Errors
    /// The place of the disk that cannot be copied, and [`QmpError`]; nothing has begun then.
    async fn begin_copies(&self, _orders: &[CopyOrder], _speed: u64) -> Result<Duration, (usize, QmpError)> {
        Err((0, moves_none("blockdev-mirror")))
    }

    /// How far all copies are.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn copies(&self) -> Result<Vec<CopyState>, QmpError> {
        Ok(Vec::new())
    }

    /// Limits a copy to so many bytes per second (0: no limit).
    ///
    /// # Errors
    /// [`QmpError`].
    async fn set_copy_speed(&self, _number: usize, _speed: u64) -> Result<(), QmpError> {
        Err(moves_none("block-job-set-speed"))
    }

    /// Whether the guest waits for both disks when it writes from the begin of a copy on.
    fn guest_writes_both(&self) -> bool {
        false
    }

    /// From here on the guest waits for both disks when it writes.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn hold_copy_in_step(&self, _number: usize) -> Result<(), QmpError> {
        Err(moves_none("block-job-change"))
    }

    /// Ends the copies of a guest that stands still: each holds what its disk holds when this returns.
    ///
    /// # Errors
    /// [`CopyError`]; then no copy may be used.
    async fn finish_copies(&self, _numbers: &[usize], _deadline: Duration) -> Result<(), CopyError> {
        Err(moves_none("block-job-cancel").into())
    }

    /// What the guest has done with the disks behind these front ends since its QEMU was started; nothing where that is not counted.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn io_counters(&self, _devices: &[String]) -> Result<Vec<Option<DiskCounters>>, QmpError> {
        Ok(Vec::new())
    }

    /// Has QEMU count how many requests take how long, where nobody else has it do so.
    async fn begin_io_histograms(&self, _devices: &[String]) {}

    /// Ends what [`CopiesDisks::begin_io_histograms`] began.
    async fn end_io_histograms(&self) {}

    /// Takes away all that copies have left in QEMU, wherever they stand.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn give_up_copies(&self, _deadline: Duration) -> Result<(), QmpError> {
        Ok(())
    }
}

/// A disk gets another image in the same QEMU.
#[async_trait]
pub trait MovesDisks: Send + Sync + fmt::Debug {
    /// Begins to copy a disk, no more than `speed` bytes per second (0: no limit). How long the guest stood still for it.
    ///
    /// # Errors
    /// [`QmpError`]; if it is a refusal, nothing has begun.
    async fn begin_move(&self, _order: &MoveOrder, _speed: u64) -> Result<Duration, QmpError> {
        Err(moves_none("blockdev-mirror"))
    }

    /// Limits the copy of a move to so many bytes per second (0: no limit).
    ///
    /// # Errors
    /// [`QmpError`].
    async fn set_move_speed(&self, _id: &str, _speed: u64) -> Result<(), QmpError> {
        Err(moves_none("block-job-set-speed"))
    }

    /// Where a move stands; `None` if QEMU knows nothing of it.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn move_state(&self, _id: &str) -> Result<Option<MoveState>, QmpError> {
        Ok(None)
    }

    /// From here on the guest waits for both images when it writes.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn hold_move_in_step(&self, _id: &str) -> Result<(), QmpError> {
        Err(moves_none("block-job-change"))
    }

    /// Gives the guest the new image.
    ///
    /// # Errors
    /// [`QmpError`]; it may have been done all the same.
    async fn switch_image(&self, _id: &str, _deadline: Duration) -> Result<(), QmpError> {
        Err(moves_none("block-job-complete"))
    }

    /// Closes the old image after the switch.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn close_old_image(&self, _id: &str, _old: &OldImage, _deadline: Duration) -> Result<(), QmpError> {
        Ok(())
    }

    /// Takes away all that a move has left in QEMU before the switch.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn undo_move(&self, _id: &str, _deadline: Duration) -> Result<(), QmpError> {
        Ok(())
    }
}

/// Disks that have moved are compared, on either side. `vm_dir` is QEMU's working folder, `socket` where it lets them be read.
#[async_trait]
pub trait ComparesDisks: Send + Sync + fmt::Debug {
    /// At the destination, before the guest runs: notes what it writes to its disks on these images.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn note_writes(&self, _vm_dir: &Path, _images: &[PathBuf]) -> Result<(), QmpError> {
        Err(moves_none("block-dirty-bitmap-add"))
    }

    /// At the source: lets images be read as the guest has left them.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn export_left(&self, _socket: &Path, _vm_dir: &Path, _images: &[PathBuf]) -> Result<(), QmpError> {
        Err(moves_none("block-export-add"))
    }

    /// At the destination: lets the guest's disks be read while it works on them.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn export_present(
        &self,
        _socket: &Path,
        _vm_dir: &Path,
        _images: &[PathBuf],
    ) -> Result<(), QmpError> {
        Err(moves_none("block-export-add"))
    }

    /// At the destination: lets it be read, beside the disks, what was noted of the guest's writes by now.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn export_writes(&self, _vm_dir: &Path, _images: &[PathBuf]) -> Result<(), QmpError> {
        Err(moves_none("block-export-add"))
    }

    /// Takes away what a comparison has left in QEMU, wherever it stands.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn end_comparison(&self, _socket: &Path, _keep_noting: bool) -> Result<(), QmpError> {
        Ok(())
    }
}

/// The destination's side.
#[async_trait]
pub trait TakesDisks: Send + Sync + fmt::Debug {
    /// Lets images be written by the socket, which QEMU makes.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn export_disks(&self, _socket: &Path, _images: &[ExportOrder]) -> Result<(), QmpError> {
        Err(moves_none("block-export-add"))
    }

    /// Ends the exports of so many images: from here on QEMU alone writes to its disks.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn end_exports(&self, _images: usize) -> Result<(), QmpError> {
        Ok(())
    }

    /// Waits until the disks on these images hold what was written to them.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn flush_disks(&self, _images: &[PathBuf]) -> Result<(), QmpError> {
        Ok(())
    }

    /// Brings what these images lack from those below them, no more than `speed` bytes per second (0: no limit). How far each is; to be asked again
    /// and again.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn bring_disks(&self, images: &[PathBuf], _speed: u64) -> Result<Vec<StreamState>, QmpError> {
        Ok(images.iter().map(|_| StreamState { whole: true, ..StreamState::default() }).collect())
    }

    /// What the guest has done with the disks on these images since it runs here; nothing where that is not counted.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn io_of_images(&self, _images: &[PathBuf]) -> Result<Vec<Option<DiskIo>>, QmpError> {
        Ok(Vec::new())
    }
}
