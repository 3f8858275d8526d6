//! What sessions ask of QEMU about disks that move with their guest.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use vmove_qmp::QmpError;
use vmove_qmp::disks::{CopyError, CopyOrder, CopyState, DiskFact, ExportOrder};

/// The source's side.
#[async_trait]
pub trait CopiesDisks: Send + Sync + fmt::Debug {
    /// All media in the guest's drives.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn disks(&self) -> Result<Vec<DiskFact>, QmpError>;

    /// Begins a copy, of no more than `speed` bytes per second (0: no limit).
    ///
    /// # Errors
    /// [`QmpError`]; nothing has begun then.
    async fn begin_copy(&self, order: &CopyOrder, speed: u64) -> Result<(), QmpError>;

    /// How far all copies are.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn copies(&self) -> Result<Vec<CopyState>, QmpError>;

    /// Limits a copy to so many bytes per second (0: no limit).
    ///
    /// # Errors
    /// [`QmpError`].
    async fn set_copy_speed(&self, number: usize, speed: u64) -> Result<(), QmpError>;

    /// From here on the guest waits for both disks when it writes.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn hold_copy_in_step(&self, number: usize) -> Result<(), QmpError>;

    /// Ends the copies of a guest that stands still: each holds what its disk holds when this returns.
    ///
    /// # Errors
    /// [`CopyError`]; then no copy may be used.
    async fn finish_copies(&self, numbers: &[usize], deadline: Duration) -> Result<(), CopyError>;

    /// Takes away all that copies have left in QEMU, wherever they stand.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn give_up_copies(&self, deadline: Duration) -> Result<(), QmpError>;
}

/// The destination's side.
#[async_trait]
pub trait TakesDisks: Send + Sync + fmt::Debug {
    /// Lets images be written by the socket, which QEMU makes.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn export_disks(&self, socket: &Path, images: &[ExportOrder]) -> Result<(), QmpError>;

    /// Ends the exports of so many images: from here on QEMU alone writes to its disks.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn end_exports(&self, images: usize) -> Result<(), QmpError>;

    /// Waits until the disks on these images hold what was written to them.
    ///
    /// # Errors
    /// [`QmpError`].
    async fn flush_disks(&self, images: &[PathBuf]) -> Result<(), QmpError>;
}
